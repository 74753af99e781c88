//! What touches the world: the wire protocol, the sockets, the way to wake the publisher, readings of GPUs.

pub mod clock;
pub mod control;
pub mod dial;
pub mod listen;
pub mod nvml;
pub mod publish;
pub mod wake;
pub mod zmtp;
