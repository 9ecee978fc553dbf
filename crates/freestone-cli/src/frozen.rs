//! A fork as it was at one moment, for who wants to know what it held over its base.

use std::sync::Arc;

use freestone::device::{
    Buffer, Change, Changes, Completion, Device, Extent, Geometry, IoBuf, Request, Result, Tried,
};
use freestone::ram::Ram;

/// A snapshot of a fork. What it shows is the snapshot's; what differs from the base, at most what the fork holds now: a
/// page that a fork holds it holds until it is rewound, which must not happen meanwhile.
pub struct Frozen {
    /// Content.
    pub snapshot: Arc<Ram>,
    /// Who tells what is not the base's.
    pub fork: Arc<Ram>,
}

impl Device for Frozen {
    fn geometry(&self) -> Geometry {
        self.snapshot.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        self.snapshot.try_io(request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.snapshot.submit(request, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.snapshot.extents(offset, len, row)
    }

    fn changes(&self) -> Option<&dyn Changes> {
        Some(self)
    }
}

impl Changes for Frozen {
    // The fork can have grown since, but not shrunk.
    fn changes(&self, offset: u64, len: u64, row: &mut dyn FnMut(Change) -> bool) -> Result<u64> {
        Changes::changes(&*self.fork, offset, len, row)
    }
}
