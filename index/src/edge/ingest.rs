//! One engine's event stream: connects, reads, decodes, hands on; connects again whenever something is wrong.

use super::inbox::{Event, Inbox};
use super::zmtp::{Broken, Connection, Kind};
use proto::event::{BadBatch, Batch, MAX_PAYLOAD_BYTES, TOPIC, read_seq};
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Deadline for a connection to be made and greeted.
const CONNECT: Duration = Duration::from_secs(1);
/// First and longest pause before a new connection.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));
/// A connection that says nothing for so long (20 heartbeats) may be half open: a new one is made.
pub const SILENCE: Duration = Duration::from_secs(2);
/// Most bytes in one message: the payload's limit, and room for topic and seq.
pub const MOST_BYTES: usize = MAX_PAYLOAD_BYTES + 4096;

/// Follows the stream at `endpoint` until the task is aborted.
pub async fn follow(stream: u64, name: String, endpoint: String, inbox: Inbox) {
    let mut pause = PAUSE.0;
    let mut said = String::new();
    loop {
        let why = match timeout(CONNECT, connect(&endpoint)).await {
            Err(_) => "no connection within a second".to_string(),
            Ok(Err(broken)) => broken.to_string(),
            Ok(Ok(connection)) => {
                tracing::info!(engine = name, endpoint, "connected");
                let (heard, why) = read(stream, connection, &inbox).await;
                if heard {
                    pause = PAUSE.0;
                    said.clear();
                }
                why
            }
        };
        if inbox.is_closed() {
            return;
        }
        // The same fault again and again is said once.
        if why != said {
            tracing::warn!(engine = name, endpoint, reason = why, "the event stream is away");
            inbox.send(Event::Away { stream, reason: why.clone() }, 0).await;
            said = why;
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE.1);
    }
}

async fn connect(endpoint: &str) -> Result<Connection, Broken> {
    let mut connection = Connection::open(endpoint, Kind::Sub, MOST_BYTES).await?;
    connection.subscribe(TOPIC).await?;
    Ok(connection)
}

/// Reads until the connection is of no use. Says whether anything came, and why it ended.
async fn read(stream: u64, mut connection: Connection, inbox: &Inbox) -> (bool, String) {
    let mut heard = false;
    loop {
        let frames = match timeout(SILENCE, connection.receive()).await {
            Err(_) => return (heard, "nothing heard for 2 s".into()),
            Ok(Err(broken)) => return (heard, broken.to_string()),
            Ok(Ok(frames)) => frames,
        };
        heard = true;
        let event = match decode(&frames) {
            Ok((seq, batch)) => {
                let bytes = frames.iter().map(|frame| frame.len()).sum();
                Event::Message { stream, seq, batch, bytes, loopback: connection.loopback }
            }
            Err(bad) => Event::Bad { stream, version: matches!(bad, Bad::Batch(BadBatch::Version(_))), reason: bad.to_string() },
        };
        // Waits while the writer is behind: then TCP waits, then the agent drops, and the gap shows.
        let bytes = frames.iter().map(|frame| frame.len()).sum();
        if !inbox.send(event, bytes).await {
            return (heard, "the index stops".into());
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum Bad {
    #[error("a message of {0} frames; a kvatlas message has 3 (vLLM's own events? then say `source: native`)")]
    Frames(usize),
    #[error("a topic that does not start with kvatlas/1/")]
    Topic,
    #[error("a seq of {0} bytes; it has 8")]
    Seq(usize),
    #[error(transparent)]
    Batch(BadBatch),
}

fn decode(frames: &[bytes::Bytes]) -> Result<(u64, Batch), Bad> {
    let [topic, seq, payload] = frames else { return Err(Bad::Frames(frames.len())) };
    if !topic.starts_with(TOPIC.as_bytes()) {
        return Err(Bad::Topic);
    }
    let seq = read_seq(seq).ok_or(Bad::Seq(seq.len()))?;
    Ok((seq, Batch::decode(payload).map_err(Bad::Batch)?))
}
