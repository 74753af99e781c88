//! Text to token ids, as the engine's own tokenizer gives them.

use crate::prompt::NotExact;
use std::collections::HashSet;

/// Bytes of text between special tokens whose ids are kept, so that the earlier turns of a chat are not encoded again:
/// about 500 chats of 16,000 characters, text and ids. The oldest go first.
const SEGMENT_CACHE_BYTES: usize = 16 << 20;

/// The tokenizer of one bundle.
pub struct Tokenizer {
    inner: fastokens::Tokenizer,
    /// Special tokens after which ids do not depend on what follows.
    cuts: HashSet<u32>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocabulary", &self.inner.vocab_size()).finish()
    }
}

impl Tokenizer {
    /// Loads a tokenizer from its JSON: an object, or a string that holds one.
    ///
    /// # Errors
    /// When the JSON is not readable, or uses a model or a step that this tokenizer does not have (Unigram, WordPiece,
    /// Metaspace and others): it refuses those rather than guess.
    pub fn load(json: &serde_json::Value) -> Result<Tokenizer, NotExact> {
        let fault = |detail: String| NotExact { label: "tokenizer", detail };
        let mut json = match json {
            serde_json::Value::String(text) => {
                serde_json::from_str(text).map_err(|e| fault(format!("the tokenizer is not JSON: {e}")))?
            }
            other => other.clone(),
        };
        // The engine sets both on each call and uses neither here.
        if let Some(object) = json.as_object_mut() {
            object.insert("truncation".into(), serde_json::Value::Null);
            object.insert("padding".into(), serde_json::Value::Null);
        }
        let dropout = json.pointer("/model/dropout").and_then(serde_json::Value::as_f64).unwrap_or(0.0);
        if dropout > 0.0 {
            return Err(fault("the tokenizer drops merges at random".into()));
        }
        let mut inner = fastokens::Tokenizer::from_json(json).map_err(|e| fault(format!("{e}")))?;
        inner.enable_segment_cache(SEGMENT_CACHE_BYTES);
        let cuts = inner
            .added_token_configs()
            .iter()
            .filter(|token| token.special && !token.rstrip && !token.single_word && !token.normalized)
            .map(|token| token.id)
            .collect();
        Ok(Tokenizer { inner, cuts })
    }

    /// The ids of a text, with or without what the post-processor adds (a BOS token, for instance).
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, NotExact> {
        self.inner
            .encode_with_special_tokens(text, add_special)
            .map_err(|e| NotExact { label: "tokenizer", detail: format!("{e}") })
    }

    /// How many ids the post-processor adds.
    pub fn added(&self) -> usize {
        self.inner.num_special_tokens_to_add()
    }

    /// What the post-processor makes of ids without special tokens.
    pub fn post_process(&self, ids: Vec<u32>) -> Vec<u32> {
        self.inner.post_process(ids, true)
    }

    /// How many of these ids stay whatever text follows: up to the last special token.
    pub fn settled(&self, ids: &[u32]) -> usize {
        ids.iter().rposition(|id| self.cuts.contains(id)).map_or(0, |place| place + 1)
    }

    /// Builds this thread's tables.
    pub fn warm(&self) {
        let _ = self.encode("Warm: the quick brown fox, 12345 ünï 漢字 🙂\n\n\tif (x) { return; }", true);
    }
}
