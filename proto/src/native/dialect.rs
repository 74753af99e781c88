//! One payload of a stock engine to events.
//!
//! The batch is an array `[ts, events, rank?]` in all versions. An event is an array `["BlockStored", ..]` (vLLM up to
//! 0.23, SGLang) or a map `{"type": "BlockStored", ..}` (vLLM from 0.24). Later versions only appended fields, so
//! arrays are read by position with an optional tail and maps by name; what is not known is passed over. An event that
//! cannot be read costs only itself.

use super::msgpack::{BadBytes, Reader};
use crate::event::{MAX_PAYLOAD_BYTES, MAX_TEXT_BYTES};
use xxhash_rust::xxh3::xxh3_64;

/// An engine's own name of a block: compared, never computed. Integers (u64, or negative i64) are taken as their 64
/// bits. Of `bin` hashes in vLLM's lengths (8 bytes, or a multiple of 16) the last 8 bytes are taken, big-endian,
/// which is how vLLM itself makes integers of them, so that one block has one name when a stream mixes both forms;
/// `bin` of other lengths is hashed.
pub type EngineHash = u64;

/// Most events in a batch: an engine step of 1,024 requests makes one a request and group, and one a removed block.
pub const MAX_EVENTS: u32 = 1 << 16;
/// Most hashes, token ids and keys in a batch, and in each list of it: what a step prefills is at most some 100,000
/// tokens, and a repeated announcement of a context of a million is below that too. Memory while decoding: 2^22 times
/// at most 24 bytes (an empty list of keys), twice, that is 192 MiB for the worst payload and 1 MB for a usual one.
pub const MAX_PARTS: usize = 1 << 22;
/// Most named fields that are looked at in a map event; 0.33 has 15.
const MAX_FIELDS: u32 = 64;

/// Events in the order in which they are to be applied.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct EventBatch {
    /// Seconds since the Unix epoch on the engine's clock: to read, never to compare with another machine's.
    pub at: f64,
    /// What happened.
    pub events: Vec<Event>,
    /// Data-parallel rank, when it is told.
    pub rank: Option<u32>,
    /// Events of a type that is not known here.
    pub unknown: u64,
    /// Events of a known type that could not be read.
    pub unreadable: u64,
}

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Blocks were stored.
    Stored(Box<Stored>),
    /// One copy of each of these blocks is gone.
    Removed(Removed),
    /// The cache is empty: all of it, or (no version says so yet) only in this place.
    Cleared(Option<Medium>),
}

impl Event {
    fn parts(&self) -> usize {
        match self {
            Event::Stored(stored) => {
                let keys = match &stored.extras {
                    Extras::Told(blocks) => blocks.iter().map(|keys| keys.len() + 1).sum(),
                    Extras::Untold | Extras::Unreadable => 0,
                };
                stored.hashes.len() + stored.tokens.len() + keys
            }
            Event::Removed(removed) => removed.hashes.len(),
            Event::Cleared(_) => 0,
        }
    }
}

/// A range of blocks of one request in one group.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Stored {
    /// The blocks, each following the one before it.
    pub hashes: Vec<EngineHash>,
    /// What the first block follows; `None` when it starts the prompt.
    pub parent: Option<EngineHash>,
    /// Token ids of the whole range.
    pub tokens: Vec<u32>,
    /// Token ids in a block.
    pub block_size: u32,
    /// The adapter that the request used.
    pub adapter: Adapter,
    /// Where the blocks are.
    pub medium: Medium,
    /// What the blocks hold beyond tokens.
    pub extras: Extras,
    /// The KV cache group; 0 where none is told.
    pub group: u32,
    /// What kind of group, where it is told.
    pub kind: Option<GroupKind>,
    /// The blocks are on another machine.
    pub remote: bool,
    /// The engine's hash covers tokens after the block (0.33 with EAGLE or MTP): equal blocks have several hashes.
    pub lookahead: bool,
    /// The event was a map: from 0.24, so from 0.26 it may be a repeated announcement of what is already there.
    pub may_repeat: bool,
}

