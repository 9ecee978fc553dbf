//! The `io_uring` engine: one thread owns the ring, starts jobs in batches and reaps them.
#![expect(unsafe_code)]
// UNSAFETY: io_uring is handed pointers that must stay valid until the kernel has answered.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};
use rustix::event::EventfdFlags;
use rustix::io::Errno;

use super::backing::Backing;
use super::job::{Io, Job, Step, ZEROES};
use super::schedule::Schedule;

/// Jobs in the kernel's hands at once; the others wait in the schedule.
const DEPTH_JOBS: usize = 128;
/// Entries of the submission queue; the completion queue has twice as many. One is for the wake-up.
const RING_ENTRIES: u32 = 256;
const _: () = assert!(DEPTH_JOBS + 1 < RING_ENTRIES as usize);
/// Marks the wake-up among the answers; ids of jobs are small.
const WAKE: u64 = u64::MAX;
/// Pause after the kernel had no resources for a submission.
const BREATH: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(super) struct Ring {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    backing: Arc<Backing>,
    /// Held for a few instructions; the only lock here.
    inbox: Mutex<Inbox>,
    /// An eventfd that the ring polls.
    wake: OwnedFd,
}

#[derive(Debug, Default)]
struct Inbox {
    jobs: Vec<Job>,
    /// The thread waits for the kernel, or is about to: it has to be woken.
    sleeping: bool,
    stop: bool,
    /// The thread has ended: nobody will take jobs any more.
    dead: bool,
}

