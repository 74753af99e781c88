//! What is resident in each KV cache group, and the published sets that follow from it.
//!
//! A spec has a block when all of its groups have a copy of it. For full attention the set is closed along the spec's
//! blocks ([`Residency`]); for windows, chunks and Mamba states it is whatever is resident, since each block of them
//! may count without the ones before it.

use crate::plan::Plan;
use proto::block::{Fingerprint, cached_tokens};
use proto::digest::Digest;
use proto::hit::{self, Kind};
use proto::id::SetKind;
use proto::residency::{Change, FingerprintMap, Link, Residency};

/// Changes of each kind of set, by [`SetKind::index`], each in order.
pub type Changes = [Vec<Change>; SetKind::COUNT];

/// Distinct blocks with a copy in every group of a spec.
#[derive(Debug, Default)]
struct Gathered {
    copies: Vec<FingerprintMap<u32>>,
    // How many groups have a copy; not kept for one group.
    groups: FingerprintMap<u32>,
}

impl Gathered {
    fn new(members: usize) -> Self {
        Self { copies: (0..members.max(1)).map(|_| FingerprintMap::default()).collect(), ..Self::default() }
    }

    /// A copy came. True when the block is in every group now and was not before.
    fn add(&mut self, member: usize, fp: Fingerprint) -> bool {
        let all = self.copies.len() as u32;
        let Some(copies) = self.copies.get_mut(member) else { return false };
        let count = copies.entry(fp).or_insert(0);
        *count += 1;
        if *count > 1 || all == 1 {
            return *count == 1;
        }
        let groups = self.groups.entry(fp).or_insert(0);
        *groups += 1;
        *groups == all
    }

    /// A copy went. True when the block was in every group and is not any more.
    fn drop(&mut self, member: usize, fp: Fingerprint) -> bool {
        let all = self.copies.len() as u32;
        let Some(copies) = self.copies.get_mut(member) else { return false };
        match copies.get_mut(&fp) {
            None => return false,
            Some(1) => copies.remove(&fp),
            Some(count) => {
                *count -= 1;
                return false;
            }
        };
        if all == 1 {
            return true;
        }
        let groups = self.groups.get_mut(&fp);
        let before = groups.map_or(0, |groups| {
            *groups -= 1;
            *groups + 1
        });
        if before == 1 {
            self.groups.remove(&fp);
        }
        before == all
    }

    fn has(&self, fp: Fingerprint) -> bool {
        match &self.copies[..] {
            [one] => one.contains_key(&fp),
            all => self.groups.get(&fp).is_some_and(|groups| *groups as usize == all.len()),
        }
    }

    fn members(&self) -> impl Iterator<Item = Fingerprint> + '_ {
        let all = self.copies.len() as u32;
        let one = self.copies.first().filter(|_| all == 1).into_iter().flat_map(|copies| copies.keys());
        let several = self.groups.iter().filter(move |(_, groups)| **groups == all).map(|(fp, _)| fp);
        one.chain(several).copied()
    }
}

/// One published set.
#[derive(Debug)]
struct Set {
    kind: SetKind,
    gathered: Gathered,
    // Of full attention. With one group it counts the copies itself, and `gathered` is not used.
    closed: Option<Residency>,
    digest: Digest,
}

impl Set {
    fn new(kind: SetKind, members: usize, closed: bool) -> Self {
        Self { kind, gathered: Gathered::new(members), closed: closed.then(Residency::new), digest: Digest::default() }
    }

    fn add(&mut self, member: usize, fp: Fingerprint, parent: Link, out: &mut Vec<Change>) {
        let one = self.gathered.copies.len() == 1;
        match &mut self.closed {
            Some(residency) if one => residency.add(fp, parent, out),
            Some(residency) => {
                if self.gathered.add(member, fp) {
                    residency.add(fp, parent, out);
                }
            }
            None => {
                if self.gathered.add(member, fp) {
                    self.digest.insert(fp);
                    out.push(Change::Added { parent, fp });
                }
            }
        }
    }

    fn drop(&mut self, member: usize, fp: Fingerprint, out: &mut Vec<Change>) {
        let one = self.gathered.copies.len() == 1;
        match &mut self.closed {
            Some(residency) if one => {
                residency.drop(fp, out);
            }
            Some(residency) => {
                if self.gathered.drop(member, fp) {
                    residency.drop(fp, out);
                }
            }
            None => {
                if self.gathered.drop(member, fp) {
                    self.digest.remove(fp);
                    out.push(Change::Removed { fp });
                }
            }
        }
    }

    fn has(&self, fp: Fingerprint) -> bool {
        self.closed.as_ref().map_or_else(|| self.gathered.has(fp), |residency| residency.is_reachable(fp))
    }

    fn digest(&self) -> Digest {
        self.closed.as_ref().map_or(self.digest, Residency::digest)
    }
}

