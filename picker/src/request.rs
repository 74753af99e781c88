//! A request body, read once: what the router itself needs, and the parsed rest for the renderer.
//!
//! Pure and borrowed: a [`Request`] points into the body. Parse, render and tokenize in one job off the async threads
//! (a long body costs milliseconds), and let only the fingerprints leave it.

use crate::json::{self, Json};
use std::borrow::Cow;

/// What a path asks for. The body of [`Kind::Other`] is not read: such requests are routed by load, untouched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
    /// Anything else.
    Other,
}

impl Kind {
    /// The kind of an HTTP path (as in `:path`; a query is ignored). Only the end counts, so that a gateway's prefix
    /// does no harm.
    pub fn of_path(path: &str) -> Kind {
        let path = path.split(['?', '#']).next().unwrap_or_default().trim_end_matches('/');
        if path.ends_with("/chat/completions") {
            Kind::Chat
        } else if path.ends_with("/completions") {
            Kind::Completions
        } else {
            Kind::Other
        }
    }
}

/// Bounds on a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Longest body, in bytes.
    pub body_bytes: usize,
    /// Deepest nesting of lists and objects.
    pub depth: usize,
}

impl Default for Limits {
    /// 16 MiB (about four million tokens of English text) and depth 128 (what serde_json takes; the engine's own bound
    /// is Python's recursion limit, about 1,000).
    fn default() -> Self {
        Limits { body_bytes: 16 << 20, depth: 128 }
    }
}

/// Why a body is refused, worded for the client.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadBody {
    /// Longer than the limit: HTTP 413.
    #[error("the body has {bytes} bytes, at most {limit} are taken")]
    TooLarge {
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// Not UTF-8, or not JSON: HTTP 400.
    #[error("the body is not JSON: {message} at byte {position}")]
    NotJson {
        /// Byte offset of the first fault.
        position: usize,
        /// What is wrong there.
        message: &'static str,
    },
    /// JSON of another shape than the path asks for: HTTP 400.
    #[error("{field}: {message}")]
    Shape {
        /// The field, as the API names it.
        field: &'static str,
        /// What it must be.
        message: &'static str,
    },
}

impl BadBody {
    /// The HTTP status that it becomes.
    pub fn status(&self) -> u16 {
        match self {
            BadBody::TooLarge { .. } => 413,
            BadBody::NotJson { .. } | BadBody::Shape { .. } => 400,
        }
    }
}

/// One request, borrowed from its body.
#[derive(Debug, Clone, PartialEq)]
pub struct Request<'a> {
    /// Completions or chat.
    pub kind: Kind,
    /// The model asked for: a base model or an adapter. Absent is allowed where one model is served; the caller decides.
    pub model: Option<Cow<'a, str>>,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// `cache_salt`, "" for none. A secret: it goes into the namespace and nowhere else.
    pub cache_salt: Cow<'a, str>,
    /// Most tokens to generate (`max_completion_tokens`, else `max_tokens`), when given.
    pub max_tokens: Option<u64>,
    /// Answers wanted for each prompt, at least 1.
    pub n: u64,
    /// Prompts in the body: more than 1 only for a completion with a list of prompts. The first counts for routing.
    pub prompts: usize,
    /// Whether the engine will not read its cache for this request (`prompt_logprobs`).
    pub skips_cache: bool,
    /// The whole body, an object.
    pub(crate) body: Json<'a>,
}

