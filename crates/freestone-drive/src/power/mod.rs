//! Layer that simulates power loss of any device, reproducibly from a seed, and records all writes
//! in a log.
//!
//! [`Power`] keeps unflushed writes in memory like the volatile cache of a drive. Each write that
//! is not yet durable adds a version of its blocks. A flush writes the newest versions to the
//! device under this layer and then flushes that device. A write with FUA bypasses the cache, and
//! so does a range of zeroes of more than 4096 blocks.
//!
//! [`Power::cut`] cuts the power. Each unit of [`Config::unit`] bytes then has its content in the
//! device under this layer, or its content after one of the unflushed writes. A hash of the seed
//! and the unit's number chooses, independently per unit. No write to a unit is torn.
//!
//! The cache is bounded. A full cache writes its oldest blocks to the device under this layer,
//! together with adjacent blocks. A cut cannot lose these blocks any more, as with a real drive,
//! which may also write its cache at any time. If a part of a unit was written, a cut does not lose
//! equally old writes to the rest of the unit.
//!
//! Discards become write zeroes of exactly the same range. If the device under this layer frees
//! nothing, or writes zeroes slowly, a discard does nothing. If a write of cached blocks fails, the
//! blocks stay unflushed: the flush fails, and the next one tries again.
//!
//! [`Config::record`] logs all writes, discards and flushes in the format of dm-log-writes: see
//! [`log`].

mod cache;
mod choice;
mod completion;
mod countdown;
mod counted;
mod drain;
mod events;
mod io;
pub mod log;
mod queue;
mod record;
mod shard;
mod switch;
mod worker;

use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use cache::Cache;
pub use countdown::CutTrigger;
use drain::PowerShared;
use events::EventCounter;
use freestone_core::device::{
    self, Buffer, Completion, Device, DropObserver, Error as DeviceError, Extent, Geometry, IoBuf, Request,
    Result, TryResult,
};
use freestone_core::sync::{
    mpsc,
    thread::{self, JoinHandle},
};
use record::Recorder;

/// Default value of [`Config::capacity`], the capacity of the volatile cache, in bytes.
pub const CAPACITY_DEFAULT_BYTES: u64 = 64 << 20;

/// Largest value of [`Config::unit`], the size of a unit that a cut does not tear, in bytes.
pub const UNIT_MAX_BYTES: u32 = 64 << 10;

/// Configuration of a [`Power`].
#[derive(Debug, Default)]
pub struct Config {
    /// Maximum amount of unflushed data in bytes; 0 for [`CAPACITY_DEFAULT_BYTES`]. At least one
    /// unit is always cached. A block of zeroes counts as 64 bytes.
    pub capacity: u64,
    /// Size in bytes of a unit, which a cut does not tear: a power of two from the device's logical
    /// block to [`UNIT_MAX_BYTES`]. 0 for the physical block, limited to [`UNIT_MAX_BYTES`].
    pub unit: u32,
    /// Log in which all writes, discards and flushes are recorded, or `None` for no recording.
    pub record: Option<log::Writer>,
}

/// Result of a simulated power cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CutReport {
    /// Seed that chose which writes were lost.
    pub seed: u64,
    /// Number of units with unflushed writes that have the content of one of these writes.
    pub kept_blocks: u64,
    /// Number of units that lost all their unflushed writes.
    pub lost_blocks: u64,
}

/// Point in a recording of writes, to which a device can be restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Point {
    /// After this many entries of the log. 0 is the start of the recording.
    Entry(u64),
    /// After the first mark with this text.
    Mark(String),
}

/// Result of restoring a device to a point of its recording with [`Power::visit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VisitReport {
    /// Number of log entries before the point, including the mark of a [`Point::Mark`].
    pub entries: u64,
    /// Result of the power cut at the point, if one was requested.
    pub cut: Option<log::CutPoint>,
}

/// Status of the recording of a device's writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordingStat {
    /// Number of entries in the log file.
    pub entries: u64,
    /// Size of the log file in bytes.
    pub bytes: u64,
    /// Reason why the recording stopped, or `None` if it is running. Earlier entries stay valid.
    pub stopped: Option<String>,
}

/// Errors from adding a mark to a recording or visiting a point of a recording.
#[derive(Debug, Error)]
pub enum RecordError {
    /// The device has no recording.
    #[error("nothing is recorded: the device was made without a file to record to")]
    NotRecording,
    /// The recording has stopped.
    #[error("the recording has stopped: {0}")]
    Stopped(String),
    /// The text is empty, too long, contains a NUL, or is reserved.
    #[error("a mark is text of 1 to {max} bytes without NUL, and not \"{beginning}\"", beginning = log::RESET_MARK)]
    BadMark {
        /// Maximum length of a mark in bytes.
        max: usize,
    },
    /// Reading or replaying the log failed.
    #[error(transparent)]
    Log(#[from] log::Error),
    /// Resetting the device under this layer failed.
    #[error("the device could not be reset: {0}")]
    Device(#[from] device::Error),
    /// A visit failed after it changed the device, which is now only partly restored.
    #[error(
        "the power stays off, since the device is only partly restored: {0}; visit a point again, or reset the device"
    )]
    HalfSetBack(Box<RecordError>),
}

