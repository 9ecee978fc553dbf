//! Power loss that repeats from a seed, over any device, and a log of every write.
//!
//! A [`Power`] keeps unflushed writes apart from the device below, as the volatile cache of a drive
//! does. Each write that was not made durable leaves a version of each of its blocks in memory. A
//! flush writes the newest below and flushes the device below; a write with FUA goes below at once,
//! and so does a range of zeroes of more than 4096 blocks. When [`Power::cut`] takes the power
//! away, each unit of [`Config::unit`] bytes ends as it was below or as it was after any of the
//! unflushed writes to it, whatever its neighbours do: a hash of the seed and the unit's number
//! decides. No write to a unit is torn.
//!
//! The cache is bounded; when it is full its oldest blocks are written below, with what lies beside
//! them. That only means that a cut cannot take them back: a drive may write its cache whenever it
//! likes. Where a part of a unit went below, a cut takes back nothing of the rest that is as old.
//!
//! Discards become zeroes, for every byte of them; where the device below frees nothing, or writing
//! zeroes is work, a discard does nothing. A failed write below keeps the blocks unflushed: the
//! flush that wanted it is answered with the error, and the next one tries again.
//!
//! With [`Config::record`] everything is logged in dm-log-writes' format: see [`log`].

mod bell;
mod cache;
mod choice;
mod completion;
mod countdown;
mod counted;
mod drain;
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

use bell::Bell;
use cache::Cache;
pub use countdown::After;
use drain::PowerShared;
use freestone_core::device::{
    self, Buffer, Completion, Device, Error as DeviceError, Extent, Geometry, IoBuf, Request, Result, Tried,
};
use freestone_core::sync::{
    mpsc,
    thread::{self, JoinHandle},
};
use record::Recorder;

/// [`Config::capacity`] where none is given, in bytes.
pub const CAPACITY_DEFAULT_BYTES: u64 = 64 << 20;

/// The largest [`Config::unit`] in bytes.
pub const UNIT_MAX_BYTES: u32 = 64 << 10;

/// How a [`Power`] is made.
#[derive(Debug, Default)]
pub struct Config {
    /// Bytes of unflushed data that are kept, 0 for [`CAPACITY_DEFAULT_BYTES`]. One block is kept
    /// with any capacity (a whole unit); a block of zeroes counts 64 bytes.
    pub capacity: u64,
    /// What a cut does not tear: a power of two from the device's logical block to
    /// [`UNIT_MAX_BYTES`]. 0 for its physical block (or [`UNIT_MAX_BYTES`], where that is larger).
    pub unit: u32,
    /// Where every write, discard and flush is recorded.
    pub record: Option<log::Writer>,
}

/// What a cut did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// The seed it was made with.
    pub seed: u64,
    /// Unflushed units that ended as after one of the writes since.
    pub kept_blocks: u64,
    /// Unflushed units that ended as they were before.
    pub lost_blocks: u64,
}

/// A moment of a recording.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Point {
    /// After this many entries of the log; 0 is where the recording began.
    Entry(u64),
    /// At the first mark with this text.
    Mark(String),
}

/// What a visit did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Visited {
    /// Entries before the point.
    pub entries: u64,
    /// Where the power was cut there: what that did.
    pub cut: Option<log::CutPoint>,
}

/// How a recording is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recording {
    /// Entries in the file.
    pub entries: u64,
    /// Bytes of the file.
    pub bytes: u64,
    /// Why nothing is recorded any more, where that is so. What was recorded before stays good.
    pub stopped: Option<String>,
}

/// Why a mark was not set or a point not visited.
#[derive(Debug, Error)]
pub enum RecordError {
    /// There is no log.
    #[error("nothing is recorded: the device was made without a file to record to")]
    NotRecording,
    /// The log ended before.
    #[error("the recording has stopped: {0}")]
    Stopped(String),
    /// The text is no mark.
    #[error("a mark is text of 1 to {max} bytes without NUL, and not \"{beginning}\"", beginning = log::BEGINNING)]
    BadMark {
        /// Longest mark in bytes.
        max: usize,
    },
    /// The log.
    #[error(transparent)]
    Log(#[from] log::Error),
    /// The device below could not be set back.
    #[error("the device could not be set back: {0}")]
    Device(#[from] device::Error),
    /// A visit failed after it began: the device has a part of the content.
    #[error(
        "the power stays off, as the device is half set back: {0}; go to a point again, or reset the device"
    )]
    HalfSetBack(Box<RecordError>),
}

/// Keeps unflushed writes apart from the device below. See the [module](self).
///
/// Dropped, it writes all of them below, flushes, and waits for that: a clean shutdown is no power
/// loss. (Not when it is dropped by one of its own completions, which cannot wait.)
pub struct Power {
    shared: Arc<PowerShared>,
    worker: Option<JoinHandle<()>>,
}

