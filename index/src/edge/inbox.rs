//! The way to the writer: what it is told, and how much may wait for it.

use crate::fleet::{NotTaken, Stream};
use crate::link::stock::pulse::Pulse;
use bytes::Bytes;
use proto::control::Reply;
use proto::event::Batch;
use proto::fleet::Entry;
use proto::id::{EngineId, Epoch, SetKind};
use proto::native::dialect::EventBatch;
use std::sync::Arc;
use tokio::sync::{Semaphore, mpsc, oneshot};

/// Events that may wait for the writer.
const MOST_EVENTS: usize = 4096;
/// Payload bytes that may wait for the writer, in units of 1 KiB: 128 MiB, eight of the longest messages.
const MOST_WAITING_KIB: usize = 128 << 10;
/// Largest answer to [`Questions::members`].
pub const MOST_MEMBERS: usize = 4 << 20;

/// What the writer is told.
#[derive(Debug)]
pub enum Event {
    /// A message of a stream.
    Message {
        /// The stream.
        stream: Stream,
        /// Its seq.
        seq: u64,
        /// What it says.
        batch: Batch,
        /// Its length.
        bytes: usize,
        /// Did it stay on this machine? Only then are the sender's clock and ours the same.
        loopback: bool,
    },
    /// A message of an engine's own events.
    Events {
        /// The stream.
        stream: Stream,
        /// Its seq.
        seq: u64,
        /// What it says.
        batch: EventBatch,
        /// Its length.
        bytes: usize,
    },
    /// A message of a replay of an engine's own events.
    Replayed {
        /// The stream.
        stream: Stream,
        /// The link's number of the replay.
        id: u64,
        /// Its seq.
        seq: u64,
        /// What it says.
        batch: EventBatch,
        /// Its length.
        bytes: usize,
    },
    /// That replay is over.
    ReplayOver {
        /// The stream.
        stream: Stream,
        /// The link's number of the replay.
        id: u64,
        /// With its end marker.
        whole: bool,
        /// Why not, if not.
        reason: String,
    },
    /// A reading of an engine's metrics, or why there is none.
    Pulse {
        /// The stream.
        stream: Stream,
        /// What was read.
        outcome: Result<Pulse, String>,
    },
    /// The connection is made.
    Connected {
        /// The stream.
        stream: Stream,
    },
    /// Bytes that are no message.
    Bad {
        /// The stream.
        stream: Stream,
        /// What is wrong.
        reason: String,
        /// They are of a protocol that this index does not speak.
        version: bool,
    },
    /// The connection is lost, or cannot be made.
    Away {
        /// The stream.
        stream: Stream,
        /// Why.
        reason: String,
    },
    /// An agent's answer.
    Reply {
        /// The stream.
        stream: Stream,
        /// The link's number of the ask.
        id: u64,
        /// The answer.
        reply: Reply,
    },
    /// No answer.
    Failed {
        /// The stream.
        stream: Stream,
        /// The link's number of the ask.
        id: u64,
        /// Why.
        reason: String,
    },
    /// An agent dialled in and proved what it had to.
    Arrived(Box<Arrival>),
    /// Its connection is lost.
    Left {
        /// The stream.
        stream: Stream,
        /// The connection.
        connection: u64,
        /// Why.
        reason: String,
    },
    /// The fleet list. Who wants to know that readers see it gets word.
    Fleet(Vec<Entry>, Option<oneshot::Sender<()>>),
    /// Somebody wants to see a whole set.
    Members {
        /// `name.rank`.
        engine: String,
        /// Which set.
        kind: SetKind,
        /// The answer; `None`: no such engine.
        answer: oneshot::Sender<Option<Members>>,
    },
}

/// An agent that dialled in.
#[derive(Debug)]
pub struct Arrival {
    /// The engine that it speaks for.
    pub engine: EngineId,
    /// Its process life.
    pub epoch: Epoch,
    /// The connection's number, never used twice.
    pub connection: u64,
    /// The way to ask it.
    pub asker: mpsc::Sender<Question>,
    /// Kept while the connection is wanted: it ends when this is dropped.
    pub hold: oneshot::Sender<()>,
    /// The stream that it is from now on, or why it is not taken.
    pub answer: oneshot::Sender<Result<Stream, NotTaken>>,
}

/// What an agent that dialled in is asked.
#[derive(Debug)]
pub struct Question {
    /// The request, encoded.
    pub request: Vec<u8>,
    /// The encoded reply. Dropped when the connection is lost.
    pub answer: oneshot::Sender<Bytes>,
}

/// All members of one set.
#[derive(Debug, Clone, Default)]
pub struct Members {
    /// Everything before this seq is in it.
    pub next: u64,
    /// The members, in no order.
    pub fingerprints: Vec<u64>,
}

/// An event, and the room that it takes until it is dropped.
pub struct Parcel {
    /// The event.
    pub event: Event,
    _room: Option<tokio::sync::OwnedSemaphorePermit>,
}

/// The way to the writer. Waits while it is behind.
#[derive(Clone)]
pub struct Inbox {
    sender: mpsc::Sender<Parcel>,
    room: Arc<Semaphore>,
}

/// A way to the writer, and the writer's end of it.
pub fn open() -> (Inbox, mpsc::Receiver<Parcel>) {
    let (sender, receiver) = mpsc::channel(MOST_EVENTS);
    (Inbox { sender, room: Arc::new(Semaphore::new(MOST_WAITING_KIB)) }, receiver)
}

impl Inbox {
    /// Hands an event on; `bytes`: what it holds in memory. False when the index stops.
    pub async fn send(&self, event: Event, bytes: usize) -> bool {
        let kib = (bytes / 1024).min(MOST_WAITING_KIB) as u32;
        let _room = match kib {
            0 => None,
            kib => match self.room.clone().acquire_many_owned(kib).await {
                Ok(room) => Some(room),
                Err(_) => return false,
            },
        };
        self.sender.send(Parcel { event, _room }).await.is_ok()
    }

    /// Has the writer stopped?
    pub fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }
}

/// Questions to the writer.
#[derive(Clone)]
pub struct Questions(pub Inbox);

impl Questions {
    /// The way in, for the fleet list.
    pub fn fleet(&self) -> Inbox {
        self.0.clone()
    }

    /// All members of a live set: a walk over the whole table in the writer's turn, for tests and people who doubt.
    /// `None`: there is no such engine.
    pub async fn members(&self, engine: &str, kind: SetKind) -> Option<Members> {
        let (answer, answered) = oneshot::channel();
        self.0.send(Event::Members { engine: engine.into(), kind, answer }, 0).await;
        answered.await.ok().flatten()
    }
}
