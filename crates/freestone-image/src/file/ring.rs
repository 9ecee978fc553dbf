//! The `io_uring` engine: each submitter starts its own requests, and one thread reaps completions.
//!
//! A submitting thread queues its entry under a short mutex and calls the kernel itself, so a
//! request costs no wake-up. The ring's thread reaps completions, continues jobs that need several
//! system calls, starts jobs that had to wait, and runs the completions of requests.
//!
//! The kernel may refuse a submission (`EAGAIN` when memory is short). The ring's thread then
//! retries every millisecond (see [`handover`](crate::handover)). The thread waits with `poll`,
//! which uses no entry of the ring. After [`MAX_FAILURES`] failures in a row the thread abandons
//! the ring and makes the system calls itself, one at a time. Completions of entries that the
//! kernel has already taken still arrive through the ring.
//!
//! The kernel executes a request in the context of the submitting thread. Such execution may
//! interrupt blocking calls of the thread (most restart by themselves; `epoll_wait` and a few
//! others return `EINTR`). When a submitting thread exits, the kernel cancels its requests, and the
//! ring's thread submits them again.
#![expect(unsafe_code)]
// UNSAFETY: io_uring gets pointers that must stay valid until the kernel completes the entry, and
// its queues are shared.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};
use rustix::event::{EventfdFlags, PollFd, PollFlags, poll};
use rustix::io::Errno;

use freestone_core::device::Result;
use freestone_core::mutants::{self, Mutant};
use freestone_core::plug::{self, Plug, Unplug};
use freestone_core::sync::{
    Mutex, MutexGuard,
    thread::{self, JoinHandle},
};
use freestone_core::zeroes::ZEROES;

use super::backing::Backing;
use super::job::{Io, Job, Step};
use super::schedule::Schedule;
use super::threads::carry_out;
use crate::handover::Submission;

/// Maximum number of jobs whose entries are queued or in the kernel; other jobs wait in the
/// schedule.
const DEPTH_JOBS: usize = 128;
/// Number of entries in the submission queue. Each job uses one, and another while the kernel takes a
/// batch, whose places it frees at the end: an entry may complete before, and the next one follows.
/// The completion queue has twice as many entries, so it never overflows.
const RING_ENTRIES: u32 = 256;
const _: () = assert!(2 * DEPTH_JOBS <= RING_ENTRIES as usize);
/// Maximum number of submission calls that the ring's thread makes in one hand-over: enough for
/// every entry that can be queued.
const REAPER_CALLS: usize = RING_ENTRIES as usize;
/// Number of queued entries at which a plug submits at once: an idle disk loses more by waiting
/// than extra system calls cost.
const PLUGGED_MAX: usize = 4;
/// Pause before a failed submission is retried.
const RETRY_PAUSE: Duration = Duration::from_millis(1);
/// Number of failed hand-overs by the ring's thread in a row (about one second) after which the
/// ring is abandoned.
const MAX_FAILURES: u32 = if cfg!(test) { 20 } else { 1000 };
/// Number of attempts to enter a new ring before the ring is considered unusable.
const MAX_PROBE_TRIES: u32 = 10;

#[derive(Debug)]
pub(super) struct Ring {
    shared: Arc<RingShared>,
    thread: Option<JoinHandle<()>>,
}

/// State shared by submitters and the ring's thread. Only the ring's thread uses the completion
/// queue.
struct RingShared {
    backing: Arc<Backing>,
    ring: IoUring,
    /// The only lock of the ring. Held for a few instructions, never across a system call or a
    /// completion.
    state: Mutex<RingState>,
    /// Eventfd that wakes the ring's thread: to stop, for entries that a submitter could not
    /// submit, and for new jobs after the ring is abandoned.
    wake: OwnedFd,
    /// Number of following submission calls that fail (fault injection).
    #[cfg(test)]
    refusals: std::sync::atomic::AtomicU32,
}

