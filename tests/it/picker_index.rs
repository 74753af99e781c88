//! What a picker makes of what the index says, and of an index that says nothing.

use crate::picker_world::{FLEET, SEED, World, bundle, completion, until, world};
use anyhow::{Context, Result};
use harness::edge::fake_envoy::{Hint, body, headers, post};
use harness::edge::fake_index::{FakeIndex, Says, engine};
use harness::edge::http;
use proto::block::{Namespace, chain, root};
use proto::wire::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use proto::wire::kvatlas::index::v1::request_life::{Arrived, Finished, Started, Step};
use proto::wire::kvatlas::index::v1::{EngineState, Load, RequestLife, WatchEvent};
use serde_json::json;
use std::collections::HashMap;

const PATH: &str = "/v1/completions";

fn blocks(tokens: std::ops::Range<u32>, adapter: &str, salt: &str) -> Vec<u64> {
    let tokens: Vec<u32> = tokens.collect();
    chain(root(Namespace { model: "tiny", adapter, salt }, SEED), 16, &tokens)
}

/// Engines a, b and c; b holds tokens 0 to 64, four blocks.
fn says() -> Result<Says> {
    let bundle = bundle()?;
    let engines = ["a.0", "b.0", "c.0"].map(|id| engine(id, "tiny", SEED, &bundle)).to_vec();
    let holds = HashMap::from([("b.0".to_string(), blocks(0..64, "", ""))]);
    Ok(Says { engines, holds, bundle, nodes: 4, ..Says::default() })
}

async fn with_index() -> Result<(FakeIndex, World)> {
    let index = FakeIndex::start(says()?, None)?;
    let world = world(&format!("{FLEET}index: {}", index.address)).await?;
    world.followed(1).await?;
    Ok((index, world))
}

#[tokio::test]
async fn the_holder_gets_the_request_and_everybody_is_told() -> Result<()> {
    let (index, world) = with_index().await?;
    let answer = world.envoy.json(PATH, "hit", &completion(0..64)).await?;
    assert_eq!(answer.destination()?, "10.0.0.2:8000");
    let decision = world.decision("hit").await?;
    // The last token is always computed, so its block is not taken from cache.
    assert_eq!(decision["predicted_tokens"], 48);
    assert_eq!(decision["available_tokens"], 48);
    assert_eq!((&decision["blocks"], &decision["prompt_tokens"]), (&json!(4), &json!(64)));
    assert_eq!((&decision["engine"], &decision["degraded"]), (&json!("b.0"), &json!([])));
    assert_eq!(decision["candidates"].as_array().map(Vec::len), Some(3));
    let best = &decision["candidates"][0];
    assert_eq!((&best["engine"], &best["factors"]["cache"], &best["age_ms"]), (&json!("b.0"), &json!(1.0), &json!(5)));
    until("the placement is told", async || Ok(!index.says().reserved.is_empty())).await?;
    let told = index.says().reserved[0].clone();
    assert_eq!((told.engine.as_str(), told.tokens), ("b.0", 16));
    assert_eq!(told.fingerprints, blocks(0..64, "", ""));
    assert_eq!(Some(&told.request_id), answer.set.get("x-request-id"));
    Ok(())
}

