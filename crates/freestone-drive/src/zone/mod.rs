//! Layer that emulates zones over any device: write pointers, conditions, limits, and a lock per
//! zone.
//!
//! [`Zones`] implements the zone model of the kernel's `null_blk`, with the same rules, errors and
//! order of checks. The state of a zone is one word with a lock bit (`table`). Reads take no lock
//! and check the word again afterwards (`requests`).
//!
//! The lock is never held while a thread waits for a device. A write that must wait owns its zone
//! instead, and later writes to the zone are queued. Open and active zones are counted only if they
//! are limited.
//!
//! The durable state of the zones is tracked (`durable`) if the device under this layer has a
//! volatile cache, or there is a state file.
//!
//! The rooms use one another in the order `table`, `durable`, `requests`.

mod config;
mod counts;
mod durable;
mod requests;
mod table;

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

pub use config::{Config, SetupError, ZONE_SIZE_MAX_BYTES, ZONES_MAX};
pub use counts::ZoneCounts;
pub use durable::file::{StateError, is_state_file};

use crate::null::BadBlocks;
use crate::power;
use durable::Durable;
use durable::file::StateFile;
use durable::mark::Mark;
use freestone_core::device::zoned::{AppendCompletion, Zone, ZoneCondition, ZoneOp, Zoned};
use freestone_core::device::{
    Buffer, Completion, Device, DropObserver, DropSignal, Error, Extent, Flags, Geometry, IoBuf, Op,
    OpCounts, Request, Result, TryResult,
};
use freestone_core::percpu::Counters;
use freestone_core::replace::CreatedFile;
use freestone_core::sync::Mutex;
use freestone_core::work_queue::WorkQueue;
use requests::queue::{AppendDone, Queues, Write, WriteCompletion};
use table::layout::Layout;
use table::word::Word;
use table::{Place, Table};

/// Place where the state of the zones (write pointers and conditions) is stored.
pub enum StateLocation<'a> {
    /// In memory only: the zones have their initial state whenever the device is created.
    Volatile,
    /// In the file at this path, which is created if it does not exist. Only one device at a time
    /// can use a file.
    File(&'a Path),
    /// On this device, which must start with a block of zeroes or contain the state of zones with
    /// the same layout. The state needs 4 KiB plus 8 KiB per 510 zones.
    Device(Arc<dyn Device>),
}

/// Device with emulated zones over another device.
///
/// Discards are not supported and succeed without effect. Write zeroes to a sequential zone must
/// start at the write pointer, like a write. Reads may cross zone boundaries, but writes to
/// sequential zones may not.
///
/// With a state file, zones that were open are closed when the device is created again, and a write
/// with [`Flags::FUA`] flushes the whole device. Dropping a device with a state file flushes it.
pub struct Zones {
    inner: Arc<Inner>,
    made: Option<CreatedFile>,
}

/// State of a zoned device. Lock order: `all_zones`; then the lock of a zone, as described in
/// [`table`]; then `unsynced`, the resources, a shard of `queues`, or the lock of `durable`. A
/// thread that waits for an owned zone holds no other lock than `all_zones`.
struct Inner {
    table: Table,
    backing: Arc<dyn Device>,
    bad: Option<Arc<BadBlocks>>,
    /// True if the backing device stores data.
    stores: bool,
    read_only: bool,
    full_at_first: bool,
    queues: Queues,
    /// Durable state of the zones, or `None` if a crash cannot lose any state.
    durable: Option<Durable>,
    unsynced: Mutex<Vec<SyncCallback>>,
    /// Held by operations that own all zones, such as power cuts.
    all_zones: Mutex<()>,
    /// Runs tasks that never wait, such as starting queued writes.
    work_queue: Arc<WorkQueue>,
    /// Runs syncs, which wait for the device and the state file.
    syncer: Arc<WorkQueue>,
    ops: OpCounts,
    zone_ops: Counters<{ counts::COUNTERS }>,
    /// The last field, so that the state of the zones is stored before.
    drop_signal: DropSignal,
}