/// Copies that are gone.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Removed {
    /// The blocks.
    pub hashes: Vec<EngineHash>,
    /// Where they were.
    pub medium: Medium,
    /// The KV cache group; 0 where none is told.
    pub group: u32,
    /// They were on another machine.
    pub remote: bool,
    /// How many copies are left of each block, where the engine says so (proposed for vLLM, in no release yet).
    pub remaining: Option<Vec<u32>>,
}

/// The adapter of a request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Adapter {
    /// The base model.
    #[default]
    None,
    /// A LoRA adapter by name.
    Named(String),
    /// One that is told only by a number, which means something only inside that process (vLLM up to 0.13).
    Unnamed,
}

/// The place of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Medium {
    /// GPU memory; also where none is told.
    #[default]
    Gpu,
    /// Host memory.
    Cpu,
    /// Anything slower.
    Storage,
    /// A name that is not known: never taken for a faster one.
    Unknown,
}

impl Medium {
    /// By name, in any case. Vendors say GPU, gpu, CPU_PINNED, CPU_TIER1 and so on.
    pub fn from_name(name: &str) -> Medium {
        let name = name.trim().to_ascii_lowercase();
        let stem = name.split(['_', '-', ':', '.']).next().unwrap_or_default();
        match stem {
            "gpu" | "cuda" | "hbm" | "vram" | "device" | "l1" => Medium::Gpu,
            "cpu" | "host" | "dram" | "ram" | "l2" => Medium::Cpu,
            "storage" | "disk" | "ssd" | "nvme" | "file" | "fs" | "remote" | "external" | "object" | "l3" => {
                Medium::Storage
            }
            _ => Medium::Unknown,
        }
    }
}

/// The attention of a KV cache group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupKind {
    /// Every block of the prefix is needed: full, MLA, and full with a sink.
    Full,
    /// Only the last part, or a state: sliding windows, Mamba, chunks, encoders, what is not known.
    Other,
}

impl GroupKind {
    fn from_name(name: &str) -> GroupKind {
        match name {
            "full_attention" | "mla_attention" | "sink_full_attention" => GroupKind::Full,
            _ => GroupKind::Other,
        }
    }
}

/// What is said of the blocks beyond their tokens.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Extras {
    /// Nothing: this version does not say (vLLM up to 0.16, SGLang).
    #[default]
    Untold,
    /// For each block its keys, empty for none.
    Told(Vec<Vec<Key>>),
    /// In a form that cannot be read.
    Unreadable,
}

/// One key of a block beyond its tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Key {
    /// A bare text: an adapter's name, a salt, or (0.17, 0.18) a multimodal identifier.
    Text(String),
    /// A multimodal item: identifier, and offset relative to the block's start in tokens.
    Item(String, i64),
    /// A text that is said to be the salt.
    Salt(String),
    /// A text that is said to be the adapter's name.
    Adapter(String),
    /// Something that has no place in our fingerprints: a digest of prompt embeddings, a number.
    Opaque,
}

/// Why a payload is no batch.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadEvents {
    /// Longer than what is taken.
    #[error("a payload of {0} bytes; at most {MAX_PAYLOAD_BYTES} are taken")]
    TooLong(usize),
    /// Not `[ts, events, rank?]` in MessagePack.
    #[error("not a batch of KV events: {0}")]
    Shape(#[from] BadBytes),
    /// More events than [`MAX_EVENTS`].
    #[error("{0} events in a batch; at most {MAX_EVENTS} are taken")]
    TooManyEvents(u32),
    /// More hashes, token ids and keys than [`MAX_PARTS`].
    #[error("more than {MAX_PARTS} hashes, token ids and keys in a batch")]
    TooManyParts,
}

