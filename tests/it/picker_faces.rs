//! The picker's other faces: HTTP for people, gRPC health, the fleet file, the index inside.

use crate::picker_world::{FLEET, SEED, bundle, completion, until, world};
use anyhow::{Context, Result};
use harness::edge::fake_index::{FakeIndex, Says, engine};
use harness::edge::http;
use proto::block::{Namespace, chain, root};
use serde_json::json;
use std::collections::HashMap;
use std::time::Duration;
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

#[tokio::test]
async fn explaining_does_nothing() -> Result<()> {
    let bundle = bundle()?;
    let tokens: Vec<u32> = (0..64).collect();
    let held = chain(root(Namespace { model: "tiny", adapter: "", salt: "" }, SEED), 16, &tokens);
    let engines = ["a.0", "b.0", "c.0"].map(|id| engine(id, "tiny", SEED, &bundle)).to_vec();
    let says = Says { engines, holds: HashMap::from([("c.0".to_string(), held)]), bundle, ..Says::default() };
    let index = FakeIndex::start(says, None)?;
    let world = world(&format!("{FLEET}index: {}", index.address)).await?;
    world.followed(1).await?;
    let (status, told) = http::exchange(world.picker.http, "POST", "/v1/explain", Some(&completion(0..64))).await?;
    let told: serde_json::Value = serde_json::from_slice(&told)?;
    assert_eq!((status.as_u16(), &told["engine"], &told["predicted_tokens"]), (200, &json!("c.0"), &json!(48)));
    assert_eq!(world.picker.in_flight(), 0);
    assert!(index.says().reserved.is_empty());
    let kept = http::get(world.picker.http, "/v1/decisions").await?;
    assert_eq!(kept["decisions"], json!([]));
    let (status, told) = http::exchange(world.picker.http, "POST", "/v1/explain", Some(&json!([1]))).await?;
    let told: serde_json::Value = serde_json::from_slice(&told)?;
    assert_eq!((status.as_u16(), &told["error"]["code"]), (400, &json!("bad_body")));
    Ok(())
}

#[tokio::test]
async fn decisions_are_listed_newest_first_and_found_by_either_id() -> Result<()> {
    let world = world(FLEET).await?;
    for turn in 0..5 {
        world.envoy.json("/v1/completions", &format!("t-{turn}"), &completion(0..9)).await?;
    }
    let listed = http::get(world.picker.http, "/v1/decisions?limit=2").await?;
    let ids: Vec<_> = listed["decisions"].as_array().context("no list")?.iter().map(|d| &d["client_id"]).collect();
    assert_eq!(ids, [&json!("t-4"), &json!("t-3")]);
    let (status, body) = http::exchange(world.picker.http, "GET", "/v1/decisions/nobody", None).await?;
    let body: serde_json::Value = serde_json::from_slice(&body)?;
    assert_eq!((status.as_u16(), &body["error"]["code"]), (404, &json!("not_found")));
    let config = http::get(world.picker.http, "/v1/config").await?;
    assert_eq!((&config["weights"]["cache"], &config["seeded"]), (&json!(0.6), &json!(true)));
    assert!(!config.to_string().contains(&SEED.to_string()), "the seed is a secret: {config}");
    Ok(())
}

#[tokio::test]
async fn the_debug_face_wants_its_token() -> Result<()> {
    let folder = std::env::temp_dir().join(format!("kvatlas-token-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let file = folder.join("token");
    std::fs::write(&file, "a token of good length\n")?;
    let world = world(&format!("{FLEET}token_file: {}", file.display())).await?;
    for path in ["/v1/decisions", "/v1/config", "/v1/decisions/x"] {
        assert_eq!(http::exchange(world.picker.http, "GET", path, None).await?.0.as_u16(), 401, "{path}");
    }
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(http::exchange(world.picker.http, "GET", path, None).await?.0.as_u16(), 200, "{path}");
    }
    std::fs::remove_dir_all(&folder)?;
    Ok(())
}

#[tokio::test]
async fn health_is_served_and_says_when_the_picker_stops() -> Result<()> {
    let mut world = world(FLEET).await?;
    let channel = Endpoint::from_shared(format!("http://{}", world.picker.health))?.connect().await?;
    let mut client = HealthClient::new(channel);
    for service in ["", "envoy.service.ext_proc.v3.ExternalProcessor"] {
        let answer = client.check(HealthCheckRequest { service: service.into() }).await?.into_inner();
        assert_eq!(answer.status, ServingStatus::Serving as i32, "{service:?}");
    }
    let mut watch = client.watch(HealthCheckRequest { service: String::new() }).await?.into_inner();
    assert_eq!(watch.message().await?.map(|s| s.status), Some(ServingStatus::Serving as i32));
    world.picker.stop_now(Duration::from_millis(100)).await;
    assert_eq!(watch.message().await?.map(|s| s.status), Some(ServingStatus::NotServing as i32));
    Ok(())
}

#[tokio::test]
async fn a_fleet_file_is_followed_and_a_bad_one_changes_nothing() -> Result<()> {
    let folder = std::env::temp_dir().join(format!("kvatlas-fleet-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let file = folder.join("fleet.yaml");
    std::fs::write(&file, "- {name: a, address: '10.0.0.1:8000'}\n")?;
    let world = world(&format!("fleet: {}", file.display())).await?;
    let asked = async || -> Result<String> {
        Ok(world.envoy.json("/v1/completions", "f", &completion(0..9)).await?.destination()?.to_owned())
    };
    assert_eq!(asked().await?, "10.0.0.1:8000");
    std::fs::write(&file, "- {name: b, address: '10.0.0.2:8000'}\n")?;
    until("the new list is followed", async || Ok(asked().await? == "10.0.0.2:8000")).await?;
    std::fs::write(&file, "- {name: b, address: nonsense}\n")?;
    tokio::time::sleep(picker::config::FLEET_POLL * 3).await;
    assert_eq!(asked().await?, "10.0.0.2:8000");
    std::fs::write(&file, "- {name: c, address: '10.0.0.3:8000'}\n")?;
    until("the next good one is followed", async || Ok(asked().await? == "10.0.0.3:8000")).await?;
    std::fs::remove_dir_all(&folder)?;
    Ok(())
}

#[tokio::test]
async fn an_index_inside_is_followed() -> Result<()> {
    // Nobody publishes there: the engines are known by name and silent.
    let fleet =
        "fleet:\n- {name: a, address: '10.0.0.1:8000', events: 'tcp://127.0.0.1:9', control: 'tcp://127.0.0.1:9'}\n";
    let world = world(&format!("{fleet}index: embedded")).await?;
    until("the engine is told of", async || {
        Ok(http::get(world.picker.http, "/v1/config").await?["engines"][0]["state"] == "silent")
    })
    .await?;
    world.envoy.json("/v1/completions", "in", &completion(0..9)).await?.destination()?;
    let decision = world.decision("in").await?;
    assert_eq!(decision["candidates"][0]["state"], "silent");
    assert_eq!(decision["reason"], "only silent engines are left");
    Ok(())
}
