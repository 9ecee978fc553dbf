//! `scaling` part, the published experiment: threads on many zones, with a lock per zone and with
//! one lock around the device.
//!
//! Readers read 4 KiB at random offsets. Each writer writes 4 KiB at a time to zones of its own,
//! one after the other, and resets each zone first. The single lock belongs to the benchmark: it is
//! held around every call of an otherwise equal device.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use crossbeam_utils::CachePadded;
use freestone::PAGE_BYTES;
use freestone::device::zoned::{ZoneOp, Zoned};
use freestone::device::{Buffer, Device, Flags, IoBuf, Request, TryResult};
use freestone::null::{Config, Memory, Null};
use freestone::sync::{Mutex, MutexGuard};
use freestone::zone::{self, StateLocation, Zones};
use freestone_report::{Report, Row, Summary, Target, Unit};

use crate::data::Random;
use crate::measure::machine;
use crate::measure::median;
use crate::options::Options;

/// Numbers of threads, as in the published experiment.
pub const THREADS: [usize; 4] = [1, 2, 4, 8];
/// Number of threads in the comparison with one device per thread.
pub const THREADS_APART: usize = 2;
pub const ZONES: u64 = 64;
/// Length of a zone without backing, in bytes. With memory backing, the length is `--size` divided
/// by the number of zones.
const NULL_ZONE_BYTES: u64 = 256 << 20;
const MEMORY_BYTES: u64 = 512 << 20;
/// Limit of open and active zones, larger than the number of writers.
pub const LIMIT: u32 = 14;
/// Lowest speed of two threads on one device that meets the target, relative to two threads with a
/// device each.
const SHARED_TARGET: f64 = 0.95;
/// Operations between two checks of the stop flag.
const BATCH: u64 = 32;
const PAGE: u64 = PAGE_BYTES as u64;

/// Devices and locks of a variant under comparison.
pub struct Side {
    name: &'static str,
    /// A device for all threads, or one per thread.
    devices: Vec<Arc<Zones>>,
    locks: Locks,
}

/// Locks held around a call, in addition to the device's own locks.
pub enum Locks {
    None,
    /// A single lock, around every call.
    One(Mutex<()>),
    /// A lock per zone, held around every read; the device itself locks nothing for reads.
    Reads(Box<[CachePadded<Mutex<()>>]>),
}

impl Locks {
    pub fn one() -> Self {
        Self::One(Mutex::default())
    }

    /// Creates a lock per zone for reads.
    pub fn reads() -> Self {
        Self::Reads((0..ZONES).map(|_| CachePadded::default()).collect())
    }
}

impl Side {
    pub fn new(name: &'static str, devices: usize, locks: Locks, shape: Shape) -> Result<Self> {
        let devices = (0..devices).map(|_| device(shape)).collect::<Result<Vec<_>>>()?;
        Ok(Self { name, devices, locks })
    }
}

/// Indexes of the compared sides.
const OURS: usize = 0;
const ONE_LOCK: usize = 1;
const APART: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// Reads at random offsets.
    Reads,
    /// Writes to zones of each thread's own, one after the other.
    Writes,
}

#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub zone_bytes: u64,
    /// If true, the device stores data in memory.
    pub memory: bool,
    /// If true, open and active zones are limited to [`LIMIT`].
    pub limits: bool,
}

pub fn run(options: &Options) -> Result<Vec<Report>> {
    [false, true].into_iter().map(|memory| run_backing(memory, options)).collect()
}

fn run_backing(memory: bool, options: &Options) -> Result<Report> {
    let zone_bytes = zone_bytes(memory, options);
    let mut rows = Vec::new();
    for limits in [false, true] {
        let shape = Shape { zone_bytes, memory, limits };
        for load in [Load::Reads, Load::Writes] {
            rows.extend(run_load(shape, load, options)?);
        }
    }
    let cpus = machine::allowed_cpus()?.len();
    Ok(Report::new(
        if memory { "zones: a lock a zone, memory backing" } else { "zones: a lock a zone, no backing" },
        "one byte",
        ZONES * zone_bytes,
        "none",
    )
    .note(format!(
        "4 KiB operations per second of all threads in wall-clock time, {ZONES} zones of {} MiB, with limits \
         {LIMIT} open and active; thread n is pinned to CPU n modulo {cpus}. Readers read at random offsets. \
         Writers fill their own zones and reset each zone first.",
        zone_bytes >> 20
    ))
    .note(
        "\"one lock\" is an equal device with one mutex around every call; \"apart\" gives two \
         threads a device each.",
    )
    .rows(rows))
}

