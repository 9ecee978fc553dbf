//! A test device that executes requests in order and completes them in any order.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use freestone::device::zoned::{
    AppendCompletion, Zone, ZoneCondition, ZoneGeometry, ZoneOp, ZoneType, Zoned,
};
use freestone::device::{
    Buffer, Change, Changes, Completion, Device, Error, Extent, ExtentKind, Flags, Geometry, IoBuf, Op,
    Request, Result, TryResult,
};
use freestone_nbd::MAX_IN_FLIGHT;
use freestone_testkit::Rng;
use rustix::event::{EventfdFlags, eventfd};

/// Logical block size in bytes, and the unit of the device's extents.
pub const BLOCK: u64 = 512;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoMode {
    Inline,
    /// Requests complete inline, with at most this number of bytes per try.
    Partly(u64),
    /// Requests are submitted, and held until the check completes them.
    Held,
    /// Requests are submitted, and completed when later requests arrive, at the latest at a flush.
    Late,
    /// Every second request is executed as in `Late`, the others inline with at most this number of bytes per
    /// try.
    Mixed(u64),
}

#[derive(Debug, Clone, Copy)]
pub struct DeviceConfig {
    /// Size of the device in bytes.
    pub size: u64,
    pub mode: IoMode,
    /// True if the device reports zones, so large writes must not be split.
    pub zoned: bool,
    /// Offset of a bad byte: requests that contain it fail. `None` if no byte is bad.
    pub bad: Option<u64>,
    /// Seed of the random order of completions.
    pub seed: u64,
    /// True if some submitted requests are dropped without completion.
    pub forgets: bool,
    /// Number of flushes. At the last of them, all held requests complete, and later requests complete at
    /// once.
    pub flushes: usize,
}

pub struct Memory {
    config: DeviceConfig,
    state: Mutex<State>,
    /// Event descriptor that is readable after a submit.
    submitted: OwnedFd,
}

pub struct State {
    pub data: Vec<u8>,
    pub kinds: Vec<ExtentKind>,
    /// True for each block that was written, zeroed or discarded.
    pub own: Vec<bool>,
    held: Vec<(Result<()>, IoBuf, Completion)>,
    tries: u64,
    rng: Rng,
    flushes: usize,
    /// True if submitted requests complete at once.
    at_once: bool,
}

impl Memory {
    pub fn new(config: DeviceConfig) -> Self {
        let blocks = (config.size / BLOCK) as usize;
        let state = State {
            data: vec![0; config.size as usize],
            kinds: vec![ExtentKind::Hole; blocks],
            own: vec![false; blocks],
            held: Vec::new(),
            tries: 0,
            rng: Rng::new(config.seed),
            flushes: 0,
            at_once: false,
        };
        let submitted =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a descriptor is left");
        Self { config, state: Mutex::new(state), submitted }
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the event descriptor that is readable after a submit.
    pub fn submitted(&self) -> BorrowedFd<'_> {
        self.submitted.as_fd()
    }

    /// Completes or drops one held request. Returns false if no request is held.
    pub fn release(&self) -> bool {
        // The read resets the event descriptor. The read fails if nothing was submitted.
        let _ = rustix::io::read(&self.submitted, &mut [0; 8]);
        let mut state = self.lock();
        if state.held.is_empty() {
            return false;
        }
        let held = state.held.len() as u64;
        let at = state.rng.below(held) as usize;
        let (outcome, buffer, done) = state.held.swap_remove(at);
        let forgotten = self.config.forgets && state.rng.chance(20);
        drop(state);
        if !forgotten {
            done.complete(outcome, buffer);
        }
        true
    }

    /// Completes all held requests. Later requests complete at once.
    pub fn release_all(&self) {
        self.lock().at_once = true;
        while self.release() {}
    }

    fn apply(&self, state: &mut State, request: &Request, buffer: Buffer<'_>) -> Result<()> {
        let range = request.offset..request.offset + request.len;
        if self.config.bad.is_some_and(|bad| range.contains(&bad)) {
            return Err(Error::Media);
        }
        let bytes = range.start as usize..range.end as usize;
        let kind = match (request.op, buffer) {
            (Op::Read, Buffer::Read(out)) => {
                out.copy_from_slice(&state.data[bytes]);
                return Ok(());
            }
            (Op::Flush, Buffer::None) => return Ok(()),
            (Op::Write, Buffer::Write(data)) => {
                state.data[bytes].copy_from_slice(data);
                ExtentKind::Data
            }
            (Op::WriteZeroes, Buffer::None) if !request.flags.contains(Flags::MAY_FREE) => {
                state.data[bytes].fill(0);
                ExtentKind::Zero
            }
            (Op::WriteZeroes | Op::Discard, Buffer::None) => {
                state.data[bytes].fill(0);
                ExtentKind::Hole
            }
            (op, buffer) => panic!("{op:?} came with {buffer:?}"),
        };
        let blocks = (range.start / BLOCK) as usize..(range.end / BLOCK) as usize;
        state.kinds[blocks.clone()].fill(kind);
        state.own[blocks].fill(true);
        Ok(())
    }
}

