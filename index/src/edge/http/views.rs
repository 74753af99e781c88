//! `GET /v1/engines`, `/v1/engines/{engine}`, `/v1/engines/{engine}/blocks`, `/v1/stats`.

use super::Fault;
use crate::answer::{EngineState, ResyncReason, Status};
use crate::app::Shared;
use crate::edge::board::names;
use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use proto::fleet::Source;
use proto::id::SetKind;
use serde::Deserialize;
use serde_json::{Value, json};
use std::fmt::Write;
use std::sync::Arc;

/// All engines.
pub async fn engines(State(shared): State<Arc<Shared>>) -> Json<Value> {
    let mut rows = Vec::new();
    for seat in shared.lookup.board.seats().iter() {
        let status = seat.status();
        rows.push(row(&shared, &status));
        rows.extend(ignored(&status));
    }
    Json(json!({ "engines": rows }))
}

/// One engine.
pub async fn engine(State(shared): State<Arc<Shared>>, Path(engine): Path<String>) -> Response {
    match shared.lookup.board.find(&engine) {
        Some(seat) => Json(row(&shared, &seat.status())).into_response(),
        None => no_engine(&engine).into_response(),
    }
}

fn no_engine(engine: &str) -> Fault {
    let name: String = engine.chars().take(64).collect();
    Fault::new(
        StatusCode::NOT_FOUND,
        "no_engine",
        format!("there is no engine {name:?}"),
        "engines are written name.rank; see /v1/engines",
    )
}

fn source(status: &Status) -> &'static str {
    match status.source {
        Source::Agent => "agent",
        Source::Native => "native",
    }
}

fn row(shared: &Shared, status: &Status) -> Value {
    let board = &shared.lookup.board;
    let now_ms = board.clock.now_ms();
    let state = status.state_at(now_ms, &board.leases);
    let heartbeat = status.heartbeat.as_deref();
    let reserved = shared.lookup.reserved(status.slot);
    let tally = &status.tally;
    let mut row = json!({
        "engine": status.engine.to_string(),
        "rank": status.engine.rank,
        "address": status.address,
        "rank_header": heartbeat.and_then(|state| state.rank_header),
        "source": source(status),
        "state": state.name(),
        "reason": status.reason,
        "epoch": status.epoch.map(|epoch| epoch.to_string()),
        "seq": status.next.checked_sub(1),
        "age_ms": status.heard_ms.map(|_| status.age_ms(now_ms)),
        "in_step": status.in_step.map(|in_step| in_step && state == EngineState::InStep),
        "gpu_blocks": status.blocks[SetKind::Gpu.index()],
        "any_blocks": status.blocks[SetKind::Any.index()].max(status.blocks[SetKind::Gpu.index()]),
        "unnamed": heartbeat.map(|state| state.unnamed),
        "messages": tally.messages,
        "bad_messages": tally.bad,
        "gaps": tally.gaps,
        "replays": tally.replays,
        "resyncs": tally.resyncs.iter().sum::<u64>(),
        "resyncs_by_reason": ResyncReason::ALL.iter().map(|reason| (reason.name(), tally.resyncs[*reason as usize])).collect::<std::collections::BTreeMap<_, _>>(),
        "digest_checks": tally.digest_checks,
        "digest_failures": tally.digest_failures,
        "epochs": tally.epochs,
        "native": status.native.as_ref().map(|counters| counters.iter().filter(|(_, count)| *count > 0).collect::<std::collections::BTreeMap<_, _>>()),
        "reserved": reserved.requests,
        "reserved_tokens": reserved.tokens,
        "block_size": Some(status.block_size()).filter(|size| *size > 0),
        "models": status.models(),
        "bundle": status.bundle(),
    });
    if let (Value::Object(row), Value::Object(told)) = (&mut row, told(heartbeat)) {
        row.extend(told);
    }
    row
}

/// What the engine says of itself; every field is there, null before the first heartbeat.
fn told(heartbeat: Option<&proto::event::State>) -> Value {
    json!({
        "running": heartbeat.map(|state| state.running),
        "waiting": heartbeat.map(|state| state.waiting),
        "backlog_tokens": heartbeat.map(|state| state.backlog_tokens),
        "kv_use": heartbeat.map(|state| state.kv_use),
        "steps": heartbeat.map(|state| state.steps),
        "stalled_ms": heartbeat.map(|state| state.stalled_ms),
        "adapters": heartbeat.map(|state| &state.adapters),
        "adapters_running": heartbeat.map(|state| &state.adapters_running),
        "adapters_waiting": heartbeat.map(|state| &state.adapters_waiting),
        "adapters_cached": heartbeat.map(|state| &state.adapters_cached),
        "max_adapters": heartbeat.map(|state| state.max_adapters),
        "gpu_utilization": heartbeat.and_then(|state| state.gpu_utilization),
        "gpus": heartbeat.and_then(|state| state.gpus.as_ref()),
        "health": heartbeat.map(|state| state.health),
        "ailments": heartbeat.map(|state| &state.ailments),
        "draining": heartbeat.map(|state| state.draining),
        "asleep": heartbeat.map(|state| state.asleep),
        "rule": heartbeat.map(|state| &state.rule),
        "agent": heartbeat.map(|state| &state.agent),
        "engine_version": heartbeat.map(|state| &state.engine_version),
        "agent_counters": heartbeat.map(|state| state.counters),
    })
}

