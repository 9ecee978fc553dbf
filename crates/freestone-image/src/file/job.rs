//! A request as a sequence of system calls, independent of the I/O engine that makes the calls.

use std::mem::ManuallyDrop;
use std::sync::atomic::Ordering::SeqCst;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use freestone_core::device::{Completion, Error, Flags, IoBuf, Op, Request, Result};
use freestone_core::zeroes::ZEROES_BYTES;

use super::backing::{Backing, error};

/// Maximum number of bytes of one read or write system call. The kernel's own limit is a little
/// below 2 GiB.
const MAX_IO_BYTES: u64 = 1 << 30;
/// Maximum number of retries of an interrupted or refused system call before the request fails.
const MAX_RETRIES: u32 = 1000;

/// A system call of a job. `at` is the byte offset in the file, `from` the offset in the job's
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
    /// A write of zeroes, with [`ZEROES`](freestone_core::zeroes::ZEROES) as the data.
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

/// A request in progress. A job that is dropped before [`Job::finish`] completes its request with
/// [`Error::Gone`] and leaks the buffer, because the kernel may still use the buffer.
#[derive(Debug)]
pub(super) struct Job {
    pub request: Request,
    buffer: ManuallyDrop<IoBuf>,
    done: Completion,
    phase: Phase,
    /// Bytes of the request that are in the file, without the padding.
    len: u64,
    /// Bytes finished in the current phase.
    at: u64,
    retries: u32,
    /// Error of a synchronous write, while the write is repeated without the sync.
    dsync_error: Option<Errno>,
    /// True after the job was counted in [`Backing::writes`].
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
            dsync_error: None,
            counted: false,
        }
    }

    pub fn buffer(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    /// Returns true if the request may change the content of the file.
    pub fn changes(&self) -> bool {
        !matches!(self.request.op, Op::Read | Op::Flush)
    }

    pub fn begin(&mut self, backing: &Backing) -> Step {
        if self.request.op != Op::Read {
            // Check the size of the file, which costs little compared with a write or flush.
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
            // Discard is a hint. If the file system does not support it, the request succeeds
            // without an effect.
            Op::Discard => return self.finish_change(),
            Op::WriteZeroes => {
                let may_free = self.request.flags.contains(Flags::MAY_FREE);
                if may_free && backing.can_punch.load(SeqCst) {
                    Phase::Punch
                } else {
                    Self::zeroing_phase(backing)
                }
            }
        };
        Step::Io(self.io(backing))
    }

    /// Returns the end of the request in the file in bytes, without the padding.
    fn end(&self, backing: &Backing) -> u64 {
        (self.request.offset + self.request.len).min(backing.bytes())
    }

    /// Returns the next step, given the result of the last system call.
    pub fn advance(&mut self, backing: &Backing, result: std::result::Result<u64, Errno>) -> Step {
        if matches!(result, Err(Errno::INTR | Errno::AGAIN)) && self.retries < MAX_RETRIES {
            self.retries += 1;
            return Step::Io(self.io(backing));
        }
        self.retries = 0;
        match (self.phase, result) {
            (Phase::Data, Ok(_)) if self.dsync_error.is_some() => {
                let errno = self.dsync_error.unwrap_or(Errno::IO);
                Step::Done(backing.record_sync(Err(error(errno))))
            }
            (Phase::Data | Phase::ZeroPieces, Ok(n)) => self.add_transferred(backing, n),
            (Phase::Sync, result) => Step::Done(backing.record_sync(result.map(|_| ()).map_err(error))),
            (Phase::Punch | Phase::ZeroRange, Ok(_)) => self.finish_change(),
            (Phase::Punch, Err(Errno::OPNOTSUPP)) => {
                backing.can_punch.store(false, SeqCst);
                if self.request.op == Op::Discard {
                    return self.finish_change();
                }
                self.phase = Self::zeroing_phase(backing);
                Step::Io(self.io(backing))
            }
            (Phase::ZeroRange, Err(Errno::OPNOTSUPP)) => {
                backing.can_zero_range.store(false, SeqCst);
                self.phase = Phase::ZeroPieces;
                Step::Io(self.io(backing))
            }
            (Phase::Data, Err(errno)) if self.is_dsync() && errno == Errno::IO => {
                // The write or the sync may have failed. Assume the sync, so that later syncs fail,
                // too.
                Step::Done(backing.record_sync(Err(error(errno))))
            }
            (Phase::Data, Err(errno @ (Errno::NOSPC | Errno::DQUOT))) if self.is_dsync() => {
                // The write or its sync ran out of space, but only a failed sync may have lost
                // earlier writes. The write is repeated without a sync to distinguish the two.
                self.dsync_error = Some(errno);
                Step::Io(self.io(backing))
            }
            (_, Err(errno)) => Step::Done(Err(error(errno))),
        }
    }

    pub fn finish(self, backing: &Backing, outcome: Result<()>) {
        if self.counted {
            backing.writes.end();
        }
        self.done.complete(outcome, ManuallyDrop::into_inner(self.buffer));
    }

    fn is_dsync(&self) -> bool {
        self.request.op == Op::Write && self.request.flags.contains(Flags::FUA) && self.dsync_error.is_none()
    }

    fn zeroing_phase(backing: &Backing) -> Phase {
        if backing.can_zero_range.load(SeqCst) { Phase::ZeroRange } else { Phase::ZeroPieces }
    }

    /// Returns the system call for the rest of the current phase.
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
                // A block device has no size to keep, and some kernels refuse `KEEP_SIZE` for block
                // devices.
                let keep =
                    if backing.is_block_device { FallocateFlags::empty() } else { FallocateFlags::KEEP_SIZE };
                Io::Allocate { mode: FallocateFlags::ZERO_RANGE | keep, at, len }
            }
            Phase::Sync => Io::Sync,
        }
    }

    /// Adds `n` bytes read or written to the progress, and returns the next step.
    fn add_transferred(&mut self, backing: &Backing, n: u64) -> Step {
        let block = u64::from(backing.geometry().logical_block);
        // With O_DIRECT, the next call must begin at a block boundary. With the page cache it may
        // begin at any byte. So a read of a file that ends within a block reaches the end, and the
        // next call returns 0.
        let new_at = if backing.direct { (self.at + n) / block * block } else { self.at + n };
        if new_at == self.at {
            return Step::Done(Err(Error::Media));
        }
        self.at = new_at;
        if self.at < self.len {
            return Step::Io(self.io(backing));
        }
        if self.phase == Phase::ZeroPieces {
            return self.finish_change();
        }
        if self.is_dsync() { Step::Done(backing.record_sync(Ok(()))) } else { Step::Done(Ok(())) }
    }

    /// Finishes a discard or write zeroes, with a sync first if FUA was requested.
    fn finish_change(&mut self) -> Step {
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

    fn begin_job(backing: &Backing, request: Request) -> (Job, Step) {
        let mut job = job(request);
        let step = job.begin(backing);
        (job, step)
    }

    #[test]
    fn short_transfer_continues_at_its_end() {
        let read = |at, from, len| Step::Io(Io::Read { at, from, len });
        let b = backing(false);
        let (mut job, step) = begin_job(&b, Request::read(4096, 4096));
        assert_eq!(step, read(4096, 0, 4096));
        assert_eq!(job.advance(&b, Ok(700)), read(4796, 700, 3396));
        assert_eq!(job.advance(&b, Err(Errno::INTR)), read(4796, 700, 3396));
        assert_eq!(job.advance(&b, Ok(3396)), Step::Done(Ok(())));

        // With O_DIRECT, the next call begins at the last block boundary.
        let b = backing(true);
        let (mut job, _) = begin_job(&b, Request::read(4096, 4096));
        assert_eq!(job.advance(&b, Ok(700)), read(4608, 512, 3584));
        // A result of 0 or less than a block means that the file has ended.
        assert_eq!(job.advance(&b, Ok(100)), Step::Done(Err(Error::Media)));
        let (mut job, _) = begin_job(&b, Request::read(4096, 4096));
        assert_eq!(job.advance(&b, Ok(0)), Step::Done(Err(Error::Media)));
    }

    #[test]
    fn job_fails_after_max_retries() {
        let b = backing(false);
        let (mut job, mut step) = begin_job(&b, Request::write(0, 512));
        let mut calls = 0;
        while let Step::Io(_) = step {
            step = job.advance(&b, Err(Errno::AGAIN));
            calls += 1;
        }
        assert_eq!((step, calls), (Step::Done(Err(Error::Media)), MAX_RETRIES + 1));
    }

    #[test]
    fn zeroing_falls_back_to_supported_calls() {
        let b = backing(false);
        let request = Request::new(Op::WriteZeroes, 512, 100 << 10).with(Flags::MAY_FREE | Flags::FUA);
        let mode = |step| match step {
            Step::Io(Io::Allocate { mode, at: 512, len }) if len == 100 << 10 => mode,
            other => panic!("{other:?}"),
        };
        let (mut job, step) = begin_job(&b, request);
        assert!(mode(step).contains(FallocateFlags::PUNCH_HOLE));
        let step = job.advance(&b, Err(Errno::OPNOTSUPP));
        assert!(mode(step).contains(FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE));
        let piece = 64 << 10;
        assert_eq!(job.advance(&b, Err(Errno::OPNOTSUPP)), Step::Io(Io::Zeroes { at: 512, len: piece }));
        let rest = Io::Zeroes { at: 512 + piece as u64, len: 36 << 10 };
        assert_eq!(job.advance(&b, Ok(piece as u64)), Step::Io(rest));
        assert_eq!(job.advance(&b, Ok(36 << 10)), Step::Io(Io::Sync));
        assert_eq!(job.advance(&b, Ok(0)), Step::Done(Ok(())));
        // The engine remembers the refused modes, and a discard does nothing.
        assert_eq!(begin_job(&b, request).1, Step::Io(Io::Zeroes { at: 512, len: piece }));
        assert_eq!(begin_job(&b, Request::new(Op::Discard, 0, 512)).1, Step::Done(Ok(())));
    }

    #[test]
    fn errno_maps_to_device_error() {
        let b = backing(false);
        for (errno, error) in [
            (Errno::NOSPC, Error::NoSpace),
            (Errno::DQUOT, Error::NoSpace),
            (Errno::IO, Error::Media),
            (Errno::NOMEM, Error::NoMemory),
            (Errno::NODEV, Error::Gone),
            (Errno::INVAL, Error::Media),
        ] {
            let (mut job, _) = begin_job(&b, Request::write(0, 512));
            assert_eq!(job.advance(&b, Err(errno)), Step::Done(Err(error)));
        }
    }

    /// The kernel reports a lost write only once, so the device must keep failing later syncs.
    #[test]
    fn sync_fails_after_failed_sync() {
        for failing in [Request::flush(), Request::write(0, 512).with(Flags::FUA)] {
            let b = backing(false);
            let (mut job, _) = begin_job(&b, failing);
            assert_eq!(job.advance(&b, Err(Errno::IO)), Step::Done(Err(Error::Media)));
            let (mut job, step) = begin_job(&b, Request::flush());
            assert_eq!(step, Step::Io(Io::Sync));
            assert_eq!(job.advance(&b, Ok(0)), Step::Done(Err(Error::Media)));
            let (mut job, _) = begin_job(&b, Request::write(0, 512).with(Flags::FUA));
            assert_eq!(job.advance(&b, Ok(512)), Step::Done(Err(Error::Media)));
            let (mut job, _) = begin_job(&b, Request::write(0, 512));
            assert_eq!(job.advance(&b, Ok(512)), Step::Done(Ok(())));
        }
    }

    #[test]
    fn write_enospc_differs_from_sync_enospc() {
        let fua = Request::write(0, 512).with(Flags::FUA);
        // The write has no space: only this request fails.
        let b = backing(false);
        let (mut job, _) = begin_job(&b, fua);
        assert!(matches!(job.advance(&b, Err(Errno::NOSPC)), Step::Io(Io::Write { dsync: false, .. })));
        assert_eq!(job.advance(&b, Err(Errno::NOSPC)), Step::Done(Err(Error::NoSpace)));
        let (mut job, _) = begin_job(&b, Request::flush());
        assert_eq!(job.advance(&b, Ok(0)), Step::Done(Ok(())));
        // The sync has no space: it may have lost earlier writes, so later syncs fail.
        let (mut job, _) = begin_job(&b, fua);
        assert!(matches!(job.advance(&b, Err(Errno::NOSPC)), Step::Io(Io::Write { dsync: false, .. })));
        assert_eq!(job.advance(&b, Ok(512)), Step::Done(Err(Error::Media)));
        let (mut job, _) = begin_job(&b, Request::flush());
        assert_eq!(job.advance(&b, Ok(0)), Step::Done(Err(Error::Media)));
    }

    #[test]
    fn io_excludes_padding() {
        let mut b = backing(false);
        rustix::fs::ftruncate(&b.fd, SIZE + 100).unwrap();
        b.padded = true;
        assert_eq!(b.refresh(), Ok(SIZE + 100));
        assert_eq!((b.geometry().size, b.geometry().padding), (SIZE + 512, 412));
        let (mut job, step) = begin_job(&b, Request::read(SIZE, 512));
        assert_eq!(step, Step::Io(Io::Read { at: SIZE, from: 0, len: 100 }));
        assert_eq!(job.advance(&b, Ok(100)), Step::Done(Ok(())));
        let (mut job, step) = begin_job(&b, Request::write(SIZE - 512, 1024));
        assert_eq!(step, Step::Io(Io::Write { at: SIZE - 512, from: 0, len: 612, dsync: false }));
        assert_eq!(job.advance(&b, Ok(612)), Step::Done(Ok(())));
        let step = begin_job(&b, Request::new(Op::WriteZeroes, SIZE, 512)).1;
        assert!(matches!(step, Step::Io(Io::Allocate { at: SIZE, len: 100, .. })), "{step:?}");
        // A write does not extend a file that was truncated.
        rustix::fs::ftruncate(&b.fd, SIZE + 50).unwrap();
        assert_eq!(begin_job(&b, Request::write(SIZE, 512)).1, Step::Done(Err(Error::Media)));
        assert_eq!(
            begin_job(&b, Request::read(SIZE, 512)).1,
            Step::Io(Io::Read { at: SIZE, from: 0, len: 100 })
        );
    }

    #[test]
    fn inline_read_detects_concurrent_writes() {
        let b = backing(false);
        let idle_mark = b.writes.idle_mark().unwrap();
        let (mut first, _) = begin_job(&b, Request::write(0, 512));
        assert!(b.writes.idle_mark().is_none() && !b.writes.is_unchanged_since(idle_mark));
        let (second, _) = begin_job(&b, Request::new(Op::Discard, 0, 512));
        let step = first.advance(&b, Ok(512));
        assert_eq!(step, Step::Done(Ok(())));
        first.finish(&b, Ok(()));
        assert!(b.writes.idle_mark().is_none());
        second.finish(&b, Ok(()));
        assert!(b.writes.idle_mark().is_some() && !b.writes.is_unchanged_since(idle_mark));
        // Reads and flushes are not counted as writes.
        let idle_mark = b.writes.idle_mark().unwrap();
        let _ = begin_job(&b, Request::read(0, 512));
        let _ = begin_job(&b, Request::flush());
        assert!(b.writes.is_unchanged_since(idle_mark));
    }
}
