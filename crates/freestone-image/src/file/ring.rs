//! The `io_uring` engine: whoever submits a request starts it; one thread reaps.
//!
//! A submitting thread puts its entry into the submission queue under a short mutex and hands it to
//! the kernel itself, so that a request costs no wake-up. The ring's thread waits for answers,
//! carries on chains of system calls, starts what had to wait, and runs the completions.
//!
//! The kernel may refuse a hand-over (`EAGAIN` when memory is short). The ring's thread then tries
//! again every millisecond: [`handover`](crate::handover). It waits with `poll`, which needs nothing
//! of the ring. After [`TRIES`] failures in a row it gives the ring up and makes the system calls
//! itself, one after the other; answers of what the kernel has still come through the ring.
//!
//! What the kernel does for a request it does in the name of the thread that submitted it. It
//! interrupts that thread's waits for a moment (they go on by themselves; `epoll_wait` and a few
//! others return `EINTR`), and refuses what a thread that ends leaves behind: the ring's thread
//! submits that again.
#![expect(unsafe_code)]
// UNSAFETY: io_uring is handed pointers that must stay valid until the kernel has answered, and its
// queues are shared.

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

/// Jobs in the kernel's hands at once; the others wait in the schedule.
const DEPTH_JOBS: usize = 128;
/// Entries of the submission queue, of which each job has one; the completion queue has twice as
/// many, so that it never overflows.
const RING_ENTRIES: u32 = 128;
const _: () = assert!(DEPTH_JOBS <= RING_ENTRIES as usize);
/// Calls of the kernel in one hand-over by the ring's thread: with as many entries the kernel has all
/// it may have.
const THREAD_CALLS: usize = RING_ENTRIES as usize;
/// Entries that a plug holds back: a disk that has nothing to do loses more than calls of the kernel
/// cost.
const PLUGGED_MAX: usize = 4;
/// Pause after the kernel has refused a call.
const BREATH: Duration = Duration::from_millis(1);
/// Hand-overs by the ring's thread that fail in a row, a second's worth, before the ring is given up.
const TRIES: u32 = if cfg!(test) { 20 } else { 1000 };
/// Calls of the kernel before a new ring is taken for unusable.
const FIRST_TRIES: u32 = 10;

#[derive(Debug)]
pub(super) struct Ring {
    shared: Arc<RingShared>,
    thread: Option<JoinHandle<()>>,
}

/// The completion queue is the thread's alone.
struct RingShared {
    backing: Arc<Backing>,
    ring: IoUring,
    /// Held for a few instructions, never over a system call or a completion; the only lock here.
    state: Mutex<RingState>,
    /// Eventfd that wakes the thread: for the end, for entries that a submitter could not hand over,
    /// and for jobs once the ring is given up.
    wake: OwnedFd,
    /// Calls of the kernel that fail.
    #[cfg(test)]
    refusals: std::sync::atomic::AtomicU32,
}

/// Whoever has it locked may touch the submission queue.
#[derive(Debug, Default)]
struct RingState {
    schedule: Schedule,
    /// Jobs with an entry that is queued or in the kernel.
    in_kernel: usize,
    /// Jobs whose entries are queued, oldest first. The kernel takes entries in this order.
    queued: VecDeque<usize>,
    /// A thread hands entries to the kernel, and looks for more before it stops.
    handing_over: bool,
    mode: Mode,
    stop: bool,
}

/// What becomes of jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Mode {
    /// The kernel gets their entries.
    #[default]
    Ring,
    /// The ring is given up: the thread makes the system calls.
    Calls,
    /// The thread has ended: nobody will answer jobs any more.
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
            answers: Vec::with_capacity(RING_ENTRIES as usize),
            finished: Vec::with_capacity(DEPTH_JOBS),
            failures: 0,
        };
        let thread = thread::Builder::new().name("file".into()).spawn(move || worker.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    pub fn submit(&self, mut job: Job) {
        let shared = &self.shared;
        // Looks at the file where the operation needs it, so not under the lock.
        if let Step::Done(outcome) = job.begin(&shared.backing) {
            return shared.finish(job, outcome);
        }
        let mut state = shared.lock();
        if state.mode == Mode::Dead {
            // Answers `Gone`, outside of the lock.
            drop(state);
            return drop(job);
        }
        state.schedule.arrive(job);
        if state.mode == Mode::Calls {
            drop(state);
            return shared.wake_reaper();
        }
        shared.start_ready(&mut state);
        // SAFETY: the state is ours.
        let queued = unsafe { shared.queue(&mut state) }.len();
        drop(state);
        if queued >= PLUGGED_MAX || !plug::hold(shared) {
            shared.unplug();
        }
    }
}

