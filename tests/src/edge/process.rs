//! Processes that never outlive us.
//!
//! Each runs in a process group of its own, so that one signal reaches all that it started (an engine is three
//! processes), and is stopped when its [`Process`] is dropped: at the end, after an error, on Ctrl-C and in a panic.

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, test_kill_process_group, waitid};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Between two looks at a process.
const LOOK: Duration = Duration::from_millis(50);
/// How long a process may take to end after SIGTERM before it is killed.
const GRACE: Duration = Duration::from_secs(10);
/// How long the kernel may take to end a killed group.
const BURIAL: Duration = Duration::from_secs(5);
/// Between two lines of progress.
const PROGRESS: Duration = Duration::from_secs(15);
/// How much of the end of a log an error shows, in bytes.
const TAIL_BYTES: u64 = 3000;

/// A running process with its group and its log.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    group: Pid,
    /// Where it writes; `None` when it writes where we do.
    log: Option<PathBuf>,
    /// Length of the log before this process wrote to it.
    log_start: u64,
    started: Instant,
    /// Taken once: the group is gone and the child is reaped.
    over: bool,
}

impl Process {
    /// Starts `command`; what it prints is appended to `log`.
    ///
    /// # Errors
    /// When the program or the log cannot be opened.
    pub fn start(name: &str, command: &mut Command, log: &Path) -> Result<Process> {
        let file = open_log(log)?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        Process::spawn(name, command, Some(log))
    }

    /// Starts `command`, which writes where we write.
    ///
    /// # Errors
    /// When the program cannot be opened.
    pub fn show(name: &str, command: &mut Command) -> Result<Process> {
        Process::spawn(name, command.stdin(Stdio::null()), None)
    }

