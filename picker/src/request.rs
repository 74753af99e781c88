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
        let body = json::parse(text, limits.depth)
            .map_err(|e| BadBody::NotJson { position: e.position, message: e.message })?;
        Ok(Request {
            kind,
            model: None,
            stream: false,
            cache_salt: Cow::Borrowed(""),
            max_tokens: None,
            n: 1,
            prompts: 1,
            skips_cache: false,
            body,
        })
    }
}
