//! A stock engine's stream for the tests that are named after faults that others met: events as JSON, packed as the
//! engine packs them, through decoder and residency.

use proto::block::{self, Namespace};
use proto::control::encode;
use proto::native::counters::Counters;
use proto::native::dialect::EventBatch;
use proto::native::engine::{Limits, NativeEngine};
use serde_json::{Value, json};

/// The deployment's seed.
pub const SEED: u64 = 0x5eed;
/// Tokens a block.
pub const SIZE: usize = 4;

/// One engine's stream.
pub struct Stream(pub NativeEngine);

impl Stream {
    /// Nothing heard yet.
    pub fn new() -> Self {
        Self(NativeEngine::new("tiny", SEED, Limits::default()))
    }

    /// One batch of events, which must be read as a whole.
    pub fn say(&mut self, events: Value) -> &mut Self {
        self.take(&encode(&json!([1.5, events, 0])).expect("JSON encodes"));
        self
    }

    /// One payload.
    pub fn take(&mut self, payload: &[u8]) {
        let batch = EventBatch::decode(payload).unwrap_or_else(|e| panic!("{e}"));
        self.0.apply(batch, &mut vec![]);
    }

    /// Leading blocks of a plain prompt that are credited: on the GPU, and anywhere.
    pub fn depths(&self, tokens: &[u32]) -> (usize, usize) {
        let chain = prompt("", "", tokens);
        let gpu = self.0.residency().depth(&chain);
        (gpu, self.0.any().map_or(gpu, |any| any.depth(&chain)))
    }

    /// Leading blocks on the GPU for this adapter and salt.
    pub fn gpu(&self, adapter: &str, salt: &str, tokens: &[u32]) -> usize {
        self.0.residency().depth(&prompt(adapter, salt, tokens))
    }

    /// What was counted so far.
    pub fn counted(&self) -> Counters {
        *self.0.counters()
    }
}

/// Fingerprints of a prompt.
pub fn prompt(adapter: &str, salt: &str, tokens: &[u32]) -> Vec<u64> {
    block::chain(block::root(Namespace { model: "tiny", adapter, salt }, SEED), SIZE, tokens)
}

/// Tokens of so many blocks, from this one on.
pub fn tokens(from: u32, blocks: u32) -> Vec<u32> {
    (from..from + blocks * SIZE as u32).collect()
}

/// A store as vLLM from 0.24 says it, with further fields.
pub fn store(hashes: Value, parent: Value, tokens: &[u32], more: Value) -> Value {
    let mut event = json!({
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": SIZE, "lora_id": null, "medium": "GPU", "lora_name": null,
    });
    for (key, value) in more.as_object().into_iter().flatten() {
        event[key] = value.clone();
    }
    event
}

/// A removal, with further fields.
pub fn remove(hashes: Value, more: Value) -> Value {
    let mut event = json!({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"});
    for (key, value) in more.as_object().into_iter().flatten() {
        event[key] = value.clone();
    }
    event
}

/// A store as vLLM up to 0.23 and SGLang say it.
pub fn store_array(hashes: Value, parent: Value, tokens: &[u32]) -> Value {
    json!(["BlockStored", hashes, parent, tokens, SIZE, null, "GPU"])
}
