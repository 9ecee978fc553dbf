//! One request as a chain of system calls. Knows nothing of who carries them out.

use std::mem::ManuallyDrop;
use std::sync::atomic::Ordering::SeqCst;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use freestone_core::device::{Completion, Error, Flags, IoBuf, Op, Request, Result};
use freestone_core::zeroes::ZEROES_BYTES;

use super::backing::{Backing, error};

/// Most bytes of one read or write: the kernel's own limit is a little below 2 GiB.
const MAX_IO_BYTES: u64 = 1 << 30;
/// Interrupted or refused so often in a row, a system call counts as failed.
const MAX_RETRIES: u32 = 1000;

/// A system call that a job asks for. `at` is the byte in the file, `from` the byte in the job's
/// buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Io {
    Read {
        at: u64,
        from: usize,
        len: usize,
    },
    Write {
        at: u64,
        from: usize,
        len: usize,
        dsync: bool,
    },
    /// A write from [`ZEROES`].
    Zeroes {
        at: u64,
        len: usize,
    },
    Allocate {
        mode: FallocateFlags,
        at: u64,
        len: u64,
    },
    Sync,
}

/// What comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Io(Io),
    Done(Result<()>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Data,
    Punch,
    ZeroRange,
    ZeroPieces,
    Sync,
}

/// A request under way. If it is dropped before [`Job::finish`], its completion answers
/// [`Error::Gone`] and its memory is leaked: the kernel may still use it.
#[derive(Debug)]
pub(super) struct Job {
    pub request: Request,
    buffer: ManuallyDrop<IoBuf>,
    done: Completion,
    phase: Phase,
    /// Bytes of the request that lie in the file, and not in the padding behind it.
    len: u64,
    /// Bytes done in this phase.
    at: u64,
    retries: u32,
    /// Why the synchronous write of the piece at hand failed, while it is repeated without the
    /// sync.
    in_doubt: Option<Errno>,
    /// Counted in [`Backing::writes`].
    counted: bool,
}

impl Job {
    pub fn new(request: Request, buffer: IoBuf, done: Completion) -> Self {
        let buffer = ManuallyDrop::new(buffer);
        Self {
            len: request.len,
            request,
            buffer,
            done,
            phase: Phase::Data,
            at: 0,
            retries: 0,
            in_doubt: None,
            counted: false,
        }
    }