/// Returns the length of a zone in bytes, a power of two.
pub fn zone_bytes(memory: bool, options: &Options) -> u64 {
    if memory { 1 << (options.bytes(MEMORY_BYTES) / ZONES).max(PAGE).ilog2() } else { NULL_ZONE_BYTES }
}

fn run_load(shape: Shape, load: Load, options: &Options) -> Result<Vec<Row>> {
    let mut sides = Vec::new();
    for (name, devices, locks) in [
        ("a lock a zone", 1, Locks::None),
        ("one lock", 1, Locks::one()),
        ("apart", THREADS_APART, Locks::None),
    ] {
        sides.push(Side::new(name, devices, locks, shape)?);
    }
    let slices = options.slices();
    let mut speeds: Vec<Vec<Vec<f64>>> = vec![vec![Vec::new(); sides.len()]; THREADS.len()];
    for round in 0..slices.pairs {
        for (threads, speeds) in THREADS.into_iter().zip(&mut speeds) {
            let compared = if threads == THREADS_APART { sides.len() } else { APART };
            let mut order: Vec<usize> = (0..compared).collect();
            order.rotate_left(round as usize % compared);
            for number in order {
                speeds[number].push(slice(&sides[number], load, threads, round, slices.slice)?);
            }
        }
    }
    let what = match (load, shape.limits) {
        (Load::Reads, false) => "random reads",
        (Load::Writes, false) => "writes",
        (Load::Reads, true) => "random reads, limits",
        (Load::Writes, true) => "writes, limits",
    };
    let mut rows = Vec::new();
    for (threads, speeds) in THREADS.into_iter().zip(&speeds) {
        let kiops = Summary::of(speeds[OURS].iter().map(|speed| speed / 1e3));
        let what = format!("{what}: {threads} {}", if threads == 1 { "thread" } else { "threads" });
        rows.push(Row::new(&what, Unit::Kiops, kiops));
        let ratio = |to: usize| {
            let both = format!("{what}, {} / {}", sides[OURS].name, sides[to].name);
            Row::ratio_of(both, &speeds[OURS], &speeds[to])
                .part("k/s", median(&speeds[OURS]) / 1e3)
                .part(sides[to].name, median(&speeds[to]) / 1e3)
        };
        rows.push(ratio(ONE_LOCK).withhold_if_unsteady());
        if threads == THREADS_APART {
            rows.push(ratio(APART).target(Target::AtLeast(SHARED_TARGET)).withhold_if_unsteady());
        }
    }
    Ok(rows)
}

/// Creates a device of the shape. Memory backing is filled once: then reads find data, and writes
/// use pages that a reset freed, so that the comparison does not include page allocation by the
/// kernel.
fn device(shape: Shape) -> Result<Arc<Zones>> {
    let config = Config { discard: shape.memory, ..Config::plain(ZONES * shape.zone_bytes, 4096) };
    let backing: Arc<dyn Device> =
        if shape.memory { Arc::new(Memory::new(config)?) } else { Arc::new(Null::new(config)?) };
    let limit = if shape.limits { LIMIT } else { 0 };
    let config = zone::Config {
        zone_size: shape.zone_bytes,
        zone_max_open: limit,
        zone_max_active: limit,
        stores: shape.memory,
        ..zone::Config::default()
    };
    let zones = Arc::new(Zones::new(backing, config, StateLocation::Volatile, None)?);
    if shape.memory {
        let data = IoBuf::copy_of(&[0x5A; PAGE_BYTES])?;
        for at in (0..ZONES * shape.zone_bytes).step_by(PAGE_BYTES) {
            let tried = zones.try_io(&Request::write(at, PAGE), Buffer::Write(&data))?;
            ensure!(tried == TryResult::Done, "a write to memory had to wait");
        }
    }
    Ok(zones)
}

