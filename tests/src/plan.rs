//! Which part listens where, and the configuration that each part is given.

use serde_json::{Value, json};
use std::net::{Ipv4Addr, SocketAddr};

/// The model's served name.
pub const MODEL: &str = "tiny";
/// Seed of the deployment's fingerprints: any value but 0, which would mean unkeyed.
pub const SEED: u64 = 0x6b76_6174_6c61_7301;

/// Ports of one engine.
#[derive(Debug, Clone)]
pub struct EnginePorts {
    /// Name in the fleet; its only engine is `name.0`.
    pub name: String,
    /// vLLM's HTTP.
    pub http: u16,
    /// The agent's events.
    pub events: u16,
    /// The agent's control socket.
    pub control: u16,
}

impl EnginePorts {
    /// The engine's id in answers of index and picker.
    pub fn id(&self) -> String {
        format!("{}.0", self.name)
    }
}

/// Ports of everything.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The engines.
    pub engines: Vec<EnginePorts>,
    /// The index's HTTP.
    pub index_http: u16,
    /// The index's gRPC.
    pub index_grpc: u16,
    /// The picker's ext_proc.
    pub ext_proc: u16,
    /// The picker's gRPC health.
    pub health: u16,
    /// The picker's HTTP.
    pub picker_http: u16,
    /// Envoy, where clients connect.
    pub front: u16,
    /// Envoy's admin page.
    pub envoy_admin: u16,
}

/// A port on this machine.
pub fn local(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

impl Plan {
    /// Asks `take` for each port, with the number that people know it by.
    ///
    /// # Errors
    /// Those of `take`.
    pub fn new<E>(engine_names: &[&str], mut take: impl FnMut(u16) -> Result<u16, E>) -> Result<Plan, E> {
        let mut engines = Vec::with_capacity(engine_names.len());
        for (rank, name) in (0u16..).zip(engine_names) {
            engines.push(EnginePorts {
                name: (*name).to_owned(),
                http: take(8101 + rank)?,
                events: take(5757 + rank)?,
                control: take(5857 + rank)?,
            });
        }
        Ok(Plan {
            engines,
            index_http: take(9400)?,
            index_grpc: take(9401)?,
            ext_proc: take(9002)?,
            health: take(9003)?,
            picker_http: take(9090)?,
            front: take(8080)?,
            envoy_admin: take(9901)?,
        })
    }

    /// The fleet list that index and picker share.
    pub fn fleet(&self) -> Value {
        let entry = |e: &EnginePorts| {
            json!({
                "name": e.name,
                "address": local(e.http).to_string(),
                "events": format!("tcp://{}", local(e.events)),
                "control": format!("tcp://{}", local(e.control)),
            })
        };
        self.engines.iter().map(entry).collect()
    }

    /// The index's configuration. JSON is YAML. An engine may be silent for five times as long as by default before
    /// it is credited nothing: what is proved here is exactness, on cores that may be busy for more than a second.
    pub fn index_config(&self) -> Value {
        json!({
            "http": local(self.index_http).to_string(),
            "grpc": local(self.index_grpc).to_string(),
            "fleet": self.fleet(),
            "seed": SEED,
            "stale_after_ms": 5000,
        })
    }

    /// The picker's configuration. Its deadline is a hundred times the default, for the same reason.
    pub fn picker_config(&self) -> Value {
        json!({
            "ext_proc": local(self.ext_proc).to_string(),
            "health": local(self.health).to_string(),
            "http": local(self.picker_http).to_string(),
            "index": [local(self.index_grpc).to_string()],
            "fleet": self.fleet(),
            "seed": SEED,
            "deadline": {"base_ms": 2000, "max_ms": 5000},
        })
    }

    /// Envoy's addresses.
    pub fn envoy(&self) -> crate::envoy::Addresses {
        crate::envoy::Addresses {
            front: local(self.front),
            admin: local(self.envoy_admin),
            engines: self.engines.iter().map(|e| local(e.http)).collect(),
            ext_proc: local(self.ext_proc),
            health: local(self.health),
        }
    }
}
