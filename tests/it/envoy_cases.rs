//! The shipped Envoy configuration with the real picker and index, in front of two simulated engines.
//!
//! One world, its cases in order: they take parts away and give them back. Nothing here depends on time: a stream's
//! events are let go one by one, and every wait is for a fact.

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use harness::config::Places;
use harness::edge::ports::Ports;
use harness::edge::process::Process;
use harness::edge::sim::{Options, Received, Sim};
use harness::edge::{http, install, parts};
use harness::plan::{MODEL, Plan, SEED, local};
use harness::talk::words;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

const BLOCK_SIZE: u32 = 16;
/// Longest wait for a fact, and for an answer.
const LIMIT: Duration = Duration::from_secs(60);
const CHAT: &str = "/v1/chat/completions";
const DESTINATION: &str = "x-gateway-destination-endpoint";

type Body = BoxBody<Bytes, Infallible>;

/// Everything that runs. Processes are stopped when it is dropped.
struct World {
    places: Places,
    plan: Plan,
    fleet: PathBuf,
    sims: Vec<Sim>,
    index: Option<Process>,
    picker: Option<Process>,
    _envoy: Process,
    sent: u32,
}

/// A whole answer.
#[derive(Debug)]
struct Answer {
    status: u16,
    engine: Option<String>,
    reason: Option<String>,
    body: Bytes,
}

impl Answer {
    fn json(&self) -> Result<Value> {
        serde_json::from_slice(&self.body).with_context(|| format!("not JSON: {:?}", self.body))
    }
}