/// Device with a simulated volatile write cache, whose power can be cut. See the [module](self).
///
/// Dropping the device is a clean shutdown: it writes all unflushed data to the device under this
/// layer, flushes that device, and waits. The drop does not wait if it runs in a completion of the
/// device itself.
pub struct Power {
    shared: Arc<PowerShared>,
    worker: Option<JoinHandle<()>>,
}

impl Power {
    /// Wraps `inner` with a volatile cache. `inner` must not be used directly any more.
    ///
    /// # Errors
    /// `inner` has zones (the zones layer must lie above this layer), or `unit` is invalid. The
    /// header of the log could not be written, or a thread could not be started.
    pub fn new(inner: Arc<dyn Device>, config: Config) -> std::io::Result<Self> {
        let geometry = inner.geometry();
        if geometry.zones.is_some() {
            let why = "the device below has zones: a power cut goes below them";
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, why));
        }
        let unit = match config.unit {
            0 => geometry.physical_block.min(UNIT_MAX_BYTES).max(geometry.logical_block),
            unit => unit,
        };
        if !unit.is_power_of_two() || !(geometry.logical_block..=UNIT_MAX_BYTES).contains(&unit) {
            let (least, most) = (geometry.logical_block, UNIT_MAX_BYTES);
            let why = format!("a unit is a power of two from {least} to {most} bytes, not {unit}");
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, why));
        }
        let capacity = if config.capacity == 0 { CAPACITY_DEFAULT_BYTES } else { config.capacity };
        let events = Arc::new(EventCounter::default());
        let start = |writer| Recorder::start(writer, geometry.logical_block, Arc::clone(&events));
        let record = config.record.map(start).transpose()?;
        let cache = Cache::new(geometry.logical_block, unit, capacity, record);
        let shared = Arc::new(PowerShared::new(inner, cache, events));
        let work = {
            let shared = Arc::clone(&shared);
            move || shared.work()
        };
        let worker = thread::Builder::new().name("freestone-power".into()).spawn(work)?;
        Ok(Self { shared, worker: Some(worker) })
    }

    /// Returns an observer of the end of this layer, when its log is complete.
    pub fn drop_observer(&self) -> DropObserver {
        self.shared.drop_signal.observer()
    }

    /// Returns the number of bytes of the cache's capacity in use.
    pub fn unflushed_bytes(&self) -> u64 {
        self.shared.cache.used()
    }

    /// Returns the size in bytes of a unit, which a cut does not tear.
    pub fn unit(&self) -> u64 {
        self.shared.cache.unit_bytes()
    }

    /// Writes the unflushed data of a range to the device under this layer, so that the data
    /// survives the next cut. Blocks until it is written.
    ///
    /// # Errors
    /// The range is invalid, or a write to the device under this layer failed.
    /// [`Gone`](DeviceError::Gone) while the power is off.
    pub fn keep(&self, offset: u64, len: u64) -> Result<()> {
        Request::write(offset, len).check_range(self.geometry().size, self.geometry().logical_block)?;
        let (sender, receiver) = mpsc::sync_channel(1);
        let done = Completion::new(move |outcome, _| {
            // The receiver exists until this function returns, so sending cannot fail.
            let _ = sender.send(outcome);
        });
        self.shared.write_out(self.shared.cache.blocks(offset, len), done);
        receiver.recv().unwrap_or(Err(DeviceError::Gone))
    }

    /// Cuts the power, and returns after the simulated reboot. Blocks until the device under this
    /// layer has completed the requests in flight.
    ///
    /// Waiting requests fail with [`Gone`](DeviceError::Gone), and so do new ones until the power
    /// is on again. The same sequence of requests and the same seed result in the same content.
    ///
    /// # Errors
    /// A block that should survive could not be written and has its old content, or the device
    /// under this layer could not be flushed. [`Gone`](DeviceError::Gone) if that device completed
    /// nothing for 10 s; nothing was lost. The power is on again in these cases.
    /// [`Media`](DeviceError::Media) if the device is [partly restored](Self::is_partly_restored).
    pub fn cut(&self, seed: u64) -> Result<CutReport> {
        self.shared.cut(seed)
    }

    /// Starts a countdown that switches the power off after a number of further writes or flushes.
    ///
    /// Later requests do not complete. `then` runs once, on a thread that completes requests, so it
    /// must not wait. `then` must make another thread call [`cut`](Self::cut), which switches the
    /// power on again. An earlier cut or another call of this function cancels the countdown.
    ///
    /// # Errors
    /// [`Gone`](DeviceError::Gone) if an earlier countdown or a cut is switching the power off.
    pub fn cut_after(&self, after: CutTrigger, then: impl FnOnce() + Send + 'static) -> Result<()> {
        self.shared.countdown.begin(after, Box::new(then))
    }

    /// Returns true if a [`visit`](Self::visit) failed midway, and no visit or reset has succeeded
    /// since.
    pub fn is_partly_restored(&self) -> bool {
        self.shared.countdown.is_partly_restored()
    }

    /// Returns the remaining number of writes or flushes until the power goes off, or `None`
    /// without a countdown.
    pub fn pending_cut(&self) -> Option<CutTrigger> {
        self.shared.countdown.left()
    }

    /// Fails the requests held since a countdown ended with [`Gone`](DeviceError::Gone). Later
    /// requests fail, too, until [`cut`](Self::cut) or [`cancel_cut`](Self::cancel_cut) is called.
    pub fn fail_held_requests(&self) {
        self.shared.fail_held_requests();
    }

    /// Cancels the countdown, or switches the power on again if the countdown ended. Held requests
    /// continue.
    pub fn cancel_cut(&self) {
        self.shared.stop_counting();
    }

    /// Drops all unflushed data, and calls `below`, which must reset the device under this layer to
    /// its content at the start of the recording. The recording continues.
    ///
    /// A reset is not a power loss: waiting requests finish before it, and new ones run after it.
    ///
    /// # Errors
    /// The errors of `below`. [`Gone`](DeviceError::Gone) if the device under this layer completed
    /// nothing for 10 s; nothing was changed.
    pub fn reset(&self, below: &dyn Fn() -> Result<()>) -> Result<()> {
        self.shared.reset(below)
    }

    /// Adds a mark to the log, after all completed requests, and waits until the mark is durable.
    ///
    /// Returns the number of log entries up to and including the mark: [`Point::Entry`] with this
    /// number is the point of the mark. (`replay-log` numbers entries from 0.)
    ///
    /// # Errors
    /// [`RecordError::NotRecording`], [`RecordError::Stopped`] or [`RecordError::BadMark`].
    pub fn mark(&self, text: &str) -> std::result::Result<u64, RecordError> {
        self.shared.cache.record.as_ref().ok_or(RecordError::NotRecording)?.mark(text)
    }

    /// Returns the status of the recording, or `None` if the device was created without one.
    pub fn recording(&self) -> Option<RecordingStat> {
        self.shared.cache.record.as_ref().map(Recorder::status)
    }

    /// Restores the device to its state at `point` of the recording, as after a reboot. The
    /// recording stops; the log can be used for further visits.
    ///
    /// Unflushed data is dropped, `reset` is called, and the log is replayed. `reset` must reset
    /// the device under this layer to its content at the start of the recording. If `cut` is
    /// `Some`, it is the seed of a power cut at the point, which may lose writes since the last
    /// flush.
    ///
    /// # Errors
    /// The point is not in the log, or the log is damaged before the point; nothing was changed.
    /// [`RecordError::HalfSetBack`] if `reset` or the replay failed. The power then stays off, and
    /// requests fail with [`Gone`](DeviceError::Gone), until a visit or a [`reset`](Self::reset)
    /// succeeds.
    pub fn visit(
        &self,
        point: &Point,
        cut: Option<u64>,
        reset: &dyn Fn() -> Result<()>,
    ) -> std::result::Result<VisitReport, RecordError> {
        self.shared.visit(point, cut, reset)
    }
}

