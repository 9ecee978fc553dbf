//! A device of which the effects come in the order of the requests, and the answers when the check
//! wants them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use freestone::device::zoned::{AppendCompletion, Zone, ZoneOp, Zoned};
use freestone::device::{
    Buffer, Completion, Device, Error, Extent, Flags, Geometry, IoBuf, Op, Request, Result, Tried,
};
use freestone_testkit::{Model, ModelZoned, Rng, ZonedConfig};
use rustix::event::{EventfdFlags, eventfd};

/// Bytes of every device.
pub const SIZE: u64 = 64 << 10;
/// Bytes of a zone, of devices that have some.
pub const ZONE: u64 = 16 << 10;

/// How requests are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// All of them at once.
    Inline,
    /// At most so many bytes a try.
    Partly(u64),
    /// They are submitted, and done then.
    Later,
    /// They are submitted, and answered when the check wants it.
    Held,
    /// The first part of so many bytes at once, the rest as `Held`.
    Mixed(u64),
}

/// What the device is like.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// How it answers.
    pub manner: Manner,
    /// It has zones.
    pub zoned: bool,
    /// What touches this byte fails.
    pub bad: Option<u64>,
    /// Some requests that were submitted are forgotten.
    pub forgets: bool,
    /// Of the order of answers.
    pub seed: u64,
}

/// An answer that is not given yet; true: it is forgotten.
type Answer = Box<dyn FnOnce(bool) + Send>;

/// The device.
pub struct Disk {
    shape: Shape,
    inner: Arc<dyn Device>,
    state: Mutex<State>,
    /// Readable when something is held.
    submitted: OwnedFd,
}

struct State {
    held: Vec<Answer>,
    rng: Rng,
    tries: u64,
    /// Nothing is held any more.
    at_once: bool,
}

/// Such zones as a device has that has some.
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
    /// Of zeroes.
    pub fn new(shape: Shape) -> Self {
        let inner: Arc<dyn Device> =
            if shape.zoned { Arc::new(zones()) } else { Arc::new(Model::new(SIZE as usize, 512)) };
        let state = State { held: Vec::new(), rng: Rng::new(shape.seed), tries: 0, at_once: false };
        let submitted =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a descriptor is left");
        Self { shape, inner, state: Mutex::new(state), submitted }
    }

    /// What it holds now.
    pub fn content(&self) -> Vec<u8> {
        let mut bytes = vec![0; SIZE as usize];
        let read = self.inner.try_io(&Request::read(0, SIZE), Buffer::Read(&mut bytes));
        assert_eq!(read, Ok(Tried::Done));
        bytes
    }

    /// Readable when something is held.
    pub fn submitted(&self) -> BorrowedFd<'_> {
        self.submitted.as_fd()
    }

    /// Answers one of what is held, or forgets it. False: nothing is held.
    pub fn release(&self) -> bool {
        // Not readable is what is wanted.
        let _ = rustix::io::read(&self.submitted, &mut [0; 8]);
        let mut state = self.lock();
        if state.held.is_empty() {
            return false;
        }
        let held = state.held.len() as u64;
        let at = state.rng.below(held) as usize;
        let forgotten = self.shape.forgets && state.rng.chance(20);
        let answer = state.held.swap_remove(at);
        drop(state);
        answer(forgotten);
        true
    }

    /// Answers all that is held, and from now on at once.
    pub fn let_go(&self) {
        self.lock().at_once = true;
        while self.release() {}
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hold(&self, answer: Answer) {
        let mut state = self.lock();
        if state.at_once || matches!(self.shape.manner, Manner::Later) {
            drop(state);
            return answer(false);
        }
        state.held.push(answer);
        drop(state);
        // It fails only where the counter is full, and then it is readable.
        let _ = rustix::io::write(&self.submitted, &1_u64.to_ne_bytes());
    }

    fn apply(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        let range = request.offset..request.offset + request.len;
        if request.op != Op::Flush && self.shape.bad.is_some_and(|bad| range.contains(&bad)) {
            return Err(Error::Media);
        }
        self.inner.try_io(request, buffer)
    }
}

impl Device for Disk {
    fn geometry(&self) -> Geometry {
        let geometry = self.inner.geometry();
        Geometry { volatile_cache: !self.shape.zoned, ..geometry }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        request.check(&self.geometry())?;
        match &buffer {
            Buffer::None => {}
            Buffer::Read(buffer) => assert_eq!(buffer.len() as u64, request.len),
            Buffer::Write(buffer) => assert_eq!(buffer.len() as u64, request.len),
        }
        let mut state = self.lock();
        state.tries += 1;
        let most = match self.shape.manner {
            Manner::Later | Manner::Held => return Ok(Tried::WouldBlock),
            Manner::Mixed(_) if state.tries.is_multiple_of(2) => return Ok(Tried::WouldBlock),
            // What is written to zones is done as a whole.
            Manner::Partly(most) | Manner::Mixed(most) if !self.shape.zoned => most,
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
        Ok(Tried::Partly(most))
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
        self.inner.zoned().expect("it is asked only where there are some")
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
        match self.shape.manner {
            Manner::Inline | Manner::Partly(_) => self.zones().try_append(offset, data, flags),
            _ => Ok(None),
        }
    }

    fn submit_append(&self, offset: u64, data: IoBuf, flags: Flags, done: AppendCompletion) {
        let outcome = self.zones().try_append(offset, &data, flags);
        let outcome = outcome.and_then(|at| at.ok_or(Error::Media));
        // It has no way to be forgotten.
        self.hold(Box::new(move |_| done(outcome)));
    }
}