/// The second process under one name, which is ignored: a row of its own, so that it is seen.
fn ignored(status: &Status) -> Option<Value> {
    let epoch = status.ignored?;
    Some(json!({
        "engine": status.engine.to_string(),
        "rank": status.engine.rank,
        "source": source(status),
        "state": EngineState::Conflict.name(),
        "reason": "it speaks under this name with an earlier start than the process that is followed: ignored until that one is silent for a lease",
        "epoch": epoch.to_string(),
        "gpu_blocks": 0,
        "any_blocks": 0,
    }))
}

/// What may follow a path.
#[derive(Debug, Deserialize)]
pub struct Which {
    kind: Option<String>,
}

/// All fingerprints of one live set as decimal strings (JSON numbers are doubles to many readers), and the seq that
/// they belong to. At most four million.
pub async fn blocks(
    State(shared): State<Arc<Shared>>,
    Path(engine): Path<String>,
    Query(which): Query<Which>,
) -> Response {
    let asked = which.kind.as_deref().unwrap_or("gpu");
    let Some(kind) = SetKind::ALL.into_iter().find(|kind| kind.name() == asked) else {
        return Fault::new(
            StatusCode::BAD_REQUEST,
            "bad_kind",
            "there is no such kind of set",
            "kind is gpu, any, or s1 to s7 for an engine with several kinds of attention",
        )
        .into_response();
    };
    let status = shared.lookup.board.seats().iter().map(|seat| seat.status()).find(|status| names(status, &engine));
    let (Some(status), Some(members)) = (status, shared.scribe.members(&engine, kind).await) else {
        return no_engine(&engine).into_response();
    };
    // 22 bytes each: built as text at once, not as a tree of values.
    let mut text = String::with_capacity(members.fingerprints.len() * 23 + 256);
    let head = json!({
        "engine": status.engine.to_string(), "kind": kind.name(), "seq": members.next.checked_sub(1),
        "epoch": status.epoch.map(|epoch| epoch.to_string()), "count": members.fingerprints.len(),
    });
    text.push_str(head.to_string().trim_end_matches('}'));
    text.push_str(",\"blocks\":[");
    for (at, fingerprint) in members.fingerprints.iter().enumerate() {
        // Writing into a string does not fail.
        let _ = write!(text, "{}\"{fingerprint}\"", if at == 0 { "" } else { "," });
    }
    text.push_str("]}");
    ([(header::CONTENT_TYPE, "application/json")], Bytes::from(text)).into_response()
}

/// Sizes and times.
pub async fn stats(State(shared): State<Arc<Shared>>) -> Json<Value> {
    let board = &shared.lookup.board;
    let now_ms = board.clock.now_ms();
    let mut states = std::collections::BTreeMap::new();
    for seat in board.seats().iter() {
        *states.entry(seat.status().state_at(now_ms, &board.leases).name()).or_insert(0u32) += 1;
    }
    let core = shared.metrics.core();
    let (placements, coming) = shared.lookup.reservations();
    let (bundles, bundle_bytes) = shared.bundles.held();
    let times = |recent: Option<(f32, f32, usize)>, unit: f32| {
        recent.map(|(p50, p99, count)| json!({"p50": p50 * unit, "p99": p99 * unit, "count": count}))
    };
    Json(json!({
        "uptime_ms": now_ms,
        "engines": states,
        "core": {
            "slots": core.slots, "blocks": core.used, "sets": core.sets, "holders": core.holders, "retired_holders": core.retired,
            "table_bytes": core.table_bytes, "sets_bytes": core.sets_bytes, "limbo_bytes": core.limbo_bytes, "bytes": core.bytes(),
        },
        "placements": placements,
        "coming_blocks": coming,
        "bundles": bundles,
        "bundle_bytes": bundle_bytes,
        "watchers": shared.hub.watchers(),
        "step_to_answerable_ms": times(shared.metrics.recent_answerable(), 1e3),
        "lookup_us": times(shared.metrics.recent_lookups(), 1e6),
    }))
}