/// All sets of one engine.
#[derive(Debug)]
pub struct Resident {
    plan: Plan,
    // By set number, as [`SetKind::of_spec`] counts; a number that no spec has is an empty set.
    sets: Vec<Set>,
    // Reachable on GPU, or in a lower tier with the parent in here. Kept once a tier below tells of itself.
    any: Option<Residency>,
}

impl Resident {
    /// Nothing is resident.
    pub fn new(plan: Plan) -> Self {
        let mut sets: Vec<Set> = Vec::new();
        for (at, spec) in plan.hits.specs.iter().enumerate() {
            sets.push(Set::new(plan.set(spec), plan.members(at), spec.kind == Kind::Full));
            if let Some(kind) = spec.partial.and_then(SetKind::of_spec) {
                sets.push(Set::new(kind, plan.members(at), false));
            }
        }
        sets.sort_by_key(|set| set.kind);
        Self { plan, sets, any: None }
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    fn set_of(&mut self, spec: usize, partial: bool) -> Option<&mut Set> {
        let spec = self.plan.hits.specs.get(spec)?;
        let number = if partial && spec.kind == Kind::Full { spec.partial? } else { spec.set };
        let kind = SetKind::of_spec(number)?;
        self.sets.iter_mut().find(|set| set.kind == kind)
    }

    /// A copy came in a group. `partial`: it ends inside a block of the group.
    pub fn add(&mut self, group: u32, fp: Fingerprint, parent: Link, partial: bool, out: &mut Changes) {
        let Some(place) = self.plan.place(group) else { return };
        let Some(set) = self.set_of(place.spec, partial) else { return };
        let changes = &mut out[set.kind.index()];
        let before = changes.len();
        set.add(place.member, fp, parent, changes);
        if set.kind == SetKind::Gpu {
            self.reached(before, out);
        }
    }

    /// A copy went.
    pub fn drop(&mut self, group: u32, fp: Fingerprint, partial: bool, out: &mut Changes) {
        let Some(place) = self.plan.place(group) else { return };
        let Some(set) = self.set_of(place.spec, partial) else { return };
        let changes = &mut out[set.kind.index()];
        let before = changes.len();
        set.drop(place.member, fp, changes);
        if set.kind == SetKind::Gpu {
            self.reached(before, out);
        }
    }

    /// What became reachable on GPU since, or ceased to be, is a copy more or less of *any*.
    fn reached(&mut self, before: usize, out: &mut Changes) {
        let Some(any) = &mut self.any else { return };
        let [gpu, changes, ..] = out;
        for change in &gpu[before..] {
            match *change {
                Change::Added { parent, fp } => any.add(fp, parent, changes),
                Change::Removed { fp } => {
                    any.drop(fp, changes);
                }
            }
        }
    }

    /// A copy came in a tier below the GPU. From the first one on *any* is published.
    pub fn add_below(&mut self, fp: Fingerprint, parent: Link, out: &mut Changes) {
        let changes = &mut out[SetKind::Any.index()];
        let any = self.any.get_or_insert_with(|| {
            let mut any = Residency::new();
            if let Some(gpu) = self.sets.iter().find(|set| set.kind == SetKind::Gpu).and_then(|set| set.closed.as_ref())
            {
                gpu.chains(|link, blocks| {
                    let mut parent = link;
                    for fp in blocks {
                        any.add(*fp, parent, changes);
                        parent = Link::Block(*fp);
                    }
                });
            }
            any
        });
        any.add(fp, parent, changes);
    }

    /// A copy went from a tier below the GPU.
    pub fn drop_below(&mut self, fp: Fingerprint, out: &mut Changes) {
        if let Some(any) = &mut self.any {
            any.drop(fp, &mut out[SetKind::Any.index()]);
        }
    }

    /// Everything is gone at once, on the GPU: no single changes are told. What lower tiers have must be told anew.
    pub fn clear(&mut self) {
        *self = Self::new(self.plan.clone());
    }

    /// Tokens that the engine takes from its GPU cache for a prompt of `tokens` tokens with these fingerprints.
    pub fn hit(&self, prompt: &[Fingerprint], tokens: usize) -> Option<usize> {
        let hits = &self.plan.hits;
        if hits.is_plain()
            && let [Set { closed: Some(gpu), .. }] = &self.sets[..]
        {
            return Some(cached_tokens(gpu.depth(prompt), hits.unit as usize, tokens));
        }
        let numbered = |set: usize| {
            let kind = u8::try_from(set).ok().and_then(SetKind::of_spec)?;
            self.sets.iter().find(|set| set.kind == kind)
        };
        hit::find(hits, tokens, |set, at| numbered(set).zip(prompt.get(at)).is_some_and(|(set, fp)| set.has(*fp)))
    }

    /// The digest of each set that is published.
    pub fn digests(&self) -> impl Iterator<Item = (SetKind, Digest)> + '_ {
        let any = self.any.as_ref().map(|any| (SetKind::Any, any.digest()));
        self.sets.iter().map(|set| (set.kind, set.digest())).chain(any)
    }

