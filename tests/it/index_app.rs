//! The whole index on real sockets: what engines do to it, and what it answers.

use crate::index_world::{Publisher, Running, SEED, prompt, until};
use anyhow::{Context, Result};
use harness::edge::http;
use index::answer::Leases;
use index::config::{Config, FleetSource};
use proto::event::{Life, MAX_PAYLOAD_BYTES, seq_frame};
use proto::id::Epoch;
use proto::wire::kvatlas::index::v1 as wire;
use serde_json::json;
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const REQUEST: &str = "0f8fad5b-d9cb-469f-a165-70867728950e";

#[tokio::test]
async fn b8_b9_first_contact_and_every_face() -> Result<()> {
    let engine = Publisher::start("a", SEED).await?;
    engine.engine().bundle = (0..3500u32).map(|n| n as u8).collect();
    engine.hold(&prompt(0..96), true);
    engine.tell().await;
    // The stream is well under way when the index comes: only a snapshot tells of what is held.
    let index = Running::start(&[&engine]).await?;
    index.state("a.0", "in_step").await?;
    let row = index.row("a.0").await?;
    for (key, want) in [
        ("gpu_blocks", json!(6)),
        ("any_blocks", json!(6)),
        ("block_size", json!(16)),
        ("models", json!(["tiny"])),
        ("rule", json!("closed")),
        ("source", json!("agent")),
        ("digest_failures", json!(0)),
        ("resyncs", json!(1)),
        ("gaps", json!(0)),
    ] {
        assert_eq!(row[key], want, "{key} of {row}");
    }
    // All 96 tokens are there: the last block is computed all the same.
    assert_eq!(index.cached("a.0", 0..96).await?, 80);
    assert_eq!(index.cached("a.0", 0..97).await?, 96);
    assert_eq!(index.cached("a.0", 0..200).await?, 96);
    assert_eq!(index.cached("a.0", 1..200).await?, 0);
    let mut grpc = index.grpc().await?;
    let asked = wire::MatchRequest {
        ahead: 0,
        root: 1,
        block_size: 16,
        prompt_tokens: 200,
        fingerprints: prompt(0..200),
        candidates: vec![],
    };
    let answer = grpc.r#match(asked.clone()).await?.into_inner();
    let one = answer.engines.first().context("no engine")?;
    assert_eq!((one.engine.as_str(), one.gpu_blocks, one.cached_tokens, one.in_step), ("a.0", 6, 96, Some(true)));
    assert!(answer.lookup_ns > 0);
    let other = grpc.r#match(wire::MatchRequest { block_size: 32, ..asked.clone() }).await?.into_inner();
    assert_eq!(other.engines.first().map(|one| one.cached_tokens), Some(0));
    let none = grpc.r#match(wire::MatchRequest { candidates: vec!["b.0".into()], ..asked }).await?.into_inner();
    assert_eq!(none.engines, []);

    let blocks = http::get(index.http, "/v1/engines/a.0/blocks").await?;
    let listed: BTreeSet<String> = blocks["blocks"]
        .as_array()
        .context("no list")?
        .iter()
        .filter_map(|fp| Some(fp.as_str()?.to_string()))
        .collect();
    assert_eq!(listed, prompt(0..96).iter().map(u64::to_string).collect());
    let block = http::get(index.http, &format!("/v1/blocks/{}", prompt(0..16)[0])).await?;
    assert_eq!(block["holders"], json!([{"engine": "a.0", "kind": "gpu"}]));
    for (path, status, code) in [
        ("/v1/engines/b.0", 404, "no_engine"),
        ("/v1/blocks/x", 400, "bad_fingerprint"),
        ("/nothing", 404, "not_found"),
        ("/v1/models/x/bundle", 404, "no_model"),
    ] {
        let (got, body) = http::exchange(index.http, "GET", path, None).await?;
        let body: serde_json::Value = serde_json::from_slice(&body)?;
        assert_eq!((got.as_u16(), &body["error"]["code"]), (status, &json!(code)), "{path}");
        assert!(body["error"]["hint"].is_string(), "{path}");
    }
    let (got, _) =
        http::exchange(index.http, "POST", "/v1/match", Some(&json!({"model": "tiny", "prompt": "hello"}))).await?;
    assert_eq!(got.as_u16(), 501);
    assert!(http::is_ok(index.http, "/healthz").await && http::is_ok(index.http, "/readyz").await);
    // Sizes of the table are told by its writer twice a second.
    until("the table's sizes are told", async || Ok(index.metrics().await?.contains("{what=\"blocks\"} 6"))).await?;
    let metrics = index.metrics().await?;
    for line in [
        "kvatlas_index_engines{state=\"in_step\"} 1",
        "kvatlas_index_resyncs_total{reason=\"first\"} 1",
        "kvatlas_index_core{what=\"blocks\"} 6",
    ] {
        assert!(metrics.contains(line), "{line:?} is not in {metrics}");
    }
    until("the bundle is here", async || Ok(index.handle.bundle("tiny").is_ok())).await?;
    let (_, bundle) = http::exchange(index.http, "GET", "/v1/models/tiny/bundle", None).await?;
    assert_eq!(bundle[..], engine.engine().bundle[..]);
    let mut pieces = grpc.get_bundle(wire::BundleRequest { model: "tiny".into() }).await?.into_inner();
    let mut whole = Vec::new();
    while let Some(piece) = pieces.message().await? {
        whole.extend_from_slice(&piece.bytes);
    }
    assert_eq!(whole[..], bundle[..]);
    until("the agent is told how far its stream was read", async || Ok(engine.engine().acked > 0)).await
}

