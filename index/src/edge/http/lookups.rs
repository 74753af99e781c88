//! `POST /v1/match` and `GET /v1/blocks/{fingerprint}`.

use super::Fault;
use crate::answer::{EngineState, MAX_FINGERPRINTS, Query, Status};
use crate::app::Shared;
use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use proto::block::{self, Namespace};
use proto::fleet::Source;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The body of `POST /v1/match`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asked {
    model: String,
    #[serde(default)]
    adapter: String,
    #[serde(default)]
    salt: String,
    token_ids: Option<Vec<u32>>,
    fingerprints: Option<Vec<Number>>,
    /// With `fingerprints`: tokens of the whole prompt; without it, one more than the full blocks have.
    prompt_tokens: Option<u32>,
    prompt: Option<Value>,
    messages: Option<Value>,
}

/// A fingerprint: a number, or decimal or `0x` text where the reader's numbers are doubles.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Number {
    Number(u64),
    Text(String),
}

fn fingerprint(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
    .filter(|fp| *fp != 0)
}

fn refused(code: &'static str, message: impl Into<String>, hint: &'static str) -> Fault {
    Fault::new(StatusCode::BAD_REQUEST, code, message, hint)
}

/// What would each engine of the model take from its cache for this prompt?
/// The body is JSON whatever its content type says: people send it by hand.
pub async fn match_(State(shared): State<Arc<Shared>>, body: Result<Bytes, BytesRejection>) -> Response {
    let hint = "send {\"model\", and one of \"token_ids\" | \"fingerprints\"} as JSON, at most 16 MiB";
    let refused = |status, why: String| Fault::new(status, "bad_body", why, hint).into_response();
    let body = match body {
        Ok(body) => body,
        Err(rejection) => return refused(rejection.status(), rejection.body_text()),
    };
    let asked: Asked = match serde_json::from_slice(&body) {
        Ok(asked) => asked,
        Err(error) => return refused(StatusCode::BAD_REQUEST, error.to_string()),
    };
    answer(&shared, asked).map_or_else(IntoResponse::into_response, IntoResponse::into_response)
}

fn answer(shared: &Shared, asked: Asked) -> Result<Json<Value>, Fault> {
    if asked.prompt.is_some() || asked.messages.is_some() {
        return Err(Fault::new(
            StatusCode::NOT_IMPLEMENTED,
            "no_tokenizer",
            "the index does not tokenize: text and messages are rendered and tokenized by the picker",
            "send token_ids, or ask the picker's POST /v1/explain",
        ));
    }
    let statuses: Vec<Arc<Status>> = shared.lookup.board.seats().iter().map(|seat| seat.status()).collect();
    let serving: Vec<&Arc<Status>> = statuses.iter().filter(|status| status.models().contains(&asked.model)).collect();
    if serving.is_empty() {
        let name: String = asked.model.chars().take(128).collect();
        return Err(Fault::new(
            StatusCode::NOT_FOUND,
            "no_model",
            format!("no engine serves {name:?}"),
            "see the models in /v1/engines",
        ));
    }
    // One chain for each base model (any served name may lead to it), block size and look-ahead.
    let mut groups: BTreeMap<(u32, u32, &str), Vec<String>> = BTreeMap::new();
    for status in serving {
        let base = status.models().first().map_or("", String::as_str);
        groups.entry((status.block_size(), status.rule().ahead(), base)).or_default().push(status.engine.to_string());
    }
    let mut rows = Vec::new();
    let mut shape = None;
    for ((block_size, ahead, base), candidates) in groups {
        let (fingerprints, prompt_tokens) = chain(shared, &asked, base, (block_size, ahead))?;
        let query = Query { block_size, ahead, prompt_tokens, fingerprints: &fingerprints, candidates: &candidates };
        let matched = shared.metrics.timed_lookup(|| shared.lookup.find(&query));
        shape = shape.max(Some((matched.engines.len(), block_size, fingerprints.len())));
        for one in matched.engines {
            rows.push(json!({
                "engine": one.status.engine.to_string(),
                "rank": one.status.engine.rank,
                "gpu_blocks": one.gpu_blocks,
                "any_blocks": one.any_blocks,
                "cached_tokens": one.cached_tokens,
                "coming_blocks": one.coming_blocks,
                "age_ms": one.status.heard_ms.map(|_| one.age_ms),
                "in_step": one.status.in_step.map(|in_step| in_step && one.state == EngineState::InStep),
                "state": one.state.name(),
                "block_size": block_size,
                "source": match one.status.source { Source::Agent => "agent", Source::Native => "native" },
            }));
        }
    }
    let (_, block_size, blocks) = shape.unwrap_or_default();
    Ok(Json(json!({ "block_size": block_size, "blocks": blocks, "engines": rows })))
}

/// The prompt's fingerprints in one namespace, block size and look-ahead, and its tokens.
fn chain(
    shared: &Shared,
    asked: &Asked,
    model: &str,
    (block_size, ahead): (u32, u32),
) -> Result<(Vec<u64>, u32), Fault> {
    let too_long = |n: usize| {
        refused("too_long", format!("{n} blocks; at most {MAX_FINGERPRINTS} are taken"), "send a shorter prompt")
    };
    match (&asked.token_ids, &asked.fingerprints) {
        (Some(tokens), None) => {
            let blocks = tokens.len() / (block_size as usize).max(1);
            if blocks > MAX_FINGERPRINTS {
                return Err(too_long(blocks));
            }
            let root = block::root(Namespace { model, adapter: &asked.adapter, salt: &asked.salt }, shared.config.seed);
            Ok((
                block::chain_ahead(root, block_size as usize, ahead as usize, tokens),
                u32::try_from(tokens.len()).unwrap_or(u32::MAX),
            ))
        }
        (None, Some(given)) => {
            if given.len() > MAX_FINGERPRINTS {
                return Err(too_long(given.len()));
            }
            let numbers: Option<Vec<u64>> = given
                .iter()
                .map(|one| match one {
                    Number::Number(number) => Some(*number).filter(|fp| *fp != 0),
                    Number::Text(text) => fingerprint(text),
                })
                .collect();
            let Some(fingerprints) = numbers else {
                return Err(refused(
                    "bad_fingerprint",
                    "a fingerprint is no 64-bit number above 0",
                    "decimal numbers, or text, decimal or 0x",
                ));
            };
            let tokens = (fingerprints.len() as u32).saturating_mul(block_size).saturating_add(ahead.max(1));
            Ok((fingerprints, asked.prompt_tokens.unwrap_or(tokens)))
        }
        _ => Err(refused(
            "bad_body",
            "one of token_ids and fingerprints is wanted, and only one",
            "see POST /v1/match in the README",
        )),
    }
}

/// Who has this block, credited or not?
pub async fn block(State(shared): State<Arc<Shared>>, Path(text): Path<String>) -> Response {
    let Some(number) = fingerprint(&text) else {
        return refused("bad_fingerprint", "that is no fingerprint", "a 64-bit number above 0, decimal or 0x")
            .into_response();
    };
    let holders: Vec<Value> = shared
        .lookup
        .holders_of(number)
        .into_iter()
        .map(|(status, kind)| json!({"engine": status.engine.to_string(), "kind": kind.name()}))
        .collect();
    Json(json!({ "fingerprint": number.to_string(), "holders": holders })).into_response()
}
