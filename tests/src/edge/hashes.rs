//! vLLM's own block hashes (`tests/e2e/block_hashes.py`), asked for a sequence at a time.

use crate::config::Places;
use crate::edge::process::Process;
use anyhow::{Context, Result, bail};
use std::io::Write;
use std::process::{ChildStdin, Command};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::ChildStdout;

/// The process that hashes. It imports vLLM, which takes a while: start it early.
#[derive(Debug)]
pub struct Hasher {
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    process: Process,
}

impl Hasher {
    /// Starts it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(places: &Places, block_size: u32) -> Result<Hasher> {
        let mut command = Command::new(places.python());
        command.arg(places.script("block_hashes.py")).arg(block_size.to_string()).env_remove("PYTHONHASHSEED");
        let (process, input, output) = Process::converse("hasher", &mut command, &places.logs().join("hasher.log"))?;
        let output = BufReader::new(ChildStdout::from_std(output)?).lines();
        Ok(Hasher { input, output, process })
    }

    /// The engine's hash of each full block of `tokens`.
    ///
    /// # Errors
    /// When the process has ended or answers something else.
    pub async fn hashes(&mut self, tokens: &[u32]) -> Result<Vec<Vec<u8>>> {
        let mut line = serde_json::to_vec(tokens)?;
        line.push(b'\n');
        self.input.write_all(&line).context("vLLM's hashing takes no more")?;
        let Some(answer) = self.output.next_line().await? else {
            self.process.alive()?;
            bail!("vLLM's hashing closed its output");
        };
        let hashes: Vec<String> = serde_json::from_str(&answer).with_context(|| format!("not hashes: {answer:?}"))?;
        hashes.iter().map(|hash| unhex(hash)).collect()
    }
}

fn unhex(text: &str) -> Result<Vec<u8>> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair)?, 16).map_err(anyhow::Error::from);
    if !rest.is_empty() {
        bail!("{text:?} is not hex");
    }
    pairs.iter().map(byte).collect()
}
