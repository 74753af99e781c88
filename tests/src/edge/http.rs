//! A plain HTTP/1.1 client for JSON on loopback: one request a connection, on hyper, which tonic brings already.

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::net::SocketAddr;
use std::time::Duration;

/// Longest wait for an answer.
const LIMIT: Duration = Duration::from_secs(60);
/// Longest answer read, in bytes: the fleet's state and a decision are some kilobytes.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// Status and body of one answer.
///
/// # Errors
/// When there is no answer.
pub async fn exchange(
    address: SocketAddr,
    method: &str,
    path: &str,
    body: Option<&Value>,
) -> Result<(StatusCode, Bytes)> {
    let talk = async {
        let stream = tokio::net::TcpStream::connect(address).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let driver = tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", address.to_string())
            .header("content-type", "application/json")
            .body(Full::new(body.map(|b| Bytes::from(b.to_string())).unwrap_or_default()))?;
        let response = sender.send_request(request).await?;
        let status = response.status();
        let bytes =
            Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await.map_err(anyhow::Error::from_boxed)?;
        driver.abort();
        anyhow::Ok((status, bytes.to_bytes()))
    };
    tokio::time::timeout(LIMIT, talk)
        .await
        .unwrap_or_else(|_| bail!("no answer within {} s", LIMIT.as_secs()))
        .with_context(|| format!("{method} http://{address}{path}"))
}

/// Whether a GET is answered with 200.
pub async fn is_ok(address: SocketAddr, path: &str) -> bool {
    matches!(exchange(address, "GET", path, None).await, Ok((StatusCode::OK, _)))
}

/// JSON of a GET.
///
/// # Errors
/// When the answer is not 200 or not JSON.
pub async fn get(address: SocketAddr, path: &str) -> Result<Value> {
    json(address, "GET", path, None).await
}

/// JSON of a POST.
///
/// # Errors
/// When the answer is not 200 or not JSON.
pub async fn post(address: SocketAddr, path: &str, body: &Value) -> Result<Value> {
    json(address, "POST", path, Some(body)).await
}

async fn json(address: SocketAddr, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
    let (status, bytes) = exchange(address, method, path, body).await?;
    if status != StatusCode::OK {
        bail!("{method} http://{address}{path}: {status} {}", String::from_utf8_lossy(&bytes));
    }
    serde_json::from_slice(&bytes).with_context(|| format!("{method} http://{address}{path} is not JSON"))
}
