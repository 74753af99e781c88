//! JSON exactly as Python's `json.loads` takes it, since the engine reads bodies and tool arguments with it.
//!
//! Differences from strict JSON that matter for parity: `NaN` and `Infinity` are numbers, of repeated keys the last
//! value wins at the place of the first, integers have no bound. Strings are borrowed when they hold no escape.

use std::borrow::Cow;
use std::collections::HashMap;

/// A JSON value. Objects keep the order of their keys.
#[derive(Debug, Clone, PartialEq)]
pub enum Json<'a> {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// An integer that fits; longer ones are [`Json::Big`].
    Int(i128),
    /// The text of an integer beyond 128 bits: no template value can hold it.
    Big(&'a str),
    /// A number with a point or an exponent, and `NaN`, `Infinity`, `-Infinity`.
    Float(f64),
    /// A string.
    Str(Cow<'a, str>),
    /// A list.
    List(Vec<Json<'a>>),
    /// An object; keys are unique.
    Object(Object<'a>),
}

/// An object's members in order, keys unique.
pub type Object<'a> = Vec<(Cow<'a, str>, Json<'a>)>;

/// Why a text is no JSON.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message} at byte {position}")]
pub struct BadJson {
    /// Byte offset, from 0.
    pub position: usize,
    /// What is wrong there.
    pub message: &'static str,
}

impl<'a> Json<'a> {
    /// The member of that name, when this is an object that has it.
    pub fn get(&self, name: &str) -> Option<&Json<'a>> {
        match self {
            Json::Object(members) => members.iter().find(|(key, _)| key == name).map(|(_, value)| value),
            _ => None,
        }
    }

    /// Like [`Json::get`], with `null` as absent.
    pub fn given(&self, name: &str) -> Option<&Json<'a>> {
        self.get(name).filter(|value| **value != Json::Null)
    }

    /// The text of a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Json::Str(text) => Some(text),
            _ => None,
        }
    }

    /// Whether Python's `if value:` would enter.
    pub fn truthy(&self) -> bool {
        match self {
            Json::Null => false,
            Json::Bool(value) => *value,
            Json::Int(value) => *value != 0,
            Json::Big(_) => true,
            Json::Float(value) => *value != 0.0,
            Json::Str(text) => !text.is_empty(),
            Json::List(items) => !items.is_empty(),
            Json::Object(members) => !members.is_empty(),
        }
    }
}

/// Parses one text. `max_depth` bounds nested lists and objects.
///
/// # Errors
/// The first fault, with its byte offset.
pub fn parse(text: &str, max_depth: usize) -> Result<Json<'_>, BadJson> {
    let mut reader = Reader { text, bytes: text.as_bytes(), at: 0, depth_left: max_depth };
    reader.space();
    let value = reader.value()?;
    reader.space();
    if reader.at < reader.bytes.len() {
        return Err(reader.fault("unexpected text after the value"));
    }
    Ok(value)
}

struct Reader<'a> {
    text: &'a str,
    bytes: &'a [u8],
    at: usize,
    depth_left: usize,
}

/// Objects with more members than this find repeated keys by a map.
const FEW: usize = 16;