/// Makes the ring do nothing, to find out whether its kernel lets it be entered: a filter of system
/// calls may allow the setup alone.
fn check_enter(ring: &mut IoUring) -> io::Result<()> {
    // SAFETY: the entry names no memory.
    let pushed = unsafe { ring.submission().push(&opcode::Nop::new().build()) };
    pushed.map_err(|_| io::Error::other("a new io_uring is full"))?;
    let mut tries = 0;
    while let Err(error) = ring.submit_and_wait(1) {
        tries += 1;
        if tries == FIRST_TRIES {
            return Err(error);
        }
        thread::sleep(BREATH);
    }
    ring.completion().next().map(|_| ()).ok_or_else(|| io::Error::other("io_uring does not answer"))
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
        // Nobody hands over what is left in a ring that was given up.
        if state.mode == Mode::Calls {
            return true;
        }
        // SAFETY: the state is ours.
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
        // SAFETY: no argument is passed. The kernel takes no more entries than there are, and only
        // their memory must be valid.
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
            // The last reference may be dropped by a completion, on that thread.
            && thread.thread().id() != thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

impl RingShared {
    /// Queues what nothing is in the way of, as far as the kernel may have it.
    fn start_ready(&self, state: &mut RingState) {
        while state.in_kernel < DEPTH_JOBS
            && state.mode == Mode::Ring
            && let Some(id) = state.schedule.next_ready()
        {
            let Some(job) = state.schedule.job(id) else { continue };
            let io = job.io(&self.backing);
            let entry = self.entry(id, job, io);
            state.in_kernel += 1;
            // SAFETY: the entry is of a job, and the state is ours.
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

    /// The submission queue, for as long as the state is held.
    ///
    /// # Safety
    /// The state is this ring's.
    unsafe fn queue<'a>(&'a self, _state: &'a mut RingState) -> squeue::SubmissionQueue<'a> {
        // SAFETY: whoever has the state touches the queue alone.
        unsafe { self.ring.submission_shared() }
    }

    /// Queues the entry of a job.
    ///
    /// # Safety
    /// The state is this ring's. The entry is the one of a job in its schedule, made by
    /// [`entry`](Self::entry).
    unsafe fn push(&self, state: &mut RingState, id: usize, entry: &squeue::Entry) {
        // SAFETY: the caller's promise.
        let mut queue = unsafe { self.queue(state) };
        // SAFETY: the memory is a job's buffer, which is freed only in `Job::finish` (after the
        // answer to this entry, as a job has one entry at a time, or when the ring is given up before
        // the kernel has taken it) and leaked otherwise, or a static. The descriptors are open as
        // long as `self` lives; the kernel takes its own reference when it accepts the entry.
        let pushed = unsafe { queue.push(entry) };
        // Each job has one entry at a time; the queue is as large as their number.
        debug_assert!(pushed.is_ok(), "the submission queue has {RING_ENTRIES} entries");
        drop(queue);
        state.queued.push_back(id);
    }

    /// Gives the ring up, unless another thread is handing over: what the kernel has not taken is
    /// ready again, and nothing is handed over any more.
    fn refuse(&self) -> bool {
        let mut state = self.lock();
        if state.handing_over || self.is_empty(&mut state) {
            return false;
        }
        state.mode = Mode::Calls;
        let RingState { schedule, queued, in_kernel, .. } = &mut *state;
        *in_kernel -= queued.len();
        for id in queued.drain(..).rev() {
            schedule.put_back(id);
        }
        true
    }

    fn finish(&self, job: Job, outcome: Result<()>) {
        // A completion that panics ends its request, not the device.
        let _ = catch_unwind(AssertUnwindSafe(|| job.finish(&self.backing, outcome)));
    }
}

impl fmt::Debug for RingShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingShared").field("state", &self.state).finish_non_exhaustive()
    }
}

/// What the thread owns.
struct Worker {
    shared: Arc<RingShared>,
    /// Ids of jobs, and what the kernel says.
    answers: Vec<(usize, i32)>,
    finished: Vec<(Job, Result<()>)>,
    /// Hand-overs that failed in a row.
    failures: u32,
}

impl Worker {
    fn run(mut self) {
        loop {
            let (mine, ended) = self.turn();
            let entered = if mine { self.shared.hand_over(THREAD_CALLS) } else { Ok(()) };
            let plug = Plug::start();
            for (job, outcome) in self.finished.drain(..) {
                self.shared.finish(job, outcome);
            }
            drop(plug);
            if ended {
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

    /// Pauses before the next hand-over, or gives the ring up.
    fn retry_later(&mut self, error: &io::Error) {
        self.failures += 1;
        if self.failures >= TRIES && self.shared.refuse() {
            let path = self.shared.backing.path.display();
            tracing::error!(
                "{path}: io_uring takes no requests any more ({error}); requests are carried out one by one \
                 until the device is opened again"
            );
        } else {
            thread::sleep(BREATH);
        }
    }

    /// Carries out a job once the ring is given up. False: there is none.
    fn carry_out_next(&self) -> bool {
        let shared = &*self.shared;
        let mut state = shared.lock();
        if state.mode != Mode::Calls {
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

    /// Waits for an answer or a wake-up.
    fn wait(&self) {
        let shared = &*self.shared;
        // SAFETY: `ring` outlives the wait, and with it its descriptor.
        let ring = unsafe { BorrowedFd::borrow_raw(shared.ring.as_raw_fd()) };
        let mut fds =
            [PollFd::from_borrowed_fd(ring, PollFlags::IN), PollFd::new(&shared.wake, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) if fds[1].revents().is_empty() => {}
            // Before the next turn looks, so that a later wake-up is not lost.
            Ok(_) => {
                let _ = rustix::io::read(&shared.wake, &mut [0; 8]);
            }
            Err(Errno::INTR) => {}
            Err(_) => thread::sleep(BREATH),
        }
    }

    /// Takes all answers. Returns whether entries are to be handed over, and whether this is the
    /// end.
    fn turn(&mut self) -> (bool, bool) {
        let shared = &*self.shared;
        // SAFETY: only the one thread of this ring looks at the completion queue.
        let answers = unsafe { shared.ring.completion_shared() };
        self.answers.extend(answers.map(|entry| (entry.user_data() as usize, entry.result())));
        let mut state = shared.lock();
        let refused = state.mode == Mode::Calls;
        for (id, result) in self.answers.drain(..) {
            let Some(job) = state.schedule.job(id) else { continue };
            match job.advance(&shared.backing, answer(result)) {
                Step::Io(_) if refused => {
                    state.in_kernel -= 1;
                    state.schedule.put_back(id);
                }
                Step::Io(io) => {
                    let entry = shared.entry(id, job, io);
                    // SAFETY: the entry is of a job, and the state is this ring's.
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

/// What a system call answered.
fn answer(result: i32) -> std::result::Result<u64, Errno> {
    match u64::try_from(result) {
        Ok(n) => Ok(n),
        // A thread that ends takes what it has submitted with it, as far as it waits in the kernel.
        // The buffers are there: it was not them. (A job does not repeat a call for ever.)
        Err(_) if matches!(-result, libc::ECANCELED | libc::EFAULT) => Err(Errno::INTR),
        Err(_) => Err(Errno::from_raw_os_error(-result)),
    }
}

impl Drop for Worker {
    /// The end, in peace or not: nobody is left waiting.
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
