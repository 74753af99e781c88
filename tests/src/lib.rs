//! The harness: sets up real parts, runs them together and judges what they did.
//!
//! * [`config`]: where things are on this machine; the only reader of the environment.
//! * [`plan`], [`envoy`]: who listens where, and what each part is told.
//! * [`talk`], [`decision`], [`holdings`], [`report`]: what is sent, what came of it, what must hold.
//! * [`edge`]: processes, downloads, sockets.
//! * [`app`]: `cargo demo`.
//! * [`sim`]: the inside of a simulated engine; its outside is in [`edge::sim`].
//! * [`fuzz`]: what fuzzers run, and what the corpus begins with.
//! * [`naive`], [`seeded`]: models and random worlds that the tests compare with.
//! * [`rust_source`]: what the house rules read of a source file.

pub mod app;
pub mod config;
pub mod decision;
pub mod edge;
pub mod envoy;
pub mod fuzz;
pub mod holdings;
pub mod naive;
pub mod plan;
pub mod report;
pub mod rust_source;
pub mod seeded;
pub mod sim;
pub mod talk;