impl<'a> Reader<'a> {
    fn fault(&self, message: &'static str) -> BadJson {
        BadJson { position: self.at, message }
    }

    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.peek() {
            self.at += 1;
        }
    }

    fn word(&mut self, word: &str, value: Json<'a>) -> Result<Json<'a>, BadJson> {
        if self.bytes[self.at..].starts_with(word.as_bytes()) {
            self.at += word.len();
            return Ok(value);
        }
        Err(self.fault("expected a value"))
    }

    fn value(&mut self) -> Result<Json<'a>, BadJson> {
        match self.peek() {
            Some(b'"') => self.string().map(Json::Str),
            Some(b'{') => self.object(),
            Some(b'[') => self.list(),
            Some(b'n') => self.word("null", Json::Null),
            Some(b't') => self.word("true", Json::Bool(true)),
            Some(b'f') => self.word("false", Json::Bool(false)),
            Some(b'N') => self.word("NaN", Json::Float(f64::NAN)),
            Some(b'I') => self.word("Infinity", Json::Float(f64::INFINITY)),
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ => Err(self.fault("expected a value")),
        }
    }

    fn digits(&mut self) -> usize {
        let from = self.at;
        while let Some(b'0'..=b'9') = self.peek() {
            self.at += 1;
        }
        self.at - from
    }

    fn number(&mut self) -> Result<Json<'a>, BadJson> {
        let from = self.at;
        if self.peek() == Some(b'-') {
            self.at += 1;
            if self.peek() == Some(b'I') {
                return self.word("Infinity", Json::Float(f64::NEG_INFINITY));
            }
        }
        match self.peek() {
            Some(b'0') => self.at += 1,
            Some(b'1'..=b'9') => {
                self.digits();
            }
            _ => return Err(self.fault("expected a digit")),
        }
        let mut whole = true;
        let mark = self.at;
        if self.peek() == Some(b'.') {
            self.at += 1;
            if self.digits() == 0 {
                // As Python reads it: the integer ends before the point, and the point is then out of place.
                self.at = mark;
                return Err(self.fault("expected a digit after the point"));
            }
            whole = false;
        }
        if let Some(b'e' | b'E') = self.peek() {
            let mark = self.at;
            self.at += 1;
            if let Some(b'+' | b'-') = self.peek() {
                self.at += 1;
            }
            if self.digits() == 0 {
                self.at = mark;
                return Err(self.fault("expected a digit in the exponent"));
            }
            whole = false;
        }
        let text = &self.text[from..self.at];
        if whole {
            return Ok(text.parse().map_or(Json::Big(text), Json::Int));
        }
        text.parse().map(Json::Float).map_err(|_| self.fault("bad number"))
    }

    fn enter(&mut self) -> Result<(), BadJson> {
        self.depth_left = self.depth_left.checked_sub(1).ok_or_else(|| self.fault("nested too deep"))?;
        self.at += 1;
        self.space();
        Ok(())
    }

    fn leave(&mut self) {
        self.depth_left += 1;
        self.at += 1;
    }

    fn list(&mut self) -> Result<Json<'a>, BadJson> {
        self.enter()?;
        let mut items = Vec::new();
        if self.peek() == Some(b']') {
            self.leave();
            return Ok(Json::List(items));
        }
        loop {
            items.push(self.value()?);
            self.space();
            match self.peek() {
                Some(b',') => {
                    self.at += 1;
                    self.space();
                }
                Some(b']') => {
                    self.leave();
                    return Ok(Json::List(items));
                }
                _ => return Err(self.fault("expected , or ] in a list")),
            }
        }
    }

    fn object(&mut self) -> Result<Json<'a>, BadJson> {
        self.enter()?;
        let mut members: Object<'a> = Vec::new();
        let mut places: HashMap<Cow<'a, str>, usize> = HashMap::new();
        if self.peek() == Some(b'}') {
            self.leave();
            return Ok(Json::Object(members));
        }
        loop {
            if self.peek() != Some(b'"') {
                return Err(self.fault("expected a name in double quotes"));
            }
            let name = self.string()?;
            self.space();
            if self.peek() != Some(b':') {
                return Err(self.fault("expected : after a name"));
            }
            self.at += 1;
            self.space();
            let value = self.value()?;
            if members.len() == FEW && places.is_empty() {
                places = members.iter().enumerate().map(|(place, (name, _))| (name.clone(), place)).collect();
            }
            let place = if members.len() < FEW {
                members.iter().position(|(other, _)| *other == name)
            } else {
                places.get(&name).copied()
            };
            match place {
                Some(place) => members[place].1 = value,
                None => {
                    if members.len() >= FEW {
                        places.insert(name.clone(), members.len());
                    }
                    members.push((name, value));
                }
            }
            self.space();
            match self.peek() {
                Some(b',') => {
                    self.at += 1;
                    self.space();
                }
                Some(b'}') => {
                    self.leave();
                    return Ok(Json::Object(members));
                }
                _ => return Err(self.fault("expected , or } in an object")),
            }
        }
    }

    /// Goes to the next quote, backslash or control character.
    fn plain(&mut self) {
        // Eight bytes at a time: a byte's high bit is set where it is one of the three.
        const ONES: u64 = 0x0101_0101_0101_0101;
        const HIGH: u64 = 0x8080_8080_8080_8080;
        while let Some(chunk) = self.bytes.get(self.at..self.at + 8).and_then(|c| <[u8; 8]>::try_from(c).ok()) {
            let word = u64::from_le_bytes(chunk);
            let zero = |x: u64| x.wrapping_sub(ONES) & !x & HIGH;
            let control = word.wrapping_sub(ONES * 0x20) & !word & HIGH;
            let hit = zero(word ^ (ONES * u64::from(b'"'))) | zero(word ^ (ONES * u64::from(b'\\'))) | control;
            if hit != 0 {
                // Borrows can only set bits above the first true one.
                self.at += (hit.trailing_zeros() / 8) as usize;
                return;
            }
            self.at += 8;
        }
        while let Some(byte) = self.peek() {
            if byte == b'"' || byte == b'\\' || byte < 0x20 {
                return;
            }
            self.at += 1;
        }
    }

    fn string(&mut self) -> Result<Cow<'a, str>, BadJson> {
        self.at += 1;
        let from = self.at;
        self.plain();
        if self.peek() == Some(b'"') {
            let text = &self.text[from..self.at];
            self.at += 1;
            return Ok(Cow::Borrowed(text));
        }
        let mut out = String::with_capacity((self.at - from) * 2);
        out.push_str(&self.text[from..self.at]);
        loop {
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(Cow::Owned(out));
                }
                Some(b'\\') => {
                    let c = self.escape()?;
                    out.push(c);
                }
                Some(_) => return Err(self.fault("control character in a string")),
                None => return Err(self.fault("a string has no end")),
            }
            let from = self.at;
            self.plain();
            out.push_str(&self.text[from..self.at]);
        }
    }

    fn escape(&mut self) -> Result<char, BadJson> {
        let at = self.at;
        let Some(kind) = self.bytes.get(at + 1).copied() else { return Err(self.fault("a string has no end")) };
        self.at += 2;
        Ok(match kind {
            b'"' => '"',
            b'\\' => '\\',
            b'/' => '/',
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let mut code = self.hex()?;
                if (0xd800..0xdc00).contains(&code) && self.bytes[self.at..].starts_with(b"\\u") {
                    let back = self.at;
                    self.at += 2;
                    let low = self.hex()?;
                    if (0xdc00..0xe000).contains(&low) {
                        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
                    } else {
                        self.at = back;
                    }
                }
                // Python keeps half of a pair; nothing can tokenize it, so the engine fails later.
                char::from_u32(code).ok_or(BadJson { position: at, message: "half of a surrogate pair in a string" })?
            }
            _ => return Err(BadJson { position: at, message: "unknown escape in a string" }),
        })
    }

    fn hex(&mut self) -> Result<u32, BadJson> {
        let digits = self.bytes.get(self.at..self.at + 4).filter(|d| d.iter().all(u8::is_ascii_hexdigit));
        let Some(digits) = digits else { return Err(self.fault("expected four hexadecimal digits")) };
        let code = digits.iter().fold(0, |code, d| code * 16 + (*d as char).to_digit(16).unwrap_or(0));
        self.at += 4;
        Ok(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn str(text: &str) -> Json<'_> {
        Json::Str(Cow::Borrowed(text))
    }

    #[test]
    fn values_as_python_reads_them() {
        for (text, value) in [
            (" null ", Json::Null),
            ("-0", Json::Int(0)),
            ("9007199254740993", Json::Int(9007199254740993)),
            ("1e3", Json::Float(1000.0)),
            ("1e400", Json::Float(f64::INFINITY)),
            ("-Infinity", Json::Float(f64::NEG_INFINITY)),
            ("[1, [2]]", Json::List(vec![Json::Int(1), Json::List(vec![Json::Int(2)])])),
            ("\"a\\u00e9\\ud83d\\ude00\\n\"", str("aé😀\n")),
            (
                "{\"a\": 1, \"b\": 2, \"a\": 3}",
                Json::Object(vec![("a".into(), Json::Int(3)), ("b".into(), Json::Int(2))]),
            ),
        ] {
            assert_eq!(parse(text, 8).as_ref(), Ok(&value), "{text}");
        }
        assert!(matches!(parse("NaN", 1), Ok(Json::Float(x)) if x.is_nan()));
        let long = "1".repeat(50);
        assert_eq!(parse(&long, 1), Ok(Json::Big(&long)));
    }

    #[test]
    fn faults_have_a_place() {
        for (text, position) in [
            ("", 0),
            ("{", 1),
            ("[1,]", 3),
            ("{\"a\" 1}", 5),
            ("01", 1),
            ("1.", 1),
            ("\"a\nb\"", 2),
            ("\"abcdefghij\u{1}\"", 11),
            ("\"\\x\"", 1),
            ("\"x\\ud800\"", 2),
            ("[[[1]]]", 2),
            ("1 2", 2),
            ("'a'", 0),
            ("+1", 0),
        ] {
            assert_eq!(parse(text, 2).map_err(|e| e.position), Err(position), "{text:?}");
        }
    }

    #[test]
    fn repeated_names_in_large_objects_are_found() {
        let text: Vec<String> = (0..40).map(|i| format!("\"k{}\": {i}", i % 30)).collect();
        let text = format!("{{{}}}", text.join(","));
        let Ok(Json::Object(members)) = parse(&text, 1) else { panic!("no object") };
        assert_eq!(members.len(), 30);
        assert_eq!((members[3].1.clone(), members[20].1.clone()), (Json::Int(33), Json::Int(20)));
    }

    #[test]
    fn plain_text_is_borrowed_and_any_length_ends_right() {
        for length in 0..40 {
            for special in ["", "\\n", "é", "\\\\\\\""] {
                let inner = format!("{}{special}{}", "x".repeat(length), "ÿ€y".repeat(3));
                let text = format!("\"{inner}\"");
                let expected = inner.replace("\\n", "\n").replace("\\\"", "\"").replace("\\\\", "\\");
                assert_eq!(parse(&text, 1), Ok(str(&expected)), "{text}");
            }
        }
        assert!(matches!(parse("\"plain text\"", 1), Ok(Json::Str(Cow::Borrowed(_)))));
    }
}
