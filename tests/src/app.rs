//! The demo: everything set up, started, driven and judged.

use crate::config::Places;
use crate::edge::client::{Client, Kind};
use crate::edge::ports::Ports;
use crate::edge::process::{Process, asked_to_end};
use crate::edge::{install, parts};
use crate::plan::{MODEL, Plan};
use anyhow::Result;
use serde_json::json;
use std::process::ExitCode;

/// What `cargo demo` does.
#[derive(Debug, clap::Parser)]
#[command(name = "cargo demo", about = "Real vLLM engines, kvatlas-index, kvatlas-picker and Envoy on this machine")]
pub struct Demo {
    /// Judge the run, print one JSON object and end, instead of staying up.
    #[arg(long)]
    pub check: bool,
    /// Only set up what the demo needs.
    #[arg(long)]
    pub setup: bool,
}

/// Runs `work` until it ends or somebody asks us to; either way every process is stopped before this returns.
pub async fn to_the_end(work: impl Future<Output = Result<()>>) -> ExitCode {
    let outcome = tokio::select! {
        outcome = work => outcome,
        signal = asked_to_end() => match signal {
            Ok(signal) => {
                eprintln!("\n{signal}: everything is stopped.");
                return ExitCode::from(130);
            }
            Err(error) => Err(error),
        },
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nfailed: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The demo.
///
/// # Errors
/// When something cannot be set up or started, or a judged condition does not hold.
pub async fn demo(demo: Demo) -> Result<()> {
    let places = Places::from_env()?;
    if demo.setup {
        return install::everything(&places).await;
    }
    install::engines(&places).await?;
    let mut ports = Ports::new(!demo.check);
    let plan = Plan::new(&["a", "b"], |wish| ports.take(wish))?;
    drop(ports);
    let mut engines: Vec<Process> = plan.engines.iter().map(|e| parts::engine(&places, e)).collect::<Result<_>>()?;
    for (process, ports) in engines.iter_mut().zip(&plan.engines) {
        parts::engine_ready(process, ports).await?;
    }
    let envoy = parts::envoy(&places, &plan).await?;
    let client = Client::start(&places, &format!("http://127.0.0.1:{}", plan.front))?;
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "return_token_ids": true});
    for _ in 0..4 {
        println!("{:?}", client.send(Kind::Chat, &body).await?);
    }
    let body = json!({"model": MODEL, "prompt": "hello", "max_tokens": 8, "return_token_ids": true, "stream": true, "stream_options": {"include_usage": true}});
    println!("{:?}", client.send(Kind::Completion, &body).await?);
    drop(envoy);
    Ok(())
}