impl Power {
    /// Decorates `inner`, which from now on must be used through this only.
    ///
    /// # Errors
    /// The device below has zones (put the zones on top); its blocks are no multiples of the unit;
    /// the log's head could not be written; no thread was to be had.
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
        let bell = Arc::new(Bell::default());
        let start = |writer| Recorder::start(writer, geometry.logical_block, Arc::clone(&bell));
        let record = config.record.map(start).transpose()?;
        let cache = Cache::new(geometry.logical_block, unit, capacity, record);
        let shared = Arc::new(PowerShared::new(inner, cache, bell));
        let work = {
            let shared = Arc::clone(&shared);
            move || shared.work()
        };
        let worker = thread::Builder::new().name("freestone-power".into()).spawn(work)?;
        Ok(Self { shared, worker: Some(worker) })
    }

    /// Bytes of the capacity that unflushed blocks take.
    pub fn unflushed_bytes(&self) -> u64 {
        self.shared.cache.used()
    }

    /// What a cut does not tear, in bytes.
    pub fn unit(&self) -> u64 {
        self.shared.cache.unit_bytes()
    }

    /// Writes what is unflushed of these bytes below, so that it survives the next cut. Waits for
    /// the device below.
    ///
    /// # Errors
    /// Those of a write to the range; what the device below answers; [`Gone`](DeviceError::Gone)
    /// while the power is off.
    pub fn keep(&self, offset: u64, len: u64) -> Result<()> {
        Request::write(offset, len).check_place(self.geometry().size, self.geometry().logical_block)?;
        let (tell, told) = mpsc::sync_channel(1);
        let done = Completion::new(move |outcome, _| {
            // Waited for below.
            let _ = tell.send(outcome);
        });
        self.shared.settle(self.shared.cache.blocks(offset, len), done);
        told.recv().unwrap_or(Err(DeviceError::Gone))
    }

    /// Cuts the power. Requests that wait are answered [`Gone`](DeviceError::Gone), and so is what
    /// comes before the power is back; what the device below is doing is waited for. Returns when
    /// the device is as after the reboot. The same requests and the same seed leave the same
    /// content.
    ///
    /// # Errors
    /// A block that should have survived could not be written, and is as before, or the device
    /// below could not be flushed; the device is [half set back](Self::is_half_set_back). [`Gone`](DeviceError::Gone): it answered nothing of what it was
    /// doing for 10 s, and nothing was lost. The power is back all the same.
    pub fn cut(&self, seed: u64) -> Result<Cut> {
        self.shared.cut(seed)
    }

    /// Switches the power off by itself after so many more writes or flushes: what comes then is
    /// not answered, and `then` is called once, on a thread that answers requests, which must not
    /// wait: it has somebody else [`cut`](Self::cut) the power, with which the device is back. A
    /// cut before that ends the count, and so does another call of this.
    ///
    /// # Errors
    /// [`Gone`](DeviceError::Gone): the power is just going off.
    pub fn cut_after(&self, after: After, then: impl FnOnce() + Send + 'static) -> Result<()> {
        self.shared.countdown.begin(after, Box::new(then))
    }

    /// Returns true if a visit has failed half way and neither a visit nor a reset has succeeded
    /// since.
    pub fn is_half_set_back(&self) -> bool {
        self.shared.countdown.is_half_set_back()
    }

    /// How many writes or flushes are left until the power goes off by itself.
    pub fn cuts_after(&self) -> Option<After> {
        self.shared.countdown.left()
    }

    /// Answers [`Gone`](DeviceError::Gone) to what is not answered because the power went off by
    /// itself, and to what comes until it is cut or [`keep_on`](Self::keep_on) is called.
    pub fn let_go(&self) {
        self.shared.let_go();
    }

    /// The power does not go off by itself, or not for good: what waits for that goes on.
    pub fn keep_on(&self) {
        self.shared.stop_counting();
    }

    /// Drops all that is unflushed and has `below` wipe the device below, to what it was when the
    /// recording began, where there is one: the recording goes on. This is no loss of power:
    /// requests that wait are finished before, and what comes meanwhile waits for the end of it.
    ///
    /// # Errors
    /// Those of `below`; [`Gone`](DeviceError::Gone) as for a [`cut`](Self::cut).
    pub fn reset(&self, below: &dyn Fn() -> Result<()>) -> Result<()> {
        self.shared.reset(below)
    }

    /// Puts a mark into the log, behind all that was answered. Returns its entry's number, counted
    /// from 0 as `replay-log` does, when it is durable in the file.
    ///
    /// # Errors
    /// All but those of the device.
    pub fn mark(&self, text: &str) -> std::result::Result<u64, RecordError> {
        self.shared.cache.record.as_ref().ok_or(RecordError::NotRecording)?.mark(text)
    }

    /// How the recording is doing, where there is one.
    pub fn recording(&self) -> Option<Recording> {
        self.shared.cache.record.as_ref().map(Recorder::status)
    }

    /// Brings the device to its state at `point`, as after a reboot there: what is unflushed is
    /// dropped, `reset` has to set the device below back to what it was when the recording began,
    /// and the log is replayed. With a seed, the power is cut there: of what was written since the
    /// last flush before, the seed decides. Recording ends, the log stays for more visits.
    ///
    /// # Errors
    /// A point that is not in the log, or a log that is damaged before it, before anything is done.
    /// [`RecordError::HalfSetBack`] of `reset` and of the replay: the power stays off, and requests
    /// are answered [`Gone`](DeviceError::Gone), until a visit or a [`reset`](Self::reset)
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
        let (tell, told) = mpsc::sync_channel(1);
        let done = Completion::new(move |outcome, _| {
            // Nobody listens where nobody can wait.
            let _ = tell.send(outcome);
        });
        self.shared.submit(Request::flush(), IoBuf::empty(), done);
        let worker = self.worker.take();
        // What answers requests may be the thread that has to answer this one.
        let can_wait = !completion::is_inside();
        if can_wait && let Ok(Err(error)) = told.recv() {
            tracing::error!(%error, "unflushed writes were lost when the device was closed");
        }
        self.shared.stop_worker();
        if let Some(worker) = worker.filter(|_| can_wait) {
            // A panic there was reported by its own hook.
            let _ = worker.join();
            // A completion on its way out may hold what is shared a moment longer.
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
