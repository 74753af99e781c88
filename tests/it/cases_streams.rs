//! Classes B, C and F of the faults that others met, on real sockets: gaps, restarts, ranks. Named after their rows;
//! those about replays are in `stock_replay`, those about agents in `index_app`.

use crate::cases_engine::{Stream, remove, store, tokens};
use crate::index_world::{Publisher, Running, SEED, prompt, until};
use crate::stock_world::{Stock, removed, stored};
use anyhow::{Context, Result};
use harness::edge::http;
use index::answer::Leases;
use index::config::{Config, FleetSource};
use proto::cursor::{Cursor, Step};
use proto::event::{Batch, seq_frame};
use proto::id::Epoch;
use serde_json::{Value, json};

async fn index(engines: &[&Stock]) -> Result<Running> {
    let fleet = FleetSource::Inline(engines.iter().map(|engine| engine.entry.clone()).collect());
    Running::with(Config { fleet, ..Config::default() }).await
}

/// Says the first step again and again until it is heard: a subscription takes a moment.
async fn greet(engine: &mut Stock, index: &Running, row: &str) -> Result<()> {
    let payload = crate::stock_world::batch(0.5, &[]);
    engine.seq = 1;
    until("the first message is heard", async || {
        engine.send(&[b"", &seq_frame(0), &payload]).await?;
        Ok(index.row(row).await?["messages"] != 0)
    })
    .await
}

#[test]
fn b5_a_snapshot_never_moves_the_place_in_the_stream_back() {
    let epoch = Epoch { start_ms: 1, random: 1 };
    let mut cursor = Cursor::at(epoch, 500);
    cursor.restart(epoch, 20);
    assert_eq!((cursor.next(), cursor.step(epoch, 500), cursor.step(epoch, 20)), (500, Step::Contiguous, Step::Stale));
}

#[tokio::test]
async fn b12_other_publishers_are_counted_and_named() -> Result<()> {
    let mut engine = Stock::start("a", false, false).await?;
    let index = index(&[&engine]).await?;
    greet(&mut engine, &index, "a.0").await?;
    engine.send(&[b"payload alone"]).await?;
    engine.send(&[b"topic", b"payload"]).await?;
    engine.send(&[b"", &seq_frame(1), b"\xc1 no MessagePack"]).await?;
    until("all three are counted", async || Ok(index.row("a.0").await?["bad_messages"] == 3)).await?;
    let reason = index.row("a.0").await?["reason"].to_string();
    assert!(reason.contains("not a batch of KV events"), "{reason}");
    let metrics = index.metrics().await?;
    assert!(metrics.contains("kvatlas_index_stream_events_total{event=\"bad\"} 3"), "{metrics}");
    // What they said is lost, as with a gap: the next message shows it.
    engine.seq = 2;
    engine.step(&[stored(&[1], None, 0..16)], false).await?;
    index.state("a.0", "partial").await?;
    assert_eq!(index.cached("a.0", 0..17).await?, 16);
    Ok(())
}

#[tokio::test]
async fn b13_blocks_that_are_not_credited_are_counted_by_reason() -> Result<()> {
    let mut engine = Stock::start("a", false, false).await?;
    let index = index(&[&engine]).await?;
    greet(&mut engine, &index, "a.0").await?;
    engine.step(&[stored(&[5, 6, 7], Some(4), 0..48)], false).await?;
    engine.step(&[stored(&[8], None, 0..5), removed(&[99])], false).await?;
    until("they are counted", async || Ok(index.row("a.0").await?["native"]["unknown_removed"] == 1)).await?;
    assert_eq!(index.row("a.0").await?["native"], json!({"parked": 3, "unplaced": 1, "unknown_removed": 1}));
    let metrics = index.metrics().await?;
    assert!(metrics.contains("kvatlas_index_native_total{engine=\"a.0\",reason=\"parked\"} 3"), "{metrics}");
    Ok(())
}

#[test]
fn c1_children_of_what_was_before_wait_and_are_whole_when_it_is_used_again() {
    let mut stream = Stream::new();
    stream.say(json!([store(json!([3]), json!(2), &tokens(8, 1), json!({}))]));
    stream.say(json!([store(json!([4]), json!(3), &tokens(12, 1), json!({}))]));
    assert_eq!((stream.depths(&tokens(0, 4)), stream.counted().parked), ((0, 0), 2));
    // The conversation's start is computed again, at the latest when its first blocks were evicted.
    stream.say(json!([store(json!([1, 2]), Value::Null, &tokens(0, 2), json!({}))]));
    assert_eq!((stream.depths(&tokens(0, 4)), stream.counted().unparked), ((4, 4), 2));
}

#[test]
fn c2_no_parent_is_guessed() {
    let mut stream = Stream::new();
    stream.say(json!([store(json!([3]), json!(2), &tokens(0, 1), json!({}))]));
    // As a root it would be the first block of this prompt, which the engine does not have.
    assert_eq!((stream.depths(&tokens(0, 1)), stream.0.residency().resident()), ((0, 0), 0));
    stream.say(json!([remove(json!([3]), json!({}))]));
    assert_eq!((stream.0.unnamed(), stream.0.parked_tokens()), (0, 0));
}

