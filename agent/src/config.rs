//! Settings of the agent, all by environment. A bad one turns the agent off, never the engine.

use crate::address::{Address, BadAddress, is_reached};
use crate::gpus::{NVML, Visible};
use proto::id::MAX_NAME_BYTES;
use proto::proof::{BadSecret, Secret};

/// Most indexes that are dialled: two replicas, twice while they are replaced, and room.
pub const MAX_INDEXES: usize = 16;

/// The agent's settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// `KVATLAS_BIND`: where messages are published; the rank is added to the port. "": nowhere.
    pub bind: String,
    /// `KVATLAS_CONTROL`: where replay, snapshot, bundle and audit are answered; the rank is added to the port. "":
    /// nowhere.
    pub control: String,
    /// `KVATLAS_INDEX`: indexes that are dialled, `tcp://host:port`, separated by commas. When it is set, the two
    /// addresses above are listened on only if they are set, too.
    pub indexes: Vec<Address>,
    /// `KVATLAS_SECRET`: what readers of the control socket and dialled indexes must prove to know.
    pub secret: Option<Secret>,
    /// `KVATLAS_ADDRESS`: the address (`ip` or `ip:port`) by which a gateway reaches the engine's API server.
    pub address: Option<String>,
    /// `POD_IP`: where the address is not set.
    pub pod_ip: Option<String>,
    /// `KVATLAS_ENGINE`: the engine's name; the host's name by default.
    pub engine: String,
    /// `KVATLAS_MODEL`: the namespace's model; the engine's first served name by default.
    pub model: Option<String>,
    /// `KVATLAS_SEED`: the deployment's seed, the same for agents and pickers; 0 means unkeyed fingerprints.
    pub seed: u64,
    /// `KVATLAS_HEARTBEAT_MS`: longest time between heartbeats, 10 to 10,000.
    pub heartbeat_ms: u64,
    /// `KVATLAS_LOG`: `error`, `warn`, `info`, `debug` or `trace`.
    pub log: String,
    /// `CUDA_VISIBLE_DEVICES` and `NVIDIA_VISIBLE_DEVICES`, as vLLM and the container found them.
    pub visible: Visible,
    /// The library that measures GPUs. Not a setting: another one is for tests.
    pub nvml: String,
}

