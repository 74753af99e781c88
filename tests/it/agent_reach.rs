//! How agents reach an index and prove who they are, on real sockets: dialling in, restarts on both sides, ranks, names
//! that two processes claim, and the secret.

use crate::in_step_sender::MODEL;
use crate::index_world::{Running, SEED, until};
use agent::address::{Address, Http};
use agent::engine::Request;
use agent::{Agent, Facts};
use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use harness::edge::http;
use index::answer::Leases;
use index::config::{Config, FleetSource};
use proto::control::{self, Reply, decode, encode};
use proto::fleet::Entry;
use proto::id::{EngineId, Epoch};
use proto::proof::{Caller, Hello, Proof, Secret};
use proto::zmtp::{Incoming, Kind, Limits, Wire, message};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const LOOPBACK: ([u8; 4], u16) = ([127, 0, 0, 1], 0);

fn secret(text: &str) -> Option<Secret> {
    Secret::new(text).ok()
}

fn right() -> Option<Secret> {
    secret("the right secret of this fleet")
}

/// An index that agents may dial.
fn open_door(secret: Option<Secret>) -> Config {
    Config { agents: Some(LOOPBACK.into()), discover: secret.is_none(), secret, ..Config::default() }
}

/// Settings of an agent that dials `index` and listens nowhere.
fn dialling(name: &str, index: SocketAddr) -> agent::Config {
    agent::Config {
        bind: String::new(),
        control: String::new(),
        indexes: vec![Address::Tcp { host: index.ip().to_string(), port: index.port() }],
        engine: name.into(),
        seed: SEED,
        heartbeat_ms: 50,
        ..agent::Config::default()
    }
}

fn agents_at(index: &Running) -> Result<SocketAddr> {
    index.handle.agents.context("agents cannot dial in")
}

/// The engine computes a prompt of these tokens into the blocks from `first` on.
fn compute(agent: &mut Agent, id: &str, tokens: std::ops::Range<u32>, first: u32) {
    let tokens: Vec<u32> = tokens.collect();
    let blocks: Vec<Option<u32>> = (first..).take(tokens.len() / 16).map(Some).collect();
    let engine = &mut agent.engine;
    let request =
        Request { id, tokens: &tokens[..], prompt_tokens: tokens.len(), adapter: "", adapter_path: "", salt: "" };
    engine.arrived(&request, vec![], usize::MAX);
    engine.looked_up(id, &tokens[..], tokens.len(), 0, false);
    engine.evicted(blocks.iter().flatten().copied());
    engine.cached(id, &tokens[..], 0, 0, &blocks);
    engine.started(id);
    engine.step_ended();
    engine.finished(id, "stop");
}

async fn rows(index: &Running) -> Result<Vec<Value>> {
    Ok(http::get(index.http, "/v1/engines").await?["engines"].as_array().cloned().unwrap_or_default())
}

/// Waits for an engine in a state, and gives its row.
async fn row(index: &Running, engine: &str, state: &str) -> Result<Value> {
    let mut found = Value::Null;
    let what = format!("{engine} is {state}");
    let outcome = until(&what, async || {
        let rows = rows(index).await?;
        found = rows.into_iter().find(|row| row["engine"] == engine && row["state"] == state).unwrap_or_default();
        Ok(!found.is_null())
    });
    match outcome.await {
        Ok(()) => Ok(found),
        Err(error) => bail!("{error}: {:?}", rows(index).await?),
    }
}

