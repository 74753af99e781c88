//! Dialling an index: one connection out, on which this agent streams and is asked what its control socket is asked
//! elsewhere. It is made anew for as long as the engine lives; the engine's thread knows nothing of it.
//!
//! Memory: a place in the replay ring, one request and its one reply. A reply is written before the next request is
//! read, and between two messages of the stream, so neither makes the other wait for long.

use super::clock;
use super::control::Desk;
use super::listen::GREETING;
use super::publish::{message, write};
use super::zmtp::{self, Heard};
use crate::address::Address;
use proto::control::{MAX_REQUEST_BYTES, Reply, Request, decode, encode};
use proto::event::topic;
use proto::proof::{Caller, Hello, Secret};
use proto::zmtp::{Kind, Wire, frame};
use std::cell::RefCell;
use std::io::{Error, ErrorKind, Result};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

/// Deadline for a connection to be made, names looked up included.
const CONNECT: Duration = Duration::from_secs(2);
/// First and longest pause before a new connection, in milliseconds; half of it is drawn anew each time, so that a
/// thousand agents do not come back to an index in one instant.
const PAUSE_MS: (u64, u64) = (50, 1000);
/// An index says something once a second (it pings). One that says nothing for so long is gone without a word.
const SILENCE: Duration = Duration::from_secs(5);
/// How long an index may take nothing of what is written to it. A new connection costs little here, so it is shorter
/// than for those who called.
const STALL: Duration = Duration::from_secs(10);

/// Speaks to one index for as long as the engine lives. `next` tells the seq of the next message.
pub async fn keep(index: Address, desk: Desk, secret: Option<Secret>, next: watch::Receiver<u64>) {
    let (mut pause, mut said) = (PAUSE_MS.0, String::new());
    loop {
        let why = match connect(&index, &desk, secret.as_ref()).await {
            Err(error) => error.to_string(),
            Ok((stream, wire)) => {
                tracing::info!(%index, "kvatlas: the index listens to this engine");
                pause = PAUSE_MS.0;
                said.clear();
                match talk(stream, wire, &desk, next.clone()).await {
                    Ok(()) => return, // the engine ends
                    Err(error) => error.to_string(),
                }
            }
        };
        // The same fault again and again is said once.
        if why != said {
            tracing::warn!(%index, reason = why, "kvatlas: the index cannot be reached; trying again at least every second");
            said = why;
        }
        let drawn = clock::nonce().map_or(0, |bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
        let (wait, next_pause) = pause_after(pause, drawn);
        tokio::time::sleep(Duration::from_millis(wait)).await;
        pause = next_pause;
    }
}

/// How long to wait when the pause is this, and the pause after it, in milliseconds. `drawn`: any number.
fn pause_after(pause: u64, drawn: u16) -> (u64, u64) {
    (pause / 2 + u64::from(drawn) % (pause / 2 + 1), (pause * 2).min(PAUSE_MS.1))
}

async fn connect(index: &Address, desk: &Desk, secret: Option<&Secret>) -> Result<(TcpStream, Wire)> {
    let Address::Tcp { host, port } = index else { return Err(ErrorKind::Unsupported.into()) };
    let late = |_| Error::new(ErrorKind::TimedOut, "no connection within two seconds");
    let mut stream = timeout(CONNECT, TcpStream::connect((host.as_str(), *port))).await.map_err(late)??;
    stream.set_nodelay(true)?;
    let late = |_| Error::new(ErrorKind::TimedOut, "it does not answer as an index does");
    let wire = timeout(GREETING, introduce(&mut stream, desk, secret)).await.map_err(late)??;
    Ok((stream, wire))
}

/// Greets, says who calls, and proves it where that is wanted.
async fn introduce(stream: &mut TcpStream, desk: &Desk, secret: Option<&Secret>) -> Result<Wire> {
    let mut wire = zmtp::open(stream, Kind::Dealer).await?;
    let hello = {
        let feed = desk.feed.borrow();
        let identity = feed.identity();
        Hello { engine: Some(identity.engine.clone()), epoch: Some(identity.epoch), nonce: clock::nonce()? }
    };
    // With a secret the index must have it, too: all that the engine holds is told to it.
    let caller = Caller::new(hello, true);
    let untrusted = |why| Error::new(ErrorKind::PermissionDenied, why);
    let challenge = match ask(stream, &mut wire, &Request::Hello(caller.hello().clone())).await? {
        Reply::Challenge(challenge) => challenge,
        other => return Err(refused(other)),
    };
    let proof = caller.prove(secret, &challenge).map_err(untrusted)?;
    match ask(stream, &mut wire, &Request::Proof(proof)).await? {
        Reply::Welcome(welcome) => caller.trust(secret, &challenge, &welcome).map_err(untrusted)?,
        other => return Err(refused(other)),
    }
    Ok(wire)
}

fn refused(reply: Reply) -> Error {
    match reply {
        Reply::Refused { reason } => Error::new(ErrorKind::PermissionDenied, reason),
        _ => Error::new(ErrorKind::InvalidData, "the index answers something else than was asked"),
    }
}

async fn ask<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S, wire: &mut Wire, request: &Request) -> Result<Reply> {
    let mut out = Vec::new();
    frame(&mut out, true, b"");
    frame(&mut out, false, &encode(request).map_err(Error::other)?);
    stream.write_all(&out).await?;
    loop {
        match zmtp::read(stream, wire).await? {
            Heard::Message(frames) => {
                let body = frames.last().filter(|body| body.len() <= MAX_REQUEST_BYTES);
                return decode(body.map_or(&[][..], |body| body))
                    .map_err(|_| Error::new(ErrorKind::InvalidData, "what answers there is no kvatlas index"));
            }
            Heard::Ping(pong) => stream.write_all(&pong).await?,
            Heard::Command(..) => {}
        }
    }
}

