//! A memory device whose behavior a test can change.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use freestone_core::device::zoned::{Zone, ZoneGeometry, ZoneOp, ZoneType, Zoned};
use freestone_core::device::{
    Buffer, Change, Changes, Completion, Device, Error, Extent, ExtentKind, Flags, Geometry, IoBuf, Op,
    Request, Result, TryResult,
};

pub const PAGE: u64 = 4096;
/// Byte value with which a failed read fills its buffer if `spoils` is set.
pub const SPOILT: u8 = 0xEE;

/// Returns the CPU time of the calling thread.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// How the device executes requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// `try_io` executes the request.
    Inline,
    /// `try_io` returns that the request would block; `submit` completes the request on a new thread.
    Thread,
    /// `try_io` returns that the request would block; the test completes the submitted request.
    Held,
}

pub struct MemDevice {
    geometry: Mutex<Geometry>,
    data: Mutex<Vec<u8>>,
    kinds: Mutex<Vec<ExtentKind>>,
    /// For each page: true if the page was written, zeroed or discarded.
    own: Mutex<Vec<bool>>,
    /// True if the device reports changed pages through [`Changes`], like a fork.
    pub forked: AtomicBool,
    manner: Mutex<Manner>,
    /// Maximum number of bytes that one `try_io` call executes; 0 means unlimited.
    pub per_try: AtomicU64,
    /// Offset of a bad byte: requests that include the byte fail with Media. `u64::MAX` disables this.
    pub bad_byte: AtomicU64,
    /// CPU time that `try_io` spends on a request, in microseconds.
    pub cost_us: AtomicU64,
    /// Number of `try_io` calls by worker threads.
    pub by_workers: AtomicU64,
    /// If true, failed reads fill their buffer with [`SPOILT`].
    pub spoils: AtomicBool,
    /// If true, the next `try_io` call panics and clears this flag.
    pub panics: AtomicBool,
    pub log: Mutex<Vec<Request>>,
    pub prefetched: Mutex<Vec<(u64, u64)>>,
    held: Mutex<Vec<(Request, IoBuf, Completion)>>,
    me: std::sync::Weak<Self>,
}

/// Returns the default geometry of a device of `size` bytes.
pub fn geometry(size: u64) -> Geometry {
    Geometry {
        size,
        logical_block: 512,
        physical_block: 4096,
        io_min: 4096,
        io_opt: 4096,
        discard_granularity: 4096,
        fast_zeroes: true,
        volatile_cache: true,
        padding: 0,
        volatile_media: true,
        rotational: false,
        max_request: 0,
        read_only: false,
        zones: None,
    }
}

impl MemDevice {
    pub fn new(size: u64) -> Arc<Self> {
        Self::with(size, |_| {})
    }

    pub fn with(size: u64, change: impl FnOnce(&mut Geometry)) -> Arc<Self> {
        let mut geometry = geometry(size);
        change(&mut geometry);
        Arc::new_cyclic(|me| Self {
            geometry: Mutex::new(geometry),
            data: Mutex::new(vec![0; size as usize]),
            kinds: Mutex::new(vec![ExtentKind::Hole; size.div_ceil(PAGE) as usize]),
            own: Mutex::new(vec![false; size.div_ceil(PAGE) as usize]),
            forked: AtomicBool::new(false),
            manner: Mutex::new(Manner::Inline),
            per_try: AtomicU64::new(0),
            bad_byte: AtomicU64::new(u64::MAX),
            cost_us: AtomicU64::new(0),
            by_workers: AtomicU64::new(0),
            spoils: AtomicBool::new(false),
            panics: AtomicBool::new(false),
            log: Mutex::default(),
            prefetched: Mutex::default(),
            held: Mutex::default(),
            me: me.clone(),
        })
    }

    /// Creates a device with one zone. The server does not split writes to zoned devices.
    pub fn zoned(size: u64) -> Arc<Self> {
        Self::with(size, |geometry| {
            geometry.zones = Some(ZoneGeometry {
                zone_size: size,
                nr_zones: 1,
                max_open: 0,
                max_active: 0,
                max_append: 0,
            });
        })
    }

