//! The fleet list: inline, or a file that is looked at twice a second.

use super::inbox::{Event, Inbox};
use crate::config::{FLEET_POLL, FleetSource, read_fleet};
use proto::fleet::{BadFleet, Entry};
use std::path::PathBuf;
use tokio::sync::{oneshot, watch};

/// Why there is no fleet list to start with.
#[derive(Debug, thiserror::Error)]
pub enum NoFleet {
    /// The file cannot be read, is no list, or has a fault.
    #[error("the fleet list {} is refused: {reason}", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The list in the configuration has a fault.
    #[error(transparent)]
    Inline(#[from] BadFleet),
    /// The writer has stopped.
    #[error("the index's writer has stopped")]
    Stopped,
}

/// Readers see the first list before anything is served: an empty fleet would look like a fleet that lost its engines.
async fn first_list(entries: Vec<Entry>, inbox: &Inbox) -> Result<(), NoFleet> {
    let (seen, shown) = oneshot::channel();
    inbox.send(Event::Fleet(entries, Some(seen)), 0).await;
    shown.await.map_err(|_| NoFleet::Stopped)
}

/// Tells the writer of the list, now and whenever the file changes.
///
/// # Errors
/// When a file cannot be read or is refused at the start. Later on a bad file is logged, and the last good list stays.
pub async fn follow(source: FleetSource, inbox: Inbox, mut stopped: watch::Receiver<bool>) -> Result<(), NoFleet> {
    let path = match source {
        FleetSource::Inline(entries) => {
            proto::fleet::check(&entries)?;
            return first_list(entries, &inbox).await;
        }
        FleetSource::File(path) => path,
    };
    let first = read_fleet(&path).map_err(|e| NoFleet::Refused { path: path.clone(), reason: format!("{e:#}") })?;
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
