//! A device of any size that reads as zeroes, and logs trims and write zeroes.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, ExtentKind, Geometry, IoBuf, Op, Request, Result, TryResult,
};

use super::device::geometry;

/// A device that reads as zeroes and ignores writes. Only trims and write zeroes may need several steps.
pub struct Vast {
    size: u64,
    /// Maximum number of bytes that one `try_io` call trims or zeroes. With 0, trims and write zeroes must be
    /// submitted, and the test completes them.
    pub per_try: AtomicU64,
    /// Offset of a bad byte: trims and write zeroes that include the byte fail.
    pub bad_byte: AtomicU64,
    /// Log of the trims and write zeroes that were completed inline or submitted.
    pub steps: Mutex<Vec<Request>>,
    held: Mutex<Vec<(Request, Completion)>>,
}

impl Vast {
    pub fn new(size: u64, per_try: u64) -> Self {
        Self {
            size,
            per_try: per_try.into(),
            bad_byte: u64::MAX.into(),
            steps: Mutex::default(),
            held: Mutex::default(),
        }
    }

    /// Returns the submitted requests that the test has not completed yet.
    pub fn held(&self) -> Vec<Request> {
        self.held.lock().unwrap().iter().map(|(request, _)| *request).collect()
    }

    /// Completes the oldest held request.
    pub fn release(&self) {
        let (request, done) = self.held.lock().unwrap().remove(0);
        done.complete(self.outcome(&request), IoBuf::empty());
    }

    fn outcome(&self, request: &Request) -> Result<()> {
        let bad = (request.offset..request.offset + request.len).contains(&self.bad_byte.load(SeqCst));
        if bad { Err(Error::Media) } else { Ok(()) }
    }
}

impl Device for Vast {
    fn geometry(&self) -> Geometry {
        Geometry { volatile_cache: false, ..geometry(self.size) }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        request.check(&self.geometry())?;
        match request.op {
            Op::Read => {
                if let Buffer::Read(buffer) = buffer {
                    buffer.fill(0);
                }
                return Ok(TryResult::Done);
            }
            Op::Write | Op::Flush => return Ok(TryResult::Done),
            Op::Discard | Op::WriteZeroes => {}
        }
        let per_try = self.per_try.load(SeqCst);
        if per_try == 0 {
            return Ok(TryResult::WouldBlock);
        }
        let part = Request { len: request.len.min(per_try), ..*request };
        self.outcome(&part)?;
        self.steps.lock().unwrap().push(part);
        Ok(if part == *request { TryResult::Done } else { TryResult::Partly(per_try) })
    }

    fn submit(&self, request: Request, _: IoBuf, done: Completion) {
        self.steps.lock().unwrap().push(request);
        self.held.lock().unwrap().push((request, done));
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        row(Extent { offset, len, kind: ExtentKind::Hole });
        Ok(len)
    }
}
