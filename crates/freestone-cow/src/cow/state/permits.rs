//! Permits for the copies in flight of a snapshot.
//!
//! A request acquires a permit before it locks a slot or allocates a chunk of the COW device. If no
//! permit is free, the request waits in a queue, holding nothing, and receives the permit of a
//! finished copy. So permits cannot deadlock: each permit belongs to a running copy, or to a
//! request that starts a copy or drops the permit. (The kernel's counter did deadlock as a
//! semaphore, because a waiter held a lock.)

use std::sync::Arc;

use super::Snap;
use freestone_core::percpu;

/// Maximum number of bytes copied by one read and write, as in the kernel's sub-jobs. Also the
/// memory that a copy in flight uses.
pub(in crate::cow) const COPY_PIECE_BYTES: u64 = 512 << 10;
/// Default maximum number of copies in flight per snapshot: the kernel's `snapshot_cow_threshold`.
pub(super) const COPIES_MAX_DEFAULT: usize = 2048;
/// Memory limit for the copies in flight of one snapshot, in bytes. With large chunks this limit is
/// reached before the number of copies.
const COPY_MEMORY_BYTES_MAX: u64 = 64 << 20;

/// Permit for one copy in flight of one snapshot.
pub(in crate::cow) struct Permit(Arc<Snap>);

/// Task that waits for a permit.
pub(super) type PermitTask = Box<dyn FnOnce(Permit) + Send>;

impl Snap {
    /// Sets the maximum number of copies in flight: at least 1, and at most the number that the
    /// memory limit allows. Copies in flight continue.
    pub fn set_copies_max(self: &Arc<Self>, limit: usize) {
        let limit = limit.clamp(1, copies_max(self.chunk()));
        self.run_permitted(self.copy_tokens.set_limit(limit as u64));
    }

    pub fn try_permit(self: &Arc<Self>) -> Option<Permit> {
        self.copy_tokens.take(percpu::current()).then(|| Permit(Arc::clone(self)))
    }

    /// Runs `next` with a permit on the work queue as soon as a permit is free.
    pub fn queue_for_permit(self: &Arc<Self>, next: impl FnOnce(Permit) + Send + 'static) {
        self.run_permitted(self.copy_tokens.wait(Box::new(next)));
    }

    fn run_permitted(self: &Arc<Self>, served: Vec<PermitTask>) {
        for next in served {
            let permit = Permit(Arc::clone(self));
            self.core.work_queue.push(move || next(permit));
        }
    }
}

/// Returns the number of copies whose buffers fit into [`COPY_MEMORY_BYTES_MAX`].
pub(super) fn copies_max(chunk: u64) -> usize {
    (COPY_MEMORY_BYTES_MAX / chunk.min(COPY_PIECE_BYTES)) as usize
}

impl Permit {
    /// Returns the snapshot that the permit belongs to.
    pub fn snap(&self) -> &Arc<Snap> {
        &self.0
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.run_permitted(self.0.copy_tokens.release(percpu::current()));
    }
}
