//! Values the way Python writes them: `str()`, `repr()`, `json.dumps`, and what `str.strip` takes for white space.
//!
//! Templates are written for Jinja on Python; where minijinja prints a value in Rust's way, a prompt would differ.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::fmt::Write;

/// What `str.isspace` takes for white space: Unicode's, and the four separators U+001C to U+001F.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `repr(float)`: shortest digits; an exponent below -4 or from 16 on, with a sign and at least two digits.
pub fn float_repr(value: f64) -> String {
    if value.is_nan() {
        return "nan".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// A float, when the value is a number that Python would hold as `float`.
fn as_float(value: &Value) -> Option<f64> {
    (value.kind() == ValueKind::Number && !value.is_integer()).then(|| f64::try_from(value.clone()).ok()).flatten()
}

/// `repr(str)`: single quotes unless only those occur inside.
fn string_repr(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            // Not all of what Python calls unprintable; the rest is as rare as lists printed by templates.
            c if (c as u32) < 0x20 || (0x7f..0xa0).contains(&(c as u32)) || c == '\u{ad}' => {
                let _ = write!(out, "\\x{:02x}", c as u32);
            }
            c if c != ' ' && c.is_whitespace() => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// What `{{ value }}` prints: `str(value)`. Undefined is empty.
pub fn str_into(value: &Value, out: &mut String) {
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::String => out.push_str(value.as_str().unwrap_or_default()),
        _ => repr_into(value, out),
    }
}

fn repr_into(value: &Value, out: &mut String) {
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => match as_float(value) {
            Some(float) => out.push_str(&float_repr(float)),
            None => {
                let _ = write!(out, "{value}");
            }
        },
        ValueKind::String => string_repr(value.as_str().unwrap_or_default(), out),
        ValueKind::Map => {
            out.push('{');
            for (i, (key, value)) in pairs(value).into_iter().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr_into(&key, out);
                out.push_str(": ");
                repr_into(&value, out);
            }
            out.push('}');
        }
        ValueKind::Seq => {
            let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
            out.push(open);
            let mut items = 0;
            for item in value.try_iter().into_iter().flatten() {
                out.push_str(if items > 0 { ", " } else { "" });
                repr_into(&item, out);
                items += 1;
            }
            if value.is_tuple() && items == 1 {
                out.push(',');
            }
            out.push(close);
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
}

fn pairs(value: &Value) -> Vec<(Value, Value)> {
    if let Some(pairs) = value.as_object().and_then(|object| object.try_iter_pairs()) {
        return pairs.collect();
    }
    value
        .try_iter()
        .into_iter()
        .flatten()
        .map(|key| {
            let member = value.get_item(&key).unwrap_or_default();
            (key, member)
        })
        .collect()
}

/// The arguments of `json.dumps` that templates use.
#[derive(Debug, Clone)]
pub struct Dumps {
    /// Escape everything beyond ASCII. transformers' `tojson` says no.
    pub ensure_ascii: bool,
    /// What one level is indented by; `None`: all on one line.
    pub indent: Option<String>,
    /// Between items; `None`: ", ", or "," when indented.
    pub item_separator: Option<String>,
    /// Between name and value; `None`: ": ".
    pub key_separator: Option<String>,
    /// Names in order of their code points.
    pub sort_keys: bool,
}

/// `json.dumps(value)`.
///
/// # Errors
/// When Python would raise: undefined values, functions, names that are lists.
pub fn dumps(value: &Value, options: &Dumps) -> Result<String, Error> {
    let mut out = String::new();
    dump(value, options, 0, &mut out)?;
    Ok(out)
}

fn dump(value: &Value, options: &Dumps, level: usize, out: &mut String) -> Result<(), Error> {
    let item = options.item_separator.as_deref().unwrap_or(if options.indent.is_some() { "," } else { ", " });
    let line = |level: usize, out: &mut String| {
        if let Some(indent) = &options.indent {
            out.push('\n');
            for _ in 0..level {
                out.push_str(indent);
            }
        }
    };
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => number(value, out),
        ValueKind::String => quoted(value.as_str().unwrap_or_default(), options.ensure_ascii, out),
        ValueKind::Seq | ValueKind::Iterable => {
            let mut empty = true;
            out.push('[');
            for member in value.try_iter()? {
                if !empty {
                    out.push_str(item);
                }
                empty = false;
                line(level + 1, out);
                dump(&member, options, level + 1, out)?;
            }
            if !empty {
                line(level, out);
            }
            out.push(']');
        }
        ValueKind::Map => {
            let mut members = Vec::new();
            for (key, member) in pairs(value) {
                members.push((name(&key)?, member));
            }
            if options.sort_keys {
                members.sort_by(|a, b| a.0.cmp(&b.0));
            }
            out.push('{');
            for (i, (key, member)) in members.iter().enumerate() {
                if i > 0 {
                    out.push_str(item);
                }
                line(level + 1, out);
                quoted(key, options.ensure_ascii, out);
                out.push_str(options.key_separator.as_deref().unwrap_or(": "));
                dump(member, options, level + 1, out)?;
            }
            if !members.is_empty() {
                line(level, out);
            }
            out.push('}');
        }
        kind => return Err(Error::new(ErrorKind::InvalidOperation, format!("{kind} is not JSON serializable"))),
    }
    Ok(())
}

fn name(key: &Value) -> Result<String, Error> {
    let mut text = String::new();
    match key.kind() {
        ValueKind::String => text.push_str(key.as_str().unwrap_or_default()),
        ValueKind::None => text.push_str("null"),
        ValueKind::Bool => text.push_str(if key.is_true() { "true" } else { "false" }),
        ValueKind::Number => number(key, &mut text),
        kind => return Err(Error::new(ErrorKind::InvalidOperation, format!("a {kind} is no name in JSON"))),
    }
    Ok(text)
}

fn number(value: &Value, out: &mut String) {
    match as_float(value) {
        Some(float) if float.is_nan() => out.push_str("NaN"),
        Some(float) if float.is_infinite() => out.push_str(if float > 0.0 { "Infinity" } else { "-Infinity" }),
        Some(float) => out.push_str(&float_repr(float)),
        None => {
            let _ = write!(out, "{value}");
        }
    }
}

fn quoted(text: &str, ascii: bool, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c if ascii && (c as u32) > 0x7e => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_as_python_writes_them() {
        for (value, text) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e-5, "1e-05"),
            (1e-7, "1e-07"),
            (0.0001, "0.0001"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (123456789.125, "123456789.125"),
            (f64::INFINITY, "inf"),
            (f64::NAN, "nan"),
        ] {
            assert_eq!(float_repr(value), text);
        }
    }

    #[test]
    fn python_white_space_has_the_four_separators() {
        let space: Vec<u32> = (0..0x11_0000).filter(|c| char::from_u32(*c).is_some_and(is_space)).collect();
        // [c for c in range(0x110000) if chr(c).isspace()]
        let python = [
            9, 10, 11, 12, 13, 28, 29, 30, 31, 32, 133, 160, 5760, 8192, 8193, 8194, 8195, 8196, 8197, 8198, 8199,
            8200, 8201, 8202, 8232, 8233, 8239, 8287, 12288,
        ];
        assert_eq!(space, python);
    }
}
