//! Zones over any device: write pointers, conditions, limits, and a lock per zone.
//!
//! [`Zones`] implements the zone model of the kernel's `null_blk`, with its rules, errors and order
//! of checks. One word with a lock bit holds a zone's state (`word`, `states`). Reads take no lock
//! and check the word again afterwards (`read`).
//!
//! The lock is never held while a device is slow. Such a write owns its zone instead, and later
//! requests queue (`write`, `queue`). Open and active zones are counted only if they are limited
//! (`states`, `resources`).
//!
//! The durable state of the zones is tracked if the device below has a volatile cache, or if the
//! zones have a state file (`durable`, `file`).

mod config;
mod counts;
mod cut;
mod durable;
mod extents;
mod file;
mod layout;
mod mark;
mod ops;
mod queue;
mod read;
mod resources;
mod states;
mod word;
mod write;

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

pub use config::{Config, SetupError, ZONE_SIZE_MAX_BYTES, ZONES_MAX};
pub use counts::ZoneCounts;
pub use file::{StateError, is_state_file};

use crate::null::BadBlocks;
use crate::power;
use durable::Durable;
use file::StateFile;
use freestone_core::device::zoned::{AppendCompletion, Zone, ZoneCondition, ZoneOp, Zoned};
use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, Flags, Geometry, IoBuf, Op, OpCounts, Request, Result, Tried,
};
use freestone_core::percpu::Counters;
use freestone_core::replace::MadeFile;
use freestone_core::sync::Mutex;
use freestone_core::work_queue::WorkQueue;
use layout::Layout;
use mark::Mark;
use queue::{AppendDone, Queues, Write, WriteCompletion};
use states::{Place, Table};
use word::Word;

/// Location of the zones' state.
pub enum State<'a> {
    /// In memory: the zones are reset whenever the device is created.
    Volatile,
    /// In this file, created if it does not exist. One device uses it at a time.
    File(&'a Path),
    /// On this device, which starts with zeroes or holds the state of such zones. The state takes 4
    /// KiB plus 8 KiB per 510 zones.
    Device(Arc<dyn Device>),
}

/// Zoned device over another device.
///
/// Discards succeed without effect; zoned devices do not offer them. Write zeroes to a sequential
/// zone is a write at its write pointer. Reads may cross zone boundaries, writes to sequential
/// zones may not.
///
/// With a state file, open zones are closed when the device is created again, and a write with
/// [`Flags::FUA`] flushes the whole device. Dropping such a device flushes it.
pub struct Zones {
    inner: Arc<Inner>,
    made: Option<MadeFile>,
}

/// Lock order: `all_zones`; a zone's own lock, as described in [`states`]; `unsynced`, or the
/// resources, or a shard of `queues`, or the lock of `durable`. A thread that waits for an owned
/// zone holds no lock but `all_zones`.
struct Inner {
    table: Table,
    backing: Arc<dyn Device>,
    bad: Option<Arc<BadBlocks>>,
    /// The backing device stores data.
    stores: bool,
    read_only: bool,
    full_at_first: bool,
    queues: Queues,
    /// Durable state, if any state can be lost.
    durable: Option<Durable>,
    unsynced: Mutex<Vec<SyncCallback>>,
    /// Held by operations on all zones together.
    all_zones: Mutex<()>,
    /// Starts queued writes. Never waits.
    work_queue: Arc<WorkQueue>,
    /// Runs flushes, which wait for the state file.
    syncer: Arc<WorkQueue>,
    ops: OpCounts,
    zone_ops: Counters<{ counts::COUNTERS }>,
}

type SyncCallback = Box<dyn FnOnce(Result<()>) + Send>;

