//! What touches the world: sockets, clocks, threads, randomness.

pub mod admin;
pub mod bundles;
pub mod clock;
pub mod embedded;
pub mod ext_proc;
pub mod files;
pub mod lookup;
pub mod metrics;
pub mod remote;
pub mod render;
pub mod router;
pub mod watch;
pub mod wire;