#[tokio::test]
async fn what_came_of_predictions_is_joined_and_counted() -> Result<()> {
    let (index, world) = with_index().await?;
    let started = |cached_tokens, predicted| {
        Step::Started(Started { prompt_tokens: 64, cached_tokens, predicted_tokens: predicted })
    };
    for (name, step, class) in [
        ("exact", Some(started(48, Some(48))), "exact"),
        ("raced", Some(started(32, Some(32))), "raced"),
        ("wrong", Some(started(32, Some(48))), "wrong"),
        ("silent", None, "unknown"),
    ] {
        let answer = world.envoy.json(PATH, name, &completion(0..64)).await?;
        let id = answer.set.get("x-request-id").context("no id")?.clone();
        let life = |step| RequestLife { request_id: id.clone(), engine: "b.0".into(), step: Some(step) };
        index.life(life(Step::Arrived(Arrived {})));
        if let Some(step) = step {
            index.life(life(step));
        }
        index.life(life(Step::Finished(Finished { reason: "stop".into() })));
        until("the end is known", async || Ok(world.decision(name).await?["finished"] == "stop")).await?;
        assert_eq!(world.decision(name).await?["class"], class, "{name}");
    }
    assert_eq!(world.picker.in_flight(), 0);
    let (_, metrics) = http::exchange(world.picker.http, "GET", "/metrics", None).await?;
    let metrics = String::from_utf8(metrics.to_vec())?;
    for line in [
        "kvatlas_picker_requests_total{class=\"exact\"} 1",
        "kvatlas_picker_requests_total{class=\"raced\"} 1",
        "kvatlas_picker_requests_total{class=\"wrong\"} 1",
        "kvatlas_picker_requests_total{class=\"unknown\"} 1",
        "kvatlas_picker_cached_tokens_total{kind=\"available\"} 192",
        "kvatlas_picker_cached_tokens_total{kind=\"chosen\"} 192",
        "kvatlas_picker_cached_tokens_total{kind=\"delivered\"} 112",
        "epp_stale_cache_routing_total 2",
        "epp_routing_decisions_total{model=\"tiny\"} 4",
        "epp_candidate_pods 3",
        "epp_prefix_tree_nodes 4",
        "epp_queue_depth{pod=\"b.0\"} 0",
        "epp_cache_match_ratio_count 4",
        "epp_composite_score_count 4",
        "epp_scoring_latency_us_count 4",
        "epp_pod_health_score{pod=\"b.0\"} 1",
        "kvatlas_picker_in_flight 0",
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line} is not in\n{metrics}");
    }
    assert!(metrics.contains("epp_scoring_latency_us_bucket{le=\"1000\"}"), "{metrics}");
    assert!(metrics.contains("epp_scoring_latency_us_bucket{le=\"5000\"}"), "{metrics}");
    Ok(())
}

#[tokio::test]
async fn aliases_share_a_cache_and_adapters_and_salts_do_not() -> Result<()> {
    let (index, world) = with_index().await?;
    index.says().holds.insert("a.0".into(), blocks(0..64, "lora", ""));
    index.says().holds.insert("c.0".into(), blocks(0..64, "", "pepper"));
    let with = |key: &str, value: &str| {
        let mut json = completion(0..64);
        json[key] = value.into();
        json
    };
    for (json, engine) in [
        (with("model", "alias"), "10.0.0.2:8000"),
        (with("model", "lora"), "10.0.0.1:8000"),
        (with("cache_salt", "pepper"), "10.0.0.3:8000"),
    ] {
        let answer = world.envoy.json(PATH, "x", &json).await?;
        assert_eq!(answer.destination()?, engine, "{json}");
    }
    let (_, all) = http::exchange(world.picker.http, "GET", "/v1/decisions", None).await?;
    assert!(!String::from_utf8(all.to_vec())?.contains("pepper"), "a salt is a secret");
    let unknown = world.envoy.json(PATH, "u", &with("model", "nobody's")).await?;
    unknown.destination()?;
    assert_eq!(world.decision("u").await?["degraded"], json!(["unknown_model"]));
    Ok(())
}

#[tokio::test]
async fn text_is_rendered_and_tokenized_with_the_engines_own_bundle() -> Result<()> {
    let (_index, world) = with_index().await?;
    let chat = json!({"model": "tiny", "messages": [{"role": "user", "content": "Tell me of the sea. ".repeat(20)}]});
    world.envoy.json("/v1/chat/completions", "chat", &chat).await?;
    let decision = world.decision("chat").await?;
    assert_eq!((&decision["degraded"], &decision["prompt_exact"]), (&json!([]), &json!(true)));
    assert!(decision["blocks"].as_u64().is_some_and(|b| b > 2), "{decision}");
    assert_eq!(decision["predicted_tokens"], 0);
    Ok(())
}

/// Fifty at once, one holder: its queue fills to the limit, the others share the rest.
#[tokio::test]
async fn a_burst_is_seen_before_the_engines_say_so() -> Result<()> {
    let (_index, world) = with_index().await?;
    let mut asked = tokio::task::JoinSet::new();
    for turn in 0..50 {
        let envoy = world.envoy.clone();
        asked.spawn(async move { envoy.json(PATH, &format!("herd-{turn}"), &completion(0..64)).await });
    }
    let mut counts: HashMap<String, usize> = HashMap::new();
    while let Some(answer) = asked.join_next().await {
        *counts.entry(answer??.destination()?.to_owned()).or_default() += 1;
    }
    let of = |address| counts.get(address).copied().unwrap_or_default();
    assert_eq!((of("10.0.0.1:8000"), of("10.0.0.2:8000"), of("10.0.0.3:8000")), (15, 20, 15));
    Ok(())
}

