//! Where a socket listens or an index is: `tcp://host:port` (`*` is every interface) or `ipc://path`; and where the
//! engine's own API server is reached.

use std::net::{IpAddr, SocketAddr};

/// A parsed address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// TCP, with the host as the standard library takes it.
    Tcp {
        /// Host or address; `0.0.0.0` for `*`.
        host: String,
        /// Port, 0 for any.
        port: u16,
    },
    /// A Unix socket.
    Ipc(String),
}

/// Why a text is no address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no address to listen on; write tcp://*:5757, tcp://10.0.0.1:5757 or ipc:///run/kvatlas.sock")]
pub struct BadAddress(pub String);

impl Address {
    /// Reads an address and adds a data-parallel rank: to a port that is not 0, or as `.rank` to a path (rank 0 adds
    /// nothing).
    ///
    /// # Errors
    /// When the text is neither form, or the port with the rank is beyond 65,535.
    pub fn parse(text: &str, rank: u32) -> Result<Self, BadAddress> {
        let bad = || BadAddress(text.chars().take(128).collect());
        if let Some(path) = text.strip_prefix("ipc://").filter(|path| !path.is_empty()) {
            return Ok(Address::Ipc(if rank == 0 { path.to_string() } else { format!("{path}.{rank}") }));
        }
        let (host, port) = text.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')).ok_or_else(bad)?;
        let port: u16 = port.parse().map_err(|_| bad())?;
        let port = match port {
            0 => 0,
            port => u32::from(port).checked_add(rank).and_then(|p| u16::try_from(p).ok()).ok_or_else(bad)?,
        };
        let host = match host {
            "" => return Err(bad()),
            "*" => "0.0.0.0".to_string(),
            host => host.trim_start_matches('[').trim_end_matches(']').to_string(),
        };
        Ok(Address::Tcp { host, port })
    }

    /// Do the ports of `ranks` ranks from here on meet those of another address on the same host? Ports of 0 meet none.
    pub fn meets(&self, other: &Address, ranks: u32) -> bool {
        match (self, other) {
            (Address::Tcp { host: a, port: p }, Address::Tcp { host: b, port: q }) => {
                let wild = |host: &str| matches!(host, "0.0.0.0" | "::");
                (a == b || wild(a) || wild(b)) && *p > 0 && *q > 0 && u32::from(p.abs_diff(*q)) < ranks.max(1)
            }
            (Address::Ipc(a), Address::Ipc(b)) => a == b,
            _ => false,
        }
    }

    /// Reads an address to connect to: `tcp://host:port`, or `host:port` alone.
    ///
    /// # Errors
    /// When the text is another form, or names no host or no port.
    pub fn peer(text: &str) -> Result<Self, BadAddress> {
        let whole = if text.contains("://") { text.to_string() } else { format!("tcp://{text}") };
        match Address::parse(&whole, 0)? {
            Address::Tcp { host, port } if port > 0 && host != "0.0.0.0" => Ok(Address::Tcp { host, port }),
            _ => Err(BadAddress(text.chars().take(128).collect())),
        }
    }
}

/// What the engine knows of its API server.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Http {
    /// The host that it was told to listen on, or that it is known by; `None` or a wildcard: every one of this pod.
    pub host: Option<String>,
    /// Its port; `None`: there is no API server that this engine knows of.
    pub port: Option<u16>,
    /// What to ask for in the header `X-data-parallel-rank`, where one API server fronts several ranks. It counts as
    /// that server does: from 0 for the ranks of its own node, when it fronts only those.
    pub rank_header: Option<u32>,
}

/// Is it an `ip` or an `ip:port`?
pub fn is_reached(text: &str) -> bool {
    text.parse::<SocketAddr>().is_ok() || text.parse::<IpAddr>().is_ok()
}