/// Mutable state of the ring. The lock of this state also protects the submission queue.
#[derive(Debug, Default)]
struct RingState {
    schedule: Schedule,
    /// Number of jobs whose entry is queued or in the kernel.
    in_kernel: usize,
    /// Jobs whose entries are queued, oldest first. The kernel takes entries in this order.
    queued: VecDeque<usize>,
    /// True while a thread submits entries; that thread checks for more entries before it stops.
    handing_over: bool,
    mode: Mode,
    stop: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Mode {
    /// Jobs go to the kernel through the ring.
    #[default]
    Ring,
    /// The ring is abandoned: the ring's thread makes the system calls.
    Syscalls,
    /// The ring's thread has ended: new jobs fail at once.
    Dead,
}

impl Ring {
    pub fn start(backing: &Arc<Backing>) -> io::Result<Self> {
        let mut ring = IoUring::new(RING_ENTRIES)?;
        let mut probe = io_uring::Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::Fsync::CODE, opcode::Fallocate::CODE];
        if needed.iter().any(|&code| !probe.is_supported(code)) {
            return Err(io::Error::other("this kernel's io_uring lacks read, write, fsync or fallocate"));
        }
        check_enter(&mut ring)?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let shared = Arc::new(RingShared {
            backing: Arc::clone(backing),
            ring,
            state: Mutex::default(),
            wake,
            #[cfg(test)]
            refusals: std::sync::atomic::AtomicU32::default(),
        });
        let worker = Worker {
            shared: Arc::clone(&shared),
            completions: Vec::with_capacity(RING_ENTRIES as usize),
            finished: Vec::with_capacity(DEPTH_JOBS),
            failures: 0,
        };
        let thread = thread::Builder::new().name("file".into()).spawn(move || worker.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    pub fn submit(&self, mut job: Job) {
        let shared = &self.shared;
        // `begin` may query the size of the file, so it is called without the lock.
        if let Step::Done(outcome) = job.begin(&shared.backing) {
            return shared.finish(job, outcome);
        }
        let mut state = shared.lock();
        if state.mode == Mode::Dead {
            // Dropping the job completes its request with `Gone`. Drop it without the lock.
            drop(state);
            return drop(job);
        }
        state.schedule.add(job);
        if state.mode == Mode::Syscalls {
            drop(state);
            return shared.wake_reaper();
        }
        shared.start_ready(&mut state);
        // SAFETY: `state` is locked and belongs to this ring.
        let queued = unsafe { shared.queue(&mut state) }.len();
        drop(state);
        if queued >= PLUGGED_MAX || !plug::hold(shared) {
            shared.unplug();
        }
    }
}

/// Submits a no-op to find out if the ring can be entered: a seccomp filter may allow only the
/// setup call.
fn check_enter(ring: &mut IoUring) -> io::Result<()> {
    // SAFETY: the entry refers to no memory.
    let pushed = unsafe { ring.submission().push(&opcode::Nop::new().build()) };
    pushed.map_err(|_| io::Error::other("a new io_uring is full"))?;
    let mut tries = 0;
    while let Err(error) = ring.submit_and_wait(1) {
        tries += 1;
        if tries == MAX_PROBE_TRIES {
            return Err(error);
        }
        thread::sleep(RETRY_PAUSE);
    }
    ring.completion()
        .next()
        .map(|_| ())
        .ok_or_else(|| io::Error::other("io_uring returned no completion for a no-op"))
}

impl Submission for RingShared {
    type State = RingState;

    fn lock(&self) -> MutexGuard<'_, RingState> {
        self.state.lock()
    }

    fn claimed(state: &mut RingState) -> &mut bool {
        &mut state.handing_over
    }

    fn is_empty(&self, state: &mut RingState) -> bool {
        // After the ring is abandoned, entries left in the queue are never submitted.
        if state.mode == Mode::Syscalls {
            return true;
        }
        // SAFETY: `state` is locked and belongs to this ring.
        let left = unsafe { self.queue(state) }.len();
        let taken = state.queued.len() - left;
        state.queued.drain(..taken);
        left == 0
    }

    fn enter(&self) -> io::Result<()> {
        #[cfg(test)]
        if self
            .refusals
            .fetch_update(
                std::sync::atomic::Ordering::SeqCst,
                std::sync::atomic::Ordering::SeqCst,
                |left: u32| left.checked_sub(1),
            )
            .is_ok()
        {
            return Err(Errno::AGAIN.into());
        }
        // SAFETY: no argument is passed. The kernel takes only queued entries, whose memory `push`
        // keeps valid.
        unsafe { self.ring.submitter().enter::<()>(RING_ENTRIES, 0, 0, None) }.map(|_| ())
    }

