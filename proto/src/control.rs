//! What is asked of an agent on its control socket, and its answers.
//!
//! The agent binds a ROUTER; a reader connects a DEALER and sends `[empty, request]`, MessagePack with named fields;
//! the answer is `[empty, reply]`. Every answer is one message, and long things are asked for piece by piece: no
//! request makes the agent queue more than one reply, so its memory is bounded by the requests it reads.

use crate::digest::Digest;
use crate::event::{Fingerprints, Parent};
use crate::id::{EngineId, Epoch, SetKind};
use crate::proof::{Challenge, Hello, Proof, Welcome};
use serde::{Deserialize, Serialize};

/// Most fingerprints in one piece of a snapshot: 64 KiB.
pub const SNAPSHOT_PIECE: usize = 8192;
/// Bytes in one piece of a bundle.
pub const BUNDLE_PIECE_BYTES: usize = 256 << 10;
/// Largest bundle, in bytes: the largest tokenizers of today are about 40 MB as JSON.
pub const MAX_BUNDLE_BYTES: usize = 128 << 20;
/// Most messages in one answer to a replay.
pub const REPLAY_PIECE: usize = 64;
/// Longest request taken, in bytes.
pub const MAX_REQUEST_BYTES: usize = 4096;

/// What a reader asks. An agent that dials an index says [`Request::Hello`] and [`Request::Proof`] to it and takes the
/// answers to those; once it is welcome it is asked all the rest over the same connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Request {
    /// I have read this far. Readers send it about once a second: it bounds what the agent keeps for them, and the
    /// answer tells a reader whether the agent hears it.
    Ack {
        /// Random number of the reader, the same while it lives.
        reader: u64,
        /// The epoch that it follows.
        epoch: Epoch,
        /// The next seq that it expects.
        next: u64,
    },
    /// Messages from this seq on.
    Replay {
        /// First seq wanted.
        from: u64,
    },
    /// A piece of a snapshot. `cut` absent: cut a new one and give piece 0.
    Snapshot {
        /// The cut, as the first answer named it.
        cut: Option<u64>,
        /// Piece, from 0.
        piece: u32,
    },
    /// A piece of the bundle (tokenizer, template, limits).
    Bundle {
        /// The digest wanted, as the heartbeat names it.
        digest: String,
        /// First byte wanted.
        offset: u64,
    },
    /// What the engine's own block pool holds, read now: for tests and for people who doubt.
    Audit {
        /// First block id wanted.
        from: u64,
    },
    /// The first word where a secret is set. The answer is a [`Reply::Challenge`].
    Hello(Hello),
    /// The second. The answer is a [`Reply::Welcome`] or a [`Reply::Refused`].
    Proof(Proof),
}

/// What the agent answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reply {
    /// To an ack.
    Ack {
        /// The agent's engine.
        engine: EngineId,
        /// Its epoch.
        epoch: Epoch,
        /// The next seq that it will publish.
        next: u64,
    },
    /// To a replay: payloads from `from` on, without a gap. Empty when nothing newer was published.
    Replay {
        /// Epoch of the messages.
        epoch: Epoch,
        /// Seq of the first.
        from: u64,
        /// The payloads, each a [`crate::event::Batch`].
        #[serde(with = "payloads")]
        payloads: Vec<Vec<u8>>,
        /// The next seq that will be published.
        next: u64,
    },
    /// The messages asked for are no longer kept: take a snapshot.
    Gone {
        /// The oldest seq that is kept.
        oldest: u64,
    },
    /// A piece of a snapshot.
    Snapshot(Piece),
    /// The cut asked for is no longer kept, or was never made: begin again.
    NoSnapshot,
    /// A piece of the bundle.
    Bundle {
        /// Its digest.
        digest: String,
        /// Whole length in bytes.
        total: u64,
        /// First byte of this piece.
        offset: u64,
        /// The bytes.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// There is no bundle of that digest.
    NoBundle,
    /// The pool's cached blocks.
    Audit {
        /// `(block id, the engine's own hash without group)` of cached blocks, by block id.
        blocks: Vec<(u64, serde_bytes::ByteBuf)>,
        /// The block id to ask from next; absent at the end.
        next: Option<u64>,
    },
    /// To a hello.
    Challenge(Challenge),
    /// To a good proof.
    Welcome(Welcome),
    /// The request was not understood or not allowed.
    Refused {
        /// Why, for a person.
        reason: String,
    },
}

