//! Physical copies in, changes of the closed set out.
//!
//! An engine may hold a block several times, evict a parent before its child, and bring the parent back later. What a
//! prompt can *hit* is narrower: a block is reachable when a copy of it is resident and its parent is reachable. This
//! core keeps the copies of one tier of one engine and says, for each change of them, how the reachable set changes:
//! additions parents first, removals deepest first, so that the set is prefix-closed after every single change.
//!
//! Blocks whose parent is not resident are parked, not lost: they become reachable when the parent arrives.
//!
//! Size: one node a resident block, and at most one more for each (its absent parent): a block that loses its last
//! copy keeps its node only while children hang on it, and gives up its own place below its parent.

use crate::block::Fingerprint;
use crate::digest::Digest;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Fingerprints are hashes already: one multiplication spreads them over the map's buckets.
#[derive(Default)]
pub struct FingerprintHasher(u64);

impl Hasher for FingerprintHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|b| self.0 = self.0.rotate_left(8) ^ u64::from(*b));
    }
    fn write_u64(&mut self, fp: u64) {
        self.0 = fp.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

/// A map keyed by fingerprints.
pub type FingerprintMap<V> = HashMap<Fingerprint, V, BuildHasherDefault<FingerprintHasher>>;

/// What a block follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Link {
    /// It is the first block of a prompt: this is `fp(-1)`. Roots are always reachable.
    Root(Fingerprint),
    /// It follows this block.
    Block(Fingerprint),
}

impl Link {
    /// The fingerprint that the block was hashed from.
    pub fn fingerprint(self) -> Fingerprint {
        match self {
            Link::Root(fp) | Link::Block(fp) => fp,
        }
    }
}

/// One change of the reachable set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// `fp` became reachable; its parent already is.
    Added {
        /// What it follows.
        parent: Link,
        /// The block.
        fp: Fingerprint,
    },
    /// `fp` ceased to be reachable; none of its children is reachable any more.
    Removed {
        /// The block.
        fp: Fingerprint,
    },
}

const NONE: u32 = u32::MAX;

#[derive(Debug, Clone)]
struct Node {
    fp: Fingerprint,
    copies: u32,
    parent: u32,
    first_child: u32,
    next_sibling: u32,
    previous_sibling: u32,
    root: bool,
    reachable: bool,
}

/// The copies of one tier of one engine, and the reachable set that follows from them.
#[derive(Debug, Clone, Default)]
pub struct Residency {
    nodes: Vec<Node>,
    free: Vec<u32>,
    blocks: FingerprintMap<u32>,
    // Apart from `blocks`: a root and a block could collide, and a block must never pass for a root.
    roots: FingerprintMap<u32>,
    resident: usize,
    digest: Digest,
    walk: Vec<u32>,
}

impl Residency {
    /// Nothing resident.
    pub fn new() -> Self {
        Self::default()
    }

    /// Distinct resident blocks, reachable or parked.
    pub fn resident(&self) -> usize {
        self.resident
    }

    /// Reachable blocks.
    pub fn reachable(&self) -> usize {
        self.digest.count as usize
    }

    /// Digest of the reachable set.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Nodes in use, roots included: what the memory of this core follows. At most twice the resident blocks, and roots.
    pub fn nodes(&self) -> usize {
        self.nodes.len() - self.free.len()
    }

    /// Is a copy of this block resident, reachable or not?
    pub fn is_resident(&self, fp: Fingerprint) -> bool {
        self.blocks.get(&fp).is_some_and(|&at| self.node(at).copies > 0)
    }

    /// Is this block reachable?
    pub fn is_reachable(&self, fp: Fingerprint) -> bool {
        self.blocks.get(&fp).is_some_and(|&at| self.node(at).reachable)
    }

    /// What a resident block follows.
    pub fn parent(&self, fp: Fingerprint) -> Option<Link> {
        let node = self.node(*self.blocks.get(&fp)?);
        (node.copies > 0 && node.parent != NONE).then(|| self.link_of(node.parent))
    }

    /// How many leading blocks of a prompt are reachable. By bisection, since the set is prefix-closed.
    pub fn depth(&self, prompt: &[Fingerprint]) -> usize {
        prompt.partition_point(|fp| self.is_reachable(*fp))
    }

