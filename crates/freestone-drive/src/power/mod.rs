//! Simulated power loss over any device, reproducible from a seed, and a log of all writes.
//!
//! [`Power`] keeps unflushed writes in memory like the volatile cache of a drive. Each write that
//! is not yet durable adds a version of its blocks. A flush writes the newest versions to the
//! device below and flushes that. A write with FUA goes below at once, and so does a range of
//! zeroes of more than 4096 blocks.
//!
//! [`Power::cut`] cuts the power. Each unit of [`Config::unit`] bytes then has its content below,
//! or its content after one of the unflushed writes. A hash of the seed and the unit's number
//! decides, independently per unit. No write to a unit is torn.
//!
//! The cache is bounded. A full cache writes its oldest blocks below, together with their
//! neighbours. A cut cannot lose those any more; a drive may also write its cache at any time. If a
//! part of a unit was written below, a cut does not lose equally old writes to the rest of the
//! unit.
//!
//! Discards become exact zeroes. If the device below frees nothing, or writes zeroes slowly, a
//! discard does nothing. A failed write below keeps its blocks unflushed: the flush fails, and the
//! next one tries again.
//!
//! [`Config::record`] logs everything in dm-log-writes' format: see [`log`].

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
pub use countdown::After;
use drain::PowerShared;
use events::EventCounter;
use freestone_core::device::{
    self, Buffer, Completion, Device, Error as DeviceError, Extent, Geometry, IoBuf, Request, Result, Tried,
};
use freestone_core::sync::{
    mpsc,
    thread::{self, JoinHandle},
};
use record::Recorder;

/// Default of [`Config::capacity`] in bytes.
pub const CAPACITY_DEFAULT_BYTES: u64 = 64 << 20;

/// Largest [`Config::unit`] in bytes.
pub const UNIT_MAX_BYTES: u32 = 64 << 10;

/// Configuration of a [`Power`].
#[derive(Debug, Default)]
pub struct Config {
    /// Maximum unflushed data in bytes; 0 for [`CAPACITY_DEFAULT_BYTES`]. Any capacity holds one
    /// unit. A block of zeroes counts as 64 bytes.
    pub capacity: u64,
    /// Unit that a cut does not tear, in bytes: a power of two from the device's logical block to
    /// [`UNIT_MAX_BYTES`]. 0 for the physical block, at most [`UNIT_MAX_BYTES`].
    pub unit: u32,
    /// Log for all writes, discards and flushes.
    pub record: Option<log::Writer>,
}

/// Result of a power cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Seed of the cut.
    pub seed: u64,
    /// Unflushed units that ended with the content of an unflushed write.
    pub kept_blocks: u64,
    /// Unflushed units that ended with their content below.
    pub lost_blocks: u64,
}

/// Point in a recording.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Point {
    /// After this many entries of the log; 0 is the start of the recording.
    Entry(u64),
    /// At the first mark with this text.
    Mark(String),
}

/// Result of a visit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Visited {
    /// Entries before the point, including the mark of a [`Point::Mark`].
    pub entries: u64,
    /// Result of the power cut at the point, if one was requested.
    pub cut: Option<log::CutPoint>,
}

/// Status of a recording.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recording {
    /// Entries in the file.
    pub entries: u64,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Reason why the recording stopped, if it did. Earlier entries stay valid.
    pub stopped: Option<String>,
}

/// Errors from setting a mark or visiting a point.
#[derive(Debug, Error)]
pub enum RecordError {
    /// The device has no recording.
    #[error("nothing is recorded: the device was made without a file to record to")]
    NotRecording,
    /// The recording has stopped.
    #[error("the recording has stopped: {0}")]
    Stopped(String),
    /// The text cannot be a mark.
    #[error("a mark is text of 1 to {max} bytes without NUL, and not \"{beginning}\"", beginning = log::BEGINNING)]
    BadMark {
        /// Longest mark in bytes.
        max: usize,
    },
    /// The log failed.
    #[error(transparent)]
    Log(#[from] log::Error),
    /// Resetting the device below failed.
    #[error("the device could not be reset: {0}")]
    Device(#[from] device::Error),
    /// A visit failed after it started: the device is partly restored.
    #[error(
        "the power stays off, since the device is only partly restored: {0}; visit a point again, or reset the device"
    )]
    HalfSetBack(Box<RecordError>),
}

/// Device that keeps unflushed writes in memory. See the [module](self).
///
/// Dropping it is a clean shutdown: it writes all unflushed data below, flushes, and waits for
/// that. It does not wait inside one of its own completions.
pub struct Power {
    shared: Arc<PowerShared>,
    worker: Option<JoinHandle<()>>,
}

impl Power {
    /// Wraps `inner`, which must not be used directly from now on.
    ///
    /// # Errors
    /// The device below has zones (the zones layer must lie on top), or `unit` is invalid. The
    /// log's header could not be written, or a thread could not be started.
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

    /// Returns how many bytes of the capacity are in use.
    pub fn unflushed_bytes(&self) -> u64 {
        self.shared.cache.used()
    }

    /// Returns the unit that a cut does not tear, in bytes.
    pub fn unit(&self) -> u64 {
        self.shared.cache.unit_bytes()
    }

