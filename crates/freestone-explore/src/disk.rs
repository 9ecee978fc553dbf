//! A disk whose content is switched between states while it stays exported.

use std::sync::Arc;

use freestone_core::device::{
    Buffer, Changes, Completion, Device, Extent, Geometry, IoBuf, Request, Result, TryResult,
};
use freestone_core::sync::Mutex;

/// Device that forwards requests to the disk of the present state. A worker of an exploration
/// exports one such disk, and switches it before each check.
///
/// All disks must have the same geometry. A request that is in flight during a switch continues on
/// the former disk.
pub struct SwitchedDisk {
    /// Lock order: innermost. Held only to copy or replace the reference.
    disk: Mutex<Arc<dyn Device>>,
}

impl SwitchedDisk {
    /// Creates a device that forwards to `disk`.
    pub fn new(disk: Arc<dyn Device>) -> Self {
        Self { disk: Mutex::new(disk) }
    }

    /// Forwards further requests to `disk`.
    pub fn switch(&self, disk: Arc<dyn Device>) {
        // The former disk is dropped after the lock was released.
        let _former = std::mem::replace(&mut *self.disk.lock(), disk);
    }

    fn disk(&self) -> Arc<dyn Device> {
        Arc::clone(&self.disk.lock())
    }
}

impl Device for SwitchedDisk {
    fn geometry(&self) -> Geometry {
        self.disk().geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        self.disk().try_io(request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.disk().submit(request, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.disk().extents(offset, len, row)
    }

    fn changes(&self) -> Option<&dyn Changes> {
        None
    }
}
