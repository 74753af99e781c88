//! Where a socket listens: `tcp://host:port` (`*` is every interface) or `ipc://path`.

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
}
