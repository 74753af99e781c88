//! Chat templates: Jinja as transformers runs it, on minijinja.
//!
//! Settings and overrides are those with which 15 templates gave transformers' text on thousands of bodies. What
//! minijinja lacks (some filters and string methods) is an error at load or at render time, never another text.

use crate::prompt::{NotExact, Now};
use crate::python::{self, Dumps};
use chrono::{DateTime, FixedOffset};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State};

/// Most steps of one rendering: a chat of 200 messages takes about 30,000, so this is some 60,000 messages, and about
/// half a second.
const FUEL: u64 = 10_000_000;
/// Name of the variable that carries the time into `strftime_now`; a request cannot set it, see [`Template::render`].
const NOW: &str = "kvatlas now";

/// One compiled template.
#[derive(Debug)]
pub struct Template {
    environment: Environment<'static>,
    source: String,
}

/// Why nothing was rendered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unrendered {
    /// The template refused the conversation, or would have failed in Python too.
    Refused(String),
    /// minijinja cannot do what the template asks for.
    NotExact(NotExact),
}

impl Template {
    /// Compiles a template and looks for what minijinja does not have.
    ///
    /// # Errors
    /// A reason why prompts of this template cannot be exact.
    pub fn compile(source: &str) -> Result<Template, NotExact> {
        let fault = |detail: String| NotExact { label: "template", detail };
        // Jinja reads all line ends as \n. {% generation %} only marks text for training.
        let source = generation_as_if(&source.replace("\r\n", "\n").replace('\r', "\n"));
        let mut environment = environment().map_err(|e| fault(format!("{e:#}")))?;
        environment.add_template_owned("chat", source.clone()).map_err(|e| fault(format!("{e:#}")))?;
        if let Some(missing) = crate::detect::missing(&source, &environment) {
            return Err(fault(missing));
        }
        Ok(Template { environment, source })
    }

    /// The source as compiled.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders with these variables. `now` is what `strftime_now` prints.
    ///
    /// # Errors
    /// [`Unrendered`].
    pub fn render(&self, mut variables: Vec<(String, Value)>, now: Now) -> Result<String, Unrendered> {
        variables.retain(|(name, _)| name != NOW);
        variables.push((NOW.into(), Value::from(vec![Value::from(now.unix_s), Value::from(now.offset_s)])));
        let context = Value::from_pairs(variables);
        let template = self.environment.get_template("chat").map_err(|e| classify(&e))?;
        template.render(context).map_err(|e| classify(&e))
    }
}

fn classify(error: &Error) -> Unrendered {
    match error.kind() {
        ErrorKind::UnknownFilter
        | ErrorKind::UnknownFunction
        | ErrorKind::UnknownMethod
        | ErrorKind::UnknownTest
        | ErrorKind::OutOfFuel
        | ErrorKind::SyntaxError
        | ErrorKind::TemplateNotFound => {
            Unrendered::NotExact(NotExact { label: "template", detail: format!("{error}") })
        }
        _ => Unrendered::Refused(error.detail().map_or_else(|| error.to_string(), str::to_owned)),
    }
}

/// `{% generation %}` and `{% endgeneration %}` as an `if` that is always true, keeping their - and + marks.
fn generation_as_if(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tag.find("%}") else { break };
        let (tag, after) = tag.split_at(end + 2);
        let inner = &tag[2..tag.len() - 2];
        match inner.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+') {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

fn environment() -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).keep_trailing_newline(false).build()?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_fuel(Some(FUEL));
    env.set_formatter(print);
    env.set_unknown_method_callback(method);
    env.add_filter("tojson", tojson);
    env.add_filter("trim", |value: &Value, chars: Option<String>| strip(&text(value), chars.as_deref(), true, true));
    env.add_filter(
        "string",
        |value: &Value| if value.kind() == ValueKind::String { value.clone() } else { Value::from(text(value)) },
    );
    env.add_test("iterable", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable | ValueKind::Undefined
        )
    });
    env.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined)
    });
    env.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, text(message)))
    });
    env.add_function("strftime_now", strftime_now);
    Ok(env)
}

