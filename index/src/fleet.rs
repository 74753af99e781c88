//! All engines: which streams to follow, which number in the table each has, whose turn it is to be shed.

use crate::link::{Effect, Link, Setting};
use crate::shared::Writer;
use proto::fleet::{Entry, Source};
use proto::id::{EngineId, Epoch};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// A stream's number: of one fleet entry as long as its sockets stay the same. Never used twice.
pub type Stream = u64;

/// Most engines, and so the highest number in the table.
pub const MOST_ENGINES: u32 = proto::fleet::MAX_ENTRIES as u32;

/// How long a number in the table rests before another engine gets it, in milliseconds: longer than any lookup that
/// may still have the old list of engines in hand.
pub const REST_MS: u64 = 10_000;

/// How long an engine that was given up for want of room stays out at least, in milliseconds.
pub const SHED_MS: u64 = 60_000;

/// How the list of streams changed.
#[derive(Debug, Default)]
pub struct Changes {
    /// Streams to open.
    pub opened: Vec<(Stream, Entry)>,
    /// Streams to close.
    pub closed: Vec<Stream>,
    /// Engines that are gone (not those that only moved to other sockets).
    pub gone: Vec<EngineId>,
    /// Their numbers in the table, and those of engines that moved: their placements end.
    pub ended: Vec<u32>,
    /// Entries that there was no number for.
    pub refused: Vec<String>,
}

/// How long a connection must be quiet before another one of the same process life takes its place, in milliseconds: the
/// other end may have found out first that it is dead.
pub const QUIET_MS: u64 = 1000;

/// An agent that dialled in.
#[derive(Debug, Clone, Copy)]
struct Dialled {
    epoch: Epoch,
    /// The connection that it speaks on; `None`: it is lost.
    connection: Option<u64>,
    since_ms: u64,
}

/// Why an agent that dials in is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotTaken {
    /// The list says where its stream is.
    #[error("the index's fleet list gives {0} an events address or its own events, so it cannot dial in as well")]
    Listed(EngineId),
    /// Another process is followed.
    #[error("another process speaks as {0} and started later; give each engine a KVATLAS_ENGINE of its own")]
    Later(EngineId),
    /// It speaks already.
    #[error("{0} is connected already")]
    Connected(EngineId),
    /// The table has no number.
    #[error("the index has no room for another engine")]
    Full,
}

/// The fleet.
pub struct Fleet {
    setting: Setting,
    links: BTreeMap<Stream, Link>,
    /// Streams in the order of the fleet list.
    order: Vec<Stream>,
    next: Stream,
    fresh_slot: u32,
    /// Numbers that were given back, and when.
    rested: VecDeque<(u64, u32)>,
    shed_ms: u64,
    /// Streams that the list names. The others dialled in, and are in `order` behind these.
    listed: BTreeSet<Stream>,
    /// Streams of agents that dialled in, named by the list or not.
    dialled: BTreeMap<Stream, Dialled>,
}

impl Fleet {
    /// Nobody.
    pub fn new(setting: Setting) -> Self {
        Self {
            setting,
            links: BTreeMap::new(),
            order: Vec::new(),
            next: 1,
            fresh_slot: 0,
            rested: VecDeque::new(),
            shed_ms: 0,
            listed: BTreeSet::new(),
            dialled: BTreeMap::new(),
        }
    }

    /// One stream's link.
    pub fn link(&mut self, stream: Stream) -> Option<&mut Link> {
        self.links.get_mut(&stream)
    }

    /// All links, in the order of the fleet list.
    pub fn links(&self) -> impl Iterator<Item = (Stream, &Link)> {
        self.order.iter().filter_map(|stream| Some((*stream, self.links.get(stream)?)))
    }

    /// All streams.
    pub fn streams(&self) -> Vec<Stream> {
        self.order.clone()
    }

