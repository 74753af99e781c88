//! The engines that requests may go to: the fleet list joined with what the index says of each.
//!
//! The list decides who exists; the index only adds knowledge. An engine of which nothing is known is a candidate like
//! any other. Addresses come from the list alone, so nothing that the index says can send a request elsewhere.

use proto::fleet::{Entry, Source};
use proto::id::EngineId;
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;

/// Most data-parallel ranks of one entry that become candidates. vLLM's largest deployments have 64 a node.
pub const MAX_RANKS: usize = 256;

/// Engines of which knowledge is kept: four ranks for each of the most entries, 500 bytes each.
pub const MAX_KNOWN: usize = 4 * proto::fleet::MAX_ENTRIES;

/// Largest block believed, in tokens: what an engine is checked with.
pub const MAX_BLOCK_SIZE: u32 = 1 << 16;

/// What the index thinks of an engine; see `EngineState` of the index's contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Provably equal to the engine's own set.
    InStep,
    /// Waiting for a snapshot.
    Syncing,
    /// Three heartbeats missed.
    Late,
    /// Silent long enough to be credited nothing.
    Stale,
    /// A native stream with a hole.
    Partial,
    /// Silent for the lease: picked only if nobody else is left.
    Silent,
    /// Another seed, block size or version.
    Mismatched,
    /// Another process speaks under this name.
    Conflict,
    /// Dropped for the index's byte budget.
    Shed,
}

impl State {
    /// Whether it is credited no cache and counts as fully loaded.
    pub fn uncredited(self) -> bool {
        matches!(self, State::Stale | State::Silent | State::Mismatched)
    }
}

/// How busy an engine is.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Load {
    /// Requests running.
    pub running: u32,
    /// Requests waiting.
    pub waiting: u32,
    /// Placements of all pickers that the engine has not yet seen arrive.
    pub reserved: u32,
    /// Prompt tokens of those, less what is cached.
    pub reserved_tokens: u64,
    /// Prompt tokens admitted and not yet computed.
    pub backlog_tokens: u64,
    /// Share of KV blocks in use, 0 to 1.
    pub kv_use: f32,
    /// Most requests at once, 0 if unknown.
    pub max_num_seqs: u32,
    /// GPU utilization, 0 to 1, where measured.
    pub gpu_utilization: Option<f32>,
    /// 1 healthy, 0 failed.
    pub health: f32,
    /// Takes no new requests.
    pub draining: bool,
    /// Sleeps; its cache is gone.
    pub asleep: bool,
    /// Adapters loaded: in a GPU slot.
    pub adapters: Vec<String>,
    /// Adapters that it knows without having them loaded: asked for by requests that wait, or in the host's memory.
    pub adapters_known: Vec<String>,
}

/// What the index knows of one engine.
#[derive(Debug, Clone, PartialEq)]
pub struct Knowledge {
    /// Its state.
    pub state: State,
    /// Why it is mismatched, in conflict or shed.
    pub reason: String,
    /// Served names; the first is the namespace's model.
    pub models: Vec<String>,
    /// Tokens a block, 0 when unknown.
    pub block_size: u32,
    /// Tokens beyond its block that each fingerprint covers.
    pub ahead: u32,
    /// Its load when the event was made.
    pub load: Load,
    /// Digest of its bundle, "" for none.
    pub bundle: String,
    /// Where its HTTP is, by its own word. Only its port is believed, and only on the host that the list says.
    pub address: Option<SocketAddr>,
    /// What to ask for by header at its address; `None` where that has this engine alone.
    pub rank_header: Option<u32>,
    /// [`proto::block::check`] as the engine computes it.
    pub check: u64,
}

/// One engine: an address and, with data parallelism, one rank behind it.
#[derive(Debug, Clone, PartialEq)]
pub struct Engine {
    /// `name.rank`.
    pub id: Arc<str>,
    /// The entry's name: the pod.
    pub pod: Arc<str>,
    /// The rank to ask for by header, as the server there counts; `None` where the address has only one.
    pub rank: Option<u32>,
    /// Where its HTTP is.
    pub address: SocketAddr,
    /// Agent or native.
    pub source: Source,
    /// Labels of the list.
    pub labels: Arc<BTreeMap<String, String>>,
    /// What the index knows, if anything. Models and sizes stay known when the index is away.
    pub known: Option<Arc<Knowledge>>,
    /// Base model by the list, where the stream does not say it.
    pub model: Option<String>,
}

impl Engine {
    /// The model of its namespace, when known.
    pub fn base_model(&self) -> Option<&str> {
        self.model.as_deref().or_else(|| self.known.as_ref()?.models.first().map(String::as_str))
    }