    /// Writes unflushed data of a range to the device below, so that it survives the next cut.
    /// Blocks.
    ///
    /// # Errors
    /// The range is invalid, the device below failed, or [`Gone`](DeviceError::Gone) while the
    /// power is off.
    pub fn keep(&self, offset: u64, len: u64) -> Result<()> {
        Request::write(offset, len).check_place(self.geometry().size, self.geometry().logical_block)?;
        let (sender, receiver) = mpsc::sync_channel(1);
        let done = Completion::new(move |outcome, _| {
            // The receiver waits below.
            let _ = sender.send(outcome);
        });
        self.shared.write_out(self.shared.cache.blocks(offset, len), done);
        receiver.recv().unwrap_or(Err(DeviceError::Gone))
    }

    /// Cuts the power, and returns after the simulated reboot. Blocks until the device below has
    /// completed its requests.
    ///
    /// Waiting requests fail with [`Gone`](DeviceError::Gone), and so do new ones until the power
    /// is back. The same requests and seed leave the same content.
    ///
    /// # Errors
    /// A block that should have survived could not be written and has its old content, or the
    /// device below could not be flushed. [`Gone`](DeviceError::Gone) if the device below completed
    /// nothing for 10 s; nothing was lost. The power is back in these cases.
    /// [`Media`](DeviceError::Media) if the device is [partly restored](Self::is_half_set_back).
    pub fn cut(&self, seed: u64) -> Result<Cut> {
        self.shared.cut(seed)
    }

    /// Switches the power off after a number of further writes or flushes.
    ///
    /// Later requests do not complete. `then` runs once, on a thread that completes requests, so it
    /// must not wait. It must have another thread [`cut`](Self::cut) the power, which brings the
    /// device back. An earlier cut or another call cancels the countdown.
    ///
    /// # Errors
    /// [`Gone`](DeviceError::Gone) if the power is just going off.
    pub fn cut_after(&self, after: After, then: impl FnOnce() + Send + 'static) -> Result<()> {
        self.shared.countdown.begin(after, Box::new(then))
    }

    /// Returns true if a visit failed midway, and no visit or reset has succeeded since.
    pub fn is_half_set_back(&self) -> bool {
        self.shared.countdown.is_half_set_back()
    }

    /// Returns the remaining writes or flushes of the countdown.
    pub fn cuts_after(&self) -> Option<After> {
        self.shared.countdown.left()
    }

    /// Fails the requests held by an elapsed countdown with [`Gone`](DeviceError::Gone). Later
    /// requests fail, too, until the power is cut or [`keep_on`](Self::keep_on) is called.
    pub fn let_go(&self) {
        self.shared.let_go();
    }

    /// Cancels the countdown or the power-off that it caused. Held requests continue.
    pub fn keep_on(&self) {
        self.shared.stop_counting();
    }

    /// Drops all unflushed data, and calls `below` to reset the device below to its content at the
    /// start of the recording. The recording continues.
    ///
    /// A reset is not a power loss: it first finishes waiting requests, and holds new ones.
    ///
    /// # Errors
    /// Those of `below`; [`Gone`](DeviceError::Gone) as for a [`cut`](Self::cut).
    pub fn reset(&self, below: &dyn Fn() -> Result<()>) -> Result<()> {
        self.shared.reset(below)
    }

    /// Adds a mark to the log, after all completed requests, and waits until it is durable.
    ///
    /// Returns the number of entries including the mark: [`Point::Entry`] with this number is the
    /// same point as [`Point::Mark`]. `replay-log` numbers entries from 0.
    ///
    /// # Errors
    /// Every [`RecordError`] except those of the device.
    pub fn mark(&self, text: &str) -> std::result::Result<u64, RecordError> {
        self.shared.cache.record.as_ref().ok_or(RecordError::NotRecording)?.mark(text)
    }

    /// Returns the status of the recording, if there is one.
    pub fn recording(&self) -> Option<Recording> {
        self.shared.cache.record.as_ref().map(Recorder::status)
    }

    /// Restores the device to its state at `point`, as after a reboot there. Recording stops; the
    /// log stays for further visits.
    ///
    /// Unflushed data is dropped, `reset` must reset the device below to its content at the start
    /// of the recording, and the log is replayed. `cut` is the seed of a power cut at the point,
    /// which decides on the writes since the last flush.
    ///
    /// # Errors
    /// The point is not in the log, or the log is damaged before it; nothing was done.
    /// [`RecordError::HalfSetBack`] if `reset` or the replay failed. The power then stays off, and
    /// requests fail with [`Gone`](DeviceError::Gone), until a visit or a [`reset`](Self::reset)
    /// succeeds.
    pub fn visit(
        &self,
        point: &Point,
        cut: Option<u64>,
        reset: &dyn Fn() -> Result<()>,
    ) -> std::result::Result<Visited, RecordError> {
        self.shared.visit(point, cut, reset)
    }
}

impl Device for Power {
    fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        if self.shared.countdown.runs() {
            return self.shared.try_counted(request, buffer);
        }
        self.shared.try_io(request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        if self.shared.countdown.runs() {
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
        self.shared.let_go();
        let (sender, receiver) = mpsc::sync_channel(1);
        let done = Completion::new(move |outcome, _| {
            // The receiver is not read if this thread cannot wait.
            let _ = sender.send(outcome);
        });
        self.shared.submit(Request::flush(), IoBuf::empty(), done);
        let worker = self.worker.take();
        // This thread may be the one that must complete the flush.
        let can_wait = !completion::is_inside();
        if can_wait && let Ok(Err(error)) = receiver.recv() {
            tracing::error!(%error, "unflushed writes were lost when the device was closed");
        }
        self.shared.stop_worker();
        if let Some(worker) = worker.filter(|_| can_wait) {
            // The panic hook reports a panic of that thread.
            let _ = worker.join();
            // A late completion may keep `shared` alive a moment longer.
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
