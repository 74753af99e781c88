//! `cargo bench-agent`: what the agent costs an engine.

use clap::Parser;
use harness::app::bench_agent::{BenchAgent, bench_agent};
use harness::app::to_the_end;
use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    to_the_end(bench_agent(BenchAgent::parse())).await
}