    /// Starts `command` and talks with it over its input and output; only its errors go to `log`.
    ///
    /// # Errors
    /// When the program or the log cannot be opened.
    pub fn converse(name: &str, command: &mut Command, log: &Path) -> Result<(Process, ChildStdin, ChildStdout)> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(open_log(log)?);
        let mut process = Process::spawn(name, command, Some(log))?;
        let ends = (process.child.stdin.take(), process.child.stdout.take());
        let (Some(stdin), Some(stdout)) = ends else { bail!("{name} was started without pipes") };
        Ok((process, stdin, stdout))
    }

    fn spawn(name: &str, command: &mut Command, log: Option<&Path>) -> Result<Process> {
        let log_start = log.and_then(|log| std::fs::metadata(log).ok()).map_or(0, |m| m.len());
        let program = command.get_program().to_owned();
        let child = command
            .process_group(0)
            .spawn()
            .with_context(|| format!("{name}: {} cannot be started", program.display()))?;
        let group = Pid::from_raw(i32::try_from(child.id())?).context("a process has no id")?;
        Ok(Process {
            name: name.to_owned(),
            child,
            group,
            log: log.map(Path::to_path_buf),
            log_start,
            started: Instant::now(),
            over: false,
        })
    }

    /// Whether it has ended by itself. It stays a zombie until [`Process::stop`], so its id cannot be given to another.
    fn has_ended(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        self.over || matches!(waitid(WaitId::Pid(self.group), options), Ok(Some(_)) | Err(_))
    }

    /// Waits until `probe` says true, with a line of progress now and then.
    ///
    /// # Errors
    /// When the process ends before that, or `limit` passes; both show the end of its log.
    pub async fn ready(&mut self, limit: Duration, mut probe: impl AsyncFnMut() -> bool) -> Result<Duration> {
        let mut told = Instant::now();
        loop {
            if probe().await {
                return Ok(self.started.elapsed());
            }
            if self.has_ended() {
                bail!("{} ended before it was ready.\n{}", self.name, self.tail());
            }
            let waited = self.started.elapsed();
            if waited > limit {
                bail!("{} is not ready after {} s.\n{}", self.name, waited.as_secs(), self.tail());
            }
            if told.elapsed() > PROGRESS {
                told = Instant::now();
                eprintln!("  ... {} is starting, {} s so far", self.name, waited.as_secs());
            }
            tokio::time::sleep(4 * LOOK).await;
        }
    }

    /// Waits until it ends by itself, with a line of progress now and then.
    ///
    /// # Errors
    /// When it ends with another code than 0, or `limit` passes; the end of its log is shown.
    pub async fn finish(mut self, limit: Duration) -> Result<Duration> {
        let mut told = Instant::now();
        while !self.has_ended() {
            if self.started.elapsed() > limit {
                bail!("{} did not end within {} s.\n{}", self.name, limit.as_secs(), self.tail());
            }
            if self.log.is_some() && told.elapsed() > PROGRESS {
                told = Instant::now();
                eprintln!("  ... {}, {} s so far", self.name, self.started.elapsed().as_secs());
            }
            tokio::time::sleep(LOOK).await;
        }
        let status = self.child.wait()?;
        self.over = true;
        if !status.success() {
            bail!("{} failed: {status}.\n{}", self.name, self.tail());
        }
        Ok(self.started.elapsed())
    }

    /// An error if it has ended: for parts that must run on.
    ///
    /// # Errors
    /// When it has ended; the end of its log is shown.
    pub fn alive(&self) -> Result<()> {
        if self.has_ended() {
            bail!("{} ended by itself.\n{}", self.name, self.tail());
        }
        Ok(())
    }

    /// Asks it to end (SIGTERM to its group) and does not wait.
    pub fn ask_to_stop(&self) {
        if !self.over {
            // An error means that the group is gone already.
            let _ = kill_process_group(self.group, Signal::TERM);
        }
    }

    /// Ends it: SIGTERM, and SIGKILL to what is left of its group when the grace is over.
    pub fn stop(&mut self) {
        self.ask_to_stop();
        let asked = Instant::now();
        while !self.has_ended() && asked.elapsed() < GRACE {
            std::thread::sleep(LOOK);
        }
        self.kill();
    }

    /// Kills its whole group at once and waits until the group is gone.
    pub fn kill(&mut self) {
        if self.over {
            return;
        }
        let _ = kill_process_group(self.group, Signal::KILL);
        let _ = self.child.wait();
        self.over = true;
        let killed = Instant::now();
        while test_kill_process_group(self.group).is_ok() && killed.elapsed() < BURIAL {
            std::thread::sleep(LOOK);
        }
    }

    /// The end of what it wrote, for an error message.
    fn tail(&self) -> String {
        let Some(log) = &self.log else { return "What it wrote is above.".into() };
        let read = || -> std::io::Result<String> {
            let mut file = File::open(log)?;
            let end = file.metadata()?.len();
            file.seek(SeekFrom::Start(self.log_start.max(end.saturating_sub(TAIL_BYTES))))?;
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        match read() {
            Ok(text) => format!("The end of {}:\n{}", log.display(), text.trim_end()),
            Err(error) => format!("Its log {} cannot be read: {error}", log.display()),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stop();
    }
}

fn open_log(log: &Path) -> Result<File> {
    if let Some(folder) = log.parent() {
        std::fs::create_dir_all(folder)?;
    }
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(log)
        .with_context(|| format!("{} cannot be written", log.display()))
}

/// Resolves with the name of the first signal that asks us to end: Ctrl-C, SIGTERM or a closed terminal.
///
/// # Errors
/// When the handlers cannot be installed.
pub async fn asked_to_end() -> Result<&'static str> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    Ok(tokio::select! {
        _ = interrupt.recv() => "Ctrl-C",
        _ = terminate.recv() => "SIGTERM",
        _ = hangup.recv() => "SIGHUP",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("kvatlas-process-{}", std::process::id()));
        let log = folder.join(name);
        let _ = std::fs::remove_file(&log);
        log
    }

    const SOON: Duration = Duration::from_secs(60);

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_dropped_process_takes_its_children_along() -> Result<()> {
        let log = scratch("children.log");
        let process =
            Process::start("tree", &mut shell("trap '' TERM; sleep 600 & echo $!; trap 'exit 0' TERM; wait"), &log)?;
        let group = process.group;
        while std::fs::read_to_string(&log)?.is_empty() {
            std::thread::sleep(LOOK);
        }
        assert!(test_kill_process_group(group).is_ok());
        drop(process);
        assert!(test_kill_process_group(group).is_err(), "a child that ignores SIGTERM is left");
        Ok(())
    }

    #[tokio::test]
    async fn a_failure_shows_the_end_of_the_log_of_this_run_only() -> Result<()> {
        let log = scratch("failure.log");
        Process::start("first", &mut shell("echo old words"), &log)?.finish(SOON).await?;
        let error =
            Process::start("second", &mut shell("echo new words; exit 3"), &log)?.finish(SOON).await.unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains("new words") && text.contains("exit status: 3") && !text.contains("old words"), "{text}");
        Ok(())
    }

    #[tokio::test]
    async fn one_that_hangs_is_ended_and_named() -> Result<()> {
        let log = scratch("hang.log");
        let process = Process::start("hangs", &mut shell("echo waits; sleep 600"), &log)?;
        let group = process.group;
        let error = process.finish(Duration::from_millis(200)).await.unwrap_err();
        assert!(format!("{error:#}").starts_with("hangs did not end within 0 s."));
        assert!(test_kill_process_group(group).is_err());
        Ok(())
    }

    #[tokio::test]
    async fn one_that_ends_is_never_ready() -> Result<()> {
        let log = scratch("ready.log");
        let mut process = Process::start("short", &mut shell("echo cannot bind; exit 1"), &log)?;
        let error = process.ready(Duration::from_secs(60), async || false).await.unwrap_err();
        assert!(format!("{error:#}").contains("cannot bind"));
        assert!(process.alive().is_err());
        Ok(())
    }
}
