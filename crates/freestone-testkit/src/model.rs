//! The simplest device: a byte vector under a mutex. All requests complete on the caller's thread.

use std::sync::atomic::{AtomicBool, Ordering};

use freestone_core::device::{
    Buffer, Change, Changes, Completion, Device, Extent, ExtentKind, Flags, Geometry, IoBuf, Op, Request,
    Result, TryResult, range_end,
};
use freestone_core::sync::Mutex;

/// Maximum number of rows of one report of a fork's changes, so that callers must continue.
const MAX_CHANGES: usize = 1000;

/// A byte vector as a device. Every request completes on the caller's thread.
#[derive(Debug)]
pub struct Model {
    state: Mutex<ModelState>,
    logical_block: u32,
    read_only: bool,
    /// True if written blocks of zeroes are holes, otherwise they are data.
    finds_zeroes: bool,
    /// True if the device reports changed blocks through [`Changes`], like a fork.
    pub forked: AtomicBool,
    max_changes: usize,
}

#[derive(Debug)]
struct ModelState {
    bytes: Vec<u8>,
    kinds: Vec<ExtentKind>,
    /// For each block, true if it was written, zeroed or discarded.
    own: Vec<bool>,
}

impl Model {
    /// Returns a writable device of `size` zero bytes.
    ///
    /// # Panics
    /// Panics unless `size` is a multiple of `logical_block`, which must be a power of two from 512
    /// to 4096.
    pub fn new(size: usize, logical_block: u32) -> Self {
        Self::with(vec![0; size], 0, logical_block)
    }

    /// Returns a writable device with this content, whose length must be a multiple of `logical_block`.
    pub fn filled(content: Vec<u8>, logical_block: u32) -> Self {
        let len = content.len();
        Self::with(content, len, logical_block)
    }

    /// Returns a read-only device with this content, whose length must be a multiple of
    /// `logical_block`.
    pub fn read_only(content: Vec<u8>, logical_block: u32) -> Self {
        Self { read_only: true, ..Self::filled(content, logical_block) }
    }

    /// Returns a fork of `size` bytes: an unchanged device with the whole blocks of `base`, and zeroes beyond.
    pub fn fork(base: &[u8], size: usize, logical_block: u32) -> Self {
        let len = base.len().min(size) / logical_block as usize * logical_block as usize;
        let mut bytes = vec![0; size];
        bytes[..len].copy_from_slice(&base[..len]);
        let model = Self::with(bytes, len, logical_block);
        Self { forked: AtomicBool::new(true), max_changes: MAX_CHANGES, ..model.with_zeroes_as_data() }
    }

    /// Reports written blocks of zeroes as data, not as holes.
    #[must_use]
    pub fn with_zeroes_as_data(self) -> Self {
        Self { finds_zeroes: false, ..self }
    }

    /// Returns a device with this content, which is zero beyond its first `len` bytes.
    fn with(bytes: Vec<u8>, len: usize, logical_block: u32) -> Self {
        let block = logical_block as usize;
        assert!(logical_block.is_power_of_two() && (512..=4096).contains(&logical_block));
        assert!(!bytes.is_empty() && bytes.len().is_multiple_of(block));
        let mut kinds = vec![ExtentKind::Hole; bytes.len() / block];
        set_kinds(&mut kinds, bytes[..len].chunks(block));
        let state = ModelState { bytes, own: vec![false; kinds.len()], kinds };
        Self {
            state: Mutex::new(state),
            logical_block,
            read_only: false,
            finds_zeroes: true,
            forked: AtomicBool::new(false),
            max_changes: usize::MAX,
        }
    }

    /// Grows the device to `size` bytes; the new bytes are zeroes. A size below the current one has
    /// no effect.
    pub fn grow(&self, size: usize) {
        assert!(size.is_multiple_of(self.logical_block as usize));
        let mut state = self.state.lock();
        if size > state.bytes.len() {
            let blocks = size / self.logical_block as usize;
            state.bytes.resize(size, 0);
            state.kinds.resize(blocks, ExtentKind::Hole);
            state.own.resize(blocks, false);
        }
    }

