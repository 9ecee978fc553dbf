//! A device with the numbers that the block layer's `stat` file has of a disk: what its users asked
//! for, however it is done below.

use std::sync::Arc;

use crossbeam_utils::CachePadded;

use super::zoned::{AppendCompletion, Zone, ZoneOp, Zoned};
use super::{
    Buffer, Changes, Completion, Counted, Device, Error, Extent, Flags, Geometry, IoBuf, OpCounts, Request,
    Result, Tried,
};
use crate::per_cpu_arc::PerCpuArc;

/// Counts what comes through. Requests of different CPUs meet nowhere: neither the counters nor the
/// ownership of them is shared.
pub struct Counting {
    inner: Arc<dyn Device>,
    counts: PerCpuArc<Shell>,
}

type Shell = CachePadded<Arc<OpCounts>>;

impl Counting {
    /// All numbers are 0.
    pub fn new(inner: Arc<dyn Device>) -> Self {
        let counts = Arc::new(OpCounts::default());
        Self { inner, counts: PerCpuArc::new(|| CachePadded::new(Arc::clone(&counts))) }
    }

    /// What came through and how it ended.
    pub fn counts(&self) -> Counted {
        self.counts.snapshot()
    }

    fn zones(&self) -> Result<&dyn Zoned> {
        self.inner.zoned().ok_or(Error::Unsupported)
    }
}

impl Device for Counting {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        let outcome = self.inner.try_io(request, buffer);
        self.counts.look().tried(request, &outcome);
        outcome
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let counts = Arc::clone(&self.counts);
        counts.begun();
        let done = Completion::new(move |outcome, buffer| {
            counts.ended();
            counts.answered(&request, &outcome);
            done.complete(outcome, buffer);
        });
        self.inner.submit(request, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.inner.extents(offset, len, row)
    }

    fn prefetch(&self, offset: u64, len: u64) {
        self.inner.prefetch(offset, len);
    }

    fn zoned(&self) -> Option<&dyn Zoned> {
        self.inner.zoned().map(|_| self as &dyn Zoned)
    }

    fn changes(&self) -> Option<&dyn Changes> {
        self.inner.changes()
    }
}

impl Zoned for Counting {
    fn report(&self, offset: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()> {
        self.zones()?.report(offset, row)
    }

    fn zone_op(&self, op: ZoneOp, offset: u64) -> Result<()> {
        self.zones()?.zone_op(op, offset)
    }

    fn reset_all(&self) -> Result<()> {
        self.zones()?.reset_all()
    }

    fn try_append(&self, offset: u64, data: &[u8], flags: Flags) -> Result<Option<u64>> {
        let outcome = self.zones()?.try_append(offset, data, flags);
        if !matches!(outcome, Ok(None)) {
            self.counts.appended(data.len() as u64, &outcome);
        }
        outcome
    }

    fn submit_append(&self, offset: u64, data: IoBuf, flags: Flags, done: AppendCompletion) {
        let zones = match self.zones() {
            Ok(zones) => zones,
            Err(error) => return done(Err(error)),
        };
        let (counts, bytes) = (Arc::clone(&self.counts), data.len() as u64);
        counts.begun();
        let done = Box::new(move |outcome| {
            counts.ended();
            counts.appended(bytes, &outcome);
            done(outcome);
        });
        zones.submit_append(offset, data, flags, done);
    }
}
