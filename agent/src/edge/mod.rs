//! What touches the world: the wire protocol, the sockets, the way to wake the publisher.

pub mod clock;
pub mod control;
pub mod listen;
pub mod publish;
pub mod wake;
pub mod zmtp;
