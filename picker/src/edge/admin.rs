//! HTTP for people and for Prometheus.

use super::ext_proc::Stopping;
use super::lookup::Index;
use super::router::Router;
use crate::config::IndexSource;
use crate::exchange::Ask;
use crate::refusal::Refusal;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router as Routes};
use serde::Deserialize;
use serde_json::json;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// Decisions given when no limit is asked for.
const DECISIONS: usize = 50;

#[derive(Clone)]
struct Shared {
    router: Arc<Router>,
    stopping: watch::Receiver<Stopping>,
}

/// Serves until told to stop.
///
/// # Errors
/// Those of the socket.
pub async fn serve(
    listener: TcpListener,
    router: Arc<Router>,
    mut stopping: watch::Receiver<Stopping>,
) -> std::io::Result<()> {
    let limit = router.config.body_limit;
    let shared = Shared { router, stopping: stopping.clone() };
    let debug = Routes::new()
        .route("/v1/decisions", get(decisions))
        .route("/v1/decisions/{id}", get(decision))
        .route("/v1/explain", post(explain))
        .route("/v1/config", get(config))
        .layer(middleware::from_fn_with_state(shared.clone(), guard));
    let routes = Routes::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .merge(debug)
        .layer(DefaultBodyLimit::max(limit))
        .fallback(|| async { error(StatusCode::NOT_FOUND, "not_found", "there is no such page", "see GET /v1/config") })
        .with_state(shared);
    axum::serve(listener, routes)
        .with_graceful_shutdown(async move {
            let _ = stopping.wait_for(|now| *now == Stopping::Now).await;
        })
        .await
}

fn error(status: StatusCode, code: &str, message: &str, hint: &str) -> Response {
    (status, Json(json!({"error": {"code": code, "message": message, "hint": hint}}))).into_response()
}

/// The debug face tells whether a prompt was seen, so it wants the token where there is one.
async fn guard(State(shared): State<Shared>, request: Request, next: Next) -> Response {
    let Some(token) = &shared.router.config.token else { return next.run(request).await };
    let given = request.headers().get(header::AUTHORIZATION).and_then(|v| v.to_str().ok());
    let given = given.and_then(|v| v.strip_prefix("Bearer ")).unwrap_or_default();
    // In constant time over the token's length, so that nobody finds it byte by byte.
    let differing = token.bytes().zip(given.bytes().chain(std::iter::repeat(0))).fold(0, |all, (a, b)| all | (a ^ b));
    if differing == 0 && given.len() == token.len() {
        return next.run(request).await;
    }
    let hint = "send authorization: Bearer <token>, as in the picker's token_file";
    error(StatusCode::UNAUTHORIZED, "unauthorized", "this page needs the token", hint)
}

async fn metrics(State(shared): State<Shared>) -> Response {
    let router = &shared.router;
    let in_flight = router.ledger().len();
    let buffered = router.buffered.load(std::sync::atomic::Ordering::Relaxed);
    let live = router.pool.load().live;
    router.metrics.set(in_flight, buffered, router.index.untold(), live, router.renderers.load().len());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], router.metrics.text()).into_response()
}

/// Ready while it takes requests. What it lacks is told, and makes it no less ready: it can always route by load.
async fn ready(State(shared): State<Shared>) -> Response {
    let pool = shared.router.pool.load();
    let mut models: Vec<String> = shared.router.renderers.load().keys().cloned().collect();
    models.sort();
    let index = match (&shared.router.index, pool.live) {
        (Index::None, _) => "none",
        (_, true) => "followed",
        (_, false) => "away",
    };
    let taking = *shared.stopping.borrow() == Stopping::No;
    let status = if taking { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let told = json!({"ready": taking, "engines": pool.engines.len(), "index": index, "models": models});
    (status, Json(told)).into_response()
}

#[derive(Deserialize)]
struct Limit {
    limit: Option<usize>,
}

async fn decisions(State(shared): State<Shared>, Query(query): Query<Limit>) -> Response {
    let limit = query.limit.unwrap_or(DECISIONS);
    // Copied under the guard, written without it.
    let newest: Vec<_> = shared.router.decisions().newest(limit).cloned().collect();
    Json(json!({"decisions": newest})).into_response()
}

async fn decision(State(shared): State<Shared>, Path(id): Path<String>) -> Response {
    let found = {
        let decisions = shared.router.decisions();
        let by_id = uuid::Uuid::parse_str(&id).ok().and_then(|id| decisions.of_id(id.as_u128()));
        by_id.or_else(|| decisions.of_client(&id)).cloned()
    };
    match found {
        Some(decision) => Json(decision).into_response(),
        None => error(
            StatusCode::NOT_FOUND,
            "not_found",
            "no decision of that id is kept",
            "the last 4,096 decisions are, by the picker's id and by the client's x-request-id",
        ),
    }
}

#[derive(Deserialize)]
struct ExplainQuery {
    path: Option<String>,
}

/// The body is a request's; its path comes as `?path=`, or is told from the body.
async fn explain(
    State(shared): State<Shared>,
    Query(query): Query<ExplainQuery>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let path = query.path.unwrap_or_else(|| {
        let is_chat = serde_json::from_slice::<serde_json::Value>(&body).is_ok_and(|b| b.get("messages").is_some());
        if is_chat { "/v1/chat/completions".into() } else { "/v1/completions".into() }
    });
    let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
    let ask = Ask { path, headers: Vec::new(), client_id: text("x-request-id"), body: Some(body), subset: None };
    match shared.router.explain(ask).await {
        Ok(decision) => Json(decision).into_response(),
        Err(Refusal { status, code, message, hint }) => {
            error(StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_REQUEST), code, &message, hint)
        }
    }
}

async fn config(State(shared): State<Shared>) -> Response {
    let config = &shared.router.config;
    let weights: serde_json::Map<_, _> = config.policy.factors.weights().map(|(n, w)| (n.into(), json!(w))).collect();
    let index = match &config.index {
        IndexSource::None => json!("none"),
        IndexSource::Embedded => json!("embedded"),
        IndexSource::Addresses(addresses) => json!(addresses),
    };
    let pool = shared.router.pool.load();
    let engines: Vec<_> = pool
        .engines
        .iter()
        .map(|engine| {
            let known = engine.known.as_deref();
            json!({
                "engine": engine.id,
                "address": engine.address.to_string(),
                "models": known.map(|k| &k.models),
                "state": known.map(|k| k.state),
                "reason": known.map(|k| &k.reason).filter(|r| !r.is_empty()),
                "block_size": known.map(|k| k.block_size),
                "bundle": known.map(|k| &k.bundle),
            })
        })
        .collect();
    // The seed is a secret: who knows it can name blocks.
    Json(json!({
        "weights": weights,
        "max_queue": config.policy.max_queue,
        "max_utilization": config.max_utilization,
        "profile": config.policy.profile,
        "mode": config.policy.mode,
        "index": index,
        "deadline": {
            "base_ms": config.deadline.base.as_millis() as u64,
            "per_1000_tokens_ms": config.deadline.per_1000_tokens.as_millis() as u64,
            "max_ms": config.deadline.max.as_millis() as u64,
        },
        "body_limit_bytes": config.body_limit,
        "buffered_limit_bytes": config.buffered_limit,
        "render_limit_bytes": config.render_limit,
        "render_threads": config.render_threads,
        "seeded": config.seed != 0,
        "engines": engines,
    }))
    .into_response()
}
