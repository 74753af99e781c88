//! The index of kvatlas: a precise prefix tree of what every engine's KV cache holds.
//!
//! * [`answer`]: what is asked and answered, in plain types.
//! * [`app`]: everything put together: the binary, and a library for pickers that run their index inside.
//! * [`fleet`]: engines, their numbers in the table, who is shed; [`link`]: one engine's stream as a state machine.
//! * [`reservations`]: placements in flight: load and coming blocks.
//! * [`shared`]: the concurrent core, one writer and readers that never wait.
//! * [`find`]: the lookup, a bisection.
//! * `table`, `sets`: what it looks into: fingerprint -> set id, set id -> holders.
//! * [`edge`]: sockets, threads, files; [`config`]: the only reader of the environment.

pub mod answer;
pub mod app;
pub mod config;
pub mod edge;
pub mod find;
pub mod fleet;
pub mod link;
pub mod reservations;
mod sets;
pub mod shared;
mod table;
