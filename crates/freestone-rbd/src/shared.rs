//! Requests submitted to librbd: deadlines, completion and memory accounting.
//!
//! If librbd does not call back in time, the request fails, and librbd keeps the buffer until it
//! calls back. A hanging cluster therefore blocks no user of the device, and no memory is freed
//! that librbd may still write to.
//!
//! Lock order: `state` is the only lock. The lock is held for a few instructions, never across a
//! librbd call, a completion or a log line.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use freestone_core::client_log;
use freestone_core::device::{Error, Geometry, IoBuf, Op};
use freestone_core::log_limit::LogLimit;
use freestone_core::sync::{AtomicU64, Condvar, Instant, Mutex, Ordering};
use freestone_core::timer;

use crate::error::{Errno, reason, request_error};
use crate::job::{Job, Piece};
use crate::librbd::image::Image;

/// Limit in bytes on the memory of timed-out pieces for which librbd has not called back. At this
/// limit, new requests fail at once with [`Error::Media`].
const MAX_ABANDONED_BYTES: u64 = 256 << 20;
/// Memory in bytes that a piece counts for in addition to its data.
const REQUEST_BYTES: u64 = 4096;

thread_local! {
    /// True while this thread runs completions: a callback thread of librbd, or the timer thread.
    static IS_COMPLETION_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Returns true if this thread is running completions. Such a thread must not wait for librbd.
pub fn is_completion_thread() -> bool {
    IS_COMPLETION_THREAD.get()
}

/// Runs code that completes requests. A panic in a completion is caught, so that the device
/// continues to work.
fn run_completion(run: impl FnOnce()) {
    let outer = IS_COMPLETION_THREAD.replace(true);
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
    IS_COMPLETION_THREAD.set(outer);
}

/// Returns the memory in bytes that a timed-out piece counts for, see [`MAX_ABANDONED_BYTES`].
fn cost(piece: &Piece) -> u64 {
    let data = matches!(piece.op, Op::Read | Op::Write);
    REQUEST_BYTES + if data { piece.len } else { 0 }
}

/// Returns a description of a piece for log lines.
fn describe(piece: &Piece) -> String {
    let Piece { op, offset, len, .. } = piece;
    match op {
        Op::Read => format!("a read of {len} bytes at {offset}"),
        Op::Write => format!("a write of {len} bytes at {offset}"),
        Op::Discard => format!("a discard of {len} bytes at {offset}"),
        Op::WriteZeroes => format!("a write of {len} zeroes at {offset}"),
        Op::Flush => "a flush".into(),
    }
}

/// The state of a device that callers, librbd's callbacks and the timer share: the image and its
/// requests in flight.
pub struct Shared {
    /// Name of the device in log lines.
    name: String,
    timeout: Duration,
    /// Geometry at the time of opening; later only the size changes, see `size`.
    geometry: Geometry,
    /// Size of the device in bytes; never shrinks.
    size: AtomicU64,
    /// Size of the image in bytes at the last check.
    image_size: AtomicU64,
    state: Mutex<State>,
    /// Signalled when `in_library` drops to 0: librbd has called back for every piece.
    idle: Condvar,
    log: LogLimit<Errno>,
}

/// A request in flight: its piece submitted to librbd, and the deadline of the piece.
struct InFlight {
    job: Job,
    piece: Piece,
    deadline: Instant,
}

struct State {
    /// `None` after [`Shared::stop`], when no more requests are submitted.
    image: Option<Arc<Image>>,
    /// Requests in flight by number of submission, and therefore in order of their deadlines.
    jobs: BTreeMap<u64, InFlight>,
    /// Number of pieces submitted so far.
    submitted: u64,
    /// Number of pieces for which librbd has not called back, including timed-out ones.
    in_library: u64,
    /// Memory in bytes of the timed-out pieces for which librbd has not called back.
    abandoned_bytes: u64,
    /// True if a timer is armed for the earliest deadline.
    timer: bool,
    last_error: Option<String>,
}

impl Shared {
    pub fn new(
        name: String,
        image: Arc<Image>,
        image_size: u64,
        geometry: Geometry,
        timeout: Duration,
    ) -> Self {
        let state = State {
            image: Some(image),
            jobs: BTreeMap::new(),
            submitted: 0,
            in_library: 0,
            abandoned_bytes: 0,
            timer: false,
            last_error: None,
        };
        Self {
            name,
            timeout,
            size: AtomicU64::new(geometry.size),
            geometry,
            image_size: AtomicU64::new(image_size),
            state: Mutex::new(state),
            idle: Condvar::new(),
            log: LogLimit::default(),
        }
    }

    pub fn geometry(&self) -> Geometry {
        Geometry { size: self.size.load(Ordering::SeqCst), ..self.geometry }
    }

    /// Returns the size of the image in bytes at the last check.
    pub fn image_size(&self) -> u64 {
        self.image_size.load(Ordering::SeqCst)
    }

    /// Sets the size of the image, in bytes. The device grows with the image if the old and the new
    /// size are multiples of the block size; otherwise the size of the device stays.
    pub fn update_size(&self, size: u64) {
        let before = self.image_size.swap(size, Ordering::SeqCst);
        let block = u64::from(self.geometry.logical_block);
        if size > before && self.geometry.padding == 0 && size.is_multiple_of(block) {
            self.size.fetch_max(size, Ordering::SeqCst);
        } else if size != before {
            tracing::warn!(
                "{}: the image changed from {before} to {size} bytes; the device keeps its size, and requests beyond the image fail",
                self.name
            );
        }
    }

    pub fn last_error(&self) -> Option<String> {
        self.state.lock().last_error.clone()
    }

    /// Records an error as the last error, and logs it rate-limited.
    pub fn record_error(&self, what: &str, errno: Errno) {
        let why = reason(errno);
        if let Some(suppressed) = self.log.admit(errno) {
            tracing::warn!("{}: {what}: {why}{suppressed}", self.name);
        }
        self.state.lock().last_error = Some(format!("{what}: {why}"));
    }

    /// Submits the next piece of a request to librbd, or completes the request if no piece is left.
    pub fn submit_next(self: &Arc<Self>, mut job: Job, mut buffer: IoBuf) {
        let (size, block) = (self.image_size(), u64::from(self.geometry.logical_block));
        if job.request.offset + job.request.len > size.next_multiple_of(block) {
            // The image has shrunk, and the request exceeds its new size.
            return job.finish(Err(Error::Media), buffer);
        }
        let Some(piece) = job.next_piece(size, &mut buffer) else {
            return job.finish(Ok(()), buffer);
        };
        let deadline = Instant::now() + self.timeout;
        let entry = {
            let mut state = self.state.lock();
            match state.image.clone() {
                None => Err((job, Error::Gone)),
                Some(_) if state.abandoned_bytes >= MAX_ABANDONED_BYTES => Err((job, Error::Media)),
                Some(image) => {
                    state.submitted += 1;
                    state.in_library += 1;
                    let number = state.submitted;
                    state.jobs.insert(number, InFlight { job, piece, deadline });
                    let timer = (!std::mem::replace(&mut state.timer, true)).then_some(deadline);
                    Ok((image, number, timer))
                }
            }
        };
        match entry {
            Err((job, error)) => job.finish(Err(error), buffer),
            Ok((image, number, timer)) => {
                if let Some(when) = timer {
                    self.arm_timer(when);
                }
                let shared = Arc::clone(self);
                let done = move |result, buffer| shared.complete_piece(number, &piece, result, buffer);
                image.submit(piece, buffer, Box::new(done));
            }
        }
    }

    /// Called on a librbd thread when librbd has finished a piece.
    fn complete_piece(
        self: &Arc<Self>,
        number: u64,
        piece: &Piece,
        result: std::result::Result<u64, Errno>,
        buffer: IoBuf,
    ) {
        run_completion(|| {
            let entry = {
                let mut state = self.state.lock();
                let entry = state.jobs.remove(&number);
                if entry.is_none() {
                    state.abandoned_bytes -= cost(piece);
                }
                entry
            };
            // The entry is gone if the request has timed out and was completed then.
            let Some(InFlight { mut job, .. }) = entry else { return };
            match result.map_err(|errno| (request_error(errno), errno)) {
                Ok(bytes) => match job.advance(piece, bytes) {
                    Ok(()) => self.submit_next(job, buffer),
                    Err(error) => job.finish(Err(error), buffer),
                },
                Err((error, errno)) => {
                    self.record_error(&describe(piece), errno);
                    job.finish(Err(error), buffer);
                }
            }
        });
        let mut state = self.state.lock();
        state.in_library -= 1;
        if state.in_library == 0 {
            self.idle.notify_all();
        }
    }

    /// Arms the timer for `when`, the deadline of the oldest request.
    fn arm_timer(self: &Arc<Self>, when: Instant) {
        let shared = Arc::downgrade(self);
        let check = move || {
            if let Some(shared) = shared.upgrade() {
                shared.expire(Instant::now());
            }
        };
        if let Err(error) = timer::schedule(when, check) {
            // Not expected: the timer thread was started before the device was created.
            client_log!(
                warn,
                "{}: cannot set a timer: requests may exceed their timeout: {error}",
                self.name
            );
        }
    }

    /// Fails the requests whose deadline is `now` or earlier, with [`Error::Media`].
    fn expire(self: &Arc<Self>, now: Instant) {
        let mut expired = Vec::new();
        let next = {
            let mut state = self.state.lock();
            while let Some(entry) = state.jobs.first_entry()
                && entry.get().deadline <= now
            {
                expired.push(entry.remove());
            }
            state.abandoned_bytes += expired.iter().map(|entry| cost(&entry.piece)).sum::<u64>();
            let next = state.jobs.first_key_value().map(|(_, entry)| entry.deadline);
            state.timer = next.is_some();
            next
        };
        if let Some(when) = next {
            self.arm_timer(when);
        }
        for InFlight { job, piece, .. } in expired {
            self.record_error(&describe(&piece), libc::ETIMEDOUT);
            run_completion(|| job.finish(Err(Error::Media), IoBuf::empty()));
        }
    }

    /// Stops submission and fails all requests in flight with [`Error::Gone`].
    pub fn stop(&self) {
        let jobs = {
            let mut state = self.state.lock();
            state.image = None;
            let jobs = std::mem::take(&mut state.jobs);
            state.abandoned_bytes += jobs.values().map(|entry| cost(&entry.piece)).sum::<u64>();
            jobs
        };
        for InFlight { job, .. } in jobs.into_values() {
            run_completion(|| job.finish(Err(Error::Gone), IoBuf::empty()));
        }
    }

    /// Waits, after [`stop`](Self::stop), until librbd has called back for every piece.
    pub fn wait_until_idle(&self) {
        drop(self.idle.wait_while(self.state.lock(), |state| state.in_library > 0));
    }
}
