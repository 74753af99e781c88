//! What a run has seen so far: the report in the making, and all token sequences that went through the engines.

use crate::app::running::Running;
use crate::decision::{Decision, Served};
use crate::edge::client::{Kind, Seen};
use crate::edge::lookup::Samples;
use crate::plan::MODEL;
use crate::report::{Report, percentile};
use crate::talk::Chat;
use anyhow::Result;
use serde_json::{Value, json};
use std::time::Duration;

/// Tokens of an answer.
const ANSWER_TOKENS: u32 = 24;
/// How long an engine's report of a request may take to be joined with its decision.
const REPORTED: Duration = Duration::from_secs(20);

/// The run so far.
#[derive(Debug, Default)]
pub struct Journal {
    /// The report, filled in by the phases.
    pub report: Report,
    /// What did not hold, beyond what the report's own numbers say.
    pub faults: Vec<String>,
    /// Every prompt with its answer, as token ids.
    pub sequences: Vec<Vec<u32>>,
    /// Decision times, microseconds.
    pub decision_us: Vec<f64>,
    /// Engine step to answerable, milliseconds.
    pub staleness_ms: Samples,
}

impl Journal {
    /// Notes a request that was answered; `None`, and noted as failed, when it was not.
    pub fn served(&mut self, label: &str, seen: &Seen) -> Option<Served> {
        let served = match &seen.answer {
            Some(answer) => Served::read(answer).map_err(|error| format!("{error:#}")),
            None => Err(format!("status {}: {}", seen.status, seen.error.as_deref().unwrap_or("no answer"))),
        };
        match served {
            Ok(served) => {
                self.sequences.push(served.tokens());
                Some(served)
            }
            Err(error) => {
                println!("{label} failed: {error}");
                self.report.failed_requests += 1;
                None
            }
        }
    }

    /// Sends one request, waits until everything about it is known, and prints its decision.
    ///
    /// # Errors
    /// When the client has ended or the picker does not know the request.
    pub async fn ask(
        &mut self,
        running: &Running,
        label: &str,
        kind: Kind,
        body: &Value,
    ) -> Result<Option<(Served, Decision)>> {
        let seen = running.send(kind, body).await?;
        let Some(served) = self.served(label, &seen) else { return Ok(None) };
        let decision = running.decision(&served.id, REPORTED).await?;
        self.decision_us.push(decision.stages.total_us as f64);
        println!("{label} {}", decision.line());
        Ok(Some((served, decision)))
    }

    /// Fills in the times.
    pub fn times(&mut self) {
        self.report.decision_us_p50 = percentile(&mut self.decision_us, 0.5);
        self.report.decision_us_p99 = percentile(&mut self.decision_us, 0.99);
        if let Ok(mut samples) = self.staleness_ms.lock() {
            self.report.staleness_ms_p50 = percentile(&mut samples, 0.5);
            self.report.staleness_ms_p99 = percentile(&mut samples, 0.99);
        }
    }
}

/// The body of a chat's next turn.
pub fn chat_body(chat: &Chat) -> Value {
    let message = |(role, text): &(crate::talk::Role, String)| json!({"role": role.name(), "content": text});
    let messages: Vec<Value> = chat.messages.iter().map(message).collect();
    json!({
        "model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true,
    })
}

/// The body of a completion, streamed or not.
pub fn completion_body(prompt: &str, stream: bool) -> Value {
    let mut body = json!({
        "model": MODEL, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true,
    });
    if stream {
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
    }
    body
}
