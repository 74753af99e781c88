//! Agents that dial in: each makes one connection, proves the secret (and has it proved), and then streams on it and is
//! asked on it. An engine is known by its connection: what its topics say is not looked at.

use super::control::{self, nonce};
use super::inbox::{Arrival, Event, Inbox, Question};
use super::ingest::decode;
use super::zmtp::{Broken, Connection, Incoming, Kind};
use proto::control::{MAX_REQUEST_BYTES, Reply, Request, decode as decode_request, encode};
use proto::proof::{Hello, Listener, Secret};
use std::collections::{BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::time::{Instant, timeout};

/// Deadline for a caller to greet and to prove itself.
const GREETING: Duration = Duration::from_secs(5);
/// Connections that may be greeting at a time: each may hold 8 KiB. An agent that is turned away comes back within a
/// second.
const MOST_GREETING: usize = 512;
/// Most bytes in a message of a caller that has proved nothing yet.
const MOST_UNPROVED_BYTES: usize = MAX_REQUEST_BYTES + 64;
/// How often the agent is pinged: by that it knows that the connection lives.
const PING: Duration = Duration::from_secs(1);
/// A connection on which nothing came for so long, not even the answers to pings, is dead.
const SILENCE: Duration = Duration::from_secs(4);
/// How long an agent may take nothing of what is written to it.
const STALL: Duration = Duration::from_secs(4);
/// Questions that may be unanswered. One is asked at a time; those whose deadline passed wait here for their answers.
const MOST_OPEN: usize = 8;
/// Refusals that are remembered so that each is logged once. When there are more, all are forgotten.
const MOST_SAID: usize = 256;

/// What agents come in by.
pub struct Door {
    /// What they must prove to know; `None`: whoever comes is let in.
    pub secret: Option<Secret>,
    /// The way to the writer.
    pub inbox: Inbox,
}

struct Shared {
    door: Door,
    connections: AtomicU64,
    greeting: Arc<Semaphore>,
    said: Mutex<BTreeSet<String>>,
}

/// Listens for agents until `stopped`. Says where, since port 0 is any.
///
/// # Errors
/// When the address is taken.
pub async fn serve(address: SocketAddr, door: Door, mut stopped: watch::Receiver<bool>) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind(address).await?;
    let address = listener.local_addr()?;
    let shared = Arc::new(Shared {
        door,
        connections: AtomicU64::new(1),
        greeting: Arc::new(Semaphore::new(MOST_GREETING)),
        said: Mutex::default(),
    });
    tokio::spawn(async move {
        loop {
            let accepted = tokio::select! {
                _ = stopped.wait_for(|stopped| *stopped) => return,
                accepted = listener.accept() => accepted,
            };
            let Ok((stream, peer)) = accepted else {
                // Out of descriptors, or a peer that left in between: go on, but do not spin.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let Ok(place) = shared.greeting.clone().try_acquire_owned() else { continue };
            let (shared, mut stopped) = (shared.clone(), stopped.clone());
            tokio::spawn(async move {
                let greeted = timeout(GREETING, greet(stream, &shared)).await;
                drop(place);
                let why = match greeted {
                    Ok(Ok(agent)) => {
                        tokio::select! {
                            _ = stopped.wait_for(|stopped| *stopped) => {}
                            () = follow(agent, &shared) => {}
                        }
                        return;
                    }
                    Ok(Err(why)) => why,
                    Err(_) => "it did not say who it is within 5 s".to_string(),
                };
                shared.say(format!("{}: {why}", peer.ip()));
            });
        }
    });
    tracing::info!(%address, "agents may dial in");
    Ok(address)
}

impl Shared {
    /// Logs a refusal once: an agent comes back every second.
    fn say(&self, what: String) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.len() >= MOST_SAID {
            said.clear();
        }
        if !said.contains(&what) {
            tracing::warn!(reason = what, "an agent that dialled in was not taken (said once)");
            said.insert(what);
        }
    }
}

/// An agent that was taken.
struct Agent {
    connection: Connection,
    number: u64,
    stream: u64,
    questions: mpsc::Receiver<Question>,
    wanted: oneshot::Receiver<()>,
}

async fn tell(connection: &mut Connection, reply: &Reply) -> Result<(), String> {
    let bytes = encode(reply).map_err(|e| e.to_string())?;
    connection.send(&[b"", &bytes]).await.map_err(|e| e.to_string())
}

async fn hear(connection: &mut Connection) -> Result<Request, String> {
    let frames = connection.receive().await.map_err(|e| e.to_string())?;
    let [empty, body] = frames.as_slice() else { return Err("what it says has not 2 frames".into()) };
    if !empty.is_empty() {
        return Err("it streams before it says who it is".into());
    }
    decode_request(body).map_err(|_| "what it says is no request".into())
}

/// Tells the caller why, and returns it.
async fn refuse(connection: &mut Connection, reason: String) -> String {
    // It may be gone already.
    let _ = tell(connection, &Reply::Refused { reason: reason.clone() }).await;
    reason
}

