//! What crosses the [`ring`](crate::ring): the engine's doings, in the order in which they were done.
//!
//! Because the order is kept, a lookup's prediction is exact: the publisher knows the set at that very place.

use crate::adapters::Doing;
use crate::ring::Writer;
use crate::slots::Key;
use proto::block::Fingerprint;
use proto::residency::Link;

/// One doing of the engine, as the publisher reads it.
#[derive(Debug, PartialEq, Eq)]
pub enum Record<'a> {
    /// Physical blocks of a group got keys, each in place of what it had; the first follows `parent`, each other one
    /// the one before it.
    Stored {
        /// The KV cache group.
        group: u32,
        /// What the first follows.
        parent: Link,
        /// Adapter of a root, "" for none and for other parents.
        adapter: String,
        /// Block id and fingerprint by turns.
        pairs: &'a [u64],
    },
    /// A physical block got one more key.
    Added {
        /// The KV cache group.
        group: u32,
        /// It ends inside the block.
        partial: bool,
        /// What it follows.
        parent: Link,
        /// Adapter of a root, "" for none and for other parents.
        adapter: String,
        /// Block id.
        block: u64,
        /// The key's fingerprint.
        fp: Fingerprint,
    },
    /// What one physical block had, another has now; the first is empty.
    Moved {
        /// Block id.
        from: u64,
        /// Block id.
        to: u64,
    },
    /// A block is in a tier below the GPU now, or is not any more.
    Below {
        /// The block.
        fp: Fingerprint,
        /// What it follows.
        parent: Link,
        /// Adapter of a root, "" for none and for other parents.
        adapter: String,
        /// It is there.
        below: bool,
    },
    /// Physical blocks got keys whose tokens the agent does not know.
    Unnamed {
        /// Block ids.
        blocks: &'a [u64],
    },
    /// Physical blocks lost their keys.
    Evicted {
        /// Block ids.
        blocks: &'a [u64],
    },
    /// All blocks lost their keys.
    Cleared,
    /// The engine looked a request up.
    Looked {
        /// The agent's number of the request.
        request: u64,
        /// Last seq published at that time.
        seq: u64,
        /// Tokens looked up.
        tokens: u64,
        /// Fingerprints of all full blocks that the engine has hashes of.
        prompt: &'a [Fingerprint],
    },
    /// A request entered the scheduler.
    Arrived {
        /// The engine's id of it.
        id: String,
    },
    /// A request was scheduled for the first time.
    Started {
        /// The agent's number of it.
        request: u64,
        /// The engine's id of it.
        id: String,
        /// Tokens of its prompt.
        prompt_tokens: u32,
        /// Tokens taken from the cache.
        cached_tokens: u32,
        /// The last [`Record::Looked`] of it is of that lookup.
        predicted: bool,
    },
    /// A request ended.
    Finished {
        /// The agent's number of it.
        request: u64,
        /// The engine's id of it.
        id: String,
        /// As the engine names it.
        reason: String,
    },
    /// The adapters that live requests have: all of them, in place of what was told before.
    Used {
        /// Of requests that were scheduled.
        running: Vec<String>,
        /// Of requests that were not.
        waiting: Vec<String>,
    },
    /// A step ran requests of adapters, others than the step before it.
    Ran {
        /// Their names.
        adapters: Vec<String>,
    },
    /// The engine did something with an adapter outside of a step.
    Adapter {
        /// What.
        doing: Doing,
        /// Its name.
        adapter: String,
    },
}

const AFTER_ROOT: u8 = 1;
const AFTER_BLOCK: u8 = 2;
const UNNAMED: u8 = 3;
const EVICTED: u8 = 4;
const CLEARED: u8 = 5;
const LOOKED: u8 = 6;
const ARRIVED: u8 = 7;
const STARTED: u8 = 8;
const FINISHED: u8 = 9;
const ADDED_AFTER_ROOT: u8 = 10;
const ADDED_AFTER_BLOCK: u8 = 11;
const MOVED: u8 = 12;
const BELOW_ROOT: u8 = 13;
const BELOW_BLOCK: u8 = 14;
const RAN: u8 = 15;
const ADAPTER: u8 = 16;
const USED: u8 = 17;

/// Doings by their number in a record.
const DOINGS: [Doing; 4] = [Doing::Add, Doing::Reload, Doing::Remove, Doing::Pin];

