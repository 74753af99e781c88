//! Configuration: a YAML file, the environment over it, flags over both. The only reader of the environment.

use crate::pick::{Mode, Policy, Profile};
use crate::score::{Factors, PRESETS, Weights};
use anyhow::{Context, bail};
use clap::Parser;
use proto::fleet::{self, Entry};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

mod file;

pub use file::{MAX_FILE_BYTES, first_fleet, parse_seed, read_bundles, read_fleet};

/// How often a watched fleet file is looked at.
pub const FLEET_POLL: Duration = Duration::from_millis(500);

/// Flags of `kvatlas-picker`.
#[derive(Debug, Clone, Default, Parser)]
#[command(name = "kvatlas-picker", version, about = "Tells Envoy which engine already holds a prompt")]
pub struct Flags {
    /// Configuration file (YAML). Without it: defaults.
    #[arg(long)]
    pub config: Option<PathBuf>,
    /// Check the configuration and exit.
    #[arg(long)]
    pub check: bool,
    /// error, warn, info, debug, trace, or a filter as in `info,picker=debug`.
    #[arg(long)]
    pub log_level: Option<String>,
    /// Where ext_proc listens, `ip:port`.
    #[arg(long)]
    pub ext_proc: Option<SocketAddr>,
    /// Where gRPC health listens, `ip:port`.
    #[arg(long)]
    pub health: Option<SocketAddr>,
    /// Where HTTP listens, `ip:port`.
    #[arg(long)]
    pub http: Option<SocketAddr>,
    /// `embedded`, or addresses of indexes, comma-separated, the preferred one first.
    #[arg(long, value_delimiter = ',')]
    pub index: Vec<String>,
    /// File with the fleet list (YAML), watched for changes.
    #[arg(long)]
    pub fleet: Option<PathBuf>,
    /// Serve the debug face beyond loopback without a token.
    #[arg(long)]
    pub insecure: bool,
}

/// Where cache knowledge comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IndexSource {
    /// Nowhere: load only, by this picker's own placements.
    None,
    /// An index inside this process.
    Embedded,
    /// `host:port` of indexes, the preferred one first.
    Addresses(Vec<String>),
}

/// Where the list of engines comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FleetSource {
    /// Written in the configuration.
    Inline(Vec<Entry>),
    /// A file that is watched.
    File(PathBuf),
}

/// How long a decision may take: `base + per_1000_tokens * prompt tokens / 1000`, at most `max`. In full-duplex mode
/// none of Envoy's own timeouts apply, so this is the only bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadline {
    /// For any request.
    pub base: Duration,
    /// More for each 1,000 tokens of the prompt.
    pub per_1000_tokens: Duration,
    /// At most.
    pub max: Duration,
}

impl Deadline {
    /// The time for a prompt of so many tokens.
    pub fn of(&self, tokens: usize) -> Duration {
        let more = self.per_1000_tokens.as_nanos() * tokens as u128 / 1000;
        (self.base + Duration::from_nanos(u64::try_from(more).unwrap_or(u64::MAX))).min(self.max)
    }
}

/// A model of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    /// Its first served name.
    pub name: String,
    /// Adapters on it that engines may not have loaded yet.
    pub adapters: Vec<String>,
    /// A bundle file that overrides what engines tell, and the only way for native ones.
    pub bundle: Option<PathBuf>,
}

/// What the picker runs with.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where ext_proc listens.
    pub ext_proc: SocketAddr,
    /// Where gRPC health listens.
    pub health: SocketAddr,
    /// Where HTTP listens.
    pub http: SocketAddr,
    /// Where cache knowledge comes from.
    pub index: IndexSource,
    /// The engines.
    pub fleet: FleetSource,
    /// Models told here.
    pub models: Vec<Model>,
    /// The deployment's seed of fingerprints, the same as the agents'.
    pub seed: u64,
    /// How engines are picked.
    pub policy: Policy,
    /// GPU utilization that counts as full.
    pub max_utilization: f64,
    /// Bound on a decision.
    pub deadline: Deadline,
    /// Longest body, in bytes.
    pub body_limit: usize,
    /// Most bytes of bodies held at once, over all requests; beyond it requests are shed.
    pub buffered_limit: usize,
    /// Most bytes of bodies that wait to be tokenized; beyond it requests are routed by load.
    pub render_limit: usize,
    /// Threads that tokenize.
    pub render_threads: usize,
    /// The engines' time zone, minutes east of UTC, for templates that print the date.
    pub utc_offset_minutes: i32,
    /// What callers of the debug face must send as `authorization: Bearer <token>`.
    pub token: Option<String>,
    /// Serve it beyond loopback without a token.
    pub insecure: bool,
    /// What the indexes want as `authorization: Bearer <token>`.
    pub index_token: Option<String>,
}

