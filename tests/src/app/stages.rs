//! `cargo verify`: everything that proves kvatlas right, in stages.

use crate::app::engines::{self, Engines};
use crate::app::{Demo, perform};
use crate::config::Places;
use crate::edge::install;
use crate::edge::process::Process;
use anyhow::{Result, bail};
use std::process::Command;
use std::time::{Duration, Instant};

/// What hangs is ended, so that it costs one stage and not the run. Cargo downloads and compiles everything on a new
/// machine, and the Python tests take a minute and a half.
const CARGO_LIMIT: Duration = Duration::from_secs(40 * 60);
const PYTEST_LIMIT: Duration = Duration::from_secs(15 * 60);

/// What is verified, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Stage {
    /// `cargo fmt --check`, where rustfmt is installed.
    Format,
    /// `cargo clippy` without a warning, where clippy is installed.
    Clippy,
    /// `cargo test --workspace`.
    Rust,
    /// The wheel, and the Python tests against it.
    Python,
    /// The agent on the cache managers of several vLLMs, compared after every step.
    Engines,
    /// `cargo demo --check`, and which processes of real engines have an agent.
    E2e,
}

/// What `cargo verify` does.
#[derive(Debug, clap::Parser)]
#[command(name = "cargo verify", about = "All tests: Rust, Python against the built wheel, and the real run, judged")]
pub struct Verify {
    /// Only these stages; all of them when none is given.
    #[arg(long)]
    pub stage: Vec<Stage>,
    /// With which vLLMs the agent is compared in the stage `engines`.
    #[arg(long, value_enum, default_value = "some")]
    pub engines: Engines,
}

/// Runs the stages. One that fails does not stop the others.
///
/// # Errors
/// When a stage fails; they are named.
pub async fn verify(verify: Verify) -> Result<()> {
    let places = Places::from_env()?;
    let _claim = install::claim(&places)?;
    let all = [Stage::Format, Stage::Clippy, Stage::Rust, Stage::Python, Stage::Engines, Stage::E2e];
    let mut lines = Vec::new();
    let mut failed = Vec::new();
    for stage in all.into_iter().filter(|s| verify.stage.is_empty() || verify.stage.contains(s)) {
        eprintln!("\n==== {stage:?}");
        let begun = Instant::now();
        let outcome = run(&places, stage, verify.engines).await;
        let word = match &outcome {
            Ok(true) => "ok",
            Ok(false) => "not installed, left out",
            Err(error) => {
                eprintln!("{error:#}");
                failed.push(format!("{stage:?}"));
                "FAILED"
            }
        };
        lines.push(format!("{:<8} {:>6.1} s  {word}", format!("{stage:?}"), begun.elapsed().as_secs_f64()));
    }
    println!("\n{}", lines.join("\n"));
    if !failed.is_empty() {
        bail!("stages that failed: {}", failed.join(", "));
    }
    Ok(())
}

/// False when the tool of the stage is not installed.
async fn run(places: &Places, stage: Stage, which: Engines) -> Result<bool> {
    match stage {
        Stage::Format if !has(places, "fmt") => return Ok(false),
        Stage::Format => cargo(places, &["fmt", "--all", "--check"]).await?,
        Stage::Clippy if !has(places, "clippy") => return Ok(false),
        Stage::Clippy => {
            cargo(places, &["clippy", "--workspace", "--all-targets", "--", "--deny", "warnings"]).await?;
            // What only the wheel has.
            cargo(places, &["clippy", "--package", "agent", "--features", "python", "--", "--deny", "warnings"])
                .await?;
        }
        Stage::Rust => cargo(places, &["test", "--workspace"]).await?,
        Stage::Python => {
            install::engines(places).await?;
            install::wheel(places).await?;
            pytest(places, "tests/python").await?;
        }
        Stage::Engines => {
            install::engines(places).await?;
            install::wheel(places).await?;
            install::programs(places).await?;
            engines::compare(places, which).await?;
        }
        Stage::E2e => {
            perform(places.clone(), Demo { check: true, setup: false }).await?;
            pytest(places, "tests/python/test_processes.py").await?;
        }
    }
    Ok(true)
}

/// Python tests against the wheel. Those that start engines run only when their file is named.
async fn pytest(places: &Places, what: &str) -> Result<()> {
    let mut command = Command::new(places.python());
    command.current_dir(&places.root).args(["-m", "pytest", "-p", "no:cacheprovider", what]);
    if what.ends_with(".py") {
        command.env("KVATLAS_E2E_PROCESSES", "1");
    }
    Process::show("pytest", &mut command)?.finish(PYTEST_LIMIT).await.map(|_| ())
}

fn has(places: &Places, tool: &str) -> bool {
    Command::new(&places.cargo).args([tool, "--version"]).output().is_ok_and(|output| output.status.success())
}

async fn cargo(places: &Places, arguments: &[&str]) -> Result<()> {
    let mut command = Command::new(&places.cargo);
    command.current_dir(&places.root).args(arguments);
    Process::show(&format!("cargo {}", arguments[0]), &mut command)?.finish(CARGO_LIMIT).await.map(|_| ())
}
