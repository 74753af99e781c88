//! The list of engines that index and picker read, inline in their configuration or as a watched file.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Where an engine's cache knowledge comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// The kvatlas agent inside the engine.
    #[default]
    Agent,
    /// The engine's own events.
    Native,
}

/// One pod (or process) of the fleet, as written by people:
/// `- {name: a, address: 127.0.0.1:8101, events: tcp://127.0.0.1:5757, control: tcp://127.0.0.1:5857}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The pod. Unique in the fleet, unless each entry of the name has a rank of its own.
    pub name: String,
    /// Data-parallel rank of the engine `name.rank`. An agent that says another one is not believed. Absent: the rank
    /// that the agent says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// HTTP address, `ip:port`. The picker needs it, the index does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Where its event stream is, `tcp://host:port`. The index needs it, the picker does not; an agent that dials the
    /// index needs none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub events: Option<String>,
    /// Where the agent's control socket is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub control: Option<String>,
    /// Where a native engine's replay socket is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replay: Option<String>,
    /// Agent or native.
    #[serde(default)]
    pub source: Source,
    /// Base model, only where the stream does not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Free labels, for scorers and people.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

impl Entry {
    /// The engine that it is about, as far as the list says: rank 0 where it says none.
    pub fn engine(&self) -> crate::id::EngineId {
        crate::id::EngineId::new(self.name.as_str(), self.rank.unwrap_or(0))
    }
}

/// Why a fleet list is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadFleet {
    /// A name is empty, too long or has control characters.
    #[error("fleet entry {position}: the name {name:?} is empty, longer than 320 bytes or has control characters")]
    BadName {
        /// Position in the list, from 0.
        position: usize,
        /// The name as given, shortened.
        name: String,
    },
    /// Two entries have one name.
    #[error("fleet: the name {0:?} is given twice; give each of its ranks an entry with a rank, or other names")]
    Twice(String),
    /// An address is not `ip:port`.
    #[error("fleet entry {name:?}: {value:?} is not an ip:port, as in 10.0.0.7:8000")]
    BadAddress {
        /// The entry.
        name: String,
        /// The address as given.
        value: String,
    },
    /// A socket address is not `tcp://host:port` or `ipc://path`.
    #[error("fleet entry {name:?}: {field} {value:?} is not of the form tcp://host:port")]
    BadSocket {
        /// The entry.
        name: String,
        /// `events`, `control` or `replay`.
        field: &'static str,
        /// The value as given.
        value: String,
    },
    /// More entries than [`MAX_ENTRIES`].
    #[error("fleet: {0} entries, at most 4096 are taken")]
    TooMany(usize),
}

/// Most entries taken: four times the fleet that one index is planned for (1,024 engines).
pub const MAX_ENTRIES: usize = 4096;

/// Checks a list as a whole: names, addresses, uniqueness.
///
/// # Errors
/// The first fault found, worded for the person who wrote the list.
pub fn check(entries: &[Entry]) -> Result<(), BadFleet> {
    if entries.len() > MAX_ENTRIES {
        return Err(BadFleet::TooMany(entries.len()));
    }
    // By name: the ranks that have entries, or none when one entry stands for the whole pod.
    let mut seen: BTreeMap<&str, Option<BTreeSet<u32>>> = BTreeMap::new();
    for (position, entry) in entries.iter().enumerate() {
        let name = &entry.name;
        if name.is_empty() || name.len() > crate::id::MAX_NAME_BYTES || name.chars().any(char::is_control) {
            return Err(BadFleet::BadName { position, name: name.chars().take(64).collect() });
        }
        let alone = match (seen.get_mut(name.as_str()), entry.rank) {
            (None, rank) => seen.insert(name, rank.map(|rank| BTreeSet::from([rank]))).is_none(),
            (Some(Some(ranks)), Some(rank)) => ranks.insert(rank),
            _ => false,
        };
        if !alone {
            return Err(BadFleet::Twice(name.clone()));
        }
        if let Some(address) = &entry.address
            && address.parse::<std::net::SocketAddr>().is_err()
        {
            return Err(BadFleet::BadAddress { name: name.clone(), value: address.clone() });
        }
        for (field, value) in [("events", &entry.events), ("control", &entry.control), ("replay", &entry.replay)] {
            if let Some(value) = value
                && !is_socket(value)
            {
                return Err(BadFleet::BadSocket { name: name.clone(), field, value: value.clone() });
            }
        }
    }
    Ok(())
}

fn is_socket(value: &str) -> bool {
    if let Some(rest) = value.strip_prefix("tcp://") {
        return rest
            .rsplit_once(':')
            .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|p| p > 0));
    }
    value.strip_prefix("ipc://").is_some_and(|path| !path.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str) -> Entry {
        Entry {
            name: name.into(),
            rank: None,
            address: None,
            events: None,
            control: None,
            replay: None,
            source: Source::Agent,
            model: None,
            labels: BTreeMap::new(),
        }
    }

    #[test]
    fn faults_are_named() {
        assert_eq!(check(&[entry("a"), entry("b")]), Ok(()));
        assert_eq!(check(&[entry("a"), entry("a")]), Err(BadFleet::Twice("a".into())));
        let rank = |rank| Entry { rank: Some(rank), ..entry("a") };
        assert_eq!(check(&[rank(0), rank(1), entry("b")]), Ok(()));
        for twice in [[rank(1), rank(1)], [rank(1), entry("a")], [entry("a"), rank(0)]] {
            assert_eq!(check(&twice), Err(BadFleet::Twice("a".into())));
        }
        assert!(matches!(check(&[entry("")]), Err(BadFleet::BadName { position: 0, .. })));
        let host = Entry { address: Some("pod-a:8000".into()), ..entry("a") };
        assert!(matches!(check(&[host]), Err(BadFleet::BadAddress { .. })));
        let socket = Entry { events: Some("127.0.0.1:5757".into()), ..entry("a") };
        assert!(matches!(check(&[socket]), Err(BadFleet::BadSocket { field: "events", .. })));
    }
}
