//! What touches the world: sockets, clocks, threads, files.
//!
//! * [`zmtp`]: connections that speak ZeroMQ's protocol.
//! * [`ingest`]: one engine's event stream; [`control`]: asks of its agent; [`stock`]: asks of an engine without one;
//!   [`dialled`]: agents that come by themselves.
//! * [`scribe`]: the one writer: everything that comes through its [`inbox`], in order, into the table.
//! * [`board`], [`lookup`], [`watch`], [`bundles`]: what readers see.
//! * [`grpc`], [`http`]: the faces.

pub mod board;
pub mod bundles;
pub mod control;
pub mod dialled;
pub mod fleet_file;
pub mod grpc;
pub mod http;
pub mod inbox;
pub mod ingest;
pub mod lookup;
pub mod metrics;
pub mod scribe;
pub mod stock;
pub mod watch;
pub mod zmtp;
