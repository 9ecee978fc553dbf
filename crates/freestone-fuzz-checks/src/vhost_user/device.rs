//! A test device that executes requests in order, and completes them when the check requests it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use freestone::device::zoned::{AppendCompletion, Zone, ZoneOp, Zoned};
use freestone::device::{
    Buffer, Completion, Device, Error, Extent, Flags, Geometry, IoBuf, Op, Request, Result, TryResult,
};
use freestone_testkit::{Model, ModelZoned, Rng, ZonedConfig};
use rustix::event::{EventfdFlags, eventfd};

/// Size of the device in bytes.
pub const SIZE: u64 = 64 << 10;
/// Size of a zone in bytes.
pub const ZONE: u64 = 16 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoMode {
    Inline,
    /// Requests complete inline, with at most this number of bytes per try.
    Partly(u64),
    /// Requests are submitted, and completed at once.
    Later,
    /// Requests are submitted, and held until the check completes them.
    Held,
    /// Every second try is executed as in `Held`, the others inline with at most this number of bytes.
    Mixed(u64),
}

#[derive(Debug, Clone, Copy)]
pub struct DiskConfig {
    pub mode: IoMode,
    pub zoned: bool,
    /// Offset of a bad byte: requests that contain it fail. `None` if no byte is bad.
    pub bad: Option<u64>,
    /// True if some submitted requests are dropped without completion.
    pub forgets: bool,
    /// Seed of the random order of completions.
    pub seed: u64,
}

/// Function that completes a held request, or drops the request if the argument is true.
type HeldCompletion = Box<dyn FnOnce(bool) + Send>;

/// A test device that stores its content in a model device in memory.
pub struct Disk {
    config: DiskConfig,
    inner: Arc<dyn Device>,
    state: Mutex<State>,
    /// Event descriptor that is readable after a request is held.
    submitted: OwnedFd,
}

struct State {
    held: Vec<HeldCompletion>,
    rng: Rng,
    tries: u64,
    /// True if submitted requests complete at once instead of being held.
    at_once: bool,
}

/// Creates a model of a zoned device, with four zones.
pub fn zones() -> ModelZoned {
    ModelZoned::new(ZonedConfig {
        zone_size: ZONE,
        zone_capacity: ZONE - 4096,
        nr_zones: (SIZE / ZONE) as u32,
        conventional: 1,
        max_open: 1,
        max_active: 2,
    })
}

impl Disk {
    pub fn new(config: DiskConfig) -> Self {
        let inner: Arc<dyn Device> =
            if config.zoned { Arc::new(zones()) } else { Arc::new(Model::new(SIZE as usize, 512)) };
        let state = State { held: Vec::new(), rng: Rng::new(config.seed), tries: 0, at_once: false };
        let submitted =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a descriptor is left");
        Self { config, inner, state: Mutex::new(state), submitted }
    }

    pub fn content(&self) -> Vec<u8> {
        let mut bytes = vec![0; SIZE as usize];
        let read = self.inner.try_io(&Request::read(0, SIZE), Buffer::Read(&mut bytes));
        assert_eq!(read, Ok(TryResult::Done));
        bytes
    }

    /// Returns the event descriptor that is readable after a request is held.
    pub fn submitted(&self) -> BorrowedFd<'_> {
        self.submitted.as_fd()
    }

    /// Completes or drops one held request. Returns false if no request is held.
    pub fn release(&self) -> bool {
        // The read resets the event descriptor. The read fails if no request was held.
        let _ = rustix::io::read(&self.submitted, &mut [0; 8]);
        let mut state = self.lock();
        if state.held.is_empty() {
            return false;
        }
        let held = state.held.len() as u64;
        let at = state.rng.below(held) as usize;
        let forgotten = self.config.forgets && state.rng.chance(20);
        let complete = state.held.swap_remove(at);
        drop(state);
        complete(forgotten);
        true
    }

    /// Completes all held requests. Later requests complete at once.
    pub fn release_all(&self) {
        self.lock().at_once = true;
        while self.release() {}
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hold(&self, complete: HeldCompletion) {
        let mut state = self.lock();
        if state.at_once || matches!(self.config.mode, IoMode::Later) {
            drop(state);
            return complete(false);
        }
        state.held.push(complete);
        drop(state);
        // The write fails only if the counter is full, and then the descriptor is already readable.
        let _ = rustix::io::write(&self.submitted, &1_u64.to_ne_bytes());
    }

    fn apply(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        let range = request.offset..request.offset + request.len;
        if request.op != Op::Flush && self.config.bad.is_some_and(|bad| range.contains(&bad)) {
            return Err(Error::Media);
        }
        self.inner.try_io(request, buffer)
    }
}

