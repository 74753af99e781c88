//! What is answered on the control socket: one bounded reply a request.

use crate::feed::Feed;
use proto::control::{
    BUNDLE_PIECE_BYTES, MAX_BUNDLE_BYTES, MAX_REQUEST_BYTES, REPLAY_PIECE, Reply, Request, decode, encode,
};
use proto::proof::{Listener, Nonce, Secret};
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

/// Stands before a connection's requests: with a secret, only who proved to know it is answered.
#[derive(Debug)]
pub struct Gate {
    secret: Option<Secret>,
    listener: Listener,
}

impl Gate {
    /// The gate of one connection. `nonce`: random bytes, drawn for it alone.
    pub fn new(secret: Option<Secret>, nonce: Nonce) -> Self {
        Self { listener: Listener::new(secret.as_ref(), nonce), secret }
    }

    /// The gate's own answer; `None`: the request may pass.
    pub fn answer(&mut self, request: &[u8]) -> Option<Answer> {
        let request = if request.len() > MAX_REQUEST_BYTES { None } else { decode::<Request>(request).ok() };
        let reply = match request {
            Some(Request::Hello(hello)) => self.listener.challenge(hello).map(Reply::Challenge),
            Some(Request::Proof(proof)) => self.listener.welcome(self.secret.as_ref(), &proof).map(Reply::Welcome),
            _ if self.listener.is_open() => return None,
            _ => {
                Ok(refused("this agent answers only who proves to know its KVATLAS_SECRET; set the same at the index"))
            }
        };
        Some(ready(&reply.unwrap_or_else(|untrusted| refused(&untrusted.to_string()))))
    }
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
        // The gate's to answer; who was dialled has no need of them.
        Request::Hello(_) | Request::Proof(_) => refused("this connection is open already"),
    })
}

/// An encoded reply.
pub fn ready(reply: &Reply) -> Answer {
    Answer::Ready(encode(reply).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::proof::{Caller, Hello, Proof};

    fn told(answer: Option<Answer>) -> Option<Reply> {
        match answer? {
            Answer::Ready(bytes) => decode(&bytes).ok(),
            Answer::Audit(_) => None,
        }
    }

    #[test]
    fn nothing_passes_the_gate_without_a_proof() -> Result<(), Box<dyn std::error::Error>> {
        let (secret, other) = (Secret::new("0123456789abcdef")?, Secret::new("0123456789abcdeX")?);
        let snapshot = encode(&Request::Snapshot { cut: None, piece: 0 })?;
        let is_refused = |reply: Option<Reply>| matches!(reply, Some(Reply::Refused { .. }));
        for (theirs, opens) in [(Some(&secret), true), (Some(&other), false), (None, false)] {
            let mut gate = Gate::new(Some(secret.clone()), [3; 32]);
            assert!(is_refused(told(gate.answer(&snapshot))));
            assert!(is_refused(told(gate.answer(b"nonsense"))));
            let caller = Caller::new(Hello { engine: None, epoch: None, nonce: [4; 32] }, false);
            let reply = told(gate.answer(&encode(&Request::Hello(caller.hello().clone()))?));
            let Some(Reply::Challenge(challenge)) = reply else { panic!("no challenge but {reply:?}") };
            let proof = caller.prove(theirs, &challenge).unwrap_or(Proof { mac: vec![] });
            let reply = told(gate.answer(&encode(&Request::Proof(proof))?));
            assert_eq!(matches!(reply, Some(Reply::Welcome(_))), opens, "{reply:?}");
            assert_eq!(gate.answer(&snapshot).is_none(), opens);
        }
        assert!(Gate::new(None, [3; 32]).answer(&snapshot).is_none(), "without a secret all are served");
        Ok(())
    }
}
