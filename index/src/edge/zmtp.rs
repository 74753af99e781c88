//! The connecting side of ZMTP 3.0 (ZeroMQ's protocol), as much of it as a subscriber and a dealer need.
//!
//! Our own and not the `zeromq` crate's, because a peer must not be able to hurt the index: that crate reserves memory
//! for whatever length a peer claims (2^60 bytes end the process), counts no frames, drops a connection over a PING,
//! waits up to 30 s before it connects again, and does not say when a connection is lost. Here lengths and counts are
//! bounded, memory grows with what really arrives, and whoever owns the connection decides when to make a new one.

use bytes::{Buf, Bytes, BytesMut};
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Most frames in one message: ours have three, an answer two; vLLM's have three.
pub const MOST_FRAMES: usize = 8;
/// Longest command taken, in bytes: READY with a few properties, PING.
const LONGEST_COMMAND: usize = 8 << 10;
/// Bytes asked of the socket at once.
const CHUNK: usize = 64 << 10;

/// What this side is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Receives what a PUB or XPUB sends.
    Sub,
    /// Asks a ROUTER.
    Dealer,
}

/// Why a connection is of no use any more.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// The socket failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The peer closed it.
    #[error("the peer closed the connection")]
    Closed,
    /// What answers there does not speak ZMTP 3 without authentication.
    #[error("what answers there is no ZeroMQ socket of this kind: {0}")]
    NotOurs(&'static str),
    /// A frame, or all frames of a message, beyond the limit.
    #[error("a message of {claimed} bytes; at most {limit} are taken")]
    TooLong {
        /// Its length, as claimed.
        claimed: u64,
        /// The limit.
        limit: usize,
    },
    /// More than [`MOST_FRAMES`].
    #[error("a message of more than 8 frames")]
    TooMany,
}

trait Wire: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Wire for T {}