    /// A copy of `fp` arrived. Changes are appended to `out`.
    pub fn add(&mut self, fp: Fingerprint, parent: Link, out: &mut Vec<Change>) {
        let at = match self.blocks.get(&fp) {
            Some(&at) => at,
            None => {
                let at = self.new_node(fp, false);
                self.blocks.insert(fp, at);
                at
            }
        };
        let node = self.node_mut(at);
        node.copies += 1;
        if node.copies > 1 {
            return;
        }
        self.resident += 1;
        if parent == Link::Block(fp) {
            return; // Follows itself: a collision. Resident, never reachable.
        }
        let parent_at = self.anchor(parent);
        self.link(parent_at, at);
        if self.node(parent_at).reachable {
            self.reach(at, out);
        }
    }

    /// A copy of `fp` is gone. False when there was none.
    pub fn drop(&mut self, fp: Fingerprint, out: &mut Vec<Change>) -> bool {
        let Some(&at) = self.blocks.get(&fp) else { return false };
        let node = self.node_mut(at);
        match node.copies {
            0 => return false,
            1 => node.copies = 0,
            _ => {
                node.copies -= 1;
                return true;
            }
        }
        self.resident -= 1;
        if self.node(at).reachable {
            self.lose(at, out);
        }
        self.unlink(at);
        self.release(at);
        true
    }

    /// Everything is gone at once: no single changes are told.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Appends the reachable set as chains, parents before children over the whole walk.
    /// `chain` receives what the first block follows and the blocks, each the child of the one before it.
    pub fn chains(&self, mut chain: impl FnMut(Link, &[Fingerprint])) {
        let mut todo: Vec<u32> = Vec::new();
        let mut run = Vec::new();
        for &root in self.roots.values() {
            todo.extend(self.reachable_children(root));
            while let Some(start) = todo.pop() {
                run.clear();
                let mut at = start;
                loop {
                    run.push(self.node(at).fp);
                    let mut children = self.reachable_children(at);
                    let Some(next) = children.next() else { break };
                    todo.extend(children);
                    at = next;
                }
                chain(self.link_of(self.node(start).parent), &run);
            }
        }
    }

