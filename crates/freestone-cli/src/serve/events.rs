//! Events that the main thread of a server waits for: signals, the exit of the command of `--run`, and the
//! end of the server.

use std::cell::Cell;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{Context as _, Result};
use freestone_core::file_size_limit::FileSizeLimit;
use freestone_core::log_limit::LogLimit;
use libc::SIGPWR;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{
    SIGALRM, SIGCHLD, SIGHUP, SIGINT, SIGIO, SIGPROF, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM, SIGXCPU, SIGXFSZ,
};
use signal_hook::iterator::Signals;
use tracing::warn;

use crate::serve::process;

/// Time between forwarding a signal to the command of `--run` and killing the command.
const COMMAND_GRACE: Duration = Duration::from_secs(5);
/// Signals that the server ignores, because their default action would end it without saving. Log rotation scripts,
/// timers set by a parent process and shared descriptors can cause them.
const IGNORED: [i32; 6] = [SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM, SIGPROF, SIGIO];
/// Number added to a signal's number for the exit status of a process that the signal ended, as in shells.
pub const STATUS_OF_SIGNAL_0: i32 = 128;

/// An event for the main thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// SIGINT, SIGTERM or SIGHUP.
    Signal(i32),
    /// The verb `shutdown`.
    Verb,
    /// The verb `upgrade`.
    Upgrade,
    /// The kernel or the machine requests that the server ends, for this reason (SIGXCPU, SIGPWR). Unlike a second
    /// signal, a repeated request does not shorten a shutdown in progress.
    Emergency(&'static str),
    /// A child process has exited or was stopped (SIGCHLD).
    Child,
    /// The client of `--single` has disconnected.
    Left,
    /// The shutdown of the server is complete.
    Ended,
}

/// Queue of events from the signal thread and other threads to the main thread.
pub struct Events {
    sender: Sender<Event>,
    receiver: Receiver<Event>,
    at_signal: Arc<AtSignal>,
    /// True once a signal has requested the end. The next signal ends the process at once.
    has_signal: Cell<bool>,
}

/// Action that the signal thread runs at once when a signal ends the server.
#[derive(Default)]
struct AtSignal {
    act: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// True once a signal that ends the server has been received.
    is_signaled: AtomicBool,
}

impl AtSignal {
    fn run(&self) {
        self.is_signaled.store(true, Ordering::SeqCst);
        self.act.get().iter().for_each(|act| act());
    }
}

impl Events {
    /// Installs the signal handlers. Afterwards signals only create events, and do not end the process. Ignored signals
    /// have a handler as well instead of `SIG_IGN`, so that child programs get the default actions.
    pub fn listen() -> Result<Self> {
        let (sender, receiver) = mpsc::channel();
        let mut wanted = vec![SIGINT, SIGTERM, SIGCHLD, SIGXCPU, SIGPWR, SIGXFSZ];
        wanted.extend(IGNORED);
        // nohup starts the server with SIGHUP ignored, which must remain ignored.
        if !is_ignored(SIGHUP) {
            wanted.push(SIGHUP);
        }
        let mut signals = Signals::new(wanted).context("cannot install the signal handlers")?;
        let to = sender.clone();
        let at_signal = Arc::<AtSignal>::default();
        let act = Arc::clone(&at_signal);
        thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                let file_sizes = LogLimit::default();
                for signal in &mut signals {
                    let event = match signal {
                        SIGCHLD => Event::Child,
                        SIGXCPU => Event::Emergency("the CPU time that RLIMIT_CPU allows is used up"),
                        SIGPWR => Event::Emergency("the power is about to fail (SIGPWR)"),
                        SIGXFSZ => {
                            if let (Some(limit), Some(held_back)) =
                                (FileSizeLimit::of_process(), file_sizes.admit(()))
                            {
                                warn!("a file cannot grow: {limit}{held_back}");
                            }
                            continue;
                        }
                        ignored if IGNORED.contains(&ignored) => continue,
                        signal => Event::Signal(signal),
                    };
                    let is_end = matches!(event, Event::Emergency(_) | Event::Signal(SIGINT | SIGTERM));
                    if is_end {
                        act.run();
                    }
                    if to.send(event).is_err() {
                        return;
                    }
                }
            })
            .context("cannot start the thread for signals")?;
        Ok(Self { sender, receiver, at_signal, has_signal: Cell::new(false) })
    }

    /// Sets an action for signals that end the server, in addition to the event. The action runs on the signal thread
    /// and must not block. If such a signal was received before this call, the action runs now.
    pub fn at_signal(&self, act: impl Fn() + Send + Sync + 'static) {
        // The server calls this method once, so `set` does not fail.
        let _ = self.at_signal.act.set(Box::new(act));
        if self.at_signal.is_signaled.load(Ordering::SeqCst) {
            self.at_signal.run();
        }
    }

    /// Returns true if a signal, a verb or the machine has requested the end, and nobody has taken the event yet.
    pub fn has_end_request(&self) -> bool {
        self.receiver
            .try_iter()
            .any(|event| matches!(event, Event::Emergency(_) | Event::Verb | Event::Signal(SIGINT | SIGTERM)))
    }

    /// Returns a sender with which other threads add events, such as [`Event::Ended`].
    pub fn sender(&self) -> Sender<Event> {
        self.sender.clone()
    }
}