    /// Whether it serves a model under this name; `None` when its models are unknown.
    pub fn serves(&self, name: &str) -> Option<bool> {
        match &self.known {
            Some(known) if !known.models.is_empty() => {
                Some(known.models.iter().any(|m| m == name) || self.model.as_deref() == Some(name))
            }
            _ => self.model.as_ref().map(|m| m == name),
        }
    }

    /// Whether it knows an adapter of this name, loaded or not.
    pub fn has_adapter(&self, name: &str) -> bool {
        self.known.as_ref().is_some_and(|known| {
            known.load.adapters.iter().chain(&known.load.adapters_known).any(|adapter| adapter == name)
        })
    }
}

/// A moment of the pool, shared by all requests.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Pool {
    /// By id.
    pub engines: Vec<Arc<Engine>>,
    /// Whether the index is followed now: loads and states are of the present.
    pub live: bool,
}

/// What a name in a request means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Meaning {
    /// A base model, under its first name.
    Base(String),
    /// An adapter on a base model.
    Adapter {
        /// The base model's first name.
        base: String,
        /// The adapter.
        adapter: String,
    },
    /// Nobody is known to serve it.
    Unknown,
}

impl Pool {
    /// What a model name means. `adapters` are those of the configuration: (adapter, base).
    pub fn meaning(&self, name: &str, adapters: &[(String, String)]) -> Meaning {
        for engine in &self.engines {
            if engine.serves(name) == Some(true)
                && let Some(base) = engine.base_model()
            {
                return Meaning::Base(base.to_owned());
            }
        }
        let configured = adapters.iter().find(|(adapter, _)| adapter == name).map(|(_, base)| base.clone());
        let base = configured.or_else(|| {
            let engine = self.engines.iter().find(|engine| engine.has_adapter(name))?;
            engine.base_model().map(str::to_owned)
        });
        match base {
            Some(base) => Meaning::Adapter { base, adapter: name.to_owned() },
            None => Meaning::Unknown,
        }
    }

    /// The one base model of the pool, for requests that name none.
    pub fn only_model(&self) -> Option<&str> {
        let mut models = self.engines.iter().filter_map(|engine| engine.base_model());
        let first = models.next()?;
        models.all(|model| model == first).then_some(first)
    }
}

/// The pool's two sources, joined on demand.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    entries: Vec<Entry>,
    known: HashMap<String, Arc<Knowledge>>,
    live: bool,
    seed: u64,
}

impl Sources {
    /// Nothing known yet. `seed`: the deployment's, to see whether an engine hashes as this picker does.
    pub fn new(seed: u64) -> Sources {
        Sources { seed, ..Sources::default() }
    }

    /// An engine whose own check differs from this picker's would never be matched: better to say so.
    fn checked(&self, mut knowledge: Knowledge) -> Knowledge {
        if let (Some(model), true, false) = (knowledge.models.first(), knowledge.block_size > 0, knowledge.check == 0)
            && knowledge.block_size <= MAX_BLOCK_SIZE
            && proto::block::check(model, self.seed, knowledge.block_size) != knowledge.check
        {
            knowledge.state = State::Mismatched;
            knowledge.reason = "it hashes with another seed or version than this picker".into();
        }
        knowledge
    }

    /// Replaces the fleet list (already checked by [`proto::fleet::check`]).
    pub fn fleet(&mut self, entries: Vec<Entry>) {
        self.entries = entries;
    }

    /// Takes what the index says. `whole`: what is not told is no longer known.
    pub fn told(&mut self, engines: Vec<(String, Knowledge)>, gone: &[String], whole: bool) {
        if whole {
            self.known.clear();
        }
        // Names beyond the list are kept too: the index may have read the next list already. Nobody is sent there.
        for (id, knowledge) in engines {
            if self.known.len() < MAX_KNOWN || self.known.contains_key(&id) {
                self.known.insert(id, Arc::new(self.checked(knowledge)));
            }
        }
        for id in gone {
            self.known.remove(id);
        }
        self.live = true;
    }

    /// The index is away: names and sizes stay known, loads do not.
    pub fn away(&mut self) {
        self.live = false;
    }

