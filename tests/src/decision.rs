//! One request by three accounts: what the client saw, what the picker says of it, what the engine delivered.

use anyhow::{Context, Result};
use proto::event::picker_request_id;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// What became of a prediction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Delivered what was predicted.
    Exact,
    /// The engine's own prediction was right, the picker's older view was not.
    Raced,
    /// The engine's own prediction differs from what it delivered.
    Wrong,
    /// Routed without cache knowledge, or never reported.
    Unknown,
}

/// A candidate of a decision.
#[derive(Debug, Clone, Deserialize)]
pub struct Considered {
    /// `name.rank`.
    pub engine: String,
    /// Score.
    pub score: f64,
    /// Factors by name.
    pub factors: BTreeMap<String, f64>,
    /// Leading blocks of the prompt that it holds.
    pub any_blocks: u32,
}

/// Stage times that are read.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct Stages {
    /// From the body's end to the verdict, microseconds.
    pub total_us: u64,
}

/// What the engine reported.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct Started {
    /// Tokens taken from its cache.
    pub cached_tokens: u32,
}

/// `GET /v1/decisions/{request_id}`, as far as it is read here.
#[derive(Debug, Clone, Deserialize)]
pub struct Decision {
    /// The engine that it went to.
    pub engine: Option<String>,
    /// Why.
    pub reason: String,
    /// Why cache knowledge was missing.
    pub degraded: Vec<String>,
    /// Full blocks of the prompt.
    pub blocks: u32,
    /// The ranked, best first.
    pub candidates: Vec<Considered>,
    /// Age of the chosen engine's data, milliseconds.
    pub data_age_ms: Option<u32>,
    /// Predicted for the chosen engine.
    pub predicted_tokens: Option<u32>,
    /// What the engine reported.
    pub delivered: Option<Started>,
    /// What became of the prediction; absent until it is known.
    pub class: Option<Class>,
    /// Why the engine says it ended; absent until it does.
    pub finished: Option<String>,
    /// Stage times.
    pub stages: Stages,
}

impl Decision {
    /// One line for a person.
    pub fn line(&self) -> String {
        let engine = self.engine.as_deref().unwrap_or("none");
        let tokens = |count: Option<u32>| count.map_or("?".to_owned(), |c| c.to_string());
        let mut line = format!("-> {engine:<4}");
        if let Some(chosen) = self.candidates.iter().find(|c| c.engine == engine) {
            line += &format!(" {:>2} of {:>2} blocks, score {:.3} (", chosen.any_blocks, self.blocks, chosen.score);
            let factors: Vec<String> =
                chosen.factors.iter().map(|(name, value)| format!("{name} {value:.2}")).collect();
            line += &format!("{})", factors.join(" "));
        }
        line += &format!(", data {} ms old", tokens(self.data_age_ms));
        line += &format!(", cached tokens {} predicted", tokens(self.predicted_tokens));
        line += &format!(" {} delivered: ", tokens(self.delivered.map(|d| d.cached_tokens)));
        line += &self.class.map_or("unknown".to_owned(), |class| format!("{class:?}").to_lowercase());
        if !self.degraded.is_empty() {
            line += &format!(" [{}]", self.degraded.join(", "));
        }
        line
    }
}

/// What the client was answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Served {
    /// The picker's id, which the engine's contains. Envoy's own when no picker was there.
    pub id: String,
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// Token ids of the answer.
    pub output: Vec<u32>,
    /// Text of the answer.
    pub text: String,
    /// `usage.prompt_tokens_details.cached_tokens`.
    pub usage_cached: u32,
}

impl Served {
    /// Reads an answer of /v1/chat/completions or /v1/completions that was asked for token ids.
    ///
    /// # Errors
    /// When a part is missing; it is named.
    pub fn read(answer: &Value) -> Result<Served> {
        let choice = &answer["choices"][0];
        let ids = |value: &Value| -> Option<Vec<u32>> {
            value.as_array()?.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect()
        };
        let id = answer["id"].as_str().context("an answer without id")?;
        let text = choice["message"]["content"].as_str().or(choice["text"].as_str());
        let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
        Ok(Served {
            id: picker_request_id(id).with_context(|| format!("no request id in {id:?}"))?.to_owned(),
            prompt: ids(&answer["prompt_token_ids"])
                .or_else(|| ids(&choice["prompt_token_ids"]))
                .context("an answer without prompt_token_ids")?,
            output: ids(&choice["token_ids"]).context("an answer without token_ids")?,
            text: text.context("an answer without text")?.to_owned(),
            usage_cached: cached.as_u64().context("an answer without cached_tokens")?.try_into()?,
        })
    }

    /// Everything that the engine may have put into its cache for this request.
    pub fn tokens(&self) -> Vec<u32> {
        [self.prompt.as_slice(), self.output.as_slice()].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn both_forms_of_answers_are_read() -> Result<()> {
        let id = "262132a3-9fc5-4ff1-8b09-40c5e19eccec";
        let usage = json!({"prompt_tokens_details": {"cached_tokens": 32}});
        let chat = json!({
            "id": format!("chatcmpl-{id}"), "prompt_token_ids": [1, 2], "usage": usage,
            "choices": [{"message": {"content": "hi"}, "token_ids": [3]}],
        });
        let text = json!({
            "id": format!("cmpl-{id}"), "usage": usage,
            "choices": [{"text": "hi", "prompt_token_ids": [1, 2], "token_ids": [3]}],
        });
        let served = Served::read(&chat)?;
        assert_eq!(served, Served::read(&text)?);
        assert_eq!((served.tokens(), served.usage_cached, served.id.as_str()), (vec![1, 2, 3], 32, id));
        Ok(())
    }
}