/// Two replicas of one pod's settings on one host, with ports that the system chooses: neither is in the other's way,
/// and both are followed by who they dialled, each under its own rank.
#[tokio::test]
async fn f1_f2_f4_every_rank_of_one_host_is_followed_with_no_port_of_its_own() -> Result<()> {
    let index = Running::with(open_door(None)).await?;
    let config = agent::Config { bind: "tcp://127.0.0.1:0".into(), ..dialling("pod", agents_at(&index)?) };
    let mut ranks = Vec::new();
    for rank in 0..3 {
        ranks.push(Agent::start(&config, &Facts { rank, dp_size: 3, ..Facts::plain(MODEL, 16, 1000) })?);
    }
    let mut other = Agent::start(&dialling("other", agents_at(&index)?), &Facts::plain(MODEL, 16, 1000))?;
    let ports: std::collections::BTreeSet<&str> = ranks.iter().map(|agent| agent.publisher.events()).collect();
    ensure!(ports.len() == 3 && !ports.iter().any(|port| port.ends_with(":0")), "ports {ports:?}");
    for (rank, agent) in ranks.iter_mut().enumerate() {
        compute(agent, "r", 0..16 * (rank as u32 + 1), 1);
    }
    compute(&mut other, "r", 500..900, 1);
    for rank in 0..3u64 {
        let engine = format!("pod.{rank}");
        row(&index, &engine, "in_step").await?;
        until(&engine, async || Ok(index.cached(&engine, 0..64).await? == 16 * (rank + 1))).await?;
    }
    row(&index, "other.0", "in_step").await?;
    until("other.0", async || Ok(index.cached("other.0", 500..900).await? == 16 * 24)).await?;
    assert_eq!(index.cached("other.0", 0..64).await?, 0);
    Ok(())
}

/// The heartbeat says how the engine is reached: global rank as its name, the rank to ask for as its server counts.
#[tokio::test]
async fn f5_the_agent_says_its_address_and_the_rank_to_ask_for() -> Result<()> {
    let index = Running::with(open_door(None)).await?;
    let config = agent::Config { pod_ip: Some("10.0.0.8".into()), ..dialling("pod-1", agents_at(&index)?) };
    let http = Http { host: None, port: Some(8000), rank_header: Some(2) };
    let _agent = Agent::start(&config, &Facts { rank: 10, dp_size: 16, http, ..Facts::plain(MODEL, 16, 100) })?;
    let row = row(&index, "pod-1.10", "in_step").await?;
    assert_eq!((&row["rank"], &row["address"], &row["rank_header"]), (&json!(10), &json!("10.0.0.8:8000"), &json!(2)));
    Ok(())
}

/// Two processes under one name and rank, as when every worker says rank 0: the later start is followed, the other one
/// is shown, and it is followed when the winner has been silent for a lease.
#[tokio::test]
async fn f6_of_two_that_claim_one_rank_the_later_is_followed_and_the_other_shown() -> Result<()> {
    let leases = Leases { lease_ms: 3000, ..Leases::default() };
    let index = Running::with(Config { leases, ..open_door(None) }).await?;
    let config = dialling("pod", agents_at(&index)?);
    let mut early = Agent::start(&config, &Facts::plain(MODEL, 16, 100))?;
    compute(&mut early, "r", 0..64, 1);
    let first = row(&index, "pod.0", "in_step").await?;
    assert_eq!(first["epoch"], early.publisher.epoch().to_string());
    tokio::time::sleep(Duration::from_millis(20)).await; // starts are told apart by the millisecond
    let late = Agent::start(&config, &Facts::plain(MODEL, 16, 100))?;
    let conflict = row(&index, "pod.0", "conflict").await?;
    assert_eq!(conflict["epoch"], early.publisher.epoch().to_string());
    let followed = row(&index, "pod.0", "in_step").await?;
    assert_eq!(followed["epoch"], late.publisher.epoch().to_string());
    assert_eq!(index.cached("pod.0", 0..64).await?, 0, "what the other process holds is not credited to this one");
    drop(late);
    until("the first is followed again", async || {
        Ok(rows(&index)
            .await?
            .iter()
            .any(|row| row["epoch"] == early.publisher.epoch().to_string() && row["state"] == "in_step"))
    })
    .await?;
    until("its blocks are known again", async || Ok(index.cached("pod.0", 0..64).await? == 48)).await
}