    pub fn grow(&self, size: u64) {
        self.data.lock().unwrap().resize(size as usize, 0);
        self.kinds.lock().unwrap().resize(size.div_ceil(PAGE) as usize, ExtentKind::Hole);
        self.own.lock().unwrap().resize(size.div_ceil(PAGE) as usize, false);
        self.geometry.lock().unwrap().size = size;
    }

    pub fn set(&self, manner: Manner) {
        *self.manner.lock().unwrap() = manner;
    }

    pub fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        self.data.lock().unwrap()[offset as usize..offset as usize + len].to_vec()
    }

    pub fn fill(&self, offset: u64, data: &[u8]) {
        self.apply(&Request::write(offset, data.len() as u64), Buffer::Write(data)).unwrap();
    }

    /// Returns the logged requests with this operation.
    pub fn requests(&self, op: Op) -> Vec<Request> {
        self.log.lock().unwrap().iter().copied().filter(|request| request.op == op).collect()
    }

    pub fn held(&self) -> Vec<Request> {
        self.held.lock().unwrap().iter().map(|(request, ..)| *request).collect()
    }

    /// Completes the held request at `index`.
    pub fn release(&self, index: usize) {
        let (request, buffer, done) = self.held.lock().unwrap().remove(index);
        self.finish(&request, buffer, done);
    }

    pub fn release_all_backwards(&self) {
        while let Some((request, buffer, done)) = { self.held.lock().unwrap().pop() } {
            self.finish(&request, buffer, done);
        }
    }

    /// Drops the held requests without a result, so that they complete with Gone.
    pub fn drop_all(&self) {
        let held = std::mem::take(&mut *self.held.lock().unwrap());
        drop(held);
    }

    fn finish(&self, request: &Request, mut buffer: IoBuf, done: Completion) {
        let view = match request.op {
            Op::Read => Buffer::Read(&mut buffer),
            Op::Write => Buffer::Write(&buffer),
            _ => Buffer::None,
        };
        let outcome = self.apply(request, view);
        done.complete(outcome, buffer);
    }

    fn apply(&self, request: &Request, buffer: Buffer<'_>) -> Result<()> {
        let (from, to) = (request.offset as usize, (request.offset + request.len) as usize);
        let bad = self.bad_byte.load(SeqCst);
        if (request.offset..request.offset + request.len).contains(&bad) {
            if let Buffer::Read(buffer) = buffer
                && self.spoils.load(SeqCst)
            {
                buffer.fill(SPOILT);
            }
            return Err(Error::Media);
        }
        let mut data = self.data.lock().unwrap();
        let mut kind = None;
        match (request.op, buffer) {
            (Op::Read, Buffer::Read(buffer)) => buffer.copy_from_slice(&data[from..to]),
            (Op::Write, Buffer::Write(buffer)) => {
                data[from..to].copy_from_slice(buffer);
                kind = Some(ExtentKind::Data);
            }
            (Op::WriteZeroes, _) => {
                data[from..to].fill(0);
                let free = request.flags.contains(Flags::MAY_FREE);
                kind = Some(if free { ExtentKind::Hole } else { ExtentKind::Zero });
            }
            (Op::Discard, _) => {
                data[from..to].fill(0);
                kind = Some(ExtentKind::Hole);
            }
            (Op::Flush, _) => {}
            _ => panic!("a buffer that does not fit the request"),
        }
        if let Some(kind) = kind {
            let pages = from / PAGE as usize..to.div_ceil(PAGE as usize);
            self.kinds.lock().unwrap()[pages.clone()].fill(kind);
            self.own.lock().unwrap()[pages].fill(true);
        }
        Ok(())
    }
}

