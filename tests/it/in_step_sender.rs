//! An engine with its agent, for the property test: copies of blocks in two tiers, and what its agent would send.

use agent::batch;
use agent::replay::Replay;
use harness::naive::Copies;
use harness::seeded::Seeded;
use proto::block::{self, Fingerprint};
use proto::control::{Chain, Piece, REPLAY_PIECE, Reply, Request};
use proto::digest::{Digest, of_bytes};
use proto::event::{Batch, Clear, Fingerprints, KindDigest, Life, Op, PROTOCOL, State};
use proto::id::{EngineId, Epoch, SetKind};
use proto::residency::{Change, Link, Residency};
use std::collections::{BTreeMap, BTreeSet};

/// Tokens a block, as the heartbeats say.
pub const BLOCK_SIZE: u32 = 16;
/// The model that all engines serve.
pub const MODEL: &str = "tiny";
/// The kinds that these engines publish.
pub const KINDS: [SetKind; 2] = [SetKind::Gpu, SetKind::Any];

/// One tier: the real core, and the naive one beside it.
#[derive(Default)]
struct Tier {
    real: Residency,
    naive: Copies,
    changes: Vec<Change>,
}

/// One engine and its agent.
pub struct Sender {
    name: String,
    seed: u64,
    epoch: Epoch,
    tiers: [Tier; 2],
    cleared: bool,
    replay: Replay,
    cuts: BTreeMap<u64, Vec<Piece>>,
    cut_number: u64,
    /// What is to be told of requests with the next message.
    pub lives: Vec<Life>,
    /// How far a reader said that it read.
    pub acked: u64,
    /// Served by the control socket; empty for none.
    pub bundle: Vec<u8>,
    /// Digests of the sets after each message of this epoch, `[gpu, any]`: `history[n]` is what message `n` left.
    pub history: Vec<[Digest; 2]>,
}

impl Sender {
    /// An engine whose agent has this seed.
    pub fn new(name: &str, seed: u64, epoch: Epoch) -> Self {
        Self {
            name: name.into(),
            seed,
            epoch,
            tiers: Default::default(),
            cleared: false,
            replay: Replay::default(),
            cuts: BTreeMap::new(),
            cut_number: 0,
            lives: Vec::new(),
            acked: 0,
            bundle: Vec::new(),
            history: Vec::new(),
        }
    }

    /// The process ends and another one starts.
    pub fn restart(&mut self, epoch: Epoch) {
        *self = Self::new(&self.name, self.seed, epoch);
    }

    /// This process life.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The set of a kind, from scratch.
    pub fn truth(&self, kind: SetKind) -> BTreeSet<Fingerprint> {
        self.tiers[kind.index()].naive.reachable()
    }

    /// A copy comes to a tier, or goes from it.
    pub fn copy(&mut self, kind: SetKind, fp: Fingerprint, parent: Link, comes: bool) {
        let tier = &mut self.tiers[kind.index()];
        if comes {
            tier.real.add(fp, parent, &mut tier.changes);
            tier.naive.add(fp, parent);
        } else {
            assert_eq!(tier.real.drop(fp, &mut tier.changes), tier.naive.drop(fp));
        }
    }

    /// The engine drops its whole cache.
    pub fn clear(&mut self) {
        self.tiers = Default::default();
        self.cleared = true;
    }

    /// Ends an engine step: what changed, and a heartbeat when it is due, as one message. `None` when there is
    /// nothing to say.
    pub fn step(&mut self, unix_ms: u64, beat: bool) -> Option<(u64, Vec<u8>)> {
        let mut ops = Vec::new();
        if std::mem::take(&mut self.cleared) {
            ops.push(Op::Clear(Clear { kind: None }));
        }
        for kind in KINDS {
            let changes = std::mem::take(&mut self.tiers[kind.index()].changes);
            ops.extend(batch::ops((kind, true), &changes, MODEL, |_| ""));
        }
        ops.extend(self.lives.drain(..).map(Op::Life));
        if beat {
            ops.push(Op::State(Box::new(self.state())));
        }
        if ops.is_empty() {
            return None;
        }
        let batch = Batch { version: PROTOCOL, epoch: self.epoch, step_ms: unix_ms, ops };
        let payload = batch.encode().expect("a batch encodes");
        let seq = self.replay.push(payload.clone());
        self.history.push(KINDS.map(|kind| self.digest(kind)));
        Some((seq, payload))
    }

