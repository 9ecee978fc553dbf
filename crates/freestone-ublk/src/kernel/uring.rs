//! `io_uring`: a ring for each queue, and a temporary ring for each control command.
#![expect(unsafe_code)]
// UNSAFETY: io_uring gets addresses that must stay valid until the kernel completes the entry. The
// driver's descriptors are mapped memory.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue, types};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use zerocopy::IntoBytes;

use crate::kernel::abi::{
    CtrlCmd, IO_DESC_BYTES, IoCmd, IoDesc, MAX_QUEUE_DEPTH, data_offset, io as io_command,
};
use crate::kernel::{Ring, RingEvent, RingEventKind, Wait};

const POLLIN: u32 = 1;

/// User data of the wakeup poll. The user data of tags is smaller.
const WAKE: u64 = u64::MAX;
/// Flags in the user data of data copies, above the bits of the tag.
const FETCHED: u64 = 1 << 16;
const SENT: u64 = 2 << 16;
const RETRY_PAUSE: Duration = Duration::from_millis(1);
/// Consecutive failures of `enter` before a ring is given up, after about one second.
const MAX_FAILURES: u32 = if cfg!(test) { 20 } else { 1000 };

/// Runs a command on the control device, and waits for its completion.
pub fn command(device: &OwnedFd, command: u32, header: CtrlCmd, payload: &mut [u8]) -> Result<(), Errno> {
    let ring = IoUring::<squeue::Entry128, cqueue::Entry>::builder().build(2);
    let mut ring = ring.map_err(|error| errno_of(&error))?;
    let addr = if payload.is_empty() { 0 } else { payload.as_mut_ptr().expose_provenance() as u64 };
    let header = CtrlCmd { addr, len: payload.len() as u16, ..header };
    let mut cmd = [0; 80];
    cmd[..size_of::<CtrlCmd>()].copy_from_slice(header.as_bytes());
    let entry = opcode::UringCmd80::new(types::Fd(device.as_raw_fd()), command).cmd(cmd).build();
    // SAFETY: `payload` stays valid until the completion arrives. The loop returns before that only
    // if an error shows that the kernel has not taken the entry.
    if unsafe { ring.submission().push(&entry) }.is_err() {
        return Err(Errno::BUSY);
    }
    let mut failures = 0;
    loop {
        if let Err(error) = ring.submit_and_wait(1) {
            let errno = errno_of(&error);
            failures += 1;
            // If the kernel has taken the entry, its completion must be waited for, even after
            // errors.
            if ring.submission().is_empty() || failures < MAX_FAILURES {
                if errno != Errno::INTR {
                    std::thread::sleep(RETRY_PAUSE);
                }
            } else {
                return Err(errno);
            }
        }
        if let Some(answer) = ring.completion().next() {
            let result = answer.result();
            return if result < 0 { Err(Errno::from_raw_os_error(-result)) } else { Ok(()) };
        }
    }
}

fn errno_of(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// A mapping of a queue's descriptors, which the driver writes.
struct Descriptors {
    first: NonNull<IoDesc>,
    bytes: usize,
    depth: u16,
}

impl Descriptors {
    fn map(device: &OwnedFd, queue: u16, depth: u16) -> io::Result<Self> {
        let page = rustix::param::page_size();
        let apart = (usize::from(MAX_QUEUE_DEPTH) * IO_DESC_BYTES).next_multiple_of(page);
        let bytes = (usize::from(depth) * IO_DESC_BYTES).next_multiple_of(page);
        let offset = u64::from(queue) * apart as u64;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: the kernel chooses the address of the new mapping.
        let at = unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, flags, device, offset) }?;
        let first = NonNull::new(at.cast()).ok_or(Errno::FAULT)?;
        Ok(Self { first, bytes, depth })
    }

    fn copy(&self, tag: u16) -> IoDesc {
        assert!(tag < self.depth, "tag is out of range");
        // SAFETY: the index is inside the page-aligned mapping, and every bit pattern is a valid
        // descriptor. A driver that violates its protocol may write during the copy; the copy is
        // then mixed, and only the copy is used.
        unsafe { self.first.add(usize::from(tag)).read_volatile() }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: this object owns the mapping, and no reference into it exists.
        let _ = unsafe { munmap(self.first.as_ptr().cast(), self.bytes) };
    }
}

