//! Checks that the conformance suite detects violations: each broken device violates one rule, and must fail
//! the right part of the suite.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, ExtentKind, Flags, Geometry, IoBuf, Op, Request, Result,
    TryResult,
};
use freestone_core::plug::{self, Unplug};
use freestone_core::sync::Mutex;
use freestone_testkit::conformance::{self, Options};

const BLOCK: u64 = 512;
const SIZE: u64 = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    OddSize,
    HugeBlock,
    Shrinks,
    RangeBeforeAlignment,
    ZeroLengthAccepted,
    OverflowWraps,
    SubmitUnchecked,
    RefusedButDone,
    ReadOnlyWrites,
    FlushFails,
    FlushWithRange,
    PartlyNothing,
    PartlyAll,
    PartlyUnaligned,
    PartlyLie,
    BlocksButWrites,
    Neighbour,
    WrongPlace,
    SkipsLargeTail,
    ShortZeroes,
    DiscardNoise,
    DiscardHalfBlock,
    DiscardFickle,
    ShortBuffer,
    ReadsNothing,
    ForgetsCompletion,
    ForgetsTheHeld,
    DropsCompletion,
    Forgets,
    Remembers,
    AllHoles,
    ExtentGap,
    ExtentBeyond,
    ExtentDeaf,
    ExtentSilent,
    ExtentMiscounts,
    ExtentUnchecked,
    TornWrite,
    TornRead,
    AnswersEarly,
    LosesConcurrent,
}

/// Lets other threads run when a request has reached byte `at` in the blocks of the suite's concurrent part. Sleeps,
/// because a thread that yields often gets almost no CPU time beside busy threads.
fn yield_to_others(at: usize) {
    if at < 16 * BLOCK as usize {
        thread::sleep(Duration::from_micros(50));
    }
}

struct Broken {
    fault: Fault,
    bytes: Arc<Mutex<Vec<u8>>>,
    calls: AtomicU64,
    never: Arc<NeverUnplug>,
}

/// A plug whose requests are never submitted.
struct NeverUnplug;

impl Unplug for NeverUnplug {
    fn unplug(&self) {}
}

impl Broken {
    fn new(fault: Fault) -> Self {
        let bytes = Arc::new(Mutex::new(vec![0; SIZE as usize]));
        Self { fault, bytes, calls: AtomicU64::new(0), never: Arc::new(NeverUnplug) }
    }

    fn is(&self, fault: Fault) -> bool {
        self.fault == fault
    }

    fn check(&self, request: &Request) -> Result<()> {
        let geometry = Geometry { read_only: false, ..self.geometry() };
        let checked = request.check(&geometry);
        let end = request.offset.checked_add(request.len);
        if self.is(Fault::RangeBeforeAlignment) && end.is_none_or(|end| end > SIZE) {
            return Err(Error::OutOfRange);
        }
        if self.is(Fault::ZeroLengthAccepted) && request.len == 0 {
            return Ok(());
        }
        if self.is(Fault::OverflowWraps) && checked == Err(Error::OutOfRange) && end.is_none() {
            return Ok(());
        }
        if self.is(Fault::FlushWithRange) && request.op == Op::Flush {
            return Ok(());
        }
        if self.is(Fault::RefusedButDone) && request.op == Op::WriteZeroes && checked.is_err() {
            self.bytes.lock()[0] = 0;
        }
        checked
    }

    fn write(&self, at: usize, data: &[u8]) {
        match self.fault {
            Fault::TornWrite => {
                let half = BLOCK as usize / 2;
                for (i, part) in data.chunks(half).enumerate() {
                    self.bytes.lock()[at + i * half..][..part.len()].copy_from_slice(part);
                    yield_to_others(at + i * half);
                }
            }
            // A read-modify-write of a whole page without a lock loses concurrent writes.
            Fault::LosesConcurrent => {
                let page = at / 4096 * 4096;
                let end = (at + data.len()).next_multiple_of(4096);
                let mut copy = self.bytes.lock()[page..end].to_vec();
                copy[at - page..][..data.len()].copy_from_slice(data);
                yield_to_others(at);
                self.bytes.lock()[page..end].copy_from_slice(&copy);
            }
            Fault::AnswersEarly => {
                let (bytes, data) = (Arc::clone(&self.bytes), data.to_vec());
                thread::spawn(move || {
                    thread::sleep(Duration::from_micros(500));
                    bytes.lock()[at..][..data.len()].copy_from_slice(&data);
                });
            }
            Fault::Forgets => {}
            _ => {
                let mut bytes = self.bytes.lock();
                let at = if self.is(Fault::WrongPlace) {
                    (at + 512) % (SIZE as usize - data.len() + 1)
                } else {
                    at
                };
                let short = self.is(Fault::SkipsLargeTail) && data.len() > 200 << 10;
                let len = if short { data.len() - 512 } else { data.len() };
                bytes[at..][..len].copy_from_slice(&data[..len]);
                if self.is(Fault::Neighbour) && at + data.len() < SIZE as usize {
                    bytes[at + data.len()] ^= 1;
                }
            }
        }
    }