impl EventBatch {
    /// Reads the last frame of a message.
    ///
    /// # Errors
    /// When the batch as a whole has another shape or is beyond a limit: what it said is lost, as with a gap.
    pub fn decode(payload: &[u8]) -> Result<EventBatch, BadEvents> {
        if payload.len() > MAX_PAYLOAD_BYTES {
            return Err(BadEvents::TooLong(payload.len()));
        }
        let mut reader = Reader::new(payload);
        let fields = reader.array()?;
        if fields < 2 {
            return Err(BadBytes::Expected("[ts, events]").into());
        }
        let mut batch = EventBatch { at: reader.float()?, ..EventBatch::default() };
        let events = reader.array()?;
        if events > MAX_EVENTS {
            return Err(BadEvents::TooManyEvents(events));
        }
        let mut parts = 0;
        for _ in 0..events {
            match event(reader.skip()?) {
                Ok(Some(event)) => {
                    parts += event.parts();
                    if parts > MAX_PARTS {
                        return Err(BadEvents::TooManyParts);
                    }
                    batch.events.push(event);
                }
                Ok(None) => batch.unknown += 1,
                Err(_) => batch.unreadable += 1,
            }
        }
        if fields > 2 && !reader.nil()? {
            batch.rank = Some(reader.u32()?);
        }
        Ok(batch)
    }
}

const STORED: [&str; 11] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
];
const REMOVED: [&str; 3] = ["block_hashes", "medium", "group_idx"];
const CLEARED: [&str; 1] = ["medium"];

