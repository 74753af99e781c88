//! A stock engine on real sockets of the `zeromq` crate: events, a replay socket with a ring, and `/metrics`.

use anyhow::{Context, Result};
use proto::control::encode;
use proto::event::seq_frame;
use proto::fleet::Entry;
use serde_json::json;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinHandle;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

/// What the engine is like, changed while it runs.
pub struct Behaviour {
    /// The messages that a replay gives.
    pub ring: VecDeque<(u64, Vec<u8>)>,
    /// Replies carry the topic, as from vLLM 0.26.
    pub topic: bool,
    /// A replay ends with its marker.
    pub marker: bool,
    /// Most messages of one replay, as where the socket drops what its reader is slow to take.
    pub most: usize,
    /// Replays asked for.
    pub asked: Vec<u64>,
    /// What `/metrics` say; `None`: it does not answer.
    pub started: Option<f64>,
    /// Prompt tokens that they say were served.
    pub served: f64,
}

/// A running engine.
pub struct Stock {
    pub entry: Entry,
    pub seq: u64,
    at: f64,
    publisher: Option<PubSocket>,
    behaviour: Arc<Mutex<Behaviour>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Stock {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// A store as vLLM up to 0.23 packs it; blocks of 16.
pub fn stored(hashes: &[u64], parent: Option<u64>, tokens: std::ops::Range<u32>) -> Vec<u8> {
    let event = ("BlockStored", hashes, parent, tokens.collect::<Vec<u32>>(), 16, None::<u64>, "GPU");
    encode(&event).expect("a plain value encodes")
}

/// A removal.
pub fn removed(hashes: &[u64]) -> Vec<u8> {
    encode(&("BlockRemoved", hashes, "GPU")).expect("a plain value encodes")
}

/// `[ts, events, rank]` of packed events.
pub fn batch(at: f64, events: &[Vec<u8>]) -> Vec<u8> {
    let mut out = vec![0x93];
    out.extend(encode(&at).expect("a float encodes"));
    out.push(0x90 | u8::try_from(events.len()).expect("few events"));
    out.extend(events.concat());
    out.push(0);
    out
}

impl Stock {
    /// An engine with a replay socket, if wanted, and metrics, if wanted.
    pub async fn start(name: &str, replay: bool, metrics: bool) -> Result<Stock> {
        let behaviour = Arc::new(Mutex::new(Behaviour {
            ring: VecDeque::new(),
            topic: false,
            marker: true,
            most: usize::MAX,
            asked: vec![],
            started: Some(1000.0),
            served: 0.0,
        }));
        let mut publisher = PubSocket::new();
        let events = publisher.bind("tcp://127.0.0.1:0").await?.to_string();
        let mut entry = json!({"name": name, "events": events, "source": "native", "model": "tiny"});
        let mut tasks = vec![];
        if replay {
            let mut router = RouterSocket::new();
            entry["replay"] = router.bind("tcp://127.0.0.1:0").await?.to_string().into();
            let shared = behaviour.clone();
            tasks.push(tokio::spawn(async move { replays(&mut router, &shared).await }));
        }
        if metrics {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
            entry["address"] = listener.local_addr()?.to_string().into();
            let shared = behaviour.clone();
            tasks.push(tokio::spawn(async move {
                while let Ok((mut socket, _)) = listener.accept().await {
                    let _ = socket.read(&mut [0; 4096]).await;
                    let (started, served) = {
                        let engine = lock(&shared);
                        (engine.started, engine.served)
                    };
                    let Some(started) = started else { continue };
                    let body = format!(
                        "# TYPE x gauge\nprocess_start_time_seconds {started:e}\n\
                         vllm:prompt_tokens_total{{engine=\"0\"}} {served}\n"
                    );
                    let head =
                        format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
                    let _ = socket.write_all(format!("{head}{body}").as_bytes()).await;
                }
            }));
        }
        let entry = serde_json::from_value(entry)?;
        Ok(Self { entry, seq: 0, at: 1.0, publisher: Some(publisher), behaviour, tasks })
    }

    /// How it behaves, to change it.
    pub fn behaviour(&self) -> MutexGuard<'_, Behaviour> {
        lock(&self.behaviour)
    }

    /// One engine step: into the ring, and to subscribers unless it is lost.
    pub async fn step(&mut self, events: &[Vec<u8>], lost: bool) -> Result<()> {
        self.at += 0.25;
        let payload = batch(self.at, events);
        self.behaviour().ring.push_back((self.seq, payload.clone()));
        let seq = self.seq;
        self.seq += 1;
        if lost { Ok(()) } else { self.send(&[b"", &seq_frame(seq), &payload]).await }
    }

    /// Sends any frames.
    pub async fn send(&mut self, frames: &[&[u8]]) -> Result<()> {
        let frames: Vec<bytes::Bytes> = frames.iter().map(|frame| bytes::Bytes::copy_from_slice(frame)).collect();
        let message = ZmqMessage::try_from(frames).map_err(|_| anyhow::anyhow!("an empty message"))?;
        Ok(self.publisher.as_mut().context("it is down")?.send(message).await?)
    }

    /// The process dies: its event socket closes.
    pub async fn die(&mut self) {
        if let Some(publisher) = self.publisher.take() {
            publisher.close().await;
        }
        self.behaviour().ring.clear();
        self.seq = 0;
    }

    /// Another process on the same port.
    pub async fn rise(&mut self, started: f64) -> Result<()> {
        self.behaviour().started = Some(started);
        let events = self.entry.events.clone().context("an address")?;
        // The port may be in use for a moment.
        for _ in 0..200 {
            let mut publisher = PubSocket::new();
            if publisher.bind(&events).await.is_ok() {
                self.publisher = Some(publisher);
                return Ok(());
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        anyhow::bail!("{events} stays in use")
    }
}

fn lock(behaviour: &Mutex<Behaviour>) -> MutexGuard<'_, Behaviour> {
    behaviour.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn replays(router: &mut RouterSocket, behaviour: &Mutex<Behaviour>) {
    while let Ok(message) = router.recv().await {
        let frames = message.into_vec();
        // vLLM ignores what has not exactly these three frames.
        let [identity, empty, seq] = &frames[..] else { continue };
        let (true, Ok(seq)) = (empty.is_empty(), <[u8; 8]>::try_from(&seq[..])) else { continue };
        let from = u64::from_be_bytes(seq);
        let (mut replies, topic, marker) = {
            let mut engine = lock(behaviour);
            engine.asked.push(from);
            let replies: Vec<_> =
                engine.ring.iter().filter(|(seq, _)| *seq >= from).take(engine.most).cloned().collect();
            (replies, engine.topic, engine.marker)
        };
        if marker {
            replies.push((u64::MAX, vec![]));
        }
        for (seq, payload) in replies {
            let mut reply: Vec<bytes::Bytes> = vec![identity.clone(), bytes::Bytes::new()];
            if topic {
                reply.push(bytes::Bytes::new());
            }
            reply.extend([seq_frame(seq).to_vec().into(), payload.into()]);
            let _ = router.send(ZmqMessage::try_from(reply).expect("frames")).await;
        }
    }
}