/// A fleet entry for rank 3 whose address is that of rank 0.
#[tokio::test]
async fn f6_an_agent_of_another_rank_than_the_list_says_is_not_credited() -> Result<()> {
    let config = agent::Config {
        bind: "tcp://127.0.0.1:0".into(),
        control: "tcp://127.0.0.1:0".into(),
        indexes: vec![],
        ..dialling("pod", LOOPBACK.into())
    };
    let mut agent = Agent::start(&config, &Facts::plain(MODEL, 16, 100))?;
    compute(&mut agent, "r", 0..64, 1);
    let (events, control) = (agent.publisher.events(), agent.publisher.control());
    let entry: Entry = serde_json::from_value(json!({"name": "pod", "rank": 3, "events": events, "control": control}))?;
    let index = Running::with(Config { fleet: FleetSource::Inline(vec![entry]), ..Config::default() }).await?;
    let row = row(&index, "pod.3", "mismatched").await?;
    ensure!(row["reason"].as_str().is_some_and(|why| why.contains("rank differs")), "{row}");
    assert_eq!(index.cached("pod.3", 0..64).await?, 0);
    Ok(())
}

/// A list without an events address waits for the agent to dial in, and lends it what it says.
#[tokio::test]
async fn an_entry_without_a_stream_is_filled_by_who_dials_in() -> Result<()> {
    let entry: Entry = serde_json::from_value(json!({"name": "pod", "address": "10.0.0.7:80"}))?;
    let config = Config { fleet: FleetSource::Inline(vec![entry]), ..open_door(right()) };
    let index = Running::with(config).await?;
    row(&index, "pod.0", "silent").await?;
    let config = agent::Config { secret: right(), ..dialling("pod", agents_at(&index)?) };
    let _agent = Agent::start(&config, &Facts::plain(MODEL, 16, 100))?;
    let row = row(&index, "pod.0", "in_step").await?;
    assert_eq!((rows(&index).await?.len(), &row["address"]), (1, &json!("10.0.0.7:80")));
    Ok(())
}

#[tokio::test]
async fn restarts_of_either_side_are_survived() -> Result<()> {
    let index = Running::with(open_door(None)).await?;
    let at = agents_at(&index)?;
    let mut agent = Agent::start(&dialling("a", at), &Facts::plain(MODEL, 16, 100))?;
    compute(&mut agent, "r1", 0..64, 1);
    row(&index, "a.0", "in_step").await?;
    until("the blocks", async || Ok(index.cached("a.0", 0..65).await? == 64)).await?;

    // The index goes away for longer than the agent's longest pause, and comes back without any memory.
    drop(index);
    compute(&mut agent, "r2", 100..164, 10);
    tokio::time::sleep(Duration::from_secs(3)).await;
    let mut again = None;
    until("the port is free again", async || {
        again = Running::with(Config { agents: Some(at), ..open_door(None) }).await.ok();
        Ok(again.is_some())
    })
    .await?;
    let index = again.context("no index")?;
    row(&index, "a.0", "in_step").await?;
    assert_eq!((index.cached("a.0", 0..65).await?, index.cached("a.0", 100..165).await?), (64, 64));

    // The engine restarts under its name: what it held is gone.
    drop(agent);
    let mut agent = Agent::start(&dialling("a", at), &Facts::plain(MODEL, 16, 100))?;
    compute(&mut agent, "r3", 200..264, 1);
    until("the new process", async || Ok(index.cached("a.0", 200..265).await? == 64)).await?;
    assert_eq!(index.cached("a.0", 0..65).await?, 0);
    Ok(())
}

