//! The picker: answers where each request goes.
//!
//! * [`app`]: everything put together; [`config`]: the file, the environment, the flags.
//! * [`exchange`]: one ext_proc stream as a state machine; [`subset`], [`refusal`]: what it reads and says.
//! * [`request`], [`json`], [`prompt`] and what they use: from a body to the engine's own token ids.
//! * [`prepare`]: from a body to what the index is asked; [`candidates`]: what it answers, as engines to choose from.
//! * [`score`], [`pick`]: which engine, and why; [`record`], [`decisions`]: the same for people, and what came of it.
//! * [`pool`]: the engines; [`ledger`]: what is in flight.
//! * [`edge`]: sockets, clocks, threads.

pub mod app;
pub mod bundle;
pub mod candidates;
pub mod chat;
pub mod config;
pub mod decisions;
pub mod detect;
pub mod edge;
pub mod exchange;
pub mod json;
pub mod ledger;
pub mod normalise;
pub mod pick;
pub mod pool;
pub mod prepare;
pub mod prompt;
pub mod python;
pub mod record;
pub mod refusal;
pub mod request;
pub mod score;
pub mod subset;
pub mod template;
pub mod tokens;
