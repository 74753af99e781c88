//! The OpenAI client (`tests/e2e/drive.py`) as a process that is told what to send.

use crate::config::Places;
use crate::edge::process::Process;
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashMap;
use std::io::Write;
use std::process::{ChildStdin, Command};
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::sync::oneshot;

/// Which of the client's calls to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// `chat.completions.create`.
    Chat,
    /// `completions.create`.
    Completion,
}

#[derive(Serialize)]
struct Order<'a> {
    id: u64,
    kind: Kind,
    body: &'a Value,
}

/// What the client saw of one request.
#[derive(Debug, Clone, Deserialize)]
pub struct Seen {
    id: u64,
    /// HTTP status, 0 when there was none.
    pub status: u16,
    /// The answer.
    pub answer: Option<Value>,
    /// The error, as far as there was one.
    pub error: Option<String>,
    /// From sending to the whole answer, milliseconds.
    pub ms: f64,
}

type Waiting = Arc<Mutex<HashMap<u64, oneshot::Sender<Seen>>>>;

/// The running client.
#[derive(Debug)]
pub struct Client {
    state: Mutex<State>,
    waiting: Waiting,
    process: Process,
}

#[derive(Debug)]
struct State {
    next: u64,
    input: ChildStdin,
}

impl Client {
    /// Starts a client of the server at `base` (`http://host:port`).
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(places: &Places, base: &str) -> Result<Client> {
        let mut command = Command::new(places.python());
        command.arg(places.script("drive.py")).arg(format!("{base}/v1"));
        let (process, input, output) = Process::converse("client", &mut command, &places.logs().join("client.log"))?;
        let waiting = Waiting::default();
        let answers = tokio::process::ChildStdout::from_std(output)?;
        tokio::spawn(deliver(answers, waiting.clone()));
        Ok(Client { state: Mutex::new(State { next: 0, input }), waiting, process })
    }

    /// Sends one request and waits for what comes of it. Any number may be under way.
    ///
    /// # Errors
    /// When the client itself has ended. A request that fails is not an error here.
    pub async fn send(&self, kind: Kind, body: &Value) -> Result<Seen> {
        let (tell, told) = oneshot::channel();
        {
            let mut state = self.state.lock().map_err(|_| anyhow::anyhow!("the client's lock is poisoned"))?;
            state.next += 1;
            let id = state.next;
            self.waiting.lock().map_err(|_| anyhow::anyhow!("the client's lock is poisoned"))?.insert(id, tell);
            let mut line = serde_json::to_vec(&Order { id, kind, body })?;
            line.push(b'\n');
            // Blocking, but some kilobytes to a process that does nothing but read.
            state.input.write_all(&line).context("the client takes no more requests")?;
        }
        match told.await {
            Ok(seen) => Ok(seen),
            Err(_) => {
                self.process.alive()?;
                bail!("the client closed its output")
            }
        }
    }
}

/// Hands every answer to who waits for it; when the client ends, all who wait are let go.
async fn deliver(answers: tokio::process::ChildStdout, waiting: Waiting) {
    let mut lines = BufReader::new(answers).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let Ok(seen) = serde_json::from_str::<Seen>(&line) else { continue };
        let Ok(mut waiting) = waiting.lock() else { return };
        if let Some(tell) = waiting.remove(&seen.id) {
            let _ = tell.send(seen);
        }
    }
    if let Ok(mut waiting) = waiting.lock() {
        waiting.clear();
    }
}