    pub fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        self.state.lock().bytes[offset as usize..][..len].to_vec()
    }

    pub fn content(&self) -> Vec<u8> {
        self.state.lock().bytes.clone()
    }

    /// Returns the kind of each block.
    pub fn kinds(&self) -> Vec<ExtentKind> {
        self.state.lock().kinds.clone()
    }

    /// Returns, for each block, true if it was written, zeroed or discarded.
    pub fn own(&self) -> Vec<bool> {
        self.state.lock().own.clone()
    }

    /// Writes `data` at `offset`.
    pub fn fill(&self, offset: u64, data: &[u8]) {
        self.execute(&Request::write(offset, data.len() as u64), Buffer::Write(data));
    }

    fn execute(&self, request: &Request, buffer: Buffer<'_>) {
        let range = request.offset as usize..(request.offset + request.len) as usize;
        let block = self.logical_block as usize;
        let blocks = range.start / block..range.end.div_ceil(block);
        let mut state = self.state.lock();
        let kind = match (request.op, buffer) {
            (Op::Read, Buffer::Read(out)) => return out.copy_from_slice(&state.bytes[range]),
            (Op::Flush, Buffer::None) => return,
            (Op::Write, Buffer::Write(data)) => {
                state.bytes[range].copy_from_slice(data);
                ExtentKind::Data
            }
            (Op::Discard | Op::WriteZeroes, Buffer::None) => {
                state.bytes[range].fill(0);
                let free = request.op == Op::Discard || request.flags.contains(Flags::MAY_FREE);
                if free { ExtentKind::Hole } else { ExtentKind::Zero }
            }
            (op, buffer) => panic!("{op:?} came with {buffer:?}"),
        };
        let ModelState { bytes, kinds, own } = &mut *state;
        if kind == ExtentKind::Data && self.finds_zeroes {
            set_kinds(&mut kinds[blocks.clone()], bytes[blocks.start * block..].chunks(block));
        } else {
            kinds[blocks.clone()].fill(kind);
        }
        own[blocks].fill(true);
    }

    /// Calls `row` with offset, length and block number of each block in the range, which is simple and
    /// tests that callers merge adjacent rows. Returns the number of bytes described.
    fn each_block(&self, offset: u64, end: u64, mut row: impl FnMut(u64, u64, usize) -> bool) -> u64 {
        let block = u64::from(self.logical_block);
        let mut at = offset;
        while at < end {
            let next = (at / block + 1).saturating_mul(block).min(end);
            let more = row(at, next - at, (at / block) as usize);
            at = next;
            if !more {
                break;
            }
        }
        at - offset
    }
}

fn set_kinds<'a>(kinds: &mut [ExtentKind], blocks: impl Iterator<Item = &'a [u8]>) {
    for (kind, block) in kinds.iter_mut().zip(blocks) {
        let is_zero = block.iter().all(|&byte| byte == 0);
        *kind = if is_zero { ExtentKind::Hole } else { ExtentKind::Data };
    }
}

impl Device for Model {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.state.lock().bytes.len() as u64,
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
            ignores_data: false,
            zones: None,
        }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        request.check(&self.geometry())?;
        self.execute(request, buffer);
        Ok(TryResult::Done)
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        let tried = self.try_io(&request, Buffer::rest(request.op, &mut buffer, 0));
        done.complete(tried.map(|_| ()), buffer);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let state = self.state.lock();
        let end = range_end(offset, len, state.bytes.len() as u64)?;
        Ok(self.each_block(offset, end, |offset, len, block| {
            row(Extent { offset, len, kind: state.kinds[block] })
        }))
    }

    fn changes(&self) -> Option<&dyn Changes> {
        self.forked.load(Ordering::SeqCst).then_some(self as &dyn Changes)
    }
}

impl Changes for Model {
    fn changes(&self, offset: u64, len: u64, row: &mut dyn FnMut(Change) -> bool) -> Result<u64> {
        let state = self.state.lock();
        let end = range_end(offset, len, state.bytes.len() as u64)?;
        let mut rows = 0;
        Ok(self.each_block(offset, end, |offset, len, block| {
            rows += 1;
            row(Change { offset, len, own: state.own[block] }) && rows < self.max_changes
        }))
    }
}
