//! What an agent publishes: one [`Batch`] an engine step, and at least one heartbeat an interval.
//!
//! On the socket a message has three frames: the topic `kvatlas/1/<engine>`, the seq as 8 bytes big-endian, and the
//! batch as MessagePack with named fields (so that receivers of protocol N read N-1 and ignore what N+1 adds).
//! Fingerprints travel as `bin`, 8 bytes little-endian each: decoding is one copy.

use crate::block::Fingerprint;
use crate::id::{EngineId, Epoch, SetKind};
pub use crate::state::{Counters, Gpus, Group, HitRule, KindDigest, State};
use serde::{Deserialize, Serialize};

/// The protocol that this code speaks. Receivers take this one and the one before.
pub const PROTOCOL: u16 = 1;
/// Before the engine's name in a topic.
pub const TOPIC: &str = "kvatlas/1/";
/// Largest payload taken, in bytes. An agent cuts a batch before it reaches a quarter of this: 2^19 fingerprints.
pub const MAX_PAYLOAD_BYTES: usize = 16 << 20;
/// Most operations in one batch.
pub const MAX_OPS: usize = 1 << 16;
/// Longest text taken anywhere in a batch (model, adapter, request id, reason), in bytes.
pub const MAX_TEXT_BYTES: usize = 1024;
/// Most adapters, served names or groups in a heartbeat.
pub const MAX_LIST: usize = 1024;

/// Everything that one engine step changed, or a heartbeat.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Batch {
    /// Protocol version of the sender.
    #[serde(rename = "v")]
    pub version: u16,
    /// The sender's process life.
    #[serde(rename = "e")]
    pub epoch: Epoch,
    /// When the engine step ended, milliseconds since the Unix epoch on the *engine's* clock: to read, never to
    /// compare with another machine's clock.
    #[serde(rename = "t")]
    pub step_ms: u64,
    /// In the order in which they are to be applied.
    #[serde(rename = "o")]
    pub ops: Vec<Op>,
}

/// One operation of a batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// Members were added, parents first.
    Store(Store),
    /// Members were removed, deepest first.
    Remove(Remove),
    /// A set, or all of them, is empty now.
    Clear(Clear),
    /// The heartbeat.
    State(Box<State>),
    /// A step in the life of one request.
    Life(Life),
}

/// Members added to a set: a chain, each the child of the one before it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Store {
    /// Which set.
    #[serde(rename = "k")]
    pub kind: SetKind,
    /// What the first member follows.
    #[serde(rename = "p")]
    pub parent: Parent,
    /// The members, in order.
    #[serde(rename = "f")]
    pub fingerprints: Fingerprints,
}

/// What a stored chain follows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Parent {
    /// Another block.
    Block(Fingerprint),
    /// Nothing that matters: the members of a set that is not closed are in no order.
    Loose,
    /// Nothing: the chain starts a prompt. The salt is never told.
    Root {
        /// `fp(-1)`.
        fp: Fingerprint,
        /// Base model.
        model: String,
        /// Adapter, "" for none.
        #[serde(default)]
        adapter: String,
    },
}

impl Parent {
    /// The fingerprint that the chain's first member was hashed from; 0 when that is not told.
    pub fn fingerprint(&self) -> Fingerprint {
        match self {
            Parent::Block(fp) | Parent::Root { fp, .. } => *fp,
            Parent::Loose => 0,
        }
    }
}

/// Members removed from a set, deepest first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remove {
    /// Which set.
    #[serde(rename = "k")]
    pub kind: SetKind,
    /// The members.
    #[serde(rename = "f")]
    pub fingerprints: Fingerprints,
}

/// A set was emptied at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clear {
    /// Which set; all of them when absent.
    #[serde(rename = "k", default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<SetKind>,
}

/// Fingerprints that travel as one `bin`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Fingerprints(pub Vec<Fingerprint>);

impl Serialize for Fingerprints {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut bytes = Vec::with_capacity(self.0.len() * 8);
        self.0.iter().for_each(|fp| bytes.extend_from_slice(&fp.to_le_bytes()));
        serializer.serialize_bytes(&bytes)
    }
}

impl<'de> Deserialize<'de> for Fingerprints {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Fingerprints;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("fingerprints as bytes, 8 each")
            }
            fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<Fingerprints, E> {
                let (words, rest) = bytes.as_chunks::<8>();
                if !rest.is_empty() {
                    return Err(E::invalid_length(bytes.len(), &self));
                }
                let out: Vec<u64> = words.iter().map(|w| u64::from_le_bytes(*w)).collect();
                if out.contains(&0) {
                    return Err(E::custom("fingerprint 0 is reserved"));
                }
                Ok(Fingerprints(out))
            }
        }
        deserializer.deserialize_bytes(Visitor)
    }
}