#[tokio::test]
async fn without_the_right_secret_nobody_dials_in() -> Result<()> {
    let index = Running::with(open_door(right())).await?;
    let at = agents_at(&index)?;
    let plain = Facts::plain(MODEL, 16, 100);
    let _wrong =
        Agent::start(&agent::Config { secret: secret("the wrong secret, alas"), ..dialling("wrong", at) }, &plain)?;
    let _none = Agent::start(&dialling("none", at), &plain)?;
    let _good = Agent::start(&agent::Config { secret: right(), ..dialling("good", at) }, &plain)?;
    row(&index, "good.0", "in_step").await?;
    // Each of the others came back several times meanwhile.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let engines: Vec<Value> = rows(&index).await?.iter().map(|row| row["engine"].clone()).collect();
    assert_eq!(engines, ["good.0"]);

    // Nor does an agent with a secret tell anything to an index without one.
    let open = Running::with(open_door(None)).await?;
    let _shy = Agent::start(&agent::Config { secret: right(), ..dialling("shy", agents_at(&open)?) }, &plain)?;
    let _free = Agent::start(&dialling("free", agents_at(&open)?), &plain)?;
    row(&open, "free.0", "in_step").await?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let engines: Vec<Value> = rows(&open).await?.iter().map(|row| row["engine"].clone()).collect();
    assert_eq!(engines, ["free.0"]);
    Ok(())
}

/// The control socket of an agent that listens: snapshots only for who proves the secret.
#[tokio::test]
async fn without_the_right_secret_no_snapshot_is_given() -> Result<()> {
    let config = agent::Config {
        bind: "tcp://127.0.0.1:0".into(),
        control: "tcp://127.0.0.1:0".into(),
        indexes: vec![],
        secret: right(),
        ..dialling("a", LOOPBACK.into())
    };
    let mut agent = Agent::start(&config, &Facts::plain(MODEL, 16, 100))?;
    compute(&mut agent, "r", 0..64, 1);
    let published = agent.publisher.published();
    until("heartbeats", async || Ok(agent.publisher.published() > published + 2)).await?;
    let (events, control) = (agent.publisher.events(), agent.publisher.control());
    let entry: Entry = serde_json::from_value(json!({"name": "a", "events": events, "control": control}))?;
    let fleet = || FleetSource::Inline(vec![entry.clone()]);
    for secret in [None, secret("the wrong secret, alas")] {
        let index = Running::with(Config { fleet: fleet(), secret, ..Config::default() }).await?;
        until("the reason is said", async || {
            let row = index.row("a.0").await?;
            ensure!(row["state"] != "in_step", "{row}");
            Ok(row["reason"].as_str().is_some_and(|why| why.contains("KVATLAS_SECRET")))
        })
        .await?;
        assert_eq!(index.cached("a.0", 0..65).await?, 0);
    }
    let index = Running::with(Config { fleet: fleet(), secret: right(), ..Config::default() }).await?;
    row(&index, "a.0", "in_step").await?;
    assert_eq!(index.cached("a.0", 0..65).await?, 64);
    Ok(())
}

/// One connection, spoken by hand.
struct Line {
    stream: TcpStream,
    wire: Wire,
}

impl Line {
    async fn open(mut stream: TcpStream, kind: Kind) -> Result<Line> {
        let wire = Wire::new(kind, Limits { frames: 8, bytes: 1 << 20 });
        stream.write_all(&wire.opening()).await?;
        let mut line = Line { stream, wire };
        ensure!(line.next().await? == Incoming::Ready, "no READY");
        Ok(line)
    }

    async fn next(&mut self) -> Result<Incoming> {
        loop {
            if let Some(incoming) = self.wire.take()? {
                return Ok(incoming);
            }
            ensure!(self.stream.read_buf(self.wire.room()).await? > 0, "the other side closed");
        }
    }

    async fn say<T: serde::Serialize>(&mut self, what: &T) -> Result<()> {
        let mut out = Vec::new();
        message(&mut out, &[b"", &encode(what)?]);
        Ok(self.stream.write_all(&out).await?)
    }

    async fn hear(&mut self) -> Result<Vec<Bytes>> {
        loop {
            if let Incoming::Message(frames) = self.next().await? {
                return Ok(frames);
            }
        }
    }

    async fn ask(&mut self, request: &control::Request) -> Result<Reply> {
        self.say(request).await?;
        Ok(decode(self.hear().await?.last().context("an empty message")?)?)
    }
}