/// Beside a group in one word: the key ends inside the block.
const PARTIAL: u64 = 1 << 32;

/// Writes records; the scratch space is kept, so that writing does not allocate.
#[derive(Debug)]
pub struct Pen {
    writer: Writer,
    scratch: Vec<u64>,
}

impl Pen {
    /// Writes into this ring.
    pub fn new(writer: Writer) -> Self {
        Self { writer, scratch: Vec::new() }
    }

    fn write(&mut self, kind: u8, fill: impl FnOnce(&mut Vec<u64>)) -> bool {
        self.scratch.clear();
        fill(&mut self.scratch);
        let done = self.writer.push(kind, &self.scratch);
        self.scratch.shrink_to(1 << 16); // a long prompt's lookup does not stay in memory
        done
    }

    /// [`Record::Stored`]. False when there was no room, like all of these.
    pub fn stored(
        &mut self,
        group: u32,
        parent: Link,
        adapter: &str,
        pairs: impl Iterator<Item = (u32, Fingerprint)>,
    ) -> bool {
        let kind = if matches!(parent, Link::Root(_)) { AFTER_ROOT } else { AFTER_BLOCK };
        self.write(kind, |out| {
            out.extend([u64::from(group), parent.fingerprint()]);
            if kind == AFTER_ROOT {
                put_text(out, adapter);
            }
            pairs.for_each(|(block, fp)| out.extend([u64::from(block), fp]));
        })
    }

    /// [`Record::Added`].
    pub fn added(&mut self, key: &Key, adapter: &str, block: u32) -> bool {
        let kind = if matches!(key.parent, Link::Root(_)) { ADDED_AFTER_ROOT } else { ADDED_AFTER_BLOCK };
        self.write(kind, |out| {
            let partial = if key.partial { PARTIAL } else { 0 };
            out.extend([u64::from(key.group) | partial, key.parent.fingerprint(), u64::from(block), key.fp]);
            if kind == ADDED_AFTER_ROOT {
                put_text(out, adapter);
            }
        })
    }

    /// [`Record::Below`].
    pub fn below(&mut self, fp: Fingerprint, parent: Link, adapter: &str, below: bool) -> bool {
        let kind = if matches!(parent, Link::Root(_)) { BELOW_ROOT } else { BELOW_BLOCK };
        self.write(kind, |out| {
            out.extend([fp, parent.fingerprint(), u64::from(below)]);
            if kind == BELOW_ROOT {
                put_text(out, adapter);
            }
        })
    }

    /// [`Record::Moved`].
    pub fn moved(&mut self, from: u32, to: u32) -> bool {
        self.write(MOVED, |out| out.extend([u64::from(from), u64::from(to)]))
    }

    /// [`Record::Unnamed`].
    pub fn unnamed(&mut self, blocks: &[u32]) -> bool {
        self.write(UNNAMED, |out| out.extend(blocks.iter().copied().map(u64::from)))
    }

    /// [`Record::Evicted`].
    pub fn evicted(&mut self, blocks: &[u32]) -> bool {
        self.write(EVICTED, |out| out.extend(blocks.iter().copied().map(u64::from)))
    }

    /// [`Record::Cleared`].
    pub fn cleared(&mut self) -> bool {
        self.write(CLEARED, |_| {})
    }

    /// [`Record::Looked`].
    pub fn looked(&mut self, request: u64, seq: u64, tokens: u64, prompt: &[Fingerprint]) -> bool {
        self.write(LOOKED, |out| {
            out.extend([request, seq, tokens]);
            out.extend_from_slice(prompt);
        })
    }

    /// [`Record::Arrived`].
    pub fn arrived(&mut self, id: &str) -> bool {
        self.write(ARRIVED, |out| put_text(out, id))
    }

    /// [`Record::Started`].
    pub fn started(&mut self, request: u64, id: &str, prompt_tokens: u32, cached_tokens: u32, predicted: bool) -> bool {
        self.write(STARTED, |out| {
            out.extend([request, u64::from(prompt_tokens), u64::from(cached_tokens), u64::from(predicted)]);
            put_text(out, id);
        })
    }

    /// [`Record::Finished`].
    pub fn finished(&mut self, request: u64, id: &str, reason: &str) -> bool {
        self.write(FINISHED, |out| {
            out.push(request);
            put_text(out, id);
            put_text(out, reason);
        })
    }

