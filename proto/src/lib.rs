//! The contract of kvatlas and the cores that its parts share.
//!
//! Agent, index and picker meet here and nowhere else. Everything in this crate is pure: no socket, clock,
//! environment, thread or randomness; times and seeds are passed in.
//!
//! * [`block`]: the only place where token ids become [`Fingerprint`](block::Fingerprint)s.
//! * [`id`]: names of engines, epochs, set kinds.
//! * [`event`]: what an agent publishes, one [`Batch`](event::Batch) an engine step.
//! * [`state`]: what an engine says of itself in a heartbeat.
//! * [`control`]: what is asked of an agent: replay, snapshot, bundle, audit.
//! * [`native`]: the event dialects of stock engines.
//! * [`residency`]: physical copies in, changes of the closed set out.
//! * [`cursor`]: is this message the next one?
//! * [`digest`]: the sum that proves two sets equal.
//! * [`hit`]: how long a hit is, for every kind of attention.
//! * [`fleet`]: the list of engines that index and picker read.
//! * [`proof`]: proving to each other that both ends know the deployment's secret.
//! * [`zmtp`]: ZeroMQ's wire protocol, as a codec.
//! * `wire`: generated gRPC and ext_proc types, with the feature of that name.

pub mod block;
pub mod control;
pub mod cursor;
pub mod digest;
pub mod event;
pub mod fleet;
pub mod hit;
pub mod id;
pub mod native;
pub mod proof;
pub mod residency;
pub mod state;
#[cfg(feature = "wire")]
#[allow(missing_docs, clippy::all)]
#[path = "gen/mod.rs"]
pub mod wire;
pub mod zmtp;