#[tokio::test]
async fn b1_what_is_lost_is_replayed() -> Result<()> {
    let engine = Publisher::start("a", SEED).await?;
    let index = Running::start(&[&engine]).await?;
    index.state("a.0", "in_step").await?;
    let resyncs = index.row("a.0").await?["resyncs"].clone();
    engine.hold(&prompt(0..64), true);
    engine.lose();
    engine.hold(&prompt(0..64)[..1], true);
    engine.lose();
    until("what was lost is there", async || Ok(index.cached("a.0", 0..65).await? == 64)).await?;
    index.state("a.0", "in_step").await?;
    let row = index.row("a.0").await?;
    assert!(row["gaps"].as_u64() >= Some(1) && row["replays"].as_u64() >= Some(1), "{row}");
    assert_eq!((&row["resyncs"], &row["digest_failures"]), (&resyncs, &json!(0)));
    Ok(())
}

#[tokio::test]
async fn c6_a_restart_in_place_leaves_nothing_of_the_old_process() -> Result<()> {
    let (engine, other) = (Publisher::start("a", SEED).await?, Publisher::start("b", SEED).await?);
    let index = Running::start(&[&engine, &other]).await?;
    for one in [&engine, &other] {
        one.hold(&prompt(0..64), true);
        index.state(&format!("{}.0", one.name), "in_step").await?;
        until("held", async || Ok(index.cached(&format!("{}.0", one.name), 0..65).await? == 64)).await?;
    }
    let before = index.row("a.0").await?["epoch"].clone();
    engine.engine().restart(Epoch { start_ms: u64::MAX / 2, random: 5 });
    engine.hold(&prompt(100..132), true);
    until("the new process is followed", async || Ok(index.row("a.0").await?["epoch"] != before)).await?;
    assert_eq!(index.cached("a.0", 0..65).await?, 0);
    until("the new process' set", async || Ok(index.cached("a.0", 100..133).await? == 32)).await?;
    assert_eq!(index.cached("b.0", 0..65).await?, 64);
    let stored = http::get(index.http, "/v1/engines/a.0/blocks").await?;
    assert_eq!(stored["count"], 2);
    Ok(())
}

