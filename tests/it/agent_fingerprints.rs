//! The golden fingerprints: Rust gives what an implementation of its own in Python gave.

use proto::block::{self, Extra, Namespace};
use proto::digest::Digest;
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    chains: Vec<Chain>,
    extras: Vec<WithExtras>,
    digests: Vec<Sum>,
}

#[derive(Deserialize)]
struct Chain {
    seed: String,
    model: String,
    adapter: String,
    salt: String,
    block_size: usize,
    tokens: Vec<u32>,
    root: String,
    fingerprints: Vec<String>,
}

#[derive(Deserialize)]
struct WithExtras {
    parent: String,
    tokens: Vec<u32>,
    extras: Vec<(String, i64)>,
    fingerprint: String,
}

#[derive(Deserialize)]
struct Sum {
    members: Vec<String>,
    count: u64,
    sum: (String, String),
}

fn golden() -> anyhow::Result<Golden> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/fingerprints.json");
    Ok(serde_json::from_str(&std::fs::read_to_string(path)?)?)
}

fn number(hex: &str) -> anyhow::Result<u64> {
    Ok(u64::from_str_radix(hex, 16)?)
}

#[test]
fn chains_are_the_golden_ones() -> anyhow::Result<()> {
    let golden = golden()?;
    assert!(golden.chains.len() >= 7 && golden.extras.len() >= 3 && golden.digests.len() >= 4);
    for chain in golden.chains {
        let namespace = Namespace { model: &chain.model, adapter: &chain.adapter, salt: &chain.salt };
        let root = block::root(namespace, number(&chain.seed)?);
        assert_eq!(root, number(&chain.root)?, "root of {:?}", chain.model);
        let expected: Vec<u64> = chain.fingerprints.iter().map(|fp| number(fp)).collect::<Result<_, _>>()?;
        assert_eq!(block::chain(root, chain.block_size, &chain.tokens), expected, "{:?}", chain.model);
    }
    for one in golden.extras {
        let extras: Vec<Extra<'_>> =
            one.extras.iter().map(|(identifier, offset)| Extra { identifier, offset: *offset }).collect();
        assert_eq!(block::next(number(&one.parent)?, &one.tokens, &extras), number(&one.fingerprint)?);
    }
    Ok(())
}

#[test]
fn digests_are_the_golden_ones() -> anyhow::Result<()> {
    for one in golden()?.digests {
        let members: Vec<u64> = one.members.iter().map(|fp| number(fp)).collect::<Result<_, _>>()?;
        let expected = Digest { count: one.count, sum: (number(&one.sum.0)?, number(&one.sum.1)?) };
        assert_eq!(Digest::from_iter(members), expected);
    }
    Ok(())
}
