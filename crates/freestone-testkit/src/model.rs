//! The simplest device: a byte vector under a mutex. All requests complete on the caller's thread.

use std::sync::{Mutex, MutexGuard, PoisonError};

use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, ExtentKind, Geometry, IoBuf, Op, Request, Result, TryResult,
};

/// A byte vector as a device. Every request completes on the caller's thread.
#[derive(Debug)]
pub struct Model {
    bytes: Mutex<Vec<u8>>,
    logical_block: u32,
    read_only: bool,
}

impl Model {
    /// Returns a writable device of `size` zero bytes.
    ///
    /// # Panics
    /// Panics unless `size` is a multiple of `logical_block`, which must be a power of two from 512
    /// to 4096.
    pub fn new(size: usize, logical_block: u32) -> Self {
        Self::with(vec![0; size], logical_block, false)
    }

    /// Returns a read-only device with this content, whose length must be a multiple of
    /// `logical_block`.
    pub fn read_only(content: Vec<u8>, logical_block: u32) -> Self {
        Self::with(content, logical_block, true)
    }

    fn with(bytes: Vec<u8>, logical_block: u32, read_only: bool) -> Self {
        assert!(logical_block.is_power_of_two() && (512..=4096).contains(&logical_block));
        assert!(!bytes.is_empty() && bytes.len().is_multiple_of(logical_block as usize));
        Self { bytes: Mutex::new(bytes), logical_block, read_only }
    }

    /// Grows the device to `size` bytes; the new bytes are zeroes. A size below the current one has
    /// no effect.
    pub fn grow(&self, size: usize) {
        assert!(size.is_multiple_of(self.logical_block as usize));
        let mut bytes = self.lock();
        if size > bytes.len() {
            bytes.resize(size, 0);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Device for Model {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.lock().len() as u64,
            logical_block: self.logical_block,
            physical_block: self.logical_block,
            io_min: self.logical_block,
            io_opt: self.logical_block,
            discard_granularity: self.logical_block,
            fast_zeroes: true,
            volatile_cache: false,
            padding: 0,
            volatile_media: true,
            rotational: false,
            max_request: 0,
            read_only: self.read_only,
            zones: None,
        }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        request.check(&self.geometry())?;
        let mut bytes = self.lock();
        let range = request.offset as usize..(request.offset + request.len) as usize;
        match (request.op, buffer) {
            (Op::Read, Buffer::Read(out)) => out.copy_from_slice(&bytes[range]),
            (Op::Write, Buffer::Write(data)) => bytes[range].copy_from_slice(data),
            (Op::Discard | Op::WriteZeroes, _) => bytes[range].fill(0),
            (Op::Flush, _) => {}
            (op, buffer) => panic!("{op:?} came with {buffer:?}"),
        }
        Ok(TryResult::Done)
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        let tried = match request.op {
            Op::Read => self.try_io(&request, Buffer::Read(&mut buffer)),
            Op::Write => self.try_io(&request, Buffer::Write(&buffer)),
            _ => self.try_io(&request, Buffer::None),
        };
        done.complete(tried.map(|_| ()), buffer);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let bytes = self.lock();
        let end = offset.checked_add(len).filter(|&end| len > 0 && end <= bytes.len() as u64);
        let end = end.ok_or(Error::OutOfRange)?;
        let block = u64::from(self.logical_block);
        let mut at = offset;
        while at < end {
            // Report one row per block, which is simple and tests that callers merge adjacent rows.
            let next = (at / block + 1).saturating_mul(block).min(end);
            let zero = bytes[at as usize..next as usize].iter().all(|&b| b == 0);
            let kind = if zero { ExtentKind::Hole } else { ExtentKind::Data };
            let more = row(Extent { offset: at, len: next - at, kind });
            at = next;
            if !more {
                break;
            }
        }
        Ok(at - offset)
    }
}