/// `ip:port` of the API server as others reach it, "" when it is not known. `told` (`KVATLAS_ADDRESS`) wins, with the
/// engine's own port when it has none; then the one host that the server listens on; then `pod_ip`; then `own`, this
/// machine's address on the way out.
pub fn reached(told: Option<&str>, pod_ip: Option<&str>, http: &Http, own: Option<IpAddr>) -> String {
    let ip = |text: &str| text.parse::<IpAddr>().ok();
    if let Some(whole) = told.and_then(|told| told.parse::<SocketAddr>().ok()) {
        return whole.to_string();
    }
    let bound = http.host.as_deref().map(|host| if host == "localhost" { "127.0.0.1" } else { host });
    let bound = bound.and_then(ip).filter(|ip| !ip.is_unspecified());
    let host = told.and_then(ip).or(bound).or(pod_ip.and_then(ip)).or(own);
    match (host, http.port) {
        (Some(ip), Some(port)) => SocketAddr::new(ip, port).to_string(),
        _ => String::new(),
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Tcp { host, port } if host.contains(':') => write!(f, "tcp://[{host}]:{port}"),
            Address::Tcp { host, port } => write!(f, "tcp://{host}:{port}"),
            Address::Ipc(path) => write!(f, "ipc://{path}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b14_ports_of_all_ranks_must_fit_between_the_two() -> Result<(), BadAddress> {
        let meets = |a, b, ranks| Ok(Address::parse(a, 0)?.meets(&Address::parse(b, 0)?, ranks));
        assert!(meets("tcp://*:5757", "tcp://*:5761", 8)?);
        assert!(meets("tcp://*:5765", "tcp://10.0.0.1:5757", 9)?);
        assert!(!meets("tcp://*:5757", "tcp://*:5765", 8)?);
        assert!(meets("tcp://*:5757", "tcp://*:5757", 1)?);
        assert!(!meets("tcp://*:0", "tcp://*:0", 8)? && !meets("tcp://*:5757", "ipc:///tmp/a", 8)?);
        assert!(!meets("tcp://10.0.0.1:5757", "tcp://10.0.0.2:5757", 1)?);
        assert!(meets("ipc:///tmp/a", "ipc:///tmp/a", 1)?);
        Ok(())
    }

    #[test]
    fn the_rank_is_added() {
        let parse = |text, rank| Address::parse(text, rank).map(|a| a.to_string());
        assert_eq!(parse("tcp://*:5757", 3).as_deref(), Ok("tcp://0.0.0.0:5760"));
        assert_eq!(parse("tcp://[::]:5757", 0).as_deref(), Ok("tcp://[::]:5757"));
        assert_eq!(parse("tcp://127.0.0.1:0", 3).as_deref(), Ok("tcp://127.0.0.1:0"));
        assert_eq!(parse("ipc:///tmp/a", 0).as_deref(), Ok("ipc:///tmp/a"));
        assert_eq!(parse("ipc:///tmp/a", 2).as_deref(), Ok("ipc:///tmp/a.2"));
        for bad in ["", "5757", "tcp://*", "tcp://:1", "tcp://*:x", "udp://*:1", "ipc://"] {
            assert!(parse(bad, 0).is_err(), "{bad}");
        }
        assert!(parse("tcp://*:65535", 1).is_err());
    }
    #[test]
    fn an_index_is_dialled_at_a_host_and_a_port() {
        let peer = |text| Address::peer(text).map(|a| a.to_string());
        assert_eq!(peer("tcp://index:9402").as_deref(), Ok("tcp://index:9402"));
        assert_eq!(peer("index:9402").as_deref(), Ok("tcp://index:9402"));
        for bad in ["tcp://*:9402", "tcp://index:0", "ipc:///run/x", "index"] {
            assert!(peer(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_api_server_is_where_it_is_said_to_be() {
        let http = |host: Option<&str>| Http { host: host.map(Into::into), port: Some(8001), rank_header: None };
        let own = "10.1.1.1".parse().ok();
        let every = http(None);
        assert_eq!(reached(None, None, &every, own), "10.1.1.1:8001");
        assert_eq!(reached(None, Some("10.0.0.7"), &every, own), "10.0.0.7:8001");
        assert_eq!(reached(None, Some("fd00::7"), &http(Some("::")), own), "[fd00::7]:8001");
        assert_eq!(reached(None, Some("10.0.0.7"), &http(Some("localhost")), own), "127.0.0.1:8001");
        assert_eq!(reached(None, Some("10.0.0.7"), &http(Some("10.9.9.9")), own), "10.9.9.9:8001");
        assert_eq!(reached(Some("10.2.2.2"), Some("10.0.0.7"), &http(Some("10.9.9.9")), own), "10.2.2.2:8001");
        assert_eq!(reached(Some("10.2.2.2:80"), None, &every, own), "10.2.2.2:80");
        assert_eq!(reached(None, None, &every, None), "");
        assert_eq!(reached(Some("10.2.2.2"), None, &Http::default(), own), "");
    }

    #[test]
    fn f4_ranks_that_share_a_setting_have_addresses_of_their_own() {
        // One environment for all ranks of a pod: each is told its own port by its own command line.
        let ranks = [8000, 8001].map(|port| Http { host: None, port: Some(port), rank_header: None });
        let addresses = ranks.map(|http| reached(Some("10.0.0.7"), None, &http, None));
        assert_eq!(addresses, ["10.0.0.7:8000", "10.0.0.7:8001"]);
    }
}
