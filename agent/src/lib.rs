//! The agent: it lives inside a vLLM engine and publishes what the engine's KV cache holds.
//!
//! Two threads meet in one lock-free ring. The **engine's thread** calls [`engine::Engine`]: it names blocks, writes
//! what changed into the [`ring`] and goes on; it never waits, never fails and never allocates without bound. The
//! **publisher's thread** ([`app`]) reads the ring, turns copies of blocks into changes of the reachable set
//! ([`follower`]), and gives each engine step a message ([`feed`]) that any number of readers follow.
//!
//! Pure, at the root: [`ring`] and [`record`] (what crosses the threads), [`slots`] (what each physical block holds),
//! [`plan`] (which group feeds which set), [`requests`] (names of the blocks of live requests), [`engine`] (the engine's
//! side), [`follower`], [`resident`] (what is resident, and the sets), [`batch`], [`replay`], [`snapshot`], [`state`], [`feed`], [`answer`] (the publisher's side), [`address`].
//! What touches the world: [`edge`]. Both meet in [`app`]; [`config`] reads the environment; `py` (feature `python`)
//! is the skin for vLLM.

pub mod adapters;
pub mod address;
pub mod answer;
pub mod app;
pub mod batch;
pub mod config;
pub mod edge;
pub mod engine;
pub mod facts;
pub mod feed;
pub mod follower;
pub mod gpus;
pub mod health;
pub mod plan;
#[cfg(feature = "python")]
mod py;
pub mod record;
pub mod replay;
pub mod requests;
pub mod resident;
pub mod ring;
pub mod slots;
pub mod snapshot;
pub mod state;
pub mod tiers;

pub use app::Agent;
pub use config::Config;
pub use facts::{Counts, Facts};
