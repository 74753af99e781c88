//! Many clients at once, more than the engines' caches can hold, while the index is killed and started again.

use crate::app::journal::{Journal, chat_body, completion_body};
use crate::app::running::Running;
use crate::decision::Class;
use crate::edge::client::{Client, Kind, Seen};
use crate::talk::{Chat, words};
use anyhow::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Clients at a time.
const CLIENTS: u64 = 8;
/// Chats that each has, one after another, and turns of each.
const CHATS: u64 = 2;
const TURNS: u64 = 3;
/// System prompts that the chats share.
const SYSTEMS: u64 = 5;
/// Documents that each client asks about; every second one is asked about by others too.
const DOCUMENTS: u64 = 3;
/// All requests of the phase.
const REQUESTS: usize = (CLIENTS * (CHATS * TURNS + DOCUMENTS)) as usize;
/// The index is killed after this many answers, and started again after that many or after [`LONGEST_AWAY`].
const KILL_AFTER: usize = REQUESTS / 4;
const BACK_AFTER: usize = REQUESTS / 2;
const LONGEST_AWAY: Duration = Duration::from_secs(20);
/// How long an engine's report may take to be joined; those of the time without an index never come.
const REPORTED: Duration = Duration::from_secs(3);

/// Runs the phase.
///
/// # Errors
/// When a part has ended. What does not hold is in the journal.
pub async fn run(running: &mut Running, journal: &mut Journal) -> Result<()> {
    println!("\n{REQUESTS} requests by {CLIENTS} clients at once; the index is killed on the way");
    let done = Arc::new(AtomicUsize::new(0));
    let mut clients = JoinSet::new();
    for number in 0..CLIENTS {
        clients.spawn(one_client(running.client.clone(), number, done.clone()));
    }
    progress(&done, KILL_AFTER, Duration::from_secs(600)).await;
    running.kill_index();
    println!("index killed after {} answers", done.load(Ordering::Relaxed));
    progress(&done, BACK_AFTER, LONGEST_AWAY).await;
    let answered = done.load(Ordering::Relaxed);
    let took = running.restart_index().await?;
    journal.report.index_restart_ms = took.as_secs_f64() * 1e3;
    println!("index back after {answered} answers, in step with both engines after {:.0} ms", took.as_secs_f64() * 1e3);

    let mut ids = Vec::new();
    while let Some(seen) = clients.join_next().await {
        for (label, seen) in seen?? {
            ids.extend(journal.served(&label, &seen).map(|served| (label, served.id)));
        }
    }
    let ended = Instant::now();
    let mut first_wrong = None;
    for (label, id) in &ids {
        let decision = running.decision(id, REPORTED.saturating_sub(ended.elapsed())).await?;
        journal.decision_us.push(decision.stages.total_us as f64);
        let class = decision.class.unwrap_or(Class::Unknown);
        journal.report.count(class);
        if class == Class::Wrong {
            first_wrong.get_or_insert(format!("{label} {}", decision.line()));
        }
    }
    journal.faults.extend(first_wrong.map(|line| format!("the first wrong one: {line}")));
    let Report { exact, raced, wrong, unknown, .. } = journal.report;
    println!("{exact} exact, {raced} raced, {wrong} wrong, {unknown} unknown");
    Ok(())
}

use crate::report::Report;

/// Waits until so many are answered, or for so long.
async fn progress(done: &AtomicUsize, wanted: usize, limit: Duration) {
    let begun = Instant::now();
    while done.load(Ordering::Relaxed) < wanted && begun.elapsed() < limit {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// What one client does; every request with a label and what came of it.
async fn one_client(client: Arc<Client>, number: u64, done: Arc<AtomicUsize>) -> Result<Vec<(String, Seen)>> {
    let mut all = Vec::new();
    for turn_of in 0..CHATS {
        let mut chat = Chat::new(100 + (number + turn_of) % SYSTEMS, 100 + number * CHATS + turn_of);
        for turn in 1..=TURNS {
            chat.ask();
            let seen = client.send(Kind::Chat, &chat_body(&chat)).await?;
            done.fetch_add(1, Ordering::Relaxed);
            let text = seen.answer.as_ref().and_then(|a| a["choices"][0]["message"]["content"].as_str());
            chat.hear(text.unwrap_or_default().to_owned(), None);
            all.push((format!("client {number} chat {turn_of} turn {turn}"), seen));
        }
    }
    for document in 0..DOCUMENTS {
        // Every second one is shared by all; the others fill the caches until something has to go.
        let text = if document % 2 == 0 {
            words(700 + document, 500)
        } else {
            words(800 + number * DOCUMENTS + document, 900)
        };
        let prompt = format!("{text} {}", words(900 + number, 20));
        let seen = client.send(Kind::Completion, &completion_body(&prompt, number.is_multiple_of(2))).await?;
        done.fetch_add(1, Ordering::Relaxed);
        all.push((format!("client {number} document {document}"), seen));
    }
    Ok(all)
}