/// Why the agent stays off.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadConfig {
    /// A value cannot be read.
    #[error("{name}={value:?} is not {expected}")]
    Value {
        /// The variable.
        name: &'static str,
        /// What it holds.
        value: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// An address cannot be read.
    #[error("{name}: {source}")]
    Address {
        /// The variable.
        name: &'static str,
        /// Why.
        source: BadAddress,
    },
    /// The secret is too short or too long. Not repeated here.
    #[error("KVATLAS_SECRET: {0}")]
    Secret(#[from] BadSecret),
}

impl Default for Config {
    fn default() -> Self {
        Self {
            bind: "tcp://*:5757".to_string(),
            control: "tcp://*:5857".to_string(),
            indexes: Vec::new(),
            secret: None,
            address: None,
            pod_ip: None,
            engine: "engine".to_string(),
            model: None,
            seed: 0,
            heartbeat_ms: 100,
            log: "info".to_string(),
            visible: Visible::default(),
            nvml: NVML.to_string(),
        }
    }
}

/// The environment's settings, and whether the agent is on; with them, a note for the log.
///
/// # Errors
/// When a value is bad: then the agent must stay off.
pub fn from_env() -> Result<Option<Config>, BadConfig> {
    parse(|name| std::env::var(name).ok(), &host_name())
}

fn host_name() -> String {
    let read = |path| std::fs::read_to_string(path).ok().map(|name| name.trim().to_string());
    let some = |name: &String| !name.trim().is_empty();
    std::env::var("HOSTNAME")
        .ok()
        .filter(some)
        .or_else(|| read("/proc/sys/kernel/hostname").filter(some))
        .or_else(|| read("/etc/hostname").filter(some))
        .unwrap_or_else(|| "engine".to_string())
}

fn parse(get: impl Fn(&'static str) -> Option<String>, host: &str) -> Result<Option<Config>, BadConfig> {
    // Here empty is not unset: no GPU is visible.
    let visible = Visible { cuda: get("CUDA_VISIBLE_DEVICES"), nvidia: get("NVIDIA_VISIBLE_DEVICES") };
    let get = |name| get(name).map(|v| v.trim().to_string()).filter(|v| !v.is_empty());
    let bad =
        |name, value: &str, expected| BadConfig::Value { name, value: value.chars().take(128).collect(), expected };
    match get("KVATLAS_ENABLED").unwrap_or_default().to_ascii_lowercase().as_str() {
        "" | "1" | "true" | "yes" | "on" => {}
        "0" | "false" | "no" | "off" => return Ok(None),
        other => return Err(bad("KVATLAS_ENABLED", other, "1 or 0")),
    }
    let mut config = Config {
        engine: host.to_string(),
        model: get("KVATLAS_MODEL"),
        visible,
        secret: get("KVATLAS_SECRET").map(|text| Secret::new(&text)).transpose()?,
        pod_ip: get("POD_IP").filter(|ip| ip.parse::<std::net::IpAddr>().is_ok()),
        ..Config::default()
    };
    for text in get("KVATLAS_INDEX").iter().flat_map(|list| list.split(',')).map(str::trim).filter(|t| !t.is_empty()) {
        let index = Address::peer(text).map_err(|source| BadConfig::Address { name: "KVATLAS_INDEX", source })?;
        if !config.indexes.contains(&index) {
            config.indexes.push(index);
        }
        if config.indexes.len() > MAX_INDEXES {
            return Err(bad("KVATLAS_INDEX", text, "a list of at most 16 indexes"));
        }
    }
    if !config.indexes.is_empty() {
        (config.bind, config.control) = (String::new(), String::new());
    }
    if let Some(text) = get("KVATLAS_ADDRESS") {
        if !is_reached(&text) {
            return Err(bad("KVATLAS_ADDRESS", &text, "an ip or ip:port, as in 10.0.0.7:8000"));
        }
        config.address = Some(text);
    }
    for (name, place) in [("KVATLAS_BIND", &mut config.bind), ("KVATLAS_CONTROL", &mut config.control)] {
        if let Some(text) = get(name) {
            Address::parse(&text, 0).map_err(|source| BadConfig::Address { name, source })?;
            *place = text;
        }
    }
    if let Some(name) = get("KVATLAS_ENGINE") {
        if name.len() > MAX_NAME_BYTES || name.chars().any(char::is_control) {
            return Err(bad("KVATLAS_ENGINE", &name, "a name of at most 320 bytes without control characters"));
        }
        config.engine = name;
    }
    if let Some(text) = get("KVATLAS_SEED") {
        let number = match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16).ok(),
            None => text.parse().ok(),
        };
        config.seed = number.ok_or_else(|| bad("KVATLAS_SEED", &text, "a number of 64 bits, decimal or 0x..."))?;
    }
    if let Some(text) = get("KVATLAS_HEARTBEAT_MS") {
        let number = text.parse().ok().filter(|ms| (10..=10_000).contains(ms));
        config.heartbeat_ms = number.ok_or_else(|| bad("KVATLAS_HEARTBEAT_MS", &text, "a number from 10 to 10000"))?;
    }
    if let Some(text) = get("KVATLAS_LOG").map(|text| text.to_ascii_lowercase()) {
        if !["error", "warn", "info", "debug", "trace"].contains(&text.as_str()) {
            return Err(bad("KVATLAS_LOG", &text, "error, warn, info, debug or trace"));
        }
        config.log = text;
    }
    Ok(Some(config))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(pairs: &[(&str, &str)]) -> Result<Option<Config>, BadConfig> {
        parse(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()), "pod-a")
    }

    #[test]
    fn defaults_and_values() {
        let plain = Config { engine: "pod-a".into(), ..Config::default() };
        assert_eq!(with(&[]), Ok(Some(plain.clone())));
        assert_eq!(with(&[("KVATLAS_ENABLED", "0"), ("KVATLAS_SEED", "x")]), Ok(None));
        let set = with(&[("KVATLAS_SEED", "0xff"), ("KVATLAS_BIND", "ipc:///tmp/x"), ("KVATLAS_MODEL", "m")]);
        assert_eq!(set, Ok(Some(Config { seed: 255, bind: "ipc:///tmp/x".into(), model: Some("m".into()), ..plain })));
    }

    #[test]
    fn an_agent_that_dials_listens_only_where_it_is_told_to() {
        let dials = |more: &[(&str, &str)]| {
            let pairs = [&[("KVATLAS_INDEX", "tcp://a:9402, b:9402,a:9402")], more].concat();
            let config = with(&pairs).ok().flatten().unwrap_or_default();
            (config.indexes.iter().map(ToString::to_string).collect::<Vec<_>>(), config.bind, config.control)
        };
        let both = ["tcp://a:9402", "tcp://b:9402"].map(String::from).to_vec();
        assert_eq!(dials(&[]), (both.clone(), String::new(), String::new()));
        assert_eq!(dials(&[("KVATLAS_BIND", "tcp://*:0")]), (both, "tcp://*:0".into(), String::new()));
        let many = (0..17).map(|i| format!("tcp://a{i}:1")).collect::<Vec<_>>().join(",");
        assert!(with(&[("KVATLAS_INDEX", &many)]).is_err());
    }

    #[test]
    fn a_bad_secret_is_not_repeated() {
        let error = with(&[("KVATLAS_SECRET", "only15byteslong")]).map_err(|e| e.to_string());
        assert!(error.as_ref().is_err_and(|e| e.contains("16") && !e.contains("only")), "{error:?}");
        let good = with(&[("KVATLAS_SECRET", "exactly16byteslo")]).ok().flatten();
        assert!(good.is_some_and(|config| config.secret.is_some() && !format!("{config:?}").contains("exactly")));
    }

    #[test]
    fn no_visible_gpu_is_not_all_of_them() {
        let of = |pairs| with(pairs).map(|config| config.map(|config| config.visible));
        assert_eq!(of(&[]), Ok(Some(Visible::default())));
        let none = Visible { cuda: Some(String::new()), nvidia: Some("all".into()) };
        assert_eq!(of(&[("CUDA_VISIBLE_DEVICES", ""), ("NVIDIA_VISIBLE_DEVICES", "all")]), Ok(Some(none)));
    }

    #[test]
    fn bad_values_say_which() {
        for (name, value) in [
            ("KVATLAS_ENABLED", "maybe"),
            ("KVATLAS_SEED", "-1"),
            ("KVATLAS_BIND", "5757"),
            ("KVATLAS_CONTROL", "tcp://*"),
            ("KVATLAS_HEARTBEAT_MS", "0"),
            ("KVATLAS_LOG", "loud"),
            ("KVATLAS_SECRET", "only15byteslong"),
            ("KVATLAS_INDEX", "tcp://index:9402,index"),
            ("KVATLAS_INDEX", "tcp://*:9402"),
            ("KVATLAS_INDEX", "tcp://index:0"),
            ("KVATLAS_ADDRESS", "pod-a:8000"),
            ("KVATLAS_ENGINE", "a\tb"),
        ] {
            let error = with(&[(name, value)]).map_err(|e| e.to_string());
            assert!(error.as_ref().is_err_and(|e| e.contains(name)), "{name}: {error:?}");
        }
    }
}
