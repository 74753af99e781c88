//! Stock engines on real sockets: late starts, gaps, truncated replays, restarts and signs of life.

use crate::index_world::{Running, until};
use crate::stock_world::{Stock, removed, stored};
use anyhow::Result;
use index::config::{Config, FleetSource};
use serde_json::json;

async fn index(engines: &[&Stock]) -> Result<Running> {
    let fleet = FleetSource::Inline(engines.iter().map(|engine| engine.entry.clone()).collect());
    Running::with(Config { fleet, ..Config::default() }).await
}

/// Two steps before anybody listens: a prompt of two blocks, a third that follows.
async fn warmed(name: &str, metrics: bool) -> Result<Stock> {
    let mut engine = Stock::start(name, true, metrics).await?;
    engine.step(&[stored(&[1, 2], None, 0..32)], false).await?;
    engine.step(&[stored(&[3], Some(2), 32..48)], false).await?;
    Ok(engine)
}

#[tokio::test]
async fn b2_b9_c10_a_late_start_is_made_good_by_replays_of_both_layouts() -> Result<()> {
    for topic in [false, true] {
        let mut engine = warmed("a", false).await?;
        engine.behaviour().topic = topic;
        let index = index(&[&engine]).await?;
        index.state("a.0", "in_step").await?;
        assert_eq!(index.cached("a.0", 0..49).await?, 48, "with topic: {topic}");
        engine.step(&[removed(&[3]), stored(&[4], Some(2), 100..116)], false).await?;
        until("it goes on live", async || Ok(index.cached("a.0", 0..49).await? == 32)).await?;
        let row = index.row("a.0").await?;
        assert_eq!((&row["gaps"], &row["replays"], &row["in_step"]), (&json!(0), &json!(1), &json!(null)));
        assert_eq!(row["native"], json!({"stored": 4, "removed": 1}));
    }
    Ok(())
}

#[tokio::test]
async fn b1_b4_a_gap_is_closed_by_a_replay_and_applied_in_order() -> Result<()> {
    let mut engine = warmed("a", false).await?;
    let index = index(&[&engine]).await?;
    index.state("a.0", "in_step").await?;
    // A removal is lost, and the store that comes after it: applied in the other order the block would be back.
    engine.step(&[removed(&[2])], true).await?;
    engine.step(&[stored(&[2], Some(1), 16..32)], true).await?;
    engine.step(&[removed(&[3])], true).await?;
    engine.step(&[stored(&[9], None, 500..516)], false).await?;
    until("the gap is closed", async || Ok(index.cached("a.0", 500..517).await? == 16)).await?;
    index.state("a.0", "in_step").await?;
    assert_eq!(index.cached("a.0", 0..49).await?, 32);
    let row = index.row("a.0").await?;
    assert_eq!((&row["gaps"], &row["replays"], &row["epochs"]), (&json!(1), &json!(2), &json!(0)));
    // From the last message that was applied, so that another process' replay would show.
    assert_eq!(engine.behaviour().asked, [0, 1]);
    Ok(())
}

#[tokio::test]
async fn a_replay_that_is_dropped_in_part_is_asked_for_again() -> Result<()> {
    let mut engine = Stock::start("a", true, false).await?;
    for block in 0..20u64 {
        let parent = block.checked_sub(1);
        let tokens = 16 * block as u32..16 * (block + 1) as u32;
        engine.step(&[stored(&[block], parent, tokens)], false).await?;
    }
    // A replay gives seven messages and no end; the next one gives the rest of them, little by little.
    (engine.behaviour().most, engine.behaviour().marker) = (7, false);
    let index = index(&[&engine]).await?;
    until("pieces make a whole", async || Ok(engine.behaviour().asked.len() >= 4)).await?;
    engine.behaviour().marker = true;
    index.state("a.0", "in_step").await?;
    assert_eq!(index.cached("a.0", 0..321).await?, 320);
    assert_eq!(engine.behaviour().asked[..4], [0, 6, 12, 18]);
    Ok(())
}

#[tokio::test]
async fn b6_b8_a_ring_that_rolled_over_gives_a_partial_view_and_says_so() -> Result<()> {
    let mut engine = warmed("a", false).await?;
    engine.step(&[stored(&[7, 8], None, 700..732)], false).await?;
    engine.behaviour().ring.drain(..2);
    let index = index(&[&engine]).await?;
    index.state("a.0", "partial").await?;
    let row = index.row("a.0").await?;
    assert!(row["reason"].to_string().contains("events are missing"), "{row}");
    assert_eq!((index.cached("a.0", 700..733).await?, index.cached("a.0", 0..49).await?), (32, 0));
    // The conversation goes on: what is stored from its start is whole again, what hangs on the lost part is not.
    engine.step(&[stored(&[4], Some(3), 48..64), stored(&[1, 2], None, 0..32)], false).await?;
    until("stored anew", async || Ok(index.cached("a.0", 0..49).await? == 32)).await?;
    index.state("a.0", "partial").await
}

#[tokio::test]
async fn c6_a_restart_in_place_leaves_nothing_of_the_old_process() -> Result<()> {
    let mut engine = warmed("a", true).await?;
    let index = index(&[&engine]).await?;
    index.state("a.0", "in_step").await?;
    assert_eq!(index.cached("a.0", 0..49).await?, 48);
    engine.die().await;
    // The new process says as much as the old one did before anybody hears it: its numbers fit.
    engine.rise(2000.0).await?;
    engine.step(&[stored(&[21], None, 600..616)], true).await?;
    engine.step(&[stored(&[22], Some(21), 616..632)], true).await?;
    until("the new process is followed", async || Ok(index.cached("a.0", 600..633).await? == 32)).await?;
    index.state("a.0", "in_step").await?;
    assert_eq!(index.cached("a.0", 0..49).await?, 0);
    Ok(())
}

#[tokio::test]
async fn c13_quiet_is_not_stale_and_no_metrics_are_silence() -> Result<()> {
    let engine = warmed("a", true).await?;
    let index = index(&[&engine]).await?;
    index.state("a.0", "in_step").await?;
    // Longer than an agent may be silent, and than the limit without a sign of life.
    tokio::time::sleep(std::time::Duration::from_millis(6000)).await;
    assert_eq!((index.cached("a.0", 0..49).await?, index.row("a.0").await?["state"].clone()), (48, json!("in_step")));
    engine.behaviour().started = None;
    index.state("a.0", "silent").await?;
    assert_eq!(index.cached("a.0", 0..49).await?, 0);
    let row = index.row("a.0").await?;
    assert!(row["reason"].to_string().contains("/metrics cannot be read"), "{row}");
    // It is back: its set was not lost.
    engine.behaviour().started = Some(1000.0);
    index.state("a.0", "in_step").await?;
    assert_eq!(index.cached("a.0", 0..49).await?, 48);
    Ok(())
}
