//! Live requests and the names of their blocks: computed once for the prompt, continued while tokens are generated.

use proto::block::{self, Extra, Fingerprint};
use proto::residency::FingerprintMap;
use std::collections::HashMap;

/// Most requests followed at once. An engine has thousands at most; what is beyond stays unnamed and is counted.
pub const MAX_LIVE: usize = 1 << 16;

/// The token ids of a request, as the engine keeps them.
pub trait Tokens {
    /// Copies the tokens from `from` on into `out`, which they must fill. False when there are not that many.
    fn read(&self, from: usize, out: &mut [u32]) -> bool;
}

impl Tokens for [u32] {
    fn read(&self, from: usize, out: &mut [u32]) -> bool {
        match self.get(from..).and_then(|rest| rest.get(..out.len())) {
            Some(tokens) => {
                out.copy_from_slice(tokens);
                true
            }
            None => false,
        }
    }
}

/// A multimodal item in a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// The engine's identifier of it (a content hash).
    pub identifier: String,
    /// Its first token.
    pub start: usize,
    /// Its length in tokens.
    pub length: usize,
}

/// One live request.
#[derive(Debug)]
pub struct Live {
    /// The agent's own number of it.
    pub number: u64,
    /// `fp(-1)` of its namespace.
    pub root: Fingerprint,
    /// Number of its adapter, 0 for none.
    pub adapter: u32,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Only blocks within so many of its first tokens have names: all of them, or none when its tokens are not what is
    /// hashed (of prompt embeddings, as many as the engine's own digests are known of).
    pub nameable: usize,
    /// What the last lookup delivered, in tokens.
    pub delivered: u32,
    /// The last lookup can be predicted.
    pub predicted: bool,
    /// It was scheduled before.
    pub started: bool,
    /// Prompt tokens that are still to be computed.
    pub left: u32,
    items: Vec<Item>,
    fingerprints: Vec<Fingerprint>,
}

/// What a fingerprint covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grain {
    /// Tokens from one fingerprint to the next.
    pub unit: usize,
    /// Tokens beyond its block that each covers too.
    pub ahead: usize,
}

impl Grain {
    /// How many fingerprints a prompt of so many tokens has.
    pub fn names(self, tokens: usize) -> usize {
        tokens.saturating_sub(self.ahead).checked_div(self.unit).unwrap_or(0)
    }
}

impl Live {
    /// A request of which nothing is named yet.
    pub fn new(number: u64, root: Fingerprint, adapter: u32, prompt_tokens: u32, items: Vec<Item>) -> Self {
        Self {
            number,
            root,
            adapter,
            prompt_tokens,
            nameable: usize::MAX,
            delivered: 0,
            predicted: false,
            started: false,
            left: prompt_tokens,
            items,
            fingerprints: Vec::new(),
        }
    }

    /// A lookup delivered so many tokens. What an earlier one was to find is not what this one is to find.
    pub fn delivers(&mut self, tokens: usize) {
        (self.delivered, self.predicted) = (u32::try_from(tokens).unwrap_or(u32::MAX), false);
    }

    /// The names that were made so far.
    pub fn known(&self) -> &[Fingerprint] {
        &self.fingerprints
    }

    /// The names of its first `blocks` blocks; shorter when there are not that many tokens, or no names.
    pub fn names(&mut self, blocks: usize, grain: Grain, tokens: &(impl Tokens + ?Sized)) -> &[Fingerprint] {
        if grain.unit == 0 {
            return &[];
        }
        let (unit, whole) = (grain.unit, grain.unit + grain.ahead);
        let mut stack = [0u32; 256];
        let mut heap = Vec::new();
        let one: &mut [u32] = if whole <= stack.len() {
            &mut stack[..whole]
        } else {
            heap.resize(whole, 0);
            &mut heap
        };
        self.fingerprints.reserve(blocks.saturating_sub(self.fingerprints.len()).min(1 << 16));
        while self.fingerprints.len() < blocks {
            let start = self.fingerprints.len() * unit;
            if start + unit > self.nameable || !tokens.read(start, one) {
                break;
            }
            let parent = self.fingerprints.last().copied().unwrap_or(self.root);
            let fp = if self.items.is_empty() {
                block::next(parent, one, &[])
            } else {
                let extras: Vec<Extra<'_>> = self
                    .items
                    .iter()
                    .filter(|item| item.start < start + unit && item.start + item.length > start)
                    .map(|item| Extra { identifier: &item.identifier, offset: item.start as i64 - start as i64 })
                    .collect();
                block::next(parent, one, &extras)
            };
            self.fingerprints.push(fp);
        }
        &self.fingerprints[..blocks.min(self.fingerprints.len())]
    }
}

/// Which request is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which<'a> {
    /// By the engine's id.
    Id(&'a str),
    /// By the agent's own number, which is found sooner.
    Number(u64),
}

impl<'a> From<&'a str> for Which<'a> {
    fn from(id: &'a str) -> Self {
        Self::Id(id)
    }
}

impl<'a> From<&'a String> for Which<'a> {
    fn from(id: &'a String) -> Self {
        Self::Id(id)
    }
}

/// The live requests.
#[derive(Debug, Default)]
pub struct Requests {
    numbers_of: HashMap<Box<str>, u64>,
    // By number, spread: those of live requests are near each other.
    live: FingerprintMap<Live>,
    // Adapters by number; number 0 is "no adapter". Names are kept for good: operators load few, and they are limited.
    adapters: Vec<String>,
    // Where each was loaded from last, by number, less one.
    paths: Vec<String>,
    numbers: u64,
}

