//! Files that a frontend sends, and the check that the backend has closed them.
//!
//! The check does not count descriptors. A pollable file stays in an epoll set until its last descriptor is
//! closed. The lock of a memory file is held until its last descriptor and mapping are closed.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::fs::{FlockOperation, MemfdFlags, flock, memfd_create};
use rustix::pipe::{PipeFlags, pipe_with};

/// Size of the guest memory in bytes.
pub const MEMORY_BYTES: u64 = 0x4000;
/// Size in bytes of the memory file that is too short for a guest memory region.
const SHORT_BYTES: u64 = 100;
/// Offset of the descriptor table in the guest memory.
pub const DESC: u64 = 0;
/// Offset of the available ring in the guest memory.
pub const AVAIL: u64 = 0x1000;
/// Offset of the used ring in the guest memory.
pub const USED: u64 = 0x2000;
/// Offset of the inflight area in the guest memory.
pub const INFLIGHT: u64 = 0x3c00;
const HEADER: u64 = 0x3000;
/// Size of the valid queue, in descriptors.
pub const QUEUE: u16 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Memory,
    Kick,
    Call,
    Err,
    Pipe,
    Socket,
    /// Memory file that is too short.
    Short,
    /// Memory file whose descriptor is read-only.
    Unwritable,
}

pub const KINDS: [Kind; 8] = [
    Kind::Memory,
    Kind::Kick,
    Kind::Call,
    Kind::Err,
    Kind::Pipe,
    Kind::Socket,
    Kind::Short,
    Kind::Unwritable,
];

/// Files that a frontend can send, one of each kind.
pub struct Files {
    each: [OwnedFd; 8],
    epoll: OwnedFd,
    /// Second descriptors of the memory files, which the check tries to lock at the end.
    second: Vec<File>,
    _ends: (OwnedFd, UnixStream),
}

/// Opens the file of a descriptor again, with an open file description of its own.
fn reopen(fd: &OwnedFd, write: bool) -> File {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    OpenOptions::new().read(true).write(write).open(path).expect("a file in memory opens")
}

fn memory(bytes: u64) -> OwnedFd {
    let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).expect("a descriptor is left"));
    file.set_len(bytes).expect("a file in memory");
    file.into()
}

fn event(value: u32) -> OwnedFd {
    eventfd(value, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a descriptor is left")
}

fn lock(file: impl AsFd) -> bool {
    flock(file, FlockOperation::NonBlockingLockExclusive).is_ok()
}

impl Files {
    /// Creates the files. The guest memory contains an available read request of one sector.
    pub fn new() -> Self {
        let (end, pipe) = pipe_with(PipeFlags::CLOEXEC).expect("a descriptor is left");
        let (socket, other) = UnixStream::pair().expect("a descriptor is left");
        let (memory, short) = (memory(MEMORY_BYTES), memory(SHORT_BYTES));
        let second = vec![reopen(&memory, true), reopen(&short, true), reopen(&memory, false)];
        fill(&second[0]);
        let unwritable = second[2].try_clone().expect("a descriptor is left").into();
        let each = [memory, event(1), event(0), event(0), pipe, socket.into(), short, unwritable];
        let epoll = epoll::create(CreateFlags::CLOEXEC).expect("a descriptor is left");
        for fd in &each[1..6] {
            epoll::add(&epoll, fd, EventData::new_u64(0), EventFlags::OUT).expect("it can be polled");
        }
        Self { each, epoll, second, _ends: (end, other) }
    }

    pub fn get(&self, kind: Kind) -> BorrowedFd<'_> {
        let at = KINDS.iter().position(|other| *other == kind).expect("there is one of each");
        self.each[at].as_fd()
    }

    /// Closes the files, and asserts that the backend has no descriptor or mapping of them left.
    pub fn assert_closed(self) {
        let Self { each, epoll, mut second, _ends } = self;
        let [memory, kick, call, err, pipe, socket, short, unwritable] = each;
        // The unwritable file shares the open file description of this last descriptor, and so its lock.
        drop(second.pop());
        for file in [&short, &unwritable] {
            assert!(lock(file), "the file can be locked");
        }
        drop(unwritable);
        assert!(lock(&memory), "a file is not closed, or is mapped: memory that is not writable");
        drop((memory, kick, call, err, pipe, socket, short));
        for file in &second {
            assert!(lock(file), "a file is not closed, or is mapped");
        }
        let mut events = [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 8];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(epoll::wait(&epoll, &mut events, Some(&now)), Ok(0), "a file is not closed");
    }
}

/// Closes a file that the backend sent, and asserts that no other descriptor or mapping of it is left.
pub fn assert_last(file: OwnedFd) {
    let second = reopen(&file, false);
    assert!(lock(&file), "the file can be locked");
    drop(file);
    assert!(lock(&second), "a file is not closed, or is mapped");
}

/// Writes a queue with one read request to the guest memory.
fn fill(file: &File) {
    let guest = super::wire::GUEST;
    let entry = |addr: u64, len: u32, flags: u16, next: u16| {
        [&(guest + addr).to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()]
            .concat()
    };
    let chain = [entry(HEADER, 16, 1, 1), entry(HEADER + 512, 512, 3, 2), entry(HEADER + 16, 1, 2, 0)];
    for (at, bytes) in [(DESC, chain.concat()), (AVAIL, vec![0, 0, 1, 0])] {
        file.write_all_at(&bytes, at).expect("a file in memory");
    }
}
