//! The thread engine: a fixed number of threads that make blocking system calls, used if `io_uring`
//! is not available.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use rustix::io::{Errno, ReadWriteFlags};

use super::backing::Backing;
use super::job::{Io, Job, Step};
use super::schedule::Schedule;
use freestone_core::device::Result;
use freestone_core::sync::{
    Condvar, Mutex,
    thread::{self, JoinHandle},
};
use freestone_core::zeroes::ZEROES;

/// Number of threads, and so the maximum number of system calls in flight.
const THREADS: usize = 4;

#[derive(Debug)]
pub(super) struct Threads {
    shared: Arc<ThreadsShared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct ThreadsShared {
    backing: Arc<Backing>,
    /// Lock of the engine's state. Held for a few instructions, never across a system call or a
    /// completion.
    state: Mutex<ThreadsState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ThreadsState {
    schedule: Schedule,
    stop: bool,
}

impl Threads {
    pub fn start(backing: &Arc<Backing>) -> io::Result<Self> {
        let shared = Arc::new(ThreadsShared {
            backing: Arc::clone(backing),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let mut engine = Self { shared, threads: Vec::new() };
        for _ in 0..THREADS {
            let shared = Arc::clone(&engine.shared);
            let thread = thread::Builder::new().name("file".into()).spawn(move || shared.work())?;
            engine.threads.push(thread);
        }
        Ok(engine)
    }

    pub fn submit(&self, job: Job) {
        self.shared.state.lock().schedule.add(job);
        self.shared.changed.notify_one();
    }
}

impl ThreadsShared {
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(id) = state.schedule.next_ready() {
                let job = state.schedule.take(id);
                drop(state);
                if let Some(mut job) = job {
                    let first = job.begin(&self.backing);
                    let outcome = carry_out(&mut job, first, &self.backing);
                    self.state.lock().schedule.finish(id);
                    // Notify all threads: several jobs may have waited for this one, and a stopping
                    // thread may wait for the schedule to become empty.
                    self.changed.notify_all();
                    // A panic in a completion must not end this thread.
                    let _ = catch_unwind(AssertUnwindSafe(|| job.finish(&self.backing, outcome)));
                }
                state = self.state.lock();
            } else if state.stop && state.schedule.is_empty() {
                return;
            } else {
                state = self.changed.wait(state);
            }
        }
    }
}

/// Makes all system calls of a job, starting with `step`, and returns the result of the request.
pub(super) fn carry_out(job: &mut Job, mut step: Step, backing: &Backing) -> Result<()> {
    loop {
        match step {
            Step::Done(outcome) => return outcome,
            Step::Io(io) => {
                let result = call(io, job, &backing.fd);
                step = job.advance(backing, result);
            }
        }
    }
}

fn call(io: Io, job: &mut Job, fd: &OwnedFd) -> std::result::Result<u64, Errno> {
    match io {
        Io::Read { at, from, len } => {
            rustix::io::pread(fd, &mut job.buffer()[from..from + len], at).map(|n| n as u64)
        }
        Io::Write { at, from, len, dsync } => {
            let data = &job.buffer()[from..from + len];
            let written = if dsync { write_through(fd, data, at) } else { rustix::io::pwrite(fd, data, at) };
            written.map(|n| n as u64)
        }
        Io::Zeroes { at, len } => rustix::io::pwrite(fd, &ZEROES.0[..len], at).map(|n| n as u64),
        Io::Allocate { mode, at, len } => rustix::fs::fallocate(fd, mode, at, len).map(|()| 0),
        Io::Sync => rustix::fs::fdatasync(fd).map(|()| 0),
    }
}

/// Writes `data` at byte `at` durably (FUA); returns the number of bytes written.
fn write_through(fd: &OwnedFd, data: &[u8], at: u64) -> std::result::Result<usize, Errno> {
    match rustix::io::pwritev2(fd, &[IoSlice::new(data)], at, ReadWriteFlags::DSYNC) {
        // Some emulators, for example user-mode qemu, do not support `pwritev2`.
        Err(Errno::NOSYS) => {
            let written = rustix::io::pwrite(fd, data, at)?;
            rustix::fs::fdatasync(fd)?;
            Ok(written)
        }
        result => result,
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.state.lock().stop = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            // A completion on one of these threads may drop the last reference, and a thread cannot
            // join itself.
            if thread.thread().id() != thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}