    fn reachable_children(&self, at: u32) -> impl Iterator<Item = u32> + '_ {
        let mut child = self.node(at).first_child;
        std::iter::from_fn(move || {
            while child != NONE {
                let here = child;
                child = self.node(here).next_sibling;
                if self.node(here).reachable {
                    return Some(here);
                }
            }
            None
        })
    }

    fn node(&self, at: u32) -> &Node {
        &self.nodes[at as usize]
    }

    fn node_mut(&mut self, at: u32) -> &mut Node {
        &mut self.nodes[at as usize]
    }

    fn link_of(&self, at: u32) -> Link {
        let node = self.node(at);
        if node.root { Link::Root(node.fp) } else { Link::Block(node.fp) }
    }

    fn new_node(&mut self, fp: Fingerprint, root: bool) -> u32 {
        let node = Node {
            fp,
            copies: 0,
            parent: NONE,
            first_child: NONE,
            next_sibling: NONE,
            previous_sibling: NONE,
            root,
            reachable: root,
        };
        match self.free.pop() {
            Some(at) => {
                self.nodes[at as usize] = node;
                at
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as u32
            }
        }
    }

    /// The node of a parent, made when it is not there: a root, or a block that is not resident.
    fn anchor(&mut self, parent: Link) -> u32 {
        let (fp, root) = (parent.fingerprint(), matches!(parent, Link::Root(_)));
        let known = if root { self.roots.get(&fp) } else { self.blocks.get(&fp) };
        if let Some(&at) = known {
            return at;
        }
        let at = self.new_node(fp, root);
        if root {
            self.roots.insert(fp, at)
        } else {
            self.blocks.insert(fp, at)
        };
        at
    }

    fn link(&mut self, parent: u32, at: u32) {
        let first = self.node(parent).first_child;
        let node = self.node_mut(at);
        node.parent = parent;
        node.previous_sibling = NONE;
        node.next_sibling = first;
        if first != NONE {
            self.node_mut(first).previous_sibling = at;
        }
        self.node_mut(parent).first_child = at;
    }

    /// Takes a node out of its parent's list, and frees the parent when nothing keeps it.
    fn unlink(&mut self, at: u32) {
        let Node { parent, next_sibling, previous_sibling, .. } = *self.node(at);
        if parent == NONE {
            return;
        }
        if next_sibling != NONE {
            self.node_mut(next_sibling).previous_sibling = previous_sibling;
        }
        match previous_sibling {
            NONE => self.node_mut(parent).first_child = next_sibling,
            previous => self.node_mut(previous).next_sibling = next_sibling,
        }
        let node = self.node_mut(at);
        (node.parent, node.next_sibling, node.previous_sibling) = (NONE, NONE, NONE);
        self.release(parent);
    }

    /// Frees a node that has neither copies nor children. Such a node has no parent: it was unlinked with its last copy.
    fn release(&mut self, at: u32) {
        let node = self.node(at);
        if node.copies > 0 || node.first_child != NONE {
            return;
        }
        let (fp, root) = (node.fp, node.root);
        if root {
            self.roots.remove(&fp)
        } else {
            self.blocks.remove(&fp)
        };
        self.free.push(at);
    }

    /// Marks a node and what hangs below it reachable, parents first.
    fn reach(&mut self, at: u32, out: &mut Vec<Change>) {
        let mut walk = std::mem::take(&mut self.walk);
        walk.push(at);
        while let Some(at) = walk.pop() {
            let parent = self.link_of(self.node(at).parent);
            let node = self.node_mut(at);
            node.reachable = true;
            let fp = node.fp;
            let mut child = node.first_child;
            self.digest.insert(fp);
            out.push(Change::Added { parent, fp });
            while child != NONE {
                walk.push(child);
                child = self.node(child).next_sibling;
            }
        }
        self.walk = walk;
    }

    /// Marks a node and what hangs below it unreachable, deepest first: a walk parents first, told backwards.
    fn lose(&mut self, at: u32, out: &mut Vec<Change>) {
        let mut walk = std::mem::take(&mut self.walk);
        walk.push(at);
        let mut done = 0;
        while done < walk.len() {
            let at = walk[done];
            done += 1;
            let node = self.node_mut(at);
            node.reachable = false;
            let fp = node.fp;
            self.digest.remove(fp);
            let mut child = self.node(at).first_child;
            while child != NONE {
                if self.node(child).reachable {
                    walk.push(child);
                }
                child = self.node(child).next_sibling;
            }
        }
        out.extend(walk.drain(..).rev().map(|at| Change::Removed { fp: self.nodes[at as usize].fp }));
        self.walk = walk;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: Link = Link::Root(1);

    fn added(parent: Link, fp: u64) -> Change {
        Change::Added { parent, fp }
    }

    #[test]
    fn a_second_copy_changes_nothing_and_the_last_removal_counts() {
        let (mut tier, mut out) = (Residency::new(), vec![]);
        tier.add(10, ROOT, &mut out);
        tier.add(10, ROOT, &mut out);
        assert_eq!(out, [added(ROOT, 10)]);
        out.clear();
        assert!(tier.drop(10, &mut out));
        assert_eq!(out, []);
        assert!(tier.drop(10, &mut out));
        assert_eq!(out, [Change::Removed { fp: 10 }]);
        assert!(!tier.drop(10, &mut out));
        assert_eq!((tier.nodes(), tier.digest()), (0, Digest::default()));
    }

    #[test]
    fn a_parent_evicted_before_its_child_parks_the_child() {
        let (mut tier, mut out) = (Residency::new(), vec![]);
        tier.add(10, ROOT, &mut out);
        tier.add(11, Link::Block(10), &mut out);
        tier.add(12, Link::Block(11), &mut out);
        out.clear();
        tier.drop(10, &mut out);
        assert_eq!(out, [12, 11, 10].map(|fp| Change::Removed { fp }));
        assert_eq!((tier.resident(), tier.reachable()), (2, 0));
        out.clear();
        tier.add(10, ROOT, &mut out);
        assert_eq!(out, [added(ROOT, 10), added(Link::Block(10), 11), added(Link::Block(11), 12)]);
    }

    #[test]
    fn an_orphan_waits_for_its_parent() {
        let (mut tier, mut out) = (Residency::new(), vec![]);
        tier.add(11, Link::Block(10), &mut out);
        assert_eq!((out.len(), tier.depth(&[10, 11])), (0, 0));
        tier.add(10, ROOT, &mut out);
        assert_eq!(out, [added(ROOT, 10), added(Link::Block(10), 11)]);
        assert_eq!(tier.depth(&[10, 11, 12]), 2);
    }

    #[test]
    fn absent_ancestors_are_not_kept() {
        let (mut tier, mut out) = (Residency::new(), vec![]);
        tier.add(1000, ROOT, &mut out);
        for fp in 1001..2000 {
            tier.add(fp, Link::Block(fp - 1), &mut out);
        }
        for fp in 1000..1999 {
            tier.drop(fp, &mut out);
        }
        assert_eq!((tier.resident(), tier.nodes()), (1, 2));
    }

    #[test]
    fn a_block_that_collides_with_a_root_is_no_root() {
        let (mut tier, mut out) = (Residency::new(), vec![]);
        tier.add(2, Link::Block(1), &mut out);
        tier.add(3, Link::Root(1), &mut out);
        assert_eq!(out, [added(Link::Root(1), 3)]);
    }
}
