//! The threads that parse, render and tokenize: one for each core, with a queue that is bounded in bytes.

use crate::prompt::Renderer;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

type Job = Box<dyn FnOnce() -> Tell + Send>;
/// Tells the caller what came of a job. Called when the job's bytes are given back, so that a caller that asks again at
/// once is not refused for its own sake.
type Tell = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    jobs: VecDeque<(usize, Job)>,
    bytes: usize,
    /// What every thread has to warm, in order; threads remember how far they are. Let go once all have.
    warm: Vec<Option<Arc<Renderer>>>,
    warmed: Vec<usize>,
    stopped: bool,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    warmth: tokio::sync::Notify,
    limit: usize,
}

/// Handle on the threads; they end when it is dropped.
pub struct RenderPool {
    shared: Arc<Shared>,
}

/// Why a job was not done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotDone {
    /// More bytes are waiting than the limit.
    Busy,
    /// It panicked.
    Fault,
}

impl RenderPool {
    /// Starts the threads. Jobs wait while they hold at most `limit_bytes` of bodies together.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn start(threads: usize, limit_bytes: usize) -> std::io::Result<RenderPool> {
        let state = State { warmed: vec![0; threads], ..State::default() };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            work: Condvar::new(),
            warmth: tokio::sync::Notify::new(),
            limit: limit_bytes,
        });
        for number in 0..threads {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new().name(format!("render-{number}")).spawn(move || work(&shared, number))?;
        }
        Ok(RenderPool { shared })
    }

    /// Runs a job that holds so many bytes. A single job larger than the limit runs when nothing else waits.
    ///
    /// # Errors
    /// [`NotDone`].
    pub async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NotDone> {
        let (answer, answered) = oneshot::channel();
        {
            let mut state = lock(&self.shared.state);
            if state.bytes > 0 && state.bytes + bytes > self.shared.limit {
                return Err(NotDone::Busy);
            }
            state.bytes += bytes;
            let job = move || -> Tell {
                // The renderer is shared but never changed by a job, so a panic leaves nothing half done.
                let outcome = catch_unwind(AssertUnwindSafe(job));
                Box::new(move || match outcome {
                    // The caller may have given up waiting: nobody is told then.
                    Ok(done) => drop(answer.send(done)),
                    Err(_) => tracing::error!("a job that reads a request panicked; the request is routed by load"),
                })
            };
            state.jobs.push_back((bytes, Box::new(job)));
        }
        self.shared.work.notify_one();
        answered.await.map_err(|_| NotDone::Fault)
    }

    /// Waits until every thread has built the tables of a renderer: the first text of a thread is slow otherwise.
    pub async fn warm(&self, renderer: Arc<Renderer>) {
        let goal = {
            let mut state = lock(&self.shared.state);
            state.warm.push(Some(renderer));
            state.warm.len()
        };
        self.shared.work.notify_all();
        loop {
            let warmed = self.shared.warmth.notified();
            {
                let mut state = lock(&self.shared.state);
                if state.warmed.iter().all(|done| *done >= goal) {
                    state.warm[goal - 1] = None;
                    return;
                }
            }
            warmed.await;
        }
    }

    /// Bytes of bodies that wait or are worked on.
    pub fn bytes(&self) -> usize {
        lock(&self.shared.state).bytes
    }
}

impl Drop for RenderPool {
    fn drop(&mut self) {
        lock(&self.shared.state).stopped = true;
        self.shared.work.notify_all();
    }
}

/// No code that can panic runs under the lock, so a poisoned one is whole.
fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn work(shared: &Shared, number: usize) {
    loop {
        enum Next {
            Warm(Arc<Renderer>),
            Job(usize, Job),
        }
        let next = {
            let mut state = lock(&shared.state);
            loop {
                if state.stopped {
                    return;
                }
                if let Some((bytes, job)) = state.jobs.pop_front() {
                    break Next::Job(bytes, job);
                }
                if let Some(Some(renderer)) = state.warm.get(state.warmed[number]) {
                    break Next::Warm(Arc::clone(renderer));
                }
                state = shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        };
        match next {
            Next::Job(bytes, job) => {
                let tell = job();
                lock(&shared.state).bytes -= bytes;
                tell();
            }
            Next::Warm(renderer) => {
                if catch_unwind(AssertUnwindSafe(|| renderer.warm())).is_err() {
                    tracing::error!("a tokenizer panicked while it was warmed");
                }
                lock(&shared.state).warmed[number] += 1;
                shared.warmth.notify_waiters();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn jobs_run_are_refused_when_full_and_survive_panics() -> std::io::Result<()> {
        let pool = RenderPool::start(1, 10)?;
        assert_eq!(pool.run(4, || 1).await, Ok(1));
        assert_eq!(pool.run(100, || 2).await, Ok(2), "alone, a job may be larger than the limit");
        let (open, opened) = std::sync::mpsc::channel::<()>();
        let slow = pool.run(8, move || opened.recv().is_ok());
        let second = async {
            // The slow one is polled first, so it is in already.
            let refused = pool.run(3, || 3).await;
            let taken = pool.run(2, || 4);
            let _ = open.send(());
            (refused, taken.await)
        };
        let (slow, second) = tokio::join!(biased; slow, second);
        assert_eq!((slow, second), (Ok(true), (Err(NotDone::Busy), Ok(4))));
        assert_eq!(pool.run(1, || -> i32 { panic!("on purpose") }).await, Err(NotDone::Fault));
        assert_eq!(pool.run(1, || 5).await, Ok(5));
        assert_eq!(pool.bytes(), 0, "bytes are given back before the answer is told");
        Ok(())
    }
}
