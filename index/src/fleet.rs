//! All engines: which streams to follow, which number in the table each has, whose turn it is to be shed.

use crate::link::{Effect, Link, Setting};
use crate::shared::Writer;
use proto::fleet::{Entry, Source};
use std::collections::{BTreeMap, HashMap, VecDeque};

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
    pub gone: Vec<proto::id::EngineId>,
    /// Their numbers in the table, and those of engines that moved: their placements end.
    pub ended: Vec<u32>,
    /// Entries that there was no number for.
    pub refused: Vec<String>,
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
        let mut before: HashMap<String, Stream> =
            self.links.iter().map(|(stream, link)| (link.entry().name.clone(), *stream)).collect();
        let mut order = Vec::with_capacity(entries.len());
        let mut fresh = Vec::new();
        for entry in entries {
            let known =
                before.get(&entry.name).copied().and_then(|stream| Some((stream, self.links.get_mut(&stream)?)));
            match known {
                Some((stream, link)) if same_stream(link.entry(), &entry) => {
                    before.remove(&entry.name);
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
        for stream in before.into_values() {
            let Some(mut link) = self.links.remove(&stream) else { continue };
            // The core knows these holders: a refusal would be a fault of ours, and they are retired all the same.
            let _ = link.forget(core);
            self.rested.push_back((now_ms, link.slot()));
            changes.closed.push(stream);
            changes.ended.push(link.slot());
            if !fresh.iter().any(|(_, entry)| entry.name == link.entry().name) {
                changes.gone.push(link.engine());
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
        self.order = order;
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

/// Do two entries name the same stream?
fn same_stream(a: &Entry, b: &Entry) -> bool {
    // A stock engine's address is where its sign of life comes from.
    let address = |entry: &Entry| entry.address.clone().filter(|_| entry.source == Source::Native);
    (&a.events, &a.control, &a.replay, a.source, address(a)) == (&b.events, &b.control, &b.replay, b.source, address(b))
}
