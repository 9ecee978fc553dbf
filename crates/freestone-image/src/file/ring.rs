//! The `io_uring` engine: whoever submits a request starts it; one thread reaps.
//!
//! A submitting thread puts its entry into the submission queue under a short mutex and hands it to
//! the kernel itself, so that a request costs no wake-up. The ring's thread waits for answers,
//! carries on chains of system calls, starts what had to wait, and runs the completions.
//!
//! What the kernel does for a request it does in the name of the thread that submitted it. It
//! interrupts that thread's waits for a moment (they go on by themselves; `epoll_wait` and a few
//! others return `EINTR`), and refuses what a thread that ends leaves behind: the ring's thread
//! submits that again.
#![expect(unsafe_code)]
// UNSAFETY: io_uring is handed pointers that must stay valid until the kernel has answered, and its
// queues are shared.

use std::fmt;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use io_uring::{EnterFlags, IoUring, opcode, squeue, types};
use rustix::event::EventfdFlags;
use rustix::io::Errno;

use freestone_core::device::Result;
use freestone_core::plug::{self, Plug, Unplug};
use freestone_core::sync::{
    Mutex, MutexGuard,
    thread::{self, JoinHandle},
};
use freestone_core::zeroes::ZEROES;

use super::backing::Backing;
use super::job::{Io, Job, Step};
use super::schedule::Schedule;

/// Jobs in the kernel's hands at once; the others wait in the schedule.
const DEPTH_JOBS: usize = 128;
/// Entries of the submission queue; the completion queue has twice as many. One is for the wake-up.
const RING_ENTRIES: u32 = 256;
const _: () = assert!(DEPTH_JOBS + 1 < RING_ENTRIES as usize);
/// Marks the wake-up among the answers; ids of jobs are small.
const WAKE: u64 = u64::MAX;
/// Times that a submitter calls the kernel for one request: others may add entries meanwhile, and
/// it takes them along.
const SUBMITTER_ROUNDS: usize = 4;
/// The same for the ring's thread: with as many entries the kernel has all it may have.
const THREAD_ROUNDS: usize = RING_ENTRIES as usize;
/// Entries that a plug holds back: a disk that has nothing to do loses more than calls of the kernel
/// cost.
const PLUGGED_MAX: usize = 4;
/// Pause after the kernel had no resources for a submission.
const BREATH: Duration = Duration::from_millis(1);

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
    /// An eventfd that the ring polls: for the end, and for entries that a submitter could not hand
    /// over.
    wake: OwnedFd,
}

/// Whoever has it locked may touch the submission queue.
#[derive(Debug, Default)]
struct RingState {
    schedule: Schedule,
    in_kernel: usize,
    /// Somebody is handing entries to the kernel and looks for more before it stops.
    handing_over: bool,
    stop: bool,
    /// The thread has ended: nobody will answer jobs any more.
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
        let shared =
            Arc::new(RingShared { backing: Arc::clone(backing), ring, state: Mutex::default(), wake });
        let worker = Worker {
            shared: Arc::clone(&shared),
            answers: Vec::with_capacity(RING_ENTRIES as usize),
            finished: Vec::with_capacity(DEPTH_JOBS),
            armed: false,
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
        if state.dead {
            // Answers `Gone`, outside of the lock.
            drop(state);
            return drop(job);
        }
        state.schedule.arrive(job);
        shared.start_ready(&mut state);
        // SAFETY: the state is ours.
        let queued = unsafe { shared.queue(&mut state) }.len();
        drop(state);
        if queued >= PLUGGED_MAX || !plug::hold(shared) {
            shared.unplug();
        }
    }
}

