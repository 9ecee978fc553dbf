//! Requests that the library has: how long it may take with each, how they end.
//!
//! A request that is not answered in time is answered for the library, which keeps the buffer until it
//! calls back. So a cluster that hangs holds up no user of the device, and nothing is freed that the
//! library may still write to.
//!
//! Lock order: `state` is the only lock, held for a few instructions, never over a call of the library, a
//! completion or a log line.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::PoisonError;
use std::time::Duration;

use freestone_core::client_log;
use freestone_core::device::{Error, Geometry, IoBuf, Op};
use freestone_core::log_limit::LogLimit;
use freestone_core::sync::{AtomicU64, Condvar, Instant, Mutex, Ordering};
use freestone_core::timer;

use crate::error::{Errno, of_request, reason};
use crate::job::{Job, Piece};
use crate::librbd::Image;

/// Memory of requests that were given up and that the library still has, in bytes: with more, new ones
/// fail at once.
const MAX_GIVEN_UP_BYTES: u64 = 256 << 20;
/// What one of them counts for beside its data.
const REQUEST_BYTES: u64 = 4096;

thread_local! {
    /// This thread is the library's, which called back, or the timer's.
    static ANSWERS: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is one that answers requests: it must not wait for the library.
pub fn answers() -> bool {
    ANSWERS.get()
}

/// Runs what answers requests. A completion that panics ends its request, not the device.
fn answering(run: impl FnOnce()) {
    let outer = ANSWERS.replace(true);
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
    ANSWERS.set(outer);
}

/// What a piece counts for that was given up.
fn cost(piece: &Piece) -> u64 {
    let data = matches!(piece.op, Op::Read | Op::Write);
    REQUEST_BYTES + if data { piece.len } else { 0 }
}

/// A piece, as the log calls it.
fn told(piece: &Piece) -> String {
    let Piece { op, offset, len, .. } = piece;
    match op {
        Op::Read => format!("a read of {len} bytes at {offset}"),
        Op::Write => format!("a write of {len} bytes at {offset}"),
        Op::Discard => format!("a discard of {len} bytes at {offset}"),
        Op::WriteZeroes => format!("a write of {len} zeroes at {offset}"),
        Op::Flush => "a flush".into(),
    }
}

/// An image with its requests.
pub struct Shared {
    /// What the log calls the device.
    name: String,
    timeout: Duration,
    /// All but the size stays as it is.
    geometry: Geometry,
    /// Of the device; it never becomes less.
    size: AtomicU64,
    /// Bytes of the image as of the last look.
    image_size: AtomicU64,
    state: Mutex<State>,
    /// The library has called back for all that it was asked.
    idle: Condvar,
    log: LogLimit<Errno>,
}

/// A request with the piece that the library has, and until when it has time for that.
struct Begun {
    job: Job,
    piece: Piece,
    deadline: Instant,
}

struct State {
    /// None once the device ends.
    image: Option<Arc<Image>>,
    /// What is not answered, by number: the oldest first, whose deadline is the next.
    jobs: BTreeMap<u64, Begun>,
    /// How many pieces were begun.
    begun: u64,
    /// Pieces that the library has not called back for, given up or not.
    inside: u64,
    /// Bytes of those that were given up.
    given_up: u64,
    /// A timer is set for the oldest.
    timer: bool,
    last_error: Option<String>,
}

impl Shared {
    /// Of an image that was just opened.
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
            begun: 0,
            inside: 0,
            given_up: 0,
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

    /// As of now.
    pub fn geometry(&self) -> Geometry {
        Geometry { size: self.size.load(Ordering::SeqCst), ..self.geometry }
    }

    /// Bytes of the image as of the last look.
    pub fn image_size(&self) -> u64 {
        self.image_size.load(Ordering::SeqCst)
    }

    /// The image has this size now. The device grows with it where both sizes are whole blocks.
    pub fn resized(&self, size: u64) {
        let before = self.image_size.swap(size, Ordering::SeqCst);
        let block = u64::from(self.geometry.logical_block);
        if size > before && self.geometry.padding == 0 && size.is_multiple_of(block) {
            self.size.fetch_max(size, Ordering::SeqCst);
        } else if size != before {
            tracing::warn!(
                "{}: the image has {size} bytes, and had {before}; the device keeps its size, and what lies behind the image fails",
                self.name
            );
        }
    }

    /// What went wrong last.
    pub fn last_error(&self) -> Option<String> {
        self.state.lock().last_error.clone()
    }

    /// Something went wrong: it is kept, and logged now and then.
    pub fn note(&self, what: &str, errno: Errno) {
        let why = reason(errno);
        if let Some(held_back) = self.log.line(errno) {
            tracing::warn!("{}: {what}: {why}{held_back}", self.name);
        }
        self.state.lock().last_error = Some(format!("{what}: {why}"));
    }

    /// Takes a request: has the library do its next piece, or answers.
    pub fn go_on(self: &Arc<Self>, mut job: Job, mut buffer: IoBuf) {
        let (size, block) = (self.image_size(), u64::from(self.geometry.logical_block));
        if job.request.offset + job.request.len > size.next_multiple_of(block) {
            // The image became smaller.
            return job.finish(Err(Error::Media), buffer);
        }
        let Some(piece) = job.next(size, &mut buffer) else {
            return job.finish(Ok(()), buffer);
        };
        let deadline = Instant::now() + self.timeout;
        let begun = {
            let mut state = self.state.lock();
            match state.image.clone() {
                None => Err((job, Error::Gone)),
                Some(_) if state.given_up >= MAX_GIVEN_UP_BYTES => Err((job, Error::Media)),
                Some(image) => {
                    state.begun += 1;
                    state.inside += 1;
                    let number = state.begun;
                    state.jobs.insert(number, Begun { job, piece, deadline });
                    let timer = (!std::mem::replace(&mut state.timer, true)).then_some(deadline);
                    Ok((image, number, timer))
                }
            }
        };
        match begun {
            Err((job, error)) => job.finish(Err(error), buffer),
            Ok((image, number, timer)) => {
                if let Some(when) = timer {
                    self.look_at(when);
                }
                let shared = Arc::clone(self);
                let done = move |result, buffer| shared.called_back(number, &piece, result, buffer);
                image.begin(piece, buffer, Box::new(done));
            }
        }
    }

    /// The library is done with a piece.
    fn called_back(
        self: &Arc<Self>,
        number: u64,
        piece: &Piece,
        result: std::result::Result<u64, Errno>,
        buffer: IoBuf,
    ) {
        answering(|| {
            let begun = {
                let mut state = self.state.lock();
                let begun = state.jobs.remove(&number);
                if begun.is_none() {
                    state.given_up -= cost(piece);
                }
                begun
            };
            // None: it was answered before.
            let Some(Begun { mut job, .. }) = begun else { return };
            match result.map_err(|errno| (of_request(errno), errno)) {
                Ok(bytes) => match job.did(piece, bytes) {
                    Ok(()) => self.go_on(job, buffer),
                    Err(error) => job.finish(Err(error), buffer),
                },
                Err((error, errno)) => {
                    self.note(&told(piece), errno);
                    job.finish(Err(error), buffer);
                }
            }
        });
        let mut state = self.state.lock();
        state.inside -= 1;
        if state.inside == 0 {
            self.idle.notify_all();
        }
    }

    /// Looks at the requests then.
    fn look_at(self: &Arc<Self>, when: Instant) {
        let shared = Arc::downgrade(self);
        let look = move || {
            if let Some(shared) = shared.upgrade() {
                shared.expire(Instant::now());
            }
        };
        if let Err(error) = timer::at(when, look) {
            // It was started when the device was.
            client_log!(warn, "{}: no timer: requests may wait longer than they should: {error}", self.name);
        }
    }

    /// Answers what the library has had for too long.
    fn expire(self: &Arc<Self>, now: Instant) {
        let mut late = Vec::new();
        let next = {
            let mut state = self.state.lock();
            while let Some(entry) = state.jobs.first_entry()
                && entry.get().deadline <= now
            {
                late.push(entry.remove());
            }
            state.given_up += late.iter().map(|begun| cost(&begun.piece)).sum::<u64>();
            let next = state.jobs.first_key_value().map(|(_, begun)| begun.deadline);
            state.timer = next.is_some();
            next
        };
        if let Some(when) = next {
            self.look_at(when);
        }
        for Begun { job, piece, .. } in late {
            self.note(&told(&piece), libc::ETIMEDOUT);
            answering(|| job.finish(Err(Error::Media), IoBuf::empty()));
        }
    }

    /// Nothing is begun any more, and what is not answered is answered.
    pub fn stop(&self) {
        let jobs = {
            let mut state = self.state.lock();
            state.image = None;
            let jobs = std::mem::take(&mut state.jobs);
            state.given_up += jobs.values().map(|begun| cost(&begun.piece)).sum::<u64>();
            jobs
        };
        for Begun { job, .. } in jobs.into_values() {
            answering(|| job.finish(Err(Error::Gone), IoBuf::empty()));
        }
    }

    /// Waits, after a [`stop`](Self::stop), until the library has called back for all that it was asked.
    pub fn wait_until_idle(&self) {
        let mut state = self.state.lock();
        while state.inside > 0 {
            state = self.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
