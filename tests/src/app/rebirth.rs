//! One engine is killed with nothing in flight and comes back under its name: what it held is gone at once.

use crate::app::journal::Journal;
use crate::app::rest::depths;
use crate::app::running::Running;
use crate::app::sequential::follow;
use crate::holdings::Known;
use crate::talk::Chat;
use anyhow::{Result, bail};
use std::time::{Duration, Instant};

/// How long the index may credit an engine that says nothing: the demo's `stale_after_ms` is 5 s.
const UNCREDITED: Duration = Duration::from_secs(20);

/// Kills the engine that holds more, sends a turn of each of its chats to the fleet without it and after its return.
///
/// # Errors
/// When a part does not answer or does not come back. What does not hold is in the journal.
pub async fn run(running: &mut Running, journal: &mut Journal, known: &Known, chats: &mut [Chat]) -> Result<()> {
    let views = running.views().await?;
    let Some((victim, _)) = (0..running.plan.engines.len())
        .filter_map(|n| Some((n, views.iter().find(|v| v.engine == running.plan.engines[n].id())?.gpu_blocks)))
        .max_by_key(|(_, blocks)| *blocks)
    else {
        bail!("the index knows no engine")
    };
    let id = running.plan.engines[victim].id();
    let before = running.view(victim).await?;
    println!("\nEngine {id} is killed; it held {} blocks", before.gpu_blocks);
    running.kill_engine(victim);

    let killed = Instant::now();
    while depths(running, known, victim).await?.iter().any(|depth| *depth > 0) {
        if killed.elapsed() > UNCREDITED {
            journal.faults.push(format!("{id} is dead for {} s and still credited", UNCREDITED.as_secs()));
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    println!("credited nothing after {} ms", killed.elapsed().as_millis());

    running.restart_engine(victim)?;
    // Whoever asks while it comes back is served by the other one, and exactly.
    let mut orphans: Vec<&mut Chat> = chats.iter_mut().filter(|c| c.holder.as_deref() == Some(id.as_str())).collect();
    if let Some(chat) = orphans.first_mut() {
        chat.holder = None;
        follow(running, journal, "a chat of the dead engine", chat).await?;
        if chat.holder.as_deref() == Some(id.as_str()) {
            journal.faults.push(format!("a request went to {id}, which is dead"));
        }
    }

    // From its first sign of life on, nothing that it held before may be credited.
    let watch = async {
        loop {
            if let Ok(view) = running.view(victim).await
                && view.epoch != before.epoch
                && view.state == "in_step"
            {
                return view;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let reborn = tokio::time::timeout(Duration::from_secs(900), watch).await;
    let Ok(reborn) = reborn else { bail!("{id} did not come back: see its log") };
    let credited = depths(running, known, victim).await?.iter().filter(|depth| **depth > 0).count();
    if reborn.gpu_blocks > 0 || credited > 0 {
        let held = reborn.gpu_blocks;
        journal.faults.push(format!("{id} came back with {held} blocks, {credited} old prompts are still credited"));
    }
    println!("back as a new life with {} blocks, {credited} old prompts credited", reborn.gpu_blocks);
    running.engine_ready(victim).await?;
    running.at_rest().await?;
    if let Some(chat) = orphans.last_mut().filter(|c| c.holder.as_deref() == Some(id.as_str())) {
        // Its old turns are nowhere now, or only in part: what is predicted must be so, too.
        chat.holder = None;
        follow(running, journal, "a chat of the engine's former life", chat).await?;
    }
    Ok(())
}