    /// Takes over a list that [`proto::fleet::check`] accepted. What only people read is changed in place; an engine
    /// with other sockets is another stream.
    pub fn update(&mut self, entries: Vec<Entry>, core: &mut Writer, now_ms: u64) -> Changes {
        let mut changes = Changes::default();
        let mut before: HashMap<EngineId, Stream> =
            self.links.iter().map(|(stream, link)| (link.entry().engine(), *stream)).collect();
        let mut order = Vec::with_capacity(entries.len());
        let mut fresh = Vec::new();
        for entry in entries {
            let known =
                before.get(&entry.engine()).copied().and_then(|stream| Some((stream, self.links.get_mut(&stream)?)));
            match known {
                Some((stream, link)) if same_stream(link.entry(), &entry) => {
                    before.remove(&entry.engine());
                    if *link.entry() != entry {
                        link.rename(entry);
                    }
                    order.push(stream);
                }
                _ => {
                    order.push(self.next);
                    fresh.push((self.next, entry));
                    self.next += 1;
                }
            }
        }
        let mut unlisted = Vec::new();
        for (engine, stream) in before {
            let moved = fresh.iter().any(|(_, entry)| entry.engine() == engine);
            match self.links.get_mut(&stream).filter(|_| self.dialled.contains_key(&stream) && !moved) {
                // Who dials in stays as long as it speaks, but the list says nothing of it any more.
                Some(link) => {
                    if self.listed.contains(&stream) {
                        link.rename(unlisted_entry(&engine, None));
                    }
                    unlisted.push(stream);
                }
                None => self.close(stream, core, now_ms, &mut changes, moved),
            }
        }
        for (stream, entry) in fresh {
            let Some(slot) = self.slot(now_ms) else {
                changes.refused.push(entry.name);
                order.retain(|one| *one != stream);
                continue;
            };
            self.links.insert(stream, Link::new(self.setting, entry.clone(), slot));
            changes.opened.push((stream, entry));
        }
        self.listed = order.iter().copied().collect();
        unlisted.sort_unstable();
        order.extend(unlisted);
        self.order = order;
        changes
    }

    fn close(&mut self, stream: Stream, core: &mut Writer, now_ms: u64, changes: &mut Changes, moved: bool) {
        let Some(mut link) = self.links.remove(&stream) else { return };
        // The core knows these holders: a refusal would be a fault of ours, and they are retired all the same.
        let _ = link.forget(core);
        self.dialled.remove(&stream);
        self.rested.push_back((now_ms, link.slot()));
        changes.closed.push(stream);
        changes.ended.push(link.slot());
        if !moved {
            changes.gone.push(link.engine());
        }
    }

    /// An agent dialled in on this connection (numbers are never used twice) and may be taken. Says its stream.
    ///
    /// # Errors
    /// When another stream or process has its name, or there is no room.
    pub fn join(&mut self, engine: &EngineId, epoch: Epoch, connection: u64, now_ms: u64) -> Result<Stream, NotTaken> {
        let lease_ms = self.setting.leases.lease_ms;
        let known = self.links.iter_mut().find(|(_, link)| link.engine() == *engine);
        let stream = match known {
            Some((_, link)) if link.entry().events.is_some() || link.entry().source == Source::Native => {
                return Err(NotTaken::Listed(engine.clone()));
            }
            Some((stream, link)) => {
                let quiet = |since_ms| now_ms.saturating_sub(link.heard_ms().unwrap_or(since_ms).max(since_ms));
                if let Some(before) = self.dialled.get(stream) {
                    let quiet_ms = quiet(before.since_ms);
                    if epoch < before.epoch && quiet_ms <= lease_ms {
                        link.claimed(epoch, now_ms);
                        return Err(NotTaken::Later(engine.clone()));
                    }
                    if epoch == before.epoch && before.connection.is_some() && quiet_ms < QUIET_MS {
                        return Err(NotTaken::Connected(engine.clone()));
                    }
                }
                *stream
            }
            None => {
                let slot = self.slot(now_ms).ok_or(NotTaken::Full)?;
                let like = self.links.values().map(Link::entry).find(|entry| entry.name == engine.name);
                let entry = unlisted_entry(engine, like.filter(|entry| entry.events.is_none()));
                let stream = self.next;
                self.next += 1;
                self.links.insert(stream, Link::new(self.setting, entry, slot));
                self.order.push(stream);
                stream
            }
        };
        self.dialled.insert(stream, Dialled { epoch, connection: Some(connection), since_ms: now_ms });
        if let Some(link) = self.links.get_mut(&stream) {
            link.dialled(engine.rank);
        }
        Ok(stream)
    }