    /// [`Record::Used`]. Of lists that are too long for any ring, the beginning is told.
    pub fn used<'a>(&mut self, running: impl Iterator<Item = &'a str>, waiting: impl Iterator<Item = &'a str>) -> bool {
        let half = self.writer.longest() / 2 - 2;
        let list = |out: &mut Vec<u64>, names: &mut dyn Iterator<Item = &'a str>| {
            let (at, mut count) = (out.len(), 0);
            out.push(0);
            for name in names {
                let before = out.len();
                put_text(out, name);
                if out.len() - at > half {
                    out.truncate(before);
                    break;
                }
                count += 1;
            }
            out[at] = count;
        };
        self.write(USED, |out| {
            list(out, &mut { running });
            list(out, &mut { waiting });
        })
    }

    /// [`Record::Ran`].
    pub fn ran<'a>(&mut self, adapters: impl Iterator<Item = &'a str>) -> bool {
        self.write(RAN, |out| adapters.for_each(|adapter| put_text(out, adapter)))
    }

    /// [`Record::Adapter`].
    pub fn adapter(&mut self, doing: Doing, adapter: &str) -> bool {
        self.write(ADAPTER, |out| {
            out.push(DOINGS.iter().position(|one| *one == doing).unwrap_or_default() as u64);
            put_text(out, adapter);
        })
    }
}

