//! A reader that was stopped for a minute: the engine's process does not grow, and the reader is repaired.
//!
//! Three real processes: this test starts itself twice more, as an engine and as a reader, and stops the reader by
//! SIGSTOP. The engine does 50 steps a second of 512 new blocks each, which is
//! 400 KB/s of messages, 24 MB in the minute: a queue for the reader in the engine's process would show.

use agent::engine::Request;
use agent::{Agent, Config, Facts};
use anyhow::{Context, Result, bail, ensure};
use proto::control::{Reply, encode};
use proto::digest::Digest;
use proto::event::{Batch, Op, read_seq};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::HashSet;
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use zeromq::{Socket, SocketRecv, SocketSend, ZmqMessage};

const STOPPED: Duration = Duration::from_secs(60);
const STEPS_A_SECOND: u32 = 50;
const BLOCKS_A_STEP: usize = 512;
const POOL: u32 = 20_000;
const GROWTH_BYTES: u64 = 16 << 20;
/// In the environment of the other processes: what they are.
const ROLE: &str = "KVATLAS_TEST_ROLE";
const TEST: &str = "agent_memory::a_stopped_reader_does_not_grow_the_engine_and_is_repaired";
/// Before a line of ours, since the test program prints lines of its own.
const MARK: &str = "kvatlas-test ";

/// One of the other processes. Killed when dropped, also when it is stopped.
struct Other {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Other {
    fn start(role: &str) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--exact", "--nocapture", TEST])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdin = child.stdin.take().context("no stdin")?;
        let lines = BufReader::new(child.stdout.take().context("no stdout")?).lines();
        Ok(Self { child, stdin, lines })
    }

    /// The next line of ours.
    fn line(&mut self) -> Result<String> {
        for line in &mut self.lines {
            if let Some((_, ours)) = line?.split_once(MARK) {
                return Ok(ours.to_string());
            }
        }
        bail!("the other process ended")
    }

    /// Reads lines until one begins so.
    fn wait_for(&mut self, beginning: &str) -> Result<String> {
        loop {
            let line = self.line()?;
            if line.starts_with(beginning) {
                return Ok(line);
            }
        }
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.child.id() as i32).context("no process id")?;
        Ok(kill_process(pid, signal)?)
    }

    /// Resident memory in bytes.
    fn resident(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).context("no VmRSS")?;
        let kib: u64 = line.split_whitespace().nth(1).context("VmRSS without a number")?.parse()?;
        Ok(kib * 1024)
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_stopped_reader_does_not_grow_the_engine_and_is_repaired() -> Result<()> {
    match std::env::var(ROLE).as_deref() {
        Ok("engine") => return be_an_engine(),
        Ok("reader") => return tokio::runtime::Runtime::new()?.block_on(be_a_reader()),
        _ => {}
    }
    let mut engine = Other::start("engine")?;
    let addresses = engine.wait_for("addresses ")?;
    let mut reader = Other::start("reader")?;
    writeln!(reader.stdin, "{addresses}")?;
    reader.wait_for("in step")?;
    // Warm: the pool has gone round once, and the replay ring (4 MiB, 10 s) is full.
    let warm = Instant::now() + Duration::from_secs(15);
    while Instant::now() < warm {
        reader.wait_for("in step")?;
    }
    let before = engine.resident()?;
    reader.signal(Signal::STOP)?;
    let (stopped, mut most) = (Instant::now(), 0);
    while stopped.elapsed() < STOPPED {
        std::thread::sleep(Duration::from_secs(1));
        most = most.max(engine.resident()?);
    }
    reader.signal(Signal::CONT)?;
    reader.wait_for("gap")?;
    reader.wait_for("in step")?;
    let growth = most.saturating_sub(before);
    println!("resident before {before}, most while the reader was stopped {most}: {growth} more");
    ensure!(growth < GROWTH_BYTES, "the engine's process grew by {growth} bytes, from {before} to {most}");
    Ok(())
}