#[tokio::test]
async fn c8_a_clear_empties_one_engine_and_no_other() -> Result<()> {
    let (mut a, mut b) = (Stock::start("a", true, false).await?, Stock::start("b", true, false).await?);
    for engine in [&mut a, &mut b] {
        engine.step(&[stored(&[1, 2], None, 0..32)], false).await?;
    }
    let index = index(&[&a, &b]).await?;
    for row in ["a.0", "b.0"] {
        until("held", async || Ok(index.cached(row, 0..33).await? == 32)).await?;
    }
    a.step(&[proto::control::encode(&("AllBlocksCleared",))?], false).await?;
    until("a is empty", async || Ok(index.cached("a.0", 0..33).await? == 0)).await?;
    assert_eq!((index.cached("b.0", 0..33).await?, index.row("a.0").await?["gpu_blocks"].clone()), (32, json!(0)));
    index.state("a.0", "in_step").await
}

#[test]
fn c9_a_clear_is_of_one_tier_where_it_says_so() {
    let cleared = |medium: Value| {
        let mut stream = Stream::new();
        stream.say(json!([
            store(json!([1, 2]), Value::Null, &tokens(0, 2), json!({})),
            store(json!([1, 2]), Value::Null, &tokens(0, 2), json!({"medium": "CPU"}))
        ]));
        stream.say(json!([{"type": "AllBlocksCleared", "medium": medium}]));
        stream.depths(&tokens(0, 2))
    };
    assert_eq!(cleared(json!("GPU")), (0, 2));
    assert_eq!(cleared(json!("CPU")), (2, 2));
    // No version says so yet: whatever it was, it may be all.
    assert_eq!(cleared(Value::Null), (0, 0));
}

#[tokio::test]
async fn c12_an_engine_that_does_not_answer_delays_nobody() -> Result<()> {
    let mut engine = Stock::start("a", true, false).await?;
    engine.step(&[stored(&[1, 2], None, 0..32)], false).await?;
    let dead =
        serde_json::from_value(json!({"name": "dead", "events": "tcp://127.0.0.1:9", "replay": "tcp://127.0.0.1:9",
                                             "address": "127.0.0.1:9", "source": "native", "model": "tiny"}))?;
    let fleet = FleetSource::Inline(vec![dead, engine.entry.clone()]);
    let index = Running::with(Config { fleet, ..Config::default() }).await?;
    assert!(http::is_ok(index.http, "/readyz").await);
    // Asked before anything is known: an answer without credit, not an error.
    assert_eq!(index.lookup(0..33).await?.len(), 2);
    until("the other one is answered", async || Ok(index.cached("a.0", 0..33).await? == 32)).await?;
    assert_eq!(
        (index.row("dead.0").await?["state"].clone(), index.cached("dead.0", 0..33).await?),
        (json!("silent"), 0)
    );
    Ok(())
}

#[test]
fn c14_the_defaults_agree() -> Result<()> {
    index::config::check(&Config::default())?;
    let leases = Leases::default();
    // An agent's heartbeat is at most 100 ms apart: nobody is reaped for waiting for one.
    assert!(3 * 100 <= leases.late_ms && leases.late_ms < leases.stale_ms && leases.stale_ms < leases.lease_ms);
    // Five readings of the metrics, one a second.
    const { assert!(index::answer::NATIVE_SILENT_MS >= 5 * 1000) };
    Ok(())
}

#[test]
fn c20_processes_of_one_pid_and_one_start_are_two() {
    let (one, other) = (Epoch { start_ms: 7, random: 1 }, Epoch { start_ms: 7, random: 2 });
    let mut cursor = Cursor::at(one, 5);
    assert_eq!(cursor.step(other, 5), Step::Restarted);
    cursor.restart(other, 0);
    assert_eq!(cursor.step(one, 5), Step::Foreign);
}

#[tokio::test]
async fn f1_a_rank_that_works_and_says_nothing_is_named() -> Result<()> {
    let mut speaks = Stock::start("a", false, true).await?;
    let silent = Stock::start("a-1", false, true).await?;
    let index = index(&[&speaks, &silent]).await?;
    greet(&mut speaks, &index, "a.0").await?;
    speaks.step(&[stored(&[1], None, 0..16)], false).await?;
    until("both were read", async || Ok(index.row("a-1.0").await?["state"] == "syncing")).await?;
    (speaks.behaviour().served, silent.behaviour().served) = (1e6, 1e6);
    until("the silent one is named", async || {
        Ok(index.row("a-1.0").await?["reason"].to_string().contains("no event of it was heard"))
    })
    .await?;
    assert_eq!(index.row("a.0").await?["reason"], "");
    Ok(())
}

#[tokio::test]
async fn f6_two_processes_under_one_name_are_a_conflict() -> Result<()> {
    let engine = Publisher::start("a", SEED).await?;
    engine.hold(&prompt(0..64), true);
    let index = Running::start(&[&engine]).await?;
    index.state("a.0", "in_step").await?;
    // Another one, which started earlier, speaks under the same name.
    let old = Batch { version: 1, epoch: Epoch { start_ms: 1, random: 9 }, step_ms: 0, ops: vec![] }.encode()?;
    let topic = engine.topic();
    until("it is shown", async || {
        engine.send(&[topic.as_bytes(), &seq_frame(7), &old]).await?;
        let rows = http::get(index.http, "/v1/engines").await?;
        Ok(rows["engines"].as_array().context("no list")?.iter().any(|row| row["state"] == "conflict"))
    })
    .await?;
    assert_eq!(index.cached("a.0", 0..65).await?, 64);
    index.state("a.0", "in_step").await
}
