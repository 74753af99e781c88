//! HTTP for people, probes and Prometheus: the same facts as gRPC, as JSON.

mod lookups;
mod views;

use super::grpc::same;
use crate::answer::NoBundle;
use crate::app::Shared;
use axum::Json;
use axum::extract::{DefaultBodyLimit, Path, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// Longest body taken: a prompt of two million token ids as JSON text, 8 bytes each.
pub const MOST_BODY_BYTES: usize = 16 << 20;

/// Listens, and serves until stopped. Returns where it listens.
///
/// # Errors
/// When the address is taken.
pub async fn serve(
    address: SocketAddr,
    shared: Arc<Shared>,
    mut stopped: watch::Receiver<bool>,
) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind(address).await?;
    let address = listener.local_addr()?;
    let debug = axum::Router::new()
        .route("/v1/engines", get(views::engines))
        .route("/v1/engines/{engine}", get(views::engine))
        .route("/v1/engines/{engine}/blocks", get(views::blocks))
        .route("/v1/stats", get(views::stats))
        .route("/v1/match", post(lookups::match_))
        .route("/v1/blocks/{fingerprint}", get(lookups::block))
        .route("/v1/models/{model}/bundle", get(bundle))
        .layer(middleware::from_fn_with_state(shared.clone(), guard));
    let router = axum::Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .merge(debug)
        .fallback(|| async {
            Fault::new(
                StatusCode::NOT_FOUND,
                "not_found",
                "there is nothing at this path",
                "see /v1/engines, /v1/match, /v1/stats, /metrics",
            )
        })
        .layer(DefaultBodyLimit::max(MOST_BODY_BYTES))
        .with_state(shared);
    tokio::spawn(async move {
        let serving = axum::serve(listener, router).with_graceful_shutdown(async move {
            // An error says that every handle is gone: stop as well.
            let _ = stopped.wait_for(|stopped| *stopped).await;
        });
        if let Err(error) = serving.await {
            tracing::error!(%error, "HTTP ended");
        }
    });
    tracing::info!(%address, "HTTP listens");
    Ok(address)
}

/// An error as every face of kvatlas tells it: `{"error":{"code","message","hint"}}`.
pub struct Fault {
    status: StatusCode,
    code: &'static str,
    message: String,
    hint: &'static str,
}

impl Fault {
    /// `code`: for programs; `message`: what is wrong; `hint`: what to do.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>, hint: &'static str) -> Self {
        Self { status, code, message: message.into(), hint }
    }
}

impl IntoResponse for Fault {
    fn into_response(self) -> Response {
        let Self { status, code, message, hint } = self;
        (status, Json(serde_json::json!({"error": {"code": code, "message": message, "hint": hint}}))).into_response()
    }
}

async fn guard(State(shared): State<Arc<Shared>>, headers: HeaderMap, request: Request, next: Next) -> Response {
    let given = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes()).unwrap_or_default();
    match &shared.config.token {
        Some(token) if !same(given.strip_prefix(b"Bearer ").unwrap_or_default(), token.as_bytes()) => Fault::new(
            StatusCode::UNAUTHORIZED,
            "no_token",
            "this face is guarded: it would tell whether a prompt was seen",
            "send `authorization: Bearer <token>` with the token of token_file",
        )
        .into_response(),
        _ => next.run(request).await,
    }
}

/// Ready: the fleet list is there and the writer lives.
async fn ready(State(shared): State<Arc<Shared>>) -> Response {
    if shared.scribe.fleet().is_closed() {
        let hint = "see the log; start it again";
        return Fault::new(StatusCode::SERVICE_UNAVAILABLE, "no_writer", "the index's writer has stopped", hint)
            .into_response();
    }
    if shared.lookup.board.version() == 0 {
        let hint = "wait a moment";
        return Fault::new(StatusCode::SERVICE_UNAVAILABLE, "no_fleet", "the fleet list was not read yet", hint)
            .into_response();
    }
    "ready\n".into_response()
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    match shared.metrics.scrape(&shared.lookup.board, &shared.lookup) {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(error) => {
            Fault::new(StatusCode::INTERNAL_SERVER_ERROR, "metrics", error.to_string(), "report it").into_response()
        }
    }
}

async fn bundle(State(shared): State<Arc<Shared>>, Path(model): Path<String>) -> Response {
    match shared.bundles.get(&shared.lookup.board, &model) {
        Ok(bundle) => (
            [(header::CONTENT_TYPE, "application/json".to_string()), (header::ETAG, format!("\"{}\"", bundle.digest))],
            axum::body::Bytes::from_owner(bundle.bytes),
        )
            .into_response(),
        Err(error) => {
            let (status, code, hint) = match &error {
                NoBundle::NoModel(_) => (StatusCode::NOT_FOUND, "no_model", "see the models in /v1/engines"),
                NoBundle::NotYet(_) => (
                    StatusCode::SERVICE_UNAVAILABLE,
                    "no_bundle",
                    "the engine's agent exports it once, soon after its start",
                ),
                NoBundle::Fetching(_) => (StatusCode::SERVICE_UNAVAILABLE, "fetching", "ask again in a second"),
            };
            Fault::new(status, code, error.to_string(), hint).into_response()
        }
    }
}
