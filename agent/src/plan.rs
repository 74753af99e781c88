//! Which of the engine's KV cache groups feeds which of its published sets.

use proto::hit::{Hits, Kind, Spec};
use proto::id::SetKind;

/// Groups with equal specs, as the engine looks them up together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Together {
    /// How they limit a hit.
    pub kind: Kind,
    /// Tokens a block.
    pub block: u32,
    /// Window or chunk in tokens, 0 for the others.
    pub span: u32,
    /// The engine drops a block of what they found.
    pub eagle: bool,
    /// Their numbers.
    pub groups: Vec<u32>,
}

/// Where a group's blocks go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Position in [`Hits::specs`].
    pub spec: usize,
    /// Position among the groups of that spec.
    pub member: usize,
    /// Fingerprints a block: its tokens by the unit.
    pub units: usize,
}

/// The groups, their specs and their sets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The rule, with a set for each spec.
    pub hits: Hits,
    // By group; `None` for groups that take no part in hits.
    places: Vec<Option<Place>>,
    members: Vec<usize>,
}

/// Most KV cache groups: group numbers are below it.
pub const MAX_GROUPS: u32 = 1 << 10;

impl Plan {
    /// One group of full attention.
    pub fn plain(unit: u32, version: [u16; 3]) -> Self {
        Self {
            hits: Hits::plain(unit, version),
            places: vec![Some(Place { spec: 0, member: 0, units: 1 })],
            members: vec![1],
        }
    }

    /// Gives each spec of `hits` (whose own specs are replaced) a set: the first of full attention is *gpu*.
    ///
    /// # Errors
    /// What makes no sense, or has no room in the contract.
    pub fn new(hits: Hits, specs: Vec<Together>) -> Result<Self, &'static str> {
        let mut places: Vec<Option<Place>> = Vec::new();
        let (mut given, mut next) = (Vec::new(), 1);
        let mut new = || {
            next += 1;
            next - 1
        };
        let unit = hits.unit.max(1);
        for (at, spec) in specs.iter().enumerate() {
            let first = spec.kind == Kind::Full && !specs[..at].iter().any(|before| before.kind == Kind::Full);
            let set = if first { 0 } else { new() };
            let partial = (hits.fine && spec.kind == Kind::Full && spec.block > hits.unit).then(&mut new);
            let Together { kind, block, span, eagle, .. } = *spec;
            given.push(Spec { kind, block, span, eagle, set, partial });
            for (member, group) in spec.groups.iter().enumerate() {
                if *group >= MAX_GROUPS {
                    return Err("the number of its KV cache groups");
                }
                let group = *group as usize;
                places.resize(places.len().max(group + 1), None);
                places[group] = Some(Place { spec: at, member, units: (spec.block / unit) as usize });
            }
        }
        let hits = Hits { specs: given, ..hits };
        match hits.fault() {
            None => Ok(Self { hits, places, members: specs.iter().map(|spec| spec.groups.len()).collect() }),
            Some(fault) => Err(fault),
        }
    }

    /// Where a group's blocks go; `None` when they take no part in hits.
    pub fn place(&self, group: u32) -> Option<Place> {
        self.places.get(group as usize).copied().flatten()
    }

    /// How many groups a spec has.
    pub fn members(&self, spec: usize) -> usize {
        self.members.get(spec).copied().unwrap_or(0)
    }

    /// The kind of a spec's set.
    pub fn set(&self, spec: &Spec) -> SetKind {
        SetKind::of_spec(spec.set).unwrap_or(SetKind::Gpu)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn together(kind: Kind, block: u32, span: u32, groups: &[u32]) -> Together {
        Together { kind, block, span, eagle: false, groups: groups.to_vec() }
    }

    #[test]
    fn each_spec_has_a_set_and_the_first_full_one_is_gpu() {
        let hits = Hits { align: 64, fine: true, ..Hits::plain(16, [0, 32, 0]) };
        let specs = vec![
            together(Kind::Full, 64, 0, &[0]),
            together(Kind::Full, 16, 0, &[3]),
            together(Kind::Window, 16, 100, &[1, 2]),
        ];
        let plan = Plan::new(hits.clone(), specs).expect("a plan");
        let sets: Vec<_> = plan.hits.specs.iter().map(|spec| (spec.set, spec.partial)).collect();
        assert_eq!(sets, [(0, Some(1)), (2, None), (3, None)]);
        assert_eq!(plan.place(2), Some(Place { spec: 2, member: 1, units: 1 }));
        assert_eq!((plan.place(0).map(|place| place.units), plan.place(9), plan.members(2)), (Some(4), None, 2));
        let many = (0..9).map(|group| together(Kind::Window, 16, 20 + group, &[group])).collect();
        assert!(Plan::new(hits, many).is_err());
    }
}
