//! The control socket: one request of a peer is read, answered and written before its next one is read. So no peer
//! makes another wait, and a peer's replies never queue.

use super::listen::{GREETING, STALL, Stream};
use super::zmtp::{self, Heard};
use crate::answer::{Answer, Bundle, Gate, answer, ready};
use crate::edge::clock::{self, Clock};
use crate::feed::Feed;
use proto::control::Reply;
use proto::proof::Secret;
use proto::zmtp::{Kind, frame};
use std::cell::RefCell;
use std::io::Result;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;

/// A page of the engine's own pool: cached blocks by block id with the engine's digests, and where to go on.
pub type AuditPage = (Vec<(u64, Vec<u8>)>, Option<u64>);
/// Reads the engine's own pool from a block id on; `None` when it cannot be read. It may wait for the engine.
pub type Auditor = Box<dyn Fn(u64) -> Option<AuditPage> + Send + Sync>;
/// Has the engine's side tell what it owes, [`crate::engine::Engine::tell`]. It may wait for the engine.
pub type Settler = Box<dyn Fn() + Send + Sync>;

/// What the engine gives later than the start, each once.
#[derive(Default)]
pub struct Later {
    /// The bundle.
    pub bundle: OnceLock<Bundle>,
    /// The way to read the pool.
    pub auditor: OnceLock<Auditor>,
    /// The way to be told what is owed while the engine rests.
    pub settler: OnceLock<Settler>,
}

impl std::fmt::Debug for Later {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Later").field("bundle", &self.bundle.get().map(Bundle::digest)).finish_non_exhaustive()
    }
}

impl Later {
    /// The bundle's digest, "" while there is none.
    pub fn digest(&self) -> &str {
        self.bundle.get().map_or("", Bundle::digest)
    }
}

/// Answers requests of one peer.
#[derive(Debug, Clone)]
pub struct Desk {
    /// What is published.
    pub feed: Rc<RefCell<Feed>>,
    /// What came later.
    pub later: Arc<Later>,
    /// The clock of cuts.
    pub clock: Clock,
}

impl Desk {
    /// The answer to one request, encoded.
    pub async fn answer(&self, request: &[u8]) -> Vec<u8> {
        let answer = answer(&mut self.feed.borrow_mut(), self.later.bundle.get(), request, self.clock.now_ms());
        match answer {
            Answer::Ready(reply) => reply,
            Answer::Audit(from) => audit(&self.later, from).await,
        }
    }
}

/// Serves one peer until it leaves. With a secret, only who proves to know it.
///
/// # Errors
/// When the peer leaves, breaks the protocol, or takes nothing for [`STALL`].
pub async fn serve(mut stream: Box<dyn Stream>, desk: Desk, secret: Option<Secret>) -> Result<()> {
    let mut gate = Gate::new(secret, clock::nonce()?);
    let mut wire = timeout(GREETING, zmtp::open(&mut stream, Kind::Router)).await??;
    let mut out = Vec::new();
    loop {
        out.clear();
        match zmtp::read(&mut stream, &mut wire).await? {
            Heard::Message(mut frames) => {
                let Some(request) = frames.pop() else { continue };
                let reply = match gate.answer(&request) {
                    Some(Answer::Ready(reply)) => reply,
                    _ => desk.answer(&request).await,
                };
                for envelope in frames {
                    frame(&mut out, true, &envelope);
                }
                frame(&mut out, false, &reply);
            }
            Heard::Ping(pong) => out.extend(pong),
            Heard::Command(..) => {}
        }
        timeout(STALL, stream.write_all(&out)).await??;
        out.shrink_to(1 << 12); // a snapshot's piece does not stay with an idle peer
    }
}

async fn audit(later: &Arc<Later>, from: u64) -> Vec<u8> {
    let reading = later.clone();
    // On a thread of its own: the engine may hold its lock for a whole step, and heartbeats must go on.
    let page = tokio::task::spawn_blocking(move || reading.auditor.get().and_then(|read| read(from))).await;
    let reply = match page {
        Ok(Some((blocks, next))) => Reply::Audit {
            blocks: blocks.into_iter().map(|(block, hash)| (block, serde_bytes::ByteBuf::from(hash))).collect(),
            next,
        },
        _ => Reply::Refused { reason: "the engine's block pool cannot be read here".to_string() },
    };
    match ready(&reply) {
        Answer::Ready(bytes) => bytes,
        Answer::Audit(_) => Vec::new(),
    }
}