impl Zones {
    /// Creates zones over `backing`. `bad` are its bad blocks, if it has some. A write that fails
    /// on one advances the write pointer by the transferred part.
    ///
    /// # Errors
    /// [`SetupError`].
    pub fn new(
        backing: Arc<dyn Device>,
        config: Config,
        state: State<'_>,
        bad: Option<Arc<BadBlocks>>,
    ) -> std::result::Result<Self, SetupError> {
        let geometry = backing.geometry();
        let layout = Layout::new(&config, &geometry)?;
        let new = |zone| fresh(&layout, config.zone_full, zone);
        let mark = |zone| Mark::of(new(zone));
        let (opened, made) = match state {
            State::Volatile => (None, None),
            State::File(path) => {
                let (opened, made) = StateFile::open(path, &layout, mark)?;
                (Some(opened), made)
            }
            State::Device(device) => (Some(StateFile::open_on(device, &layout, mark)?), None),
        };
        let (words, file) = match opened {
            None => (None, None),
            Some((file, marks)) => (Some(durable::words(&layout, &marks)?), Some(file)),
        };
        let word = |zone: u32| words.as_ref().map_or_else(|| new(zone), |words| words[zone as usize]);
        let table = Table::new(layout, word).ok_or_else(|| {
            made.iter().for_each(MadeFile::remove);
            SetupError::NoMemory(layout.zones)
        })?;
        // After a crash, the state of one zone may be older than the last flush and that of another
        // newer. So more zones than allowed can be active. They stay writable; empty zones are not
        // until enough of them are full or reset.
        let active = (0..layout.zones).filter(|&zone| table.look(zone).condition() == ZoneCondition::Closed);
        let active = active.count() as u32;
        if layout.max_active != 0 && active > layout.max_active {
            tracing::warn!("{active} zones are partly written; zone_max_active is {}", layout.max_active);
        }
        let durable = (file.is_some() || geometry.volatile_cache).then(|| Durable::new(&table, file));
        let inner = Inner {
            table,
            backing,
            bad,
            stores: config.stores,
            read_only: geometry.read_only,
            full_at_first: config.zone_full,
            queues: Queues::default(),
            durable,
            unsynced: Mutex::default(),
            all_zones: Mutex::default(),
            work_queue: WorkQueue::new("zones"),
            syncer: WorkQueue::new("zones-sync"),
            ops: OpCounts::default(),
            zone_ops: Counters::default(),
        };
        let zones = Self { inner: Arc::new(inner), made };
        // The last flush of a server may come when no thread can be started any more.
        if zones.inner.durable.is_some() {
            zones.inner.start_threads().map_err(|error| {
                zones.made.iter().for_each(MadeFile::remove);
                SetupError::Thread(error)
            })?;
        }
        Ok(zones)
    }

    /// Returns the state file if it is new. The caller removes it if creating the device fails.
    pub const fn made(&self) -> Option<&MadeFile> {
        self.made.as_ref()
    }

    /// Sets the sequential zone with byte `offset` read-only, keeping its data. A zone that is
    /// read-only already is reset to empty. As `zone_readonly` of `null_blk`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::ZoneCondition`] for a conventional zone, [`Error::ReadOnly`]
    /// for a read-only device, and the device's errors.
    pub fn set_read_only(&self, offset: u64) -> Result<()> {
        self.count_error(self.inner.set_condition(offset, ZoneCondition::ReadOnly))
    }

    /// Sets the sequential zone with byte `offset` offline. A zone that is offline already is reset
    /// to empty. As `zone_offline` of `null_blk`.
    ///
    /// # Errors
    /// Those of [`set_read_only`](Self::set_read_only).
    pub fn set_offline(&self, offset: u64) -> Result<()> {
        self.count_error(self.inner.set_condition(offset, ZoneCondition::Offline))
    }

    /// Returns the number of zones per condition, and the operation counters.
    pub fn counts(&self) -> ZoneCounts {
        let Inner { table, ops, zone_ops, .. } = &*self.inner;
        let mut counts = ZoneCounts {
            ops: ops.snapshot(),
            opens: zone_ops.get(counts::OPENS),
            closes: zone_ops.get(counts::CLOSES),
            finishes: zone_ops.get(counts::FINISHES),
            resets: zone_ops.get(counts::RESETS),
            implicit_closes: table.implicit_closes(),
            ..ZoneCounts::default()
        };
        for zone in 0..table.layout.zones {
            counts.add(table.look(zone).condition());
        }
        counts
    }

