//! The Envoy configuration that ships, pointed at other addresses. Nothing else of it is changed, so what the
//! end-to-end runs prove is the file that users deploy.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::net::SocketAddr;

/// Addresses for one Envoy.
#[derive(Debug, Clone)]
pub struct Addresses {
    /// Where clients connect.
    pub front: SocketAddr,
    /// Envoy's own admin page.
    pub admin: SocketAddr,
    /// The engines, in order.
    pub engines: Vec<SocketAddr>,
    /// The picker's ext_proc.
    pub ext_proc: SocketAddr,
    /// The picker's gRPC health.
    pub health: SocketAddr,
}

/// `yaml` is `deploy/envoy/envoy.yaml`; the answer is JSON, which Envoy reads as well.
///
/// # Errors
/// When the file is not YAML or lacks a place that has to be set.
pub fn retarget(yaml: &str, addresses: &Addresses) -> Result<String> {
    let mut config: Value = serde_saphyr::from_str(yaml).context("the Envoy configuration is not YAML")?;
    let mut set = |pointer: &str, value: Value| -> Result<()> {
        *config.pointer_mut(pointer).with_context(|| format!("the Envoy configuration has no {pointer}"))? = value;
        Ok(())
    };
    let resources = "/static_resources";
    let picker = format!("{resources}/clusters/1/load_assignment/endpoints/0/lb_endpoints/0/endpoint");
    set("/admin/address", address(addresses.admin))?;
    set(&format!("{resources}/listeners/0/address"), address(addresses.front))?;
    set(
        &format!("{resources}/clusters/0/load_assignment/endpoints/0/lb_endpoints"),
        addresses.engines.iter().map(|a| json!({"endpoint": {"address": address(*a)}})).collect(),
    )?;
    set(&format!("{picker}/address"), address(addresses.ext_proc))?;
    set(&format!("{picker}/health_check_config"), json!({"address": address(addresses.health)}))?;
    Ok(config.to_string())
}

fn address(at: SocketAddr) -> Value {
    json!({"socket_address": {"address": at.ip().to_string(), "port_value": at.port()}})
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHIPPED: &str = include_str!("../../deploy/envoy/envoy.yaml");

    #[test]
    fn the_shipped_file_has_every_place() -> Result<()> {
        let at = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let addresses = Addresses {
            front: at(1),
            admin: at(2),
            engines: vec![at(3), at(4), at(5)],
            ext_proc: at(6),
            health: at(7),
        };
        let text = retarget(SHIPPED, &addresses)?;
        for port in 1..=7 {
            assert_eq!(text.matches(&format!("\"port_value\":{port}}}")).count(), 1, "port {port} in {text}");
        }
        Ok(())
    }

    #[test]
    fn clients_cannot_choose_an_engine() -> Result<()> {
        let config: Value = serde_saphyr::from_str(SHIPPED)?;
        let manager = &config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
        let early = manager["early_header_mutation_extensions"][0]["typed_config"]["mutations"].to_string();
        for header in
            ["x-gateway-destination-endpoint", "x-gateway-destination-endpoint-subset", "x-data-parallel-rank"]
        {
            assert!(early.contains(&format!("\"{header}\"")), "{header} is not dropped before the filters: {early}");
        }
        Ok(())
    }
}
