//! `kvatlas-picker`: tells Envoy which engine already holds a prompt.

use anyhow::Context;
use clap::Parser;
use picker::config::{self, Environment, Flags};
use tracing_subscriber::EnvFilter;

fn main() -> anyhow::Result<()> {
    // SAFETY: the first statement of the program, so there is no other thread.
    unsafe { config::tokenize_on_one_thread() };
    let flags = Flags::parse();
    let (config, log) = config::load(&flags, &Environment::read())?;
    if flags.check {
        println!("the configuration is good");
        return Ok(());
    }
    let filter = EnvFilter::try_new(&log).with_context(|| format!("{log:?} is no log level or filter"))?;
    tracing_subscriber::fmt().json().flatten_event(true).with_env_filter(filter).with_writer(std::io::stderr).init();
    tokio::runtime::Runtime::new()?.block_on(async {
        let handle = picker::app::start(config).await?;
        let mut term = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        tokio::select! {
            interrupted = tokio::signal::ctrl_c() => interrupted?,
            _ = term.recv() => {}
        }
        handle.stop().await;
        Ok(())
    })
}
