//! ZMTP 3.0, the wire protocol of ZeroMQ, as far as a PUB and a ROUTER need it: <https://rfc.zeromq.org/spec/23>.
//!
//! Written out here because the queues are what matters: a library keeps a queue of messages for each peer (the
//! `zeromq` crate 100,000 of them, and goes on writing them after its socket was dropped), inside the engine's
//! process. Here a peer that lags is a position in the replay ring, and its socket's buffer is the kernel's.

use std::io::{Error, ErrorKind, Result};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Largest frame taken from a peer: requests are at most 4,096 bytes, subscriptions and greetings shorter.
pub const MAX_FRAME_BYTES: u64 = 4096 + 64;
/// Most frames in one message of a peer: an envelope of a few identities, the empty frame, the request.
pub const MAX_FRAMES: usize = 8;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// What a peer sent.
#[derive(Debug, PartialEq, Eq)]
pub enum Incoming {
    /// A message of one or more frames.
    Message(Vec<Vec<u8>>),
    /// A command: its name and what follows it.
    Command(Vec<u8>, Vec<u8>),
}

fn bad(what: &str) -> Error {
    Error::new(ErrorKind::InvalidData, what)
}

/// Greets a peer and exchanges READY. `kind` is our socket type, `peers` are those that may talk to it.
///
/// # Errors
/// When the peer closes, speaks an older protocol or another mechanism, or has a socket type that does not fit.
pub async fn handshake<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S, kind: &str, peers: &[&str]) -> Result<()> {
    let mut greeting = [0u8; 64];
    greeting[0] = 0xff;
    greeting[8] = 1;
    greeting[9] = 0x7f;
    greeting[10] = 3; // 3.0: subscriptions come as messages; the newer form is understood as well
    greeting[12..16].copy_from_slice(b"NULL");
    stream.write_all(&greeting).await?;
    let mut theirs = [0u8; 64];
    stream.read_exact(&mut theirs).await?;
    if theirs[0] != 0xff || theirs[9] & 1 == 0 || theirs[10] < 3 {
        return Err(bad("not ZMTP 3"));
    }
    if &theirs[12..32] != b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0" {
        return Err(bad("a security mechanism other than NULL"));
    }
    let mut ready = vec![];
    property(&mut ready, "Socket-Type", kind.as_bytes());
    if kind == "ROUTER" {
        property(&mut ready, "Identity", b"");
    }
    stream.write_all(&command("READY", &ready)).await?;
    match read(stream).await? {
        Incoming::Command(name, body) if name == b"READY" => {
            let theirs = find_property(&body, "Socket-Type").unwrap_or_default();
            if peers.iter().any(|peer| peer.as_bytes() == theirs) {
                Ok(())
            } else {
                Err(bad("a socket type that does not fit"))
            }
        }
        _ => Err(bad("no READY")),
    }
}

fn property(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    out.push(name.len() as u8);
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(&(value.len() as u32).to_be_bytes());
    out.extend_from_slice(value);
}

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

/// A command's frame.
pub fn command(name: &str, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    header(&mut out, COMMAND, 1 + name.len() + body.len());
    out.push(name.len() as u8);
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(body);
    out
}

/// Appends a frame's header.
pub fn header(out: &mut Vec<u8>, flags: u8, length: usize) {
    match u8::try_from(length) {
        Ok(short) => out.extend_from_slice(&[flags, short]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend_from_slice(&(length as u64).to_be_bytes());
        }
    }
}

/// Appends a whole frame; `more` says that another one follows in the message.
pub fn frame(out: &mut Vec<u8>, more: bool, bytes: &[u8]) {
    header(out, u8::from(more), bytes.len());
    out.extend_from_slice(bytes);
}

/// Reads a message or a command.
///
/// # Errors
/// When the peer closes, or sends more than the limits allow.
pub async fn read<R: AsyncRead + Unpin>(stream: &mut R) -> Result<Incoming> {
    let mut frames = Vec::new();
    loop {
        let flags = stream.read_u8().await?;
        let length = if flags & LONG == 0 { u64::from(stream.read_u8().await?) } else { stream.read_u64().await? };
        if length > MAX_FRAME_BYTES || frames.len() >= MAX_FRAMES {
            return Err(bad("a message beyond the limits"));
        }
        let mut bytes = vec![0; length as usize];
        stream.read_exact(&mut bytes).await?;
        if flags & COMMAND != 0 {
            let (length, rest) = bytes.split_first().ok_or_else(|| bad("an empty command"))?;
            let (name, body) = rest.split_at_checked(usize::from(*length)).ok_or_else(|| bad("a cut command"))?;
            return Ok(Incoming::Command(name.to_vec(), body.to_vec()));
        }
        frames.push(bytes);
        if flags & MORE == 0 {
            return Ok(Incoming::Message(frames));
        }
    }
}

/// The answer to a PING command, `None` for other commands.
pub fn pong(name: &[u8], body: &[u8]) -> Option<Vec<u8>> {
    // A PING is a time to live of 2 bytes and a context of at most 16, which comes back.
    (name == b"PING").then(|| command("PONG", body.get(2..).map_or(&[], |context| &context[..context.len().min(16)])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn two_ends_shake_hands_and_frames_pass() -> Result<()> {
        let (mut a, mut b) = tokio::io::duplex(1 << 16);
        let (left, right) =
            tokio::join!(handshake(&mut a, "PUB", &["SUB", "XSUB"]), handshake(&mut b, "SUB", &["PUB", "XPUB"]));
        left.and(right)?;
        let mut out = vec![];
        frame(&mut out, true, b"one");
        frame(&mut out, false, &[7; 300]);
        out.extend(command("PING", b"\0\x01context"));
        b.write_all(&out).await?;
        assert_eq!(read(&mut a).await?, Incoming::Message(vec![b"one".to_vec(), vec![7; 300]]));
        let Incoming::Command(name, body) = read(&mut a).await? else { panic!("no command") };
        assert_eq!(pong(&name, &body), Some(command("PONG", b"context")));
        Ok(())
    }

    #[tokio::test]
    async fn strangers_and_giants_are_refused() {
        let (mut a, mut b) = tokio::io::duplex(1 << 16);
        let (left, _) = tokio::join!(handshake(&mut a, "PUB", &["SUB"]), handshake(&mut b, "REQ", &["PUB"]));
        assert!(left.is_err());
        let (mut a, mut b) = tokio::io::duplex(1 << 16);
        assert!(b.write_all(&[b'G'; 64]).await.is_ok());
        assert!(handshake(&mut a, "PUB", &["SUB"]).await.is_err());
        let (mut a, mut b) = tokio::io::duplex(1 << 16);
        let mut out = vec![];
        header(&mut out, 0, 1 << 40);
        assert!(b.write_all(&out).await.is_ok());
        assert!(read(&mut a).await.is_err());
    }
}
