//! Fingerprints: the 64-bit names of blocks. The only hashing of token ids in kvatlas.
//!
//! A fingerprint names a block *and everything before it*, in one namespace:
//!
//! ```text
//! fp(-1) = XXH64(len model ‖ model ‖ len adapter ‖ adapter ‖ len salt ‖ salt; seed = deployment seed)
//! fp(i)  = XXH64(tokens of block i, u32 little-endian ‖ extras of block i;     seed = fp(i-1))
//! ```
//!
//! Lengths are u32 little-endian. 0 is reserved (a free slot in the index's table) and remapped to 1.
//! Test vectors that every implementation must meet are in `tests/golden/fingerprints.json`.

use xxhash_rust::xxh64::xxh64;

/// The name of a block and of everything before it. Never 0.
pub type Fingerprint = u64;

/// Blocks of two namespaces never match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Namespace<'a> {
    /// Base model: the engine's first served name, unless the operator set another.
    pub model: &'a str,
    /// LoRA adapter name, "" for none.
    pub adapter: &'a str,
    /// Cache salt of the request, "" for none. A secret: it enters the root and appears nowhere else.
    pub salt: &'a str,
}

/// What a block holds beyond token ids: one multimodal item that touches it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extra<'a> {
    /// The engine's identifier of the item (a content hash).
    pub identifier: &'a str,
    /// Start of the item relative to the start of the block, in tokens; negative when it began in an earlier block.
    pub offset: i64,
}

const fn never_zero(hash: u64) -> Fingerprint {
    if hash == 0 { 1 } else { hash }
}

/// `fp(-1)`: the root of a namespace. `seed` is the deployment's seed, the same for agents and pickers.
pub fn root(namespace: Namespace<'_>, seed: u64) -> Fingerprint {
    let parts = [namespace.model, namespace.adapter, namespace.salt];
    let mut bytes = Vec::with_capacity(parts.iter().map(|p| p.len() + 4).sum());
    for part in parts {
        bytes.extend_from_slice(&(part.len() as u32).to_le_bytes());
        bytes.extend_from_slice(part.as_bytes());
    }
    never_zero(xxh64(&bytes, seed))
}

/// The fingerprint of one full block that follows `parent` (a block, or the root). `tokens` must be a whole block, and
/// the tokens beyond it that an engine with look-ahead hashing hashes too.
pub fn next(parent: Fingerprint, tokens: &[u32], extras: &[Extra<'_>]) -> Fingerprint {
    // Nearly every block has at most 256 tokens and no extras: hash it from the stack.
    let mut stack = [0u8; 1024];
    if extras.is_empty() && tokens.len() * 4 <= stack.len() {
        let bytes = &mut stack[..tokens.len() * 4];
        for (slot, token) in bytes.chunks_exact_mut(4).zip(tokens) {
            slot.copy_from_slice(&token.to_le_bytes());
        }
        return never_zero(xxh64(bytes, parent));
    }
    let mut bytes =
        Vec::with_capacity(tokens.len() * 4 + extras.iter().map(|e| e.identifier.len() + 12).sum::<usize>());
    for token in tokens {
        bytes.extend_from_slice(&token.to_le_bytes());
    }
    for extra in extras {
        bytes.extend_from_slice(&(extra.identifier.len() as u32).to_le_bytes());
        bytes.extend_from_slice(extra.identifier.as_bytes());
        bytes.extend_from_slice(&extra.offset.to_le_bytes());
    }
    never_zero(xxh64(&bytes, parent))
}

/// Appends the fingerprints of all full blocks of `tokens` to `out`, the first of them following `parent`.
/// A last block that is not full has no fingerprint. `block_size` 0 gives none.
pub fn chain_into(parent: Fingerprint, block_size: usize, tokens: &[u32], out: &mut Vec<Fingerprint>) {
    if block_size == 0 {
        return;
    }
    out.reserve(tokens.len() / block_size);
    let mut parent = parent;
    for block in tokens.chunks_exact(block_size) {
        parent = next(parent, block, &[]);
        out.push(parent);
    }
}

/// As [`chain`], where each fingerprint covers `ahead` tokens beyond its block too: it exists once those are there.
pub fn chain_ahead(root: Fingerprint, block_size: usize, ahead: usize, tokens: &[u32]) -> Vec<Fingerprint> {
    if ahead == 0 || block_size == 0 {
        return chain(root, block_size, tokens);
    }
    let windows = tokens.windows(block_size + ahead).step_by(block_size);
    let follow = |parent: &mut Fingerprint, window: &[u32]| {
        *parent = next(*parent, window, &[]);
        Some(*parent)
    };
    windows.scan(root, follow).collect()
}

/// The fingerprints of all full blocks of `tokens` in a namespace whose root is `root`.
pub fn chain(root: Fingerprint, block_size: usize, tokens: &[u32]) -> Vec<Fingerprint> {
    let mut out = Vec::new();
    chain_into(root, block_size, tokens, &mut out);
    out
}

/// The heartbeat's `check`: the fingerprint of tokens `0..block_size` in the engine's base namespace. A receiver
/// that computes another value has another seed, block size or version of this file.
pub fn check(model: &str, seed: u64, block_size: u32) -> Fingerprint {
    let tokens: Vec<u32> = (0..block_size).collect();
    next(root(Namespace { model, adapter: "", salt: "" }, seed), &tokens, &[])
}

/// How many tokens an engine with plain full attention takes from cache when `blocks` leading blocks of the prompt
/// are reachable: block-aligned, and never the last token, which is always computed.
pub fn cached_tokens(blocks: usize, block_size: usize, prompt_tokens: usize) -> usize {
    if block_size == 0 || prompt_tokens == 0 {
        return 0;
    }
    blocks.min((prompt_tokens - 1) / block_size) * block_size
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_prompt_hit_recomputes_the_last_block() {
        assert_eq!(cached_tokens(2, 16, 32), 16);
        assert_eq!(cached_tokens(2, 16, 33), 32);
        assert_eq!(cached_tokens(9, 16, 33), 32);
        assert_eq!(cached_tokens(0, 16, 33), 0);
        assert_eq!(cached_tokens(3, 16, 0), 0);
    }

    #[test]
    fn long_blocks_hash_like_short_ones() {
        let tokens: Vec<u32> = (0..300).collect();
        let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        assert_eq!(next(7, &tokens, &[]), xxh64(&bytes, 7));
        assert_eq!(next(7, &tokens[..16], &[]), xxh64(&bytes[..64], 7));
    }

    #[test]
    fn a_namespace_is_more_than_its_letters() {
        let root = |model, adapter, salt| root(Namespace { model, adapter, salt }, 1);
        let all = [root("ab", "", ""), root("a", "b", ""), root("a", "", "b"), root("", "ab", ""), root("a", "b", "b")];
        for (i, a) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|b| a != b));
        }
    }

    #[test]
    fn only_full_blocks_are_named() {
        assert_eq!(chain(1, 16, &[0; 31]).len(), 1);
        assert_eq!(chain(1, 16, &[0; 15]).len(), 0);
        assert_eq!(chain(1, 0, &[0; 15]).len(), 0);
    }
}