type SyncCallback = Box<dyn FnOnce(Result<()>) + Send>;

impl Zones {
    /// Creates a zoned device over `backing`. `bad` is the bad blocks layer in `backing`, if there
    /// is one. A write that fails on a bad block advances the write pointer by the transferred
    /// part.
    ///
    /// # Errors
    /// [`SetupError`] if the configuration is invalid, the state cannot be opened, or memory or a
    /// thread is missing.
    pub fn new(
        backing: Arc<dyn Device>,
        config: Config,
        state: StateLocation<'_>,
        bad: Option<Arc<BadBlocks>>,
    ) -> std::result::Result<Self, SetupError> {
        let geometry = backing.geometry();
        let layout = Layout::new(&config, &geometry)?;
        let new = |zone| fresh(&layout, config.zone_full, zone);
        let mark = |zone| Mark::of(new(zone));
        let (opened, made) = match state {
            StateLocation::Volatile => (None, None),
            StateLocation::File(path) => {
                let (opened, made) = StateFile::open(path, &layout, mark)?;
                (Some(opened), made)
            }
            StateLocation::Device(device) => (Some(StateFile::open_on(device, &layout, mark)?), None),
        };
        let (words, file) = match opened {
            None => (None, None),
            Some((file, marks)) => (Some(durable::words(&layout, &marks)?), Some(file)),
        };
        let word = |zone: u32| words.as_ref().map_or_else(|| new(zone), |words| words[zone as usize]);
        let table = Table::new(layout, word).ok_or_else(|| {
            made.iter().for_each(CreatedFile::remove);
            SetupError::NoMemory(layout.zones)
        })?;
        // After a crash, the state of one zone may be older than that of another. So more zones
        // than allowed can be active. These zones stay writable, but empty zones cannot be written
        // until enough active zones are full or reset.
        let active = (0..layout.zones).filter(|&zone| table.load(zone).condition() == ZoneCondition::Closed);
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
            drop_signal: DropSignal::default(),
        };
        let zones = Self { inner: Arc::new(inner), made };
        // The threads are started now, since the last flush of a server may happen when no thread
        // can be started any more.
        if zones.inner.durable.is_some() {
            zones.inner.start_threads().map_err(|error| {
                zones.made.iter().for_each(CreatedFile::remove);
                SetupError::Thread(error)
            })?;
        }
        Ok(zones)
    }

    /// Returns the state file if it was created, else `None`. The caller removes the file if a
    /// later step of creating the device fails.
    pub const fn created_file(&self) -> Option<&CreatedFile> {
        self.made.as_ref()
    }

    /// Makes the sequential zone that contains byte `offset` read-only and keeps its data. If the
    /// zone is already read-only, resets it to empty instead. Same as `zone_readonly` of
    /// `null_blk`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if `offset` is beyond the device, [`Error::ZoneCondition`] for a
    /// conventional zone, [`Error::ReadOnly`] for a read-only device, and errors of the backing
    /// device.
    pub fn set_read_only(&self, offset: u64) -> Result<()> {
        self.count_error(self.inner.set_condition(offset, ZoneCondition::ReadOnly))
    }

    /// Makes the sequential zone that contains byte `offset` offline. If the zone is already
    /// offline, resets it to empty instead. Same as `zone_offline` of `null_blk`.
    pub fn set_offline(&self, offset: u64) -> Result<()> {
        self.count_error(self.inner.set_condition(offset, ZoneCondition::Offline))
    }

    /// Returns an observer of the end of this device, when the state of its zones is stored.
    pub fn drop_observer(&self) -> DropObserver {
        self.inner.drop_signal.observer()
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
            counts.add(table.load(zone).condition());
        }
        counts
    }

    /// Cuts the power of `power`, which must be the power layer under this zoned device. Waits for
    /// requests in flight. Requests that wait for a zone fail with [`Error::Gone`].
    ///
    /// Afterwards the zones are as after a restart: open zones are closed, and `seed` has chosen
    /// each write pointer between its last flushed and its last written position. All data before a
    /// write pointer survives.
    ///
    /// # Errors
    /// Errors of the backing device and of [`Power::cut`](power::Power::cut). If a suspect part of
    /// the state file cannot be rewritten, the power is not cut.
    pub fn power_cut(&self, power: &power::Power, seed: u64) -> Result<power::CutReport> {
        self.inner.power_cut(power, seed)
    }

    /// Resets all zones to their state at the creation of the device, and all data to zeroes.
    ///
    /// # Errors
    /// [`Error::ReadOnly`] for a read-only device, and errors of the backing device.
    pub fn wipe(&self) -> Result<()> {
        self.inner.wipe()
    }

    fn count_error<T>(&self, outcome: Result<T>) -> Result<T> {
        if outcome.is_err() {
            self.inner.ops.count_error();
        }
        outcome
    }
}