    /// The pool of this moment. Which ranks a pod has, each engine says of itself: nothing is counted out here, since
    /// an engine knows its rank in the whole deployment, and a server asks for the one on its own node.
    pub fn pool(&self) -> Pool {
        let mut ranks: HashMap<&str, Vec<u32>> = HashMap::new();
        for id in self.known.keys() {
            if let Some((name, rank)) = id.rsplit_once('.').and_then(|(name, rank)| Some((name, rank.parse().ok()?))) {
                ranks.entry(name).or_default().push(rank);
            }
        }
        let mut engines = Vec::with_capacity(self.entries.len());
        for entry in &self.entries {
            // An entry without an address is for the index alone.
            let Some(listed) = entry.address.as_deref().and_then(|a| a.parse::<SocketAddr>().ok()) else { continue };
            let labels = Arc::new(entry.labels.clone());
            let told = match entry.rank {
                Some(rank) => vec![rank],
                None => ranks.get(entry.name.as_str()).cloned().unwrap_or_else(|| vec![0]),
            };
            for rank in told.into_iter().take(MAX_RANKS) {
                let id = EngineId::new(entry.name.as_str(), rank).to_string();
                let known = self.known.get(&id).cloned();
                // One entry for a pod whose ranks have a port each: the rank says which, the list says on which host.
                let told = known.as_ref().and_then(|known| known.address);
                let address = told.filter(|told| entry.rank.is_none() && told.ip() == listed.ip()).unwrap_or(listed);
                engines.push(Arc::new(Engine {
                    rank: known.as_ref().and_then(|known| known.rank_header),
                    known,
                    id: id.into(),
                    pod: entry.name.as_str().into(),
                    address,
                    source: entry.source,
                    labels: Arc::clone(&labels),
                    model: entry.model.clone(),
                }));
            }
        }
        engines.sort_by(|a, b| a.id.cmp(&b.id));
        Pool { engines, live: self.live }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, port: u16) -> Entry {
        let yaml = format!("{{\"name\":\"{name}\",\"address\":\"127.0.0.1:{port}\"}}");
        serde_json::from_str(&yaml).unwrap_or_else(|e| panic!("{yaml}: {e}"))
    }

    fn knowledge(models: &[&str]) -> Knowledge {
        Knowledge {
            state: State::InStep,
            reason: String::new(),
            models: models.iter().map(|m| (*m).into()).collect(),
            block_size: 16,
            ahead: 0,
            load: Load { health: 1.0, adapters: vec!["lora".into()], ..Load::default() },
            bundle: String::new(),
            address: None,
            rank_header: None,
            check: 0,
        }
    }

    #[test]
    fn an_engine_without_knowledge_is_a_candidate() {
        let mut sources = Sources::default();
        sources.fleet(vec![entry("b", 2), entry("a", 1)]);
        let pool = sources.pool();
        assert_eq!(pool.engines.iter().map(|e| &*e.id).collect::<Vec<_>>(), ["a.0", "b.0"]);
        assert!(pool.engines.iter().all(|e| e.known.is_none() && e.rank.is_none()));
        assert_eq!(pool.meaning("tiny", &[]), Meaning::Unknown);
    }

    #[test]
    fn the_index_cannot_add_engines() {
        let mut sources = Sources::default();
        sources.fleet(vec![entry("a", 1)]);
        sources.told(vec![("a.0".into(), knowledge(&["tiny"])), ("evil.0".into(), knowledge(&["tiny"]))], &[], true);
        assert_eq!(sources.pool().engines.iter().map(|e| &*e.id).collect::<Vec<_>>(), ["a.0"]);
        let many = (0..2 * MAX_KNOWN).map(|i| (format!("e{i}.0"), knowledge(&["tiny"])));
        sources.told(many.collect(), &[], false);
        assert_eq!(sources.known.len(), MAX_KNOWN);
        assert_eq!(sources.pool().engines.len(), 1);
    }

    #[test]
    fn what_was_told_before_the_list_was_read_is_known() {
        let mut sources = Sources::default();
        sources.told(vec![("a.0".into(), knowledge(&["tiny"]))], &[], true);
        sources.fleet(vec![entry("a", 1)]);
        assert!(sources.pool().engines[0].known.is_some());
    }

    #[test]
    fn another_seed_is_a_mismatch() {
        for (seed, state) in [(7, State::InStep), (8, State::Mismatched)] {
            let mut sources = Sources::new(seed);
            sources.fleet(vec![entry("a", 1)]);
            let told = Knowledge { check: proto::block::check("tiny", 7, 16), ..knowledge(&["tiny"]) };
            sources.told(vec![("a.0".into(), told)], &[], true);
            assert_eq!(sources.pool().engines[0].known.as_ref().map(|k| k.state), Some(state));
        }
    }

    #[test]
    fn ranks_that_share_an_address_are_asked_for() {
        let mut sources = Sources::default();
        sources.fleet(vec![entry("a", 1)]);
        let rank = |header| Knowledge { rank_header: header, ..knowledge(&["tiny"]) };
        sources.told(vec![("a.0".into(), rank(Some(0))), ("a.1".into(), rank(Some(1)))], &[], true);
        let pool = sources.pool();
        let ranks: Vec<_> = pool.engines.iter().map(|e| (&*e.id, e.rank, e.address.port())).collect();
        assert_eq!(ranks, [("a.0", Some(0), 1), ("a.1", Some(1), 1)]);
    }

