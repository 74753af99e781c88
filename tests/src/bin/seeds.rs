//! Writes what the corpus of `tests/fuzz` begins with; see `harness::fuzz::seeds`.

use anyhow::{Context, Result};
use std::path::Path;

fn main() -> Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    for seed in harness::fuzz::seeds::all() {
        let folder = corpus.join(seed.target);
        std::fs::create_dir_all(&folder)?;
        let path = folder.join(&seed.name);
        std::fs::write(&path, &seed.bytes).with_context(|| path.display().to_string())?;
    }
    Ok(())
}
