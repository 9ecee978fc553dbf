//! What another process does while a client is measured.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use rustix::process::{Pid, Signal, kill_process};

use super::visit;
use crate::tool;

/// What is done, on so many threads.
const THREADS: usize = 4;

/// A way to be a burden.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum What {
    /// Connects, chooses the export and leaves, as fast as the server lets it.
    Connect,
    /// Uses the CPUs and leaves the server alone.
    Burn,
}

/// The hidden command: goes on until standard input ends, and says how often it was done.
#[derive(Debug, Clone, clap::Args)]
pub struct Loop {
    #[arg(value_enum)]
    what: What,
    /// The server's.
    socket: PathBuf,
}

impl Loop {
    pub fn run(&self) -> Result<()> {
        let (ends, count) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    // Relaxed: a flag alone.
                    while !ends.load(Ordering::Relaxed) {
                        match self.what {
                            // A server that is full, or ends, refuses some.
                            What::Connect if visit(&self.socket).is_err() => continue,
                            What::Connect => {}
                            What::Burn => (0..100_000).for_each(|n: u32| _ = std::hint::black_box(n)),
                        }
                        // Relaxed: a count that is read when all have ended.
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let told = std::io::stdin().read_to_end(&mut Vec::new());
            // Relaxed: as where it is read.
            ends.store(true, Ordering::Relaxed);
            told
        })?;
        println!("{}", count.into_inner());
        Ok(())
    }
}

/// Such a process. It stands still until it is let go.
pub struct Burden(Child);

impl Burden {
    /// Starts one.
    pub fn start(what: What, socket: &Path) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        let what = what.to_possible_value().context("a burden has a name")?;
        command.arg("clients-loop").arg(what.get_name()).arg(socket);
        let mut command = tool::ends_with_us(&command);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let burden = Self(command.spawn().context(tool::NO_SETPRIV)?);
        burden.hold()?;
        Ok(burden)
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// It goes on.
    pub fn let_go(&self) -> Result<()> {
        Ok(kill_process(Pid::from_child(&self.0), Signal::CONT)?)
    }

    /// It stands still.
    pub fn hold(&self) -> Result<()> {
        Ok(kill_process(Pid::from_child(&self.0), Signal::STOP)?)
    }

    /// Ends it; says how often it was done.
    pub fn end(mut self) -> Result<u64> {
        self.let_go()?;
        drop(self.0.stdin.take());
        let mut told = String::new();
        self.0.stdout.take().context("its standard output")?.read_to_string(&mut told)?;
        self.0.wait()?;
        // What every command of this program says comes first.
        let last = told.lines().last().unwrap_or_default();
        last.parse().with_context(|| format!("the burden said {told:?}"))
    }
}

impl Drop for Burden {
    fn drop(&mut self) {
        // It may have ended; there is nobody to tell.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
