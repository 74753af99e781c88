//! Asking the index over gRPC, as a picker does, and how fresh its answers are.

use crate::plan::{EnginePorts, local};
use anyhow::{Context, Result};
use proto::block::Fingerprint;
use proto::event::{Batch, Op};
use proto::wire::kvatlas::index::v1::MatchRequest;
use proto::wire::kvatlas::index::v1::index_client::IndexClient;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tonic::transport::{Channel, Endpoint};
use zeromq::{Socket, SocketRecv, SubSocket};

/// A sample is given up when its block is not answerable by then: it was evicted, or the index is away.
const GIVE_UP: Duration = Duration::from_secs(2);
/// Blocks whose parents are remembered. A run of the demo has some thousand.
const MAX_PARENTS: usize = 1 << 20;

/// Connects to the index's gRPC; the connection is made, and made again, when it is used.
///
/// # Errors
/// When the address is not one.
pub fn connect(grpc_port: u16) -> Result<IndexClient<Channel>> {
    Ok(IndexClient::new(Endpoint::from_shared(format!("http://{}", local(grpc_port)))?.connect_lazy()))
}

/// Leading blocks on GPU that the index credits one engine with, for a chain of fingerprints.
///
/// # Errors
/// When the index does not answer or does not know the engine.
pub async fn depth(
    index: &mut IndexClient<Channel>,
    engine: &str,
    root: Fingerprint,
    block_size: u32,
    fingerprints: &[Fingerprint],
) -> Result<u32> {
    let question = MatchRequest {
        root,
        block_size,
        // One token more than the blocks, so that the last block counts.
        prompt_tokens: u32::try_from(fingerprints.len())? * block_size + 1,
        fingerprints: fingerprints.to_vec(),
        candidates: vec![engine.to_owned()],
        ahead: 0,
    };
    let answer = index.r#match(question).await?.into_inner();
    let found = answer.engines.iter().find(|e| e.engine == engine);
    Ok(found.with_context(|| format!("the index does not know {engine}"))?.gpu_blocks)
}

/// Samples of "engine step to answerable", in milliseconds.
pub type Samples = Arc<Mutex<Vec<f64>>>;

/// Listens to one engine's stream and, for each message that stores blocks, asks the index until it has the last of
/// them. Ends when aborted. Engine and harness are one machine here, so their clocks may be compared.
///
/// # Errors
/// When the stream cannot be opened.
pub async fn sample_freshness(ports: EnginePorts, grpc_port: u16, block_size: u32, samples: Samples) -> Result<()> {
    let mut stream = SubSocket::new();
    stream.connect(&format!("tcp://{}", local(ports.events))).await?;
    stream.subscribe("").await?;
    let mut index = connect(grpc_port)?;
    // Each block's parent; a root is its own parent.
    let mut parents: HashMap<Fingerprint, Fingerprint> = HashMap::new();
    loop {
        let message = stream.recv().await?;
        let Some(batch) = message.get(2).and_then(|payload| Batch::decode(payload).ok()) else { continue };
        let mut newest = None;
        for op in &batch.ops {
            let Op::Store(store) = op else { continue };
            let mut parent = store.parent.fingerprint();
            if parents.len() < MAX_PARENTS {
                if matches!(store.parent, proto::event::Parent::Root { .. }) {
                    parents.insert(parent, parent);
                }
                for fp in &store.fingerprints.0 {
                    parents.insert(*fp, parent);
                    parent = *fp;
                }
            }
            newest = store.fingerprints.0.last().copied().or(newest);
        }
        let Some(chain) = newest.and_then(|fp| up_to_root(&parents, fp)) else { continue };
        let (root, blocks) = (chain[0], &chain[1..]);
        let begun = Instant::now();
        while begun.elapsed() < GIVE_UP {
            let answer = depth(&mut index, &ports.id(), root, block_size, blocks).await;
            if answer.is_ok_and(|depth| depth as usize == blocks.len()) {
                let now_ms = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64() * 1e3;
                if let Ok(mut samples) = samples.lock() {
                    samples.push((now_ms - batch.step_ms as f64).max(0.0));
                }
                break;
            }
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
    }
}

/// Root and blocks down to `fp`; `None` when a parent was announced before we listened.
fn up_to_root(parents: &HashMap<Fingerprint, Fingerprint>, fp: Fingerprint) -> Option<Vec<Fingerprint>> {
    let mut chain = vec![fp];
    loop {
        let last = *chain.last()?;
        let parent = *parents.get(&last)?;
        if parent == last {
            chain.reverse();
            return (chain.len() > 1).then_some(chain);
        }
        chain.push(parent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_is_known_from_its_root() {
        let parents = HashMap::from([(1, 1), (2, 1), (3, 2), (5, 4)]);
        assert_eq!(up_to_root(&parents, 3), Some(vec![1, 2, 3]));
        assert_eq!(up_to_root(&parents, 5), None);
    }
}
