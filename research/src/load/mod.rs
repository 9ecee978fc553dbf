//! Load generator: threads that read and write records for a slice of time, on RAM disks or on
//! files on a RAM disk. Threads have separate areas or share an area.

pub mod disk;
pub mod ext4;
pub mod patterns;

use std::fs::File;
use std::hint::black_box;
use std::io::{BufReader, BufWriter, Read as _, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use freestone::PAGE_BYTES;
use freestone::codec::{Algorithm, Params, Scratch, Streams};
use freestone::device::IoBuf;
use freestone::ram::Ram;
use freestone_benches::data::{Data, whole_pages};
use freestone_benches::machine;
use freestone_benches::options::{Options, Set};
use freestone_benches::setup::new_ram_with;
use freestone_core::variants::{self, Intent, Lock};
use freestone_report::Summary;

use disk::Disk;
use ext4::Ext4;
use patterns::{Pattern, Step};

/// Size of the content that is written repeatedly, in bytes.
const CONTENT_BYTES: u64 = 64 << 20;
/// Number of pages with which the bare codec is measured.
const COMPRESSED_PAGES: usize = 4096;
const FILL_BYTES: u64 = 128 << 10;
/// Buffer size of the C library, in bytes.
const BUFFER_BYTES: usize = 4096;
const PAGE: u64 = PAGE_BYTES as u64;

pub struct Content {
    pages: IoBuf,
    pub description: String,
}

/// Disks of one size, on which threads run a load.
pub struct Drive<'a, D = Ram> {
    /// A disk that all threads share, or a disk per thread.
    disks: Vec<D>,
    content: &'a Content,
    size: u64,
    filled: OnceLock<()>,
    /// Lock held for reading during each request; None if only the drive's own threads send
    /// requests.
    requests: Option<Arc<RwLock<()>>>,
}

#[derive(Debug, Clone, Copy)]
pub struct Load {
    pub pattern: Pattern,
    pub threads: usize,
    /// Bytes per record, a multiple of the page size.
    pub record: u64,
    /// Bytes of each thread's area.
    pub area: u64,
    /// If true, all threads use the first area.
    pub shared: bool,
    pub seed: u64,
}

impl Content {
    /// Loads the first selected data set, or fio's.
    pub fn new(options: &Options) -> Result<Self> {
        let set = options.sets(&[Set::Fio])[0];
        let data = Data::open(set, options.bytes(CONTENT_BYTES).min(CONTENT_BYTES), options)?;
        Ok(Self { pages: data.load()?, description: data.description })
    }

    /// Returns the nanoseconds in which the bare codec compresses a page.
    pub fn compress_ns(&self, algorithm: Algorithm) -> Result<f64> {
        let codec = Streams::new(algorithm, &Params::default())?;
        let mut scratch = Scratch::new();
        let rounds = (0..3).map(|_| {
            let started = Instant::now();
            let mut pages = 0_u32;
            for page in whole_pages(&self.pages).take(COMPRESSED_PAGES) {
                black_box(codec.compress(black_box(page), &mut scratch));
                pages += 1;
            }
            started.elapsed().as_nanos() as f64 / f64::from(pages)
        });
        Ok(Summary::of(rounds).median)
    }

    /// Returns the content of a record, which depends on record number and seed.
    fn of(&self, record: u64, load: &Load) -> &[u8] {
        let room = (self.pages.len() as u64 - load.record) / PAGE + 1;
        let page = (record * (load.record / PAGE) + load.seed * 7919) % room;
        &self.pages[(page * PAGE) as usize..][..load.record as usize]
    }
}

impl<'a> Drive<'a> {
    /// Creates empty disks of `size` bytes that compress with `algorithm`.
    pub fn new(disks: usize, size: u64, algorithm: Algorithm, content: &'a Content) -> Result<Self> {
        let disks = (0..disks).map(|_| new_ram_with(size, algorithm)).collect::<Result<_>>()?;
        Ok(Self { disks, content, size, filled: OnceLock::new(), requests: None })
    }
}

