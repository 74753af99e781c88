//! The demo: everything set up, started, driven and judged.

pub mod bench_agent;
mod concurrent;
pub mod engines;
mod journal;
mod rebirth;
mod rest;
mod running;
mod sequential;
pub mod stages;

use crate::app::journal::Journal;
use crate::app::running::Running;
use crate::config::Places;
use crate::edge::lookup::sample_freshness;
use crate::edge::process::asked_to_end;
use crate::edge::{install, parts};
use crate::plan::{MODEL, local};
use anyhow::{Result, bail};
use std::process::ExitCode;
use tokio::task::JoinSet;

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
                eprintln!("\n{signal}: stopped.");
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
    let _claim = install::claim(&places)?;
    perform(places, demo).await
}

/// The demo in an environment that is claimed.
async fn perform(places: Places, demo: Demo) -> Result<()> {
    if demo.setup {
        return install::everything(&places).await;
    }
    let mut running = Running::start(places, !demo.check).await?;
    let mut journal = Journal::default();
    if demo.check {
        return check(&mut running, journal).await;
    }
    sequential::run(&running, &mut journal).await?;
    println!("\n{}", addresses(&running));
    let signal = asked_to_end().await?;
    println!("\n{signal}: stopping everything");
    Ok(())
}

async fn check(running: &mut Running, mut journal: Journal) -> Result<()> {
    let mut samplers = JoinSet::new();
    for ports in &running.plan.engines {
        let samples = journal.staleness_ms.clone();
        samplers.spawn(sample_freshness(ports.clone(), running.plan.index_grpc, parts::BLOCK_SIZE, samples));
    }
    let mut chats = sequential::run(running, &mut journal).await?;
    // Before the index is killed: what is measured is the index, not its absence.
    samplers.shutdown().await;
    let sequential = journal.report.clone();
    concurrent::run(running, &mut journal).await?;
    let known = rest::known(running, &journal).await?;
    rest::audit(running, &mut journal, &known).await?;
    let audited = journal.report.clone();
    rebirth::run(running, &mut journal, &known, &mut chats).await?;
    running.alive()?;
    // The requests of the rebirth are judged one by one; the report's sums are those of their phases.
    journal.report = crate::report::Report {
        requests: sequential.requests,
        follow_up_turns: sequential.follow_up_turns,
        follow_ups_to_holder: sequential.follow_ups_to_holder,
        predicted_cached_tokens: sequential.predicted_cached_tokens,
        delivered_cached_tokens: sequential.delivered_cached_tokens,
        usage_cached_tokens: sequential.usage_cached_tokens,
        failed_requests: journal.report.failed_requests,
        ..audited
    };
    journal.times();
    let faults = [journal.report.faults(), journal.faults].concat();
    for fault in &faults {
        eprintln!("does not hold: {fault}");
    }
    println!("{}", serde_json::to_string(&journal.report)?);
    if !faults.is_empty() {
        bail!("{} of the judged conditions do not hold; logs are in {}", faults.len(), running.places.logs().display());
    }
    Ok(())
}

/// What a person can try now.
fn addresses(running: &Running) -> String {
    let plan = &running.plan;
    let (front, index, picker) = (local(plan.front), local(plan.index_http), local(plan.picker_http));
    let chat = format!(r#"{{"model":"{MODEL}","messages":[{{"role":"user","content":"Hello"}}],"max_tokens":16}}"#);
    format!(
        "Everything is up. Try:\n\
         \n  curl -s http://{front}/v1/chat/completions -H 'content-type: application/json' -d '{chat}'\n\
         \n  curl -s 'http://{picker}/v1/decisions?limit=3'   # why the last requests went where they went\
         \n  curl -s http://{picker}/v1/explain -d '{chat}'   # where that would go now\
         \n  curl -s http://{picker}/metrics\
         \n  curl -s http://{index}/v1/engines                # what the index knows of both engines\
         \n  curl -s http://{index}/v1/stats                  # sizes, and how fresh its answers are\
         \n\nEngines: {}. Logs: {}\nCtrl-C stops everything.",
        plan.engines.iter().map(|e| format!("{} http://{}", e.id(), local(e.http))).collect::<Vec<_>>().join(", "),
        running.places.logs().display()
    )
}
