//! Starts the agent: the engine's handle on one side, the publisher's thread on the other.

use crate::address::{Address, reached};
use crate::answer::Bundle;
use crate::config::Config;
use crate::edge::clock::{self, Clock};
use crate::edge::control::{self, Auditor, Desk, Later, Settler};
use crate::edge::dial;
use crate::edge::listen::{self, Bound};
use crate::edge::nvml;
use crate::edge::publish;
use crate::edge::wake::{self, Bell, Waker};
use crate::engine::{Engine, Gauges};
use crate::facts::Facts;
use crate::feed::Feed;
use crate::gpus::{Share, Visible};
use crate::ring;
use crate::state::Identity;
use anyhow::{Context, Result, bail};
use proto::id::{EngineId, Epoch};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::watch;

/// A running agent. Dropping it stops its thread and closes its sockets.
///
/// ```no_run
/// use agent::{Agent, Config, Facts};
/// use agent::engine::Request;
/// let config = Config { bind: "tcp://127.0.0.1:0".into(), control: "tcp://127.0.0.1:0".into(), ..Config::default() };
/// let mut agent = Agent::start(&config, &Facts::plain("tiny", 16, 1000))?;
/// let prompt: Vec<u32> = (0..40).collect();
/// let engine = &mut agent.engine;
/// let request = Request { id: "r1", tokens: &prompt[..], prompt_tokens: 40, adapter: "", adapter_path: "", salt: "" };
/// engine.arrived(&request, vec![], usize::MAX);
/// engine.looked_up("r1", &prompt[..], 40, 0, false);
/// engine.evicted([1, 2, 3].into_iter()); // handed out: they hold nothing any more
/// engine.cached("r1", &prompt[..], 0, 0, &[Some(1), Some(2)]);
/// engine.started("r1");
/// engine.step_ended();
/// engine.finished("r1", "stop");
/// # anyhow::Ok(())
/// ```
#[derive(Debug)]
pub struct Agent {
    /// The engine's handle.
    pub engine: Engine,
    /// Everything else.
    pub publisher: Publisher,
}

/// The publisher's thread, seen from outside.
#[derive(Debug)]
pub struct Publisher {
    identity: Identity,
    events: String,
    control: String,
    gauges: Arc<Gauges>,
    later: Arc<Later>,
    stop: Arc<AtomicBool>,
    hold: Arc<AtomicU64>,
    waker: Arc<Waker>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Agent {
    /// Binds the sockets and starts the thread. A port that is taken is tried again every second, and said.
    ///
    /// # Errors
    /// When an address is bad, or the operating system gives no thread or no socket pair.
    pub fn start(config: &Config, facts: &Facts) -> Result<Self> {
        let listens = |text: &str| if text.is_empty() { Ok(None) } else { Address::parse(text, facts.rank).map(Some) };
        let (events, control) = (listens(&config.bind)?, listens(&config.control)?);
        if let (Some(one), Some(other)) = (&events, &control)
            && one.meets(other, facts.dp_size)
        {
            bail!(
                "KVATLAS_BIND ({}) and KVATLAS_CONTROL ({}) are too near: each of {} ranks adds its number to both; set \
                 them at least {} ports apart",
                config.bind,
                config.control,
                facts.dp_size,
                facts.dp_size.max(1)
            );
        }
        let mut identity = Identity::new(&config.engine, clock::epoch(), facts, config.model.as_deref(), config.seed);
        identity.address = reached(config.address.as_deref(), config.pod_ip.as_deref(), &facts.http, dial::own_ip());
        let gauges = Arc::new(Gauges::default());
        let (writer, reader) = ring::for_pool(facts.total_blocks as usize);
        let (waker, bell) = wake::pair().context("no socket pair to wake the publisher")?;
        let waker = Arc::new(waker);
        let feed = Feed::new(identity.clone(), facts.clone(), reader, gauges.clone(), config.heartbeat_ms);
        let later = Arc::new(Later::default());
        let (stop, hold) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (events, control) = (events.map(Socket::bind), control.map(Socket::bind));
        let place = |socket: &Option<Socket>| socket.as_ref().map(|socket| socket.address.to_string());
        let (events_at, control_at) = (place(&events).unwrap_or_default(), place(&control).unwrap_or_default());
        let sockets = Sockets { events, control, indexes: config.indexes.clone(), secret: config.secret.clone() };
        let body = {
            let (stop, hold, later) = (stop.clone(), hold.clone(), later.clone());
            let gpus = (config.nvml.clone(), config.visible.clone(), facts.share.clone());
            move || {
                if let Err(error) = run(feed, gpus, sockets, bell, later, stop, hold) {
                    tracing::error!(%error, "the kvatlas agent stopped; the engine goes on without it");
                }
            }
        };
        let thread = std::thread::Builder::new().name("kvatlas".to_string()).spawn(body).context("no thread")?;
        let dials = config.indexes.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        tracing::info!(
            engine = %identity.engine, epoch = %identity.epoch, events = events_at, control = control_at, dials,
            address = identity.address, "kvatlas agent started"
        );
        let wake = waker.clone();
        let engine =
            Engine::new(facts, &identity.model, config.seed, writer, gauges.clone(), Box::new(move || wake.wake()));
        let publisher = Publisher {
            identity,
            events: events_at,
            control: control_at,
            gauges,
            later,
            stop,
            hold,
            waker,
            thread: Some(thread),
        };
        Ok(Self { engine, publisher })
    }
}

impl Publisher {
    /// Where messages are published; the port is the real one. A host of `0.0.0.0` is every interface. "" when this
    /// agent only dials.
    pub fn events(&self) -> &str {
        &self.events
    }