impl<'a> Drive<'a, File> {
    /// Creates an empty file per thread, each for `size` bytes.
    pub fn of_files(ext4: &Ext4, files: usize, size: u64, content: &'a Content) -> Result<Self> {
        let (disks, requests) = (ext4.files(files)?, Some(ext4.requests()));
        Ok(Self { disks, content, size, filled: OnceLock::new(), requests })
    }
}

impl<D: Disk> Drive<'_, D> {
    /// Calls `change`, which changes settings of the engine, while no request is in progress.
    pub fn between_requests(&self, change: impl FnOnce()) {
        let idle_guard =
            self.requests.as_ref().map(|requests| requests.write().unwrap_or_else(PoisonError::into_inner));
        change();
        drop(idle_guard);
    }

    /// Prepares the disks for slices of a pattern. Initial writes need no preparation; all other
    /// patterns need a filled disk.
    pub fn prepare(&self, pattern: Pattern) -> Result<()> {
        if pattern != Pattern::InitialWrite && self.filled.get().is_none() {
            self.fill()?;
            self.filled.get_or_init(|| ());
        }
        Ok(())
    }

    fn fill(&self) -> Result<()> {
        let mut load = Load {
            pattern: Pattern::Write,
            threads: 1,
            record: FILL_BYTES,
            area: self.size,
            shared: true,
            seed: 1,
        };
        for disk in &self.disks {
            for (number, at) in (0_u64..).zip((0..self.size).step_by(FILL_BYTES as usize)) {
                load.record = FILL_BYTES.min(self.size - at);
                disk.write(at, self.content.of(number, &load))?;
            }
        }
        Ok(())
    }

    /// Empties the areas of the load for initial writes.
    fn empty(&self, load: &Load) -> Result<()> {
        for thread in 0..load.threads {
            self.disk(thread).empty(self.start(load, thread), load.area)?;
        }
        Ok(())
    }

    fn disk(&self, thread: usize) -> &D {
        &self.disks[thread % self.disks.len()]
    }

    fn start(&self, load: &Load, thread: usize) -> u64 {
        if load.shared { 0 } else { (thread / self.disks.len()) as u64 * load.area }
    }

    /// Runs the load for `length`, or until the first thread has finished its records. Returns the
    /// speed of all threads together, in KiB per second.
    pub fn slice(&self, load: &Load, length: Duration) -> Result<f64> {
        ensure!(load.area >= load.record, "an area of {} bytes has no record of {}", load.area, load.record);
        if load.pattern == Pattern::InitialWrite {
            self.empty(load)?;
        }
        let cpus = machine::allowed_cpus()?;
        let (start, stop) = (Barrier::new(load.threads + 1), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..load.threads)
                .map(|thread| {
                    let (start, stop, cpu) = (&start, &stop, cpus[thread % cpus.len()]);
                    scope.spawn(move || -> Result<(u64, Instant, Instant)> {
                        // Reach the barrier even after a failure, so that the other threads do not
                        // hang.
                        let ready =
                            machine::pin_to(cpu).and_then(|()| Ok(IoBuf::zeroed(load.record as usize)?));
                        start.wait();
                        let started = Instant::now();
                        let records = self.run_worker(load, thread, &mut ready?, stop)?;
                        Ok((records, started, Instant::now()))
                    })
                })
                .collect();
            start.wait();
            let started = Instant::now();
            // Relaxed: the flag carries no data; joining the threads orders their work.
            while started.elapsed() < length && !stop.load(Ordering::Relaxed) {
                std::thread::sleep(length.saturating_sub(started.elapsed()).min(Duration::from_millis(5)));
            }
            // Relaxed: the flag carries no data; joining the threads orders their work.
            stop.store(true, Ordering::Relaxed);
            // Count from the earliest start to the latest end: if threads share a CPU, a thread
            // that starts late was not faster.
            let (mut records, mut first, mut last) = (0, Instant::now(), started);
            for worker in workers {
                let (done, started, ended) = worker.join().ok().context("a worker panicked")??;
                (records, first, last) = (records + done, first.min(started), last.max(ended));
            }
            let length = last.duration_since(first).max(Duration::from_nanos(1));
            Ok((records * load.record) as f64 / 1024.0 / length.as_secs_f64())
        })
    }

    /// Runs the loop of one thread and returns the number of its records.
    fn run_worker(&self, load: &Load, thread: usize, buffer: &mut IoBuf, stop: &AtomicBool) -> Result<u64> {
        let (disk, area) = (self.disk(thread), self.start(load, thread));
        let mut done = 0;
        for Step { record, is_write } in load.pattern.steps(load.area / load.record, thread, load.seed) {
            let at = area + record * load.record;
            if is_write {
                variants::set_intent(Intent::Write);
                let content = black_box(self.content.of(record + done, load));
                if load.pattern == Pattern::BufferedWrite {
                    write_buffered(disk, at, content)?;
                } else {
                    disk.write(at, content)?;
                }
            } else {
                variants::set_intent(Intent::Read);
                let into = black_box(&mut *buffer);
                if load.pattern == Pattern::BufferedRead {
                    read_buffered(disk, at, into)?;
                } else {
                    disk.read(at, into)?;
                }
            }
            done += 1;
            // Relaxed: see `slice`. The thread has done at least one record.
            if stop.load(Ordering::Relaxed) {
                return Ok(done);
            }
        }
        // Relaxed: see `slice`. The first thread to finish ends the slice for all, as in iozone.
        stop.store(true, Ordering::Relaxed);
        Ok(done)
    }

    /// Profiles a single thread. Returns the nanoseconds per page for which slots are locked,
    /// without the cost of reading the clock, and the locked slots per page.
    pub fn profile(&self, load: &Load, length: Duration, clock: f64) -> Result<(f64, f64)> {
        if load.pattern == Pattern::InitialWrite {
            self.empty(load)?;
        }
        let stop = AtomicBool::new(false);
        let cpus = machine::allowed_cpus()?;
        variants::set_lock(Lock::Timed);
        let profiled = std::thread::scope(|scope| {
            let worker = scope.spawn(|| -> Result<(f64, f64)> {
                machine::pin_to(cpus[0])?;
                variants::take_hold_time();
                let records = self.run_worker(load, 0, &mut IoBuf::zeroed(load.record as usize)?, &stop)?;
                let (time, slots) = variants::take_hold_time();
                let pages = (records * (load.record / PAGE)) as f64;
                let hold_time = (time.as_nanos() as f64 - slots as f64 * clock).max(0.0);
                Ok((hold_time / pages, slots as f64 / pages))
            });
            std::thread::sleep(length);
            // Relaxed: as in `slice`.
            stop.store(true, Ordering::Relaxed);
            worker.join().ok().context("a worker panicked")?
        });
        variants::set_lock(Lock::Ours);
        profiled
    }
}

