//! What touches the world: processes, downloads, sockets.

pub mod agent;
pub mod client;
pub mod hashes;
pub mod http;
pub mod install;
pub mod lookup;
pub mod parts;
pub mod ports;
pub mod process;
