//! Asking an agent for what its engine's own block pool holds.

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use proto::control::{Reply, Request, decode, encode};
use std::collections::BTreeSet;
use std::time::Duration;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

/// Longest wait for a whole audit: the agent reads the pool between two engine steps, or while the engine is idle.
const LIMIT: Duration = Duration::from_secs(60);
/// Most pieces of one audit: no pool of a test has a million blocks.
const MAX_PIECES: usize = 4096;

/// The engine's hashes of all blocks that are cached in its pool. `control` is `tcp://host:port`.
///
/// # Errors
/// When the agent does not answer, or not that.
pub async fn pool(control: &str) -> Result<BTreeSet<Vec<u8>>> {
    let mut socket = DealerSocket::new();
    let talk = async {
        socket.connect(control).await?;
        let mut hashes = BTreeSet::new();
        let mut from = 0;
        for _ in 0..MAX_PIECES {
            let mut message = ZmqMessage::from(Bytes::new());
            message.push_back(encode(&Request::Audit { from })?.into());
            socket.send(message).await?;
            let answer = socket.recv().await?;
            let payload = answer.get(answer.len().saturating_sub(1)).context("an empty answer")?;
            match decode(payload)? {
                Reply::Audit { blocks, next } => {
                    hashes.extend(blocks.into_iter().map(|(_, hash)| hash.into_vec()));
                    match next {
                        Some(next) if next > from => from = next,
                        Some(next) => bail!("after block {from} the agent goes on with block {next}"),
                        None => return Ok(hashes),
                    }
                }
                other => bail!("the agent answered an audit with {other:?}"),
            }
        }
        bail!("an audit of more than {MAX_PIECES} pieces")
    };
    let outcome = tokio::time::timeout(LIMIT, talk).await;
    outcome
        .unwrap_or_else(|_| bail!("no answer within {} s", LIMIT.as_secs()))
        .with_context(|| format!("audit of {control}"))
}