/// Writes a record through a buffer that copies the data first, as the C library does.
fn write_buffered<D: Disk>(disk: &D, at: u64, content: &[u8]) -> Result<()> {
    let mut buffer = BufWriter::with_capacity(BUFFER_BYTES, Cursor { disk, at });
    // A write as large as the buffer would bypass the buffer.
    for part in content.chunks(BUFFER_BYTES / 2) {
        buffer.write_all(part)?;
    }
    Ok(buffer.flush()?)
}

/// Reads a record through a buffer that copies the data afterwards, as the C library does.
fn read_buffered<D: Disk>(disk: &D, at: u64, into: &mut [u8]) -> Result<()> {
    let mut buffer = BufReader::with_capacity(BUFFER_BYTES, Cursor { disk, at });
    // A read as large as the buffer would bypass the buffer.
    for part in into.chunks_mut(BUFFER_BYTES / 2) {
        buffer.read_exact(part)?;
    }
    Ok(())
}

/// Position in a disk that advances with reads and writes.
struct Cursor<'a, D> {
    disk: &'a D,
    at: u64,
}

impl<D: Disk> std::io::Write for Cursor<'_, D> {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        self.disk.write(self.at, data).map_err(std::io::Error::other)?;
        self.at += data.len() as u64;
        Ok(data.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Returns the bytes of memory that the system can provide without swapping.
pub fn available_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    // If unknown, assume enough for every experiment.
    kib.map_or(u64::MAX, |kib| kib << 10)
}

