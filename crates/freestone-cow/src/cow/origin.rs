//! The origin: a device that preserves what snapshots need before it is overwritten.
//!
//! Reads and flushes go to the device below, writes by way of [`origin_write`].
//!
//! While a snapshot is merged it plays the origin's part: what comes to the origin is done as if it
//! had come to that snapshot. So nobody sees what is half merged.

use std::fmt;
use std::sync::Arc;

use super::gather::Job as _;
use super::notes::Notes;
use super::origin_write::{self, OriginWrite};
use super::state::{OriginCore, Snap};
use super::{reads, writes};
use freestone_core::device::{
    Buffer, Change, Changes, Completion, Device, Error, Extent, Geometry, IoBuf, Op, Request, Result, Tried,
    range_end,
};
use freestone_core::mutants::{self, Mutant};
use freestone_core::per_cpu_arc::PerCpuArc;

/// A device whose snapshots are kept. Clones are handles to one origin. All that writes the device
/// must go through it.
#[derive(Clone)]
pub struct Origin(pub(super) Arc<Anchor>);

/// What the handles of an origin and of its snapshots share. Origin and snapshots refer to each
/// other; this breaks that cycle when the last handle is dropped.
pub(super) struct Anchor(pub PerCpuArc<OriginCore>);

impl Origin {
    /// An origin without snapshots.
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self::noted(device, None)
    }

    /// As [`new`](Self::new), of a device that says beside its data whether a merge into it is
    /// under way. Until the snapshot of that merge is opened, it must not be used: see
    /// [`is_half_merged`](Self::is_half_merged).
    pub fn noted(device: Arc<dyn Device>, notes: Option<Box<dyn Notes>>) -> Self {
        Self(Arc::new(Anchor(OriginCore::new(device, notes, writes::take_over))))
    }

    /// The device below. Who writes it past the origin spoils the snapshots.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.0.0.device
    }

    /// Whether a merge into it is under way and the snapshot that is merged is not open: what it
    /// shows is half old, half new.
    pub fn is_half_merged(&self) -> bool {
        self.0.0.noted_merge().is_some() && self.merging().is_none()
    }

    /// Whether a merge into it is under way, so that what lies below it is half old, half new.
    pub fn is_merging(&self) -> bool {
        self.0.0.noted_merge().is_some() || self.merging().is_some_and(|snap| !snap.merge.is_finished())
    }

    /// What lies below it was changed past it, while it had no snapshots. A store that is opened
    /// again has missed that.
    pub fn was_changed(&self) {
        self.0.0.age.wrote();
    }

    /// How many snapshots it has.
    pub fn snapshots(&self) -> usize {
        let view = self.0.0.gate.value();
        view.snapshots.len() + usize::from(view.merging.is_some())
    }

    /// The snapshot that plays the origin's part.
    fn merging(&self) -> Option<Arc<Snap>> {
        let core = &self.0.0;
        if !core.may_merge() {
            return None;
        }
        core.gate.enter_any(|view| view.merging.as_deref().map(Arc::clone))
    }
}

impl Device for Origin {
    fn geometry(&self) -> Geometry {
        self.0.0.look().device.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        let core: &OriginCore = self.0.0.look();
        if matches!(request.op, Op::Read | Op::Flush) {
            if !core.may_merge() {
                return core.device.try_io(request, buffer);
            }
            return match (self.merging(), buffer) {
                (None, buffer) => core.device.try_io(request, buffer),
                (Some(snap), Buffer::Read(into)) => {
                    request.check(&core.device.geometry())?;
                    reads::try_read(&snap, request, into)
                }
                (Some(snap), _) => {
                    request.check(&core.device.geometry())?;
                    snap.try_flush(request)
                }
            };
        }
        if let Some(_under_way) = origin_write::without_snapshots(core) {
            return core.device.try_io(request, buffer);
        }
        request.check(&core.device.geometry())?;
        origin_write::try_write(core, request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let core = &self.0.0;
        if !matches!(request.op, Op::Read | Op::Flush) {
            return match request.check(&core.device.geometry()) {
                Ok(()) => OriginWrite::new(Arc::clone(core), request, buffer, done).go(Ok(())),
                Err(error) => done.complete(Err(error), buffer),
            };
        }
        match self.merging() {
            None if request.op == Op::Flush && mutants::on(Mutant::FlushGoesNowhere) => {
                done.complete(Ok(()), buffer);
            }
            None => core.device.submit(request, buffer, done),
            Some(snap) => match request.check(&core.device.geometry()) {
                Err(error) => done.complete(Err(error), buffer),
                Ok(()) if request.op == Op::Read => reads::submit(&snap, request, buffer, done),
                Ok(()) => snap.flush(request, buffer, done),
            },
        }
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        match self.merging() {
            Some(snap) if offset < snap.size => {
                // The origin may have grown.
                range_end(offset, len, self.geometry().size)?;
                snap.extents(offset, len.min(snap.size - offset), row)
            }
            _ => self.0.0.device.extents(offset, len, row),
        }
    }

    fn prefetch(&self, offset: u64, len: u64) {
        self.0.0.device.prefetch(offset, len);
    }

    fn changes(&self) -> Option<&dyn Changes> {
        self.0.0.device.changes().map(|_| self as &dyn Changes)
    }
}

impl Changes for Origin {
    fn changes(&self, offset: u64, len: u64, row: &mut dyn FnMut(Change) -> bool) -> Result<u64> {
        if self.is_merging() {
            // What the device has of its own is neither what it had nor what it will have.
            return Err(Error::Unsupported);
        }
        self.0.0.device.changes().ok_or(Error::Unsupported)?.changes(offset, len, row)
    }
}

impl fmt::Debug for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Origin({} snapshots)", self.snapshots())
    }
}

impl Drop for Anchor {
    fn drop(&mut self) {
        self.0.gate.change(|view| {
            view.changed(|view| {
                view.snapshots.clear();
                view.merging = None;
            })
        });
    }
}
