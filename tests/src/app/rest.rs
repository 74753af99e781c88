//! At rest: does the index hold, for each engine, exactly what is in the engine's own block pool?

use crate::app::journal::Journal;
use crate::app::running::Running;
use crate::edge::{agent, lookup, parts};
use crate::holdings::Known;
use crate::plan::{MODEL, SEED, local};
use anyhow::{Result, ensure};
use proto::block::{Fingerprint, Namespace, root};

/// fp(-1) of everything that the demo sends.
pub fn demo_root() -> Fingerprint {
    root(Namespace { model: MODEL, adapter: "", salt: "" }, SEED)
}

/// All sequences of the run, with the engines' names of their blocks.
///
/// # Errors
/// When vLLM's hashing has ended or gives another number of blocks.
pub async fn known(running: &mut Running, journal: &Journal) -> Result<Known> {
    let mut known = Known::new(demo_root(), parts::BLOCK_SIZE);
    for sequence in &journal.sequences {
        let hashes = running.hasher.hashes(sequence).await?;
        ensure!(known.add(sequence, &hashes), "vLLM names {} blocks of {} tokens", hashes.len(), sequence.len());
    }
    Ok(known)
}

/// Leading blocks that the index credits one engine with, of each known sequence.
///
/// # Errors
/// When the index does not answer.
pub async fn depths(running: &Running, known: &Known, engine: usize) -> Result<Vec<u32>> {
    let mut index = lookup::connect(running.plan.index_grpc)?;
    let id = running.plan.engines[engine].id();
    let mut depths = Vec::new();
    for chain in known.chains() {
        depths.push(lookup::depth(&mut index, &id, demo_root(), parts::BLOCK_SIZE, chain).await?);
    }
    Ok(depths)
}

/// Compares both engines.
///
/// # Errors
/// When a part does not answer. Differences are in the journal.
pub async fn audit(running: &Running, journal: &mut Journal, known: &Known) -> Result<()> {
    running.at_rest().await?;
    println!("\nAt rest: the index against each engine's own block pool");
    for (number, ports) in running.plan.engines.iter().enumerate() {
        let pool = agent::pool(&format!("tcp://{}", local(ports.control))).await?;
        let view = running.view(number).await?;
        let unnamed = view.unnamed.unwrap_or(0);
        let published = running.published(number).await?;
        let depths = depths(running, known, number).await?;
        let compared = known.compare(pool.iter().map(Vec::as_slice), &published, &depths);
        println!("{}: {compared:?}, {unnamed} unnamed", ports.id());
        journal.report.engines += 1;
        journal.report.wrong_blocks += compared.wrong();
        journal.report.unnamed += unnamed;
        if compared.held == 0 {
            journal.faults.push(format!("{} holds nothing after all this: the comparison proves nothing", ports.id()));
        }
    }
    Ok(())
}
