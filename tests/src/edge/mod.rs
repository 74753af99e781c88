//! What touches the world: processes, downloads, sockets.

pub mod agent;
pub mod client;
pub mod fake_envoy;
pub mod fake_index;
pub mod hashes;
pub mod http;
pub mod install;
pub mod lookup;
pub mod parts;
pub mod ports;
pub mod process;
pub mod sim;