pub struct QueueRing {
    ring: IoUring,
    descriptors: Descriptors,
    device: Arc<OwnedFd>,
    wake: OwnedFd,
    queue: u16,
    /// True if the poll of `wake` is active in the kernel.
    is_armed: bool,
    is_deferred: bool,
    failures: u32,
}

impl QueueRing {
    /// Creates the ring of one queue. Only the calling thread may use it.
    pub fn new(
        device: Arc<OwnedFd>,
        queue: u16,
        depth: u16,
        user_copy: bool,
        wake: &OwnedFd,
    ) -> io::Result<Self> {
        let descriptors = Descriptors::map(&device, queue, depth)?;
        // Each tag has one entry, or two with user copy: a copy and the commit. The poll has one.
        let each = 1 + u32::from(user_copy);
        let entries = (u32::from(depth) * each + 1).next_power_of_two();
        let (ring, is_deferred) = build(entries)?;
        let wake = wake.try_clone()?;
        Ok(Self { ring, descriptors, device, wake, queue, is_armed: false, is_deferred, failures: 0 })
    }

    fn push(&mut self, command: u32, tag: u16, result: i32, addr: u64) {
        let header = IoCmd { q_id: self.queue, tag, result, addr };
        let mut cmd = [0; 16];
        cmd.copy_from_slice(header.as_bytes());
        let device = types::Fd(self.device.as_raw_fd());
        self.push_entry(&opcode::UringCmd16::new(device, command).cmd(cmd).build().user_data(tag.into()));
    }

    fn push_entry(&mut self, entry: &squeue::Entry) {
        // SAFETY: callers of `fetch` and `commit` keep the buffer until the tag's command
        // completes. Callers of `fetch_data` and `send_data` keep it until the copy completes. Both
        // leak it if the ring ends before. The files stay open while `self` lives, and the kernel
        // takes its own references when it accepts the entry.
        let pushed = unsafe { self.ring.submission().push(entry) };
        debug_assert!(pushed.is_ok(), "the ring has room for all tags and the poll");
    }
}

/// Creates a ring with the best setup flags that the kernel supports. Also returns true if the
/// kernel does the ring's work only inside `enter` (deferred task work).
fn build(entries: u32) -> io::Result<(IoUring, bool)> {
    let mut builder = IoUring::builder();
    builder.setup_submit_all().setup_coop_taskrun().setup_taskrun_flag();
    let mut deferred = builder.clone();
    deferred.setup_single_issuer().setup_defer_taskrun();
    // Deferred task work needs Linux 6.1, and the other flags need 5.19. Older kernels get none.
    match deferred.build(entries) {
        Ok(ring) => return Ok((ring, true)),
        Err(error) if errno_of(&error) == Errno::INVAL => {}
        Err(error) => return Err(error),
    }
    match builder.build(entries) {
        Ok(ring) => Ok((ring, false)),
        Err(error) if errno_of(&error) == Errno::INVAL => Ok((IoUring::new(entries)?, false)),
        Err(error) => Err(error),
    }
}

impl Ring for QueueRing {
    fn fetch(&mut self, tag: u16, buffer: u64) {
        self.push(io_command::FETCH_REQ, tag, 0, buffer);
    }

    fn commit(&mut self, tag: u16, result: i32, buffer: u64) {
        self.push(io_command::COMMIT_AND_FETCH_REQ, tag, result, buffer);
    }

    fn fetch_data(&mut self, tag: u16, to: u64, len: usize) {
        let to = std::ptr::with_exposed_provenance_mut(to as usize);
        let read = opcode::Read::new(types::Fd(self.device.as_raw_fd()), to, len as u32);
        let read = read.offset(data_offset(self.queue, tag)).build();
        self.push_entry(&read.user_data(FETCHED | u64::from(tag)));
    }

    fn send_data(&mut self, tag: u16, from: u64, len: usize) {
        let from = std::ptr::with_exposed_provenance(from as usize);
        let write = opcode::Write::new(types::Fd(self.device.as_raw_fd()), from, len as u32);
        // A short write breaks the link, and the kernel then cancels the commit.
        let write = write.offset(data_offset(self.queue, tag)).build().flags(squeue::Flags::IO_LINK);
        self.push_entry(&write.user_data(SENT | u64::from(tag)));
    }

