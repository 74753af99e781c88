//! The publishing socket: every reader is a position in the replay ring.

use super::listen::{GREETING, STALL, Stream};
use super::zmtp::{self, Heard};
use crate::feed::Feed;
use proto::event::seq_frame;
use proto::zmtp::{Kind, Wire, frame, header};
use std::cell::RefCell;
use std::io::{Error, ErrorKind, Result};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

/// Most subscriptions of one reader.
const MAX_SUBSCRIPTIONS: usize = 16;
/// Payloads up to this size are copied behind their headers, so that a message is one write.
const COPY_BYTES: usize = 16 << 10;

#[derive(Debug, Default)]
struct Wishes {
    subscriptions: RefCell<Vec<Vec<u8>>>,
    // One at a time: a peer that pings faster than it reads gets fewer answers.
    pong: RefCell<Option<Vec<u8>>>,
    changed: Notify,
}

/// Serves one reader until it leaves. `next` tells the seq of the next message whenever there are new ones.
///
/// # Errors
/// When the reader leaves, breaks the protocol, or takes nothing for [`STALL`].
pub async fn serve(
    mut stream: Box<dyn Stream>,
    topic: String,
    feed: Rc<RefCell<Feed>>,
    next: watch::Receiver<u64>,
) -> Result<()> {
    let mut wire = timeout(GREETING, zmtp::open(&mut stream, Kind::Pub)).await??;
    let (mut from, to) = tokio::io::split(stream);
    let wishes = Wishes::default();
    tokio::select! {
        result = listen(&mut from, &mut wire, &wishes) => result,
        result = speak(to, topic.as_bytes(), &wishes, feed, next) => result,
    }
}

async fn listen<R: AsyncRead + Unpin>(from: &mut R, wire: &mut Wire, wishes: &Wishes) -> Result<()> {
    loop {
        let (subscribe, topic) = match zmtp::read(from, wire).await? {
            Heard::Message(frames) => match frames.first().and_then(|frame| frame.split_first()) {
                Some((1, topic)) => (true, topic.to_vec()),
                Some((0, topic)) => (false, topic.to_vec()),
                _ => continue,
            },
            Heard::Command(name, topic) if name == b"SUBSCRIBE"[..] => (true, topic.to_vec()),
            Heard::Command(name, topic) if name == b"CANCEL"[..] => (false, topic.to_vec()),
            Heard::Command(..) => continue,
            Heard::Ping(pong) => {
                wishes.pong.replace(Some(pong));
                wishes.changed.notify_one();
                continue;
            }
        };
        let mut subscriptions = wishes.subscriptions.borrow_mut();
        if !subscribe {
            if let Some(at) = subscriptions.iter().position(|known| *known == topic) {
                subscriptions.swap_remove(at);
            }
        } else if subscriptions.len() < MAX_SUBSCRIPTIONS {
            subscriptions.push(topic);
        } else {
            return Err(Error::new(ErrorKind::InvalidData, "more than 16 subscriptions"));
        }
        wishes.changed.notify_one();
    }
}

async fn speak<W: AsyncWrite + Unpin>(
    mut to: W,
    topic: &[u8],
    wishes: &Wishes,
    feed: Rc<RefCell<Feed>>,
    mut next: watch::Receiver<u64>,
) -> Result<()> {
    let mut at: Option<u64> = None;
    let mut out = Vec::new();
    loop {
        out.clear();
        if let Some(pong) = wishes.pong.take() {
            out.extend(pong);
        }
        let wanted = wishes.subscriptions.borrow().iter().any(|prefix| topic.starts_with(prefix));
        let end = *next.borrow_and_update();
        at = if wanted { at.or(Some(end)) } else { None };
        let payload = at.as_mut().and_then(|at| message(&mut feed.borrow_mut(), at, end, topic, &mut out));
        if out.is_empty() {
            tokio::select! {
                changed = next.changed() => if changed.is_err() { return Ok(()) },
                () = wishes.changed.notified() => {}
            }
            continue;
        }
        write(&mut to, &mut out, payload, STALL).await?;
    }
}

/// Appends the start of the next message of a reader that is `at` this seq, and gives its payload; `None` when the
/// reader has read all before `end`.
pub(super) fn message(feed: &mut Feed, at: &mut u64, end: u64, topic: &[u8], out: &mut Vec<u8>) -> Option<Arc<[u8]>> {
    if *at >= end {
        return None;
    }
    if *at < feed.replay().oldest() {
        // The ring went past this reader. The newest is what it gets; the seq shows it the gap, and replay or a
        // snapshot close it.
        feed.lagged(end - 1 - *at);
        *at = end - 1;
    }
    let payload = feed.replay().get(*at).cloned();
    if let Some(payload) = &payload {
        frame(out, true, topic);
        frame(out, true, &seq_frame(*at));
        header(out, false, payload.len());
    }
    *at += 1;
    payload
}

/// Writes what is in `out`, and the payload after it. `stall`: how long the peer may take nothing of it.
pub(super) async fn write<W: AsyncWrite + Unpin>(
    to: &mut W,
    out: &mut Vec<u8>,
    payload: Option<Arc<[u8]>>,
    stall: Duration,
) -> Result<()> {
    let rest = match &payload {
        Some(payload) if payload.len() <= COPY_BYTES => {
            out.extend_from_slice(payload);
            None
        }
        other => other.as_deref(),
    };
    timeout(stall, to.write_all(out)).await??;
    if let Some(rest) = rest {
        timeout(stall, to.write_all(rest)).await??;
    }
    out.shrink_to(COPY_BYTES * 2);
    Ok(())
}
