//! Names: engines, epochs, kinds of sets.

use serde::{Deserialize, Serialize};

/// One process life of one engine. Of two epochs that speak under one name the later start wins; equal starts are
/// decided by the random bits, so that every receiver decides alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Epoch {
    /// Start of the process, milliseconds since the Unix epoch on the engine's own clock.
    pub start_ms: u64,
    /// 64 random bits, drawn once per process life.
    pub random: u64,
}

impl std::fmt::Display for Epoch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{:016x}", self.start_ms, self.random)
    }
}

/// Which of an engine's sets an operation speaks of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SetKind {
    /// Reachable on GPU alone, by the engine's first spec of full attention. Closed along that spec's blocks.
    Gpu,
    /// In *gpu*, or resident in a lower tier with the parent in *any*. Closed as *gpu* is.
    Any,
    /// A further set of an engine with several kinds of attention; which one, its [`crate::hit::Hits`] say. Not
    /// closed, so never bisected across engines.
    S1,
    /// As above.
    S2,
    /// As above.
    S3,
    /// As above.
    S4,
    /// As above.
    S5,
    /// As above.
    S6,
    /// As above.
    S7,
}

impl SetKind {
    /// How many kinds there are.
    pub const COUNT: usize = 9;
    /// All kinds, in the order of [`SetKind::index`].
    pub const ALL: [SetKind; SetKind::COUNT] = [
        SetKind::Gpu,
        SetKind::Any,
        SetKind::S1,
        SetKind::S2,
        SetKind::S3,
        SetKind::S4,
        SetKind::S5,
        SetKind::S6,
        SetKind::S7,
    ];

    /// From 0: a position for arrays that hold one thing a kind.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The kind of set number `set` of an engine's specs: 0 is *gpu*. `None` beyond the last.
    pub fn of_spec(set: u8) -> Option<SetKind> {
        match set {
            0 => Some(SetKind::Gpu),
            set => SetKind::ALL.get(usize::from(set) + 1).copied(),
        }
    }

    /// Is it closed, so that prompts are bisected in it across engines?
    pub const fn closed(self) -> bool {
        matches!(self, SetKind::Gpu | SetKind::Any)
    }

    /// The name used in logs, metrics and JSON.
    pub const fn name(self) -> &'static str {
        ["gpu", "any", "s1", "s2", "s3", "s4", "s5", "s6", "s7"][self as usize]
    }
}

/// `name.rank`: one vLLM engine core, that is a pod and a data-parallel rank.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct EngineId {
    /// The pod (or process) name.
    pub name: String,
    /// Data-parallel rank, 0 without data parallelism.
    pub rank: u32,
}

/// Longest engine name accepted, in bytes: a Kubernetes pod name (253) with room for a namespace.
pub const MAX_NAME_BYTES: usize = 320;

/// Why a text is no [`EngineId`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadEngineId {
    /// No `.rank` at the end.
    #[error("an engine is written name.rank, as in pod-a.0; {0:?} has no rank at its end")]
    NoRank(String),
    /// Empty, longer than [`MAX_NAME_BYTES`], or with control characters.
    #[error("the engine name {0:?} is empty, too long or has control characters")]
    BadName(String),
}

impl EngineId {
    /// An engine of a pod. The name is checked when it is parsed from text, not here.
    pub fn new(name: impl Into<String>, rank: u32) -> Self {
        Self { name: name.into(), rank }
    }
}

impl std::fmt::Display for EngineId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.name, self.rank)
    }
}

impl std::str::FromStr for EngineId {
    type Err = BadEngineId;

    fn from_str(text: &str) -> Result<Self, BadEngineId> {
        let (name, rank) = text.rsplit_once('.').ok_or_else(|| BadEngineId::NoRank(text.chars().take(64).collect()))?;
        let rank = rank.parse().map_err(|_| BadEngineId::NoRank(text.chars().take(64).collect()))?;
        if name.is_empty() || name.len() > MAX_NAME_BYTES || name.chars().any(char::is_control) {
            return Err(BadEngineId::BadName(name.chars().take(64).collect()));
        }
        Ok(Self::new(name, rank))
    }
}

impl TryFrom<String> for EngineId {
    type Error = BadEngineId;
    fn try_from(text: String) -> Result<Self, BadEngineId> {
        text.parse()
    }
}

impl From<EngineId> for String {
    fn from(id: EngineId) -> String {
        id.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_names_round_trip() {
        for text in ["a.0", "vllm-7f9c.ns.15", "10.0.0.1.3"] {
            assert_eq!(text.parse::<EngineId>().map(|id| id.to_string()).as_deref(), Ok(text));
        }
        for text in ["a", "a.", ".0", "a.x", "a.-1", "a\n.0"] {
            assert!(text.parse::<EngineId>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn the_later_start_is_the_greater_epoch() {
        assert!(Epoch { start_ms: 2, random: 0 } > Epoch { start_ms: 1, random: 9 });
    }
}