/// What the environment says.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    /// `EPP_LOG_LEVEL`, else `KVATLAS_LOG`.
    pub log: Option<String>,
    /// `KVATLAS_SEED`.
    pub seed: Option<String>,
}

impl Environment {
    /// Reads it.
    pub fn read() -> Self {
        let text = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        Self { log: text("EPP_LOG_LEVEL").or_else(|| text("KVATLAS_LOG")), seed: text("KVATLAS_SEED") }
    }
}

/// Makes the tokenizer encode each text on the thread that asked. With its own threads a long text costs milliseconds
/// on a busy machine, and the picker has a thread for each core already.
///
/// # Safety
/// To be called before any other thread exists, since the environment belongs to all of them.
pub unsafe fn tokenize_on_one_thread() {
    // SAFETY: the caller promises that there is no other thread.
    unsafe { std::env::set_var("FASTOKENS_BPE_THREADS", "1") };
}

/// Everything together: the configuration and the log filter.
///
/// # Errors
/// When a file cannot be read, or a key or value is refused: says which, where and why.
pub fn load(flags: &Flags, environment: &Environment) -> anyhow::Result<(Config, String)> {
    let (text, folder) = match &flags.config {
        Some(path) => {
            let text = file::read_bounded(path).context("the configuration cannot be read")?;
            (text, path.parent().unwrap_or(Path::new(".")).to_path_buf())
        }
        None => (String::new(), PathBuf::from(".")),
    };
    let named = flags.config.as_deref().unwrap_or(Path::new("(none)")).display().to_string();
    let (mut config, log) =
        from_text(&text, &folder).with_context(|| format!("the configuration {named} is refused"))?;
    if let Some(seed) = &environment.seed {
        config.seed = parse_seed(seed).context("KVATLAS_SEED is refused")?;
    }
    config.ext_proc = flags.ext_proc.unwrap_or(config.ext_proc);
    config.health = flags.health.unwrap_or(config.health);
    config.http = flags.http.unwrap_or(config.http);
    if !flags.index.is_empty() {
        config.index = index_source(flags.index.clone());
    }
    if let Some(path) = &flags.fleet {
        config.fleet = FleetSource::File(path.clone());
    }
    config.insecure |= flags.insecure;
    check(&config)?;
    let log = flags.log_level.clone().or(environment.log.clone()).or(log).unwrap_or_else(|| "info".into());
    Ok((config, log))
}

fn index_source(given: Vec<String>) -> IndexSource {
    match given.as_slice() {
        [] => IndexSource::None,
        [one] if one == "embedded" => IndexSource::Embedded,
        [one] if one == "none" => IndexSource::None,
        _ => IndexSource::Addresses(given),
    }
}

/// A configuration from the text of a file in `folder`, and its log filter. [`check`] is still to be asked.
///
/// # Errors
/// When a key or value is refused.
pub fn from_text(text: &str, folder: &Path) -> anyhow::Result<(Config, Option<String>)> {
    let file: file::File = file::parse(text)?;
    let local = |port| SocketAddr::from(([127, 0, 0, 1], port));
    let (weights, max_queue) = weights(&file)?;
    let more: Vec<(String, f64)> = file.scorers.iter().map(|s| (s.name.clone(), s.weight)).collect();
    if let Some(scorer) = file.scorers.iter().find(|s| s.cel.is_some()) {
        bail!(
            "scorers: {:?} has a cel expression, which this version does not take; use a built-in scorer",
            scorer.name
        );
    }
    let policy = Policy {
        factors: Factors::new(weights, &more).context("weights")?,
        max_queue,
        profile: file.profile.unwrap_or(Profile::FiveFactor),
        mode: file.mode.unwrap_or(Mode::Route),
        crowding: 1.0,
    };
    let millis = Duration::from_millis;
    let config = Config {
        ext_proc: file.ext_proc.unwrap_or(local(9002)),
        health: file.health.unwrap_or(local(9003)),
        http: file.http.unwrap_or(local(9090)),
        index: index_source(file.index.map(file::OneOrMany::list).unwrap_or_default()),
        fleet: match file.fleet {
            Some(file::FleetKey::List(entries)) => FleetSource::Inline(entries),
            // Paths in a file are told from where the file is.
            Some(file::FleetKey::Path(path)) => FleetSource::File(folder.join(path)),
            None => FleetSource::Inline(Vec::new()),
        },
        models: file
            .models
            .into_iter()
            .map(|m| Model { name: m.name, adapters: m.adapters, bundle: m.bundle.map(|b| folder.join(b)) })
            .collect(),
        seed: match file.seed {
            Some(file::Seed::Number(seed)) => seed,
            Some(file::Seed::Text(text)) => parse_seed(&text).context("seed is refused")?,
            None => 0,
        },
        policy,
        max_utilization: file.max_utilization.unwrap_or(1.0),
        deadline: Deadline {
            base: millis(file.deadline.base_ms.unwrap_or(20)),
            per_1000_tokens: millis(file.deadline.per_1000_tokens_ms.unwrap_or(2)),
            max: millis(file.deadline.max_ms.unwrap_or(500)),
        },
        body_limit: file.body_limit_bytes.unwrap_or(16 << 20),
        // 32 of the largest bodies.
        buffered_limit: file.buffered_limit_bytes.unwrap_or(512 << 20),
        // 4 of them: about a second of work for one thread.
        render_limit: file.render_limit_bytes.unwrap_or(64 << 20),
        render_threads: match file.render_threads {
            Some(threads) => threads,
            None => std::thread::available_parallelism().map_or(2, usize::from).min(32),
        },
        utc_offset_minutes: file.utc_offset_minutes.unwrap_or(0),
        token: match &file.token_file {
            Some(path) => Some(file::read_token(&folder.join(path))?),
            None => None,
        },
        insecure: file.insecure,
        index_token: match &file.index_token_file {
            Some(path) => Some(file::read_token(&folder.join(path))?),
            None => None,
        },
    };
    Ok((config, file.log_level))
}

