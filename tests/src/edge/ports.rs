//! Free TCP ports.

use anyhow::{Context, Result};
use std::net::{Ipv4Addr, TcpListener};

/// Gives out ports, none twice: the preferred one where it is free, else one that the system chooses.
#[derive(Debug, Default)]
pub struct Ports {
    /// Held until all are given out, so that the system cannot choose one twice.
    held: Vec<TcpListener>,
    /// Whether preferred ports are tried: for people, who want to know the address before; never for tests.
    preferred: bool,
}

impl Ports {
    /// `preferred`: whether to try the preferred ports first.
    pub fn new(preferred: bool) -> Ports {
        Ports { held: Vec::new(), preferred }
    }

    /// One port of the loopback address.
    ///
    /// # Errors
    /// When the system has none left.
    pub fn take(&mut self, wish: u16) -> Result<u16> {
        let bind = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port));
        let wished = if self.preferred { bind(wish).ok() } else { None };
        let listener = match wished {
            Some(listener) => listener,
            None => bind(0).context("no free port on 127.0.0.1")?,
        };
        let port = listener.local_addr()?.port();
        self.held.push(listener);
        Ok(port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn none_is_given_twice() -> Result<()> {
        let mut ports = Ports::new(true);
        let first = ports.take(0)?;
        let second = ports.take(first)?;
        assert_ne!(first, second, "a wish that is taken must not be granted");
        Ok(())
    }
}
