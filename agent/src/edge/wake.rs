//! Waking the publisher from the engine's thread without a lock: a byte in a socket pair, at most one at a time.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The engine's end.
#[derive(Debug)]
pub struct Waker {
    stream: UnixStream,
    rung: Arc<AtomicBool>,
}

/// The publisher's end.
#[derive(Debug)]
pub struct Sleeper {
    stream: tokio::net::UnixStream,
    rung: Arc<AtomicBool>,
}

/// The publisher's end before its runtime runs.
#[derive(Debug)]
pub struct Bell {
    stream: UnixStream,
    rung: Arc<AtomicBool>,
}

/// Both ends.
///
/// # Errors
/// When the operating system gives no socket pair.
pub fn pair() -> std::io::Result<(Waker, Bell)> {
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    theirs.set_nonblocking(true)?;
    let rung = Arc::new(AtomicBool::new(false));
    Ok((Waker { stream: ours, rung: rung.clone() }, Bell { stream: theirs, rung }))
}

impl Waker {
    /// Wakes the publisher, unless a wake is under way. Never waits.
    pub fn wake(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            let _ = (&self.stream).write(&[1]); // full or closed: then it is awake, or gone
        }
    }
}

impl Bell {
    /// Into a runtime.
    ///
    /// # Errors
    /// When there is no runtime here.
    pub fn listen(self) -> std::io::Result<Sleeper> {
        Ok(Sleeper { stream: tokio::net::UnixStream::from_std(self.stream)?, rung: self.rung })
    }
}

impl Sleeper {
    /// Waits for a wake. What the engine wrote before it is visible afterwards.
    pub async fn woken(&self) {
        let mut bytes = [0; 16];
        loop {
            if self.stream.readable().await.is_err() {
                return std::future::pending().await;
            }
            match self.stream.try_read(&mut bytes) {
                Ok(0) => return std::future::pending().await, // the engine's end is gone: heartbeats go on
                Ok(_) => {
                    // Cleared before the ring is read: a wake that comes later rings again.
                    self.rung.swap(false, Ordering::AcqRel);
                    return;
                }
                Err(_) => {}
            }
        }
    }
}

/// For tests outside a runtime: takes what was rung.
impl Bell {
    /// Was it rung since the last call?
    pub fn take(&mut self) -> bool {
        let mut bytes = [0; 16];
        let rung = self.stream.read(&mut bytes).is_ok_and(|n| n > 0);
        self.rung.store(false, Ordering::Release);
        rung
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_wakes_are_one() -> std::io::Result<()> {
        let (waker, mut bell) = pair()?;
        (0..100_000).for_each(|_| waker.wake());
        assert!(bell.take());
        assert!(!bell.take());
        waker.wake();
        assert!(bell.take());
        Ok(())
    }
}