fn weights(file: &file::File) -> anyhow::Result<(Weights, u32)> {
    let (mut weights, mut max_queue) = (Weights::default(), 20);
    if let Some(name) = &file.preset {
        let Some((_, preset, queue)) = PRESETS.iter().find(|(known, _, _)| known == name) else {
            let names: Vec<&str> = PRESETS.iter().map(|p| p.0).collect();
            bail!("preset: there is no {name:?}; there are {}", names.join(", "));
        };
        (weights, max_queue) = (*preset, *queue);
    }
    for given in [&file.weights, &file.flat] {
        weights.cache = given.cache.unwrap_or(weights.cache);
        weights.load = given.load.unwrap_or(weights.load);
        weights.queue = given.queue.unwrap_or(weights.queue);
        weights.health = given.health.unwrap_or(weights.health);
        weights.adapter = given.adapter.unwrap_or(weights.adapter);
    }
    Ok((weights, file.max_queue.unwrap_or(max_queue)))
}

/// Checks what the parts of a configuration say together.
///
/// # Errors
/// The first fault, worded for the person who wrote it.
pub fn check(config: &Config) -> anyhow::Result<()> {
    if config.policy.max_queue == 0 {
        bail!("max_queue is 0: every engine would always be full; give at least 1");
    }
    if !(config.max_utilization > 0.0 && config.max_utilization <= 1.0) {
        bail!("max_utilization is {}; it must be above 0 and at most 1", config.max_utilization);
    }
    if config.deadline.base.is_zero() || config.deadline.max < config.deadline.base {
        bail!("deadline: base_ms must be at least 1 and max_ms at least base_ms");
    }
    if config.body_limit == 0 || config.buffered_limit < config.body_limit {
        bail!("body_limit_bytes must be at least 1, and buffered_limit_bytes at least as much");
    }
    if !(1..=256).contains(&config.render_threads) {
        bail!("render_threads is {}; give 1 to 256", config.render_threads);
    }
    if !config.http.ip().is_loopback() && config.token.is_none() && !config.insecure {
        bail!(
            "http is to listen on {}, beyond loopback, where /v1/ would tell whether a prompt was seen: give a \
             token_file, or say --insecure, or listen on 127.0.0.1",
            config.http
        );
    }
    if let IndexSource::Addresses(addresses) = &config.index {
        if addresses.len() > 16 {
            bail!("index: {} addresses; at most 16 are taken", addresses.len());
        }
        for address in addresses {
            let port = address.rsplit_once(':').and_then(|(host, port)| (!host.is_empty()).then_some(port));
            if port.and_then(|p| p.parse::<u16>().ok()).is_none() {
                bail!("index: {address:?} is not host:port; say `embedded` for an index inside the picker");
            }
        }
    }
    if let FleetSource::Inline(entries) = &config.fleet {
        fleet::check(entries)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(text: &str) -> anyhow::Result<Config> {
        let (config, _) = from_text(text, Path::new("/etc/kvatlas"))?;
        check(&config)?;
        Ok(config)
    }

    #[test]
    fn every_key_is_taken() -> anyhow::Result<()> {
        let config = from(
            "ext_proc: 127.0.0.1:1\nhealth: 127.0.0.1:2\nhttp: 127.0.0.1:3\nindex: [127.0.0.1:4, other:5]\nseed: 0x10\n\
             fleet: fleet.yaml\nprofile: least-work\nmode: observe\nmax_queue: 12\nmax_utilization: 0.9\n\
             weights: {cache: 0.5, load: 0.2, queue: 0.1, health: 0.05, adapter: 0.05}\n\
             scorers: [{name: cost, weight: 0.1}]\ndeadline: {base_ms: 5, per_1000_tokens_ms: 1, max_ms: 50}\n\
             models: [{name: tiny, adapters: [x], bundle: tiny.json}]\nbody_limit_bytes: 10\n",
        )?;
        assert_eq!(config.index, IndexSource::Addresses(vec!["127.0.0.1:4".into(), "other:5".into()]));
        assert_eq!((config.seed, config.policy.max_queue, config.body_limit), (16, 12, 10));
        assert_eq!((config.policy.profile, config.policy.mode), (Profile::LeastWork, Mode::Observe));
        assert_eq!(config.fleet, FleetSource::File("/etc/kvatlas/fleet.yaml".into()));
        assert_eq!(config.models[0].bundle.as_deref(), Some(Path::new("/etc/kvatlas/tiny.json")));
        assert_eq!(from("index: embedded")?.index, IndexSource::Embedded);
        assert_eq!(from("index: 127.0.0.1:9401")?.index, IndexSource::Addresses(vec!["127.0.0.1:9401".into()]));
        assert_eq!(from("")?.index, IndexSource::None);
        Ok(())
    }

    #[test]
    fn the_names_that_users_know_are_taken() -> anyhow::Result<()> {
        let config = from(
            "weights: {w_cache: 0.5, w_load: 0.2}\nw_queue: 0.2\nmaxQueue: 8\nmaxUtilization: 0.8\npodReportIntervalMs: 500\n",
        )?;
        assert_eq!(
            config.policy.factors.weights().take(3).collect::<Vec<_>>(),
            [("cache", 0.5), ("load", 0.2), ("queue", 0.2)]
        );
        assert_eq!((config.policy.max_queue, config.max_utilization), (8, 0.8));
        assert_eq!(from("preset: batch")?.policy.max_queue, 35);
        Ok(())
    }

    #[test]
    fn faults_say_where_and_why() {
        for (text, words) in [
            ("wieghts: {}", "wieghts"),
            ("weights: {cash: 1}", "cash"),
            ("weights: {cache: 0.7}", "sum to 1.100000"),
            ("weights: {cache: -0.1}", "from 0 to 1"),
            ("preset: fast", "many-adapters"),
            ("scorers: [{name: x, weight: 0, cel: '1.0'}]", "cel"),
            ("scorers: [{name: x, weight: 0}]", "no scorer named"),
            ("max_queue: 0", "always be full"),
            ("max_utilization: 0", "max_utilization"),
            ("deadline: {base_ms: 10, max_ms: 5}", "deadline"),
            ("http: 0.0.0.0:9090", "beyond loopback"),
            ("index: nine", "host:port"),
            ("fleet:\n- {name: a}\n- {name: a}", "twice"),
            ("token_file: /nowhere", "nowhere"),
            ("seed: x", "seed"),
            ("mode: watch", "mode"),
            ("buffered_limit_bytes: 1", "buffered_limit_bytes"),
        ] {
            let error = from(text).err().map(|e| format!("{e:#}")).unwrap_or_default();
            assert!(error.contains(words), "{text:?}: {error:?}");
        }
    }

    #[test]
    fn flags_win_over_the_environment_and_that_over_the_file() -> anyhow::Result<()> {
        let environment = Environment { log: Some("warn".into()), seed: Some("7".into()) };
        let (config, log) = load(&Flags::default(), &environment)?;
        assert_eq!((config.seed, log.as_str()), (7, "warn"));
        let flags =
            Flags { log_level: Some("debug".into()), index: vec!["a:1".into(), "b:2".into()], ..Flags::default() };
        let (config, log) = load(&flags, &environment)?;
        assert_eq!(log, "debug");
        assert_eq!(config.index, IndexSource::Addresses(vec!["a:1".into(), "b:2".into()]));
        Ok(())
    }

    #[test]
    fn deadlines_grow_with_the_prompt_to_a_bound() -> anyhow::Result<()> {
        let deadline = from("")?.deadline;
        assert_eq!(deadline.of(0), Duration::from_millis(20));
        assert_eq!(deadline.of(4_000), Duration::from_millis(28));
        assert_eq!(deadline.of(10_000_000), Duration::from_millis(500));
        Ok(())
    }
}
