//! ZMTP 3.0, the wire protocol of ZeroMQ, as a codec: bytes in, messages out; no socket. <https://rfc.zeromq.org/spec/23>
//!
//! Written out here, not taken from a library, because a peer must not be able to hurt the process, least of all an
//! engine: the `zeromq` crate reserves memory for whatever length a peer claims (2^60 bytes end the process), counts no
//! frames, drops a connection over a PING, and keeps a queue of 100,000 messages for each peer. Here lengths and counts
//! are bounded before memory is taken, memory grows with what really arrives, and queues are the caller's.

use bytes::{Buf, Bytes, BytesMut};

/// Longest command taken, in bytes: READY with a few properties, SUBSCRIBE, PING.
pub const MAX_COMMAND_BYTES: usize = 8 << 10;
/// Most bytes that [`Wire::room`] makes room for at once.
const CHUNK: usize = 64 << 10;
const GREETING: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// A type of socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Sends to who subscribes.
    Pub,
    /// Receives what a PUB or XPUB sends.
    Sub,
    /// Answers many.
    Router,
    /// Asks a ROUTER; or, towards one that was dialled, speaks and is asked.
    Dealer,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Pub => "PUB",
            Kind::Sub => "SUB",
            Kind::Router => "ROUTER",
            Kind::Dealer => "DEALER",
        }
    }

    fn peers(self) -> &'static [&'static [u8]] {
        match self {
            Kind::Pub => &[b"SUB", b"XSUB"],
            Kind::Sub => &[b"PUB", b"XPUB"],
            Kind::Router => &[b"DEALER", b"REQ", b"ROUTER"],
            Kind::Dealer => &[b"ROUTER", b"DEALER", b"REP"],
        }
    }
}

/// What is taken of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most frames in one message.
    pub frames: usize,
    /// Most bytes in all frames of one message.
    pub bytes: usize,
}

/// Why a connection is of no use any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// What is there does not speak ZMTP 3 without a security mechanism, or its type of socket does not fit.
    #[error("what is there is no ZeroMQ socket of this kind: {0}")]
    NotOurs(&'static str),
    /// A frame, or all frames of a message, beyond the limit.
    #[error("a message of {claimed} bytes; at most {limit} are taken")]
    TooLong {
        /// Its length, as claimed.
        claimed: u64,
        /// The limit.
        limit: usize,
    },
    /// A message of too many frames.
    #[error("a message of more than {0} frames")]
    TooMany(usize),
    /// A command whose name is longer than the command.
    #[error("a cut command")]
    Cut,
}

/// What a peer sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Incoming {
    /// Its greeting and READY: it speaks our protocol and its socket fits. Always the first.
    Ready,
    /// A message of one or more frames.
    Message(Vec<Bytes>),
    /// A command.
    Command {
        /// Its name, as in `PING`.
        name: Bytes,
        /// What follows the name.
        body: Bytes,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Greeting,
    Ready,
    Open,
}

/// The reading half of one connection: bytes are put into [`Wire::room`], what they are comes out of [`Wire::take`].
/// Nothing that has arrived is lost when a read is cancelled in between.
#[derive(Debug)]
pub struct Wire {
    kind: Kind,
    limits: Limits,
    stage: Stage,
    buffer: BytesMut,
    /// Bytes that the buffer must hold before there is more to say.
    wanted: usize,
    /// Frames of the message that is arriving, and their bytes.
    frames: Vec<Bytes>,
    bytes: usize,
}

impl Wire {
    /// A connection's reading half before anything was read.
    pub fn new(kind: Kind, limits: Limits) -> Self {
        Self {
            kind,
            limits,
            stage: Stage::Greeting,
            buffer: BytesMut::new(),
            wanted: GREETING,
            frames: Vec::new(),
            bytes: 0,
        }
    }

    /// What is sent first: greeting and READY. The peer's are not waited for: a peer of another protocol cannot use
    /// them anyway.
    pub fn opening(&self) -> Vec<u8> {
        let mut out = vec![0u8; GREETING];
        // Version 3.0: subscriptions come as messages; the newer form is understood as well.
        (out[0], out[8], out[9], out[10]) = (0xff, 1, 0x7f, 3);
        out[12..16].copy_from_slice(b"NULL");
        let mut ready = Vec::new();
        property(&mut ready, "Socket-Type", self.kind.name().as_bytes());
        if matches!(self.kind, Kind::Router | Kind::Dealer) {
            property(&mut ready, "Identity", b"");
        }
        out.extend(command("READY", &ready));
        out
    }

    /// Room to read into: at most what the frame that is arriving still lacks (and not less than 4 KiB), so that
    /// memory follows what arrived, not what was claimed.
    pub fn room(&mut self) -> &mut BytesMut {
        self.buffer.reserve(CHUNK.min(self.wanted.saturating_sub(self.buffer.len())).max(4096));
        &mut self.buffer
    }