impl Device for Power {
    fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        if self.shared.countdown.is_running() {
            return self.shared.try_counted(request, buffer);
        }
        self.shared.try_io(request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        if self.shared.countdown.is_running() {
            return self.shared.submit_counted(request, buffer, done);
        }
        self.shared.submit(request, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.shared.extents(offset, len, row)
    }

    fn prefetch(&self, offset: u64, len: u64) {
        self.shared.inner.prefetch(offset, len);
    }
}

impl Drop for Power {
    fn drop(&mut self) {
        self.shared.fail_held_requests();
        let (sender, receiver) = mpsc::sync_channel(1);
        let done = Completion::new(move |outcome, _| {
            // Nobody receives the outcome if this thread cannot wait, so an error is ignored.
            let _ = sender.send(outcome);
        });
        self.shared.submit(Request::flush(), IoBuf::empty(), done);
        let worker = self.worker.take();
        // In a completion this thread may be the one that must complete the flush, so waiting would
        // deadlock.
        let can_wait = !completion::is_inside();
        if can_wait && let Ok(Err(error)) = receiver.recv() {
            tracing::error!(%error, "unflushed writes were lost when the device was closed");
        }
        self.shared.stop_worker();
        if let Some(worker) = worker.filter(|_| can_wait) {
            // A panic of the worker was already reported by the panic hook.
            let _ = worker.join();
            // A late completion may still own `shared`, so the log is finished explicitly.
            if let Some(record) = &self.shared.cache.record {
                record.finish();
            }
        }
    }
}

impl fmt::Debug for Power {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Power({} bytes unflushed)", self.unflushed_bytes())
    }
}
