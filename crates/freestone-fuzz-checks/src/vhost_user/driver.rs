//! A valid vhost-user frontend, with a driver that writes given bytes to the guest memory. The driver keeps a
//! copy of everything that it has written, and of the completions that it has checked.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use freestone_testkit::Rng;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, memfd_create};

use super::device::Disk;
use super::wire::{self, EVENT_IDX, GUEST, USER};

/// Size of the guest memory in bytes.
pub const MEMORY_BYTES: u64 = 0x2_0000;
/// Offset in the guest memory of the boundary between the two regions.
const CUT: u64 = 0x1_2000;
/// User address of the second memory region.
const USER_BEHIND: u64 = 0x5000_0000;
/// Offset of the descriptor table in the guest memory.
pub const DESC: u64 = 0;
/// Offset of the available ring in the guest memory.
pub const AVAIL: u64 = 0x1000;
/// Offset of the used ring in the guest memory.
pub const USED: u64 = 0x2000;
/// Offset of the requests in the guest memory, after the rings.
pub const SLOTS: u64 = 0x4000;
/// Size in bytes of a queue's header in the inflight area. An entry has the same size.
const INFLIGHT_HEADER_BYTES: usize = 16;
/// Timeout after which a check fails, far above the time that any check needs.
const WAIT: Duration = Duration::from_secs(30);

/// Setup of the virtqueue and its driver.
#[allow(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
#[derive(Debug, Clone, Copy)]
pub struct QueueConfig {
    pub size: u16,
    pub features: u64,
    /// Initial index of the available ring.
    pub base: u16,
    /// Initial index of the used ring.
    pub used: u16,
    pub two_regions: bool,
    pub has_inflight: bool,
    /// Seed of the entries that a previous server left in the inflight area; None if the area is new.
    pub inherited: Option<u64>,
    /// True if the driver requests notifications of completions. Otherwise the driver polls.
    pub notified: bool,
    /// True if the driver notifies the queue only when the queue requests notifications.
    pub kicks_if_requested: bool,
}

pub struct Driver {
    socket: UnixStream,
    file: File,
    /// Copy of the guest memory with everything that the driver has written or checked.
    pub memory: Vec<u8>,
    kick: OwnedFd,
    call: OwnedFd,
    err: OwnedFd,
    has_inflight: Option<File>,
    config: QueueConfig,
    /// Index of the available ring for the next chain.
    pub next: u16,
    /// Index of the used ring for the next completion to check.
    pub used_seen: u16,
    disk: Arc<Disk>,
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a descriptor is left")
}

fn memory(bytes: u64) -> File {
    let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).expect("a descriptor is left"));
    file.set_len(bytes).expect("a file in memory");
    file
}

/// Returns true if the index `event` is in `old..new`, with wrapping.
fn passes_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

fn readable(fd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(1)
}

impl Driver {
    /// Creates a frontend that is connected by `socket`, and sets up the queue.
    pub fn new(socket: UnixStream, config: QueueConfig, disk: Arc<Disk>) -> Self {
        socket.set_read_timeout(Some(WAIT)).expect("a socket");
        let mut driver = Self {
            socket,
            file: memory(MEMORY_BYTES),
            memory: vec![0; MEMORY_BYTES as usize],
            kick: event(),
            call: event(),
            err: event(),
            has_inflight: config.has_inflight.then(|| memory(4096)),
            config,
            next: config.base,
            used_seen: config.used,
            disk,
        };
        driver.fill_inflight();
        driver.put(AVAIL + 2, &config.base.to_le_bytes());
        driver.put(USED + 2, &config.used.to_le_bytes());
        driver.set_up();
        driver
    }

    fn set_up(&mut self) {
        let QueueConfig { size, features, .. } = self.config;
        self.send(wire::SET_PROTOCOL_FEATURES, &wire::u64s(&[wire::PROTOCOL]), &[]);
        self.send(wire::SET_FEATURES, &wire::u64s(&[features]), &[]);
        let first = if self.config.two_regions { CUT } else { MEMORY_BYTES };
        self.send(wire::ADD_MEM_REG, &wire::region(0, first, USER), &[self.file.as_fd()]);
        if self.config.two_regions {
            let behind = wire::region(CUT, MEMORY_BYTES - CUT, USER_BEHIND);
            self.send(wire::ADD_MEM_REG, &behind, &[self.file.as_fd()]);
        }
        if let Some(has_inflight) = &self.has_inflight {
            let one = [&wire::u64s(&[4096, 0])[..], &1_u16.to_ne_bytes(), &size.to_ne_bytes(), &[0; 4]];
            self.send(wire::SET_INFLIGHT_FD, &one.concat(), &[has_inflight.as_fd()]);
        }
        self.send(wire::SET_VRING_NUM, &wire::u32s(&[0, size.into()]), &[]);
        let rings = wire::addresses(0, USER + DESC, USER + USED, USER + AVAIL);
        self.send(wire::SET_VRING_ADDR, &rings, &[]);
        self.send(wire::SET_VRING_CALL, &wire::u64s(&[0]), &[self.call.as_fd()]);
        self.send(wire::SET_VRING_ERR, &wire::u64s(&[0]), &[self.err.as_fd()]);
        self.start(self.config.base);
    }