    fn perform(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        if self.geometry().read_only && request.op != Op::Read && !self.is(Fault::ReadOnlyWrites) {
            return Err(Error::ReadOnly);
        }
        let (at, len) = (request.offset as usize, request.len as usize);
        match (request.op, buffer) {
            (Op::Read, Buffer::Read(out)) if self.is(Fault::TornRead) => {
                let half = BLOCK as usize / 2;
                for (i, part) in out.chunks_mut(half).enumerate() {
                    part.copy_from_slice(&self.bytes.lock()[at + i * half..][..part.len()]);
                    yield_to_others(at + i * half);
                }
            }
            (Op::Read, Buffer::Read(_)) if self.is(Fault::ReadsNothing) => {}
            (Op::Read, Buffer::Read(out)) => {
                out.copy_from_slice(&self.bytes.lock()[at % SIZE as usize..][..len]);
                if self.is(Fault::DiscardFickle) {
                    // The byte 0xdd marks discarded bytes, whose content changes between reads.
                    let noise = self.calls.fetch_add(1, SeqCst).is_multiple_of(2);
                    out.iter_mut().filter(|b| **b == 0xdd).for_each(|b| *b = if noise { 0xdd } else { 0 });
                }
            }
            (Op::Write, Buffer::Write(data)) => self.write(at, data),
            (Op::Discard, _) if self.is(Fault::DiscardNoise) => self.bytes.lock()[at..at + len].fill(0xff),
            (Op::Discard, _) if self.is(Fault::DiscardFickle) => self.bytes.lock()[at..at + len].fill(0xdd),
            (Op::Discard, _) if self.is(Fault::DiscardHalfBlock) => {
                self.bytes.lock()[at..at + len - 256].fill(0);
            }
            (Op::WriteZeroes, _) if self.is(Fault::ShortZeroes) => {
                self.bytes.lock()[at..at + len - 1].fill(0);
            }
            (Op::WriteZeroes | Op::Discard, _) => self.bytes.lock()[at..at + len].fill(0),
            (Op::Flush, _) if self.is(Fault::FlushFails) => return Err(Error::Media),
            _ => {}
        }
        Ok(TryResult::Done)
    }
}

impl Device for Broken {
    fn geometry(&self) -> Geometry {
        let calls = if self.is(Fault::Shrinks) { self.calls.fetch_add(1, SeqCst) } else { 0 };
        Geometry {
            size: if self.is(Fault::OddSize) { SIZE - 1 } else { SIZE - calls.min(8) * BLOCK },
            logical_block: if self.is(Fault::HugeBlock) { 8192 } else { BLOCK as u32 },
            physical_block: 8192,
            io_min: 8192,
            io_opt: 8192,
            discard_granularity: 8192,
            fast_zeroes: false,
            volatile_cache: false,
            padding: 0,
            volatile_media: true,
            rotational: false,
            max_request: 0,
            read_only: self.is(Fault::ReadOnlyWrites),
            ignores_data: false,
            zones: None,
        }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        self.check(request)?;
        let long = request.len > BLOCK;
        match self.fault {
            Fault::PartlyNothing if long => Ok(TryResult::Partly(0)),
            Fault::PartlyAll => self.perform(request, buffer).map(|_| TryResult::Partly(request.len)),
            Fault::PartlyUnaligned if long => Ok(TryResult::Partly(100)),
            Fault::PartlyLie if long && request.op == Op::Write => Ok(TryResult::Partly(BLOCK)),
            Fault::BlocksButWrites if request.op == Op::Write => {
                self.perform(request, buffer).map(|_| TryResult::WouldBlock)
            }
            // `WouldBlock` forces the suite to use `submit`.
            Fault::ShortBuffer => Ok(TryResult::WouldBlock),
            _ => self.perform(request, buffer),
        }
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        let calls = self.calls.fetch_add(1, SeqCst);
        let checked = if self.is(Fault::SubmitUnchecked) && request.op == Op::WriteZeroes {
            request.check(&self.geometry()).map_err(|_| Error::Media)
        } else {
            self.check(&request)
        };
        let outcome = checked.and_then(|()| match request.op {
            Op::Read => self.perform(&request, Buffer::Read(&mut buffer)),
            Op::Write => self.perform(&request, Buffer::Write(&buffer)),
            _ => self.perform(&request, Buffer::None),
        });
        match self.fault {
            Fault::ForgetsCompletion if calls % 20 == 19 => std::mem::forget(done),
            // Requests that are submitted under a plug are lost.
            Fault::ForgetsTheHeld if plug::hold(&self.never) => std::mem::forget(done),
            Fault::DropsCompletion if calls % 300 == 299 => drop(done),
            Fault::ShortBuffer => done.complete(outcome.map(|_| ()), IoBuf::empty()),
            _ => done.complete(outcome.map(|_| ()), buffer),
        }
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let end = offset.checked_add(len).filter(|&end| end <= SIZE);
        let end = match end {
            Some(end) => end,
            None if self.is(Fault::ExtentUnchecked) => offset.saturating_add(len),
            None => return Err(Error::OutOfRange),
        };
        let mut at = offset;
        while at < end && !self.is(Fault::ExtentSilent) {
            let next = (at + BLOCK).min(end);
            let zero = self.is(Fault::ExtentUnchecked)
                || self.bytes.lock()[at as usize..next as usize].iter().all(|&b| b == 0);
            let hole = zero || self.is(Fault::AllHoles);
            let kind = if hole { ExtentKind::Hole } else { ExtentKind::Data };
            let beyond = if self.is(Fault::ExtentBeyond) && next == end { BLOCK } else { 0 };
            let more = row(Extent { offset: at, len: next - at + beyond, kind });
            at = if self.is(Fault::ExtentGap) { (next + BLOCK).min(end) } else { next };
            if !more && !self.is(Fault::ExtentDeaf) || self.is(Fault::ExtentUnchecked) {
                break;
            }
        }
        Ok(if self.is(Fault::ExtentMiscounts) { len } else { at - offset })
    }
}