/// What is to be written beside the stream.
#[derive(Debug, Default)]
struct Desired {
    reply: RefCell<Option<Vec<u8>>>,
    // One at a time: a peer that pings faster than it reads gets fewer answers.
    pong: RefCell<Option<Vec<u8>>>,
    changed: Notify,
    written: Notify,
}

/// Streams and answers until the connection is of no use. Ends well only when the engine ends.
async fn talk(stream: TcpStream, mut wire: Wire, desk: &Desk, next: watch::Receiver<u64>) -> Result<()> {
    let (mut from, to) = stream.into_split();
    let desired = Desired::default();
    tokio::select! {
        result = listen(&mut from, &mut wire, desk, &desired) => result,
        result = speak(to, desk, &desired, next) => result,
    }
}

async fn listen<R: AsyncRead + Unpin>(from: &mut R, wire: &mut Wire, desk: &Desk, desired: &Desired) -> Result<()> {
    let silent = |_| Error::new(ErrorKind::TimedOut, "nothing heard of it for 5 s");
    loop {
        match timeout(SILENCE, zmtp::read(from, wire)).await.map_err(silent)?? {
            Heard::Message(mut frames) => {
                let Some(request) = frames.pop() else { continue };
                let reply = desk.answer(&request).await;
                let mut out = Vec::with_capacity(reply.len() + 16);
                frames.iter().for_each(|envelope| frame(&mut out, true, envelope));
                frame(&mut out, false, &reply);
                desired.reply.replace(Some(out));
                desired.changed.notify_one();
                while desired.reply.borrow().is_some() {
                    desired.written.notified().await;
                }
            }
            Heard::Ping(pong) => {
                desired.pong.replace(Some(pong));
                desired.changed.notify_one();
            }
            Heard::Command(..) => {}
        }
    }
}

async fn speak<W: AsyncWrite + Unpin>(
    mut to: W,
    desk: &Desk,
    desired: &Desired,
    mut next: watch::Receiver<u64>,
) -> Result<()> {
    let topic = topic(&desk.feed.borrow().identity().engine);
    // The newest is what a new connection begins with; what was before, the index asks for.
    let mut at = next.borrow_and_update().saturating_sub(1);
    let mut out = Vec::new();
    loop {
        out.clear();
        if let Some(pong) = desired.pong.take() {
            out.extend(pong);
        }
        let reply = desired.reply.borrow_mut().take();
        if let Some(reply) = reply {
            timeout(STALL, to.write_all(&reply)).await??;
            desired.written.notify_one();
        }
        let end = *next.borrow_and_update();
        let payload = message(&mut desk.feed.borrow_mut(), &mut at, end, topic.as_bytes(), &mut out);
        if out.is_empty() {
            tokio::select! {
                changed = next.changed() => if changed.is_err() { return Ok(()) },
                () = desired.changed.notified() => {}
            }
            continue;
        }
        write(&mut to, &mut out, payload, STALL).await?;
    }
}

/// This machine's address on the way out, as the routing table has it. Sends nothing.
pub fn own_ip() -> Option<std::net::IpAddr> {
    // Addresses of documentation: routed as anything outside is, and nobody's.
    let ways = [("0.0.0.0:0", "192.0.2.1:9"), ("[::]:0", "[2001:db8::1]:9")];
    ways.into_iter().find_map(|(from, to)| {
        let socket = std::net::UdpSocket::bind(from).ok()?;
        socket.connect(to).ok()?;
        Some(socket.local_addr().ok()?.ip()).filter(|ip| !ip.is_unspecified())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn however_long_an_index_was_away_it_is_called_within_a_second() {
        let (mut pause, mut waits) = (PAUSE_MS.0, vec![]);
        for drawn in (0..1000u16).map(|i| i.wrapping_mul(40_503)) {
            let (wait, next) = pause_after(pause, drawn);
            assert!((pause / 2..=pause).contains(&wait) && wait <= 1000, "{wait} of {pause}");
            waits.push(wait);
            pause = next;
        }
        assert!(waits[0] <= 50, "the first is short: {}", waits[0]);
        let late: std::collections::BTreeSet<u64> = waits[10..].iter().copied().collect();
        assert!(late.len() > 100, "agents do not come in step: {late:?}");
    }
}