    /// Fills the inflight area with random entries, as after a killed server, or with invalid content.
    fn fill_inflight(&self) {
        let (Some(has_inflight), Some(seed)) = (&self.has_inflight, self.config.inherited) else { return };
        let mut rng = Rng::new(seed);
        let size = u64::from(self.config.size);
        let head = |rng: &mut Rng| (rng.below(size + 2) as u16).to_ne_bytes();
        let behind = (self.config.used.wrapping_sub(rng.below(4) as u16)).to_ne_bytes();
        let mut bytes = [&[0; 8][..], &1_u16.to_ne_bytes(), &self.config.size.to_ne_bytes()].concat();
        bytes.extend([head(&mut rng), behind].concat());
        for _ in 0..size {
            bytes.extend([u8::from(rng.chance(30)), 0, 0, 0, 0, 0]);
            bytes.extend(head(&mut rng));
            bytes.extend(rng.below(5).wrapping_sub(1).to_ne_bytes());
        }
        has_inflight.write_all_at(&bytes, 0).expect("a file in memory");
    }

    fn send(&self, request: u32, body: &[u8], files: &[BorrowedFd<'_>]) {
        let message = wire::message(request, 0, body);
        assert_eq!(wire::send(&self.socket, &message, files), message.len(), "the server has gone");
    }

    /// Starts the queue at index `base` of the available ring, and waits until the queue runs.
    pub fn start(&mut self, base: u16) {
        self.send(wire::SET_VRING_BASE, &wire::u32s(&[0, base.into()]), &[]);
        self.send(wire::SET_VRING_KICK, &wire::u64s(&[0]), &[self.kick.as_fd()]);
        let enable = wire::message(wire::SET_VRING_ENABLE, wire::NEED_REPLY, &wire::u32s(&[0, 1]));
        assert_eq!(wire::send(&self.socket, &enable, &[]), enable.len(), "the server has gone");
        assert_eq!(self.reply(wire::SET_VRING_ENABLE, 8), [0; 8], "the queue does not start");
        // Completions of the last server may lack a notification.
        assert!(rustix::io::read(&self.call, &mut [0; 8]).is_ok(), "the driver is notified of the start");
    }

    /// Stops the queue. Returns the index of the available ring at which the queue would continue.
    pub fn stop(&mut self) -> u32 {
        self.send(wire::GET_VRING_BASE, &wire::u32s(&[0, 0]), &[]);
        let body = self.reply(wire::GET_VRING_BASE, 8);
        u32::from_ne_bytes([body[4], body[5], body[6], body[7]])
    }

    fn reply(&mut self, request: u32, len: u32) -> Vec<u8> {
        let mut header = [0; wire::HEADER_BYTES];
        self.socket.read_exact(&mut header).expect("the backend replies");
        assert_eq!(header[..], wire::u32s(&[request, 5, len]), "the header of an answer");
        let mut body = vec![0; len as usize];
        self.socket.read_exact(&mut body).expect("the backend replies");
        body
    }

    /// Writes bytes to the guest memory and to its copy.
    pub fn put(&mut self, at: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, at).expect("a file in memory");
        self.memory[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }

    pub fn read_memory(&self) -> Vec<u8> {
        let mut bytes = vec![0; MEMORY_BYTES as usize];
        self.file.read_exact_at(&mut bytes, 0).expect("a file in memory");
        bytes
    }

    fn number(&self, at: u64) -> u16 {
        let mut bytes = [0; 2];
        self.file.read_exact_at(&mut bytes, at).expect("a file in memory");
        u16::from_le_bytes(bytes)
    }

    /// Adds the chain that starts at `head` to the available ring, without publishing the new index.
    pub fn offer(&mut self, head: u16) {
        let slot = u64::from(self.next % self.config.size);
        self.put(AVAIL + 4 + 2 * slot, &head.to_le_bytes());
        self.next = self.next.wrapping_add(1);
    }

    /// Publishes the chains from index `old` to `index`, and waits for `answers` completions. `ends` is true
    /// if the queue will stop at an invalid chain.
    pub fn publish(&mut self, old: u16, index: u16, answers: u16, ends: bool) {
        let until = self.used_seen.wrapping_add(answers);
        let event_idx = self.config.features & EVENT_IDX != 0;
        let notified = self.config.notified && !ends;
        let at = AVAIL + 4 + 2 * u64::from(self.config.size);
        // The event index requests a notification for the last completion, or for none.
        let event = if notified { until.wrapping_sub(1) } else { self.used_seen.wrapping_sub(1) };
        if event_idx {
            self.put(at, &event.to_le_bytes());
        }
        self.put(AVAIL, &u16::from(!notified && !event_idx).to_le_bytes());
        self.put(AVAIL + 2, &index.to_le_bytes());
        // The queue writes its event index, then reads the available index. The driver has written the
        // available index, and reads the event index after this fence.
        fence(Ordering::SeqCst);
        let wanted = if event_idx {
            passes_event(self.number(USED + 4 + 8 * u64::from(self.config.size)), index, old)
        } else {
            self.number(USED) & 1 == 0
        };
        if wanted || !self.config.kicks_if_requested {
            self.kick();
        }
        self.wait(until, notified, ends);
        assert!(self.config.notified || !readable(&self.call), "a notification that was not requested");
    }

    fn kick(&self) {
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).expect("an eventfd");
    }