impl Device for Memory {
    fn geometry(&self) -> Geometry {
        let zones = ZoneGeometry {
            zone_size: self.config.size,
            nr_zones: 1,
            max_open: 0,
            max_active: 0,
            max_append: 0,
        };
        Geometry {
            size: self.config.size,
            logical_block: BLOCK as u32,
            physical_block: 4096,
            io_min: 4096,
            io_opt: 4096,
            discard_granularity: BLOCK as u32,
            fast_zeroes: true,
            volatile_cache: true,
            padding: 0,
            volatile_media: true,
            rotational: false,
            max_request: 0,
            read_only: false,
            zones: self.config.zoned.then_some(zones),
        }
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
            IoMode::Inline => u64::MAX,
            // Flushes are submitted, because the last flush completes all held requests.
            IoMode::Mixed(_) if request.op == Op::Flush => return Ok(TryResult::WouldBlock),
            IoMode::Held | IoMode::Late => return Ok(TryResult::WouldBlock),
            IoMode::Mixed(_) if state.tries.is_multiple_of(2) => return Ok(TryResult::WouldBlock),
            IoMode::Partly(most) | IoMode::Mixed(most) => most,
        };
        if request.len <= most {
            self.apply(&mut state, request, buffer)?;
            return Ok(TryResult::Done);
        }
        let part = Request { len: most, ..*request };
        let buffer = match buffer {
            Buffer::None => Buffer::None,
            Buffer::Read(buffer) => Buffer::Read(&mut buffer[..most as usize]),
            Buffer::Write(buffer) => Buffer::Write(&buffer[..most as usize]),
        };
        self.apply(&mut state, &part, buffer)?;
        Ok(TryResult::Partly(most))
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        let mut state = self.lock();
        let outcome = request.check(&self.geometry()).and_then(|()| {
            let view = match request.op {
                Op::Read => Buffer::Read(&mut buffer),
                Op::Write => Buffer::Write(&buffer),
                _ => Buffer::None,
            };
            self.apply(&mut state, &request, view)
        });
        if state.at_once {
            drop(state);
            return done.complete(outcome, buffer);
        }
        state.held.push((outcome, buffer, done));
        let held = state.held.len();
        assert!(held <= MAX_IN_FLIGHT + 1, "{held} requests are held");
        state.flushes += usize::from(request.op == Op::Flush);
        if self.config.mode != IoMode::Held && state.flushes >= self.config.flushes {
            state.at_once = true;
        }
        // Hold only few and small requests. If the connection waited for held requests before it sent more,
        // nobody would complete them.
        let all = request.op == Op::Flush || self.config.size > 1 << 20;
        let remaining = if all { 0 } else { state.rng.below(MAX_IN_FLIGHT as u64 / 8) as usize };
        drop(state);
        if self.config.mode != IoMode::Held {
            for _ in remaining..held {
                self.release();
            }
            return;
        }
        // The write fails only if the counter is full, and then the descriptor is already readable.
        let _ = rustix::io::write(&self.submitted, &1_u64.to_ne_bytes());
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let state = self.lock();
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let next = (at / BLOCK + 1).saturating_mul(BLOCK).min(end);
            let more = row(Extent { offset: at, len: next - at, kind: state.kinds[(at / BLOCK) as usize] });
            at = next;
            if !more {
                break;
            }
        }
        Ok(at - offset)
    }

    fn changes(&self) -> Option<&dyn Changes> {
        Some(self)
    }

    fn zoned(&self) -> Option<&dyn Zoned> {
        self.config.zoned.then_some(self as &dyn Zoned)
    }
}

impl Changes for Memory {
    fn changes(&self, offset: u64, len: u64, row: &mut dyn FnMut(Change) -> bool) -> Result<u64> {
        let state = self.lock();
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let next = (at / BLOCK + 1).saturating_mul(BLOCK).min(end);
            let more = row(Change { offset: at, len: next - at, own: state.own[(at / BLOCK) as usize] });
            at = next;
            if !more {
                break;
            }
        }
        Ok(at - offset)
    }
}

/// The device reports one conventional zone, which is enough for exports.
impl Zoned for Memory {
    fn report(&self, _: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()> {
        row(Zone {
            start: 0,
            len: self.config.size,
            capacity: self.config.size,
            write_pointer: self.config.size,
            kind: ZoneType::Conventional,
            condition: ZoneCondition::NotWritePointer,
        });
        Ok(())
    }

    fn zone_op(&self, _: ZoneOp, _: u64) -> Result<()> {
        Err(Error::ZoneCondition)
    }

    fn reset_all(&self) -> Result<()> {
        Ok(())
    }

    fn try_append(&self, _: u64, _: &[u8], _: Flags) -> Result<Option<u64>> {
        Err(Error::Unsupported)
    }

    fn submit_append(&self, _: u64, _: IoBuf, _: Flags, done: AppendCompletion) {
        done(Err(Error::Unsupported));
    }
}