/// Reads one event, given as exactly its bytes. `None` when its type is not known.
fn event(bytes: &[u8]) -> Result<Option<Event>, BadBytes> {
    let mut reader = Reader::new(bytes);
    let mut fields: Vec<(&str, Reader<'_>)> = Vec::with_capacity(16);
    let tag;
    if reader.at_array() {
        let length = reader.array()?;
        if length == 0 {
            return Err(BadBytes::Expected("a type"));
        }
        tag = reader.text()?;
        let names: &[&str] = match tag {
            "BlockStored" => &STORED,
            "BlockRemoved" => &REMOVED,
            "AllBlocksCleared" => &CLEARED,
            _ => &[],
        };
        for name in names.iter().take(length as usize - 1) {
            fields.push((name, Reader::new(reader.skip()?)));
        }
    } else {
        let mut named = None;
        for _ in 0..reader.map()?.min(MAX_FIELDS) {
            let name = reader.text()?;
            let value = Reader::new(reader.skip()?);
            if name == "type" {
                named = Some(value)
            } else {
                fields.push((name, value))
            };
        }
        tag = named.ok_or(BadBytes::Expected("a type"))?.text()?;
    }
    // A null says no more than an absent field.
    fields.retain_mut(|(_, value)| value.nil() != Ok(true));
    match tag {
        "BlockStored" => stored(fields, !Reader::new(bytes).at_array()).map(|s| Some(Event::Stored(Box::new(s)))),
        "BlockRemoved" => removed(fields).map(|r| Some(Event::Removed(r))),
        "AllBlocksCleared" => {
            let place = fields.into_iter().find(|(name, _)| *name == "medium");
            Ok(Some(Event::Cleared(place.map(|(_, mut value)| medium(&mut value)))))
        }
        _ => Ok(None),
    }
}

fn stored(fields: Vec<(&str, Reader<'_>)>, may_repeat: bool) -> Result<Stored, BadBytes> {
    let mut event = Stored { may_repeat, ..Stored::default() };
    let mut hashes = None;
    let mut numbered = false;
    for (name, mut value) in fields {
        match name {
            "block_hashes" => hashes = Some(list(value, hash)?),
            "parent_block_hash" => event.parent = Some(hash(&mut value)?),
            "token_ids" => event.tokens = list(value, Reader::u32)?,
            "block_size" => event.block_size = value.u32()?,
            "lora_id" => numbered = true,
            "lora_name" => match short_text(&mut value) {
                Some("") => {}
                Some(name) => event.adapter = Adapter::Named(name.to_owned()),
                None => event.adapter = Adapter::Unnamed,
            },
            "medium" => event.medium = medium(&mut value),
            "extra_keys" => event.extras = list(value, keys).map_or(Extras::Unreadable, Extras::Told),
            "group_idx" => event.group = value.u32()?,
            "kv_cache_spec_kind" => event.kind = Some(value.text().map_or(GroupKind::Other, GroupKind::from_name)),
            "locality" => event.remote = !is_local(&mut value),
            "lookahead_token_ids" => event.lookahead = true,
            _ => {}
        }
    }
    if numbered && event.adapter == Adapter::None {
        event.adapter = Adapter::Unnamed;
    }
    event.hashes = hashes.ok_or(BadBytes::Expected("block_hashes"))?;
    Ok(event)
}

fn removed(fields: Vec<(&str, Reader<'_>)>) -> Result<Removed, BadBytes> {
    let mut event = Removed::default();
    let mut hashes = None;
    for (name, mut value) in fields {
        match name {
            "block_hashes" => hashes = Some(list(value, hash)?),
            "medium" => event.medium = medium(&mut value),
            "group_idx" => event.group = value.u32()?,
            "locality" => event.remote = !is_local(&mut value),
            "remaining_copy_counts" => event.remaining = Some(list(value, Reader::u32)?),
            _ => {}
        }
    }
    event.hashes = hashes.ok_or(BadBytes::Expected("block_hashes"))?;
    if event.remaining.as_ref().is_some_and(|counts| counts.len() != event.hashes.len()) {
        return Err(BadBytes::Expected("one count for each hash"));
    }
    Ok(event)
}

fn list<'a, T>(
    mut reader: Reader<'a>,
    read: impl Fn(&mut Reader<'a>) -> Result<T, BadBytes>,
) -> Result<Vec<T>, BadBytes> {
    let claimed = reader.array()? as usize;
    if claimed > MAX_PARTS {
        return Err(BadBytes::Expected("a shorter list"));
    }
    // The event was skipped over once: every element that is claimed is there.
    let mut out = Vec::with_capacity(claimed);
    for _ in 0..claimed {
        out.push(read(&mut reader)?);
    }
    Ok(out)
}

fn hash(reader: &mut Reader<'_>) -> Result<EngineHash, BadBytes> {
    if !reader.at_bin() {
        return reader.integer().map(|(bits, _)| bits);
    }
    let bytes = reader.bin()?;
    match bytes.last_chunk::<8>() {
        Some(tail) if bytes.len() == 8 || bytes.len() % 16 == 0 => Ok(u64::from_be_bytes(*tail)),
        _ => Ok(xxh3_64(bytes)),
    }
}

fn short_text<'a>(reader: &mut Reader<'a>) -> Option<&'a str> {
    reader.text().ok().filter(|text| text.len() <= MAX_TEXT_BYTES)
}

fn medium(reader: &mut Reader<'_>) -> Medium {
    short_text(reader).map_or(Medium::Unknown, Medium::from_name)
}

fn is_local(reader: &mut Reader<'_>) -> bool {
    reader.text().is_ok_and(|text| text.eq_ignore_ascii_case("local"))
}

/// The keys of one block: null, or a list.
fn keys(reader: &mut Reader<'_>) -> Result<Vec<Key>, BadBytes> {
    if reader.nil()? {
        return Ok(Vec::new());
    }
    list(Reader::new(reader.skip()?), key)
}

fn key(reader: &mut Reader<'_>) -> Result<Key, BadBytes> {
    let bytes = reader.skip()?;
    let mut reader = Reader::new(bytes);
    if reader.at_text() {
        let text = short_text(&mut reader).ok_or(BadBytes::Expected("a short text"))?;
        return Ok(Key::Text(text.to_owned()));
    }
    Ok(group_of_key(reader).unwrap_or(Key::Opaque))
}

/// `(identifier, offset)`, or the tagged forms that vLLM from 0.31 hashes (its events are untagged so far).
fn group_of_key(mut reader: Reader<'_>) -> Option<Key> {
    let length = reader.array().ok()?;
    let first = short_text(&mut reader)?;
    match (first, length) {
        ("cache_salt", 2) => short_text(&mut reader).map(|salt| Key::Salt(salt.to_owned())),
        ("lora", 3) => short_text(&mut reader).map(|name| Key::Adapter(name.to_owned())),
        ("mm", 3) => item(short_text(&mut reader)?, reader),
        (identifier, 2) => item(identifier, reader),
        _ => None,
    }
}

fn item(identifier: &str, mut reader: Reader<'_>) -> Option<Key> {
    let (bits, negative) = reader.integer().ok()?;
    let offset = bits as i64;
    (negative == (offset < 0)).then(|| Key::Item(identifier.to_owned(), offset))
}

#[cfg(test)]
#[path = "dialect_tests.rs"]
mod tests;