/// Publishes until its standard input ends.
fn be_an_engine() -> Result<()> {
    let here = || "tcp://127.0.0.1:0".to_string();
    let config = Config { bind: here(), control: here(), ..Config::default() };
    let mut agent = Agent::start(&config, &Facts::plain("m", 16, POOL))?;
    println!("{MARK}addresses {} {}", agent.publisher.events(), agent.publisher.control());
    let orphaned = std::thread::spawn(|| std::io::stdin().lines().for_each(drop));
    let (mut block, mut token) = (0u32, 0u32);
    let mut due = Instant::now();
    while !orphaned.is_finished() {
        for _ in 0..4 {
            let tokens: Vec<u32> = (0..BLOCKS_A_STEP as u32 * 4).map(|i| token.wrapping_add(i)).collect();
            token = token.wrapping_add(0x9E37_79B9);
            let blocks: Vec<u32> = (0..BLOCKS_A_STEP as u32 / 4).map(|i| (block + i) % POOL).collect();
            block = (block + BLOCKS_A_STEP as u32 / 4) % POOL;
            let id = format!("request-{token}");
            let request = Request {
                id: &id,
                tokens: &tokens[..],
                prompt_tokens: tokens.len(),
                adapter: "",
                adapter_path: "",
                salt: "",
            };
            let engine = &mut agent.engine;
            engine.arrived(&request, vec![], usize::MAX);
            engine.looked_up(&id, &tokens[..], tokens.len(), 0, false);
            engine.evicted(blocks.iter().copied());
            let blocks: Vec<Option<u32>> = blocks.into_iter().map(Some).collect();
            engine.cached(&id, &tokens[..], 0, 0, &blocks);
            engine.started(&id);
            engine.finished(&id, "stop");
        }
        agent.engine.step_ended();
        due += Duration::from_secs(1) / STEPS_A_SECOND;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    Ok(())
}

/// On the `zeromq` crate's sockets: says at each heartbeat whether it is in step, and repairs gaps.
async fn be_a_reader() -> Result<()> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let mut words = line.split_whitespace().skip(1);
    let mut events = zeromq::SubSocket::new();
    events.connect(words.next().context("no address")?).await?;
    events.subscribe("kvatlas/1/").await?;
    let mut control = zeromq::DealerSocket::new();
    control.connect(words.next().context("no control address")?).await?;
    let (mut set, mut next) = snapshot(&mut control).await?;
    loop {
        let message = events.recv().await?;
        let seq = message.get(1).and_then(|frame| read_seq(frame)).context("no seq")?;
        let batch = Batch::decode(message.get(2).context("no payload")?)?;
        if seq < next {
            continue;
        }
        if seq > next {
            println!("{MARK}gap {next} {seq}");
            (set, next) = snapshot(&mut control).await?;
            continue;
        }
        next += 1;
        for op in batch.ops {
            match op {
                Op::Store(store) => set.extend(store.fingerprints.0),
                Op::Remove(remove) => remove.fingerprints.0.iter().for_each(|fp| _ = set.remove(fp)),
                Op::Clear(_) => set.clear(),
                Op::State(state) => {
                    let ours: Digest = set.iter().copied().collect();
                    ensure!(state.digests[0].digest == ours, "another digest at seq {seq}");
                    println!("{MARK}in step {seq}");
                }
                Op::Life(_) => {}
            }
        }
    }
}

async fn snapshot(control: &mut zeromq::DealerSocket) -> Result<(HashSet<u64>, u64)> {
    use proto::control::Request;
    let (mut set, mut cut, mut piece) = (HashSet::new(), None, 0);
    loop {
        let mut message = ZmqMessage::from(Vec::<u8>::new());
        message.push_back(encode(&Request::Snapshot { cut, piece })?.into());
        control.send(message).await?;
        let answer = control.recv().await?;
        let one = match proto::control::decode(answer.get(1).context("no reply")?)? {
            Reply::Snapshot(one) => one,
            Reply::NoSnapshot => {
                (cut, piece) = (None, 0);
                set.clear();
                continue;
            }
            other => bail!("no snapshot: {other:?}"),
        };
        one.chains.iter().for_each(|chain| set.extend(&chain.fingerprints.0));
        (cut, piece) = (Some(one.cut), piece + 1);
        if piece == one.pieces {
            ensure!(set.iter().copied().collect::<Digest>() == one.digests[0].1, "another digest in the snapshot");
            return Ok((set, one.next));
        }
    }
}