impl Unplug for RingShared {
    /// Hands over what submitters have queued.
    fn unplug(&self) {
        let mine = self.claim(&mut self.lock());
        if mine && self.hand_over(SUBMITTER_ROUNDS).is_err() {
            // The ring's thread takes over, and tries until it succeeds.
            self.wake();
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

impl RingShared {
    fn lock(&self) -> MutexGuard<'_, RingState> {
        self.state.lock()
    }

    fn wake(&self) {
        // Fails only where the counter is at its limit, and then the thread is awake.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Queues what nothing is in the way of, as far as the kernel may have it.
    fn start_ready(&self, state: &mut RingState) {
        while state.in_kernel < DEPTH_JOBS
            && let Some(id) = state.schedule.next_ready()
        {
            let Some(job) = state.schedule.job(id) else { continue };
            let io = job.io(&self.backing);
            let entry = self.entry(id, job, io);
            state.in_kernel += 1;
            // SAFETY: the entry is of a job, and the state is ours.
            unsafe { self.push(state, &entry) };
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

    /// Queues an entry.
    ///
    /// # Safety
    /// The state is this ring's. The entry is the one of a job in its schedule, made by
    /// [`entry`](Self::entry), or names no memory.
    unsafe fn push(&self, state: &mut RingState, entry: &squeue::Entry) {
        // SAFETY: the caller's promise.
        let mut queue = unsafe { self.queue(state) };
        // SAFETY: the memory is a job's buffer, which is freed only in `Job::finish` (after the
        // answer to this entry, as a job has one entry at a time) and leaked otherwise, or a
        // static. The descriptors are open as long as `self` lives; the kernel takes its own
        // reference when it accepts the entry.
        let pushed = unsafe { queue.push(entry) };
        // Each job has one entry at a time and the poll one; the queue is larger than both.
        debug_assert!(pushed.is_ok(), "the submission queue has {RING_ENTRIES} entries");
    }

    /// Whether the caller has to hand over what is queued: nobody else is about to.
    fn claim(&self, state: &mut RingState) -> bool {
        // SAFETY: the state is ours.
        let mine = !state.handing_over && !unsafe { self.queue(state) }.is_empty();
        state.handing_over |= mine;
        mine
    }

    /// Hands everything that is queued to the kernel, by whoever has claimed that. After an error
    /// something is left.
    fn hand_over(&self, rounds: usize) -> io::Result<()> {
        let mut result = Ok(());
        for left in (0..rounds).rev() {
            // SAFETY: no argument is passed. The kernel takes no more entries than there are, and
            // only their memory must be valid.
            let taken = unsafe { self.ring.submitter().enter::<()>(RING_ENTRIES, 0, 0, None) };
            let mut state = self.lock();
            // SAFETY: the state is ours.
            let empty = unsafe { self.queue(&mut state) }.is_empty();
            if taken.is_err() || empty || left == 0 {
                state.handing_over = false;
                let all = if empty { Ok(()) } else { Err(Errno::AGAIN.into()) };
                result = taken.and(all);
                break;
            }
        }
        result
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
    /// A poll of the eventfd is in the kernel's hands.
    armed: bool,
}

impl Worker {
    fn run(mut self) {
        loop {
            let (mine, ended) = self.turn();
            let entered = if mine { self.shared.hand_over(THREAD_ROUNDS) } else { Ok(()) };
            let plug = Plug::start();
            for (job, outcome) in self.finished.drain(..) {
                self.shared.finish(job, outcome);
            }
            drop(plug);
            if ended {
                return;
            }
            let waited = entered.and_then(|()| self.wait());
            if let Err(error) = waited {
                match Errno::from_io_error(&error) {
                    Some(Errno::INTR) => {}
                    Some(Errno::AGAIN | Errno::BUSY | Errno::NOMEM) => thread::sleep(BREATH),
                    _ => {
                        tracing::error!("{}: io_uring failed: {error}", self.shared.backing.path.display());
                        return;
                    }
                }
            }
        }
    }

    /// Waits for an answer.
    fn wait(&self) -> io::Result<()> {
        // SAFETY: no argument is passed. Others may submit meanwhile.
        unsafe { self.shared.ring.submitter().enter::<()>(0, 1, EnterFlags::GETEVENTS.bits(), None) }?;
        Ok(())
    }

    /// Takes all answers. Returns whether entries are to be handed over, and whether this is the
    /// end.
    fn turn(&mut self) -> (bool, bool) {
        let shared = &*self.shared;
        // SAFETY: only the one thread of this ring looks at the completion queue.
        let answers = unsafe { shared.ring.completion_shared() };
        for entry in answers {
            if entry.user_data() == WAKE {
                // Before the poll that sees the next one.
                let _ = rustix::io::read(&shared.wake, &mut [0; 8]);
                self.armed = false;
            } else {
                self.answers.push((entry.user_data() as usize, entry.result()));
            }
        }
        let mut state = shared.lock();
        for (id, result) in self.answers.drain(..) {
            let Some(job) = state.schedule.job(id) else { continue };
            match job.advance(&shared.backing, answer(result)) {
                Step::Io(io) => {
                    let entry = shared.entry(id, job, io);
                    // SAFETY: the entry is of a job, and the state is this ring's.
                    unsafe { shared.push(&mut state, &entry) };
                }
                Step::Done(outcome) => {
                    state.in_kernel -= 1;
                    self.finished.extend(state.schedule.finish(id).map(|job| (job, outcome)));
                }
            }
        }
        shared.start_ready(&mut state);
        if !self.armed {
            self.armed = true;
            let fd = types::Fd(shared.wake.as_raw_fd());
            let poll = opcode::PollAdd::new(fd, libc::POLLIN as u32).build();
            // SAFETY: a poll names no memory, and the state is this ring's.
            unsafe { shared.push(&mut state, &poll.user_data(WAKE)) };
        }
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
            state.dead = true;
            mem::take(&mut state.schedule)
        };
        for job in left.drain() {
            let _ = catch_unwind(AssertUnwindSafe(|| drop(job)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use freestone_core::device::{Completion, Geometry, IoBuf, Request};
    use std::path::PathBuf;
    use std::sync::mpsc;

    const SIZE: u64 = 1 << 20;
    const PATIENCE: Duration = Duration::from_secs(20);

    /// With a thread that waits for answers.
    fn ring() -> Ring {
        let fd = rustix::fs::memfd_create("ring", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, SIZE).unwrap();
        let geometry = Geometry {
            size: SIZE,
            logical_block: 512,
            physical_block: 4096,
            io_min: 4096,
            io_opt: 4096,
            discard_granularity: 4096,
            fast_zeroes: true,
            volatile_cache: true,
            padding: 0,
            volatile_media: false,
            rotational: false,
            max_request: 0,
            read_only: false,
            zones: None,
        };
        let backing = Backing::new(fd, PathBuf::from("ring"), false, false, geometry);
        let ring = Ring::start(&Arc::new(backing)).unwrap();
        let (tx, rx) = mpsc::channel();
        ring.submit(read(&tx));
        assert_eq!(rx.recv_timeout(PATIENCE), Ok(Ok(())));
        ring
    }

    fn read(tx: &mpsc::Sender<Result<()>>) -> Job {
        let tx = tx.clone();
        let done = Completion::new(move |outcome, _| tx.send(outcome).unwrap());
        Job::new(Request::read(0, 4096), IoBuf::zeroed(4096).unwrap(), done)
    }

    /// A submitter to whom the kernel said no leaves its entries, and wakes the thread.
    #[test]
    fn the_thread_submits_what_a_submitter_could_not() {
        let ring = ring();
        let (tx, rx) = mpsc::channel();
        for round in 1..=3 {
            {
                let mut state = ring.shared.lock();
                for _ in 0..2 * DEPTH_JOBS {
                    state.schedule.arrive(read(&tx));
                }
                ring.shared.start_ready(&mut state);
                assert_eq!(state.in_kernel, DEPTH_JOBS);
            }
            assert_eq!(rx.recv_timeout(Duration::from_millis(50)), Err(mpsc::RecvTimeoutError::Timeout));
            ring.shared.wake();
            for _ in 0..2 * DEPTH_JOBS {
                assert_eq!(rx.recv_timeout(PATIENCE), Ok(Ok(())), "round {round}");
            }
        }
        assert!(ring.shared.lock().schedule.is_empty());
    }

    /// Entries that come while somebody is about to call the kernel are that one's.
    #[test]
    fn one_hands_over_for_all() {
        let ring = ring();
        let (tx, rx) = mpsc::channel();
        {
            let mut state = ring.shared.lock();
            state.schedule.arrive(read(&tx));
            ring.shared.start_ready(&mut state);
            assert!(ring.shared.claim(&mut state) && !ring.shared.claim(&mut state));
        }
        ring.submit(read(&tx));
        assert_eq!(rx.recv_timeout(Duration::from_millis(50)), Err(mpsc::RecvTimeoutError::Timeout));
        ring.shared.hand_over(SUBMITTER_ROUNDS).unwrap();
        for _ in 0..2 {
            assert_eq!(rx.recv_timeout(PATIENCE), Ok(Ok(())));
        }
        let mut state = ring.shared.lock();
        assert!(!state.handing_over && !ring.shared.claim(&mut state));
    }

    #[test]
    fn when_the_thread_is_gone_every_job_is_answered() {
        let ring = ring();
        let (tx, rx) = mpsc::channel();
        let mut waiting = Schedule::default();
        waiting.arrive(read(&tx));
        let bad = Completion::new(|_, _| panic!("on purpose"));
        waiting.arrive(Job::new(Request::flush(), IoBuf::empty(), bad));
        waiting.arrive(read(&tx));
        ring.shared.lock().schedule = waiting;
        let shared = Arc::clone(&ring.shared);
        drop(Worker { shared, answers: Vec::new(), finished: Vec::new(), armed: false });
        ring.submit(read(&tx));
        for _ in 0..3 {
            assert_eq!(rx.try_recv(), Ok(Err(freestone_core::device::Error::Gone)));
        }
    }

    #[test]
    fn what_an_ending_thread_leaves_is_repeated() {
        assert_eq!(answer(4096), Ok(4096));
        assert_eq!(answer(-libc::ECANCELED), Err(Errno::INTR));
        assert_eq!(answer(-libc::EFAULT), Err(Errno::INTR));
        assert_eq!(answer(-libc::EIO), Err(Errno::IO));
    }
}
