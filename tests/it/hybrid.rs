//! An engine with several kinds of attention, a real agent and a real index: what the index answers is what the
//! engine's own search finds in what the pool holds.

use crate::index_world::{Running, SEED, until};
use agent::engine::Request;
use agent::plan::{Plan, Together};
use agent::{Agent, Config, Facts};
use anyhow::{Context, Result};
use harness::edge::http;
use harness::seeded::Seeded;
use index::config::FleetSource;
use proto::block::{Namespace, chain_ahead, root};
use proto::hit::{self, Hits, Kind};
use proto::id::SetKind;
use serde_json::json;
use std::collections::BTreeSet;

const UNIT: usize = 16;
const BLOCKS: usize = 240;
const MODEL: &str = "m";

struct World {
    seed: u64,
    dice: Seeded,
    plan: Plan,
    agent: Agent,
    // By physical block: its group, and the names under which it can be hit.
    pool: Vec<Option<(u32, Vec<u64>)>>,
    prompts: Vec<Vec<u32>>,
    made: usize,
    hits: usize,
}

impl World {
    fn new(seed: u64, hits: Hits, specs: Vec<Together>) -> Result<Self> {
        let plan = Plan::new(hits, specs).map_err(anyhow::Error::msg)?;
        let facts = Facts { plan: plan.clone(), ..Facts::plain(MODEL, UNIT as u32, BLOCKS as u32) };
        let config = Config {
            engine: "h".into(),
            bind: "tcp://127.0.0.1:0".into(),
            control: "tcp://127.0.0.1:0".into(),
            seed: SEED,
            heartbeat_ms: 30,
            ..Config::default()
        };
        let mut dice = Seeded::new(seed);
        let prompts = (0..5).map(|_| (0..UNIT * 14).map(|_| dice.below(1000) as u32).collect()).collect();
        let agent = Agent::start(&config, &facts)?;
        Ok(Self { seed, dice, plan, agent, pool: vec![None; BLOCKS], prompts, made: 0, hits: 0 })
    }

    /// A prompt: part of one of a few, often with an end of its own.
    fn prompt(&mut self) -> Vec<u32> {
        let mut tokens = self.dice.pick(&self.prompts).clone();
        tokens.truncate(1 + self.dice.below(tokens.len()));
        if self.dice.percent(40) {
            tokens.extend((0..self.dice.below(50)).map(|_| self.dice.below(1000) as u32));
        }
        tokens
    }

    fn names(&self, tokens: &[u32]) -> Vec<u64> {
        let base = root(Namespace { model: MODEL, adapter: "", salt: "" }, SEED);
        chain_ahead(base, UNIT, self.plan.hits.ahead as usize, tokens)
    }

    fn free(&mut self) -> u32 {
        let block = self.dice.below(BLOCKS);
        self.pool[block] = None;
        self.agent.engine.evicted(std::iter::once(block as u32));
        block as u32
    }

    /// A request is cached in all groups; windows and states only in parts, some blocks by a name inside them.
    fn request(&mut self) {
        let tokens = self.prompt();
        let names = self.names(&tokens);
        let id = format!("r{}", self.made);
        self.made += 1;
        let request = Request {
            id: &id,
            tokens: &tokens[..],
            prompt_tokens: tokens.len(),
            adapter: "",
            adapter_path: "",
            salt: "",
        };
        self.agent.engine.arrived(&request, vec![], usize::MAX);
        for (at, spec) in self.plan.hits.specs.clone().into_iter().enumerate() {
            let units = spec.block as usize / UNIT;
            let of_spec = |group: &u32| self.plan.place(*group).is_some_and(|place| place.spec == at);
            for group in (0..8).filter(of_spec).collect::<Vec<u32>>() {
                let mut blocks = Vec::new();
                for block in 0..names.len() / units {
                    let kept = spec.kind == Kind::Full || self.dice.percent(80);
                    blocks.push(kept.then(|| {
                        let id = self.free();
                        self.pool[id as usize] = Some((group, vec![names[(block + 1) * units - 1]]));
                        id
                    }));
                }
                self.agent.engine.cached(&id, &tokens[..], group, 0, &blocks);
                let rest = names.len() % units;
                if units > 1 && rest > 0 && self.dice.percent(70) {
                    let block = self.free();
                    self.pool[block as usize] = Some((group, vec![names[names.len() - 1]]));
                    self.agent.engine.cached_partial(&id, &tokens[..], group, block, names.len() * UNIT, true);
                    if rest > 1 && self.dice.percent(50) {
                        // A second name, of a shorter part of the same block.
                        if let Some((_, keys)) = &mut self.pool[block as usize] {
                            keys.push(names[names.len() - 2]);
                        }
                        let end = (names.len() - 1) * UNIT;
                        self.agent.engine.cached_partial(&id, &tokens[..], group, block, end, false);
                    }
                    if self.dice.percent(30) {
                        let to = self.free();
                        if to != block {
                            self.pool[to as usize] = self.pool[block as usize].take();
                            self.agent.engine.moved(block, to);
                        }
                    }
                }
            }
        }
        self.agent.engine.finished(&id, "stop");
    }

    fn step(&mut self) {
        match self.dice.below(100) {
            0 => {
                self.pool.fill(None);
                self.agent.engine.cleared();
            }
            1..40 => drop(self.free()),
            _ => self.request(),
        }
        self.agent.engine.step_ended();
    }

