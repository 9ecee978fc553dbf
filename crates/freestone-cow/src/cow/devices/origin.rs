//! Origin: a device that preserves chunks for its snapshots before it overwrites them.
//!
//! Reads and flushes are passed to the device under the origin, writes to [`origin_write`].
//!
//! A snapshot that is being merged *serves* the origin: requests to the origin run as requests to
//! that snapshot. So users never see the half-merged content of the device under the origin.

use std::fmt;
use std::sync::Arc;

use crate::cow::notes::Notes;
use crate::cow::requests::origin_write::{self, OriginWrite};
use crate::cow::requests::{reads, writes};
use crate::cow::state::wait_group::Continuation as _;
use crate::cow::state::{OriginCore, Snap};
use freestone_core::device::{
    Buffer, Change, Changes, Completion, Device, Error, Extent, Geometry, IoBuf, Op, Request, Result,
    TryResult, range_end,
};
use freestone_core::mutants::{self, Mutant};
use freestone_core::per_cpu_arc::PerCpuArc;

/// Handle to a device with snapshots. Clones share one origin. All writes to the device must go
/// through the origin.
#[derive(Clone)]
pub struct Origin(pub(super) Arc<Anchor>);

/// Anchor shared by the handles of an origin and its snapshots. Origin and snapshots refer to each
/// other; dropping the anchor breaks that cycle.
pub(super) struct Anchor(pub PerCpuArc<OriginCore>);

impl Origin {
    /// Creates an origin without snapshots.
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self::with_notes(device, None)
    }

    /// Creates an origin whose notes record an interrupted merge. A half-merged origin must not be
    /// used before its snapshot is open: see [`is_half_merged`](Self::is_half_merged).
    pub fn with_notes(device: Arc<dyn Device>, notes: Option<Box<dyn Notes>>) -> Self {
        freestone_core::trail::step!();
        Self(Arc::new(Anchor(OriginCore::new(device, notes, writes::submit_from_origin))))
    }

    /// Returns the device under the origin. Writing to this device directly damages the snapshots.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.0.0.device
    }

    /// Returns true if a merge was interrupted and its snapshot is not open. The origin's content
    /// is then a mixture of old and new data.
    pub fn is_half_merged(&self) -> bool {
        self.0.0.noted_merge_id().is_some() && self.merging().is_none()
    }

    /// Returns true if a merge is unfinished. The device under the origin then holds a mixture of
    /// old and new data.
    pub fn is_merging(&self) -> bool {
        self.0.0.noted_merge_id().is_some() || self.merging().is_some_and(|snap| !snap.merge.is_finished())
    }

    /// Returns true if the origin records its content version when it is closed. All data must be durable before.
    pub fn records_close(&self) -> bool {
        self.0.0.content_version.content().is_some()
    }

    /// Records that the device under the origin was changed directly while the origin had no
    /// snapshots. Exception stores opened later have missed this change.
    pub fn mark_changed(&self) {
        self.0.0.content_version.mark_written();
    }

    /// Returns the number of attached snapshots, including one that is being merged.
    pub fn snapshot_count(&self) -> usize {
        let view = self.0.0.gate.value();
        view.snapshots.len() + usize::from(view.merging.is_some())
    }

    /// Returns the snapshot that serves the origin during its merge, or `None` if there is none.
    fn merging(&self) -> Option<Arc<Snap>> {
        let core = &self.0.0;
        if !core.may_have_merge() {
            return None;
        }
        core.gate.enter_any(|view| view.merging.as_deref().map(Arc::clone))
    }
}

impl Device for Origin {
    fn geometry(&self) -> Geometry {
        self.0.0.any().device.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        freestone_core::trail::step!();
        let core: &OriginCore = self.0.0.any();
        if matches!(request.op, Op::Read | Op::Flush) {
            if !core.may_have_merge() {
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
        if let Some(_work) = origin_write::without_snapshots(core) {
            return core.device.try_io(request, buffer);
        }
        request.check(&core.device.geometry())?;
        origin_write::try_write(core, request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        freestone_core::trail::step!();
        let core = &self.0.0;
        if !matches!(request.op, Op::Read | Op::Flush) {
            return match request.check(&core.device.geometry()) {
                Ok(()) => OriginWrite::new(Arc::clone(core), request, buffer, done).resume(Ok(())),
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
                // The origin may have grown beyond the snapshot's end.
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
            // During a merge the device's own changes match neither the old nor the new content.
            return Err(Error::Unsupported);
        }
        self.0.0.device.changes().ok_or(Error::Unsupported)?.changes(offset, len, row)
    }
}

impl fmt::Debug for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Origin({} snapshots)", self.snapshot_count())
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
