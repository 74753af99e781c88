//! One request at a time: every turn of a chat must go to the engine of the turn before, and what the picker predicts
//! must be what the engine takes from its cache.

use crate::app::journal::{Journal, chat_body, completion_body};
use crate::app::running::Running;
use crate::decision::Class;
use crate::edge::client::Kind;
use crate::talk::{Chat, words};
use anyhow::Result;

/// Chats at a time; two of them share a system prompt.
const CHATS: u64 = 6;
/// Turns of each. All in all they need fewer blocks than one engine has, so nothing is evicted here.
const TURNS: u64 = 4;
/// Documents that are asked about, and questions to each.
const DOCUMENTS: u64 = 2;
const QUESTIONS: u64 = 3;

/// Runs the phase; the chats go on later.
///
/// # Errors
/// When a part has ended. What does not hold is in the journal.
pub async fn run(running: &Running, journal: &mut Journal) -> Result<Vec<Chat>> {
    println!("\nOne request at a time: {CHATS} chats of {TURNS} turns, interleaved");
    let mut chats: Vec<Chat> = (0..CHATS).map(|n| Chat::new(n % (CHATS - 1), n)).collect();
    for turn in 1..=TURNS {
        for (number, chat) in chats.iter_mut().enumerate() {
            let label = format!("chat {number} turn {turn}");
            follow(running, journal, &label, chat).await?;
        }
    }
    println!("\n{QUESTIONS} questions to each of {DOCUMENTS} documents");
    for question in 1..=QUESTIONS {
        for document in 0..DOCUMENTS {
            let prompt = format!("{} {}", words(500 + document, 300), words(600 + question, 30));
            let label = format!("document {document} question {question}");
            let stream = question.is_multiple_of(2);
            single(running, journal, &label, Kind::Completion, &completion_body(&prompt, stream)).await?;
        }
    }
    Ok(chats)
}

/// One more turn of a chat.
///
/// # Errors
/// When a part has ended.
pub async fn follow(running: &Running, journal: &mut Journal, label: &str, chat: &mut Chat) -> Result<()> {
    chat.ask();
    let Some((text, engine)) = single(running, journal, label, Kind::Chat, &chat_body(chat)).await? else {
        return Ok(());
    };
    if let Some(holder) = &chat.holder {
        journal.report.follow_up_turns += 1;
        if engine.as_ref() == Some(holder) {
            journal.report.follow_ups_to_holder += 1;
        } else {
            journal.faults.push(format!("{label} went to {engine:?}, the turn before is in {holder}"));
        }
    }
    chat.hear(text, engine);
    Ok(())
}

/// One request, counted; its text and the engine that it went to.
async fn single(
    running: &Running,
    journal: &mut Journal,
    label: &str,
    kind: Kind,
    body: &serde_json::Value,
) -> Result<Option<(String, Option<String>)>> {
    journal.report.requests += 1;
    let Some((served, decision)) = journal.ask(running, label, kind, body).await? else { return Ok(None) };
    let predicted = decision.predicted_tokens.unwrap_or(0);
    let delivered = decision.delivered.map_or(0, |d| d.cached_tokens);
    journal.report.predicted_cached_tokens += u64::from(predicted);
    journal.report.delivered_cached_tokens += u64::from(delivered);
    journal.report.usage_cached_tokens += u64::from(served.usage_cached);
    if decision.class != Some(Class::Exact) || delivered != served.usage_cached {
        let usage = served.usage_cached;
        journal.faults.push(format!("{label}: predicted {predicted}, delivered {delivered}, usage says {usage}"));
    }
    Ok(Some((served.text, decision.engine)))
}
