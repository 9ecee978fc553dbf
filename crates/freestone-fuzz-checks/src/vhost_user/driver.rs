//! A frontend that keeps to the protocol, with a driver that writes what it is told to write. What it
//! has written, and what it knows to have been answered, is kept beside the memory.

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

/// Bytes of the memory, and where it is cut into two regions.
pub const MEMORY_BYTES: u64 = 0x2_0000;
const CUT: u64 = 0x1_2000;
/// Where the second region is for the frontend.
const USER_BEHIND: u64 = 0x5000_0000;
/// Places in the memory.
pub const DESC: u64 = 0;
pub const AVAIL: u64 = 0x1000;
pub const USED: u64 = 0x2000;
/// Behind the rings.
pub const SLOTS: u64 = 0x4000;
/// Bytes of a queue's head, and of each entry, where it is noted what is in flight.
const NOTES_HEAD: usize = 16;
/// Long enough for anything that comes at all.
const PATIENCE: Duration = Duration::from_secs(30);

/// How the queue is set up.
#[allow(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub size: u16,
    pub features: u64,
    /// Where the available ring begins, and the used one.
    pub base: u16,
    pub used: u16,
    pub two_regions: bool,
    /// It is noted what is in flight.
    pub notes: bool,
    /// In notes that another server has left, in a state that this is the seed of.
    pub left: Option<u64>,
    /// The driver wants to be told; otherwise it looks again and again.
    pub told: bool,
    /// It tells only where the queue wants that.
    pub tells_if_wanted: bool,
}