    fn has_queued(&mut self) -> bool {
        !self.ring.submission().is_empty()
    }

    fn enter(&mut self, wait: Wait) -> io::Result<()> {
        if !self.is_armed {
            // A multishot poll reports every write to the eventfd, so nothing has to read the
            // eventfd.
            let poll = opcode::PollAdd::new(types::Fd(self.wake.as_raw_fd()), POLLIN);
            self.push_entry(&poll.multi(true).build().user_data(WAKE));
            self.is_armed = true;
        }
        let queued = self.ring.submission().len() as u32;
        let mut flags = EnterFlags::GETEVENTS | EnterFlags::EXT_ARG;
        if self.ring.params().is_feature_no_iowait() {
            // An idle queue must not count as I/O wait.
            flags |= EnterFlags::NO_IOWAIT;
        }
        // Waiting a short time for several events was tried. That saves system calls if a client
        // submits requests one by one, but halves the throughput of that client.
        let least = u32::from(wait != Wait::No);
        let most = match wait {
            Wait::AtMost(time) => Some(types::Timespec::from(time)),
            Wait::No | Wait::Forever => None,
        };
        let args = types::SubmitArgs::new();
        let args = most.as_ref().map_or(args, |time| args.timespec(time));
        // SAFETY: the arguments match the flags, and live until the call returns.
        let entered = unsafe { self.ring.submitter().enter(queued, least, flags.bits(), Some(&args)) };
        match entered {
            Err(error) if !matches!(errno_of(&error), Errno::INTR | Errno::TIME) => {
                // The entries stay queued, and the queue's thread enters the ring again before it
                // waits.
                self.failures += 1;
                if self.failures >= MAX_FAILURES {
                    return Err(error);
                }
                std::thread::sleep(RETRY_PAUSE);
            }
            _ => self.failures = 0,
        }
        Ok(())
    }

    fn take_events(&mut self, into: &mut Vec<RingEvent>) {
        for answer in self.ring.completion() {
            if answer.user_data() == WAKE {
                self.is_armed &= cqueue::more(answer.flags());
                continue;
            }
            let event = match answer.user_data() & (FETCHED | SENT) {
                FETCHED => RingEventKind::Fetched,
                SENT => RingEventKind::Sent,
                _ => RingEventKind::Command,
            };
            into.push(RingEvent { tag: answer.user_data() as u16, kind: event, result: answer.result() });
        }
    }

    fn descriptor(&self, tag: u16) -> IoDesc {
        self.descriptors.copy(tag)
    }

    fn is_deferred(&self) -> bool {
        self.is_deferred
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, Mode, OFlags, ftruncate, memfd_create, open};
    use rustix::io::{pwrite, write};

    use super::*;
    use crate::kernel::COMMIT_CANCELLED;

    /// The device is a file, which has descriptors and rejects commands.
    #[test]
    fn ring_delivers_completions_and_wakeups() {
        let file = memfd_create("ublkc", MemfdFlags::CLOEXEC).unwrap();
        let apart = (usize::from(MAX_QUEUE_DEPTH) * IO_DESC_BYTES) as u64;
        ftruncate(&file, 2 * apart).unwrap();
        let wanted = IoDesc { op_flags: 1, nr_sectors: 8, start_sector: 16, addr: 4096 };
        pwrite(&file, wanted.as_bytes(), apart + 3 * IO_DESC_BYTES as u64).unwrap();
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        // The machine running the test may forbid io_uring.
        let Ok(mut ring) = QueueRing::new(Arc::new(file), 1, 4, false, &wake) else { return };
        assert_eq!((ring.descriptor(3), ring.descriptor(0)), (wanted, IoDesc::default()));

        let mut arrived = Vec::new();
        ring.fetch(2, 4096);
        assert!(ring.has_queued());
        ring.enter(Wait::No).unwrap();
        assert!(!ring.has_queued());
        while arrived.is_empty() {
            ring.enter(Wait::AtMost(Duration::from_secs(1))).unwrap();
            ring.take_events(&mut arrived);
        }
        assert_eq!(arrived, [RingEvent { tag: 2, kind: RingEventKind::Command, result: -95 }]);

        // Each write ends one wait, although nothing reads the eventfd.
        for _ in 0..3 {
            write(&wake, &1_u64.to_ne_bytes()).unwrap();
            ring.enter(Wait::Forever).unwrap();
            ring.take_events(&mut arrived);
        }
        let (began, time) = (Instant::now(), Duration::from_millis(30));
        ring.enter(Wait::AtMost(time)).unwrap();
        assert!(began.elapsed() >= time && arrived.len() == 1);
    }

