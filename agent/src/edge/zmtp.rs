//! Connections that speak ZeroMQ's protocol: [`proto::zmtp`] on a stream. There is no queue here: a peer that lags is a
//! position in the replay ring, and its socket's buffer is the kernel's.

use bytes::Bytes;
use proto::control::MAX_REQUEST_BYTES;
use proto::zmtp::{Incoming, Kind, Limits, Wire, pong};
use std::io::{Error, ErrorKind, Result};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// What is taken of a peer: an envelope of a few identities, the empty frame and a request; subscriptions are shorter.
pub const LIMITS: Limits = Limits { frames: 8, bytes: MAX_REQUEST_BYTES + 4096 };

/// What a peer sent after it was ready.
#[derive(Debug, PartialEq, Eq)]
pub enum Heard {
    /// A message.
    Message(Vec<Bytes>),
    /// A command that needs more than an answer: its name and what follows it.
    Command(Bytes, Bytes),
    /// A PING: what to answer.
    Ping(Vec<u8>),
}

/// Greets a peer and waits until it has. `kind`: what this side is.
///
/// # Errors
/// When the peer closes, speaks another protocol, or has a socket type that does not fit.
pub async fn open<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S, kind: Kind) -> Result<Wire> {
    let mut wire = Wire::new(kind, LIMITS);
    stream.write_all(&wire.opening()).await?;
    match next(stream, &mut wire).await? {
        Incoming::Ready => Ok(wire),
        _ => Err(Error::new(ErrorKind::InvalidData, "no READY")),
    }
}

/// The next thing that a peer says. May be cancelled: nothing that has arrived is lost.
///
/// # Errors
/// When the peer closes, or sends more than the limits allow.
pub async fn read<R: AsyncRead + Unpin>(stream: &mut R, wire: &mut Wire) -> Result<Heard> {
    loop {
        match next(stream, wire).await? {
            Incoming::Ready => {}
            Incoming::Message(frames) => return Ok(Heard::Message(frames)),
            Incoming::Command { name, body } => {
                return Ok(match pong(&name, &body) {
                    Some(answer) => Heard::Ping(answer),
                    None => Heard::Command(name, body),
                });
            }
        }
    }
}

async fn next<R: AsyncRead + Unpin>(stream: &mut R, wire: &mut Wire) -> Result<Incoming> {
    loop {
        if let Some(incoming) = wire.take().map_err(|broken| Error::new(ErrorKind::InvalidData, broken))? {
            return Ok(incoming);
        }
        if stream.read_buf(wire.room()).await? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::zmtp::{command, header, message};

    #[tokio::test]
    async fn two_ends_shake_hands_and_frames_pass() -> Result<()> {
        let (mut a, mut b) = tokio::io::duplex(1 << 16);
        let (left, right) = tokio::join!(open(&mut a, Kind::Pub), open(&mut b, Kind::Sub));
        let mut wire = left?;
        right?;
        let mut out = vec![];
        message(&mut out, &[b"one", &[7; 300]]);
        out.extend(command("PING", b"\0\x01context"));
        out.extend(command("CANCEL", b"kv"));
        b.write_all(&out).await?;
        assert_eq!(read(&mut a, &mut wire).await?, Heard::Message(vec!["one".into(), vec![7; 300].into()]));
        assert_eq!(read(&mut a, &mut wire).await?, Heard::Ping(command("PONG", b"context")));
        assert_eq!(read(&mut a, &mut wire).await?, Heard::Command("CANCEL".into(), "kv".into()));
        Ok(())
    }

    #[tokio::test]
    async fn strangers_and_giants_are_refused() -> Result<()> {
        let (mut a, mut b) = tokio::io::duplex(1 << 16);
        let (left, _) = tokio::join!(open(&mut a, Kind::Pub), open(&mut b, Kind::Dealer));
        assert!(left.is_err());
        let (mut a, mut b) = tokio::io::duplex(1 << 16);
        b.write_all(&[b'G'; 64]).await?;
        assert!(open(&mut a, Kind::Pub).await.is_err());
        let (mut a, mut b) = tokio::io::duplex(1 << 16);
        let (left, _) = tokio::join!(open(&mut a, Kind::Pub), open(&mut b, Kind::Sub));
        let mut out = vec![];
        header(&mut out, false, 1 << 40);
        b.write_all(&out).await?;
        assert!(read(&mut a, &mut left?).await.is_err());
        Ok(())
    }
}