    pub fn buffer(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    /// Whether content may change.
    pub fn changes(&self) -> bool {
        !matches!(self.request.op, Op::Read | Op::Flush)
    }

    /// The first step.
    pub fn begin(&mut self, backing: &Backing) -> Step {
        if self.request.op != Op::Read {
            // A moment at which a look at the size costs little beside the rest.
            match backing.refresh() {
                Ok(real) if self.end(backing) <= real => {}
                Ok(_) => return Step::Done(Err(Error::Media)),
                Err(error) => return Step::Done(Err(error)),
            }
        }
        if self.request.op != Op::Flush {
            self.len = self.end(backing) - self.request.offset;
        }
        if self.request.op == Op::Read {
            self.buffer[self.len as usize..].fill(0);
        }
        if self.changes() {
            backing.writes.begin();
            self.counted = true;
        }
        self.phase = match self.request.op {
            Op::Read | Op::Write => Phase::Data,
            Op::Flush => Phase::Sync,
            Op::Discard if backing.can_punch.load(SeqCst) => Phase::Punch,
            // A hint that cannot be followed.
            Op::Discard => return self.changed(),
            Op::WriteZeroes => {
                let may_free = self.request.flags.contains(Flags::MAY_FREE);
                if may_free && backing.can_punch.load(SeqCst) { Phase::Punch } else { Self::zeroing(backing) }
            }
        };
        Step::Io(self.io(backing))
    }

    /// Where what is asked for ends in the file.
    fn end(&self, backing: &Backing) -> u64 {
        (self.request.offset + self.request.len).min(backing.bytes())
    }

    /// The next step, given what the last system call answered.
    pub fn advance(&mut self, backing: &Backing, answer: std::result::Result<u64, Errno>) -> Step {
        if matches!(answer, Err(Errno::INTR | Errno::AGAIN)) && self.retries < MAX_RETRIES {
            self.retries += 1;
            return Step::Io(self.io(backing));
        }
        self.retries = 0;
        match (self.phase, answer) {
            (Phase::Data, Ok(_)) if self.in_doubt.is_some() => {
                let errno = self.in_doubt.unwrap_or(Errno::IO);
                Step::Done(backing.synced(Err(error(errno))))
            }
            (Phase::Data | Phase::ZeroPieces, Ok(n)) => self.moved(backing, n),
            (Phase::Sync, answer) => Step::Done(backing.synced(answer.map(|_| ()).map_err(error))),
            (Phase::Punch | Phase::ZeroRange, Ok(_)) => self.changed(),
            (Phase::Punch, Err(Errno::OPNOTSUPP)) => {
                backing.can_punch.store(false, SeqCst);
                if self.request.op == Op::Discard {
                    return self.changed();
                }
                self.phase = Self::zeroing(backing);
                Step::Io(self.io(backing))
            }
            (Phase::ZeroRange, Err(Errno::OPNOTSUPP)) => {
                backing.can_zero_range.store(false, SeqCst);
                self.phase = Phase::ZeroPieces;
                Step::Io(self.io(backing))
            }
            (Phase::Data, Err(errno)) if self.is_dsync() && errno == Errno::IO => {
                // Either half may have failed; the sync's memory is the safe side.
                Step::Done(backing.synced(Err(error(errno))))
            }
            (Phase::Data, Err(errno @ (Errno::NOSPC | Errno::DQUOT))) if self.is_dsync() => {
                // A full file system is told by the write; but where it is the sync that has no
                // room, it may have lost earlier writes. The same piece without a sync tells which.
                self.in_doubt = Some(errno);
                Step::Io(self.io(backing))
            }
            (_, Err(errno)) => Step::Done(Err(error(errno))),
        }
    }

    /// Answers the request.
    pub fn finish(self, backing: &Backing, outcome: Result<()>) {
        if self.counted {
            backing.writes.end();
        }
        self.done.complete(outcome, ManuallyDrop::into_inner(self.buffer));
    }

    fn is_dsync(&self) -> bool {
        self.request.op == Op::Write && self.request.flags.contains(Flags::FUA) && self.in_doubt.is_none()
    }

    fn zeroing(backing: &Backing) -> Phase {
        if backing.can_zero_range.load(SeqCst) { Phase::ZeroRange } else { Phase::ZeroPieces }
    }

    /// The system call of the step at hand, once more.
    pub fn io(&self, backing: &Backing) -> Io {
        let Request { op, offset, .. } = self.request;
        let (at, len, left) = (offset + self.at, self.len, self.len - self.at);
        match self.phase {
            Phase::Data => {
                let (from, len) = (self.at as usize, left.min(MAX_IO_BYTES) as usize);
                if op == Op::Read {
                    Io::Read { at, from, len }
                } else {
                    Io::Write { at, from, len, dsync: self.is_dsync() }
                }
            }
            Phase::ZeroPieces => Io::Zeroes { at, len: left.min(ZEROES_BYTES as u64) as usize },
            Phase::Punch => {
                Io::Allocate { mode: FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, len }
            }
            Phase::ZeroRange => {
                // A block device has no size to keep, and refuses the flag on some kernels.
                let keep =
                    if backing.is_block_device { FallocateFlags::empty() } else { FallocateFlags::KEEP_SIZE };
                Io::Allocate { mode: FallocateFlags::ZERO_RANGE | keep, at, len }
            }
            Phase::Sync => Io::Sync,
        }
    }

    /// `n` more bytes were read or written.
    fn moved(&mut self, backing: &Backing, n: u64) -> Step {
        let block = u64::from(backing.geometry().logical_block);
        // O_DIRECT goes on at a block boundary only. The page cache takes any byte; so a file that
        // ends within a block is read to its very end, and then answers 0.
        let reached = if backing.direct { (self.at + n) / block * block } else { self.at + n };
        if reached == self.at {
            return Step::Done(Err(Error::Media));
        }
        self.at = reached;
        if self.at < self.len {
            return Step::Io(self.io(backing));
        }
        if self.phase == Phase::ZeroPieces {
            return self.changed();
        }
        if self.is_dsync() { Step::Done(backing.synced(Ok(()))) } else { Step::Done(Ok(())) }
    }

    /// Zeroed or discarded; a sync follows where it was asked for.
    fn changed(&mut self) -> Step {
        if self.request.flags.contains(Flags::FUA) {
            self.phase = Phase::Sync;
            Step::Io(Io::Sync)
        } else {
            Step::Done(Ok(()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 1 << 20;

    fn backing(direct: bool) -> Backing {
        Backing::in_memory(SIZE, direct)
    }

    fn job(request: Request) -> Job {
        let len = if matches!(request.op, Op::Read | Op::Write) { request.len as usize } else { 0 };
        Job::new(request, IoBuf::zeroed(len).unwrap(), Completion::new(|_, _| {}))
    }

    fn begun(backing: &Backing, request: Request) -> (Job, Step) {
        let mut job = job(request);
        let step = job.begin(backing);
        (job, step)
    }

    #[test]
    fn short_transfers_go_on_where_they_ended() {
        let read = |at, from, len| Step::Io(Io::Read { at, from, len });
        let b = backing(false);
        let (mut job, step) = begun(&b, Request::read(4096, 4096));
        assert_eq!(step, read(4096, 0, 4096));
        assert_eq!(job.advance(&b, Ok(700)), read(4796, 700, 3396));
        assert_eq!(job.advance(&b, Err(Errno::INTR)), read(4796, 700, 3396));
        assert_eq!(job.advance(&b, Ok(3396)), Step::Done(Ok(())));

        // O_DIRECT: from the last whole block.
        let b = backing(true);
        let (mut job, _) = begun(&b, Request::read(4096, 4096));
        assert_eq!(job.advance(&b, Ok(700)), read(4608, 512, 3584));
        // Less than a block, and nothing: the file ends here.
        assert_eq!(job.advance(&b, Ok(100)), Step::Done(Err(Error::Media)));
        let (mut job, _) = begun(&b, Request::read(4096, 4096));
        assert_eq!(job.advance(&b, Ok(0)), Step::Done(Err(Error::Media)));
    }

    #[test]
    fn a_call_that_is_always_interrupted_fails_at_last() {
        let b = backing(false);
        let (mut job, mut step) = begun(&b, Request::write(0, 512));
        let mut calls = 0;
        while let Step::Io(_) = step {
            step = job.advance(&b, Err(Errno::AGAIN));
            calls += 1;
        }
        assert_eq!((step, calls), (Step::Done(Err(Error::Media)), MAX_RETRIES + 1));
    }

    #[test]
    fn zeroing_falls_back_to_what_the_file_system_has() {
        let b = backing(false);
        let request = Request::new(Op::WriteZeroes, 512, 100 << 10).with(Flags::MAY_FREE | Flags::FUA);
        let mode = |step| match step {
            Step::Io(Io::Allocate { mode, at: 512, len }) if len == 100 << 10 => mode,
            other => panic!("{other:?}"),
        };
        let (mut job, step) = begun(&b, request);
        assert!(mode(step).contains(FallocateFlags::PUNCH_HOLE));
        let step = job.advance(&b, Err(Errno::OPNOTSUPP));
        assert!(mode(step).contains(FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE));
        let piece = 64 << 10;
        assert_eq!(job.advance(&b, Err(Errno::OPNOTSUPP)), Step::Io(Io::Zeroes { at: 512, len: piece }));
        let rest = Io::Zeroes { at: 512 + piece as u64, len: 36 << 10 };
        assert_eq!(job.advance(&b, Ok(piece as u64)), Step::Io(rest));
        assert_eq!(job.advance(&b, Ok(36 << 10)), Step::Io(Io::Sync));
        assert_eq!(job.advance(&b, Ok(0)), Step::Done(Ok(())));
        // Remembered, and a discard has nothing to do.
        assert_eq!(begun(&b, request).1, Step::Io(Io::Zeroes { at: 512, len: piece }));
        assert_eq!(begun(&b, Request::new(Op::Discard, 0, 512)).1, Step::Done(Ok(())));
    }

    #[test]
    fn errors_have_names() {
        let b = backing(false);
        for (errno, error) in [
            (Errno::NOSPC, Error::NoSpace),
            (Errno::DQUOT, Error::NoSpace),
            (Errno::IO, Error::Media),
            (Errno::NOMEM, Error::NoMemory),
            (Errno::NODEV, Error::Gone),
            (Errno::INVAL, Error::Media),
        ] {
            let (mut job, _) = begun(&b, Request::write(0, 512));
            assert_eq!(job.advance(&b, Err(errno)), Step::Done(Err(error)));
        }
    }

    /// The kernel reports lost data once; the device does not forget it.
    #[test]
    fn after_a_failed_sync_no_sync_succeeds() {
        for failing in [Request::flush(), Request::write(0, 512).with(Flags::FUA)] {
            let b = backing(false);
            let (mut job, _) = begun(&b, failing);
            assert_eq!(job.advance(&b, Err(Errno::IO)), Step::Done(Err(Error::Media)));
            let (mut job, step) = begun(&b, Request::flush());
            assert_eq!(step, Step::Io(Io::Sync));
            assert_eq!(job.advance(&b, Ok(0)), Step::Done(Err(Error::Media)));
            let (mut job, _) = begun(&b, Request::write(0, 512).with(Flags::FUA));
            assert_eq!(job.advance(&b, Ok(512)), Step::Done(Err(Error::Media)));
            let (mut job, _) = begun(&b, Request::write(0, 512));
            assert_eq!(job.advance(&b, Ok(512)), Step::Done(Ok(())));
        }
    }

    #[test]
    fn a_full_file_system_is_told_from_a_sync_without_room() {
        let fua = Request::write(0, 512).with(Flags::FUA);
        // The write itself finds no room: an error of this request only.
        let b = backing(false);
        let (mut job, _) = begun(&b, fua);
        assert!(matches!(job.advance(&b, Err(Errno::NOSPC)), Step::Io(Io::Write { dsync: false, .. })));
        assert_eq!(job.advance(&b, Err(Errno::NOSPC)), Step::Done(Err(Error::NoSpace)));
        let (mut job, _) = begun(&b, Request::flush());
        assert_eq!(job.advance(&b, Ok(0)), Step::Done(Ok(())));
        // The sync found none: what it lost stays lost.
        let (mut job, _) = begun(&b, fua);
        assert!(matches!(job.advance(&b, Err(Errno::NOSPC)), Step::Io(Io::Write { dsync: false, .. })));
        assert_eq!(job.advance(&b, Ok(512)), Step::Done(Err(Error::Media)));
        let (mut job, _) = begun(&b, Request::flush());
        assert_eq!(job.advance(&b, Ok(0)), Step::Done(Err(Error::Media)));
    }

    #[test]
    fn nothing_is_done_in_the_padding() {
        let mut b = backing(false);
        rustix::fs::ftruncate(&b.fd, SIZE + 100).unwrap();
        b.padded = true;
        assert_eq!(b.refresh(), Ok(SIZE + 100));
        assert_eq!((b.geometry().size, b.geometry().padding), (SIZE + 512, 412));
        let (mut job, step) = begun(&b, Request::read(SIZE, 512));
        assert_eq!(step, Step::Io(Io::Read { at: SIZE, from: 0, len: 100 }));
        assert_eq!(job.advance(&b, Ok(100)), Step::Done(Ok(())));
        let (mut job, step) = begun(&b, Request::write(SIZE - 512, 1024));
        assert_eq!(step, Step::Io(Io::Write { at: SIZE - 512, from: 0, len: 612, dsync: false }));
        assert_eq!(job.advance(&b, Ok(612)), Step::Done(Ok(())));
        let step = begun(&b, Request::new(Op::WriteZeroes, SIZE, 512)).1;
        assert!(matches!(step, Step::Io(Io::Allocate { at: SIZE, len: 100, .. })), "{step:?}");
        // Cut off: it is not made long again.
        rustix::fs::ftruncate(&b.fd, SIZE + 50).unwrap();
        assert_eq!(begun(&b, Request::write(SIZE, 512)).1, Step::Done(Err(Error::Media)));
        assert_eq!(begun(&b, Request::read(SIZE, 512)).1, Step::Io(Io::Read { at: SIZE, from: 0, len: 100 }));
    }

    #[test]
    fn inline_reads_know_of_writes_beside_them() {
        let b = backing(false);
        let quiet = b.writes.quiet().unwrap();
        let (mut first, _) = begun(&b, Request::write(0, 512));
        assert!(b.writes.quiet().is_none() && !b.writes.is_still(quiet));
        let (second, _) = begun(&b, Request::new(Op::Discard, 0, 512));
        let step = first.advance(&b, Ok(512));
        assert_eq!(step, Step::Done(Ok(())));
        first.finish(&b, Ok(()));
        assert!(b.writes.quiet().is_none());
        second.finish(&b, Ok(()));
        assert!(b.writes.quiet().is_some() && !b.writes.is_still(quiet));
        // Neither reads nor flushes count.
        let quiet = b.writes.quiet().unwrap();
        let _ = begun(&b, Request::read(0, 512));
        let _ = begun(&b, Request::flush());
        assert!(b.writes.is_still(quiet));
    }
}
