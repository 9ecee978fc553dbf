//! What a server waits for: signals, the end of the command it runs for, its own end.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use freestone_core::file_size_limit::Limit;
use freestone_core::log_limit::LogLimit;
use libc::SIGPWR;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{
    SIGALRM, SIGCHLD, SIGHUP, SIGINT, SIGIO, SIGPROF, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM, SIGXCPU, SIGXFSZ,
};
use signal_hook::iterator::Signals;
use tracing::warn;

use crate::process;

/// How long a command that was told to end may take before it is killed.
const COMMAND_GRACE: Duration = Duration::from_secs(5);
/// Signals that mean nothing to a server, and whose default action would end it with nothing saved:
/// of scripts that rotate logs, of a timer that a parent has set, of descriptors that others share.
const UNUSED: [i32; 6] = [SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM, SIGPROF, SIGIO];
/// A process that a signal ended has this plus the signal's number as its status, as shells have
/// it.
pub const STATUS_OF_SIGNAL_0: i32 = 128;

/// Something happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A signal that asks for the end.
    Signal(i32),
    /// The kernel or the machine asks for the end, for this reason. It may repeat that, which never
    /// shortens an end under way.
    Emergency(&'static str),
    /// A child process changed its state.
    Child,
    /// The one client of `--single` has left.
    Left,
    /// The server has ended.
    Ended,
}

/// What happened, in order.
pub struct Events {
    sender: Sender<Event>,
    receiver: Receiver<Event>,
    at_signal: Arc<AtSignal>,
}

/// What signals that end the server do at once.
#[derive(Default)]
struct AtSignal {
    act: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// One has come.
    is_asked: AtomicBool,
}

impl AtSignal {
    fn come(&self) {
        self.is_asked.store(true, Ordering::SeqCst);
        self.act.get().iter().for_each(|act| act());
    }
}

impl Events {
    /// Takes over the signals. From here on they do nothing but come out here. A handler takes them,
    /// not `SIG_IGN`: programs that the server starts have the default actions again.
    pub fn listen() -> Result<Self> {
        let (sender, receiver) = mpsc::channel();
        let mut wanted = vec![SIGINT, SIGTERM, SIGCHLD, SIGXCPU, SIGPWR, SIGXFSZ];
        wanted.extend(UNUSED);
        // Under nohup it stays ignored.
        if !is_ignored(SIGHUP) {
            wanted.push(SIGHUP);
        }
        let mut signals = Signals::new(wanted).context("cannot take over the signals")?;
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
                            if let (Some(limit), Some(held_back)) = (Limit::of_process(), file_sizes.line(()))
                            {
                                warn!("a file cannot grow: {limit}{held_back}");
                            }
                            continue;
                        }
                        unused if UNUSED.contains(&unused) => continue,
                        signal => Event::Signal(signal),
                    };
                    let is_end = matches!(event, Event::Emergency(_) | Event::Signal(SIGINT | SIGTERM));
                    if is_end {
                        act.come();
                    }
                    if to.send(event).is_err() {
                        return;
                    }
                }
            })
            .context("cannot start the thread for signals")?;
        Ok(Self { sender, receiver, at_signal })
    }

    /// Sets what SIGINT and SIGTERM do beside coming out here, on another thread: it waits for nothing. If
    /// one has come already, it is done now.
    pub fn at_signal(&self, act: impl Fn() + Send + Sync + 'static) {
        // Once, by the server.
        let _ = self.at_signal.act.set(Box::new(act));
        if self.at_signal.is_asked.load(Ordering::SeqCst) {
            self.at_signal.come();
        }
    }

    /// For events of one's own.
    pub fn sender(&self) -> Sender<Event> {
        self.sender.clone()
    }
}

/// Whether a signal does nothing, as a shell has it for its background jobs.
pub fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or_default();
    mask & (1 << (signal - 1)) != 0
}

/// Whether there is a terminal that can hang up.
pub fn has_terminal() -> bool {
    fs::File::open("/dev/tty").is_ok()
}

/// Waits for what asks for the end: a signal, or that the one client has left. A hangup does not where
/// `on_hangup` takes it.
pub fn signalled(events: &Events, on_hangup: &dyn Fn() -> bool) -> Result<()> {
    loop {
        match events.receiver.recv().context("the thread for signals is gone")? {
            Event::Signal(SIGHUP) if on_hangup() => {}
            Event::Signal(_) | Event::Left => return Ok(()),
            Event::Emergency(why) => {
                warn!("the server ends: {why}");
                return Ok(());
            }
            Event::Child | Event::Ended => {}
        }
    }
}

/// How waiting for the end of the server ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It has ended.
    Well,
    /// This signal came before.
    Signal(i32),
    /// It took too long.
    Late,
}

/// Waits for the end of the server, or until then.
pub fn ended(events: &Events, until: Option<Instant>) -> Ended {
    loop {
        let event = match until {
            None => events.receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(at) => events.receiver.recv_timeout(at.saturating_duration_since(Instant::now())),
        };
        match event {
            Ok(Event::Child | Event::Left | Event::Emergency(_)) => {}
            Ok(Event::Signal(signal)) => return Ended::Signal(signal),
            Ok(Event::Ended) | Err(RecvTimeoutError::Disconnected) => return Ended::Well,
            Err(RecvTimeoutError::Timeout) => return Ended::Late,
        }
    }
}

/// Runs the command and waits for its end. A signal is passed on to it; a second one, or too long a
/// wait, kills it. Returns its exit status.
pub fn command_ends(events: &Events, mut command: Command) -> Result<u8> {
    let mut child = process::spawn(&mut command).context("--run: cannot start sh")?;
    let mut kill_at = None;
    loop {
        // Only here is the child reaped, so its number is its own whenever a signal is sent.
        if let Some(status) = child.try_wait().context("--run: cannot wait for the command")? {
            return Ok(exit_status(status));
        }
        let event = match kill_at {
            None => events.receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(at) => events.receiver.recv_timeout(Instant::saturating_duration_since(&at, Instant::now())),
        };
        match event {
            Ok(Event::Signal(signal)) if kill_at.is_none() => {
                pass_on(&child, signal);
                kill_at = Some(Instant::now() + COMMAND_GRACE);
            }
            Ok(Event::Emergency(why)) if kill_at.is_none() => {
                warn!("the server ends, and the command of --run before it: {why}");
                pass_on(&child, SIGTERM);
                kill_at = Some(Instant::now() + COMMAND_GRACE);
            }
            Ok(Event::Child | Event::Left | Event::Ended | Event::Emergency(_)) => {}
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
        // Fails only where the command is gone, which the caller sees next.
        let _ = kill_process(pid, signal);
    }
}

fn exit_status(status: ExitStatus) -> u8 {
    let code = status.code().unwrap_or_else(|| STATUS_OF_SIGNAL_0 + status.signal().unwrap_or_default());
    u8::try_from(code).unwrap_or(u8::MAX)
}