    /// What the engine's own search finds in the pool.
    fn truth(&self, tokens: &[u32]) -> Option<usize> {
        let names = self.names(tokens);
        let hits = &self.plan.hits;
        let held =
            |group: u32, name: u64| self.pool.iter().flatten().any(|(of, keys)| *of == group && keys.contains(&name));
        let groups = |set: usize| -> BTreeSet<u32> {
            let of_set = |group: &u32| {
                let spec = self.plan.place(*group).map(|place| &hits.specs[place.spec]);
                spec.is_some_and(|spec| spec.set as usize == set || spec.partial.map(usize::from) == Some(set))
            };
            (0..8).filter(of_set).collect()
        };
        let resident = |set: usize, at: usize| groups(set).into_iter().all(|group| held(group, names[at]));
        hit::find(hits, tokens.len(), |set, at| {
            let spec = hits.specs.iter().find(|spec| spec.set as usize == set);
            match spec.filter(|spec| spec.kind == Kind::Full) {
                // A closed set: all blocks of the spec up to here.
                Some(spec) => {
                    let units = spec.block as usize / UNIT;
                    (units - 1..=at).step_by(units).all(|at| resident(set, at))
                }
                None => resident(set, at),
            }
        })
    }

    /// Asks an index that has caught up.
    async fn check(&mut self, index: &Running, prompts: usize) -> Result<()> {
        self.agent.engine.step_ended();
        let held = |world: &Self| world.pool.iter().flatten().map(|(_, keys)| keys.len()).sum::<usize>();
        let seed = self.seed;
        // One message may have been under way, the next has all (a step's changes fit into one), the third is spare: the
        // publisher has no other time than what the machine gives it.
        let before = self.agent.publisher.published();
        until("heartbeats", async || Ok(self.agent.publisher.published() > before + 2)).await?;
        let published = self.agent.publisher.published();
        until("the index has caught up", async || {
            let row = index.row("h.0").await?;
            Ok(row["state"] == "in_step" && row["seq"].as_u64() >= Some(published) && row["digest_failures"] == 0)
        })
        .await?;
        for _ in 0..prompts {
            let tokens = self.prompt();
            let body = json!({"model": MODEL, "token_ids": tokens});
            let answer = http::post(index.http, "/v1/match", &body).await?;
            let told = answer["engines"][0]["cached_tokens"].as_u64().context("no answer")?;
            let truth = self.truth(&tokens).context("given up")? as u64;
            assert_eq!(told, truth, "seed {seed}: {} tokens, {} names held", tokens.len(), held(self));
            self.hits += usize::from(truth > 0);
        }
        Ok(())
    }

    async fn index(&self) -> Result<Running> {
        let entry =
            json!({"name": "h", "events": self.agent.publisher.events(), "control": self.agent.publisher.control()});
        let fleet = FleetSource::Inline(vec![serde_json::from_value(entry)?]);
        Running::with(index::config::Config { fleet, ..Default::default() }).await
    }
}

async fn play(seed: u64, hits: Hits, specs: Vec<Together>) -> Result<()> {
    let mut world = World::new(seed, hits, specs)?;
    let mut index = world.index().await?;
    for turn in 0..12 {
        for _ in 0..12 {
            world.step();
        }
        world.check(&index, 25).await?;
        if turn == 5 {
            // From a snapshot, not from the stream.
            index = world.index().await?;
            world.check(&index, 25).await?;
        }
    }
    assert!(world.hits > 40, "seed {seed}: {} hits", world.hits);
    Ok(())
}

fn together(kind: Kind, block: u32, span: u32, eagle: bool, groups: &[u32]) -> Together {
    Together { kind, block, span, eagle, groups: groups.to_vec() }
}

#[tokio::test(flavor = "multi_thread")]
async fn windows_in_several_groups() -> Result<()> {
    let specs = vec![
        together(Kind::Full, 16, 0, false, &[0]),
        together(Kind::Window, 16, 40, false, &[1, 2]),
        together(Kind::Window, 16, 100, false, &[3]),
    ];
    play(1, Hits::plain(16, [0, 32, 0]), specs).await
}

#[tokio::test(flavor = "multi_thread")]
async fn eagle_and_a_draft_model() -> Result<()> {
    let specs = vec![
        together(Kind::Full, 16, 0, false, &[0]),
        together(Kind::Full, 16, 0, true, &[2]),
        together(Kind::Window, 16, 33, true, &[1]),
    ];
    play(2, Hits::plain(16, [0, 28, 0]), specs).await
}

#[tokio::test(flavor = "multi_thread")]
async fn states_and_entries_inside_blocks() -> Result<()> {
    let specs = vec![together(Kind::Full, 64, 0, false, &[0]), together(Kind::Mamba, 64, 0, false, &[1])];
    play(3, Hits { fine: true, ..Hits::plain(16, [0, 32, 0]) }, specs).await
}

#[tokio::test(flavor = "multi_thread")]
async fn look_ahead_and_chunks() -> Result<()> {
    let specs = vec![together(Kind::Full, 16, 0, false, &[0]), together(Kind::Chunk, 16, 48, false, &[1])];
    play(4, Hits { ahead: 3, ..Hits::plain(16, [0, 33, 0]) }, specs).await
}

#[test]
fn the_first_set_of_full_attention_is_gpu() {
    assert_eq!((SetKind::of_spec(0), SetKind::of_spec(1)), (Some(SetKind::Gpu), Some(SetKind::S1)));
}