    /// A connection of an agent that dialled in is lost. Does nothing when another one took its place.
    pub fn left(&mut self, stream: Stream, connection: u64, reason: String) {
        if let Some(dialled) = self.dialled.get_mut(&stream).filter(|one| one.connection == Some(connection))
            && let Some(link) = self.links.get_mut(&stream)
        {
            dialled.connection = None;
            link.away(reason);
        }
    }

    /// Agents that dialled in, are in no list and have been away for a lease leave the fleet.
    pub fn depart(&mut self, core: &mut Writer, now_ms: u64) -> Changes {
        let mut changes = Changes::default();
        let lease_ms = self.setting.leases.lease_ms;
        let away = |stream: &Stream, dialled: &Dialled| {
            let heard_ms = self.links.get(stream).and_then(Link::heard_ms).unwrap_or(0).max(dialled.since_ms);
            dialled.connection.is_none() && now_ms.saturating_sub(heard_ms) > lease_ms
        };
        let away: Vec<Stream> = self.dialled.iter().filter(|(s, d)| away(s, d)).map(|(stream, _)| *stream).collect();
        for stream in away {
            if self.listed.contains(&stream) {
                self.dialled.remove(&stream);
            } else {
                self.order.retain(|one| *one != stream);
                self.close(stream, core, now_ms, &mut changes, false);
            }
        }
        changes
    }

    /// Numbers never used first, so that one that was given back rests long.
    fn slot(&mut self, now_ms: u64) -> Option<u32> {
        if self.fresh_slot < MOST_ENGINES {
            self.fresh_slot += 1;
            return Some(self.fresh_slot - 1);
        }
        let (at_ms, slot) = self.rested.front().copied()?;
        if now_ms.saturating_sub(at_ms) < REST_MS {
            return None;
        }
        self.rested.pop_front();
        Some(slot)
    }

    /// Lets time pass for all links.
    pub fn tick(&mut self, core: &mut Writer, now_ms: u64, mut each: impl FnMut(Stream, Vec<Effect>)) {
        let mut out = Vec::new();
        for (stream, link) in &mut self.links {
            link.tick(core, now_ms, &mut out);
            if !out.is_empty() {
                each(*stream, std::mem::take(&mut out));
            }
        }
    }

    /// Over the budget: gives up the engine that holds most. Under four fifths of it, and after a while: lets one come
    /// back. Says whose
    /// holders were given up.
    pub fn fit(&mut self, core: &mut Writer, budget_bytes: u64, now_ms: u64) -> Option<String> {
        let stats = core.stats();
        let bytes = stats.bytes();
        // What was given up before is swept first.
        if bytes > budget_bytes && stats.retired == 0 {
            let weight = |link: &Link| -> u64 {
                let kinds = proto::id::SetKind::ALL.into_iter();
                kinds.filter_map(|kind| core.digest(link.live(kind)?).ok()).map(|digest| digest.count).sum()
            };
            let largest =
                self.links.iter().map(|(stream, link)| (weight(link), *stream)).max().filter(|(n, _)| *n > 0)?;
            let link = self.links.get_mut(&largest.1)?;
            link.shed(core, now_ms);
            self.shed_ms = now_ms;
            return Some(link.engine().to_string());
        }
        if bytes < budget_bytes / 5 * 4
            && now_ms.saturating_sub(self.shed_ms) > SHED_MS
            && let Some(link) = self.links.values_mut().find(|link| link.is_shed())
        {
            link.admit();
        }
        None
    }
}

/// What stands for an engine that dialled in and that no entry names. `like`: an entry of the same pod, for another rank;
/// its address is not taken over, since each rank may have a port of its own.
fn unlisted_entry(engine: &EngineId, like: Option<&Entry>) -> Entry {
    Entry {
        name: engine.name.clone(),
        rank: Some(engine.rank),
        address: None,
        events: None,
        control: None,
        replay: None,
        source: Source::Agent,
        model: None,
        labels: like.map(|entry| entry.labels.clone()).unwrap_or_default(),
    }
}

/// Do two entries name the same stream?
fn same_stream(a: &Entry, b: &Entry) -> bool {
    // A stock engine's address is where its sign of life comes from.
    let address = |entry: &Entry| entry.address.clone().filter(|_| entry.source == Source::Native);
    (&a.events, &a.control, &a.replay, a.source, address(a)) == (&b.events, &b.control, &b.replay, b.source, address(b))
}
