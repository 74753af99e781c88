//! The fleet list's file, looked at twice a second.

use crate::config::{FLEET_POLL, read_fleet};
use proto::fleet::Entry;
use std::path::PathBuf;

/// Watches a file for ever and tells each new list. A list that is refused is logged once, and the last good one stays.
pub async fn watch(path: PathBuf, mut known: Vec<Entry>, tell: impl Fn(Vec<Entry>)) {
    let mut said = String::new();
    loop {
        tokio::time::sleep(FLEET_POLL).await;
        let file = path.clone();
        // The content is compared, not the time of change: two changes within one tick of the clock count too.
        let read = tokio::task::spawn_blocking(move || read_fleet(&file)).await;
        match read.unwrap_or_else(|error| Err(error.into())) {
            Ok(entries) => {
                said.clear();
                if entries != known {
                    tracing::info!(path = %path.display(), entries = entries.len(), "the fleet list changed");
                    known.clone_from(&entries);
                    tell(entries);
                }
            }
            Err(error) => {
                let error = format!("{error:#}");
                if error != said {
                    tracing::error!(path = %path.display(), error, "the fleet list is refused; the last good one stays");
                    said = error;
                }
            }
        }
    }
}