    fn wake_reaper(&self) {
        freestone_core::eventfd::wake(&self.wake);
    }
}

impl Unplug for RingShared {
    fn unplug(&self) {
        self.submit_queued();
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.wake_reaper();
        if let Some(thread) = self.thread.take()
            // A completion on the ring's thread may drop the last reference, and a thread cannot
            // join itself.
            && thread.thread().id() != thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

impl RingShared {
    /// Queues entries of ready jobs until [`DEPTH_JOBS`] are queued or in the kernel.
    fn start_ready(&self, state: &mut RingState) {
        while state.in_kernel < DEPTH_JOBS
            && state.mode == Mode::Ring
            && let Some(id) = state.schedule.next_ready()
        {
            let Some(job) = state.schedule.job(id) else { continue };
            let io = job.io(&self.backing);
            let entry = self.entry(id, job, io);
            state.in_kernel += 1;
            // SAFETY: the entry belongs to a job, and `state` to this ring.
            unsafe { self.push(state, id, &entry) };
        }
    }

    fn entry(&self, id: usize, job: &mut Job, io: Io) -> squeue::Entry {
        let fd = types::Fd(self.backing.fd.as_raw_fd());
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
        entry.user_data(id as u64)
    }

    /// Returns the submission queue, which the lock of the state protects.
    ///
    /// # Safety
    /// `state` must be locked and belong to this ring.
    unsafe fn queue<'a>(&'a self, _state: &'a mut RingState) -> squeue::SubmissionQueue<'a> {
        // SAFETY: the caller holds the state's lock, which protects the queue.
        unsafe { self.ring.submission_shared() }
    }

    /// Queues the entry of the job `id`.
    ///
    /// # Safety
    /// `state` must belong to this ring. `entry` must come from [`entry`](Self::entry) for a job in
    /// its schedule.
    unsafe fn push(&self, state: &mut RingState, id: usize, entry: &squeue::Entry) {
        // SAFETY: guaranteed by the caller.
        let mut queue = unsafe { self.queue(state) };
        // SAFETY: the memory is a static or the job's buffer. `Job::finish` frees the buffer, and
        // runs only after the completion of this entry (a job has one entry at a time), or if the
        // kernel never took it because the ring was abandoned. Otherwise the buffer is leaked. The
        // descriptor stays open while `self` lives; the kernel takes its own reference when it
        // accepts the entry.
        let pushed = unsafe { queue.push(entry) };
        // A lost entry would leave its request without an end.
        assert!(pushed.is_ok(), "the submission queue has room for two entries of each job");
        drop(queue);
        state.queued.push_back(id);
    }

    /// Abandons the ring and returns true; returns false if another thread is submitting or the
    /// queue is empty. Jobs whose entries the kernel has not taken become ready again.
    fn abandon(&self) -> bool {
        let mut state = self.lock();
        if state.handing_over || self.is_empty(&mut state) {
            return false;
        }
        state.mode = Mode::Syscalls;
        let RingState { schedule, queued, in_kernel, .. } = &mut *state;
        *in_kernel -= queued.len();
        for id in queued.drain(..).rev() {
            schedule.put_back(id);
        }
        true
    }

    fn finish(&self, job: Job, outcome: Result<()>) {
        // A panic in a completion must not end the ring's thread.
        let _ = catch_unwind(AssertUnwindSafe(|| job.finish(&self.backing, outcome)));
    }
}

impl fmt::Debug for RingShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingShared").field("state", &self.state).finish_non_exhaustive()
    }
}

struct Worker {
    shared: Arc<RingShared>,
    /// Reaped completions, as pairs of job id and result.
    completions: Vec<(usize, i32)>,
    finished: Vec<(Job, Result<()>)>,
    failures: u32,
}

impl Worker {
    fn run(mut self) {
        loop {
            let (has_claim, must_end) = self.process_completions();
            let entered = if has_claim { self.shared.hand_over(REAPER_CALLS) } else { Ok(()) };
            let plug = Plug::start();
            for (job, outcome) in self.finished.drain(..) {
                self.shared.finish(job, outcome);
            }
            drop(plug);
            if must_end {
                return;
            }
            if let Err(error) = entered
                && !mutants::on(Mutant::RingForgetsEntries)
            {
                self.retry_later(&error);
                continue;
            }
            self.failures = 0;
            if !self.carry_out_next() {
                self.wait();
            }
        }
    }