    /// The next thing that the peer said, once; `None`: more bytes are needed.
    ///
    /// # Errors
    /// When the peer breaks the protocol or a limit: the connection is of no use from then on.
    pub fn take(&mut self) -> Result<Option<Incoming>, Broken> {
        if self.stage == Stage::Greeting {
            if !self.has(GREETING) {
                return Ok(None);
            }
            greeted(&self.buffer.split_to(GREETING))?;
            self.stage = Stage::Ready;
        }
        while let Some((flags, body)) = self.frame()? {
            if flags & COMMAND != 0 {
                let length = usize::from(*body.first().ok_or(Broken::Cut)?) + 1;
                if body.len() < length {
                    return Err(Broken::Cut);
                }
                let (name, body) = (body.slice(1..length), body.slice(length..));
                if self.stage == Stage::Open {
                    return Ok(Some(Incoming::Command { name, body }));
                }
                if name != b"READY"[..] {
                    return Err(Broken::NotOurs("it refused the handshake"));
                }
                if !find_property(&body, "Socket-Type").is_some_and(|theirs| self.kind.peers().contains(&theirs)) {
                    return Err(Broken::NotOurs(
                        "its socket type does not fit (events are a PUB, control is a ROUTER)",
                    ));
                }
                self.stage = Stage::Open;
                return Ok(Some(Incoming::Ready));
            }
            if self.stage != Stage::Open {
                return Err(Broken::NotOurs("it sends before it is ready"));
            }
            if self.frames.len() >= self.limits.frames {
                return Err(Broken::TooMany(self.limits.frames));
            }
            self.bytes += body.len();
            self.frames.push(body);
            if flags & MORE == 0 {
                self.bytes = 0;
                return Ok(Some(Incoming::Message(std::mem::take(&mut self.frames))));
            }
        }
        Ok(None)
    }

    /// Other limits from the next frame on: for a peer that proved who it is.
    pub fn limit(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Memory reserved for what arrives, in bytes.
    pub fn reserved(&self) -> usize {
        self.buffer.capacity()
    }

    fn has(&mut self, wanted: usize) -> bool {
        self.wanted = wanted;
        self.buffer.len() >= wanted
    }

    /// The next frame: its flags and its body. Takes nothing from the buffer before all of it is there.
    fn frame(&mut self) -> Result<Option<(u8, Bytes)>, Broken> {
        if !self.has(2) {
            return Ok(None);
        }
        let flags = self.buffer[0];
        let start = if flags & LONG != 0 { 9 } else { 2 };
        if !self.has(start) {
            return Ok(None);
        }
        let claimed = if flags & LONG != 0 { (&self.buffer[1..9]).get_u64() } else { u64::from(self.buffer[1]) };
        let (room, limit) = match flags & COMMAND {
            0 => (self.limits.bytes.saturating_sub(self.bytes), self.limits.bytes),
            _ => (MAX_COMMAND_BYTES, MAX_COMMAND_BYTES),
        };
        let Some(length) = usize::try_from(claimed).ok().filter(|length| *length <= room) else {
            return Err(Broken::TooLong { claimed: claimed.saturating_add(self.bytes as u64), limit });
        };
        if !self.has(start + length) {
            return Ok(None);
        }
        self.buffer.advance(start);
        Ok(Some((flags, self.buffer.split_to(length).freeze())))
    }
}

fn greeted(theirs: &[u8]) -> Result<(), Broken> {
    if theirs[0] != 0xff || theirs[9] & 1 == 0 {
        return Err(Broken::NotOurs("it does not greet as ZeroMQ does"));
    }
    if theirs[10] < 3 {
        return Err(Broken::NotOurs("it speaks a version of ZMTP before 3"));
    }
    if &theirs[12..32] != b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0" {
        return Err(Broken::NotOurs("it wants a security mechanism (PLAIN or CURVE)"));
    }
    Ok(())
}

fn property(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    out.push(name.len() as u8);
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(&(value.len() as u32).to_be_bytes());
    out.extend_from_slice(value);
}

/// A property among those of READY: each a name with one byte of length, a value with four.
fn find_property<'a>(mut body: &'a [u8], wanted: &str) -> Option<&'a [u8]> {
    loop {
        let (length, rest) = body.split_first()?;
        let (name, rest) = rest.split_at_checked(usize::from(*length))?;
        let (length, rest) = rest.split_first_chunk::<4>()?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
        if name.eq_ignore_ascii_case(wanted.as_bytes()) {
            return Some(value);
        }
        body = rest;
    }
}

/// Appends a frame's header; `more`: another frame of the message follows.
pub fn header(out: &mut Vec<u8>, more: bool, length: usize) {
    head(out, if more { MORE } else { 0 }, length);
}

fn head(out: &mut Vec<u8>, flags: u8, length: usize) {
    match u8::try_from(length) {
        Ok(short) => out.extend_from_slice(&[flags, short]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend_from_slice(&(length as u64).to_be_bytes());
        }
    }
}

/// Appends a whole frame; `more`: another one follows in the message.
pub fn frame(out: &mut Vec<u8>, more: bool, bytes: &[u8]) {
    header(out, more, bytes.len());
    out.extend_from_slice(bytes);
}

/// Appends a message of these frames.
pub fn message(out: &mut Vec<u8>, frames: &[&[u8]]) {
    for (at, bytes) in frames.iter().enumerate() {
        frame(out, at + 1 < frames.len(), bytes);
    }
}

/// A command.
pub fn command(name: &str, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(body.len() + name.len() + 10);
    head(&mut out, COMMAND, 1 + name.len() + body.len());
    out.push(name.len() as u8);
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(body);
    out
}

/// The message by which a SUB asks for all topics that start so.
pub fn subscription(prefix: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(prefix.len() + 10);
    header(&mut out, false, 1 + prefix.len());
    out.push(1);
    out.extend_from_slice(prefix.as_bytes());
    out
}

/// The answer to a command, when it is a PING.
pub fn pong(name: &[u8], body: &[u8]) -> Option<Vec<u8>> {
    // A PING is a time to live of 2 bytes and a context of at most 16, which comes back.
    (name == b"PING").then(|| command("PONG", body.get(2..).map_or(&[], |context| &context[..context.len().min(16)])))
}

#[cfg(test)]
#[path = "zmtp_tests.rs"]
mod tests;
