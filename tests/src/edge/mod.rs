//! What touches the world: processes, downloads, sockets.

pub mod client;
pub mod http;
pub mod install;
pub mod parts;
pub mod ports;
pub mod process;
