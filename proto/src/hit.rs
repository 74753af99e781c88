//! How long a hit is: the engine's own search, restated over sets of fingerprints.
//!
//! An engine with several kinds of attention does not hit the longest prefix that it holds: sliding windows, chunks and
//! Mamba states limit where a hit can end, EAGLE drops a block, sizes must divide. This is vLLM's search for 0.10.2 to
//! 0.33.0 in our words. It asks of the sets only "is this prefix in that set?", so the agent runs it over its own
//! sets and the index over what was published, and both get what the engine gets.
//!
//! Positions are tokens of the prompt; a prefix that ends at position `p` is named by fingerprint `p / unit - 1`.
//!
//! ```
//! use proto::hit::{Hits, Kind, Spec, find};
//! // Full attention and a window of 40 tokens, blocks of 16. Blocks 0 to 3 are there; the window has lost block 1.
//! let spec = |kind, span, set| Spec { kind, block: 16, span, eagle: false, set, partial: None };
//! let hits = Hits { specs: vec![spec(Kind::Full, 0, 0), spec(Kind::Window, 40, 1)], ..Hits::plain(16, [0, 32, 0]) };
//! let there = |set: usize, at: usize| at < 4 && !(set == 1 && at == 1);
//! assert_eq!(find(&hits, 70, there), Some(16)); // before 32, 48 and 64 the 39 tokens of the window have block 1
//! ```

use serde::{Deserialize, Serialize};

/// Most specs of one engine. Models of today have at most five.
pub const MAX_SPECS: usize = 8;
/// How much of the search is done for one prompt before it is given up, in questions: some passes over the longest
/// prompt for each spec. An engine's own search is that long only for sets that no engine holds.
const PATIENCE: usize = 8;

/// What decides the length of this engine's hits. Static for a process life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hits {
    /// Tokens from one fingerprint to the next: the engine's hash block size.
    pub unit: u32,
    /// A hit's length is a multiple of this: the least common multiple of the block sizes; the unit in fine mode.
    pub align: u32,
    /// Each fingerprint covers this many tokens beyond its block: hashes exist only once those are there.
    #[serde(default)]
    pub ahead: u32,
    /// The vLLM whose search this engine runs: major, minor, patch. Rules changed at 0.11.1, 0.12, 0.14, 0.15, 0.19,
    /// 0.20, 0.26 and 0.32.
    pub version: [u16; 3],
    /// Hits may end inside a block of a group that has larger ones than the unit (vLLM's partial hash hits).
    #[serde(default)]
    pub fine: bool,
    /// Groups with equal specs are one spec here; full attention first, else in the engine's order.
    pub specs: Vec<Spec>,
}

/// One kind of attention, of one or several KV cache groups that are looked up together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// How it limits a hit.
    pub kind: Kind,
    /// Tokens a block.
    pub block: u32,
    /// Window or chunk in tokens, 0 for the others.
    #[serde(default)]
    pub span: u32,
    /// The engine drops a block of what this spec found (EAGLE, MTP).
    #[serde(default)]
    pub eagle: bool,
    /// Which of the engine's sets has its blocks; see [`crate::id::SetKind::of_spec`]. For full attention the set is
    /// closed along the blocks of this spec; for the others it has whatever is resident in all of the spec's groups.
    pub set: u8,
    /// For full attention in fine mode: the set of entries that end inside a block.
    #[serde(default)]
    pub partial: Option<u8>,
}

/// How a spec limits a hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Every block from the start: full attention, MLA, sinks.
    Full,
    /// The last `span - 1` tokens.
    Window,
    /// The blocks since the last multiple of `span`.
    Chunk,
    /// The state at the very end.
    Mamba,
}

impl Hits {
    /// One group of full attention with blocks of `unit` tokens.
    pub fn plain(unit: u32, version: [u16; 3]) -> Self {
        let spec = Spec { kind: Kind::Full, block: unit, span: 0, eagle: false, set: 0, partial: None };
        Self { unit, align: unit, ahead: 0, version, fine: false, specs: vec![spec] }
    }

    /// Is the answer just the closed prefix, never the last token? Then no search is needed.
    pub fn is_plain(&self) -> bool {
        let plain = |spec: &Spec| {
            (spec.kind, spec.block, spec.eagle, spec.partial) == (Kind::Full, self.unit, false, None) && spec.set == 0
        };
        self.specs.len() == 1 && plain(&self.specs[0]) && self.align == self.unit && self.ahead == 0
    }