/// Texts on the wire are limited; what is longer is cut, at a character.
pub fn within_limit(text: &str) -> &str {
    let mut end = text.len().min(proto::event::MAX_TEXT_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

fn put_text(out: &mut Vec<u64>, text: &str) {
    let text = within_limit(text);
    out.push(text.len() as u64);
    for chunk in text.as_bytes().chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        out.push(u64::from_le_bytes(word));
    }
}

fn take_text(words: &mut &[u64]) -> Option<String> {
    let length = usize::try_from(take(words)?).ok()?;
    let (text, rest) = words.split_at_checked(length.div_ceil(8))?;
    *words = rest;
    let mut bytes: Vec<u8> = text.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.truncate(length);
    String::from_utf8(bytes).ok()
}

fn take(words: &mut &[u64]) -> Option<u64> {
    let (first, rest) = words.split_first()?;
    *words = rest;
    Some(*first)
}

impl<'a> Record<'a> {
    /// Reads what a [`Pen`] wrote. `None` never comes from a pen: both ends are of one build.
    pub fn read(kind: u8, mut words: &'a [u64]) -> Option<Self> {
        let w = &mut words;
        Some(match kind {
            AFTER_ROOT => {
                let (group, parent, adapter) = (take(w)? as u32, Link::Root(take(w)?), take_text(w)?);
                Record::Stored { group, parent, adapter, pairs: w }
            }
            AFTER_BLOCK => {
                let (group, parent) = (take(w)? as u32, Link::Block(take(w)?));
                Record::Stored { group, parent, adapter: String::new(), pairs: w }
            }
            ADDED_AFTER_ROOT | ADDED_AFTER_BLOCK => {
                let (group, parent, block, fp) = (take(w)?, take(w)?, take(w)?, take(w)?);
                let partial = group & PARTIAL != 0;
                let (parent, adapter) = match kind {
                    ADDED_AFTER_ROOT => (Link::Root(parent), take_text(w)?),
                    _ => (Link::Block(parent), String::new()),
                };
                Record::Added { group: group as u32, partial, parent, adapter, block, fp }
            }
            BELOW_ROOT | BELOW_BLOCK => {
                let (fp, parent, below) = (take(w)?, take(w)?, take(w)? != 0);
                let (parent, adapter) = match kind {
                    BELOW_ROOT => (Link::Root(parent), take_text(w)?),
                    _ => (Link::Block(parent), String::new()),
                };
                Record::Below { fp, parent, adapter, below }
            }
            MOVED => Record::Moved { from: take(w)?, to: take(w)? },
            UNNAMED => Record::Unnamed { blocks: w },
            EVICTED => Record::Evicted { blocks: w },
            CLEARED => Record::Cleared,
            LOOKED => {
                let (request, seq, tokens) = (take(w)?, take(w)?, take(w)?);
                Record::Looked { request, seq, tokens, prompt: w }
            }
            ARRIVED => Record::Arrived { id: take_text(w)? },
            STARTED => {
                let (request, prompt_tokens, cached_tokens) = (take(w)?, take(w)? as u32, take(w)? as u32);
                let predicted = take(w)? != 0;
                Record::Started { request, prompt_tokens, cached_tokens, predicted, id: take_text(w)? }
            }
            FINISHED => Record::Finished { request: take(w)?, id: take_text(w)?, reason: take_text(w)? },
            USED => {
                let mut list = || (0..take(w)?).map(|_| take_text(w)).collect::<Option<Vec<String>>>();
                Record::Used { running: list()?, waiting: list()? }
            }
            RAN => {
                let mut adapters = Vec::new();
                while !w.is_empty() {
                    adapters.push(take_text(w)?);
                }
                Record::Ran { adapters }
            }
            ADAPTER => Record::Adapter { doing: *DOINGS.get(take(w)? as usize)?, adapter: take_text(w)? },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring;

    #[test]
    fn what_the_pen_writes_is_read_back() {
        let (writer, mut reader) = ring::ring(0);
        let mut pen = Pen::new(writer);
        let long = "é".repeat(600);
        assert!(pen.stored(0, Link::Root(9), "adapter-x", [(3, 11), (4, 12)].into_iter()));
        assert!(pen.stored(2, Link::Block(9), "", [(5, 13)].into_iter()));
        let key = Key { fp: 14, parent: Link::Root(9), adapter: 1, group: 1, partial: true };
        assert!(pen.added(&key, "adapter-x", 5) && pen.moved(5, 6));
        assert!(pen.added(&Key { parent: Link::Block(13), partial: false, ..key }, "", 5));
        assert!(pen.unnamed(&[6]) && pen.evicted(&[3, 4]) && pen.cleared());
        assert!(pen.looked(7, 8, 33, &[11, 12]));
        assert!(pen.arrived("chatcmpl-1") && pen.started(7, "chatcmpl-1", 33, 16, true));
        assert!(pen.finished(7, &long, "stop"));
        assert!(pen.used(["a"].into_iter(), ["b", ""].into_iter()));
        let many = vec![&*long; 4096];
        assert!(pen.used(many.iter().copied(), many.iter().copied()), "what is too long is cut");
        assert!(pen.ran(["a", "long-adapter"].into_iter()) && pen.ran([].into_iter()));
        DOINGS.iter().for_each(|doing| assert!(pen.adapter(*doing, "a")));
        let mut words = vec![];
        let mut next = |expected: Record<'_>| {
            let kind = reader.pop(&mut words).unwrap_or(0);
            assert_eq!(Record::read(kind, &words), Some(expected));
        };
        let adapter = || "adapter-x".to_string();
        next(Record::Stored { group: 0, parent: Link::Root(9), adapter: adapter(), pairs: &[3, 11, 4, 12] });
        next(Record::Stored { group: 2, parent: Link::Block(9), adapter: String::new(), pairs: &[5, 13] });
        let added = |partial, parent, adapter| Record::Added { group: 1, partial, parent, adapter, block: 5, fp: 14 };
        next(added(true, Link::Root(9), adapter()));
        next(Record::Moved { from: 5, to: 6 });
        next(added(false, Link::Block(13), String::new()));
        next(Record::Unnamed { blocks: &[6] });
        next(Record::Evicted { blocks: &[3, 4] });
        next(Record::Cleared);
        next(Record::Looked { request: 7, seq: 8, tokens: 33, prompt: &[11, 12] });
        next(Record::Arrived { id: "chatcmpl-1".into() });
        next(Record::Started {
            request: 7,
            id: "chatcmpl-1".into(),
            prompt_tokens: 33,
            cached_tokens: 16,
            predicted: true,
        });
        next(Record::Finished { request: 7, id: "é".repeat(512), reason: "stop".into() });
        next(Record::Used { running: vec!["a".into()], waiting: vec!["b".into(), String::new()] });
        // A text of 1,024 bytes takes 129 words, and 8,190 are for each list.
        let cut = vec!["é".repeat(512); 63];
        next(Record::Used { running: cut.clone(), waiting: cut });
        next(Record::Ran { adapters: vec!["a".into(), "long-adapter".into()] });
        next(Record::Ran { adapters: vec![] });
        DOINGS.iter().for_each(|doing| next(Record::Adapter { doing: *doing, adapter: "a".into() }));
    }
}
