//! Configuration: a YAML file, the environment over it, flags over both. The only reader of the environment.

use crate::answer::Leases;
use anyhow::{Context, bail};
use clap::Parser;
use proto::fleet::{self, Entry};
use proto::proof::Secret;
use serde::Deserialize;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Largest configuration or fleet file taken: 4,096 entries of 1 KiB.
pub const MAX_FILE_BYTES: u64 = 4 << 20;

/// Flags of `kvatlas-index`.
#[derive(Debug, Clone, Default, Parser)]
#[command(name = "kvatlas-index", version, about = "A precise prefix tree of every engine's KV cache")]
pub struct Flags {
    /// Configuration file (YAML). Without it: defaults.
    #[arg(long)]
    pub config: Option<PathBuf>,
    /// Check the configuration and exit.
    #[arg(long)]
    pub check: bool,
    /// error, warn, info, debug, trace, or a filter as in `info,index=debug`.
    #[arg(long)]
    pub log_level: Option<String>,
    /// Where HTTP listens, `ip:port`.
    #[arg(long)]
    pub http: Option<SocketAddr>,
    /// Where gRPC listens, `ip:port`.
    #[arg(long)]
    pub grpc: Option<SocketAddr>,
    /// Where agents may dial in, `ip:port`. Off by default.
    #[arg(long)]
    pub agents: Option<SocketAddr>,
    /// File with the fleet list (YAML), watched for changes.
    #[arg(long)]
    pub fleet: Option<PathBuf>,
    /// Serve beyond loopback without a token.
    #[arg(long)]
    pub insecure: bool,
}

/// Where the list of engines comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FleetSource {
    /// Written in the configuration.
    Inline(Vec<Entry>),
    /// A file that is watched.
    File(PathBuf),
}

/// What the index runs with.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where HTTP listens; `None`: not at all (embedded mode).
    pub http: Option<SocketAddr>,
    /// Where gRPC listens; `None`: not at all (embedded mode).
    pub grpc: Option<SocketAddr>,
    /// Where agents may dial in; `None`: nowhere.
    pub agents: Option<SocketAddr>,
    /// Take agents that dial in without a proof, under whatever name they say. With a secret nobody is.
    pub discover: bool,
    /// What agents that dial in must prove to know, and what is proved to agents that want it.
    pub secret: Option<Secret>,
    /// The engines.
    pub fleet: FleetSource,
    /// The deployment's seed of fingerprints, the same as the agents'.
    pub seed: u64,
    /// After how long a silence an engine counts as what.
    pub leases: Leases,
    /// Bytes that the table and its sets may take before whole holders are shed.
    pub memory_bytes: u64,
    /// What callers must send as `authorization: Bearer <token>`; `None`: nothing.
    pub token: Option<String>,
    /// Serve beyond loopback without a token.
    pub insecure: bool,
}

impl Default for Config {
    /// Loopback, an empty fleet, no seed, 8 GiB: 1,024 engines x 50,000 blocks x 3 kinds x 32 bytes are 4.9 GB.
    fn default() -> Self {
        Self {
            http: Some(SocketAddr::from(([127, 0, 0, 1], 9400))),
            grpc: Some(SocketAddr::from(([127, 0, 0, 1], 9401))),
            agents: None,
            discover: false,
            secret: None,
            fleet: FleetSource::Inline(Vec::new()),
            seed: 0,
            leases: Leases::default(),
            memory_bytes: 8 << 30,
            token: None,
            insecure: false,
        }
    }
}