    /// Why these numbers make no sense; `None` when they do. To be asked of what a peer sends.
    pub fn fault(&self) -> Option<&'static str> {
        let divides = |part: u32, whole: u32| part > 0 && whole > 0 && whole.is_multiple_of(part);
        if self.unit == 0 || self.unit > 1 << 16 || self.align > 1 << 24 || !divides(self.unit, self.align) {
            return Some("the unit or the alignment of its hits");
        }
        if self.specs.is_empty() || self.specs.len() > MAX_SPECS {
            return Some("the number of its attention specs");
        }
        if self.ahead > 1024 {
            return Some("its look-ahead");
        }
        for spec in &self.specs {
            let spanned = matches!(spec.kind, Kind::Window | Kind::Chunk);
            if !divides(self.unit, spec.block) || spec.block > 1 << 24 || spanned != (spec.span > 0) {
                return Some("a block size or a window of its attention specs");
            }
            let sets = [Some(spec.set), spec.partial];
            if sets.into_iter().flatten().any(|set| crate::id::SetKind::of_spec(set).is_none()) {
                return Some("a set of its attention specs");
            }
        }
        None
    }

    /// Tokens of a prompt that fingerprints can name, as the engine counts its own hashes.
    fn named(&self, tokens: usize) -> usize {
        tokens.saturating_sub(self.ahead as usize) / self.unit as usize * self.unit as usize
    }
}

/// Tokens that the engine takes from its cache for a prompt of `tokens` tokens. `has(set, at)` says whether the prefix
/// that ends with fingerprint `at` is in that set; it is not asked beyond the prompt's own fingerprints. `None` when
/// the search was given up: only for sets that no engine holds. `hits` must be without [`Hits::fault`].
pub fn find(hits: &Hits, tokens: usize, has: impl FnMut(usize, usize) -> bool) -> Option<usize> {
    let named = hits.named(tokens);
    let patience = PATIENCE * hits.specs.len() * (named / hits.unit as usize + 64);
    let search = Search { hits, named, patience: std::cell::Cell::new(patience), has: std::cell::RefCell::new(has) };
    let hit = search.hit(tokens);
    (search.patience.get() > 0).then_some(hit)
}

struct Search<'a, F> {
    hits: &'a Hits,
    named: usize,
    patience: std::cell::Cell<usize>,
    has: std::cell::RefCell<F>,
}

const fn floor(value: usize, to: usize) -> usize {
    value - value % to
}

