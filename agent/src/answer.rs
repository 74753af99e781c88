//! What is answered on the control socket: one bounded reply a request.

use crate::feed::Feed;
use proto::control::{
    BUNDLE_PIECE_BYTES, MAX_BUNDLE_BYTES, MAX_REQUEST_BYTES, REPLAY_PIECE, Reply, Request, decode, encode,
};
use xxhash_rust::xxh3::xxh3_128;

/// Bytes of payloads after which a replay's answer takes no further one: an answer is at most this and one message.
const REPLAY_BYTES: usize = 1 << 20;

/// What the engine really uses to make token ids, as JSON.
#[derive(Debug, Clone)]
pub struct Bundle {
    digest: String,
    bytes: Vec<u8>,
}

impl Bundle {
    /// A bundle of these bytes; `None` when there are more than [`MAX_BUNDLE_BYTES`].
    pub fn new(bytes: Vec<u8>) -> Option<Self> {
        (bytes.len() <= MAX_BUNDLE_BYTES).then(|| Self { digest: format!("{:032x}", xxh3_128(&bytes)), bytes })
    }

    /// XXH3-128 of the bytes, 32 hex digits.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    fn piece(&self, offset: u64) -> Option<Reply> {
        let rest = self.bytes.get(usize::try_from(offset).ok()?..)?;
        Some(Reply::Bundle {
            digest: self.digest.clone(),
            total: self.bytes.len() as u64,
            offset,
            bytes: rest[..rest.len().min(BUNDLE_PIECE_BYTES)].to_vec(),
        })
    }
}

/// An answer, or what must be asked of the engine first.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// The encoded reply.
    Ready(Vec<u8>),
    /// Read the pool from this block id on.
    Audit(u64),
}

fn refused(reason: &str) -> Reply {
    Reply::Refused { reason: reason.to_string() }
}

/// Answers one request.
pub fn answer(feed: &mut Feed, bundle: Option<&Bundle>, request: &[u8], now_ms: u64) -> Answer {
    if request.len() > MAX_REQUEST_BYTES {
        return ready(&refused("the request is longer than 4096 bytes"));
    }
    let Ok(request) = decode::<Request>(request) else {
        return ready(&refused("the request is not one that this agent knows; see proto/src/control.rs"));
    };
    let epoch = feed.identity().epoch;
    ready(&match request {
        Request::Ack { .. } => Reply::Ack { engine: feed.identity().engine.clone(), epoch, next: feed.replay().next() },
        Request::Replay { from } if from < feed.replay().oldest() => Reply::Gone { oldest: feed.replay().oldest() },
        Request::Replay { from } => {
            feed.replayed();
            let payloads = feed.replay().from(from, REPLAY_PIECE, REPLAY_BYTES);
            Reply::Replay { epoch, from, payloads, next: feed.replay().next() }
        }
        Request::Snapshot { cut: None, piece: 0 } => return Answer::Ready(feed.cut(now_ms)),
        Request::Snapshot { cut: None, .. } => Reply::NoSnapshot,
        Request::Snapshot { cut: Some(cut), piece } => match feed.piece(cut, piece, now_ms) {
            Some(bytes) => return Answer::Ready(bytes),
            None => Reply::NoSnapshot,
        },
        Request::Bundle { digest, offset } => {
            bundle.filter(|b| b.digest == digest).and_then(|b| b.piece(offset)).unwrap_or(Reply::NoBundle)
        }
        Request::Audit { from } => return Answer::Audit(from),
    })
}

/// An encoded reply.
pub fn ready(reply: &Reply) -> Answer {
    Answer::Ready(encode(reply).unwrap_or_default())
}