#[tokio::test]
async fn engines_that_are_out_are_out_and_shown() -> Result<()> {
    let (index, world) = with_index().await?;
    let change = |state: EngineState, load: Load| {
        let mut says = index.says();
        says.engines[1].state = state as i32;
        says.engines[1].load = Some(load);
        WatchEvent { engines: vec![says.engines[1].clone()], ..WatchEvent::default() }
    };
    let good = Load { health: 1.0, ..Load::default() };
    for (name, state, load, why) in [
        ("drain", EngineState::InStep, Load { draining: true, ..good.clone() }, "draining"),
        ("sick", EngineState::InStep, Load { health: 0.2, ..good.clone() }, "health"),
        ("full", EngineState::InStep, Load { waiting: 20, ..good.clone() }, "queue_full"),
        ("silent", EngineState::Silent, good.clone(), "silent"),
    ] {
        index.tell(change(state, load));
        let answer = world.envoy.json(PATH, name, &completion(0..64)).await?;
        assert_ne!(answer.destination()?, "10.0.0.2:8000", "{name}");
        assert_eq!(world.decision(name).await?["excluded"], json!([{"engine": "b.0", "why": why}]), "{name}");
    }
    index.tell(change(EngineState::Stale, good));
    world.envoy.json(PATH, "stale", &completion(0..64)).await?;
    let decision = world.decision("stale").await?;
    let stale = decision["candidates"].as_array().and_then(|all| all.iter().find(|c| c["engine"] == "b.0"));
    let factors = &stale.context("b.0 is no candidate")?["factors"];
    assert_eq!((&factors["cache"], &factors["load"]), (&json!(0.0), &json!(0.0)));
    Ok(())
}

#[tokio::test]
async fn the_subset_comes_before_the_cache() -> Result<()> {
    let (_index, world) = with_index().await?;
    let list = [(":method", "POST"), (":path", PATH), ("x-request-id", "s")];
    let hint = Some(Hint::List(vec!["10.0.0.1:8000", "10.0.0.3:8000"]));
    let json = completion(0..64).to_string();
    let first = headers(&list, false, BodySendMode::FullDuplexStreamed, hint);
    let answer = world.envoy.request(vec![first, body(json.as_bytes(), true)]).await?;
    assert_ne!(answer.destination()?, "10.0.0.2:8000");
    assert_eq!(world.decision("s").await?["excluded"], json!([{"engine": "b.0", "why": "subset"}]));
    assert_eq!(world.decision("s").await?["available_tokens"], 48);
    Ok(())
}

#[tokio::test]
async fn a_rank_behind_one_address_is_asked_for() -> Result<()> {
    let mut says = says()?;
    let bundle = says.bundle.clone();
    let mut ranks = ["b.0", "b.1"].map(|id| engine(id, "tiny", SEED, &bundle));
    ranks.iter_mut().zip(0..).for_each(|(e, rank)| e.rank_header = Some(rank));
    says.engines.splice(1..2, ranks);
    says.holds = HashMap::from([("b.1".to_string(), blocks(0..64, "", ""))]);
    let index = FakeIndex::start(says, None)?;
    let world = world(&format!("{FLEET}index: {}", index.address)).await?;
    world.followed(1).await?;
    let answer = world.envoy.json(PATH, "dp", &completion(0..64)).await?;
    assert_eq!(answer.destination()?, "10.0.0.2:8000");
    assert_eq!(answer.set.get("x-data-parallel-rank").map(String::as_str), Some("1"));
    assert!(!answer.removed.iter().any(|name| name == "x-data-parallel-rank"));
    Ok(())
}

#[tokio::test]
async fn an_index_that_dies_and_comes_back_costs_no_request() -> Result<()> {
    let (index, world) = with_index().await?;
    let address = index.address;
    world.envoy.json(PATH, "before", &completion(0..64)).await?.destination()?;
    assert_eq!(world.decision("before").await?["predicted_tokens"], 48);
    // Asked while it dies, and after: each is answered.
    let dying = tokio::task::spawn_blocking(move || drop(index));
    for turn in 0..50 {
        world.envoy.json(PATH, &format!("dying-{turn}"), &completion(0..64)).await?.destination()?;
    }
    dying.await?;
    until("it is known to be away", async || Ok(http::get(world.picker.http, "/readyz").await?["index"] == "away"))
        .await?;
    world.envoy.json(PATH, "away", &completion(0..64)).await?.destination()?;
    let decision = world.decision("away").await?;
    assert_eq!((&decision["degraded"], &decision["predicted_tokens"]), (&json!(["index_away"]), &json!(null)));
    assert_eq!(decision["candidates"].as_array().map(Vec::len), Some(3));
    let _index = FakeIndex::start(says()?, Some(address))?;
    world.followed(1).await?;
    world.envoy.json(PATH, "after", &completion(0..64)).await?.destination()?;
    assert_eq!(world.decision("after").await?["predicted_tokens"], 48);
    Ok(())
}