impl Ring {
    pub fn start(backing: &Arc<Backing>) -> io::Result<Self> {
        let ring = IoUring::new(RING_ENTRIES)?;
        let mut probe = io_uring::Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [
            opcode::Read::CODE,
            opcode::Write::CODE,
            opcode::Fsync::CODE,
            opcode::Fallocate::CODE,
            opcode::PollAdd::CODE,
        ];
        if needed.iter().any(|&code| !probe.is_supported(code)) {
            return Err(io::Error::other(
                "this kernel's io_uring lacks read, write, fsync, fallocate or poll",
            ));
        }
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let shared = Arc::new(Shared { backing: Arc::clone(backing), inbox: Mutex::default(), wake });
        let worker = Worker {
            ring,
            shared: Arc::clone(&shared),
            schedule: Schedule::default(),
            in_kernel: 0,
            armed: false,
        };
        let thread = thread::Builder::new().name("file".into()).spawn(move || worker.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    pub fn submit(&self, job: Job) {
        let mut inbox = self.shared.lock();
        if inbox.dead {
            // Answers `Gone`, outside of the lock.
            drop(inbox);
            return drop(job);
        }
        inbox.jobs.push(job);
        if mem::take(&mut inbox.sleeping) {
            drop(inbox);
            self.shared.wake();
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.wake();
        if let Some(thread) = self.thread.take()
            // The last reference may be dropped by a completion, on that thread.
            && thread.thread().id() != thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // Fails only where the counter is at its limit, and then the thread is awake.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

/// What the thread owns.
struct Worker {
    ring: IoUring,
    shared: Arc<Shared>,
    schedule: Schedule,
    in_kernel: usize,
    /// A poll of the eventfd is in the kernel's hands.
    armed: bool,
}

impl Worker {
    fn run(mut self) {
        loop {
            let (arrived, stop) = {
                let mut inbox = self.shared.lock();
                inbox.sleeping = inbox.jobs.is_empty();
                (mem::take(&mut inbox.jobs), inbox.stop)
            };
            let sleep = arrived.is_empty();
            for job in arrived {
                self.schedule.arrive(job);
            }
            self.start_ready();
            if stop && sleep && self.schedule.is_empty() {
                return;
            }
            self.arm();
            // Jobs that are ready and not started have a full ring to wait for.
            let entered = if sleep { self.ring.submit_and_wait(1) } else { self.ring.submit() };
            if let Err(error) = entered {
                match Errno::from_io_error(&error) {
                    Some(Errno::INTR) => {}
                    Some(Errno::AGAIN | Errno::BUSY | Errno::NOMEM) => thread::sleep(BREATH),
                    _ => {
                        tracing::error!("{}: io_uring failed: {error}", self.shared.backing.path.display());
                        return;
                    }
                }
            }
            self.reap();
        }
    }

    fn start_ready(&mut self) {
        while self.in_kernel < DEPTH_JOBS
            && let Some(id) = self.schedule.next_ready()
        {
            let backing = Arc::clone(&self.shared.backing);
            if let Some(step) = self.schedule.job(id).map(|job| job.begin(&backing)) {
                self.in_kernel += 1;
                self.follow(id, step);
            }
        }
    }

    /// Does what a job asks for.
    fn follow(&mut self, id: usize, step: Step) {
        match step {
            Step::Io(io) => self.push_io(id, io),
            Step::Done(outcome) => {
                self.in_kernel -= 1;
                if let Some(job) = self.schedule.finish(id) {
                    // A completion that panics ends its request, not the device.
                    let finish = || job.finish(&self.shared.backing, outcome);
                    let _ = catch_unwind(AssertUnwindSafe(finish));
                }
            }
        }
    }

    fn push_io(&mut self, id: usize, io: Io) {
        let fd = types::Fd(self.shared.backing.fd.as_raw_fd());
        let Some(job) = self.schedule.job(id) else { return };
        let entry = match io {
            Io::Read { at, from, len } => {
                let memory = &mut job.buffer()[from..from + len];
                opcode::Read::new(fd, memory.as_mut_ptr(), len as u32).offset(at).build()
            }
            Io::Write { at, from, len, dsync } => {
                let memory = &job.buffer()[from..from + len];
                let flags = if dsync { libc::RWF_DSYNC } else { 0 };
                opcode::Write::new(fd, memory.as_ptr(), len as u32).offset(at).rw_flags(flags).build()
            }
            Io::Zeroes { at, len } => {
                opcode::Write::new(fd, ZEROES.0[..len].as_ptr(), len as u32).offset(at).build()
            }
            Io::Allocate { mode, at, len } => {
                opcode::Fallocate::new(fd, len).offset(at).mode(mode.bits() as i32).build()
            }
            Io::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        };
        self.push(&entry.user_data(id as u64));
    }

    fn arm(&mut self) {
        if !self.armed {
            let fd = types::Fd(self.shared.wake.as_raw_fd());
            let poll = opcode::PollAdd::new(fd, libc::POLLIN as u32).build();
            self.push(&poll.user_data(WAKE));
            self.armed = true;
        }
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the memory is a job's buffer, which is freed only in `Job::finish` (after the answer to this entry, as a job has
        // one entry at a time) and leaked otherwise, or a static. The descriptors are open as long as `shared` lives;
        // the kernel takes its own reference when it accepts the entry.
        let pushed = unsafe { self.ring.submission().push(entry) };
        // Each job has one entry at a time and the poll one; the queue is larger than both.
        debug_assert!(pushed.is_ok(), "the submission queue has {RING_ENTRIES} entries");
    }

    fn reap(&mut self) {
        let answers: Vec<_> =
            self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        for (id, result) in answers {
            if id == WAKE {
                self.armed = false;
                let mut count = [0; 8];
                // Empty where somebody else's wake-up was seen before: no harm.
                let _ = rustix::io::read(&self.shared.wake, &mut count);
                continue;
            }
            let id = id as usize;
            let answer = if result < 0 { Err(Errno::from_raw_os_error(-result)) } else { Ok(result as u64) };
            let backing = Arc::clone(&self.shared.backing);
            if let Some(step) = self.schedule.job(id).map(|job| job.advance(&backing, answer)) {
                self.follow(id, step);
            }
        }
    }
}

impl Drop for Worker {
    /// The end, in peace or not: nobody is left waiting.
    fn drop(&mut self) {
        let left = {
            let mut inbox = self.shared.lock();
            inbox.dead = true;
            mem::take(&mut inbox.jobs)
        };
        drop(left);
    }
}
