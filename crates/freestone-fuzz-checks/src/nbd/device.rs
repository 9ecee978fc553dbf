//! A device of which the effects come in the order of the requests, and the answers in any.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use freestone::device::zoned::{
    AppendCompletion, Zone, ZoneCondition, ZoneGeometry, ZoneOp, ZoneType, Zoned,
};
use freestone::device::{
    Buffer, Change, Changes, Completion, Device, Error, Extent, ExtentKind, Flags, Geometry, IoBuf, Op,
    Request, Result, Tried,
};
use freestone_nbd::MAX_IN_FLIGHT;
use freestone_testkit::Rng;
use rustix::event::{EventfdFlags, eventfd};

/// Smallest request in bytes, and the unit in which the device knows what it holds.
pub const BLOCK: u64 = 512;

/// Whether requests are done inline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// All of them, at once.
    Inline,
    /// At most so many bytes a try.
    Partly(u64),
    /// None: they are submitted, and answered when the check wants it.
    Held,
    /// None: they are submitted, and answered when others come, at the latest with a flush.
    Late,
    /// Every second one is submitted and answered late.
    Mixed(u64),
}

/// What the device is like.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Bytes.
    pub size: u64,
    /// How it answers.
    pub manner: Manner,
    /// The device says that it has zones: large writes must come as a whole.
    pub zoned: bool,
    /// What touches this byte fails.
    pub bad: Option<u64>,
    /// Of the order of answers.
    pub seed: u64,
    /// Some requests that were submitted are forgotten.
    pub forgets: bool,
    /// With the last of so many flushes everything late is answered, and from then on at once.
    pub flushes: usize,
}

/// A device whose effects come in the order of the requests, and whose answers in any.
pub struct Memory {
    shape: Shape,
    state: Mutex<State>,
    /// Readable when something was submitted.
    submitted: OwnedFd,
}

/// What the device holds and knows.
pub struct State {
    /// Its bytes.
    pub data: Vec<u8>,
    /// Of each block.
    pub kinds: Vec<ExtentKind>,
    /// Blocks that were written, zeroed or discarded.
    pub own: Vec<bool>,
    held: Vec<(Result<()>, IoBuf, Completion)>,
    tries: u64,
    rng: Rng,
    flushes: usize,
    /// Submitted requests are answered at once.
    at_once: bool,
}

impl Memory {
    /// Of zeroes.
    pub fn new(shape: Shape) -> Self {
        let blocks = (shape.size / BLOCK) as usize;
        let state = State {
            data: vec![0; shape.size as usize],
            kinds: vec![ExtentKind::Hole; blocks],
            own: vec![false; blocks],
            held: Vec::new(),
            tries: 0,
            rng: Rng::new(shape.seed),
            flushes: 0,
            at_once: false,
        };
        let submitted =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a descriptor is left");
        Self { shape, state: Mutex::new(state), submitted }
    }

    /// What it holds now.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Readable when something was submitted.
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
        let (outcome, buffer, done) = state.held.swap_remove(at);
        let forgotten = self.shape.forgets && state.rng.chance(20);
        drop(state);
        if !forgotten {
            done.complete(outcome, buffer);
        }
        true
    }

    /// Answers all that is held, and from now on at once.
    pub fn let_go(&self) {
        self.lock().at_once = true;
        while self.release() {}
    }

    fn apply(&self, state: &mut State, request: &Request, buffer: Buffer<'_>) -> Result<()> {
        let range = request.offset..request.offset + request.len;
        if self.shape.bad.is_some_and(|bad| range.contains(&bad)) {
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
            zone_size: self.shape.size,
            nr_zones: 1,
            max_open: 0,
            max_active: 0,
            max_append: 0,
        };
        Geometry {
            size: self.shape.size,
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
            zones: self.shape.zoned.then_some(zones),
        }
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
            Manner::Inline => u64::MAX,
            // At the last one everything is answered.
            Manner::Mixed(_) if request.op == Op::Flush => return Ok(Tried::WouldBlock),
            Manner::Held | Manner::Late => return Ok(Tried::WouldBlock),
            Manner::Mixed(_) if state.tries.is_multiple_of(2) => return Ok(Tried::WouldBlock),
            Manner::Partly(most) | Manner::Mixed(most) => most,
        };
        if request.len <= most {
            self.apply(&mut state, request, buffer)?;
            return Ok(Tried::Done);
        }
        let part = Request { len: most, ..*request };
        let buffer = match buffer {
            Buffer::None => Buffer::None,
            Buffer::Read(buffer) => Buffer::Read(&mut buffer[..most as usize]),
            Buffer::Write(buffer) => Buffer::Write(&buffer[..most as usize]),
        };
        self.apply(&mut state, &part, buffer)?;
        Ok(Tried::Partly(most))
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
        if self.shape.manner != Manner::Held && state.flushes >= self.shape.flushes {
            state.at_once = true;
        }
        // Never so many, or such large ones, that the connection waits for them: nobody else would
        // answer.
        let all = request.op == Op::Flush || self.shape.size > 1 << 20;
        let few = if all { 0 } else { state.rng.below(MAX_IN_FLIGHT as u64 / 8) as usize };
        drop(state);
        if self.shape.manner != Manner::Held {
            for _ in few..held {
                self.release();
            }
            return;
        }
        // It fails only where the counter is full, and then it is readable.
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
        self.shape.zoned.then_some(self as &dyn Zoned)
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

/// One conventional zone: exports ask for no more.
impl Zoned for Memory {
    fn report(&self, _: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()> {
        row(Zone {
            start: 0,
            len: self.shape.size,
            capacity: self.shape.size,
            write_pointer: self.shape.size,
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