    /// Two pods of eight ranks each: the engines of the second say 8 to 15, its server counts them from 0.
    #[test]
    fn f5_global_ranks_are_names_and_local_ones_are_asked_for() {
        let mut sources = Sources::default();
        sources.fleet(vec![entry("pod-0", 1), entry("pod-1", 2)]);
        let told = (0..16).map(|rank| {
            let told = Knowledge { rank_header: Some(rank % 8), ..knowledge(&["tiny"]) };
            (format!("pod-{}.{rank}", rank / 8), told)
        });
        sources.told(told.collect(), &[], true);
        let mut ranks: Vec<_> =
            sources.pool().engines.iter().map(|e| (e.address.port(), e.rank, e.id.to_string())).collect();
        ranks.sort();
        let expected: Vec<_> =
            (0..16).map(|rank| (1 + rank as u16 / 8, Some(rank % 8), format!("pod-{}.{rank}", rank / 8))).collect();
        assert_eq!(ranks, expected);
    }

    /// One pod a rank, as with an external load balancer: nothing is asked for, and no rank is invented.
    #[test]
    fn f5_a_rank_with_a_server_of_its_own_is_not_asked_for() {
        let mut sources = Sources::default();
        sources.fleet(vec![Entry { rank: Some(3), ..entry("a", 1) }, entry("b", 2)]);
        sources.told(vec![("a.3".into(), knowledge(&["tiny"])), ("b.7".into(), knowledge(&["tiny"]))], &[], true);
        let pool = sources.pool();
        let ranks: Vec<_> = pool.engines.iter().map(|e| (&*e.id, e.rank, e.known.is_some())).collect();
        assert_eq!(ranks, [("a.3", None, true), ("b.7", None, true)]);
    }

    /// One entry for a pod whose ranks have a port each. A rank cannot send requests to another host.
    #[test]
    fn f5_ports_in_a_row_are_told_by_the_ranks_and_hosts_by_the_list() {
        let mut sources = Sources::default();
        sources.fleet(vec![entry("a", 9000)]);
        let at = |address: &str| Knowledge { address: address.parse().ok(), ..knowledge(&["tiny"]) };
        let told = [("a.8", "127.0.0.1:9000"), ("a.9", "127.0.0.1:9001"), ("a.10", "10.9.9.9:9002")];
        sources.told(told.map(|(id, address)| (id.into(), at(address))).into(), &[], true);
        let mut addresses: Vec<_> =
            sources.pool().engines.iter().map(|e| (e.id.to_string(), e.address.to_string())).collect();
        addresses.sort();
        let expected = [("a.10", "127.0.0.1:9000"), ("a.8", "127.0.0.1:9000"), ("a.9", "127.0.0.1:9001")];
        assert_eq!(addresses, expected.map(|(id, address)| (id.to_string(), address.to_string())));
    }

    #[test]
    fn names_mean_models_or_adapters() {
        let mut sources = Sources::default();
        sources.fleet(vec![entry("a", 1)]);
        sources.told(vec![("a.0".into(), knowledge(&["tiny", "alias"]))], &[], true);
        let pool = sources.pool();
        assert_eq!(pool.meaning("alias", &[]), Meaning::Base("tiny".into()));
        assert_eq!(pool.meaning("lora", &[]), Meaning::Adapter { base: "tiny".into(), adapter: "lora".into() });
        let configured = [("cold".to_string(), "tiny".to_string())];
        assert_eq!(pool.meaning("cold", &configured), Meaning::Adapter { base: "tiny".into(), adapter: "cold".into() });
        assert_eq!(pool.meaning("other", &configured), Meaning::Unknown);
        assert_eq!(pool.only_model(), Some("tiny"));
    }

    #[test]
    fn what_is_gone_or_untold_is_unknown_again() {
        let mut sources = Sources::default();
        sources.fleet(vec![entry("a", 1), entry("b", 2)]);
        sources.told(vec![("a.0".into(), knowledge(&["tiny"])), ("b.0".into(), knowledge(&["tiny"]))], &[], true);
        sources.told(vec![], &["b.0".into()], false);
        assert_eq!(sources.pool().engines.iter().map(|e| e.known.is_some()).collect::<Vec<_>>(), [true, false]);
        sources.away();
        assert!(!sources.pool().live);
        sources.told(vec![], &[], true);
        assert!(sources.pool().engines.iter().all(|e| e.known.is_none()));
    }
}