/// Dials in by hand; `proof`: one that was heard before. Gives the proof and what was answered to it.
async fn dial(at: SocketAddr, epoch: Epoch, proof: Option<Proof>) -> Result<(Line, Proof, Reply)> {
    let mut line = Line::open(TcpStream::connect(at).await?, Kind::Dealer).await?;
    let hello = Hello { engine: Some(EngineId::new("byhand", 0)), epoch: Some(epoch), nonce: [7; 32] };
    let caller = Caller::new(hello.clone(), true);
    let Reply::Challenge(challenge) = line.ask(&control::Request::Hello(hello)).await? else { bail!("no challenge") };
    let proof = match proof {
        Some(proof) => proof,
        None => caller.prove(right().as_ref(), &challenge)?,
    };
    let reply = line.ask(&control::Request::Proof(proof.clone())).await?;
    Ok((line, proof, reply))
}

#[tokio::test]
async fn a_proof_that_was_heard_elsewhere_opens_nothing() -> Result<()> {
    let index = Running::with(open_door(right())).await?;
    let at = agents_at(&index)?;
    let epoch = Epoch { start_ms: 1, random: 2 };
    let (line, proof, reply) = dial(at, epoch, None).await?;
    ensure!(matches!(reply, Reply::Welcome(_)), "{reply:?}");
    row(&index, "byhand.0", "silent").await?;
    drop(line);
    for replayed in [proof, Proof { mac: vec![] }] {
        let later = Epoch { start_ms: 9, random: 2 };
        for epoch in [epoch, later] {
            let (_, _, reply) = dial(at, epoch, Some(replayed.clone())).await?;
            ensure!(matches!(&reply, Reply::Refused { reason } if reason.contains("proof is wrong")), "{reply:?}");
        }
    }
    // A stream before a proof is not followed.
    let mut line = Line::open(TcpStream::connect(at).await?, Kind::Dealer).await?;
    let mut out = Vec::new();
    message(&mut out, &[b"kvatlas/1/byhand.0", &[0; 8], b"x"]);
    line.stream.write_all(&out).await?;
    ensure!(line.hear().await.is_err(), "the connection is closed");
    Ok(())
}

/// The index's end of a connection does not know that it is dead; the agent's end does, and calls again.
#[tokio::test]
async fn a_connection_that_is_dead_on_one_side_gives_way() -> Result<()> {
    let index = Running::with(open_door(right())).await?;
    let (at, epoch) = (agents_at(&index)?, Epoch { start_ms: 1, random: 2 });
    let (_dead, _, reply) = dial(at, epoch, None).await?;
    ensure!(matches!(reply, Reply::Welcome(_)), "{reply:?}");
    until("the second connection is taken", async || {
        let (_, _, reply) = dial(at, epoch, None).await?;
        Ok(matches!(reply, Reply::Welcome(_)))
    })
    .await
}

/// The agent's end does not know: an index that says nothing any more, as when a network is cut, is called anew.
#[tokio::test]
async fn an_index_that_falls_silent_is_called_again() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let _agent = Agent::start(&dialling("a", listener.local_addr()?), &Facts::plain(MODEL, 16, 100))?;
    let mut silent = Vec::new();
    for _ in 0..2 {
        let (stream, _) = tokio::time::timeout(Duration::from_secs(60), listener.accept()).await??;
        let mut line = Line::open(stream, Kind::Router).await?;
        let control::Request::Hello(hello) = decode(line.hear().await?.last().context("nothing")?)? else {
            bail!("no hello")
        };
        assert_eq!(hello.engine, Some(EngineId::new("a", 0)));
        let mut listener = proto::proof::Listener::new(None, [1; 32]);
        line.say(&Reply::Challenge(listener.challenge(hello)?)).await?;
        let control::Request::Proof(proof) = decode(line.hear().await?.last().context("nothing")?)? else {
            bail!("no proof")
        };
        line.say(&Reply::Welcome(listener.welcome(None, &proof)?)).await?;
        assert_eq!(line.hear().await?.first().map(|topic| &topic[..]), Some(&b"kvatlas/1/a.0"[..]));
        silent.push(line); // open, and never heard again
    }
    Ok(())
}