/// A step in the life of one request, by the engine's own request id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Life {
    /// It entered the scheduler: a picker's reservation for it ends, since the engine's own queue counts it now.
    Arrived {
        /// As the engine knows it; [`picker_request_id`] finds the picker's id inside.
        id: String,
    },
    /// It was scheduled for the first time.
    Started {
        /// As above.
        id: String,
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// Tokens that the engine took from its own cache.
        cached_tokens: u32,
        /// What the agent's own set said at that instant; absent when a part of the prompt has no name.
        #[serde(default)]
        predicted_tokens: Option<u32>,
        /// The last seq that was published when the engine looked.
        seq: u64,
    },
    /// It ended.
    Finished {
        /// As above.
        id: String,
        /// `stop`, `length`, `abort`, ... as the engine names it.
        reason: String,
    },
}

impl Life {
    /// The engine's request id.
    pub fn id(&self) -> &str {
        match self {
            Life::Arrived { id } | Life::Started { id, .. } | Life::Finished { id, .. } => id,
        }
    }
}

/// The 36 characters of the UUID inside an engine's request id: `chatcmpl-<id>`, `cmpl-<id>-<i>`, `<k>_<id>`, each
/// perhaps followed by `-` and 8 random characters. `None` when the request did not come from a picker.
pub fn picker_request_id(id: &str) -> Option<&str> {
    const DASHES: [usize; 4] = [8, 13, 18, 23];
    let bytes = id.as_bytes();
    let at = bytes.windows(36).position(|w| {
        w.iter().enumerate().all(|(i, b)| if DASHES.contains(&i) { *b == b'-' } else { b.is_ascii_hexdigit() })
    })?;
    id.get(at..at + 36)
}

/// Why bytes are no batch.
#[derive(Debug, thiserror::Error)]
pub enum BadBatch {
    /// Longer than [`MAX_PAYLOAD_BYTES`].
    #[error("a payload of {0} bytes; at most 16 MiB are taken")]
    TooLong(usize),
    /// Not MessagePack of this shape.
    #[error("not a kvatlas batch: {0}")]
    Codec(#[from] rmp_serde::decode::Error),
    /// A version that this receiver does not take.
    #[error("protocol {0}; this receiver takes {PROTOCOL} and the one before")]
    Version(u16),
    /// A list, text or number beyond its limit.
    #[error("{0} is beyond its limit")]
    Limit(&'static str),
}

impl Batch {
    /// MessagePack of this batch.
    ///
    /// # Errors
    /// None for batches that were built from these types; the codec's error is passed on all the same.
    pub fn encode(&self) -> Result<Vec<u8>, rmp_serde::encode::Error> {
        rmp_serde::to_vec_named(self)
    }

    /// Reads a payload and checks every limit.
    ///
    /// # Errors
    /// When it is too long, malformed, of another protocol, or beyond a limit.
    pub fn decode(payload: &[u8]) -> Result<Self, BadBatch> {
        if payload.len() > MAX_PAYLOAD_BYTES {
            return Err(BadBatch::TooLong(payload.len()));
        }
        let batch: Batch = rmp_serde::from_slice(payload)?;
        if batch.version > PROTOCOL || batch.version + 1 < PROTOCOL {
            return Err(BadBatch::Version(batch.version));
        }
        batch.check()?;
        Ok(batch)
    }

    fn check(&self) -> Result<(), BadBatch> {
        let text = |what, text: &str| if text.len() > MAX_TEXT_BYTES { Err(BadBatch::Limit(what)) } else { Ok(()) };
        if self.ops.len() > MAX_OPS {
            return Err(BadBatch::Limit("the number of operations"));
        }
        for op in &self.ops {
            match op {
                Op::Store(Store { parent: Parent::Root { fp, model, adapter }, .. }) => {
                    text("model", model)?;
                    text("adapter", adapter)?;
                    if *fp == 0 {
                        return Err(BadBatch::Limit("root fingerprint 0"));
                    }
                }
                Op::Store(Store { parent: Parent::Block(0), .. }) => {
                    return Err(BadBatch::Limit("parent fingerprint 0"));
                }
                Op::Life(life) => {
                    text("request id", life.id())?;
                    if let Life::Finished { reason, .. } = life {
                        text("reason", reason)?;
                    }
                }
                Op::State(state) => state.check()?,
                _ => {}
            }
        }
        Ok(())
    }

    /// The heartbeat in this batch, if it has one.
    pub fn state(&self) -> Option<&State> {
        self.ops.iter().find_map(|op| if let Op::State(state) = op { Some(&**state) } else { None })
    }
}

/// The topic of an engine's stream.
pub fn topic(engine: &EngineId) -> String {
    format!("{TOPIC}{engine}")
}

/// The seq in a message's second frame.
pub fn seq_frame(seq: u64) -> [u8; 8] {
    seq.to_be_bytes()
}

/// Reads a second frame.
pub fn read_seq(frame: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(frame.try_into().ok()?))
}

#[cfg(test)]
#[path = "event_tests.rs"]
mod tests;
