//! The harness: sets up real parts, runs them together and judges what they did.
//!
//! * [`config`]: where things are on this machine; the only reader of the environment.
//! * [`report`]: the numbers of a run and what must hold of them.
//! * [`edge`]: processes, downloads, sockets.

pub mod app;
pub mod config;
pub mod edge;
pub mod envoy;
pub mod naive;
pub mod plan;
pub mod seeded;