/// The frontend and its driver.
pub struct Driver {
    socket: UnixStream,
    file: File,
    /// What is in the memory.
    pub memory: Vec<u8>,
    kick: OwnedFd,
    call: OwnedFd,
    err: OwnedFd,
    notes: Option<File>,
    shape: Shape,
    /// Entries that are available, and that were seen to be used.
    pub next: u16,
    pub seen: u16,
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

/// Whether the number `event` is among those from `old` to in front of `new`.
fn passes(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

fn readable(fd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(1)
}

impl Driver {
    /// Sets the queue up, at the other end of `socket`.
    pub fn new(socket: UnixStream, shape: Shape, disk: Arc<Disk>) -> Self {
        socket.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let mut driver = Self {
            socket,
            file: memory(MEMORY_BYTES),
            memory: vec![0; MEMORY_BYTES as usize],
            kick: event(),
            call: event(),
            err: event(),
            notes: shape.notes.then(|| memory(4096)),
            shape,
            next: shape.base,
            seen: shape.used,
            disk,
        };
        driver.leave_notes();
        driver.put(AVAIL + 2, &shape.base.to_le_bytes());
        driver.put(USED + 2, &shape.used.to_le_bytes());
        driver.set_up();
        driver
    }

    fn set_up(&mut self) {
        let Shape { size, features, .. } = self.shape;
        self.say(wire::SET_PROTOCOL_FEATURES, &wire::u64s(&[wire::PROTOCOL]), &[]);
        self.say(wire::SET_FEATURES, &wire::u64s(&[features]), &[]);
        let first = if self.shape.two_regions { CUT } else { MEMORY_BYTES };
        self.say(wire::ADD_MEM_REG, &wire::region(0, first, USER), &[self.file.as_fd()]);
        if self.shape.two_regions {
            let behind = wire::region(CUT, MEMORY_BYTES - CUT, USER_BEHIND);
            self.say(wire::ADD_MEM_REG, &behind, &[self.file.as_fd()]);
        }
        if let Some(notes) = &self.notes {
            let one = [&wire::u64s(&[4096, 0])[..], &1_u16.to_ne_bytes(), &size.to_ne_bytes(), &[0; 4]];
            self.say(wire::SET_INFLIGHT_FD, &one.concat(), &[notes.as_fd()]);
        }
        self.say(wire::SET_VRING_NUM, &wire::u32s(&[0, size.into()]), &[]);
        let rings = wire::addresses(0, USER + DESC, USER + USED, USER + AVAIL);
        self.say(wire::SET_VRING_ADDR, &rings, &[]);
        self.say(wire::SET_VRING_CALL, &wire::u64s(&[0]), &[self.call.as_fd()]);
        self.say(wire::SET_VRING_ERR, &wire::u64s(&[0]), &[self.err.as_fd()]);
        self.start(self.shape.base);
    }

    /// Notes as of a server that was killed, or of a frontend that has written there.
    fn leave_notes(&self) {
        let (Some(notes), Some(seed)) = (&self.notes, self.shape.left) else { return };
        let mut rng = Rng::new(seed);
        let size = u64::from(self.shape.size);
        let head = |rng: &mut Rng| (rng.below(size + 2) as u16).to_ne_bytes();
        let behind = (self.shape.used.wrapping_sub(rng.below(4) as u16)).to_ne_bytes();
        let mut bytes = [&[0; 8][..], &1_u16.to_ne_bytes(), &self.shape.size.to_ne_bytes()].concat();
        bytes.extend([head(&mut rng), behind].concat());
        for _ in 0..size {
            bytes.extend([u8::from(rng.chance(30)), 0, 0, 0, 0, 0]);
            bytes.extend(head(&mut rng));
            bytes.extend(rng.below(5).wrapping_sub(1).to_ne_bytes());
        }
        notes.write_all_at(&bytes, 0).expect("a file in memory");
    }

    fn say(&self, request: u32, body: &[u8], files: &[BorrowedFd<'_>]) {
        let message = wire::message(request, 0, body);
        assert_eq!(wire::send(&self.socket, &message, files), message.len(), "the server has gone");
    }

    /// Has the queue begin at `base`, and waits until it does.
    pub fn start(&mut self, base: u16) {
        self.say(wire::SET_VRING_BASE, &wire::u32s(&[0, base.into()]), &[]);
        self.say(wire::SET_VRING_KICK, &wire::u64s(&[0]), &[self.kick.as_fd()]);
        let enable = wire::message(wire::SET_VRING_ENABLE, wire::NEED_REPLY, &wire::u32s(&[0, 1]));
        assert_eq!(wire::send(&self.socket, &enable, &[]), enable.len(), "the server has gone");
        assert_eq!(self.reply(wire::SET_VRING_ENABLE, 8), [0; 8], "the queue does not begin");
    }

    /// Stops the queue; where it would go on.
    pub fn stop(&mut self) -> u32 {
        self.say(wire::GET_VRING_BASE, &wire::u32s(&[0, 0]), &[]);
        let body = self.reply(wire::GET_VRING_BASE, 8);
        u32::from_ne_bytes([body[4], body[5], body[6], body[7]])
    }

    fn reply(&mut self, request: u32, len: u32) -> Vec<u8> {
        let mut header = [0; wire::HEADER_BYTES];
        self.socket.read_exact(&mut header).expect("it is answered");
        assert_eq!(header[..], wire::u32s(&[request, 5, len]), "the header of an answer");
        let mut body = vec![0; len as usize];
        self.socket.read_exact(&mut body).expect("it is answered");
        body
    }

    /// Writes to the memory.
    pub fn put(&mut self, at: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, at).expect("a file in memory");
        self.memory[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }

    /// What is in the memory now.
    pub fn look(&self) -> Vec<u8> {
        let mut bytes = vec![0; MEMORY_BYTES as usize];
        self.file.read_exact_at(&mut bytes, 0).expect("a file in memory");
        bytes
    }

    fn number(&self, at: u64) -> u16 {
        let mut bytes = [0; 2];
        self.file.read_exact_at(&mut bytes, at).expect("a file in memory");
        u16::from_le_bytes(bytes)
    }

    /// Puts a chain behind those that are available.
    pub fn offer(&mut self, head: u16) {
        let slot = u64::from(self.next % self.shape.size);
        self.put(AVAIL + 4 + 2 * slot, &head.to_le_bytes());
        self.next = self.next.wrapping_add(1);
    }

    /// Shows the queue what was offered since `old`, up to what `index` says, and waits for so many
    /// answers. `ends`: the queue is going to end.
    pub fn show(&mut self, old: u16, index: u16, answers: u16, ends: bool) {
        let until = self.seen.wrapping_add(answers);
        let event_idx = self.shape.features & EVENT_IDX != 0;
        let told = self.shape.told && !ends;
        let at = AVAIL + 4 + 2 * u64::from(self.shape.size);
        // The last of the answers is what is waited for, or one that is not.
        let event = if told { until.wrapping_sub(1) } else { self.seen.wrapping_sub(1) };
        if event_idx {
            self.put(at, &event.to_le_bytes());
        }
        self.put(AVAIL, &u16::from(!told && !event_idx).to_le_bytes());
        self.put(AVAIL + 2, &index.to_le_bytes());
        // The queue says what it wants, then looks at what is available; here it is the other way
        // round.
        fence(Ordering::SeqCst);
        let wanted = if event_idx {
            passes(self.number(USED + 4 + 8 * u64::from(self.shape.size)), index, old)
        } else {
            self.number(USED) & 1 == 0
        };
        if wanted || !self.shape.tells_if_wanted {
            self.kick();
        }
        self.wait(until, told, ends);
        assert!(self.shape.told || !readable(&self.call), "it was told of what it does not wait for");
    }

    fn kick(&self) {
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).expect("an eventfd");
    }

    fn wait(&self, until: u16, told: bool, ends: bool) {
        let deadline = Instant::now() + PATIENCE;
        let mut was_told = false;
        loop {
            let used = self.number(USED + 2);
            let (done, all) = (used.wrapping_sub(self.seen), until.wrapping_sub(self.seen));
            assert!(done <= all, "{done} answers, of {all} requests");
            // With an event index it is told once, of the last one.
            let last = told && all > 0 && self.shape.features & EVENT_IDX != 0;
            if done == all && (was_told || !last) {
                return;
            }
            if self.disk.release() {
                continue;
            }
            assert!(ends || !readable(&self.err), "the queue has ended");
            assert!(Instant::now() < deadline, "{done} answers, of {all} requests; told: {was_told}");
            if !told {
                std::thread::yield_now();
                continue;
            }
            let mut fds = [
                PollFd::new(&self.call, PollFlags::IN),
                PollFd::new(&self.err, PollFlags::IN),
                PollFd::from_borrowed_fd(self.disk.submitted(), PollFlags::IN),
            ];
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 }));
            was_told |= rustix::io::read(&self.call, &mut [0; 8]).is_ok();
        }
    }

    /// Waits until the queue says that it has ended.
    pub fn wait_ended(&self) {
        let mut fds = [PollFd::new(&self.err, PollFlags::IN)];
        let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&patience)), Ok(1), "the queue does not end");
    }

    /// Whether it has.
    pub fn has_ended(&self) -> bool {
        readable(&self.err)
    }

    /// Has the queue look, and waits for nothing.
    pub fn show_only(&mut self, index: u16) {
        self.put(AVAIL + 2, &index.to_le_bytes());
        self.kick();
    }

    /// The entry of the used ring that is seen next: a head, and a length.
    pub fn used(&mut self, memory: &[u8]) -> (u32, u32) {
        let at = (USED + 4 + 8 * u64::from(self.seen % self.shape.size)) as usize;
        self.seen = self.seen.wrapping_add(1);
        let number = |at: usize| u32::from_le_bytes(memory[at..at + 4].try_into().expect("four bytes"));
        (number(at), number(at + 4))
    }

    /// Nothing is noted as in flight.
    pub fn assert_nothing_noted(&self) {
        let Some(notes) = &self.notes else { return };
        let mut entries = vec![0; 16 * usize::from(self.shape.size)];
        notes.read_exact_at(&mut entries, NOTES_HEAD as u64).expect("a file in memory");
        assert!(entries.chunks(16).all(|entry| entry[0] == 0), "it is noted as in flight");
    }

    /// Cuts the memory off, has the queue look, and waits until the connection has ended for that.
    pub fn cut_off(&mut self) {
        self.file.set_len(0).expect("a file in memory");
        self.kick();
        assert!(matches!(self.socket.read(&mut [0]), Ok(0)), "the connection ends, in order");
    }
}

impl Drop for Driver {
    /// Also where something does not hold: the server waits for what the device has.
    fn drop(&mut self) {
        self.disk.let_go();
    }
}

/// The address of a place for the driver.
pub fn guest(at: u64) -> u64 {
    GUEST + at
}