async fn until(what: &str, mut probe: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while !probe().await.with_context(|| format!("waiting for this: {what}"))? {
        ensure!(begun.elapsed() < LIMIT, "waited in vain for this: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// Sends a request on a connection of its own; the answer's body is still to be read.
async fn open(at: SocketAddr, request: Request<Body>) -> Result<Response<Incoming>> {
    let talk = async {
        let stream = tokio::net::TcpStream::connect(at).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        // Ends with the connection, that is when the answer is read or dropped.
        tokio::spawn(connection);
        anyhow::Ok(sender.send_request(request).await?)
    };
    tokio::time::timeout(LIMIT, talk).await.context("no answer")?
}

async fn read(response: Response<Incoming>) -> Result<Answer> {
    let header = |name: &str| response.headers().get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
    let (status, engine, reason) = (response.status().as_u16(), header("x-sim-engine"), header("x-kvatlas-reason"));
    let body = tokio::time::timeout(LIMIT, response.into_body().collect()).await.context("no end")??.to_bytes();
    Ok(Answer { status, engine, reason, body })
}

fn full(body: impl Into<Bytes>) -> Body {
    Full::new(body.into()).boxed()
}

/// A chat about what only this `seed` knows.
fn chat(seed: u64) -> Value {
    json!({"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": words(seed, 150)}]})
}

impl World {
    async fn start() -> Result<World> {
        let mut places = Places::from_env()?;
        places.e2e = places.e2e.with_file_name("envoy-cases");
        std::fs::create_dir_all(&places.e2e)?;
        install::envoy(&places).await?;
        install::programs(&places).await?;
        let mut ports = Ports::new(false);
        let plan = Plan::new(&["one", "two"], |wish| ports.take(wish))?;
        drop(ports);
        let tokenizer = |name| std::fs::read_to_string(places.root.join("tests/golden/tokenizer").join(name));
        let mut sims = vec![];
        for engine in &plan.engines {
            let options = Options {
                name: engine.name.clone(),
                http: local(engine.http),
                bind: format!("tcp://{}", local(engine.events)),
                control: format!("tcp://{}", local(engine.control)),
                model: MODEL.to_owned(),
                adapters: vec![],
                block_size: BLOCK_SIZE,
                blocks: 2048,
                seed: SEED,
                tokenizer: (tokenizer("tokenizer.json")?, tokenizer("tokenizer_config.json")?),
            };
            sims.push(Sim::start(options).await?);
        }
        let fleet = places.e2e.join("fleet.yaml");
        std::fs::write(&fleet, plan.fleet().to_string())?;
        let index = Some(parts::index(&places, &plan).await?);
        let picker = Some(picker(&places, &plan, &fleet, None).await?);
        let envoy = parts::envoy(&places, &plan).await?;
        let mut world = World { places, plan, fleet, sims, index, picker, _envoy: envoy, sent: 0 };
        world.knows().await?;
        Ok(world)
    }

    /// Waits until decisions are made with all knowledge there is.
    async fn knows(&mut self) -> Result<()> {
        let (index, engines) = (local(self.plan.index_http), self.sims.len());
        until("the index is in step", async || {
            let Ok(answer) = http::get(index, "/v1/engines").await else { return Ok(false) };
            let states = answer["engines"].as_array().into_iter().flatten().map(|engine| &engine["state"]);
            Ok(states.filter(|state| *state == "in_step").count() == engines)
        })
        .await?;
        self.decides().await
    }

    /// Waits until the picker has all knowledge, wherever it has it from.
    async fn decides(&mut self) -> Result<()> {
        let begun = Instant::now();
        loop {
            let (answer, decision) = self.ask(&chat(1), &[]).await?;
            if answer.status == 200 && decision["degraded"] == json!([]) && !decision["predicted_tokens"].is_null() {
                return Ok(());
            }
            ensure!(begun.elapsed() < LIMIT, "the picker does not know: {decision}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn request(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Body,
    ) -> Result<(String, Request<Body>)> {
        self.sent += 1;
        let id = format!("case-{}", self.sent);
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "engines")
            .header("content-type", "application/json")
            .header("x-request-id", &id);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        Ok((id, request.body(body)?))
    }

    /// Sends a request through Envoy and reads the whole answer.
    async fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: Body) -> Result<Answer> {
        let (_, request) = self.request(method, path, headers, body)?;
        read(open(local(self.plan.front), request).await?).await
    }

    /// Sends a chat through Envoy; gives the answer and the picker's decision about it.
    async fn ask(&mut self, body: &Value, headers: &[(&str, &str)]) -> Result<(Answer, Value)> {
        let (id, request) = self.request("POST", CHAT, headers, full(body.to_string()))?;
        let answer = read(open(local(self.plan.front), request).await?).await?;
        let decision = http::get(local(self.plan.picker_http), &format!("/v1/decisions/{id}")).await;
        Ok((answer, decision.unwrap_or(Value::Null)))
    }

    fn received(&self) -> Vec<Received> {
        self.sims.iter().flat_map(Sim::received).collect()
    }

    /// The engine that serves a prompt twice, so that it is known to hold it; and the other one.
    async fn holder(&mut self, seed: u64) -> Result<(usize, usize)> {
        let (first, _) = self.ask(&chat(seed), &[]).await?;
        let name = first.engine.context("no engine answered")?;
        let at = self.plan.engines.iter().position(|e| e.name == name).context("an unknown engine")?;
        let begun = Instant::now();
        loop {
            let (again, decision) = self.ask(&chat(seed), &[]).await?;
            if decision["predicted_tokens"].as_u64().is_some_and(|tokens| tokens > 0) {
                let cached = &again.json()?["usage"]["prompt_tokens_details"]["cached_tokens"];
                ensure!(
                    again.engine.as_ref() == Some(&name),
                    "{name} holds it, {:?} served it: {decision}",
                    again.engine
                );
                ensure!(*cached == decision["predicted_tokens"], "{cached} were taken from cache: {decision}");
                return Ok((at, 1 - at));
            }
            ensure!(begun.elapsed() < LIMIT, "what {name} holds is not known: {decision}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// The picker with a fleet file that is watched, and with another place of the index than the plan's.
async fn picker(places: &Places, plan: &Plan, fleet: &std::path::Path, index: Option<Value>) -> Result<Process> {
    let mut config = plan.picker_config();
    config["fleet"] = json!(fleet);
    if let Some(index) = index {
        config["index"] = index;
    }
    parts::program(places, "picker", &config, plan.picker_http).await
}

/// A body of 2 MiB arrives as it was sent, in one piece or in a thousand.
async fn bodies_arrive_intact(world: &mut World) -> Result<()> {
    let mut body = chat(100);
    body["metadata"] = json!({"padding": words(100, 500_000)[..2 << 20]});
    let text = Bytes::from(body.to_string());
    ensure!(text.len() > 2 << 20);
    let answer = world.send("POST", CHAT, &[], full(text.clone())).await?;
    ensure!(answer.status == 200, "{answer:?}");
    ensure!(world.received().iter().any(|r| r.body == text), "2 MiB did not arrive as they were sent");

    let text =
        Bytes::from(chat(101).to_string().replace("\"max_tokens\"", &format!("{}\"max_tokens\"", " ".repeat(1000))));
    let (chunks, body) = mpsc::channel(1);
    let pieces: Vec<Bytes> = text.chunks(2).map(Bytes::copy_from_slice).collect();
    tokio::spawn(async move {
        for piece in pieces {
            if chunks.send(Ok(Frame::data(piece))).await.is_err() {
                return;
            }
            // Lets the connection write what it has, so that chunks stay chunks.
            tokio::task::yield_now().await;
        }
    });
    let body = StreamBody::new(ReceiverStream::new(body)).boxed();
    let answer = world.send("POST", CHAT, &[], body).await?;
    ensure!(answer.status == 200, "{answer:?}");
    ensure!(world.received().iter().any(|r| r.body == text), "a body in many chunks did not arrive as it was sent");
    Ok(())
}

/// The events of a stream that have come so far.
struct Events {
    body: Incoming,
    text: String,
}

impl Events {
    async fn open(world: &mut World, seed: u64, name: &str) -> Result<(Events, usize)> {
        let mut body = chat(seed);
        body["stream"] = true.into();
        let (_, request) = world.request("POST", CHAT, &[("x-sim-step", name)], full(body.to_string()))?;
        let response = open(local(world.plan.front), request).await?;
        ensure!(response.status() == 200 && response.headers()["content-type"] == "text/event-stream");
        let engine = response.headers()["x-sim-engine"].to_str()?.to_owned();
        let at = world.plan.engines.iter().position(|e| e.name == engine).context("an unknown engine")?;
        Ok((Events { body: response.into_body(), text: String::new() }, at))
    }

    /// Reads on until `count` events have come, and no byte more than is there.
    async fn read(&mut self, count: usize) -> Result<()> {
        let more = async {
            while self.text.matches("\n\n").count() < count {
                match self.body.frame().await {
                    Some(frame) => {
                        self.text.push_str(std::str::from_utf8(&frame?.into_data().unwrap_or_default())?);
                    }
                    None => bail!("the stream ended after {:?}", self.text),
                }
            }
            Ok(())
        };
        tokio::time::timeout(LIMIT, more).await.with_context(|| format!("event {count} is held back somewhere"))?
    }

    fn count(&self) -> usize {
        self.text.matches("\n\n").count()
    }
}

/// Each event of a stream comes through before the next one is made.
async fn streams_pass_event_by_event(world: &mut World) -> Result<()> {
    let (mut events, at) = Events::open(world, 200, "pass").await?;
    ensure!(events.count() == 0);
    for count in 1..=2 {
        world.sims[at].step("pass");
        events.read(count).await?;
        ensure!(events.count() == count, "more events than were made: {}", events.text);
    }
    // chat() asks for 8 tokens, at most 3 words: the last event is followed by the end.
    for _ in 0..8 {
        world.sims[at].step("pass");
    }
    while let Some(frame) = events.body.frame().await {
        events.text.push_str(std::str::from_utf8(&frame?.into_data().unwrap_or_default())?);
    }
    ensure!(events.text.ends_with("data: [DONE]\n\n"), "{}", events.text);
    Ok(())
}

/// What has no prompt goes to an engine all the same, and what is no JSON to none.
async fn other_requests(world: &mut World) -> Result<()> {
    let answer = world.send("GET", "/v1/models", &[], full("")).await?;
    ensure!(answer.status == 200 && answer.json()?["data"][0]["id"] == MODEL, "{answer:?}");
    let before = world.received().len();
    let answer = world.send("POST", CHAT, &[], full("{\"model\": \"tiny\", \"messages\": [")).await?;
    ensure!(answer.status == 400 && answer.reason.is_some(), "{answer:?}");
    ensure!(answer.json()?["error"]["message"].is_string(), "{answer:?}");
    ensure!(world.received().len() == before, "an engine was asked what is no JSON");
    Ok(())
}

/// A client cannot choose where it goes: neither another engine nor an address beyond the pool.
async fn clients_do_not_steer(world: &mut World) -> Result<()> {
    let (holder, other) = world.holder(300).await?;
    let stranger = TcpListener::bind(("127.0.0.1", 0))?;
    stranger.set_nonblocking(true)?;
    let wanted = [local(world.plan.engines[other].http), stranger.local_addr()?];
    for wanted in wanted.map(|address| address.to_string()) {
        let headers = [(DESTINATION, wanted.as_str()), ("x-gateway-destination-endpoint-subset", wanted.as_str())];
        let (answer, decision) = world.ask(&chat(300), &headers).await?;
        ensure!(answer.status == 200, "{answer:?}");
        ensure!(
            answer.engine.as_ref() == Some(&world.plan.engines[holder].name),
            "it went to {:?}: {decision}",
            answer.engine
        );
        let seen = world.sims[holder].received().pop().context("nothing received")?;
        let told = seen.headers.get_all(DESTINATION).iter().any(|value| value == wanted.as_str());
        ensure!(!told, "the engine was told {wanted}");
    }
    ensure!(stranger.accept().is_err(), "somebody connected to an address that only a client named");
    Ok(())
}

/// Without the index requests are served by load, and say so; with it back, knowledge is back.
async fn index_down(world: &mut World) -> Result<()> {
    world.holder(400).await?;
    world.index.take().context("no index")?.kill();
    for _ in 0..8 {
        let (answer, decision) = world.ask(&chat(400), &[]).await?;
        ensure!(answer.status == 200, "{answer:?}");
        ensure!(decision["degraded"] != json!([]) && decision["predicted_tokens"].is_null(), "{decision}");
    }
    world.index = Some(parts::index(&world.places, &world.plan).await?);
    world.knows().await?;
    // Both hold the old prompt by now; a new one has one holder.
    world.holder(401).await?;
    Ok(())
}

/// Without engines the picker says so itself.
async fn no_engine(world: &mut World) -> Result<()> {
    std::fs::write(&world.fleet, "[]")?;
    let begun = Instant::now();
    loop {
        let before = world.received().len();
        let (answer, decision) = world.ask(&chat(500), &[]).await?;
        if answer.status == 503 {
            ensure!(answer.reason.is_some(), "{answer:?}");
            ensure!(answer.json()?["error"]["hint"].is_string(), "{answer:?}");
            ensure!(world.received().len() == before, "an engine was asked all the same: {decision}");
            break;
        }
        ensure!(answer.status == 200 && begun.elapsed() < LIMIT, "{answer:?} {decision}");
    }
    std::fs::write(&world.fleet, world.plan.fleet().to_string())?;
    let begun = Instant::now();
    while world.ask(&chat(500), &[]).await?.0.status != 200 {
        ensure!(begun.elapsed() < LIMIT, "the engines did not come back");
    }
    world.knows().await
}

/// Without the picker Envoy balances by itself, a client steers no more than before, and streams go on.
async fn picker_down(world: &mut World) -> Result<()> {
    let (mut events, at) = Events::open(world, 600, "survive").await?;
    world.sims[at].step("survive");
    events.read(1).await?;
    world.picker.take().context("no picker")?.kill();
    let admin = local(world.plan.envoy_admin);
    until("Envoy knows that the picker is away", async || {
        let (_, clusters) = http::exchange(admin, "GET", "/clusters", None).await?;
        let clusters = String::from_utf8_lossy(&clusters).into_owned();
        Ok(clusters.lines().any(|line| line.starts_with("picker::") && line.contains("/failed_active_hc")))
    })
    .await?;
    let wanted = local(world.plan.engines[0].http).to_string();
    let mut served = BTreeSet::new();
    for seed in 0..12 {
        let answer = world.send("POST", CHAT, &[(DESTINATION, &wanted)], full(chat(700 + seed).to_string())).await?;
        ensure!(answer.status == 200, "{answer:?}");
        served.extend(answer.engine);
    }
    ensure!(served.len() == 2, "Envoy's own balancing used {served:?} only");
    let answer = world.send("GET", "/v1/models", &[], full("")).await?;
    ensure!(answer.status == 200, "{answer:?}");
    world.sims[at].step("survive");
    events.read(2).await?;
    drop(events);
    world.picker = Some(picker(&world.places, &world.plan, &world.fleet, None).await?);
    world.knows().await?;
    world.holder(800).await?;
    Ok(())
}

/// On a single box the index runs inside the picker: nobody else is there, and a prompt goes to its holder all the same.
async fn index_embedded(world: &mut World) -> Result<()> {
    world.picker.take().context("no picker")?.kill();
    world.index.take().context("no index")?.kill();
    world.picker = Some(picker(&world.places, &world.plan, &world.fleet, Some(json!("embedded"))).await?);
    world.decides().await?;
    world.holder(900).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_shipped_envoy_with_real_parts() -> Result<()> {
    let mut world = World::start().await?;
    bodies_arrive_intact(&mut world).await.context("bodies")?;
    streams_pass_event_by_event(&mut world).await.context("streams")?;
    other_requests(&mut world).await.context("other requests")?;
    clients_do_not_steer(&mut world).await.context("steering")?;
    index_down(&mut world).await.context("the index is down")?;
    no_engine(&mut world).await.context("no engine")?;
    picker_down(&mut world).await.context("the picker is down")?;
    index_embedded(&mut world).await.context("the index in the picker")?;
    until("no request is left in an engine", async || Ok(world.sims.iter().all(|sim| sim.busy() == (0, 0)))).await
}
