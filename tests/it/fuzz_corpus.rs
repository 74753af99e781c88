//! Every target of the fuzzers, over every file of the corpus: what was once found stays found.

use harness::fuzz::{TARGETS, seeds};
use std::collections::BTreeMap;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus")
}

/// The files of one target, in order of their names.
fn files(target: &str) -> BTreeMap<String, Vec<u8>> {
    let folder = corpus().join(target);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let file = |entry: std::fs::DirEntry| {
        let bytes = std::fs::read(entry.path()).unwrap_or_else(|e| panic!("{}: {e}", entry.path().display()));
        (entry.file_name().to_string_lossy().into_owned(), bytes)
    };
    entries.map(|entry| file(entry.unwrap_or_else(|e| panic!("{}: {e}", folder.display())))).collect()
}

#[test]
fn every_target_takes_every_file_of_its_corpus() {
    for (target, run) in TARGETS {
        let files = files(target);
        assert!(files.len() >= 5, "{target}: a corpus of {} files tests little", files.len());
        for (name, bytes) in files {
            assert!(catch_unwind(|| run(&bytes)).is_ok(), "{target}/{name} fails");
        }
    }
}

/// A file that is cut, or whose bytes are changed, is as good as a new one: the neighbours of the corpus.
#[test]
fn and_their_neighbours() {
    for (target, run) in TARGETS {
        for (name, bytes) in files(target) {
            for at in (0..bytes.len()).step_by(bytes.len() / 24 + 1) {
                let mut changed = bytes.clone();
                changed[at] ^= 0x55;
                assert!(catch_unwind(|| run(&changed)).is_ok(), "{target}/{name} with byte {at} changed fails");
                assert!(catch_unwind(|| run(&bytes[..at])).is_ok(), "{target}/{name} cut at {at} fails");
            }
        }
    }
}

#[test]
fn the_seeds_are_in_the_repository() {
    let mut known: BTreeMap<&str, BTreeMap<String, Vec<u8>>> = BTreeMap::new();
    for (target, _) in TARGETS {
        known.insert(target, files(target));
    }
    for seed in seeds::all() {
        let file = known.get(seed.target).and_then(|files| files.get(&seed.name));
        assert_eq!(file, Some(&seed.bytes), "{}/{}: run `cargo run -p harness --bin seeds`", seed.target, seed.name);
    }
}

/// What is in the corpus is what its names say: real payloads are read, and do something.
#[test]
fn real_payloads_are_read() {
    let mut stored = 0;
    for (name, bytes) in files("native_batch").into_iter().filter(|(name, _)| name.starts_with("vllm-")) {
        let batch = proto::native::dialect::EventBatch::decode(&bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!((batch.unknown, batch.unreadable), (0, 0), "{name}");
        stored += batch.events.len();
    }
    assert!(stored > 20, "{stored} events");
}