fn text(value: &Value) -> String {
    let mut out = String::new();
    python::str_into(value, &mut out);
    out
}

fn print(out: &mut Output<'_>, _: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text),
        None => out.write_str(&text(value)),
    }
    .map_err(|_| Error::new(ErrorKind::WriteFailure, "cannot write"))
}

fn strip(text: &str, chars: Option<&str>, left: bool, right: bool) -> String {
    let is = |c: char| chars.map_or_else(|| python::is_space(c), |chars| chars.contains(c));
    let text = if left { text.trim_start_matches(is) } else { text };
    let text = if right { text.trim_end_matches(is) } else { text };
    text.to_owned()
}

/// Methods of strings, lists and maps that Python has and minijinja's core does not.
fn method(state: &mut State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(this) = value.as_str() {
        let one = || -> Result<Option<String>, Error> {
            match args {
                [] => Ok(None),
                [value] if value.is_none() => Ok(None),
                [value] if value.kind() == ValueKind::String => Ok(Some(text(value))),
                _ => Err(Error::new(ErrorKind::InvalidOperation, format!("bad arguments of {method}"))),
            }
        };
        match method {
            "strip" => return Ok(Value::from(strip(this, one()?.as_deref(), true, true))),
            "lstrip" => return Ok(Value::from(strip(this, one()?.as_deref(), true, false))),
            "rstrip" => return Ok(Value::from(strip(this, one()?.as_deref(), false, true))),
            "split" if one().is_ok_and(|separator| separator.is_none()) => {
                return Ok(this.split(python::is_space).filter(|word| !word.is_empty()).map(Value::from).collect());
            }
            "removeprefix" | "removesuffix" => {
                let Some(part) = one()? else {
                    return Err(Error::new(ErrorKind::MissingArgument, format!("{method} takes one argument")));
                };
                let rest = if method == "removeprefix" { this.strip_prefix(&*part) } else { this.strip_suffix(&*part) };
                return Ok(Value::from(rest.unwrap_or(this)));
            }
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let argument = |place: usize, name: &str| -> Result<Option<Value>, Error> {
        let value = match args.get(place) {
            Some(value) => Some(value.clone()),
            None => kwargs.get::<Option<Value>>(name)?,
        };
        Ok(value.filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let ensure_ascii = argument(0, "ensure_ascii")?.is_some_and(|value| value.is_true());
    let indent = match argument(1, "indent")? {
        Some(value) if value.kind() == ValueKind::String => Some(text(&value)),
        // More than any template asks for, and not enough to fill memory.
        Some(value) => Some(" ".repeat(value.as_usize().unwrap_or(0).min(64))),
        None => None,
    };
    let separators: Vec<Value> = match argument(2, "separators")? {
        Some(value) => value.try_iter()?.collect(),
        None => Vec::new(),
    };
    let sort_keys = argument(3, "sort_keys")?.is_some_and(|value| value.is_true());
    kwargs.assert_all_used()?;
    let separator = |place: usize| separators.get(place).map(text);
    let options = Dumps { ensure_ascii, indent, item_separator: separator(0), key_separator: separator(1), sort_keys };
    python::dumps(value, &options).map(Value::from)
}

fn strftime_now(state: &mut State<'_, '_>, format: String) -> Result<String, Error> {
    let fault = || Error::new(ErrorKind::UnknownFunction, format!("strftime_now cannot do {format:?}"));
    let now = state.lookup(NOW).ok_or_else(fault)?;
    let part = |place| now.get_item_by_index(place).ok().and_then(|value| value.as_i64());
    let offset = part(1).and_then(|offset| FixedOffset::east_opt(i32::try_from(offset).ok()?));
    let utc = part(0).and_then(|seconds| DateTime::from_timestamp(seconds, 0));
    let local = utc.ok_or_else(fault)?.with_timezone(&offset.ok_or_else(fault)?);
    let mut out = String::new();
    // An unknown letter makes Display fail; to_string would panic.
    std::fmt::write(&mut out, format_args!("{}", local.format(&format))).map_err(|_| fault())?;
    Ok(out)
}