impl<F: FnMut(usize, usize) -> bool> Search<'_, F> {
    fn since(&self, version: [u16; 3]) -> bool {
        self.hits.version >= version
    }

    /// Is the prefix that ends at token `end` in this set?
    fn has(&self, set: u8, end: usize) -> bool {
        if end == 0 || end > self.named || self.patience.get() == 0 {
            return false;
        }
        self.patience.set(self.patience.get() - 1);
        (self.has.borrow_mut())(set as usize, end / self.hits.unit as usize - 1)
    }

    fn hit(&self, tokens: usize) -> usize {
        let specs = &self.hits.specs;
        // The last token is always computed.
        let Some(most) = tokens.checked_sub(1) else { return 0 };
        match &specs[..] {
            [] => 0,
            [one] => self.one(one, most, one.eagle, one.block as usize),
            _ if self.since([0, 14, 0]) => self.agreed(most),
            // Full attention first, then the other kind below it; both drop a block.
            _ => specs.iter().fold(most, |hit, spec| self.one(spec, hit, spec.eagle, self.hits.align as usize)),
        }
    }

    /// Several specs: each lowers the hit until all agree.
    fn agreed(&self, most: usize) -> usize {
        let (hits, specs) = (self.hits, &self.hits.specs);
        let align = hits.align as usize;
        let two = specs.len() == 2 && specs[0].kind == Kind::Full;
        let mut full: [Option<usize>; MAX_SPECS] = [None; MAX_SPECS];
        let mut verified = [false; MAX_SPECS];
        let mut hit = most;
        loop {
            let mut now = hit;
            for (at, spec) in specs.iter().enumerate() {
                let block = spec.block as usize;
                if let Some(first) = full[at] {
                    now = if self.since([0, 26, 0]) { now.min(first) } else { floor(now, block) };
                    continue;
                }
                let new = if self.since([0, 20, 0]) {
                    let drop = spec.eagle && !verified[at];
                    let mut limit = now;
                    if drop && !(spec.kind == Kind::Mamba && self.since([0, 26, 0])) {
                        let unit = hits.unit as usize;
                        let fine = hits.fine && matches!(spec.kind, Kind::Full | Kind::Mamba) && block > unit;
                        let cap = if self.since([0, 32, 0]) { self.named } else { most };
                        limit = (now + if fine { unit } else { block }).min(cap);
                    }
                    let new = self.one(spec, limit, drop, align);
                    if drop {
                        verified[at] = true;
                    } else if new < now {
                        verified = [false; MAX_SPECS];
                    }
                    new
                } else {
                    self.one(spec, now, spec.eagle, align)
                };
                now = new;
                if spec.kind == Kind::Full {
                    full[at] = Some(new);
                }
            }
            if now >= hit || self.patience.get() == 0 {
                return hit.min(now);
            }
            hit = now;
            if two && self.since([0, 15, 0]) {
                return hit;
            }
        }
    }

    /// One spec: the longest hit of at most `limit` tokens that it allows.
    fn one(&self, spec: &Spec, limit: usize, drop: bool, align: usize) -> usize {
        match spec.kind {
            Kind::Full => self.full(spec, limit, drop, align),
            Kind::Window => self.window(spec, limit, drop, align),
            Kind::Chunk => self.chunk(spec, limit),
            Kind::Mamba => self.mamba(spec, limit, align),
        }
    }

    fn full(&self, spec: &Spec, limit: usize, drop: bool, align: usize) -> usize {
        let block = spec.block as usize;
        // The set is closed along these blocks: bisect.
        let (mut low, mut high) = (0, limit.min(self.named) / block);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if self.has(spec.set, middle * block) { low = middle } else { high = middle - 1 }
        }
        let mut hit = low * block;
        if !self.since([0, 26, 0]) {
            hit -= if drop { block.min(hit) } else { 0 };
            while self.since([0, 12, 0]) && block != align && !hit.is_multiple_of(align) {
                hit -= block;
            }
            return hit;
        }
        if align < block
            && let Some(partial) = spec.partial
        {
            let mut end = (hit + block - align).min(floor(limit, align)).min(self.named);
            while end > hit {
                if self.has(partial, end) {
                    hit = end;
                    break;
                }
                end -= align;
            }
        }
        hit -= if drop { align.min(block).min(hit) } else { 0 };
        floor(hit, align)
    }

    fn window(&self, spec: &Spec, limit: usize, drop: bool, align: usize) -> usize {
        let block = spec.block as usize;
        let aligned = |blocks: usize| {
            if !self.since([0, 12, 0]) || block == align { blocks } else { floor(blocks * block, align) / block }
        };
        let need = (spec.span as usize - 1).div_ceil(block) + usize::from(drop);
        let (mut run, mut found) = (0, None);
        for at in (0..limit / block).rev() {
            if !self.has(spec.set, (at + 1) * block) {
                run = 0;
                continue;
            }
            if run == 0 && self.since([0, 12, 0]) && block != align {
                // A run's right edge must be a place where a hit may end.
                let edge = if drop && self.since([0, 20, 0]) { at } else { at + 1 };
                if !(edge * block).is_multiple_of(align) {
                    continue;
                }
            }
            run += 1;
            if run >= need {
                found = Some(at + run);
                break;
            }
        }
        // A run from the very start counts although it is shorter.
        let mut end = found.unwrap_or_else(|| aligned(run));
        if drop && end > 0 {
            end -= 1;
            if self.since([0, 19, 0]) {
                end = aligned(end);
            }
        }
        end * block
    }

    fn chunk(&self, spec: &Spec, limit: usize) -> usize {
        let (block, chunk) = (spec.block as usize, spec.span as usize);
        // What lies before the chunk of the limit counts as computed.
        let mut blocks = floor(limit, chunk) / block;
        while blocks < limit / block && self.has(spec.set, (blocks + 1) * block) {
            blocks += 1;
        }
        blocks * block
    }

    fn mamba(&self, spec: &Spec, limit: usize, align: usize) -> usize {
        if !self.since([0, 11, 1]) {
            return 0;
        }
        let block = spec.block as usize;
        let fine = self.since([0, 26, 0]) && align < block;
        let step = if fine { align } else { block };
        let mut end = floor(if fine { limit.min(self.named) } else { limit }, step);
        while end > 0 {
            let may_end = fine || !self.since([0, 12, 0]) || block == align || end.is_multiple_of(align);
            if may_end && self.has(spec.set, end) {
                return end;
            }
            end -= step;
        }
        0
    }
}

#[cfg(test)]
#[path = "hit_tests.rs"]
mod tests;
