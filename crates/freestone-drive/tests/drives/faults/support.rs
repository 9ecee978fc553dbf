//! Shared parts of the fault tests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use freestone_core::device::zoned::{AppendCompletion, Zone, ZoneOp};
use freestone_core::device::{
    Blocking, Buffer, Completion, Device, Error, Extent, Flags, Geometry, IoBuf, Op, Request, Result,
    TryResult, Zoned,
};
use freestone_drive::faults::{Faults, Rules};

/// Deadline for any completion.
pub const PATIENCE: Duration = Duration::from_secs(20);
pub const BLOCK: usize = 4096;

pub fn rules(text: &str) -> Rules {
    text.parse().unwrap_or_else(|error| panic!("{error}"))
}

pub fn faults(inner: Arc<dyn Device>, text: &str) -> Faults {
    Faults::new(inner, rules(text), 42).expect("the timer starts")
}

/// A submitted request whose result may still be pending.
pub struct PendingRequest(mpsc::Receiver<(Result<()>, IoBuf)>);

pub fn submit(device: &dyn Device, request: Request, data: &[u8]) -> PendingRequest {
    let (tx, rx) = mpsc::channel();
    let done = Completion::new(move |outcome, buffer| tx.send((outcome, buffer)).unwrap_or_default());
    device.submit(request, IoBuf::copy_of(data).expect("memory"), done);
    PendingRequest(rx)
}

impl PendingRequest {
    pub fn wait(&self) -> Result<()> {
        self.0.recv_timeout(PATIENCE).expect("it is answered").0
    }

    pub fn is_open(&self) -> bool {
        self.poll().is_none()
    }

    /// Returns the result if the request has completed, else None.
    pub fn poll(&self) -> Option<Result<()>> {
        self.0.try_recv().ok().map(|(outcome, _)| outcome)
    }
}

pub fn read(device: &dyn Device, offset: u64, len: usize) -> Vec<u8> {
    let mut data = vec![0x5c; len];
    device.read_at(offset, &mut data).expect("it is read");
    data
}

pub fn write(device: &dyn Device, offset: u64, byte: u8, len: usize) -> Result<()> {
    device.write_at(offset, &vec![byte; len], Flags::empty())
}

/// Returns, for each rule, how often the rule fired.
pub fn fired(faults: &Faults) -> Vec<u64> {
    faults.counts().iter().map(|count| count.fired).collect()
}

/// A device that counts the requests that reach it.
pub struct Recorder {
    inner: Arc<dyn Device>,
    pub flushes: AtomicU64,
    pub durable: AtomicU64,
    pub all: AtomicU64,
}

impl Recorder {
    pub fn new(inner: Arc<dyn Device>) -> Arc<Self> {
        let zero = AtomicU64::default;
        Arc::new(Self { inner, flushes: zero(), durable: zero(), all: zero() })
    }

    fn note(&self, request: &Request) {
        self.all.fetch_add(1, Ordering::SeqCst);
        if request.op == Op::Flush {
            self.flushes.fetch_add(1, Ordering::SeqCst);
        }
        self.note_flags(request.flags);
    }

    fn note_flags(&self, flags: Flags) {
        if flags.contains(Flags::FUA) {
            self.durable.fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl Device for Recorder {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        self.note(request);
        self.inner.try_io(request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.note(&request);
        self.inner.submit(request, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.inner.extents(offset, len, row)
    }

    fn zoned(&self) -> Option<&dyn Zoned> {
        self.inner.zoned().map(|_| self as &dyn Zoned)
    }
}

impl Zoned for Recorder {
    fn report(&self, offset: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()> {
        self.inner.zoned().ok_or(Error::Unsupported)?.report(offset, row)
    }

    fn zone_op(&self, op: ZoneOp, offset: u64) -> Result<()> {
        self.inner.zoned().ok_or(Error::Unsupported)?.zone_op(op, offset)
    }

    fn reset_all(&self) -> Result<()> {
        self.inner.zoned().ok_or(Error::Unsupported)?.reset_all()
    }

    fn try_append(&self, offset: u64, data: &[u8], flags: Flags) -> Result<Option<u64>> {
        self.note_flags(flags);
        self.inner.zoned().ok_or(Error::Unsupported)?.try_append(offset, data, flags)
    }

    fn submit_append(&self, offset: u64, data: IoBuf, flags: Flags, done: AppendCompletion) {
        self.note_flags(flags);
        match self.inner.zoned() {
            Some(zoned) => zoned.submit_append(offset, data, flags, done),
            None => done(Err(Error::Unsupported)),
        }
    }
}