/// One piece of a snapshot. All pieces of a cut describe the sets as they were after message `seq`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Names the cut.
    pub cut: u64,
    /// Epoch of the agent.
    pub epoch: Epoch,
    /// The next message to apply after this snapshot.
    pub next: u64,
    /// This piece, from 0.
    pub piece: u32,
    /// How many there are, at least 1.
    pub pieces: u32,
    /// Whole digests, in every piece.
    pub digests: Vec<(SetKind, Digest)>,
    /// Chains, parents before children over the whole snapshot.
    pub chains: Vec<Chain>,
}

/// Members of one set, each the child of the one before it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chain {
    /// Which set.
    #[serde(rename = "k")]
    pub kind: SetKind,
    /// What the first one follows.
    #[serde(rename = "p")]
    pub parent: Parent,
    /// The members.
    #[serde(rename = "f")]
    pub fingerprints: Fingerprints,
}

/// MessagePack of a request or a reply.
///
/// # Errors
/// None for these types; the codec's error is passed on all the same.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, rmp_serde::encode::Error> {
    rmp_serde::to_vec_named(message)
}

/// Reads a request or a reply.
///
/// # Errors
/// When the bytes are not of that shape.
pub fn decode<T: for<'de> Deserialize<'de>>(bytes: &[u8]) -> Result<T, rmp_serde::decode::Error> {
    rmp_serde::from_slice(bytes)
}

mod payloads {
    //! A list of byte strings, each as one `bin`.
    use serde::ser::SerializeSeq;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(list: &[Vec<u8>], serializer: S) -> Result<S::Ok, S::Error> {
        let mut seq = serializer.serialize_seq(Some(list.len()))?;
        for one in list {
            seq.serialize_element(serde_bytes::Bytes::new(one))?;
        }
        seq.end()
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Vec<u8>>, D::Error> {
        Ok(Vec::<serde_bytes::ByteBuf>::deserialize(deserializer)?
            .into_iter()
            .map(serde_bytes::ByteBuf::into_vec)
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_replies_round_trip() -> Result<(), Box<dyn std::error::Error>> {
        let epoch = Epoch { start_ms: 3, random: 4 };
        for request in [
            Request::Ack { reader: 1, epoch, next: 2 },
            Request::Replay { from: 3 },
            Request::Snapshot { cut: None, piece: 0 },
            Request::Bundle { digest: "ab".into(), offset: 7 },
            Request::Audit { from: 0 },
            Request::Hello(Hello { engine: Some(EngineId::new("a", 0)), epoch: Some(epoch), nonce: [7; 32] }),
            Request::Hello(Hello { engine: None, epoch: None, nonce: [0; 32] }),
            Request::Proof(Proof { mac: vec![1; 32] }),
        ] {
            let bytes = encode(&request)?;
            assert!(bytes.len() <= MAX_REQUEST_BYTES);
            assert_eq!(decode::<Request>(&bytes)?, request);
        }
        for reply in [
            Reply::Replay { epoch, from: 1, payloads: vec![vec![1, 2], vec![]], next: 3 },
            Reply::Gone { oldest: 9 },
            Reply::NoSnapshot,
            Reply::Snapshot(Piece {
                cut: 1,
                epoch,
                next: 5,
                piece: 0,
                pieces: 1,
                digests: vec![(SetKind::Gpu, Digest::from_iter([1]))],
                chains: vec![Chain {
                    kind: SetKind::Gpu,
                    parent: Parent::Root { fp: 8, model: "m".into(), adapter: String::new() },
                    fingerprints: Fingerprints(vec![1]),
                }],
            }),
            Reply::Challenge(Challenge { nonce: [7; 32], wanted: true }),
            Reply::Welcome(Welcome { mac: vec![] }),
            Reply::Audit { blocks: vec![(1, serde_bytes::ByteBuf::from(vec![7; 32]))], next: None },
        ] {
            assert_eq!(decode::<Reply>(&encode(&reply)?)?, reply);
        }
        Ok(())
    }
}