    /// Where requests are answered.
    pub fn control(&self) -> &str {
        &self.control
    }

    /// The engine's name and rank.
    pub fn engine(&self) -> &EngineId {
        &self.identity.engine
    }

    /// This life of it.
    pub fn epoch(&self) -> Epoch {
        self.identity.epoch
    }

    /// The last seq that was published.
    pub fn published(&self) -> u64 {
        self.gauges.published.load(Ordering::Relaxed)
    }

    /// For tests of what holds while the publisher gets no time: its thread sleeps so long, once, the sockets with it.
    pub fn hold(&self, time: Duration) {
        self.hold.store(u64::try_from(time.as_millis()).unwrap_or(u64::MAX), Ordering::Release);
        self.waker.wake();
    }

    /// Gives the bundle, once. False when there is one already, or it is too large.
    pub fn set_bundle(&self, bytes: Vec<u8>) -> bool {
        Bundle::new(bytes).is_some_and(|bundle| self.later.bundle.set(bundle).is_ok())
    }

    /// Gives the way to read the engine's own pool, once.
    pub fn set_auditor(&self, auditor: Auditor) -> bool {
        self.later.auditor.set(auditor).is_ok()
    }

    /// Gives the way to be told what is owed, once. Without one, an engine that rests owes until its next step.
    pub fn set_settler(&self, settler: Settler) -> bool {
        self.later.settler.set(settler).is_ok()
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Where this agent speaks.
struct Sockets {
    events: Option<Socket>,
    control: Option<Socket>,
    indexes: Vec<Address>,
    secret: Option<proto::proof::Secret>,
}

struct Socket {
    address: Address,
    bound: Option<Bound>,
}

impl Socket {
    fn bind(address: Address) -> Self {
        match listen::bind(&address) {
            Ok((bound, address)) => Self { address, bound: Some(bound) },
            Err(error) => {
                tracing::error!(%address, %error, "kvatlas cannot listen here yet; trying again every second. Is the port taken, as by a second engine on this host? Then set KVATLAS_BIND and KVATLAS_CONTROL to other ports, or KVATLAS_INDEX to dial the index and need none");
                Self { address, bound: None }
            }
        }
    }

    async fn wait(mut self) -> Bound {
        loop {
            if let Some(bound) = self.bound.take() {
                return bound;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
            if let Ok((bound, _)) = listen::bind(&self.address) {
                tracing::info!(address = %self.address, "kvatlas listens here now");
                self.bound = Some(bound);
            }
        }
    }
}

fn run(
    feed: Feed,
    (nvml, visible, share): (String, Visible, Share),
    sockets: Sockets,
    bell: Bell,
    later: Arc<Later>,
    stop: Arc<AtomicBool>,
    hold: Arc<AtomicU64>,
) -> Result<()> {
    // Blocking threads read the pool for an audit, ask for what is owed, measure the GPUs and look up the names of
    // indexes, nothing else: one that waits for the engine, a driver or a name server leaves others for the rest.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(4).build()?;
    let tasks = tokio::task::LocalSet::new();
    let done = tasks.block_on(&runtime, async {
        let clock = Clock::start();
        let sleeper = bell.listen()?;
        let topic = proto::event::topic(&feed.identity().engine);
        let feed = Rc::new(RefCell::new(feed));
        let (next, watching) = watch::channel(0);
        let desk = Desk { feed: feed.clone(), later: later.clone(), clock };
        if let Some(events) = sockets.events {
            let (feed, watching) = (feed.clone(), watching.clone());
            tokio::task::spawn_local(async move {
                let serve = |stream| publish::serve(stream, topic.clone(), feed.clone(), watching.clone());
                listen::accept(events.wait().await, serve).await
            });
        }
        if let Some(control) = sockets.control {
            let (desk, secret) = (desk.clone(), sockets.secret.clone());
            tokio::task::spawn_local(async move {
                let serve = |stream| control::serve(stream, desk.clone(), secret.clone());
                listen::accept(control.wait().await, serve).await
            });
        }
        for index in sockets.indexes {
            tokio::task::spawn_local(dial::keep(index, desk.clone(), sockets.secret.clone(), watching.clone()));
        }
        drop(watching);
        {
            let feed = feed.clone();
            let take = move |measured| feed.borrow_mut().measured(measured);
            tokio::task::spawn_local(nvml::watch(nvml, visible, share, take));
        }
        let mut report = Report::default();
        let (mut ask_ms, mut asking) = (0, None::<tokio::task::JoinHandle<()>>);
        while !stop.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(hold.swap(0, Ordering::AcqRel))); // only tests make that more than 0
            let now = clock.now_ms();
            {
                let mut feed = feed.borrow_mut();
                feed.publish(now, clock::unix_ms(), later.digest());
                feed.tidy(now);
                report.tell(&feed, now);
                next.send_if_modified(|next| std::mem::replace(next, feed.replay().next()) != feed.replay().next());
            }
            // An engine that goes on settles what it owes by itself; one that rests is asked, at most once a heartbeat.
            let waits = asking.as_ref().is_some_and(|asking| !asking.is_finished());
            if feed.borrow().owed() && now >= ask_ms && !waits {
                ask_ms = now + feed.borrow().heartbeat_ms();
                let later = later.clone();
                let ask = move || later.settler.get().into_iter().for_each(|settle| settle());
                asking = Some(tokio::task::spawn_blocking(ask));
            }
            let due = feed.borrow().due_ms().saturating_sub(clock.now_ms()).max(1);
            tokio::select! {
                () = sleeper.woken() => {}
                () = tokio::time::sleep(Duration::from_millis(due)) => {}
            }
        }
        Ok(())
    });
    runtime.shutdown_background(); // an audit that waits for the engine does not hold the engine's end up
    done
}

/// Says once a minute what went wrong in it.
#[derive(Default)]
struct Report {
    told_ms: u64,
    faults: u64,
    renewals: u64,
}

impl Report {
    fn tell(&mut self, feed: &Feed, now_ms: u64) {
        if now_ms < self.told_ms + 60_000 {
            return;
        }
        self.told_ms = now_ms;
        let counters = feed.counters();
        if counters.faults > self.faults {
            tracing::warn!(faults = counters.faults - self.faults, "faults caught in the last minute");
        }
        if counters.renewals > self.renewals {
            tracing::warn!(
                times = counters.renewals - self.renewals,
                "readers lagged and were sent ahead in the last minute"
            );
        }
        (self.faults, self.renewals) = (counters.faults, counters.renewals);
    }
}