    /// The ring is not enabled yet, so it rejects `enter`.
    #[test]
    fn refused_enter_is_repeated_until_it_is_given_up() {
        let file = memfd_create("ublkc", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, (usize::from(MAX_QUEUE_DEPTH) * IO_DESC_BYTES) as u64).unwrap();
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let Ok(mut ring) = QueueRing::new(Arc::new(file), 0, 4, false, &wake) else { return };
        ring.ring = IoUring::builder().setup_r_disabled().build(8).unwrap();
        ring.fetch(2, 4096);
        (0..2).for_each(|_| ring.enter(Wait::Forever).unwrap());
        assert!(ring.has_queued());
        ring.ring.submitter().register_enable_rings().unwrap();
        // The failed calls have queued the wakeup poll too.
        write(&wake, &1_u64.to_ne_bytes()).unwrap();
        let mut arrived = Vec::new();
        while ring.is_armed && arrived.is_empty() {
            ring.enter(Wait::Forever).unwrap();
            ring.take_events(&mut arrived);
        }
        assert_eq!(arrived, [RingEvent { tag: 2, kind: RingEventKind::Command, result: -95 }]);

        ring.ring = IoUring::builder().setup_r_disabled().build(8).unwrap();
        (1..MAX_FAILURES).for_each(|_| ring.enter(Wait::Forever).unwrap());
        ring.enter(Wait::Forever).unwrap_err();
    }

    /// The device is a file that contains the data of requests.
    #[test]
    fn incomplete_send_cancels_commit() {
        let file = memfd_create("ublkc", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, data_offset(1, 3) + 700).unwrap();
        pwrite(&file, b"a request", data_offset(1, 3)).unwrap();
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let file = Arc::new(file);
        let Ok(mut ring) = QueueRing::new(Arc::clone(&file), 1, 4, true, &wake) else { return };
        let arrived = |ring: &mut QueueRing, count| {
            let mut arrived = Vec::new();
            while arrived.len() < count {
                ring.enter(Wait::AtMost(Duration::from_secs(1))).unwrap();
                ring.take_events(&mut arrived);
            }
            arrived
                .into_iter()
                .map(|RingEvent { tag, kind: event, result }| (tag, event, result))
                .collect::<Vec<_>>()
        };
        let mut buffer = vec![0_u8; 1024];
        let at = buffer.as_mut_ptr().expose_provenance() as u64;
        ring.fetch_data(3, at, 512);
        assert_eq!(arrived(&mut ring, 1), [(3, RingEventKind::Fetched, 512)]);
        assert_eq!(&buffer[..9], b"a request");
        ring.fetch_data(3, at, 1024);
        assert_eq!(arrived(&mut ring, 1), [(3, RingEventKind::Fetched, 700)]);
        ring.send_data(2, at, 512);
        ring.commit(2, 512, 0);
        // The file rejects commands, so the result shows that the commit ran.
        assert_eq!(arrived(&mut ring, 2), [(2, RingEventKind::Sent, 512), (2, RingEventKind::Command, -95)]);
        rustix::fs::fcntl_add_seals(&*file, rustix::fs::SealFlags::FUTURE_WRITE).unwrap();
        ring.send_data(2, at, 512);
        ring.commit(2, 512, 0);
        assert_eq!(
            arrived(&mut ring, 2),
            [(2, RingEventKind::Sent, -1), (2, RingEventKind::Command, COMMIT_CANCELLED)]
        );
    }

    #[test]
    fn refused_command_returns_error() {
        let device = open("/dev/zero", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap();
        assert!(command(&device, 1, CtrlCmd::new(0, 0), &mut [0; 8]).is_err());
    }
}
