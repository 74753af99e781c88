//! `cargo bench-agent`: what the agent costs an engine.

use crate::config::Places;
use crate::edge::install;
use crate::edge::process::Process;
use anyhow::Result;
use std::process::Command;
use std::time::Duration;

/// Each part is measured in minutes.
const LIMIT: Duration = Duration::from_secs(60 * 60);

/// What is measured.
#[derive(Debug, clap::Parser)]
#[command(name = "cargo bench-agent", about = "What the agent costs an engine: in its hooks, and in its throughput")]
pub struct BenchAgent {
    /// Rounds of the hooks, each with and without.
    #[arg(long, default_value_t = 9)]
    pub rounds: u32,
    /// Starts of a real engine with the agent, and as many without; 0 leaves this part out.
    #[arg(long, default_value_t = 3)]
    pub engines: u32,
}

/// Installs the optimized wheel beside vLLM and measures. The numbers are for reading: nothing is judged.
///
/// # Errors
/// When a part cannot be installed, or a measurement fails.
pub async fn bench_agent(bench: BenchAgent) -> Result<()> {
    let places = Places::from_env()?;
    let _claim = install::claim(&places)?;
    install::engines(&places).await?;
    install::release_wheel(&places).await?;
    let script = |name: &str| {
        let mut command = Command::new(places.python());
        command.current_dir(&places.root).args(["-W", "ignore"]).arg(format!("tests/python/{name}"));
        command
    };
    let mut hooks = script("bench_hooks.py");
    hooks.args(["--rounds", &bench.rounds.to_string()]);
    Process::show("bench_hooks", &mut hooks)?.finish(LIMIT).await?;
    if bench.engines > 0 {
        let mut engine = script("bench_engine.py");
        engine.arg(places.model()).args(["--rounds", &bench.engines.to_string()]);
        Process::show("bench_engine", &mut engine)?.finish(LIMIT).await?;
    }
    Ok(())
}