    /// Cuts the power of `power`, a device below these zones. Waits for requests in flight.
    /// Requests that wait for a zone fail with [`Error::Gone`].
    ///
    /// Afterwards the zones are as after a restart: open zones are closed, and each write pointer
    /// is between its last flushed and its last written position, chosen by `seed`. All data below
    /// it exists.
    ///
    /// # Errors
    /// The device's errors. Data kept before the error survives. If the state file cannot be
    /// written after an earlier failed write, nothing is cut.
    pub fn power_cut(&self, power: &power::Power, seed: u64) -> Result<power::Cut> {
        self.inner.power_cut(power, seed)
    }

    /// Resets all zones to their state at the creation of the device, and all data to zeroes.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], and the device's errors.
    pub fn wipe(&self) -> Result<()> {
        self.inner.wipe()
    }

    fn count_error<T>(&self, outcome: Result<T>) -> Result<T> {
        if outcome.is_err() {
            self.inner.ops.error();
        }
        outcome
    }
}

/// Returns the state of a zone of a new device.
fn fresh(layout: &Layout, full: bool, zone: u32) -> Word {
    if !layout.is_sequential(zone) {
        Word::new(ZoneCondition::NotWritePointer, 0)
    } else if full {
        Word::new(ZoneCondition::Full, layout.capacity(zone))
    } else {
        Word::new(ZoneCondition::Empty, 0)
    }
}

impl Inner {
    /// Checks the range and permission of a request.
    #[inline]
    fn check(&self, request: &Request) -> Result<()> {
        let layout = &self.table.layout;
        request.check_place(layout.size, layout.block)?;
        if self.read_only && !matches!(request.op, Op::Read | Op::Flush) {
            return Err(Error::ReadOnly);
        }
        Ok(())
    }

    /// Returns the sequential zone of a write, or `None` for conventional zones.
    #[inline]
    fn written_zone(&self, request: &Request) -> Result<Option<u32>> {
        let layout = &self.table.layout;
        let first = layout.zone_of(request.offset);
        let last = layout.zone_of(request.offset + request.len - 1);
        match layout.is_sequential(last) {
            false => Ok(None),
            true if first == last => Ok(Some(last)),
            true => Err(Error::ZoneBoundary),
        }
    }

    /// Returns the sequential zone of an append.
    fn appended_zone(&self, offset: u64, len: u64) -> Result<u32> {
        let layout = &self.table.layout;
        if layout.max_append == 0 {
            return Err(Error::Unsupported);
        }
        if len == 0 || !len.is_multiple_of(u64::from(layout.block)) {
            return Err(Error::Misaligned);
        }
        // Checked before the zone, as in the kernel's block layer.
        if len > u64::from(layout.max_append) {
            return Err(Error::OutOfRange);
        }
        self.zone_at(offset)
    }

    #[inline]
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        self.check(request)?;
        match request.op {
            Op::Read => match buffer {
                Buffer::Read(out) => self.try_read(request, out),
                _ => Err(Error::Misaligned),
            },
            Op::Write | Op::WriteZeroes => {
                let Some(zone) = self.written_zone(request)? else {
                    return self.backing.try_io(request, buffer);
                };
                let data = if let Buffer::Write(data) = buffer { data } else { &[] };
                let wrote = self.try_write(zone, Place::At(request.offset), *request, data)?;
                Ok(wrote.map_or(Tried::WouldBlock, |_| Tried::Done))
            }
            Op::Discard => Ok(Tried::Done),
            Op::Flush => self.try_flush(request),
        }
    }

    fn submit(self: &Arc<Self>, request: Request, buffer: IoBuf, done: Completion) {
        let zone = match self.check(&request) {
            Ok(()) if matches!(request.op, Op::Write | Op::WriteZeroes) => self.written_zone(&request),
            checked => checked.map(|()| None),
        };
        let zone = match zone {
            Ok(zone) => zone,
            Err(error) => {
                self.ops.error();
                return done.complete(Err(error), buffer);
            }
        };
        match (request.op, zone) {
            (Op::Read, _) => self.submit_read(request, buffer, done),
            (Op::Write | Op::WriteZeroes, Some(zone)) => {
                let place = Place::At(request.offset);
                self.submit_write(Write { zone, place, request, buffer, done: WriteCompletion::Io(done) });
            }
            (Op::Discard, _) => {
                self.ops.answered(&request, &Ok(()));
                done.complete(Ok(()), buffer);
            }
            (Op::Flush, _) if self.durable.is_some() => self.submit_flush(request, buffer, done),
            _ => {
                let inner = Arc::clone(self);
                let done = Completion::new(move |outcome, buffer| {
                    inner.ops.answered(&request, &outcome);
                    done.complete(outcome, buffer);
                });
                self.backing.submit(request, buffer, done);
            }
        }
    }

    fn submit_flush(self: &Arc<Self>, request: Request, buffer: IoBuf, done: Completion) {
        let inner = Arc::clone(self);
        self.sync_later(move |outcome| {
            inner.ops.answered(&request, &outcome);
            done.complete(outcome, buffer);
        });
    }

    /// Starts the threads that submitted requests may need.
    fn start_threads(&self) -> io::Result<()> {
        self.work_queue.start()?;
        if self.durable.is_some() { self.syncer.start() } else { Ok(()) }
    }
}

