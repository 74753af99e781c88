//! One engine's event stream: connects, reads, decodes, hands on; connects again whenever something is wrong.

use super::inbox::{Event, Inbox};
use super::zmtp::{Broken, Connection, Kind};
use proto::event::{BadBatch, Batch, MAX_PAYLOAD_BYTES, TOPIC, read_seq};
use proto::fleet::Source;
use proto::native::dialect::{BadEvents, EventBatch};
use proto::native::frames::{self, BadFrames, Message};
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Deadline for a connection to be made and greeted.
const CONNECT: Duration = Duration::from_secs(1);
/// First and longest pause before a new connection.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));
/// A connection that says nothing for so long (20 heartbeats) may be half open: a new one is made.
pub const SILENCE: Duration = Duration::from_secs(2);
/// The same for a stream without heartbeats, where quiet says nothing: the kernel finds out that the peer is gone when
/// it is gone for good, and this much later a new connection is tried all the same.
pub const NATIVE_SILENCE: Duration = Duration::from_secs(600);
/// Most bytes in one message: the payload's limit, and room for topic and seq.
pub const MOST_BYTES: usize = MAX_PAYLOAD_BYTES + 4096;

/// Follows the stream at `endpoint` until the task is aborted.
pub async fn follow(stream: u64, name: String, endpoint: String, source: Source, inbox: Inbox) {
    let mut pause = PAUSE.0;
    let mut said = String::new();
    loop {
        let why = match timeout(CONNECT, connect(&endpoint, source)).await {
            Err(_) => "no connection within a second".to_string(),
            Ok(Err(broken)) => broken.to_string(),
            Ok(Ok(connection)) => {
                tracing::info!(engine = name, endpoint, "connected");
                inbox.send(Event::Connected { stream }, 0).await;
                let (heard, why) = read(stream, connection, source, &inbox).await;
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

async fn connect(endpoint: &str, source: Source) -> Result<Connection, Broken> {
    let mut connection = Connection::open(endpoint, Kind::Sub, MOST_BYTES).await?;
    let prefix = match source {
        Source::Agent => TOPIC,
        Source::Native => "",
    };
    connection.subscribe(prefix).await?;
    Ok(connection)
}

/// Reads until the connection is of no use. Says whether anything came, and why it ended.
async fn read(stream: u64, mut connection: Connection, source: Source, inbox: &Inbox) -> (bool, String) {
    let mut heard = false;
    let silence = match source {
        Source::Agent => SILENCE,
        Source::Native => NATIVE_SILENCE,
    };
    loop {
        let frames = match timeout(silence, connection.receive()).await {
            Err(_) => return (heard, format!("nothing heard for {} s", silence.as_secs())),
            Ok(Err(broken)) => return (heard, broken.to_string()),
            Ok(Ok(frames)) => frames,
        };
        heard = true;
        let bytes = frames.iter().map(|frame| frame.len()).sum();
        let loopback = connection.loopback;
        let event = match source {
            Source::Agent => decode(&frames).map(|(seq, batch)| Event::Message { stream, seq, batch, bytes, loopback }),
            Source::Native => decode_events(&frames).map(|(seq, batch)| Event::Events { stream, seq, batch, bytes }),
        };
        let event = match event {
            Ok(event) => event,
            Err(bad) => bad.event(stream),
        };
        // Waits while the writer is behind: then TCP waits, then the agent drops, and the gap shows.
        if !inbox.send(event, bytes).await {
            return (heard, "the index stops".into());
        }
    }
}

/// Why frames are no message.
#[derive(Debug, thiserror::Error)]
pub(super) enum Bad {
    #[error("a message of {0} frames; a kvatlas message has 3 (vLLM's own events? then say `source: native`)")]
    Frames(usize),
    #[error("a topic that does not start with kvatlas/1/")]
    Topic,
    #[error("a seq of {0} bytes; it has 8")]
    Seq(usize),
    #[error(transparent)]
    Batch(BadBatch),
    #[error(transparent)]
    NativeFrames(#[from] BadFrames),
    #[error("the end of a replay in a live stream")]
    NativeEnd,
    #[error(transparent)]
    Events(#[from] BadEvents),
}

impl Bad {
    /// What the writer is told.
    pub(super) fn event(&self, stream: u64) -> Event {
        Event::Bad { stream, version: matches!(self, Bad::Batch(BadBatch::Version(_))), reason: self.to_string() }
    }
}

fn decode_events(frames: &[bytes::Bytes]) -> Result<(u64, EventBatch), Bad> {
    match frames::read(frames)? {
        Message::Batch { seq, payload } => Ok((seq, EventBatch::decode(payload)?)),
        Message::End => Err(Bad::NativeEnd),
    }
}

/// Reads the three frames of an agent's message.
pub(super) fn decode(frames: &[bytes::Bytes]) -> Result<(u64, Batch), Bad> {
    let [topic, seq, payload] = frames else { return Err(Bad::Frames(frames.len())) };
    if !topic.starts_with(TOPIC.as_bytes()) {
        return Err(Bad::Topic);
    }
    let seq = read_seq(seq).ok_or(Bad::Seq(seq.len()))?;
    Ok((seq, Batch::decode(payload).map_err(Bad::Batch)?))
}
