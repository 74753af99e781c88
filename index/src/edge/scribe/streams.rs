//! The writer's streams: which tasks serve each, as engines come and go by the fleet list or by dialling in.

use super::{Scribe, lock};
use crate::edge::board::Seat;
use crate::edge::control::{self, Job, MOST_ASKS, Way};
use crate::edge::inbox::Arrival;
use crate::edge::{ingest, stock};
use crate::fleet::{Changes, Stream};
use proto::fleet::{Entry, Source};
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

/// The tasks of one stream.
pub(super) struct Tasks {
    pub(super) jobs: mpsc::Sender<Job>,
    events: Option<JoinHandle<()>>,
    pulses: Option<JoinHandle<()>>,
    /// Of an agent that dialled in: its connection ends when this is dropped.
    _dialled: Option<oneshot::Sender<()>>,
    pub(super) seat: Option<Arc<Seat>>,
}

impl Drop for Tasks {
    fn drop(&mut self) {
        // The control task ends when `jobs` closes.
        [&self.events, &self.pulses].into_iter().flatten().for_each(JoinHandle::abort);
    }
}

impl Scribe {
    /// An agent dialled in.
    pub(super) fn arrived(&mut self, arrival: Arrival, now_ms: u64) {
        let Arrival { engine, epoch, connection, asker, hold, answer } = arrival;
        let stream = match self.fleet.join(&engine, epoch, connection, now_ms) {
            Ok(stream) => stream,
            Err(why) => {
                // The caller hears it, if it is still there; a claim of a name shows on the board.
                let _ = answer.send(Err(why));
                return self.touched.extend(self.streams.keys());
            }
        };
        let jobs = self.ask_agent(stream, engine.to_string(), Way::Dialled(asker));
        // The tasks that it had before end.
        self.streams.insert(stream, Tasks { jobs, events: None, pulses: None, _dialled: Some(hold), seat: None });
        self.touched.insert(stream);
        if let Some(link) = self.fleet.link(stream) {
            let mut out = Vec::new();
            link.connected(&mut self.setting.core, now_ms, &mut out);
            self.carry_out(stream, out);
        }
        self.list();
        // Who has left meanwhile says so with its number.
        let _ = answer.send(Ok(stream));
    }

    /// Starts the task that asks a stream's agent.
    fn ask_agent(&mut self, stream: Stream, name: String, way: Way) -> mpsc::Sender<Job> {
        let (jobs, todo) = mpsc::channel(MOST_ASKS);
        let (inbox, bundles) = (self.inbox.clone(), self.setting.bundles.clone());
        self.sockets.spawn(control::serve(stream, name, way, todo, inbox, bundles));
        jobs
    }

    pub(super) fn renew(&mut self, entries: Vec<Entry>, now_ms: u64) {
        let changes = self.fleet.update(entries, &mut self.setting.core, now_ms);
        self.take_over(changes);
    }

    pub(super) fn take_over(&mut self, changes: Changes) {
        for stream in changes.closed {
            self.streams.remove(&stream);
            self.setting.bundles.unclaim(stream);
        }
        for slot in changes.ended {
            lock(&self.setting.book).epoch_ended(slot);
        }
        for name in changes.refused {
            tracing::error!(engine = name, "no number is free in the table for this engine; it is left out");
        }
        self.gone.extend(changes.gone);
        for (stream, entry) in changes.opened {
            let inbox = self.inbox.clone();
            let name = entry.name.clone();
            let mut pulses = None;
            let jobs = if entry.source == Source::Native {
                let (jobs, todo) = mpsc::channel(MOST_ASKS);
                self.sockets.spawn(stock::replays(stream, name, entry.replay, todo, inbox.clone()));
                let follow = |address| self.sockets.spawn(stock::pulses(stream, address, inbox.clone()));
                pulses = entry.address.map(follow);
                jobs
            } else {
                let secret = self.setting.secret.clone();
                let way = entry.control.map_or(Way::None, |endpoint| Way::Socket(endpoint, secret));
                self.ask_agent(stream, name, way)
            };
            if entry.events.is_none() && !self.setting.agents_dial {
                tracing::warn!(
                    engine = entry.name,
                    "the fleet entry has no events address, and agents cannot dial in (agents: in the configuration): \
                     nothing will be known of its cache"
                );
            }
            let follow =
                |endpoint| self.sockets.spawn(ingest::follow(stream, entry.name, endpoint, entry.source, inbox));
            let events = entry.events.map(follow);
            self.streams.insert(stream, Tasks { jobs, events, pulses, _dialled: None, seat: None });
            self.touched.insert(stream);
        }
        self.list();
    }
}
