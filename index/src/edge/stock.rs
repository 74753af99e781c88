//! What a stock engine is asked beside its event stream: its replay socket, and its `/metrics` for a sign of life.

use super::control::Job;
use super::inbox::{Event, Inbox};
use super::ingest::MOST_BYTES;
use super::zmtp::{Connection, Kind};
use crate::link::stock::pulse::Pulse;
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::rt::TokioIo;
use proto::native::dialect::EventBatch;
use proto::native::frames::{self, Message};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, timeout};

/// Deadline for a connection.
const CONNECT: Duration = Duration::from_secs(1);
/// Longest silence within a replay. vLLM answers between two batches, after 0.1 s at most; a step may hold its
/// interpreter for longer.
const SILENCE: Duration = Duration::from_secs(3);
/// Most messages of one replay that are read: a hundred times vLLM's ring at its default size.
const MOST_MESSAGES: u32 = 1 << 20;
/// How often a sign of life is asked for, and how long it may take.
const BEAT: Duration = Duration::from_secs(1);
/// Longest page of metrics that is read: real ones have some 100 KiB.
const MOST_METRICS_BYTES: usize = 8 << 20;

/// Asks for replays as they are wanted, until `jobs` closes. A newer ask ends the one before it.
pub async fn replays(stream: u64, name: String, endpoint: Option<String>, mut jobs: mpsc::Receiver<Job>, inbox: Inbox) {
    let mut job = jobs.recv().await;
    while let Some(wanted) = job.take() {
        let (Job::Events { id, from }, Some(endpoint)) = (wanted, &endpoint) else {
            job = jobs.recv().await;
            continue;
        };
        let (whole, reason) = tokio::select! {
            // A newer ask first: the older one's answers are not waited for any more.
            biased;
            newer = jobs.recv() => {
                job = newer;
                continue;
            }
            outcome = replay(stream, id, endpoint, from, &inbox) => match outcome {
                Ok(()) => (true, String::new()),
                Err(reason) => (false, reason),
            },
        };
        if !whole {
            tracing::debug!(engine = name, endpoint, from, reason, "the replay was cut short");
        }
        if !inbox.send(Event::ReplayOver { stream, id, whole, reason }, 0).await {
            return;
        }
        job = jobs.recv().await;
    }
}

/// One replay, to its end marker.
async fn replay(stream: u64, id: u64, endpoint: &str, from: u64, inbox: &Inbox) -> Result<(), String> {
    let opened = timeout(CONNECT, Connection::open(endpoint, Kind::Dealer, MOST_BYTES)).await;
    let mut connection = opened.map_err(|_| "no connection within a second")?.map_err(|broken| broken.to_string())?;
    connection.send(&[b"", &frames::replay_request(from)]).await.map_err(|broken| broken.to_string())?;
    for _ in 0..MOST_MESSAGES {
        let message = timeout(SILENCE, connection.receive()).await;
        let message = message.map_err(|_| "nothing came for 3 s")?.map_err(|broken| broken.to_string())?;
        let bytes = message.iter().map(|frame| frame.len()).sum();
        let event = match frames::read(&message) {
            Ok(Message::End) => return Ok(()),
            Ok(Message::Batch { seq, payload }) => match EventBatch::decode(payload) {
                Ok(batch) => Event::Replayed { stream, id, seq, batch, bytes },
                Err(bad) => Event::Bad { stream, reason: bad.to_string(), version: false },
            },
            Err(bad) => Event::Bad { stream, reason: bad.to_string(), version: false },
        };
        if !inbox.send(event, bytes).await {
            return Err("the index stops".into());
        }
    }
    Err(format!("more than {MOST_MESSAGES} messages"))
}

/// Reads the metrics at `address` once a second, until the task is aborted.
pub async fn pulses(stream: u64, address: String, inbox: Inbox) {
    let mut beat = interval(BEAT);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        beat.tick().await;
        let outcome = match timeout(BEAT, pulse(&address)).await {
            Ok(outcome) => outcome,
            Err(_) => Err("no answer within a second".to_string()),
        };
        if !inbox.send(Event::Pulse { stream, outcome }, 0).await {
            return;
        }
    }
}

async fn pulse(address: &str) -> Result<Pulse, String> {
    let socket = tokio::net::TcpStream::connect(address).await.map_err(|e| e.to_string())?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(socket)).await.map_err(|e| e.to_string())?;
    let exchange = async {
        let request = hyper::Request::get("/metrics").header("host", address).body(Empty::<bytes::Bytes>::new());
        let response = sender.send_request(request.map_err(|e| e.to_string())?).await.map_err(|e| e.to_string())?;
        if !response.status().is_success() {
            return Err(format!("HTTP status {}", response.status().as_u16()));
        }
        let body = Limited::new(response.into_body(), MOST_METRICS_BYTES).collect().await.map_err(|e| e.to_string())?;
        Ok(Pulse::read(&String::from_utf8_lossy(&body.to_bytes())))
    };
    tokio::pin!(exchange, connection);
    // The connection is driven here, so that nothing of it outlives this reading.
    tokio::select! {
        outcome = &mut exchange => outcome,
        ended = &mut connection => match ended {
            Ok(()) => exchange.await,
            Err(e) => Err(e.to_string()),
        },
    }
}