impl Device for Zones {
    fn geometry(&self) -> Geometry {
        let below = self.inner.backing.geometry();
        Geometry {
            size: self.inner.table.layout.size,
            discard_granularity: 0,
            // The data is meaningless without the state of the zones.
            padding: 0,
            volatile_media: below.volatile_media || !self.inner.is_recorded(),
            volatile_cache: below.volatile_cache || self.inner.is_recorded(),
            zones: Some(self.inner.table.layout.geometry()),
            ..below
        }
    }

    #[inline]
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        let outcome = self.inner.try_io(request, buffer);
        self.inner.ops.tried(request, &outcome);
        outcome
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.inner.submit(request, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.inner.extents(offset, len, row)
    }

    fn prefetch(&self, offset: u64, len: u64) {
        self.inner.backing.prefetch(offset, len);
    }

    fn zoned(&self) -> Option<&dyn Zoned> {
        Some(self)
    }
}

impl Zoned for Zones {
    fn report(&self, offset: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()> {
        self.inner.report(offset, row)
    }

    fn zone_op(&self, op: ZoneOp, offset: u64) -> Result<()> {
        self.count_error(self.inner.zone_op(op, offset))
    }

    fn reset_all(&self) -> Result<()> {
        self.count_error(self.inner.reset_all())
    }

    fn try_append(&self, offset: u64, data: &[u8], flags: Flags) -> Result<Option<u64>> {
        let len = data.len() as u64;
        let request = Request::write(offset, len).with(flags);
        let zone = self.inner.appended_zone(offset, len);
        let outcome = zone.and_then(|zone| self.inner.try_write(zone, Place::Append, request, data));
        if outcome != Ok(None) {
            self.inner.ops.appended(len, &outcome);
        }
        outcome
    }

    fn submit_append(&self, offset: u64, data: IoBuf, flags: Flags, done: AppendCompletion) {
        let len = data.len() as u64;
        let request = Request::write(offset, len).with(flags);
        let done = AppendDone::new(done);
        match self.inner.appended_zone(offset, len) {
            Ok(zone) => {
                let done = WriteCompletion::Append(done);
                self.inner.submit_write(Write { zone, place: Place::Append, request, buffer: data, done });
            }
            Err(error) => {
                self.inner.ops.error();
                done.complete(Err(error));
            }
        }
    }
}

impl Drop for Zones {
    fn drop(&mut self) {
        if self.inner.is_recorded()
            && let Err(error) = self.inner.sync()
        {
            tracing::warn!("the last flush of a zoned device failed: {error}");
        }
        // Requests in flight below still hold `inner`. Requests that wait for them fail with
        // "gone".
        self.inner.work_queue.stop();
        self.inner.syncer.stop();
    }
}

impl fmt::Debug for Zones {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Zones({:?})", self.inner.table.layout)
    }
}