impl<'a> Request<'a> {
    /// Reads the body of a request of that kind.
    ///
    /// # Errors
    /// [`BadBody`] when it is too large, not JSON, or when a field that routing reads has another type than the API says.
    pub fn parse(kind: Kind, body: &'a [u8], limits: Limits) -> Result<Request<'a>, BadBody> {
        if body.len() > limits.body_bytes {
            return Err(BadBody::TooLarge { bytes: body.len(), limit: limits.body_bytes });
        }
        let text = std::str::from_utf8(body)
            .map_err(|e| BadBody::NotJson { position: e.valid_up_to(), message: "invalid UTF-8" })?;
        // Python drops a byte order mark.
        let (text, skipped) = text.strip_prefix('\u{feff}').map_or((text, 0), |rest| (rest, 3));
        let body = json::parse(text, limits.depth)
            .map_err(|e| BadBody::NotJson { position: e.position + skipped, message: e.message })?;
        let Json::Object(_) = body else { return Err(BadBody::NotJson { position: 0, message: "expected an object" }) };
        let model = text_field(&body, "model")?;
        let stream = match body.given("stream") {
            None => false,
            Some(Json::Bool(value)) => *value,
            Some(_) => return Err(BadBody::Shape { field: "stream", message: "must be true or false" }),
        };
        let cache_salt = text_field(&body, "cache_salt")?.unwrap_or_default();
        let max_tokens = match (kind, count_field(&body, "max_completion_tokens")?) {
            (Kind::Chat, Some(value)) => Some(value),
            _ => count_field(&body, "max_tokens")?,
        };
        let n = count_field(&body, "n")?.unwrap_or(1).max(1);
        let prompts = match (kind, body.get("prompt")) {
            (Kind::Completions, Some(Json::List(list)))
                if matches!(list.first(), Some(Json::Str(_) | Json::List(_))) =>
            {
                list.len()
            }
            _ => 1,
        };
        let skips_cache = body.given("prompt_logprobs").is_some()
            || (kind == Kind::Completions
                && body.get("echo").is_some_and(Json::truthy)
                && body.given("logprobs").is_some());
        Ok(Request { kind, model, stream, cache_salt, max_tokens, n, prompts, skips_cache, body })
    }
}

fn text_field<'a>(body: &Json<'a>, field: &'static str) -> Result<Option<Cow<'a, str>>, BadBody> {
    match body.given(field) {
        None => Ok(None),
        Some(Json::Str(text)) => Ok(Some(text.clone())),
        Some(_) => Err(BadBody::Shape { field, message: "must be a string" }),
    }
}

/// A count. Only what routing needs is checked: the engine has its own word on the rest.
fn count_field(body: &Json<'_>, field: &'static str) -> Result<Option<u64>, BadBody> {
    match body.given(field) {
        None => Ok(None),
        Some(Json::Int(value)) => Ok(Some(u64::try_from(*value).unwrap_or(0))),
        // pydantic takes 3.0 and "3" for 3; routing needs neither.
        Some(Json::Float(_) | Json::Str(_)) => Ok(None),
        Some(_) => Err(BadBody::Shape { field, message: "must be an integer" }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(kind: Kind, body: &str) -> Result<Request<'_>, BadBody> {
        Request::parse(kind, body.as_bytes(), Limits::default())
    }

    #[test]
    fn paths() {
        for (path, kind) in [
            ("/v1/completions", Kind::Completions),
            ("/v1/chat/completions?x=1", Kind::Chat),
            ("/openai/v1/chat/completions/", Kind::Chat),
            ("/v1/models", Kind::Other),
            ("/v1/responses", Kind::Other),
            ("/v1/nocompletions", Kind::Other),
            ("/", Kind::Other),
        ] {
            assert_eq!(Kind::of_path(path), kind, "{path}");
        }
    }

    #[test]
    fn what_routing_reads() -> Result<(), BadBody> {
        let chat = parse(
            Kind::Chat,
            r#"{"model": "m", "stream": true, "cache_salt": "s", "max_tokens": 5, "max_completion_tokens": 7, "n": 2, "messages": []}"#,
        )?;
        assert_eq!((chat.model.as_deref(), chat.stream, &*chat.cache_salt), (Some("m"), true, "s"));
        assert_eq!((chat.max_tokens, chat.n, chat.prompts, chat.skips_cache), (Some(7), 2, 1, false));
        let none = parse(Kind::Completions, "\u{feff}{\"prompt\": [[1], [2, 3]], \"prompt_logprobs\": 0}")?;
        assert_eq!((none.model, none.max_tokens, none.prompts, none.skips_cache), (None, None, 2, true));
        assert_eq!(parse(Kind::Completions, r#"{"prompt": [1, 2]}"#)?.prompts, 1);
        assert_eq!(parse(Kind::Completions, r#"{"prompt": ["a", "b"]}"#)?.prompts, 2);
        Ok(())
    }

    #[test]
    fn bad_bodies_say_where() {
        let place = |body| match parse(Kind::Chat, body) {
            Err(BadBody::NotJson { position, .. }) => Some(position),
            _ => None,
        };
        assert_eq!(place("{\"model\": "), Some(10));
        assert_eq!(place("[1]"), Some(0));
        assert_eq!(place(""), Some(0));
        let bytes = Request::parse(Kind::Chat, b"{\"a\": \"\xff\"}", Limits::default());
        assert_eq!(bytes, Err(BadBody::NotJson { position: 7, message: "invalid UTF-8" }));
        let small = Limits { body_bytes: 3, depth: 1 };
        assert_eq!(Request::parse(Kind::Chat, b"{  }", small).map_err(|e| e.status()), Err(413));
        assert!(matches!(
            Request::parse(Kind::Chat, b"{\"a\":[]}", Limits { depth: 1, ..Limits::default() }),
            Err(BadBody::NotJson { position: 5, .. })
        ));
        assert_eq!(parse(Kind::Chat, r#"{"model": 3}"#).map_err(|e| e.status()), Err(400));
        assert_eq!(
            parse(Kind::Chat, r#"{"stream": "x"}"#).map_err(|e| e.to_string()),
            Err("stream: must be true or false".into())
        );
    }
}