#[tokio::test]
async fn c13_silence_takes_credit_and_then_everything_and_all_comes_back() -> Result<()> {
    let engine = Publisher::start("a", SEED).await?;
    engine.hold(&prompt(0..64), true);
    let leases = Leases { lease_ms: 3000, ..Leases::default() };
    let config = Config { fleet: FleetSource::Inline(vec![engine.entry()]), leases, ..Config::default() };
    let index = Running::with(config).await?;
    index.state("a.0", "in_step").await?;
    assert_eq!(index.cached("a.0", 0..65).await?, 64);
    engine.quiet(true);
    index.state("a.0", "stale").await?;
    assert_eq!(index.cached("a.0", 0..65).await?, 0);
    assert_eq!(index.row("a.0").await?["gpu_blocks"], 4);
    engine.quiet(false);
    index.state("a.0", "in_step").await?;
    assert_eq!(index.cached("a.0", 0..65).await?, 64);
    engine.quiet(true);
    index.state("a.0", "silent").await?;
    until("everything of it is gone", async || Ok(index.row("a.0").await?["gpu_blocks"] == 0)).await?;
    // Meanwhile it worked on, unheard.
    engine.hold(&prompt(64..128), true);
    engine.lose();
    engine.quiet(false);
    index.state("a.0", "in_step").await?;
    assert_eq!(index.cached("a.0", 64..129).await?, 64);
    Ok(())
}

#[tokio::test]
async fn a5_a6_another_seed_is_named_and_credits_nothing() -> Result<()> {
    let (engine, keyless) = (Publisher::start("a", SEED + 1).await?, Publisher::start("b", 0).await?);
    let index = Running::start(&[&engine, &keyless]).await?;
    for (one, words) in [(&engine, "seed or version differs"), (&keyless, "KVATLAS_SEED")] {
        one.hold(&prompt(0..64), true);
        let name = format!("{}.0", one.name);
        index.state(&name, "mismatched").await?;
        until("its set is there", async || Ok(index.row(&name).await?["gpu_blocks"] == 4)).await?;
        let reason = index.row(&name).await?["reason"].to_string();
        assert!(reason.contains(words), "{reason}");
        assert_eq!(index.cached(&name, 0..65).await?, 0);
    }
    Ok(())
}

#[tokio::test]
async fn c10_c16_an_index_that_starts_anew_is_soon_in_step() -> Result<()> {
    let engine = Publisher::start("a", SEED).await?;
    engine.hold(&prompt(0..64), true);
    let index = Running::start(&[&engine]).await?;
    index.state("a.0", "in_step").await?;
    drop(index);
    engine.hold(&prompt(200..264), true);
    engine.tell().await;
    let index = Running::start(&[&engine]).await?;
    index.state("a.0", "in_step").await?;
    assert_eq!((index.cached("a.0", 0..65).await?, index.cached("a.0", 200..265).await?), (64, 64));
    Ok(())
}

#[tokio::test]
async fn nonsense_is_counted_and_hurts_nobody() -> Result<()> {
    let engine = Publisher::start("a", SEED).await?;
    engine.hold(&prompt(0..64), true);
    // A peer that claims a frame of 2^60 bytes.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let liar = format!("tcp://{}", listener.local_addr()?);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut bytes = vec![0u8; 64];
            (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, 3);
            bytes[12..16].copy_from_slice(b"NULL");
            bytes.extend_from_slice(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB\x02\x10\0\0\0\0\0\0\0");
            let _ = stream.write_all(&bytes).await;
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
    });
    let entry = serde_json::from_value(json!({"name": "liar", "events": liar}))?;
    let config = Config { fleet: FleetSource::Inline(vec![engine.entry(), entry]), ..Config::default() };
    let index = Running::with(config).await?;
    index.state("a.0", "in_step").await?;
    let topic = engine.topic();
    let huge = vec![7u8; MAX_PAYLOAD_BYTES + 1];
    let bad: [&[&[u8]]; 5] = [
        &[topic.as_bytes()],
        &[topic.as_bytes(), b"1234", b"x"],
        &[topic.as_bytes(), &seq_frame(1 << 40), b"\xc1nonsense"],
        &[topic.as_bytes(), &seq_frame(1 << 40), b""],
        &[topic.as_bytes(), &seq_frame(1 << 40), &huge],
    ];
    for frames in bad {
        engine.send(frames).await?;
    }
    until("all of it is counted", async || Ok(index.row("a.0").await?["bad_messages"] == 5)).await?;
    index.state("a.0", "in_step").await?;
    assert_eq!(index.cached("a.0", 0..65).await?, 64);
    until("the liar is named", async || Ok(index.row("liar.0").await?["reason"].to_string().contains("at most")))
        .await?;
    assert_eq!(index.row("liar.0").await?["state"], "silent");
    // A body that is no JSON, and one that is too long.
    let (status, _) = http::exchange(index.http, "POST", "/v1/match", Some(&json!([1]))).await?;
    assert_eq!(status.as_u16(), 400);
    let long = json!({"model": "tiny", "token_ids": vec![1_000_000_000u32; 1_700_000]});
    assert_eq!(http::exchange(index.http, "POST", "/v1/match", Some(&long)).await?.0.as_u16(), 413);
    Ok(())
}

