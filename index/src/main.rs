//! `kvatlas-index`: reads its configuration, starts, and stops when told to.

use anyhow::Context;
use clap::Parser;
use index::config::{self, Environment, Flags, FleetSource};
use tokio::signal::unix::{SignalKind, signal};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let flags = Flags::parse();
    let (config, log) = config::load(&flags, &Environment::read())?;
    if flags.check {
        if let FleetSource::File(path) = &config.fleet {
            config::read_fleet(path).with_context(|| format!("the fleet list {} is refused", path.display()))?;
        }
        println!("the configuration is good");
        return Ok(());
    }
    let filter =
        tracing_subscriber::EnvFilter::try_new(&log).with_context(|| format!("the log level {log:?} is refused"))?;
    tracing_subscriber::fmt().json().with_env_filter(filter).with_writer(std::io::stderr).init();
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let running = index::app::start(config).await?;
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    tracing::info!("stopping");
    running.stop();
    Ok(())
}