/// A number as its map wants its keys: others have others, and all bits count.
fn spread(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Most adapter names kept. Requests of further ones stay unnamed.
const MAX_ADAPTERS: usize = 4096;

impl Requests {
    /// A number that no other request has.
    pub fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// The number of an adapter; `None` when too many are known.
    pub fn adapter(&mut self, name: &str) -> Option<u32> {
        if name.is_empty() {
            return Some(0);
        }
        let at = match self.adapters.iter().position(|known| known == name) {
            Some(at) => at,
            None if self.adapters.len() < MAX_ADAPTERS => {
                self.adapters.push(name.to_string());
                self.paths.push(String::new());
                self.adapters.len() - 1
            }
            None => return None,
        };
        Some(at as u32 + 1)
    }

    /// An adapter is loaded from this path. True when it was loaded from another one before: an engine that hashes
    /// the path hits nothing of the old one. Live requests of the old one are nameless from now on.
    pub fn reloaded(&mut self, number: u32, path: &str) -> bool {
        let Some(known) = (number as usize).checked_sub(1).and_then(|at| self.paths.get_mut(at)) else { return false };
        if known == path {
            return false;
        }
        let first = known.is_empty();
        known.clear();
        known.push_str(path);
        if !first {
            self.live.values_mut().filter(|live| live.adapter == number).for_each(|live| live.nameable = 0);
        }
        !first
    }

    /// The names of adapters by number, less one.
    pub fn adapters(&self) -> &[String] {
        &self.adapters
    }

    /// A request and the adapters' names.
    pub fn get<'a>(&mut self, which: impl Into<Which<'a>>) -> Option<(&mut Live, &[String])> {
        let number = match which.into() {
            Which::Id(id) => *self.numbers_of.get(id)?,
            Which::Number(number) => number,
        };
        Some((self.live.get_mut(&spread(number))?, &self.adapters))
    }

    /// Follows a request. False when [`MAX_LIVE`] are followed already.
    pub fn insert(&mut self, id: &str, live: Live) -> bool {
        if self.live.len() >= MAX_LIVE {
            return false;
        }
        if let Some(before) = self.numbers_of.insert(id.into(), live.number) {
            self.live.remove(&spread(before));
        }
        self.live.insert(spread(live.number), live);
        true
    }

    /// Follows a request no more.
    pub fn remove(&mut self, id: &str) -> Option<Live> {
        let number = self.numbers_of.remove(id)?;
        self.live.remove(&spread(number))
    }

    /// How many are followed.
    pub fn len(&self) -> usize {
        self.live.len()
    }

    /// Is none followed?
    pub fn is_empty(&self) -> bool {
        self.live.is_empty()
    }
}

/// The name of an adapter's number.
pub fn adapter_name(adapters: &[String], number: u32) -> &str {
    (number as usize).checked_sub(1).and_then(|at| adapters.get(at)).map_or("", String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_continued_as_tokens_come() {
        let tokens: Vec<u32> = (0..100).collect();
        let whole = block::chain(7, 16, &tokens);
        let grain = Grain { unit: 16, ahead: 0 };
        let mut live = Live::new(1, 7, 0, 40, vec![]);
        assert_eq!(live.names(9, grain, &tokens[..40]), &whole[..2]);
        assert_eq!(live.names(1, grain, &tokens[..40]), &whole[..1]);
        assert_eq!(live.names(6, grain, &tokens[..]), &whole[..6]);
    }

    #[test]
    fn requests_are_found_by_either_name_until_they_are_gone() {
        let mut all = Requests::default();
        let (first, second) = (all.number(), all.number());
        assert!(all.insert("a", Live::new(first, 7, 0, 40, vec![])));
        assert!(all.get("a").is_some() && all.get(Which::Number(first)).is_some());
        assert!(all.insert("a", Live::new(second, 8, 0, 40, vec![])), "the id is given anew");
        assert_eq!(all.get("a").map(|(live, _)| live.root), Some(8));
        assert!(all.get(Which::Number(first)).is_none(), "an old number means nobody");
        assert_eq!((all.remove("a").map(|live| live.number), all.len()), (Some(second), 0));
        assert!(all.get(Which::Number(second)).is_none() && all.remove("a").is_none());
    }

    #[test]
    fn a_name_waits_for_the_tokens_ahead() {
        let tokens: Vec<u32> = (0..100).collect();
        let (grain, mut live) = (Grain { unit: 16, ahead: 3 }, Live::new(1, 7, 0, 40, vec![]));
        let whole = block::chain_ahead(7, 16, 3, &tokens);
        assert_eq!((grain.names(34), grain.names(35)), (1, 2));
        assert_eq!(live.names(9, grain, &tokens[..34]), &whole[..1]);
        assert_eq!(live.names(9, grain, &tokens[..35]), &whole[..2]);
        assert_eq!(live.names(9, grain, &tokens[..]), &whole[..6]);
    }

    #[test]
    fn items_enter_the_blocks_that_they_touch() {
        let tokens: Vec<u32> = (0..64).collect();
        let item = Item { identifier: "img".into(), start: 20, length: 12 };
        let mut live = Live::new(1, 7, 0, 64, vec![item]);
        let first = block::next(7, &tokens[..16], &[]);
        let second = block::next(first, &tokens[16..32], &[Extra { identifier: "img", offset: 4 }]);
        let third = block::next(second, &tokens[32..48], &[]);
        assert_eq!(live.names(3, Grain { unit: 16, ahead: 0 }, &tokens[..]), [first, second, third]);
    }
}