#[tokio::test]
async fn placements_count_until_the_engine_counts_them() -> Result<()> {
    let engine = Publisher::start("a", SEED).await?;
    let index = Running::start(&[&engine]).await?;
    index.state("a.0", "in_step").await?;
    let mut grpc = index.grpc().await?;
    let mut watched = grpc.watch(wire::WatchRequest {}).await?.into_inner();
    let first = watched.message().await?.context("no event")?;
    assert!(first.whole && first.engines.len() == 1 && first.engines[0].engine == "a.0");
    let reserve = wire::ReserveRequest {
        engine: "a.0".into(),
        request_id: REQUEST.into(),
        fingerprints: prompt(0..64),
        tokens: 65,
    };
    grpc.reserve(reserve.clone()).await?;
    let asked = wire::MatchRequest {
        ahead: 0,
        root: 1,
        block_size: 16,
        prompt_tokens: 65,
        fingerprints: prompt(0..64),
        candidates: vec![],
    };
    let one = grpc.r#match(asked.clone()).await?.into_inner().engines.remove(0);
    let load = one.load.context("no load")?;
    assert_eq!((one.coming_blocks, one.gpu_blocks, load.reserved, load.reserved_tokens), (4, 0, 1, 65));
    for (bad, code) in [
        (wire::ReserveRequest { engine: "x.0".into(), ..reserve.clone() }, tonic::Code::NotFound),
        (wire::ReserveRequest { request_id: "x".into(), ..reserve.clone() }, tonic::Code::InvalidArgument),
    ] {
        assert_eq!(grpc.reserve(bad).await.err().map(|status| status.code()), Some(code));
    }
    let id = format!("cmpl-{REQUEST}-0-1a2b3c4d");
    engine.engine().lives.push(Life::Arrived { id: id.clone() });
    engine.engine().lives.push(Life::Started {
        id: id.clone(),
        prompt_tokens: 65,
        cached_tokens: 0,
        predicted_tokens: Some(0),
        seq: 1,
    });
    let mut lives = Vec::new();
    while lives.len() < 2 {
        let event = tokio::time::timeout(Duration::from_secs(60), watched.message()).await??.context("no event")?;
        lives.extend(event.lives);
    }
    assert!(lives.iter().all(|life| life.request_id == REQUEST && life.engine == "a.0"), "{lives:?}");
    let one = grpc.r#match(asked.clone()).await?.into_inner().engines.remove(0);
    assert_eq!((one.coming_blocks, one.load.context("no load")?.reserved), (4, 0));
    engine.engine().lives.push(Life::Finished { id, reason: "stop".into() });
    until("it is over", async || Ok(grpc.r#match(asked.clone()).await?.into_inner().engines[0].coming_blocks == 0))
        .await?;
    grpc.reserve(reserve).await?;
    grpc.release(wire::ReleaseRequest { request_id: REQUEST.into() }).await?;
    let one = grpc.r#match(asked).await?.into_inner().engines.remove(0);
    assert_eq!((one.coming_blocks, one.load.context("no load")?.reserved), (0, 0));
    Ok(())
}

#[tokio::test]
async fn a_stock_engine_is_followed_by_its_own_events() -> Result<()> {
    let engine = Publisher::start("a", SEED).await?;
    engine.quiet(true);
    let entry =
        serde_json::from_value(json!({"name": "a", "events": engine.events, "source": "native", "model": "tiny"}))?;
    let index = Running::with(Config { fleet: FleetSource::Inline(vec![entry]), ..Config::default() }).await?;
    // As vLLM packs it: [ts, [["BlockStored", hashes, parent, tokens, block size, adapter]]].
    let stored = |hashes: [u64; 2], tokens: std::ops::Range<u32>| {
        let event = ("BlockStored", hashes, None::<u64>, tokens.collect::<Vec<u32>>(), 16, None::<u64>);
        proto::control::encode(&(0.5, [event]))
    };
    let first = stored([1, 2], 0..32)?;
    // A subscription takes a moment, and nothing says when it is there: said again until it is heard.
    until("the first events are heard", async || {
        engine.send(&[b"", &seq_frame(0), &first]).await?;
        Ok(index.row("a.0").await?["messages"] != 0)
    })
    .await?;
    until("they are answered", async || Ok(index.cached("a.0", 0..33).await? == 32)).await?;
    let row = index.row("a.0").await?;
    assert_eq!((&row["source"], &row["in_step"], &row["block_size"]), (&json!("native"), &json!(null), &json!(16)));
    // A hole: what came before it may be gone by now.
    engine.send(&[b"", &seq_frame(9), &stored([3, 4], 100..132)?]).await?;
    index.state("a.0", "partial").await?;
    assert_eq!((index.cached("a.0", 0..33).await?, index.cached("a.0", 100..133).await?), (0, 32));
    // A seq that falls: another process.
    engine.send(&[b"", &seq_frame(0), &stored([5, 6], 200..232)?]).await?;
    index.state("a.0", "in_step").await?;
    assert_eq!((index.cached("a.0", 100..133).await?, index.cached("a.0", 200..233).await?), (0, 32));
    Ok(())
}

#[tokio::test]
async fn c4_c5_engines_come_and_go_with_the_fleet_file() -> Result<()> {
    let (a, b) = (Publisher::start("a", SEED).await?, Publisher::start("b", SEED).await?);
    b.hold(&prompt(0..64), true);
    let folder = std::env::temp_dir().join(format!("kvatlas-fleet-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let path = folder.join("fleet.yaml");
    let write = |entries: &[&Publisher]| -> Result<()> {
        let entries: Vec<_> = entries.iter().map(|one| one.entry()).collect();
        Ok(std::fs::write(&path, serde_json::to_string(&entries)?)?)
    };
    write(&[&a])?;
    let index = Running::with(Config { fleet: FleetSource::File(path.clone()), ..Config::default() }).await?;
    index.state("a.0", "in_step").await?;
    let mut watch = index.handle.watch();
    watch.next().await.context("no first update")?;
    write(&[&a, &b])?;
    until("b is there", async || {
        Ok(index
            .handle
            .match_(&index::answer::Query {
                ahead: 0,
                block_size: 16,
                prompt_tokens: 65,
                fingerprints: &prompt(0..64),
                candidates: &["b.0".into()],
            })
            .engines
            .first()
            .is_some_and(|one| one.cached_tokens == 64))
    })
    .await?;
    // A list that is refused changes nothing.
    std::fs::write(&path, "- {name: a}\n- {name: a}\n")?;
    tokio::time::sleep(Duration::from_millis(1200)).await;
    index.state("b.0", "in_step").await?;
    write(&[&b])?;
    until(
        "a is gone",
        async || Ok(http::exchange(index.http, "GET", "/v1/engines/a.0", None).await?.0.as_u16() == 404),
    )
    .await?;
    loop {
        let update = tokio::time::timeout(Duration::from_secs(60), watch.next()).await?.context("the index stopped")?;
        if update.gone.iter().any(|engine| engine.name == "a") {
            break;
        }
    }
    index.state("b.0", "in_step").await?;
    std::fs::remove_dir_all(folder)?;
    Ok(())
}