/// One connection.
pub struct Connection {
    wire: Box<dyn Wire>,
    buffer: BytesMut,
    /// Frames of the message that is arriving, and their bytes. Kept here, so that a receive may be cancelled.
    frames: Vec<Bytes>,
    bytes: usize,
    limit: usize,
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
        let (wire, loopback): (Box<dyn Wire>, bool) = if let Some(address) = endpoint.strip_prefix("tcp://") {
            let stream = tokio::net::TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let loopback = stream.peer_addr()?.ip().is_loopback();
            (Box::new(stream), loopback)
        } else if let Some(path) = endpoint.strip_prefix("ipc://") {
            (Box::new(tokio::net::UnixStream::connect(path).await?), true)
        } else {
            return Err(Broken::NotOurs("the address is neither tcp:// nor ipc://"));
        };
        let mut connection = Self { wire, buffer: BytesMut::new(), frames: Vec::new(), bytes: 0, limit, loopback };
        connection.greet(kind).await?;
        Ok(connection)
    }

    async fn greet(&mut self, kind: Kind) -> Result<(), Broken> {
        let mut greeting = [0u8; 64];
        (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
        greeting[12..16].copy_from_slice(b"NULL");
        self.wire.write_all(&greeting).await?;
        self.wire.flush().await?;
        self.fill(64).await?;
        let theirs = self.buffer.split_to(64);
        if theirs[0] != 0xff || theirs[9] & 1 == 0 {
            return Err(Broken::NotOurs("it does not greet as ZeroMQ does"));
        }
        if theirs[10] < 3 {
            return Err(Broken::NotOurs("it speaks a version of ZMTP before 3"));
        }
        if &theirs[12..17] != b"NULL\0" {
            return Err(Broken::NotOurs("it wants authentication (PLAIN or CURVE)"));
        }
        let name: &[u8] = match kind {
            Kind::Sub => b"SUB",
            Kind::Dealer => b"DEALER",
        };
        let mut ready = b"\x05READY\x0bSocket-Type".to_vec();
        ready.extend_from_slice(&(name.len() as u32).to_be_bytes());
        ready.extend_from_slice(name);
        if kind == Kind::Dealer {
            ready.extend_from_slice(b"\x08Identity\0\0\0\0");
        }
        self.command(&ready).await?;
        match self.frame().await? {
            Frame::Command(body) if body.starts_with(b"\x05READY") => {
                let fits: &[&[u8]] = match kind {
                    Kind::Sub => &[b"PUB", b"XPUB"],
                    Kind::Dealer => &[b"ROUTER", b"DEALER", b"REP"],
                };
                if socket_type(&body[6..]).is_some_and(|theirs| fits.contains(&theirs)) {
                    return Ok(());
                }
                Err(Broken::NotOurs("its socket type does not fit: events are a PUB, control is a ROUTER"))
            }
            Frame::Command(_) => Err(Broken::NotOurs("it refused the handshake")),
            Frame::Message { .. } => Err(Broken::NotOurs("it sends before it is ready")),
        }
    }

    /// Asks a publisher for all topics that start so.
    ///
    /// # Errors
    /// When the connection is lost.
    pub async fn subscribe(&mut self, prefix: &str) -> Result<(), Broken> {
        let mut body = vec![1];
        body.extend_from_slice(prefix.as_bytes());
        self.send(&[&body]).await
    }

    /// Sends one message.
    ///
    /// # Errors
    /// When the connection is lost.
    pub async fn send(&mut self, frames: &[&[u8]]) -> Result<(), Broken> {
        let mut out = Vec::new();
        for (at, frame) in frames.iter().enumerate() {
            head(&mut out, u8::from(at + 1 < frames.len()), frame.len());
            out.extend_from_slice(frame);
        }
        self.wire.write_all(&out).await?;
        Ok(self.wire.flush().await?)
    }

    /// The next message. May be cancelled: nothing that has arrived is lost.
    ///
    /// # Errors
    /// When the connection is lost or the peer breaks a limit: of no use from then on.
    pub async fn receive(&mut self) -> Result<Vec<Bytes>, Broken> {
        loop {
            match self.frame().await? {
                Frame::Message { body, more } => {
                    self.bytes += body.len();
                    self.frames.push(body);
                    if self.frames.len() > MOST_FRAMES {
                        return Err(Broken::TooMany);
                    }
                    if !more {
                        self.bytes = 0;
                        return Ok(std::mem::take(&mut self.frames));
                    }
                }
                Frame::Command(body) => {
                    // PING: two bytes of time to live, then a context that the answer repeats.
                    if let Some(rest) = body.strip_prefix(b"\x04PING") {
                        let mut pong = b"\x04PONG".to_vec();
                        pong.extend_from_slice(rest.get(2..18.min(rest.len())).unwrap_or_default());
                        self.command(&pong).await?;
                    }
                }
            }
        }
    }

    async fn command(&mut self, body: &[u8]) -> Result<(), Broken> {
        let mut out = Vec::with_capacity(body.len() + 9);
        head(&mut out, 0b100, body.len());
        out.extend_from_slice(body);
        self.wire.write_all(&out).await?;
        Ok(self.wire.flush().await?)
    }

    /// The next frame. Takes nothing from the buffer before all of it is there.
    async fn frame(&mut self) -> Result<Frame, Broken> {
        self.fill(2).await?;
        let flags = self.buffer[0];
        let (long, is_command) = (flags & 0b10 != 0, flags & 0b100 != 0);
        let start = if long { 9 } else { 2 };
        self.fill(start).await?;
        let claimed = match long {
            true => (&self.buffer[1..9]).get_u64(),
            false => u64::from(self.buffer[1]),
        };
        let room = if is_command { LONGEST_COMMAND } else { self.limit.saturating_sub(self.bytes) };
        let length = usize::try_from(claimed).ok().filter(|length| *length <= room);
        let Some(length) = length else {
            return Err(Broken::TooLong { claimed: claimed.saturating_add(self.bytes as u64), limit: self.limit });
        };
        self.fill(start + length).await?;
        self.buffer.advance(start);
        let body = self.buffer.split_to(length).freeze();
        Ok(if is_command { Frame::Command(body) } else { Frame::Message { body, more: flags & 1 != 0 } })
    }

    /// Reads until so many bytes are there. Memory follows what arrived, not what was claimed.
    async fn fill(&mut self, wanted: usize) -> Result<(), Broken> {
        while self.buffer.len() < wanted {
            self.buffer.reserve(CHUNK.min(wanted - self.buffer.len()).max(4096));
            if self.wire.read_buf(&mut self.buffer).await? == 0 {
                return Err(Broken::Closed);
            }
        }
        Ok(())
    }
}

enum Frame {
    Command(Bytes),
    Message { body: Bytes, more: bool },
}