    fn digest(&self, kind: SetKind) -> Digest {
        self.tiers[kind.index()].real.digest()
    }

    fn state(&self) -> State {
        let json = serde_json::json!({
            "engine": format!("{}.0", self.name), "models": [MODEL], "block_size": BLOCK_SIZE,
            "check": block::check(MODEL, self.seed, BLOCK_SIZE), "digests": [],
            "running": 0, "waiting": 0, "kv_use": 0.0,
        });
        let state: State = serde_json::from_value(json).expect("a heartbeat");
        let bundle = if self.bundle.is_empty() { String::new() } else { of_bytes(&self.bundle) };
        State { bundle, digests: KINDS.map(|kind| KindDigest { kind, digest: self.digest(kind) }).to_vec(), ..state }
    }

    /// The agent's answer, as of now.
    pub fn answer(&mut self, request: &Request, dice: &mut Seeded) -> Reply {
        match request {
            Request::Replay { from } if *from < self.replay.oldest() => Reply::Gone { oldest: self.replay.oldest() },
            Request::Replay { from } => Reply::Replay {
                epoch: self.epoch,
                from: *from,
                // Short answers too, as for long messages.
                payloads: self.replay.from(*from, 1 + dice.below(REPLAY_PIECE), 1 << 20),
                next: self.replay.next(),
            },
            Request::Snapshot { cut: None, .. } => {
                self.cut(dice);
                Reply::Snapshot(self.cuts[&self.cut_number][0].clone())
            }
            Request::Snapshot { cut: Some(cut), piece } => {
                // Two other readers asked meanwhile.
                if dice.percent(3) {
                    self.cuts.clear();
                }
                let piece = self.cuts.get(cut).and_then(|pieces| pieces.get(*piece as usize));
                piece.map_or(Reply::NoSnapshot, |piece| Reply::Snapshot(piece.clone()))
            }
            Request::Bundle { digest, offset } if *digest == of_bytes(&self.bundle) => {
                let rest = &self.bundle[*offset as usize..];
                let bytes = rest[..rest.len().min(1000)].to_vec();
                Reply::Bundle { digest: digest.clone(), total: self.bundle.len() as u64, offset: *offset, bytes }
            }
            Request::Ack { next, .. } => {
                self.acked = self.acked.max(*next);
                Reply::Ack { engine: EngineId::new(self.name.clone(), 0), epoch: self.epoch, next: self.replay.next() }
            }
            _ => Reply::Refused { reason: "not here".into() },
        }
    }

    /// Cuts a snapshot into small pieces, so that much happens between them. Two cuts are kept, as by the agent.
    fn cut(&mut self, dice: &mut Seeded) {
        let mut chains = Vec::new();
        for kind in KINDS {
            self.tiers[kind.index()].real.chains(|link, blocks| {
                chains.push(Chain {
                    kind,
                    parent: batch::parent(link, MODEL, ""),
                    fingerprints: Fingerprints(blocks.to_vec()),
                });
            });
        }
        let size = 1 + dice.below(4);
        let groups: Vec<Vec<Chain>> = match chains.is_empty() {
            true => vec![vec![]],
            false => chains.chunks(size).map(<[Chain]>::to_vec).collect(),
        };
        self.cut_number += 1;
        let digests: Vec<_> = KINDS.map(|kind| (kind, self.digest(kind))).to_vec();
        let pieces = groups.len() as u32;
        let pieces = (0..).zip(groups).map(|(piece, chains)| Piece {
            cut: self.cut_number,
            epoch: self.epoch,
            // Messages whose changes are not told yet are none: a cut is made between steps.
            next: self.replay.next(),
            piece,
            pieces,
            digests: digests.clone(),
            chains,
        });
        let pieces = pieces.collect();
        self.cuts.insert(self.cut_number, pieces);
        while self.cuts.len() > 2 {
            self.cuts.pop_first();
        }
    }

    /// Are there changes that no message told?
    pub fn owes(&self) -> bool {
        self.cleared || self.tiers.iter().any(|tier| !tier.changes.is_empty())
    }
}