/// Returns true if this process ignores the signal, as SIGINT is ignored in background jobs of a shell.
pub fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or_default();
    mask & (1 << (signal - 1)) != 0
}

/// Returns true if the process has a controlling terminal, which can hang up.
pub fn has_terminal() -> bool {
    fs::File::open("/dev/tty").is_ok()
}

/// Waits for an event that ends the server: a signal, the verb `shutdown`, an emergency, or the disconnect of the client of
/// `--single`.
/// SIGHUP is such an event only if `on_hangup` returns false. Returns true if the event is [`Event::Upgrade`].
pub fn wait_for_end_request(events: &Events, on_hangup: &dyn Fn() -> bool) -> Result<bool> {
    loop {
        match events.receiver.recv().context("the thread for signals is gone")? {
            Event::Signal(SIGHUP) if on_hangup() => {}
            Event::Signal(_) => {
                events.has_signal.set(true);
                return Ok(false);
            }
            Event::Upgrade => return Ok(true),
            Event::Verb | Event::Left => return Ok(false),
            Event::Emergency(why) => {
                warn!("the server ends: {why}");
                return Ok(false);
            }
            Event::Child | Event::Ended => {}
        }
    }
}

/// Result of waiting for the end of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitOutcome {
    /// The shutdown of the server is complete.
    Ended,
    /// A second signal, with this number, was received before the server ended.
    Signal(i32),
    /// The deadline passed before the server ended.
    TimedOut,
}

/// Waits for the end of the server, a second signal, or the deadline `until`; `None` means no deadline. A server that does
/// not end because of a signal continues its shutdown after the first one: a supervisor often sends SIGTERM to a server
/// that it has shut down.
pub fn wait_for_end(events: &Events, until: Option<Instant>) -> WaitOutcome {
    loop {
        let event = match until {
            None => events.receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(at) => events.receiver.recv_timeout(at.saturating_duration_since(Instant::now())),
        };
        match event {
            Ok(Event::Child | Event::Left | Event::Verb | Event::Upgrade | Event::Emergency(_)) => {}
            Ok(Event::Signal(_)) if !events.has_signal.replace(true) => {
                warn!("the server is ending; another signal ends it at once, without saving");
            }
            Ok(Event::Signal(signal)) => return WaitOutcome::Signal(signal),
            Ok(Event::Ended) | Err(RecvTimeoutError::Disconnected) => return WaitOutcome::Ended,
            Err(RecvTimeoutError::Timeout) => return WaitOutcome::TimedOut,
        }
    }
}

/// Runs the command and returns its exit status. Passes the first signal on to the command, and sends SIGTERM for the verb
/// `shutdown`. Kills the command at a second signal, or if it does not exit within [`COMMAND_GRACE`].
pub fn run_to_exit(events: &Events, mut command: Command) -> Result<u8> {
    let mut child = process::spawn(&mut command).context("--run: cannot start sh")?;
    let mut kill_at = None;
    loop {
        // The child is reaped only here, so its process ID cannot belong to another process when a signal is sent.
        if let Some(status) = child.try_wait().context("--run: cannot wait for the command")? {
            return Ok(exit_status(status));
        }
        let event = match kill_at {
            None => events.receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(at) => events.receiver.recv_timeout(Instant::saturating_duration_since(&at, Instant::now())),
        };
        match event {
            Ok(Event::Signal(signal)) if kill_at.is_none() => {
                events.has_signal.set(true);
                pass_on(&child, signal);
                kill_at = Some(Instant::now() + COMMAND_GRACE);
            }
            Ok(Event::Emergency(why)) if kill_at.is_none() => {
                warn!("the server ends, and the command of --run before it: {why}");
                pass_on(&child, SIGTERM);
                kill_at = Some(Instant::now() + COMMAND_GRACE);
            }
            Ok(Event::Verb) if kill_at.is_none() => {
                pass_on(&child, SIGTERM);
                kill_at = Some(Instant::now() + COMMAND_GRACE);
            }
            Ok(
                Event::Child
                | Event::Left
                | Event::Ended
                | Event::Verb
                | Event::Upgrade
                | Event::Emergency(_),
            ) => {}
            Ok(Event::Signal(_)) | Err(_) => {
                child.kill().context("--run: cannot kill the command")?;
                let status = child.wait().context("--run: cannot wait for the command")?;
                return Ok(exit_status(status));
            }
        }
    }
}

fn pass_on(child: &Child, signal: i32) {
    if let (Some(pid), Some(signal)) = (Pid::from_raw(child.id() as i32), Signal::from_named_raw(signal)) {
        // Fails only if the command has exited, which the caller checks next.
        let _ = kill_process(pid, signal);
    }
}

fn exit_status(status: ExitStatus) -> u8 {
    let code = status.code().unwrap_or_else(|| STATUS_OF_SIGNAL_0 + status.signal().unwrap_or_default());
    u8::try_from(code).unwrap_or(u8::MAX)
}
