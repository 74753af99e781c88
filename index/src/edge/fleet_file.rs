//! The fleet list: inline, or a file that is looked at twice a second.

use super::inbox::{Event, Inbox};
use crate::config::{FLEET_POLL, FleetSource, read_fleet};
use anyhow::Context;
use proto::fleet::Entry;
use tokio::sync::{oneshot, watch};

/// Readers see the first list before anything is served: an empty fleet would look like a fleet that lost its engines.
async fn first_list(entries: Vec<Entry>, inbox: &Inbox) -> anyhow::Result<()> {
    let (seen, shown) = oneshot::channel();
    inbox.send(Event::Fleet(entries, Some(seen)), 0).await;
    shown.await.context("the index's writer has stopped")
}

/// Tells the writer of the list, now and whenever the file changes.
///
/// # Errors
/// When a file cannot be read or is refused at the start. Later on a bad file is logged, and the last good list stays.
pub async fn follow(source: FleetSource, inbox: Inbox, mut stopped: watch::Receiver<bool>) -> anyhow::Result<()> {
    let path = match source {
        FleetSource::Inline(entries) => {
            proto::fleet::check(&entries)?;
            return first_list(entries, &inbox).await;
        }
        FleetSource::File(path) => path,
    };
    let first = read_fleet(&path).with_context(|| format!("the fleet list {} is refused", path.display()))?;
    first_list(first.clone(), &inbox).await?;
    tokio::spawn(async move {
        let mut known = first;
        let mut said = String::new();
        loop {
            tokio::select! {
                _ = tokio::time::sleep(FLEET_POLL) => {}
                _ = stopped.wait_for(|stopped| *stopped) => return,
            }
            let file = path.clone();
            // The content is compared, not the time of change: two changes within one tick of the clock count too.
            let read = tokio::task::spawn_blocking(move || read_fleet(&file)).await;
            match read.unwrap_or_else(|e| Err(e.into())) {
                Ok(entries) if entries != known => {
                    tracing::info!(path = %path.display(), engines = entries.len(), "the fleet list changed");
                    known = entries.clone();
                    said.clear();
                    inbox.send(Event::Fleet(entries, None), 0).await;
                }
                Ok(_) => said.clear(),
                Err(error) => {
                    let error = format!("{error:#}");
                    if error != said {
                        tracing::error!(path = %path.display(), error, "the fleet list is refused; the last good one stays");
                        said = error;
                    }
                }
            }
        }
    });
    Ok(())
}