async fn greet(stream: TcpStream, shared: &Shared) -> Result<Agent, String> {
    let accepted = Connection::accept(stream, Kind::Router, MOST_UNPROVED_BYTES).await;
    let mut connection = accepted.map_err(|e| e.to_string())?;
    let secret = shared.door.secret.as_ref();
    let mut listener = Listener::new(secret, nonce()?);
    let Request::Hello(hello) = hear(&mut connection).await? else {
        return Err(refuse(&mut connection, "an agent says hello first".into()).await);
    };
    let Hello { engine: Some(engine), epoch: Some(epoch), .. } = hello.clone() else {
        return Err(refuse(&mut connection, "an agent says its engine and its epoch".into()).await);
    };
    let challenge = listener.challenge(hello).map_err(|e| e.to_string())?;
    tell(&mut connection, &Reply::Challenge(challenge)).await?;
    let Request::Proof(proof) = hear(&mut connection).await? else {
        return Err(refuse(&mut connection, "a proof comes after the challenge".into()).await);
    };
    let welcome = match listener.welcome(secret, &proof) {
        Ok(welcome) => welcome,
        Err(untrusted) => return Err(refuse(&mut connection, format!("{engine}: {untrusted}")).await),
    };
    let number = shared.connections.fetch_add(1, Ordering::Relaxed);
    let (asker, questions) = mpsc::channel(1);
    let ((hold, wanted), (answer, taken)) = (oneshot::channel(), oneshot::channel());
    let arrival = Arrival { engine: engine.clone(), epoch, connection: number, asker, hold, answer };
    shared.door.inbox.send(Event::Arrived(Box::new(arrival)), 0).await;
    let stream = match taken.await {
        Ok(Ok(stream)) => stream,
        Ok(Err(why)) => return Err(refuse(&mut connection, why.to_string()).await),
        Err(_) => return Err("the index stops".into()),
    };
    if let Err(reason) = tell(&mut connection, &Reply::Welcome(welcome)).await {
        shared.door.inbox.send(Event::Left { stream, connection: number, reason: reason.clone() }, 0).await;
        return Err(reason);
    }
    connection.limit(control::MOST_BYTES);
    tracing::info!(%engine, %epoch, "an agent dialled in");
    Ok(Agent { connection, number, stream, questions, wanted })
}

/// Follows and asks one agent until its connection is of no use, or not wanted any more.
async fn follow(agent: Agent, shared: &Shared) {
    let (stream, connection) = (agent.stream, agent.number);
    if let Some(reason) = talk(agent, &shared.door.inbox).await {
        tracing::warn!(stream, reason, "the connection of an agent that dialled in is lost");
        shared.door.inbox.send(Event::Left { stream, connection, reason }, 0).await;
    }
}

/// Says why it ended; `None`: nobody wants to know.
async fn talk(mut agent: Agent, inbox: &Inbox) -> Option<String> {
    let (stream, loopback) = (agent.stream, agent.connection.loopback);
    let mut open: VecDeque<oneshot::Sender<bytes::Bytes>> = VecDeque::new();
    let mut ping = tokio::time::interval(PING);
    ping.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut heard = Instant::now();
    loop {
        let frames = tokio::select! {
            _ = &mut agent.wanted => return None,
            _ = ping.tick() => {
                if heard.elapsed() > SILENCE {
                    return Some(format!("nothing heard for {} s", SILENCE.as_secs()));
                }
                if let Err(why) = written(agent.connection.ping()).await {
                    return Some(why);
                }
                continue;
            }
            Some(question) = agent.questions.recv(), if open.len() < MOST_OPEN => {
                open.push_back(question.answer);
                if let Err(why) = written(agent.connection.send(&[b"", &question.request])).await {
                    return Some(why);
                }
                continue;
            }
            incoming = agent.connection.next() => match incoming {
                Err(broken) => return Some(broken.to_string()),
                Ok(Incoming::Message(frames)) => {
                    heard = Instant::now();
                    frames
                }
                Ok(_) => {
                    heard = Instant::now();
                    continue;
                }
            },
        };
        if let [empty, reply] = frames.as_slice()
            && empty.is_empty()
        {
            // Answers come in the order of the questions. Whose deadline passed does not listen any more.
            match open.pop_front() {
                Some(answer) => drop(answer.send(reply.clone())),
                None => return Some("an answer that was not asked for".into()),
            }
            continue;
        }
        let bytes = frames.iter().map(|frame| frame.len()).sum();
        let event = match decode(&frames) {
            Ok((seq, batch)) => Event::Message { stream, seq, batch, bytes, loopback },
            Err(bad) => bad.event(stream),
        };
        // Waits while the writer is behind: then TCP waits, then the agent skips, and the gap shows.
        if !inbox.send(event, bytes).await {
            return None;
        }
        // A wait for the writer is no silence of the agent.
        heard = Instant::now();
    }
}

async fn written(writing: impl Future<Output = Result<(), Broken>>) -> Result<(), String> {
    match timeout(STALL, writing).await {
        Ok(written) => written.map_err(|broken| broken.to_string()),
        Err(_) => Err("it takes nothing of what is sent to it".into()),
    }
}