impl Device for MemDevice {
    fn geometry(&self) -> Geometry {
        *self.geometry.lock().unwrap()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        assert!(!self.panics.swap(false, SeqCst), "injected");
        request.check(&self.geometry())?;
        match &buffer {
            Buffer::None => assert!(!matches!(request.op, Op::Read | Op::Write)),
            Buffer::Read(buffer) => assert_eq!(buffer.len() as u64, request.len),
            Buffer::Write(buffer) => assert_eq!(buffer.len() as u64, request.len),
        }
        self.by_workers.fetch_add(u64::from(std::thread::current().name() == Some("worker")), SeqCst);
        if *self.manner.lock().unwrap() != Manner::Inline {
            return Ok(TryResult::WouldBlock);
        }
        let begun = cpu_time();
        while cpu_time().saturating_sub(begun) < Duration::from_micros(self.cost_us.load(SeqCst)) {
            std::hint::spin_loop();
        }
        let per_try = self.per_try.load(SeqCst);
        if per_try != 0 && request.len > per_try {
            let part = Request { len: per_try, ..*request };
            self.log.lock().unwrap().push(part);
            let n = per_try as usize;
            let buffer = match buffer {
                Buffer::None => Buffer::None,
                Buffer::Read(buffer) => Buffer::Read(&mut buffer[..n]),
                Buffer::Write(buffer) => Buffer::Write(&buffer[..n]),
            };
            self.apply(&part, buffer)?;
            return Ok(TryResult::Partly(per_try));
        }
        self.log.lock().unwrap().push(*request);
        self.apply(request, buffer)?;
        Ok(TryResult::Done)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.log.lock().unwrap().push(request);
        let manner = *self.manner.lock().unwrap();
        match manner {
            Manner::Inline => self.finish(&request, buffer, done),
            Manner::Held => self.held.lock().unwrap().push((request, buffer, done)),
            Manner::Thread => {
                let me = self.me.upgrade().unwrap();
                std::thread::spawn(move || me.finish(&request, buffer, done));
            }
        }
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        if self.bad_byte.load(SeqCst) == offset {
            return Err(Error::Media);
        }
        let kinds = self.kinds.lock().unwrap();
        let mut at = offset;
        while at < offset + len {
            let end = ((at / PAGE + 1) * PAGE).min(offset + len);
            if !row(Extent { offset: at, len: end - at, kind: kinds[(at / PAGE) as usize] }) {
                return Ok(end - offset);
            }
            at = end;
        }
        Ok(len)
    }

    fn changes(&self) -> Option<&dyn Changes> {
        self.forked.load(SeqCst).then_some(self as &dyn Changes)
    }

    fn prefetch(&self, offset: u64, len: u64) {
        self.prefetched.lock().unwrap().push((offset, len));
    }

    fn zoned(&self) -> Option<&dyn Zoned> {
        self.geometry().zones.is_some().then_some(self as &dyn Zoned)
    }
}

/// Reports one extent per page. Fails if the bad byte is one byte after the offset.
impl Changes for MemDevice {
    fn changes(&self, offset: u64, len: u64, row: &mut dyn FnMut(Change) -> bool) -> Result<u64> {
        if self.bad_byte.load(SeqCst) == offset + 1 {
            return Err(Error::Gone);
        }
        let own = self.own.lock().unwrap();
        let mut at = offset;
        while at < offset + len {
            let end = ((at / PAGE + 1) * PAGE).min(offset + len);
            if !row(Change { offset: at, len: end - at, own: own[(at / PAGE) as usize] }) {
                return Ok(end - offset);
            }
            at = end;
        }
        Ok(len)
    }
}

/// Reports one conventional zone. Zone operations fail or do nothing, as exports use only the zone geometry.
impl Zoned for MemDevice {
    fn report(&self, _: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()> {
        let size = self.geometry().size;
        row(Zone {
            start: 0,
            len: size,
            capacity: size,
            write_pointer: size,
            kind: ZoneType::Conventional,
            condition: freestone_core::device::zoned::ZoneCondition::NotWritePointer,
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

    fn submit_append(
        &self,
        _: u64,
        _: IoBuf,
        _: Flags,
        done: freestone_core::device::zoned::AppendCompletion,
    ) {
        done(Err(Error::Unsupported));
    }
}
