//! Connections that speak ZeroMQ's protocol ([`proto::zmtp`]): those that the index makes, and those that agents make
//! to it. Whoever owns one decides when to make a new one.

use bytes::Bytes;
use proto::zmtp::{Limits, Wire, command, message, pong, subscription};
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

pub use proto::zmtp::{Incoming, Kind};

/// Most frames in one message: ours have three, an answer two; vLLM's have three.
pub const MOST_FRAMES: usize = 8;

/// Why a connection is of no use any more.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// The socket failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The peer closed it.
    #[error("the peer closed the connection")]
    Closed,
    /// The address is none.
    #[error("the address is neither tcp:// nor ipc://")]
    Address,
    /// The peer breaks the protocol or a limit.
    #[error(transparent)]
    Peer(#[from] proto::zmtp::Broken),
}

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// One connection.
pub struct Connection {
    stream: Box<dyn Stream>,
    wire: Wire,
    /// True when the connection does not leave this machine.
    pub loopback: bool,
}

impl Connection {
    /// Connects to `tcp://host:port` or `ipc://path` and greets. `limit`: most bytes in one message. Has no deadline
    /// of its own: the caller sets one.
    ///
    /// # Errors
    /// When nobody listens there, or what does is of another kind.
    pub async fn open(endpoint: &str, kind: Kind, limit: usize) -> Result<Self, Broken> {
        if let Some(address) = endpoint.strip_prefix("tcp://") {
            Self::accept(tokio::net::TcpStream::connect(address).await?, kind, limit).await
        } else if let Some(path) = endpoint.strip_prefix("ipc://") {
            Self::greet(Box::new(tokio::net::UnixStream::connect(path).await?), true, kind, limit).await
        } else {
            Err(Broken::Address)
        }
    }

    /// Greets on a TCP connection that is made. As [`Connection::open`] otherwise.
    ///
    /// # Errors
    /// When the peer is of another kind.
    pub async fn accept(stream: tokio::net::TcpStream, kind: Kind, limit: usize) -> Result<Self, Broken> {
        stream.set_nodelay(true)?;
        let loopback = stream.peer_addr()?.ip().is_loopback();
        Self::greet(Box::new(stream), loopback, kind, limit).await
    }

    async fn greet(stream: Box<dyn Stream>, loopback: bool, kind: Kind, limit: usize) -> Result<Self, Broken> {
        let wire = Wire::new(kind, Limits { frames: MOST_FRAMES, bytes: limit });
        let mut connection = Self { stream, wire, loopback };
        connection.write(&connection.wire.opening()).await?;
        // The first thing that a wire tells of a peer is that it is ready.
        connection.next().await?;
        Ok(connection)
    }

    /// Takes messages of up to so many bytes from now on.
    pub fn limit(&mut self, bytes: usize) {
        self.wire.limit(Limits { frames: MOST_FRAMES, bytes });
    }

    /// Sends a PING, which the peer answers.
    ///
    /// # Errors
    /// When the connection is lost.
    pub async fn ping(&mut self) -> Result<(), Broken> {
        self.write(&command("PING", &[0, 0])).await
    }

    /// Asks a publisher for all topics that start so.
    ///
    /// # Errors
    /// When the connection is lost.
    pub async fn subscribe(&mut self, prefix: &str) -> Result<(), Broken> {
        self.write(&subscription(prefix)).await
    }

    /// Sends one message.
    ///
    /// # Errors
    /// When the connection is lost.
    pub async fn send(&mut self, frames: &[&[u8]]) -> Result<(), Broken> {
        let mut out = Vec::new();
        message(&mut out, frames);
        self.write(&out).await
    }

    /// The next message. May be cancelled: nothing that has arrived is lost.
    ///
    /// # Errors
    /// When the connection is lost or the peer breaks a limit: of no use from then on.
    pub async fn receive(&mut self) -> Result<Vec<Bytes>, Broken> {
        loop {
            match self.next().await? {
                Incoming::Message(frames) => return Ok(frames),
                Incoming::Command { name, body } => {
                    if let Some(answer) = pong(&name, &body) {
                        self.write(&answer).await?;
                    }
                }
                Incoming::Ready => {}
            }
        }
    }

    /// The next thing that the peer says, commands too: none is answered. May be cancelled.
    ///
    /// # Errors
    /// As [`Connection::receive`].
    pub async fn next(&mut self) -> Result<Incoming, Broken> {
        loop {
            if let Some(incoming) = self.wire.take()? {
                return Ok(incoming);
            }
            if self.stream.read_buf(self.wire.room()).await? == 0 {
                return Err(Broken::Closed);
            }
        }
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        self.stream.write_all(bytes).await?;
        Ok(self.stream.flush().await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::zmtp::{Broken as Peer, frame};
    use tokio::net::TcpListener;

    /// Plays a peer of this kind that then sends `bytes`.
    async fn peer(kind: Kind, bytes: Vec<u8>) -> io::Result<String> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        tokio::spawn(async move {
            let Ok((mut stream, _)) = listener.accept().await else { return };
            let mut out = Wire::new(kind, Limits { frames: 1, bytes: 1 }).opening();
            out.extend_from_slice(&bytes);
            let _ = stream.write_all(&out).await;
            let mut sink = Vec::new();
            let _ = stream.read_to_end(&mut sink).await;
        });
        Ok(format!("tcp://{address}"))
    }

    #[tokio::test]
    async fn messages_and_pings_come_through() -> Result<(), Box<dyn std::error::Error>> {
        let mut bytes = command("PING", b"\0\x01ab");
        message(&mut bytes, &[b"t", &[7; 300]]);
        let mut connection = Connection::open(&peer(Kind::Pub, bytes).await?, Kind::Sub, 1000).await?;
        connection.subscribe("kv").await?;
        let message = connection.receive().await?;
        assert_eq!((message.len(), &message[0][..], message[1].len()), (2, &b"t"[..], 300));
        assert!(connection.loopback);
        Ok(())
    }

    #[tokio::test]
    async fn limits_end_the_connection() -> Result<(), Box<dyn std::error::Error>> {
        let mut parts = Vec::new();
        (0..4).for_each(|_| frame(&mut parts, true, &[7; 300]));
        let mut connection = Connection::open(&peer(Kind::Pub, parts).await?, Kind::Sub, 1000).await?;
        let broken = connection.receive().await;
        assert!(matches!(broken, Err(Broken::Peer(Peer::TooLong { claimed: 1200, limit: 1000 }))));

        let frames = [1u8, 0].repeat(MOST_FRAMES + 1);
        let mut connection = Connection::open(&peer(Kind::Pub, frames).await?, Kind::Sub, 1000).await?;
        assert!(matches!(connection.receive().await, Err(Broken::Peer(Peer::TooMany(MOST_FRAMES)))));
        Ok(())
    }

    #[tokio::test]
    async fn other_peers_are_told_apart() -> Result<(), Box<dyn std::error::Error>> {
        let router = peer(Kind::Router, vec![]).await?;
        let refused = Connection::open(&router, Kind::Sub, 1000).await;
        assert!(matches!(refused, Err(Broken::Peer(Peer::NotOurs(_)))));
        assert!(matches!(Connection::open("udp://x", Kind::Sub, 1000).await, Err(Broken::Address)));
        Ok(())
    }
}
