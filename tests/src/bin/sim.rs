//! `sim`: one simulated engine with a real agent, for trying routers without a model.
//!
//! ```text
//! cargo run --package harness --bin sim -- --name a --http 127.0.0.1:8101 --bind tcp://127.0.0.1:5757
//! ```

use anyhow::{Context, Result};
use clap::Parser;
use harness::edge::process::asked_to_end;
use harness::edge::sim::{Options, Sim};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// One simulated engine.
#[derive(Debug, Parser)]
struct Flags {
    /// Name in the fleet.
    #[arg(long, default_value = "sim")]
    name: String,
    /// Where HTTP listens.
    #[arg(long, default_value = "127.0.0.1:8101")]
    http: SocketAddr,
    /// Where the agent publishes.
    #[arg(long, default_value = "tcp://127.0.0.1:5757")]
    bind: String,
    /// Where the agent answers.
    #[arg(long, default_value = "tcp://127.0.0.1:5857")]
    control: String,
    /// The served name.
    #[arg(long, default_value = harness::plan::MODEL)]
    model: String,
    /// Adapters that requests may name as their model.
    #[arg(long, value_delimiter = ',')]
    adapters: Vec<String>,
    /// Token ids in a block.
    #[arg(long, default_value_t = 16)]
    block_size: u32,
    /// Blocks in the pool.
    #[arg(long, default_value_t = 4096)]
    blocks: u32,
    /// The deployment's seed.
    #[arg(long, default_value_t = harness::plan::SEED)]
    seed: u64,
    /// Folder with tokenizer.json and tokenizer_config.json; the repository's own by default.
    #[arg(long)]
    tokenizer: Option<PathBuf>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let flags = Flags::parse();
    let folder = flags.tokenizer.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/tokenizer"));
    let read = |name: &str| {
        let path = folder.join(name);
        std::fs::read_to_string(&path).with_context(|| path.display().to_string())
    };
    let sim = Sim::start(Options {
        name: flags.name,
        http: flags.http,
        bind: flags.bind,
        control: flags.control,
        model: flags.model,
        adapters: flags.adapters,
        block_size: flags.block_size,
        blocks: flags.blocks,
        seed: flags.seed,
        tokenizer: (read("tokenizer.json")?, read("tokenizer_config.json")?),
    })
    .await?;
    let (events, control) = sim.agent();
    println!("http {}, events {events}, control {control}; Ctrl-C ends it", sim.http);
    asked_to_end().await?;
    Ok(())
}