/// Returns the initial state word of a zone of a new device. With `full`, sequential zones are
/// full.
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
    /// Checks the range of a request, and that it does not write to a read-only device.
    #[inline]
    fn check(&self, request: &Request) -> Result<()> {
        let layout = &self.table.layout;
        request.check_range(layout.size, layout.block)?;
        if self.read_only && !matches!(request.op, Op::Read | Op::Flush) {
            return Err(Error::ReadOnly);
        }
        Ok(())
    }

    /// Returns the number of the sequential zone of a write, or `None` for conventional zones.
    /// Fails if the write crosses the boundary of a sequential zone.
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

    /// Returns the number of the sequential zone of an append of `len` bytes, or the error if the
    /// append is invalid.
    fn appended_zone(&self, offset: u64, len: u64) -> Result<u32> {
        let layout = &self.table.layout;
        if layout.max_append == 0 {
            return Err(Error::Unsupported);
        }
        if len == 0 || !len.is_multiple_of(u64::from(layout.block)) {
            return Err(Error::Misaligned);
        }
        // The size is checked before the zone, as in the kernel's block layer.
        if len > u64::from(layout.max_append) {
            return Err(Error::OutOfRange);
        }
        self.zone_at(offset)
    }

    #[inline]
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
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
                Ok(wrote.map_or(TryResult::WouldBlock, |_| TryResult::Done))
            }
            Op::Discard => Ok(TryResult::Done),
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
                self.ops.count_error();
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
                self.ops.count_completion(&request, &Ok(()));
                done.complete(Ok(()), buffer);
            }
            (Op::Flush, _) if self.durable.is_some() => self.submit_flush(request, buffer, done),
            _ => {
                let inner = Arc::clone(self);
                let done = Completion::new(move |outcome, buffer| {
                    inner.ops.count_completion(&request, &outcome);
                    done.complete(outcome, buffer);
                });
                self.backing.submit(request, buffer, done);
            }
        }
    }

    fn submit_flush(self: &Arc<Self>, request: Request, buffer: IoBuf, done: Completion) {
        let inner = Arc::clone(self);
        self.sync_later(move |outcome| {
            inner.ops.count_completion(&request, &outcome);
            done.complete(outcome, buffer);
        });
    }

    /// Starts the threads that submitted requests may need, if they are not running.
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
            // A padded last block is not part of the zoned device.
            padding: 0,
            volatile_media: below.volatile_media || !self.inner.is_recorded(),
            volatile_cache: below.volatile_cache || self.inner.is_recorded(),
            zones: Some(self.inner.table.layout.geometry()),
            ..below
        }
    }

    #[inline]
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        let outcome = self.inner.try_io(request, buffer);
        self.inner.ops.count_try(request, &outcome);
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
            self.inner.ops.count_append(len, &outcome);
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
                self.inner.ops.count_error();
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
        // Requests in flight to the backing device still own `inner`. Requests that wait for them
        // fail with [`Error::Gone`].
        self.inner.work_queue.stop();
        self.inner.syncer.stop();
    }
}

impl fmt::Debug for Zones {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Zones({:?})", self.inner.table.layout)
    }
}
