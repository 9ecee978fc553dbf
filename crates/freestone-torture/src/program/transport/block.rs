//! A client of a ublk block device: several threads use the device with direct I/O.
#![expect(unsafe_code)]
// UNSAFETY: a discard is an ioctl.

use std::fs::{self, File};
use std::io::{IoSlice, Seek as _, SeekFrom};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{self, JoinHandle};

use freestone_testkit::Rng;
use rustix::fs::{FallocateFlags, OFlags, fallocate, fdatasync};
use rustix::io::{Errno, ReadWriteFlags, pwritev2};
use rustix::ioctl::{Opcode, Setter, ioctl, opcode};

use super::protocol::{
    ConnectionError, EIO, ENOSPC, FLUSH, FUA, NO_HOLE, Properties, READ, Reply, TRIM, WRITE, WRITE_ZEROES,
};

/// Alignment of buffers in bytes, sufficient for direct I/O with any logical block size.
const ALIGN: usize = 4096;
const THREADS_MAX: u64 = 4;
const DEPTH: usize = 16;
/// Number of the kernel's ioctl `BLKDISCARD`.
const DISCARD: Opcode = opcode::none(0x12, 119);

struct Job {
    cookie: u64,
    flags: u16,
    command: u16,
    offset: u64,
    data: Aligned,
}

struct Aligned {
    bytes: Vec<u8>,
    from: usize,
    len: usize,
}

impl Aligned {
    fn new(len: usize) -> Self {
        // Fill the buffer with a pattern, so that bytes which were not read cannot look like data.
        let bytes = vec![0xa5; len + ALIGN];
        let from = bytes.as_ptr().align_offset(ALIGN);
        Self { bytes, from, len }
    }

    fn get(&mut self) -> &mut [u8] {
        &mut self.bytes[self.from..self.from + self.len]
    }
}

/// A client of an opened block device. Several threads execute its requests.
pub struct BlockClient {
    jobs: Option<mpsc::Sender<Job>>,
    completions: mpsc::Receiver<(u64, Result<Vec<u8>, Errno>)>,
    threads: Vec<JoinHandle<()>>,
    in_flight: usize,
    next: u64,
    pub properties: Properties,
}

impl BlockClient {
    pub fn connect(path: &Path, rng: &mut Rng) -> Result<Self, ConnectionError> {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let attribute = |of: &str| {
            let text = fs::read_to_string(format!("/sys/block/{name}/{of}"))?;
            text.trim().parse::<u64>().map_err(std::io::Error::other)
        };
        let writable = attribute("ro")? == 0;
        let mut file = File::options()
            .read(true)
            .write(writable)
            .custom_flags(OFlags::DIRECT.bits() as i32)
            .open(path)?;
        let properties = Properties {
            size: file.seek(SeekFrom::End(0))?,
            writable,
            zeroes: attribute("queue/write_zeroes_max_bytes")? > 0,
            trims: attribute("queue/discard_max_bytes")? > 0,
            is_coarse: true,
            is_raw: false,
            depth: DEPTH,
            ..Properties::default()
        };
        let (jobs, taken) = mpsc::channel::<Job>();
        let (tell, completions) = mpsc::channel();
        let (file, taken) = (Arc::new(file), Arc::new(Mutex::new(taken)));
        let threads = (0..=rng.below(THREADS_MAX)).map(|_| {
            let (file, taken, tell) = (Arc::clone(&file), Arc::clone(&taken), tell.clone());
            thread::spawn(move || {
                let take = || taken.lock().unwrap_or_else(PoisonError::into_inner).recv();
                while let Ok(mut job) = take() {
                    let outcome = execute_job(&file, &mut job);
                    // The receiver is gone if the client was dropped meanwhile.
                    let _ = tell.send((job.cookie, outcome));
                }
            })
        });
        let threads = threads.collect();
        Ok(Self { jobs: Some(jobs), completions, threads, in_flight: 0, next: rng.word(), properties })
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    pub fn next(&self) -> u64 {
        self.next
    }

    /// Queues a request for one of the threads.
    pub fn send(&mut self, flags: u16, command: u16, offset: u64, len: u32, data: &[u8]) {
        let mut buffer = Aligned::new(len as usize);
        if !data.is_empty() {
            buffer.get().copy_from_slice(data);
        }
        let job = Job { cookie: self.next, flags, command, offset, data: buffer };
        self.next = self.next.wrapping_add(0x1_0001);
        self.in_flight += 1;
        if let Some(jobs) = &self.jobs {
            // The threads receive jobs until `self` is dropped, so sending cannot fail.
            let _ = jobs.send(job);
        }
    }

    pub fn reply(&mut self) -> Result<Reply, ConnectionError> {
        let (cookie, outcome) = self
            .completions
            .recv()
            .map_err(|_| ConnectionError::Protocol("a thread of a block device panicked".into()))?;
        self.in_flight -= 1;
        let (error, data) = match outcome {
            Ok(data) => (0, data),
            // These errors mean that the block device was removed.
            Err(Errno::NODEV | Errno::NXIO) => {
                return Err(ConnectionError::Ended("the block device has gone".into()));
            }
            Err(Errno::NOSPC) => (ENOSPC, Vec::new()),
            Err(Errno::IO | Errno::NOMEM) => (EIO, Vec::new()),
            Err(other) => (other.raw_os_error().unsigned_abs(), Vec::new()),
        };
        Ok(Reply { cookie, error, data, extents: Vec::new() })
    }
}

impl Drop for BlockClient {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // If the thread panicked, the end of its replies has already shown that.
            let _ = thread.join();
        }
    }
}

/// Executes a request. A removed block device has size 0: a write beyond its end fails with ENOSPC, a discard with
/// EINVAL. The function returns `ENXIO` for such errors.
fn execute_job(file: &File, job: &mut Job) -> Result<Vec<u8>, Errno> {
    try_job(file, job).map_err(|error| {
        let mut disk = file;
        if disk.seek(SeekFrom::End(0)).is_ok_and(|size| size > 0) { error } else { Errno::NXIO }
    })
}

fn try_job(file: &File, job: &mut Job) -> Result<Vec<u8>, Errno> {
    let (at, len) = (job.offset, job.data.len as u64);
    let failed = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
    match job.command {
        READ => {
            // A read from a removed device returns fewer bytes than requested.
            let read = file.read_at(job.data.get(), at).map_err(failed)?;
            return if read as u64 == len { Ok(job.data.get().to_vec()) } else { Err(Errno::NXIO) };
        }
        WRITE => {
            let how = if job.flags & FUA == 0 { ReadWriteFlags::empty() } else { ReadWriteFlags::DSYNC };
            let written = pwritev2(file, &[IoSlice::new(job.data.get())], at, how)?;
            return if written as u64 == len { Ok(Vec::new()) } else { Err(Errno::NXIO) };
        }
        FLUSH => fdatasync(file)?,
        TRIM => {
            // SAFETY: the kernel reads two words, offset and length.
            unsafe { ioctl(file.as_fd(), Setter::<DISCARD, [u64; 2]>::new([at, len]))? };
        }
        WRITE_ZEROES => {
            let keep = FallocateFlags::KEEP_SIZE;
            let punch = FallocateFlags::PUNCH_HOLE;
            let how = if job.flags & NO_HOLE == 0 { punch } else { FallocateFlags::ZERO_RANGE };
            fallocate(file, how | keep, at, len)?;
        }
        other => unreachable!("{other} is not sent to block devices"),
    }
    if job.flags & FUA != 0 {
        fdatasync(file)?;
    }
    Ok(Vec::new())
}
