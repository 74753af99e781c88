//! `cargo verify`: all tests, in stages.

use clap::Parser;
use harness::app::stages::{Verify, verify};
use harness::app::to_the_end;
use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    to_the_end(verify(Verify::parse())).await
}