    /// Is a set of this kind closed, so that its chains have parents?
    pub fn closed(&self, kind: SetKind) -> bool {
        kind == SetKind::Any || self.sets.iter().any(|set| set.kind == kind && set.closed.is_some())
    }

    /// All members as chains, set by set; of closed sets parents first over the whole walk. `None` for what a chain of
    /// a set that is not closed follows.
    pub fn chains(&self, mut chain: impl FnMut(SetKind, Option<Link>, &[Fingerprint])) {
        for set in &self.sets {
            match &set.closed {
                Some(residency) => residency.chains(|link, blocks| chain(set.kind, Some(link), blocks)),
                None => {
                    let members: Vec<Fingerprint> = set.gathered.members().collect();
                    if !members.is_empty() {
                        chain(set.kind, None, &members);
                    }
                }
            }
        }
        if let Some(any) = &self.any {
            any.chains(|link, blocks| chain(SetKind::Any, Some(link), blocks));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Together;
    use proto::hit::Hits;

    const ROOT: Link = Link::Root(1);

    fn added(parent: Link, fp: u64) -> Change {
        Change::Added { parent, fp }
    }

    fn full_and_two_windows() -> Resident {
        let together =
            |kind, span, groups: &[u32]| Together { kind, block: 16, span, eagle: false, groups: groups.to_vec() };
        let specs = vec![together(Kind::Full, 0, &[0]), together(Kind::Window, 40, &[1, 2])];
        Resident::new(Plan::new(Hits::plain(16, [0, 32, 0]), specs).expect("a plan"))
    }

    #[test]
    fn a_spec_has_a_block_when_all_its_groups_have_it() {
        let (mut sets, mut out) = (full_and_two_windows(), Changes::default());
        sets.add(1, 10, ROOT, false, &mut out);
        sets.add(1, 10, ROOT, false, &mut out);
        assert_eq!(out.concat(), []);
        sets.add(2, 10, ROOT, false, &mut out);
        assert_eq!(out[SetKind::S1.index()], [added(ROOT, 10)]);
        sets.drop(1, 10, false, &mut out);
        assert_eq!(out.concat().len(), 1);
        sets.drop(2, 10, false, &mut out);
        sets.drop(1, 10, false, &mut out);
        sets.drop(1, 10, false, &mut out);
        assert_eq!(out[SetKind::S1.index()], [added(ROOT, 10), Change::Removed { fp: 10 }]);
        assert!(sets.digests().all(|(_, digest)| digest == Digest::default()));
    }

    #[test]
    fn hits_follow_from_all_sets() {
        let (mut sets, mut out) = (full_and_two_windows(), Changes::default());
        let prompt: Vec<u64> = (10..20).collect();
        for (at, fp) in prompt.iter().enumerate() {
            let parent = if at == 0 { ROOT } else { Link::Block(fp - 1) };
            (0..3).for_each(|group| sets.add(group, *fp, parent, false, &mut out));
        }
        assert_eq!(sets.hit(&prompt, 161), Some(160));
        sets.drop(2, 18, false, &mut out); // a hole in the window of the last two ends
        assert_eq!(sets.hit(&prompt, 161), Some(128));
        sets.drop(0, 15, false, &mut out);
        assert_eq!(sets.hit(&prompt, 161), Some(80));
    }

    #[test]
    fn any_goes_down_and_never_back_up() {
        let (mut sets, mut out) = (Resident::new(Plan::plain(16, [0, 32, 0])), Changes::default());
        sets.add(0, 10, ROOT, false, &mut out);
        sets.add(0, 12, Link::Block(11), false, &mut out);
        sets.add_below(11, Link::Block(10), &mut out);
        // 12 is on GPU, but behind 11, which is not: a transfer from below does not go on there.
        assert_eq!(out[SetKind::Any.index()], [added(ROOT, 10), added(Link::Block(10), 11)]);
        sets.add_below(12, Link::Block(11), &mut out);
        assert_eq!(out[SetKind::Any.index()].len(), 3);
        sets.drop(0, 10, false, &mut out);
        let gone = [12, 11, 10].map(|fp| Change::Removed { fp });
        assert_eq!(out[SetKind::Any.index()][3..], gone);
        sets.add_below(10, ROOT, &mut out);
        assert_eq!(out[SetKind::Any.index()].len(), 9);
        sets.drop_below(11, &mut out);
        assert_eq!(out[SetKind::Any.index()][9..], [12, 11].map(|fp| Change::Removed { fp }));
    }
}