impl<D: Disk> std::io::Read for Cursor<'_, D> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        self.disk.read(self.at, into).map_err(std::io::Error::other)?;
        self.at += into.len() as u64;
        Ok(into.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content() -> Content {
        let mut pages = IoBuf::zeroed(64 * PAGE_BYTES).unwrap();
        for (number, page) in (0_u64..).zip(pages.chunks_mut(PAGE_BYTES)) {
            freestone_benches::data::fio_page(number, page);
        }
        Content { pages, description: "a test's".into() }
    }

    fn load(pattern: Pattern, threads: usize) -> Load {
        Load { pattern, threads, record: 4 * PAGE, area: 16 * PAGE, shared: false, seed: 3 }
    }

    #[test]
    fn every_pattern_stays_in_its_areas() {
        let content = content();
        for pattern in [
            Pattern::InitialWrite,
            Pattern::Write,
            Pattern::BufferedWrite,
            Pattern::Read,
            Pattern::BufferedRead,
            Pattern::StrideRead,
            Pattern::RandomWrite,
            Pattern::ReadersAndWriters,
            Pattern::RandomMix,
        ] {
            let drive = Drive::new(1, 64 * PAGE, Algorithm::Lzo, &content).unwrap();
            let speed = drive.slice(&load(pattern, 2), Duration::from_millis(20)).unwrap();
            assert!(speed > 0.0, "{pattern:?}");
            let mut page = [0; PAGE_BYTES];
            let mut written = 0;
            for number in 0..64 {
                drive.disks[0].read(number * PAGE, &mut page).unwrap();
                let is_written = page != [0; PAGE_BYTES];
                assert!(!is_written || number < 32, "{pattern:?} wrote page {number}");
                written += u32::from(is_written);
            }
            assert_eq!(written == 0, pattern.is_read(), "{pattern:?}");
        }
    }

    #[test]
    fn buffered_write_and_read_cover_whole_record() {
        let content = content();
        let drive = Drive::new(1, 64 * PAGE, Algorithm::Lz4, &content).unwrap();
        let record = content.of(1, &load(Pattern::BufferedWrite, 1));
        write_buffered(&drive.disks[0], 8 * PAGE, record).unwrap();
        let mut back = vec![0; record.len()];
        drive.disks[0].read(8 * PAGE, &mut back).unwrap();
        assert!(back == record);
        back.fill(0);
        read_buffered(&drive.disks[0], 8 * PAGE, &mut back).unwrap();
        assert!(back == record);
    }

    #[test]
    fn separate_disks_and_shared_area_work() {
        let content = content();
        let separate = Drive::new(2, 16 * PAGE, Algorithm::Lz4, &content).unwrap();
        separate.fill().unwrap();
        assert!(separate.slice(&load(Pattern::Read, 2), Duration::from_millis(5)).unwrap() > 0.0);
        assert_eq!(separate.start(&load(Pattern::Read, 2), 1), 0);
        let one = Drive::new(1, 16 * PAGE, Algorithm::Lz4, &content).unwrap();
        let shared = Load { shared: true, ..load(Pattern::Write, 3) };
        assert!(one.slice(&shared, Duration::from_millis(5)).unwrap() > 0.0);
        // A write beyond the end of the disk must fail.
        assert!(one.slice(&load(Pattern::Write, 3), Duration::from_millis(5)).is_err());
        let small = Load { area: PAGE, ..load(Pattern::Write, 1) };
        assert!(one.slice(&small, Duration::from_millis(5)).is_err());
    }
}
