//! Changes of a set made into operations, and operations into messages of bounded size.

use proto::block::Fingerprint;
use proto::event::{Fingerprints, Op, Parent, Remove, Store};
use proto::id::SetKind;
use proto::residency::{Change, Link};

/// Most fingerprints in one operation.
pub const MAX_OP_FINGERPRINTS: usize = 8192;
/// Most fingerprints in one message: 512 KiB of them, far below the quarter of 16 MiB that a receiver's limit asks for.
pub const MAX_BATCH_FINGERPRINTS: usize = 1 << 16;
/// Most operations in one message: each has at most three texts of 1 KiB, so they add at most 12 MiB, and in practice
/// (names of 10 to 100 bytes) a few hundred KiB.
pub const MAX_BATCH_OPS: usize = 4096;

/// What a chain follows, as readers are told. `adapter` names the adapter of a root.
pub fn parent(link: Link, model: &str, adapter: &str) -> Parent {
    match link {
        Link::Block(fp) => Parent::Block(fp),
        Link::Root(fp) => Parent::Root { fp, model: model.to_string(), adapter: adapter.to_string() },
    }
}

/// Runs of changes become chains: additions that follow each other one store, removals one remove. Order is kept. Of a
/// set that is not `closed` all additions in a row are one store.
pub fn ops<'a>(
    (kind, closed): (SetKind, bool),
    changes: &[Change],
    model: &str,
    adapter: impl Fn(Fingerprint) -> &'a str,
) -> Vec<Op> {
    let mut ops: Vec<Op> = Vec::new();
    for change in changes {
        match (*change, ops.last_mut()) {
            (Change::Added { fp, .. }, Some(Op::Store(store)))
                if !closed && store.fingerprints.0.len() < MAX_OP_FINGERPRINTS =>
            {
                store.fingerprints.0.push(fp);
            }
            (Change::Added { fp, .. }, _) if !closed => {
                ops.push(Op::Store(Store { kind, parent: Parent::Loose, fingerprints: Fingerprints(vec![fp]) }));
            }
            (Change::Added { parent: Link::Block(before), fp }, Some(Op::Store(store)))
                if store.fingerprints.0.last() == Some(&before) && store.fingerprints.0.len() < MAX_OP_FINGERPRINTS =>
            {
                store.fingerprints.0.push(fp);
            }
            (Change::Added { parent: link, fp }, _) => {
                let parent = parent(link, model, adapter(link.fingerprint()));
                ops.push(Op::Store(Store { kind, parent, fingerprints: Fingerprints(vec![fp]) }));
            }
            (Change::Removed { fp }, Some(Op::Remove(remove))) if remove.fingerprints.0.len() < MAX_OP_FINGERPRINTS => {
                remove.fingerprints.0.push(fp);
            }
            (Change::Removed { fp }, _) => {
                ops.push(Op::Remove(Remove { kind, fingerprints: Fingerprints(vec![fp]) }));
            }
        }
    }
    ops
}

/// Operations in messages of bounded size, in order. Each message leaves the set prefix-closed, since each single
/// change does. At least one message, if only an empty one.
pub fn split(ops: Vec<Op>) -> Vec<Vec<Op>> {
    let (mut messages, mut fingerprints) = (vec![vec![]], 0);
    for op in ops {
        let more = match &op {
            Op::Store(store) => store.fingerprints.0.len(),
            Op::Remove(remove) => remove.fingerprints.0.len(),
            _ => 0,
        };
        let full = messages.last().is_some_and(|m: &Vec<Op>| m.len() >= MAX_BATCH_OPS);
        if full || fingerprints + more > MAX_BATCH_FINGERPRINTS {
            messages.push(vec![]);
            fingerprints = 0;
        }
        fingerprints += more;
        if let Some(message) = messages.last_mut() {
            message.push(op);
        }
    }
    messages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_become_chains() {
        let added = |parent, fp| Change::Added { parent, fp };
        let changes = [
            added(Link::Root(1), 2),
            added(Link::Block(2), 3),
            added(Link::Block(2), 4),
            Change::Removed { fp: 4 },
            Change::Removed { fp: 3 },
            added(Link::Block(2), 3),
        ];
        let store = |parent, list: &[u64]| {
            Op::Store(Store { kind: SetKind::Gpu, parent, fingerprints: Fingerprints(list.to_vec()) })
        };
        assert_eq!(
            ops((SetKind::Gpu, true), &changes, "m", |_| "a"),
            [
                store(Parent::Root { fp: 1, model: "m".into(), adapter: "a".into() }, &[2, 3]),
                store(Parent::Block(2), &[4]),
                Op::Remove(Remove { kind: SetKind::Gpu, fingerprints: Fingerprints(vec![4, 3]) }),
                store(Parent::Block(2), &[3]),
            ]
        );
    }

    #[test]
    fn a_set_that_is_not_closed_has_no_parents() {
        let added = |parent, fp| Change::Added { parent, fp };
        let changes = [added(Link::Root(1), 2), added(Link::Block(9), 3), Change::Removed { fp: 2 }];
        let told = ops((SetKind::S1, false), &changes, "m", |_| "");
        let store = Store { kind: SetKind::S1, parent: Parent::Loose, fingerprints: Fingerprints(vec![2, 3]) };
        assert_eq!(told[0], Op::Store(store));
        assert_eq!(told.len(), 2);
    }

    #[test]
    fn messages_are_bounded_and_whole_together() {
        let changes: Vec<Change> = (2..200_000).map(|fp| Change::Added { parent: Link::Block(fp - 1), fp }).collect();
        let messages = split(ops((SetKind::Gpu, true), &changes, "m", |_| ""));
        let count = |message: &Vec<Op>| -> usize {
            message.iter().map(|op| if let Op::Store(store) = op { store.fingerprints.0.len() } else { 0 }).sum()
        };
        assert!(messages.len() >= 4 && messages.iter().all(|m| count(m) <= MAX_BATCH_FINGERPRINTS));
        assert_eq!(messages.iter().map(count).sum::<usize>(), changes.len());
        assert_eq!(split(vec![]), [vec![]]);
    }
}