fn head(out: &mut Vec<u8>, flags: u8, length: usize) {
    match u8::try_from(length) {
        Ok(length) => out.extend_from_slice(&[flags, length]),
        Err(_) => {
            out.push(flags | 0b10);
            out.extend_from_slice(&(length as u64).to_be_bytes());
        }
    }
}

/// The `Socket-Type` among the properties of READY: each a name with one byte of length, a value with four.
fn socket_type(mut properties: &[u8]) -> Option<&[u8]> {
    while !properties.is_empty() {
        let (&length, rest) = properties.split_first()?;
        let (name, rest) = rest.split_at_checked(usize::from(length))?;
        let (length, rest) = rest.split_first_chunk::<4>()?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(value);
        }
        properties = rest;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    /// Plays a peer that greets as `name` and then sends `bytes`.
    async fn peer(name: &'static [u8], bytes: Vec<u8>) -> io::Result<String> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        tokio::spawn(async move {
            let Ok((mut stream, _)) = listener.accept().await else { return };
            let mut greeting = [0u8; 64];
            (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
            greeting[12..16].copy_from_slice(b"NULL");
            let mut out = greeting.to_vec();
            let mut ready = b"\x05READY\x0bSocket-Type".to_vec();
            ready.extend_from_slice(&(name.len() as u32).to_be_bytes());
            ready.extend_from_slice(name);
            head(&mut out, 0b100, ready.len());
            out.extend_from_slice(&ready);
            out.extend_from_slice(&bytes);
            let _ = stream.write_all(&out).await;
            let mut sink = Vec::new();
            let _ = stream.read_to_end(&mut sink).await;
        });
        Ok(format!("tcp://{address}"))
    }

    #[tokio::test]
    async fn messages_and_pings_come_through() -> Result<(), Box<dyn std::error::Error>> {
        let mut bytes = Vec::new();
        head(&mut bytes, 0b100, 9);
        bytes.extend_from_slice(b"\x04PING\0\x01ab");
        head(&mut bytes, 1, 1);
        bytes.push(b't');
        head(&mut bytes, 0, 300);
        bytes.extend_from_slice(&[7; 300]);
        let mut connection = Connection::open(&peer(b"XPUB", bytes).await?, Kind::Sub, 1000).await?;
        connection.subscribe("kv").await?;
        let message = connection.receive().await?;
        assert_eq!((message.len(), &message[0][..], message[1].len()), (2, &b"t"[..], 300));
        assert!(connection.loopback);
        Ok(())
    }

    #[tokio::test]
    async fn limits_end_the_connection_before_memory_is_taken() -> Result<(), Box<dyn std::error::Error>> {
        let mut claims = vec![0b10];
        claims.extend_from_slice(&(1u64 << 60).to_be_bytes());
        let mut connection = Connection::open(&peer(b"PUB", claims).await?, Kind::Sub, 1000).await?;
        assert!(matches!(connection.receive().await, Err(Broken::TooLong { limit: 1000, .. })));
        assert!(connection.buffer.capacity() < 1 << 20);

        let mut parts = Vec::new();
        for _ in 0..4 {
            head(&mut parts, 1, 300);
            parts.extend_from_slice(&[7; 300]);
        }
        let mut connection = Connection::open(&peer(b"PUB", parts).await?, Kind::Sub, 1000).await?;
        assert!(matches!(connection.receive().await, Err(Broken::TooLong { claimed: 1200, .. })));

        let frames = [1u8, 0].repeat(MOST_FRAMES + 1);
        let mut connection = Connection::open(&peer(b"PUB", frames).await?, Kind::Sub, 1000).await?;
        assert!(matches!(connection.receive().await, Err(Broken::TooMany)));
        Ok(())
    }

    #[tokio::test]
    async fn other_peers_are_told_apart() -> Result<(), Box<dyn std::error::Error>> {
        let router = peer(b"ROUTER", vec![]).await?;
        assert!(matches!(Connection::open(&router, Kind::Sub, 1000).await, Err(Broken::NotOurs(_))));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = format!("tcp://{}", listener.local_addr()?);
        tokio::spawn(async move {
            if let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.write_all(&b"HTTP/1.1 400 Bad Request\r\n".repeat(4)).await;
                let _ = stream.read_to_end(&mut Vec::new()).await;
            }
        });
        assert!(matches!(Connection::open(&address, Kind::Sub, 1000).await, Err(Broken::NotOurs(_))));
        Ok(())
    }
}