    /// Pauses before the next hand-over, or abandons the ring after too many failures.
    fn retry_later(&mut self, error: &io::Error) {
        self.failures += 1;
        if self.failures >= MAX_FAILURES && self.shared.abandon() {
            let path = self.shared.backing.path.display();
            tracing::error!(
                "{path}: io_uring submission keeps failing ({error}); requests run one at a time with system \
                 calls until the device is opened again"
            );
        } else {
            thread::sleep(RETRY_PAUSE);
        }
    }

    /// If the ring is abandoned, runs one ready job with blocking system calls. Returns false if no
    /// job ran.
    fn carry_out_next(&self) -> bool {
        let shared = &*self.shared;
        let mut state = shared.lock();
        if state.mode != Mode::Syscalls {
            return false;
        }
        let Some(id) = state.schedule.next_ready() else { return false };
        let job = state.schedule.take(id);
        drop(state);
        if let Some(mut job) = job {
            let first = Step::Io(job.io(&shared.backing));
            let outcome = carry_out(&mut job, first, &shared.backing);
            shared.lock().schedule.finish(id);
            shared.finish(job, outcome);
        }
        true
    }

    fn wait(&self) {
        let shared = &*self.shared;
        // SAFETY: `shared` keeps the ring, and so its descriptor, open for the whole wait.
        let ring = unsafe { BorrowedFd::borrow_raw(shared.ring.as_raw_fd()) };
        let mut fds =
            [PollFd::from_borrowed_fd(ring, PollFlags::IN), PollFd::new(&shared.wake, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) if fds[1].revents().is_empty() => {}
            // Clear the eventfd before the next round looks for work, so that a later wake-up is
            // not lost.
            Ok(_) => {
                let _ = rustix::io::read(&shared.wake, &mut [0; 8]);
            }
            Err(Errno::INTR) => {}
            Err(_) => thread::sleep(RETRY_PAUSE),
        }
    }

    /// Reaps all completions and starts ready jobs. Returns two flags: this thread must submit
    /// entries, and this thread must end.
    fn process_completions(&mut self) -> (bool, bool) {
        let shared = &*self.shared;
        // SAFETY: only the ring's thread uses the completion queue.
        let completions = unsafe { shared.ring.completion_shared() };
        self.completions.extend(completions.map(|entry| (entry.user_data() as usize, entry.result())));
        let mut state = shared.lock();
        let is_abandoned = state.mode == Mode::Syscalls;
        for (id, result) in self.completions.drain(..) {
            let Some(job) = state.schedule.job(id) else { continue };
            match job.advance(&shared.backing, entry_result(result)) {
                Step::Io(_) if is_abandoned => {
                    state.in_kernel -= 1;
                    state.schedule.put_back(id);
                }
                Step::Io(io) => {
                    let entry = shared.entry(id, job, io);
                    // SAFETY: the entry belongs to a job, and `state` to this ring.
                    unsafe { shared.push(&mut state, id, &entry) };
                }
                Step::Done(outcome) => {
                    state.in_kernel -= 1;
                    self.finished.extend(state.schedule.finish(id).map(|job| (job, outcome)));
                }
            }
        }
        shared.start_ready(&mut state);
        (shared.claim(&mut state), state.stop && state.schedule.is_empty())
    }
}

fn entry_result(result: i32) -> std::result::Result<u64, Errno> {
    match u64::try_from(result) {
        Ok(n) => Ok(n),
        // The kernel cancels requests of a thread that exits while they wait. EFAULT has the same
        // cause here, as the buffers are valid. INTR repeats the system call, and the job's retry
        // limit bounds repetition.
        Err(_) if matches!(-result, libc::ECANCELED | libc::EFAULT) => Err(Errno::INTR),
        Err(_) => Err(Errno::from_raw_os_error(-result)),
    }
}

impl Drop for Worker {
    /// Fails all remaining jobs, even if the thread panicked.
    fn drop(&mut self) {
        let mut left = {
            let mut state = self.shared.lock();
            state.mode = Mode::Dead;
            mem::take(&mut state.schedule)
        };
        for job in left.drain() {
            let _ = catch_unwind(AssertUnwindSafe(|| drop(job)));
        }
    }
}

#[cfg(test)]
mod tests;