fn options() -> Options {
    Options {
        rounds: 120,
        window: SIZE,
        max_io: 512 << 10,
        thread_rounds: 300,
        timeout: Duration::from_millis(500),
        ..Options::default()
    }
}

fn run(fault: Fault, options: &Options) -> conformance::CheckResult {
    conformance::run(&|| Arc::new(Broken::new(fault)), options)
}

#[test]
fn device_without_fault_passes() {
    run(Fault::None, &options()).unwrap();
}

#[test]
fn each_fault_is_caught() {
    use Fault::*;
    let faults = [
        (OddSize, "geometry"),
        (HugeBlock, "geometry"),
        (Shrinks, "geometry"),
        (RangeBeforeAlignment, "errors"),
        (ZeroLengthAccepted, "errors"),
        (OverflowWraps, "errors"),
        (SubmitUnchecked, "errors"),
        (RefusedButDone, "errors"),
        (ReadOnlyWrites, "errors"),
        (FlushFails, "errors"),
        (FlushWithRange, "errors"),
        (PartlyNothing, "errors"),
        (PartlyAll, "errors"),
        (PartlyUnaligned, "errors"),
        (ShortBuffer, "errors"),
        (ForgetsCompletion, "errors"),
        (ForgetsTheHeld, "content"),
        (ReadsNothing, "errors"),
        (PartlyLie, "content"),
        (BlocksButWrites, "content"),
        (Neighbour, "content"),
        (WrongPlace, "content"),
        (SkipsLargeTail, "content"),
        (ShortZeroes, "content"),
        (DiscardNoise, "content"),
        (DiscardHalfBlock, "content"),
        (DiscardFickle, "content"),
        (DropsCompletion, "content"),
        (Forgets, "content"),
        // The write that runs after its completion may already fail the first check that reads data back.
        (AnswersEarly, "content|errors"),
        (AllHoles, "extents"),
        (ExtentGap, "extents"),
        (ExtentBeyond, "extents"),
        (ExtentDeaf, "extents"),
        (ExtentSilent, "extents"),
        (ExtentMiscounts, "extents"),
        (ExtentUnchecked, "extents"),
        (TornWrite, "concurrent"),
        (TornRead, "concurrent"),
        (LosesConcurrent, "concurrent"),
    ];
    let mut missed = Vec::new();
    for (fault, part) in faults {
        match run(fault, &options()) {
            Err(violation) if part.split('|').any(|part| violation.check == part) => {
                println!("{fault:?}: {violation}");
            }
            other => missed.push((fault, part, other)),
        }
    }
    assert!(missed.is_empty(), "not caught, or not where it should be: {missed:#?}");
}

#[test]
fn storing_device_fails_without_stores_option() {
    let violation = run(Fault::Remembers, &Options { stores_data: false, ..options() }).unwrap_err();
    assert_eq!(violation.check, "content");
}

#[test]
fn lost_completion_on_drop_is_caught() {
    let violation = conformance::check_abandoned(Arc::new(Broken::new(Fault::ForgetsCompletion)), &options())
        .unwrap_err();
    assert_eq!(violation.check, "abandoned");
}

#[test]
fn missing_growth_and_lost_data_are_caught() {
    let device = Broken::new(Fault::None);
    let violation = conformance::check_grown(&device, &options(), &|| {}).unwrap_err();
    assert_eq!(violation.check, "grown");

    let model = freestone_testkit::Model::new(SIZE as usize, 512);
    let loses = || {
        model.grow(2 * SIZE as usize);
        freestone_core::device::Blocking::write_zeroes(&model, SIZE - 512, 512, Flags::default()).unwrap();
    };
    let violation = conformance::check_grown(&model, &options(), &loses).unwrap_err();
    assert_eq!(violation.check, "grown");
}