/// Runs `threads` threads for `length` and returns the operations per second.
pub fn slice(side: &Side, load: Load, threads: usize, round: u32, length: Duration) -> Result<f64> {
    let cpus = machine::allowed_cpus()?;
    let (start, stop) = (Barrier::new(threads + 1), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let (start, stop, cpu) = (&start, &stop, cpus[thread % cpus.len()]);
                scope.spawn(move || -> Result<f64> {
                    // Reach the barrier even after a failure, so that the other threads do not
                    // hang.
                    let ready = machine::pin_to(cpu).and_then(|()| Worker::new(side, thread, threads));
                    start.wait();
                    let mut worker = ready?;
                    let started = Instant::now();
                    let ops = match load {
                        Load::Reads => {
                            worker.reads(Random::new(u64::from(round) << 8 | thread as u64), stop)?
                        }
                        Load::Writes => worker.writes(stop)?,
                    };
                    let speed = ops as f64 / started.elapsed().as_secs_f64();
                    if load == Load::Writes {
                        // Zones left open would count against the limit in the next slices.
                        worker.reset()?;
                    }
                    Ok(speed)
                })
            })
            .collect();
        start.wait();
        std::thread::sleep(length);
        // Relaxed: the flag carries no data; joining the threads orders their work.
        stop.store(true, Ordering::Relaxed);
        workers.into_iter().map(|worker| worker.join().ok().context("a worker panicked")?).sum()
    })
}

struct Worker<'a> {
    device: &'a Zones,
    locks: &'a Locks,
    zone_bytes: u64,
    /// Current zone. The thread uses zone `first` and every `step`-th zone after it.
    zone: u64,
    first: u64,
    step: u64,
    buffer: IoBuf,
}

impl<'a> Worker<'a> {
    fn new(side: &'a Side, thread: usize, threads: usize) -> Result<Self> {
        let device = &*side.devices[thread % side.devices.len()];
        let zones = device.geometry().zones.context("a device without zones")?;
        let first = thread as u64;
        let buffer = IoBuf::copy_of(&[0xA5; PAGE_BYTES])?;
        let (zone_bytes, step) = (zones.zone_size, threads as u64);
        Ok(Self { device, locks: &side.locks, zone_bytes, zone: first, first, step, buffer })
    }

    /// Locks the variant's lock, if there is one for this call: a read at the offset `read`, or a
    /// write or reset if `read` is None.
    #[inline]
    fn lock_for(&self, read: Option<u64>) -> Option<MutexGuard<'a, ()>> {
        let lock = match (self.locks, read) {
            (Locks::One(one), _) => one,
            (Locks::Reads(zones), Some(at)) => &zones[(at / self.zone_bytes) as usize],
            (Locks::None | Locks::Reads(_), _) => return None,
        };
        Some(lock.lock())
    }

    fn reads(&mut self, mut random: Random, stop: &AtomicBool) -> Result<u64> {
        let pages = ZONES * self.zone_bytes / PAGE;
        let (mut ops, mut failed) = (0, 0_u64);
        // Relaxed: see `slice`.
        while !stop.load(Ordering::Relaxed) {
            for _ in 0..BATCH {
                // Without backing nothing is copied, as in the kernel; with backing the flag has no
                // effect.
                let request = Request::read(random.next_u64() % pages * PAGE, PAGE).with(Flags::UNREAD);
                let guard = self.lock_for(Some(request.offset));
                let tried = self.device.try_io(&request, Buffer::Read(black_box(&mut self.buffer)));
                drop(guard);
                failed += u64::from(tried != Ok(TryResult::Done));
            }
            ops += BATCH;
        }
        ensure!(failed == 0, "{failed} reads failed or had to wait");
        Ok(ops)
    }

    fn writes(&mut self, stop: &AtomicBool) -> Result<u64> {
        self.reset()?;
        let (mut ops, mut failed, mut at) = (0, 0_u64, 0);
        // Relaxed: see `slice`.
        while !stop.load(Ordering::Relaxed) {
            for _ in 0..BATCH {
                if at == self.zone_bytes {
                    self.zone += self.step;
                    if self.zone >= ZONES {
                        self.zone = self.first;
                    }
                    self.reset()?;
                    at = 0;
                }
                let request = Request::write(self.zone * self.zone_bytes + at, PAGE);
                let guard = self.lock_for(None);
                let tried = self.device.try_io(&request, Buffer::Write(black_box(&self.buffer)));
                drop(guard);
                failed += u64::from(tried != Ok(TryResult::Done));
                at += PAGE;
            }
            ops += BATCH;
        }
        ensure!(failed == 0, "{failed} writes failed or had to wait");
        Ok(ops)
    }

    fn reset(&self) -> Result<()> {
        let _guard = self.lock_for(None);
        Ok(self.device.zone_op(ZoneOp::Reset, self.zone * self.zone_bytes)?)
    }
}