impl Device for Disk {
    fn geometry(&self) -> Geometry {
        let geometry = self.inner.geometry();
        Geometry { volatile_cache: !self.config.zoned, ..geometry }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        request.check(&self.geometry())?;
        match &buffer {
            Buffer::None => {}
            Buffer::Read(buffer) => assert_eq!(buffer.len() as u64, request.len),
            Buffer::Write(buffer) => assert_eq!(buffer.len() as u64, request.len),
        }
        let mut state = self.lock();
        state.tries += 1;
        let most = match self.config.mode {
            IoMode::Later | IoMode::Held => return Ok(TryResult::WouldBlock),
            IoMode::Mixed(_) if state.tries.is_multiple_of(2) => return Ok(TryResult::WouldBlock),
            // Writes to zones must not be split.
            IoMode::Partly(most) | IoMode::Mixed(most) if !self.config.zoned => most,
            _ => u64::MAX,
        };
        drop(state);
        if request.len <= most {
            return self.apply(request, buffer);
        }
        let part = Request { len: most, ..*request };
        let buffer = match buffer {
            Buffer::None => Buffer::None,
            Buffer::Read(buffer) => Buffer::Read(&mut buffer[..most as usize]),
            Buffer::Write(buffer) => Buffer::Write(&buffer[..most as usize]),
        };
        self.apply(&part, buffer)?;
        Ok(TryResult::Partly(most))
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        let outcome = request.check(&self.geometry()).and_then(|()| {
            let view = match request.op {
                Op::Read => Buffer::Read(&mut buffer),
                Op::Write => Buffer::Write(&buffer),
                _ => Buffer::None,
            };
            self.apply(&request, view).map(|_| ())
        });
        self.hold(Box::new(move |forgotten| {
            if !forgotten {
                done.complete(outcome, buffer);
            }
        }));
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.inner.extents(offset, len, row)
    }

    fn zoned(&self) -> Option<&dyn Zoned> {
        self.inner.zoned().map(|_| self as &dyn Zoned)
    }
}

impl Disk {
    fn zones(&self) -> &dyn Zoned {
        self.inner.zoned().expect("the device has zones")
    }
}

impl Zoned for Disk {
    fn report(&self, offset: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()> {
        self.zones().report(offset, row)
    }

    fn zone_op(&self, op: ZoneOp, offset: u64) -> Result<()> {
        self.zones().zone_op(op, offset)
    }

    fn reset_all(&self) -> Result<()> {
        self.zones().reset_all()
    }

    fn try_append(&self, offset: u64, data: &[u8], flags: Flags) -> Result<Option<u64>> {
        match self.config.mode {
            IoMode::Inline | IoMode::Partly(_) => self.zones().try_append(offset, data, flags),
            _ => Ok(None),
        }
    }

    fn submit_append(&self, offset: u64, data: IoBuf, flags: Flags, done: AppendCompletion) {
        let outcome = self.zones().try_append(offset, &data, flags);
        let outcome = outcome.and_then(|at| at.ok_or(Error::Media));
        // The completion of an append is always called: an append is never dropped.
        self.hold(Box::new(move |_| done(outcome)));
    }
}