/// The file's keys.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    http: Option<SocketAddr>,
    grpc: Option<SocketAddr>,
    agents: Option<SocketAddr>,
    discover: Option<bool>,
    secret_file: Option<PathBuf>,
    fleet: Option<FleetKey>,
    seed: Option<Seed>,
    stale_after_ms: Option<u64>,
    lease_s: Option<u64>,
    memory_bytes: Option<u64>,
    token_file: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum FleetKey {
    Path(PathBuf),
    List(Vec<Entry>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Seed {
    Number(u64),
    Text(String),
}

/// What the environment says.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    /// `KVATLAS_LOG`.
    pub log: Option<String>,
    /// `KVATLAS_SEED`.
    pub seed: Option<String>,
    /// `KVATLAS_SECRET`.
    pub secret: Option<String>,
}

impl Environment {
    /// Reads it.
    pub fn read() -> Self {
        let text = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        Self { log: text("KVATLAS_LOG"), seed: text("KVATLAS_SEED"), secret: text("KVATLAS_SECRET") }
    }
}

/// Everything together: the configuration and the log filter.
///
/// # Errors
/// When a file cannot be read, or a key or value is refused: says which, where and why.
pub fn load(flags: &Flags, environment: &Environment) -> anyhow::Result<(Config, String)> {
    let mut config = Config::default();
    if let Some(path) = &flags.config {
        let text = read_bounded(path).context("the configuration cannot be read")?;
        let file: File = parse(&text).with_context(|| format!("the configuration {} is refused", path.display()))?;
        apply(&mut config, file, path.parent().unwrap_or(Path::new(".")))?;
    }
    if let Some(seed) = &environment.seed {
        config.seed = parse_seed(seed).context("KVATLAS_SEED is refused")?;
    }
    if let Some(secret) = &environment.secret {
        config.secret = Some(Secret::new(secret).context("KVATLAS_SECRET is refused")?);
    }
    config.http = flags.http.or(config.http);
    config.grpc = flags.grpc.or(config.grpc);
    config.agents = flags.agents.or(config.agents);
    if let Some(path) = &flags.fleet {
        config.fleet = FleetSource::File(path.clone());
    }
    config.insecure |= flags.insecure;
    check(&config)?;
    let log = flags.log_level.clone().or(environment.log.clone()).unwrap_or_else(|| "info".into());
    Ok((config, log))
}

fn apply(config: &mut Config, file: File, folder: &Path) -> anyhow::Result<()> {
    config.http = file.http.or(config.http);
    config.grpc = file.grpc.or(config.grpc);
    config.agents = file.agents.or(config.agents);
    config.discover = file.discover.unwrap_or(config.discover);
    if let Some(path) = &file.secret_file {
        let path = folder.join(path);
        let text = read_bounded(&path).with_context(|| format!("secret_file {}", path.display()))?;
        config.secret = Some(Secret::new(&text).with_context(|| format!("secret_file {}", path.display()))?);
    }
    match file.fleet {
        Some(FleetKey::List(entries)) => config.fleet = FleetSource::Inline(entries),
        // Paths in a file are told from where the file is.
        Some(FleetKey::Path(path)) => config.fleet = FleetSource::File(folder.join(path)),
        None => {}
    }
    match file.seed {
        Some(Seed::Number(seed)) => config.seed = seed,
        Some(Seed::Text(text)) => config.seed = parse_seed(&text).context("seed is refused")?,
        None => {}
    }
    if let Some(ms) = file.stale_after_ms {
        config.leases.stale_ms = ms;
    }
    if let Some(s) = file.lease_s {
        config.leases.lease_ms = s.saturating_mul(1000);
    }
    config.memory_bytes = file.memory_bytes.unwrap_or(config.memory_bytes);
    if let Some(path) = file.token_file {
        let path = folder.join(path);
        let token = read_bounded(&path).with_context(|| format!("token_file {}", path.display()))?.trim().to_string();
        if token.len() < 16 {
            bail!("token_file {}: a token has at least 16 characters, this one has {}", path.display(), token.len());
        }
        config.token = Some(token);
    }
    Ok(())
}

/// Checks what the parts of a configuration say together.
///
/// # Errors
/// The first fault, worded for the person who wrote it.
pub fn check(config: &Config) -> anyhow::Result<()> {
    let leases = &config.leases;
    if leases.stale_ms < leases.late_ms {
        bail!("stale_after_ms is {}; it must be at least {} (three heartbeats)", leases.stale_ms, leases.late_ms);
    }
    if leases.lease_ms <= leases.stale_ms {
        bail!("lease_s is {} s; it must be longer than stale_after_ms, {} ms", leases.lease_ms / 1000, leases.stale_ms);
    }
    if config.memory_bytes < 1 << 20 {
        bail!("memory_bytes is {}; it must be at least 1048576", config.memory_bytes);
    }
    if config.token.is_none() && !config.insecure {
        for (face, address) in [("http", config.http), ("grpc", config.grpc)] {
            if let Some(address) = address.filter(|address| !address.ip().is_loopback()) {
                bail!(
                    "{face} is to listen on {address}, beyond loopback, where its answers would tell whether a prompt \
                     was seen: give a token_file, or say --insecure, or listen on 127.0.0.1"
                );
            }
        }
    }
    if config.agents.is_some() && config.secret.is_none() && !config.discover {
        bail!(
            "agents may dial in, but none would be let in: give the secret that they have (secret_file, or \
             KVATLAS_SECRET), or say discover: true to take whoever comes, under whatever name"
        );
    }
    if let FleetSource::Inline(entries) = &config.fleet {
        fleet::check(entries)?;
    }
    Ok(())
}

/// Reads a fleet list.
///
/// # Errors
/// When the file cannot be read, is no list, or [`fleet::check`] refuses it.
pub fn read_fleet(path: &Path) -> anyhow::Result<Vec<Entry>> {
    let text = read_bounded(path)?;
    // An empty file is an empty fleet: that is what a writer that just truncated it shows, too, for a moment.
    let entries: Vec<Entry> = if text.trim().is_empty() { Vec::new() } else { parse(&text)? };
    fleet::check(&entries)?;
    Ok(entries)
}

fn parse<T: serde::de::DeserializeOwned>(text: &str) -> anyhow::Result<T> {
    if text.trim().is_empty() {
        return serde_saphyr::from_str("{}").map_err(|e| anyhow::anyhow!("{e}"));
    }
    serde_saphyr::from_str(text).map_err(|e| anyhow::anyhow!("{e}"))
}

fn read_bounded(path: &Path) -> anyhow::Result<String> {
    use std::io::Read;
    let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
    let mut text = String::new();
    let taken = file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).with_context(|| path.display().to_string())?;
    if taken as u64 > MAX_FILE_BYTES {
        bail!("{} is longer than 4 MiB", path.display());
    }
    Ok(text)
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

/// How often a watched fleet file is looked at.
pub const FLEET_POLL: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;

    fn from_text(text: &str) -> anyhow::Result<Config> {
        let mut config = Config::default();
        apply(&mut config, parse(text)?, Path::new("/etc/kvatlas"))?;
        check(&config)?;
        Ok(config)
    }

    #[test]
    fn every_key_is_taken() -> anyhow::Result<()> {
        let config = from_text(
            "http: 127.0.0.1:1\ngrpc: 127.0.0.1:2\nseed: 0x10\nstale_after_ms: 2000\nlease_s: 60\nmemory_bytes: 2000000\n\
             fleet:\n- {name: a, events: tcp://127.0.0.1:5757, control: tcp://127.0.0.1:5857}\n",
        )?;
        assert_eq!((config.seed, config.leases.stale_ms, config.leases.lease_ms), (16, 2000, 60_000));
        assert!(matches!(config.fleet, FleetSource::Inline(entries) if entries.len() == 1));
        let config = from_text("agents: 0.0.0.0:9402\ndiscover: true")?;
        assert_eq!((config.agents, config.discover), (Some(SocketAddr::from(([0, 0, 0, 0], 9402))), true));
        let config = from_text("fleet: engines.yaml")?;
        assert_eq!(config.fleet, FleetSource::File("/etc/kvatlas/engines.yaml".into()));
        Ok(())
    }

    #[test]
    fn faults_say_where_and_why() {
        for (text, words) in [
            ("sede: 1", "sede"),
            ("http: 9400", "http"),
            ("seed: xyz", "seed"),
            ("stale_after_ms: 10", "three heartbeats"),
            ("lease_s: 1", "longer than stale_after_ms"),
            ("http: 0.0.0.0:9400", "beyond loopback"),
            ("grpc: 0.0.0.0:9401", "beyond loopback"),
            ("fleet:\n- {name: a}\n- {name: a}", "twice"),
            ("token_file: /nowhere", "nowhere"),
            ("secret_file: /nowhere", "nowhere"),
            ("agents: 0.0.0.0:9402", "discover: true"),
        ] {
            let error = from_text(text).err().map(|e| format!("{e:#}")).unwrap_or_default();
            assert!(error.contains(words), "{text:?}: {error:?}");
        }
    }

    #[test]
    fn flags_win_over_the_environment() -> anyhow::Result<()> {
        let environment = Environment { log: Some("warn".into()), seed: Some("7".into()), secret: None };
        let (config, log) = load(&Flags::default(), &environment)?;
        assert_eq!((config.seed, log.as_str()), (7, "warn"));
        let short = Environment { secret: Some("short".into()), ..Environment::default() };
        let refused = load(&Flags::default(), &short).err().map(|e| format!("{e:#}")).unwrap_or_default();
        assert!(refused.contains("KVATLAS_SECRET") && !refused.contains("short"), "{refused}");
        let secret = Environment { secret: Some("0123456789abcdef".into()), ..Environment::default() };
        assert!(load(&Flags { agents: Some(([0, 0, 0, 0], 9402).into()), ..Flags::default() }, &secret).is_ok());
        let flags = Flags { log_level: Some("debug".into()), ..Flags::default() };
        assert_eq!(load(&flags, &environment)?.1, "debug");
        Ok(())
    }
}
