//! Background load: a child process that connects to the server or burns CPU time while a client is
//! measured.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use rustix::process::{Pid, Signal, kill_process};

use super::connect_and_disconnect;
use crate::programs::tool;

/// Number of threads that run the load.
const THREADS: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LoadKind {
    /// Connects, selects the export and disconnects, as fast as the server allows.
    Connect,
    /// Uses CPU time without contacting the server.
    Burn,
}

/// Hidden command: runs the load until standard input ends, then prints the number of iterations.
#[derive(Debug, Clone, clap::Args)]
pub struct Loop {
    #[arg(value_enum)]
    what: LoadKind,
    socket: PathBuf,
}

impl Loop {
    pub fn run(&self) -> Result<()> {
        let (ends, count) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    // Relaxed: the flag guards no other data.
                    while !ends.load(Ordering::Relaxed) {
                        match self.what {
                            // A server that is full or shutting down refuses some connects.
                            LoadKind::Connect if connect_and_disconnect(&self.socket).is_err() => continue,
                            LoadKind::Connect => {}
                            LoadKind::Burn => (0..100_000).for_each(|n: u32| _ = std::hint::black_box(n)),
                        }
                        // Relaxed: the count is read after all threads have ended.
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let input = std::io::stdin().read_to_end(&mut Vec::new());
            // Relaxed: the flag guards no other data.
            ends.store(true, Ordering::Relaxed);
            input
        })?;
        println!("{}", count.into_inner());
        Ok(())
    }
}

/// A child process that runs the load. The process is stopped until [`BackgroundLoad::resume`].
pub struct BackgroundLoad(Child);

impl BackgroundLoad {
    /// Starts the load process and pauses it at once.
    pub fn start(what: LoadKind, socket: &Path) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        let what = what.to_possible_value().context("kind of load has no name")?;
        command.arg("clients-loop").arg(what.get_name()).arg(socket);
        let mut command = tool::die_with_parent(&command);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let load = Self(command.spawn().context(tool::NO_SETPRIV)?);
        load.pause()?;
        Ok(load)
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Continues the load process (SIGCONT).
    pub fn resume(&self) -> Result<()> {
        Ok(kill_process(Pid::from_child(&self.0), Signal::CONT)?)
    }

    /// Pauses the load process (SIGSTOP).
    pub fn pause(&self) -> Result<()> {
        Ok(kill_process(Pid::from_child(&self.0), Signal::STOP)?)
    }

    /// Ends the load process and returns the number of iterations of all its threads.
    pub fn end(mut self) -> Result<u64> {
        self.resume()?;
        drop(self.0.stdin.take());
        let mut output = String::new();
        self.0
            .stdout
            .take()
            .context("standard output of the background load")?
            .read_to_string(&mut output)?;
        self.0.wait()?;
        // Only the last line is the count: every command of this program prints a header first.
        let last = output.lines().last().unwrap_or_default();
        last.parse().with_context(|| format!("background load printed {output:?} instead of a count"))
    }
}

impl Drop for BackgroundLoad {
    fn drop(&mut self) {
        // The process may have ended already; drop cannot report errors.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
