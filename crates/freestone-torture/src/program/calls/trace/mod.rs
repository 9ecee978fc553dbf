//! A traced process: the tracer numbers its system calls and makes chosen ones fail.
//!
//! The thread that starts the process also traces it until the end, since Linux binds a traced process to one thread.
//! The tracing thread and that of the script share a [`TraceRecord`](record::TraceRecord). Another thread kills a
//! process that needs more than [`STEP_MAX`] for one step. Only the lives of this mode use this room.
//!
//! Lock order: no thread holds two locks of the shared record at once.

mod ptrace;
mod record;
mod ring;
mod tracer;

use std::fs;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, ExitStatus};
use std::sync::{Arc, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use freestone_testkit::process::read_until_ready;
use libc::pid_t;
use rustix::process::{Pid, Signal, kill_process};

use super::fault::{Case, Extent, Site};
use crate::program::server::Resources;
use record::{Shared, lock};
use tracer::trace;

/// Maximum duration of one step of a script. The end of a server takes up to 12 s by its own limits.
const STEP_MAX: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// When the tracer starts to number calls and make them fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arm {
    /// Calls are never numbered and never fail.
    Never,
    /// At the marker call with which `serve` starts.
    AtStart,
    /// When the script calls [`TracedProcess::arm`].
    Later,
    /// At the first call on a file in the directory of the run.
    AtFile,
}

pub struct TracedProcess {
    shared: Arc<Shared>,
    pid: pid_t,
    dir: PathBuf,
    output: BufReader<ChildStdout>,
    threads: Vec<JoinHandle<()>>,
}

impl TracedProcess {
    /// Starts a process, numbers its calls from `arm` on, and makes those of `case` fail.
    pub fn start(command: Command, dir: &Path, arm: Arm, case: Option<&Case>) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        {
            let mut record = lock(&shared.record);
            record.waits_for_marker = arm == Arm::AtStart;
            record.waits_for_file = arm == Arm::AtFile;
            record.case = case.cloned();
        }
        let (tell, told) = mpsc::channel();
        let (own, dir) = (Arc::clone(&shared), dir.to_owned());
        let of_tracer = dir.clone();
        let tracer = thread::Builder::new()
            .name("tracer".into())
            .spawn(move || trace(command, &of_tracer, &own, &tell))?;
        let (pid, output) = told.recv().map_err(|_| io::Error::other("the tracer ended"))??;
        let own = Arc::clone(&shared);
        let watchdog = thread::Builder::new().name("watchdog".into()).spawn(move || watch(pid, &own))?;
        let (output, threads) = (BufReader::new(output), vec![tracer, watchdog]);
        Ok(Self { shared, pid, dir, output, threads })
    }

    /// Waits until the server is ready. On failure, the error contains the output of the server.
    pub fn wait_ready(&mut self) -> Result<(), String> {
        self.step("start");
        read_until_ready(&mut self.output).map(drop)
    }

    pub fn arm(&self) {
        lock(&self.shared.record).arm(self.pid, &self.dir);
    }

    /// Marks the script as ended, which ends failures that last as long as the script.
    pub fn end_script(&self) {
        let mut record = lock(&self.shared.record);
        record.is_over = true;
        if record.case.as_ref().is_some_and(|case| case.extent == Extent::Script) {
            record.imposed = None;
        }
    }

    /// Records the start of a step of the script, which the watchdog then limits.
    pub fn step(&self, what: impl Into<String>) {
        *lock(&self.shared.step) = Some((what.into(), Instant::now()));
    }

    /// Returns the number of calls that have failed.
    pub fn hits(&self) -> u32 {
        lock(&self.shared.record).hits
    }

    pub fn sites(&self) -> Vec<Site> {
        lock(&self.shared.record).sites.clone()
    }

    pub fn is_killed(&self) -> bool {
        lock(&self.shared.record).is_killed
    }

    /// Returns a description of the step that exceeded its time limit, or `None`.
    pub fn hung(&self) -> Option<String> {
        lock(&self.shared.hung).clone()
    }

    pub fn resources(&self, dir: &Path) -> Resources {
        Pid::from_raw(self.pid).map(|pid| Resources::of(pid, dir)).unwrap_or_default()
    }

    pub fn has_ended(&self) -> bool {
        lock(&self.shared.record).status.is_some()
    }

    pub fn signal(&self, signal: Signal) {
        if !self.has_ended() {
            kill(self.pid, signal);
        }
    }

    /// Waits for the end of the process. The watchdog kills it if the step takes too long.
    pub fn wait(&self) -> ExitStatus {
        let mut record = lock(&self.shared.record);
        loop {
            if let Some(status) = record.status {
                return status;
            }
            record = self.shared.changed.wait(record).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for TracedProcess {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        for thread in self.threads.drain(..) {
            // The panic hook has already reported a panic of that thread.
            let _ = thread.join();
        }
    }
}

fn kill(pid: pid_t, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        // An error only means that the process has just ended.
        let _ = kill_process(pid, signal);
    }
}

/// Watches a process until its end, and kills it if a step exceeds `STEP_MAX`. Counts its own polls instead of
/// comparing clocks, so that a pause of the whole machine does not count.
fn watch(pid: pid_t, shared: &Shared) {
    let (mut watched, mut polls) = (None, 0);
    while lock(&shared.record).status.is_none() {
        thread::sleep(POLL_INTERVAL);
        let step = lock(&shared.step).clone();
        polls = if step == watched { polls + 1 } else { 0 };
        watched = step;
        if POLL_INTERVAL * polls <= STEP_MAX {
            continue;
        }
        if let Some((what, since)) = &watched {
            let hung = format!(
                "{what}: no end after {} s\n{}\nthis program:\n{}",
                since.elapsed().as_secs(),
                stacks(pid),
                stacks(std::process::id() as pid_t)
            );
            lock(&shared.hung).get_or_insert(hung);
            kill(pid, Signal::KILL);
        }
    }
}

/// Returns the kernel function in which each thread of a process waits.
fn stacks(pid: pid_t) -> String {
    let mut lines = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let read = |name: &str| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
        let (comm, channel) = (read("comm"), read("wchan"));
        lines.push(format!("    {} {channel}", comm.trim_end()));
    }
    lines.join("\n")
}
