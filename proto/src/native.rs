//! The event streams of stock engines (vLLM, SGLang), in every dialect: what works before an agent is installed.
//!
//! * [`frames`]: the frames of live and replayed messages.
//! * [`dialect`]: one payload to [`Event`](dialect::Event)s: arrays (vLLM up to 0.23, SGLang) or maps (from 0.24).
//! * [`names`]: from what an event says of a block to the fingerprint's inputs, or the reason why there is none.
//! * [`engine`]: the decoder state of one engine: its own hashes in, changes of our closed set out.
//! * [`counters`]: what happened, by reason.
//!
//! Nothing here trusts the engine's hashes to mean anything: they are only compared with each other.

pub mod counters;
pub mod dialect;
pub mod engine;
pub mod frames;
mod msgpack;
pub mod names;
