//! Cases with known answers, each seen in a real engine. The search as a whole is tested against real engines of all
//! versions by the Python tests.

use super::*;

fn spec(kind: Kind, block: u32, span: u32, set: u8) -> Spec {
    Spec { kind, block, span, eagle: false, set, partial: None }
}

fn hits(specs: Vec<Spec>, align: u32, version: [u16; 3]) -> Hits {
    Hits { specs, align, ..Hits::plain(16, version) }
}

fn eagle(mut hits: Hits) -> Hits {
    hits.specs.iter_mut().for_each(|spec| spec.eagle = true);
    hits
}

#[test]
fn the_last_token_is_never_hit() {
    let plain = Hits::plain(16, [0, 32, 0]);
    let found = |tokens| find(&plain, tokens, |_, at| at < 4);
    assert_eq!([0, 1, 16, 17, 64, 65, 1000].map(found), [0, 0, 0, 16, 48, 64, 64].map(Some));
    assert!(plain.is_plain() && !eagle(plain).is_plain());
}

#[test]
fn eagle_drops_a_block() {
    let one = eagle(Hits::plain(16, [0, 32, 0]));
    assert_eq!([17, 32, 33, 65].map(|tokens| find(&one, tokens, |_, at| at < 4)), [0, 0, 16, 48].map(Some));
}

#[test]
fn what_lies_ahead_is_part_of_a_block() {
    let ahead = Hits { ahead: 3, ..Hits::plain(16, [0, 33, 0]) };
    assert_eq!([18, 19, 34, 35].map(|tokens| find(&ahead, tokens, |_, _| true)), [0, 16, 16, 32].map(Some));
}

/// Two windows that both drop: the engine's answer is deeper than any place where both could end.
#[test]
fn the_first_of_two_dropping_windows_is_not_looked_at_again() {
    let two = eagle(hits(vec![spec(Kind::Window, 16, 17, 0), spec(Kind::Window, 16, 100, 1)], 16, [0, 32, 0]));
    assert_eq!(find(&two, 100, |_, _| true), Some(80));
    let one_hole = |set: usize, at: usize| !(set == 1 && at == 4);
    assert_eq!(find(&two, 100, one_hole), Some(48));
}

#[test]
fn a_chunk_that_is_no_multiple_of_a_block() {
    let chunked = hits(vec![spec(Kind::Full, 16, 0, 0), spec(Kind::Chunk, 16, 24, 1)], 16, [0, 20, 2]);
    // Of the chunk from 120 on the block that straddles its start counts as computed.
    assert_eq!(find(&chunked, 144, |set, at| set == 0 || at > 6), Some(128));
    assert_eq!(find(&chunked, 144, |set, _| set == 0), Some(112));
}

#[test]
fn a_mamba_state_or_nothing() {
    let mixed = hits(vec![spec(Kind::Full, 16, 0, 0), spec(Kind::Mamba, 16, 0, 1)], 16, [0, 28, 0]);
    let at = |set: usize, at: usize| set == 0 && at < 9 || set == 1 && at == 5;
    assert_eq!([200, 97, 96].map(|tokens| find(&mixed, tokens, at)), [Some(96), Some(96), Some(0)]);
    let old = Hits { version: [0, 11, 0], ..mixed };
    assert_eq!(find(&old, 200, at), Some(0));
}

#[test]
fn nonsense_is_named_and_long_searches_end() {
    let good = hits(vec![spec(Kind::Full, 32, 0, 0), spec(Kind::Window, 16, 40, 1)], 32, [0, 32, 0]);
    assert_eq!(good.fault(), None);
    for bad in [
        Hits { unit: 0, ..good.clone() },
        Hits { align: 40, ..good.clone() },
        Hits { specs: vec![], ..good.clone() },
        Hits { specs: vec![spec(Kind::Window, 16, 0, 1)], ..good.clone() },
        Hits { specs: vec![spec(Kind::Full, 24, 0, 0)], ..good.clone() },
        Hits { specs: vec![spec(Kind::Full, 16, 0, 99)], ..good.clone() },
    ] {
        assert!(bad.fault().is_some(), "{bad:?}");
    }
    // Two windows that take turns in lowering the hit by a block: no engine has such sets.
    let turns = hits(
        vec![spec(Kind::Window, 16, 16, 0), spec(Kind::Window, 16, 17, 1), spec(Kind::Mamba, 16, 0, 2)],
        16,
        [0, 32, 0],
    );
    let mut asked = 0u64;
    let answer = find(&turns, 1 << 21, |set, at| {
        asked += 1;
        at % 3 != set
    });
    assert!(asked <= (PATIENCE * 3 * ((1 << 17) + 64)) as u64, "{asked}");
    assert!(answer.is_none() || answer == Some(0), "{answer:?}");
}