    fn wait(&self, until: u16, notified: bool, ends: bool) {
        let deadline = Instant::now() + WAIT;
        let mut was_notified = false;
        loop {
            let used = self.number(USED + 2);
            let (done, all) = (used.wrapping_sub(self.used_seen), until.wrapping_sub(self.used_seen));
            assert!(done <= all, "{done} answers, of {all} requests");
            // With the event index feature, the queue sends one notification, for the last completion.
            let last = notified && all > 0 && self.config.features & EVENT_IDX != 0;
            if done == all && (was_notified || !last) {
                return;
            }
            if self.disk.release() {
                continue;
            }
            assert!(ends || !readable(&self.err), "the queue has stopped");
            assert!(Instant::now() < deadline, "{done} answers, of {all} requests; told: {was_notified}");
            if !notified {
                std::thread::yield_now();
                continue;
            }
            let mut fds = [
                PollFd::new(&self.call, PollFlags::IN),
                PollFd::new(&self.err, PollFlags::IN),
                PollFd::from_borrowed_fd(self.disk.submitted(), PollFlags::IN),
            ];
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: WAIT.as_secs() as i64, tv_nsec: 0 }));
            was_notified |= rustix::io::read(&self.call, &mut [0; 8]).is_ok();
        }
    }

    /// Waits until the queue reports that it has stopped.
    pub fn wait_ended(&self) {
        let mut fds = [PollFd::new(&self.err, PollFlags::IN)];
        let timeout = Timespec { tv_sec: WAIT.as_secs() as i64, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&timeout)), Ok(1), "the queue does not stop");
    }

    pub fn has_ended(&self) -> bool {
        readable(&self.err)
    }

    /// Publishes an index of the available ring and notifies the queue, without waiting for completions.
    pub fn publish_only(&mut self, index: u16) {
        self.put(AVAIL + 2, &index.to_le_bytes());
        self.kick();
    }

    /// Returns the next entry of the used ring: head of the chain, and length in bytes. `memory` is the guest
    /// memory.
    pub fn used(&mut self, memory: &[u8]) -> (u32, u32) {
        let at = (USED + 4 + 8 * u64::from(self.used_seen % self.config.size)) as usize;
        self.used_seen = self.used_seen.wrapping_add(1);
        let number = |at: usize| u32::from_le_bytes(memory[at..at + 4].try_into().expect("four bytes"));
        (number(at), number(at + 4))
    }

    pub fn assert_nothing_in_flight(&self) {
        let Some(has_inflight) = &self.has_inflight else { return };
        let mut entries = vec![0; 16 * usize::from(self.config.size)];
        has_inflight.read_exact_at(&mut entries, INFLIGHT_HEADER_BYTES as u64).expect("a file in memory");
        assert!(entries.chunks(16).all(|entry| entry[0] == 0), "a request is marked as in flight");
    }

    /// Truncates the guest memory file, notifies the queue, and waits until the connection has ended.
    pub fn cut_off(&mut self) {
        self.file.set_len(0).expect("a file in memory");
        self.kick();
        assert!(matches!(self.socket.read(&mut [0]), Ok(0)), "the connection ends, in order");
    }
}

impl Drop for Driver {
    /// Completes held requests, also after a panic, because the server waits for these requests before it
    /// ends.
    fn drop(&mut self) {
        self.disk.release_all();
    }
}

/// Returns the guest address of an offset in the guest memory.
pub fn guest(at: u64) -> u64 {
    GUEST + at
}
