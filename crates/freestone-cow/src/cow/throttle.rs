//! How many copies of a snapshot are in flight at once.
//!
//! A request takes a permit before it takes a slot or a place on the COW device. Where there is none it queues, holding
//! nothing, and goes on with the permit of a copy that ended. So permits never wait for each other: whoever holds one either
//! runs a copy, which ends by itself, or is on its way to begin one, and gives it back if it need not. (The kernel's counter did
//! deadlock when it was a semaphore that was waited for with a lock held.)
//!
//! Lock order: the rights' lock may be taken under a slot; the work queue with nothing of this held.

use std::sync::Arc;

use super::snapshot::Snap;
use super::tokens::Tokens;
use freestone_core::percpu;

/// Copies in flight a snapshot unless told otherwise: the kernel's `snapshot_cow_threshold`.
pub const COPIES_MAX_DEFAULT: usize = 2048;

/// What goes on with a permit.
pub type Next = Box<dyn FnOnce(Permit) + Send>;

/// The right to have one copy in flight, of one snapshot.
pub struct Permit(Arc<Snap>);

/// The rights of one snapshot.
pub fn rights(most: usize) -> Tokens<Next> {
    Tokens::new(most as u64, percpu::cpus())
}

impl Snap {
    /// At most `most` copies, at least 1, from now on; those in flight stay.
    pub fn set_copies(self: &Arc<Self>, most: usize) {
        self.hand_over(self.rights.set_most(most.max(1) as u64));
    }

    /// A permit, if one is free.
    pub fn permit(self: &Arc<Self>) -> Option<Permit> {
        self.rights.take(percpu::current()).then(|| Permit(Arc::clone(self)))
    }

    /// Runs `next` with a permit when there is one, on the work queue.
    pub fn queue(self: &Arc<Self>, next: impl FnOnce(Permit) + Send + 'static) {
        self.hand_over(self.rights.wait(Box::new(next)));
    }

    fn hand_over(self: &Arc<Self>, served: Vec<Next>) {
        for next in served {
            let permit = Permit(Arc::clone(self));
            self.core.work_queue.push(move || next(permit));
        }
    }
}

impl Permit {
    /// The snapshot that gave it.
    pub fn snap(&self) -> &Arc<Snap> {
        &self.0
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.hand_over(self.0.rights.give(percpu::current()));
    }
}
