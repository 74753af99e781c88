//! The keys of the file, and files that it names.

use super::{FleetSource, Model};
use crate::pick::{Mode, Profile};
use anyhow::{Context, bail};
use proto::control::MAX_BUNDLE_BYTES;
use proto::fleet::{self, Entry};
use serde::Deserialize;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Largest configuration or fleet file taken: 4,096 entries of 1 KiB.
pub const MAX_FILE_BYTES: u64 = 4 << 20;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    pub ext_proc: Option<SocketAddr>,
    pub health: Option<SocketAddr>,
    pub http: Option<SocketAddr>,
    pub index: Option<OneOrMany>,
    pub fleet: Option<FleetKey>,
    #[serde(default)]
    pub models: Vec<ModelKey>,
    pub seed: Option<Seed>,
    pub profile: Option<Profile>,
    pub preset: Option<String>,
    pub mode: Option<Mode>,
    #[serde(default)]
    pub weights: WeightKeys,
    #[serde(alias = "maxQueue")]
    pub max_queue: Option<u32>,
    #[serde(alias = "maxUtilization")]
    pub max_utilization: Option<f64>,
    #[serde(default)]
    pub scorers: Vec<ScorerKey>,
    #[serde(default)]
    pub deadline: DeadlineKeys,
    pub body_limit_bytes: Option<usize>,
    pub buffered_limit_bytes: Option<usize>,
    pub render_limit_bytes: Option<usize>,
    pub render_threads: Option<usize>,
    pub utc_offset_minutes: Option<i32>,
    pub token_file: Option<PathBuf>,
    pub index_token_file: Option<PathBuf>,
    #[serde(default)]
    pub insecure: bool,
    pub log_level: Option<String>,
    /// Known from elsewhere, and without effect here: how often an engine reports is set at its agent.
    #[serde(rename = "podReportIntervalMs")]
    pub _report_interval: Option<u64>,
    pub w_cache: Option<f64>,
    pub w_load: Option<f64>,
    pub w_queue: Option<f64>,
    pub w_health: Option<f64>,
    pub w_adapter: Option<f64>,
    #[serde(skip)]
    pub flat: WeightKeys,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WeightKeys {
    #[serde(alias = "w_cache")]
    pub cache: Option<f64>,
    #[serde(alias = "w_load")]
    pub load: Option<f64>,
    #[serde(alias = "w_queue")]
    pub queue: Option<f64>,
    #[serde(alias = "w_health")]
    pub health: Option<f64>,
    #[serde(alias = "w_adapter")]
    pub adapter: Option<f64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DeadlineKeys {
    pub base_ms: Option<u64>,
    pub per_1000_tokens_ms: Option<u64>,
    pub max_ms: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ModelKey {
    pub name: String,
    #[serde(default)]
    pub adapters: Vec<String>,
    pub bundle: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ScorerKey {
    pub name: String,
    pub weight: f64,
    pub cel: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum FleetKey {
    Path(PathBuf),
    List(Vec<Entry>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Seed {
    Number(u64),
    Text(String),
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    pub(super) fn list(self) -> Vec<String> {
        match self {
            OneOrMany::One(one) => vec![one],
            OneOrMany::Many(many) => many,
        }
    }
}

pub(super) fn parse(text: &str) -> anyhow::Result<File> {
    let text = if text.trim().is_empty() { "{}" } else { text };
    let mut file: File = serde_saphyr::from_str(text).map_err(|e| anyhow::anyhow!("{e}"))?;
    file.flat = WeightKeys {
        cache: file.w_cache,
        load: file.w_load,
        queue: file.w_queue,
        health: file.w_health,
        adapter: file.w_adapter,
    };
    Ok(file)
}

/// Reads a fleet list.
///
/// # Errors
/// When the file cannot be read, is no list, or [`fleet::check`] refuses it.
pub fn read_fleet(path: &Path) -> anyhow::Result<Vec<Entry>> {
    let text = read_bounded(path)?;
    // An empty file is an empty fleet: that is what a writer that just truncated it shows, too, for a moment.
    let entries: Vec<Entry> = match text.trim() {
        "" => Vec::new(),
        _ => serde_saphyr::from_str(&text).map_err(|e| anyhow::anyhow!("{e}"))?,
    };
    fleet::check(&entries)?;
    Ok(entries)
}

/// The list at the start, and the file to watch, if it is one.
///
/// # Errors
/// When the file cannot be read or is refused.
pub fn first_fleet(source: &FleetSource) -> anyhow::Result<(Vec<Entry>, Option<PathBuf>)> {
    match source {
        FleetSource::Inline(entries) => Ok((entries.clone(), None)),
        FleetSource::File(path) => {
            let entries = read_fleet(path).with_context(|| format!("the fleet list {} is refused", path.display()))?;
            Ok((entries, Some(path.clone())))
        }
    }
}

/// Reads the bundles that the configuration names: models and bytes.
///
/// # Errors
/// When one cannot be read or is longer than an engine's may be.
pub fn read_bundles(models: &[Model]) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    let mut read = Vec::new();
    for model in models {
        let Some(path) = &model.bundle else { continue };
        let length = std::fs::metadata(path).with_context(|| path.display().to_string())?.len();
        if length > MAX_BUNDLE_BYTES as u64 {
            bail!("{} has {length} bytes; at most {MAX_BUNDLE_BYTES} are taken", path.display());
        }
        read.push((model.name.clone(), std::fs::read(path).with_context(|| path.display().to_string())?));
    }
    Ok(read)
}

/// Reads a seed: decimal, or hexadecimal after `0x`.
///
/// # Errors
/// When the text is neither, or beyond 64 bits.
pub fn parse_seed(text: &str) -> anyhow::Result<u64> {
    let text = text.trim();
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    }
    .with_context(|| format!("{text:?} is no seed: a number below 2^64, decimal or 0x and hexadecimal"))
}

pub(super) fn read_token(path: &Path) -> anyhow::Result<String> {
    let token = read_bounded(path).context("token file")?.trim().to_owned();
    if token.len() < 16 {
        bail!("token file {}: a token has at least 16 characters, this one has {}", path.display(), token.len());
    }
    Ok(token)
}

pub(super) fn read_bounded(path: &Path) -> anyhow::Result<String> {
    use std::io::Read;
    let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
    let mut text = String::new();
    let taken = file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).with_context(|| path.display().to_string())?;
    if taken as u64 > MAX_FILE_BYTES {
        bail!("{} is longer than 4 MiB", path.display());
    }
    Ok(text)
}
