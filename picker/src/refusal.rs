//! What a client is told when its request is not routed.

use serde::Serialize;

/// An answer that Envoy gives to the client in place of an engine's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// HTTP status: 400 bad body, 413 too large, 429 shed, 503 no endpoint.
    pub status: u16,
    /// One word for machines: the `code` of the body, the value of `x-kvatlas-reason`, and a metric's label.
    pub code: &'static str,
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub hint: &'static str,
}

impl Refusal {
    /// 400: the body cannot be read.
    pub fn bad_body(message: String) -> Refusal {
        Refusal { status: 400, code: "bad_body", message, hint: "send JSON of the form that the path's API asks for" }
    }

    /// 413: the body is longer than the picker takes.
    pub fn too_large(limit: usize) -> Refusal {
        Refusal {
            status: 413,
            code: "too_large",
            message: format!("the body is longer than {limit} bytes"),
            hint: "shorten the prompt, or raise body_limit_bytes of the picker",
        }
    }

    /// 429: more bytes are in flight than the picker holds at once.
    pub fn shed() -> Refusal {
        Refusal {
            status: 429,
            code: "shed",
            message: "too many request bodies are being read at once".into(),
            hint: "try again in a second, or raise buffered_limit_bytes of the picker",
        }
    }

    /// 503: nobody may take the request.
    pub fn no_endpoint(message: String) -> Refusal {
        Refusal {
            status: 503,
            code: "no_endpoint",
            message,
            hint: "see GET /v1/decisions of the picker for who was excluded and why",
        }
    }

    /// 503: the picker is stopping and cannot finish this request.
    pub fn stopping() -> Refusal {
        Refusal { status: 503, code: "stopping", message: "the picker is stopping".into(), hint: "try again" }
    }

    /// The JSON body: `{"error":{"code","message","hint"}}`.
    pub fn body(&self) -> String {
        #[derive(Serialize)]
        struct Error<'a> {
            code: &'a str,
            message: &'a str,
            hint: &'a str,
        }
        #[derive(Serialize)]
        struct Body<'a> {
            error: Error<'a>,
        }
        let body = Body { error: Error { code: self.code, message: &self.message, hint: self.hint } };
        serde_json::to_string(&body).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_body_is_json_whatever_the_message_holds() {
        let refusal = Refusal::bad_body("a \"quoted\"\n\u{1}word".into());
        let body: serde_json::Value = serde_json::from_str(&refusal.body()).unwrap_or_default();
        assert_eq!(body["error"]["message"], "a \"quoted\"\n\u{1}word");
        assert_eq!(body["error"]["code"], "bad_body");
        assert!(body["error"]["hint"].as_str().is_some_and(|h| !h.is_empty()));
    }
}
