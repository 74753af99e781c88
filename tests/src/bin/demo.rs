//! `cargo demo`: real engines, index, picker and Envoy, set up, driven and judged.

use clap::Parser;
use harness::app::{self, Demo};
use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    app::to_the_end(app::demo(Demo::parse())).await
}