#[tokio::test]
async fn an_index_that_was_never_there_is_no_hindrance() -> Result<()> {
    let world = world(&format!("{FLEET}index: 127.0.0.1:1")).await?;
    world.envoy.json(PATH, "alone", &completion(0..64)).await?.destination()?;
    // Without an index nobody has said which models there are.
    assert_eq!(world.decision("alone").await?["degraded"], json!(["unknown_model"]));
    Ok(())
}

#[tokio::test]
async fn an_index_that_hangs_is_left_alone_after_the_deadline() -> Result<()> {
    let index = FakeIndex::start(says()?, None)?;
    let more = format!("{FLEET}index: {}\ndeadline: {{base_ms: 1000, max_ms: 1000}}", index.address);
    let world = world(&more).await?;
    world.followed(1).await?;
    index.says().hangs = true;
    world.envoy.json(PATH, "slow", &completion(0..64)).await?.destination()?;
    assert_eq!(world.decision("slow").await?["degraded"], json!(["index_slow"]));
    // For a while it is not even asked.
    world.envoy.json(PATH, "next", &completion(0..64)).await?.destination()?;
    assert_eq!(world.decision("next").await?["degraded"], json!(["index_away"]));
    assert_eq!(index.says().lookups, 1);
    Ok(())
}

#[tokio::test]
async fn a_client_that_leaves_during_a_lookup_leaves_no_placement() -> Result<()> {
    let (index, world) = with_index().await?;
    index.says().hangs = true;
    let mut talk = world.envoy.open().await?;
    talk.send(post(PATH, "gone")).await?;
    talk.send(body(completion(0..64).to_string().as_bytes(), true)).await?;
    until("the index is asked", async || Ok(index.says().lookups == 1)).await?;
    drop(talk);
    until("the body is let go", async || Ok(world.picker.buffered_bytes() == 0)).await?;
    assert_eq!(world.picker.in_flight(), 0);
    assert!(index.says().reserved.is_empty());
    Ok(())
}

#[tokio::test]
async fn of_two_indexes_one_is_asked_and_both_are_told() -> Result<()> {
    let (first, second) = (FakeIndex::start(says()?, None)?, FakeIndex::start(says()?, None)?);
    let deadline = "deadline: {base_ms: 4000, max_ms: 4000}";
    let world = world(&format!("{FLEET}index: ['{}', '{}']\n{deadline}", first.address, second.address)).await?;
    world.followed(1).await?;
    world.envoy.json(PATH, "both", &completion(0..64)).await?.destination()?;
    assert_eq!((first.says().lookups, second.says().lookups), (1, 0));
    until("both are told", async || Ok(first.says().reserved.len() == 1 && second.says().reserved.len() == 1)).await?;
    // The first is followed still and does not answer: the second does, within the same request.
    first.says().hangs = true;
    world.envoy.json(PATH, "other", &completion(0..64)).await?.destination()?;
    assert_eq!(world.decision("other").await?["predicted_tokens"], 48);
    assert_eq!(second.says().lookups, 1);
    tokio::task::spawn_blocking(move || drop(first)).await?;
    until("the second is followed", async || {
        world.envoy.json(PATH, "moved", &completion(0..64)).await?.destination()?;
        Ok(world.decision("moved").await?["predicted_tokens"] == 48)
    })
    .await
}

#[tokio::test]
async fn another_seed_is_said_and_credited_nothing() -> Result<()> {
    let mut says = says()?;
    let bundle = says.bundle.clone();
    says.engines[1] = engine("b.0", "tiny", SEED + 1, &bundle);
    let index = FakeIndex::start(says, None)?;
    let world = world(&format!("{FLEET}index: {}", index.address)).await?;
    world.followed(1).await?;
    let answer = world.envoy.json(PATH, "seed", &completion(0..64)).await?;
    assert_ne!(answer.destination()?, "10.0.0.2:8000");
    let config = http::get(world.picker.http, "/v1/config").await?;
    assert_eq!(config["engines"][1]["state"], "mismatched");
    assert!(config["engines"][1]["reason"].as_str().is_some_and(|r| r.contains("seed")), "{config}");
    Ok(())
}
