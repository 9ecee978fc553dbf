//! One moment for several devices: snapshots that are taken together show all of their origins at one point in time.
//!
//! A write that was answered before another began is in the snapshots if the other is, on whatever device of the set
//! each went. All that can fail or take long (a store on a disk, memory) is done before, in making what implements
//! [`Pending`].

use std::sync::{Mutex, PoisonError};

/// A snapshot that is ready and has not begun.
pub trait Pending: Send {
    /// Whether [`freeze`](Self::freeze) may have to wait for a disk.
    fn waits_for_disk(&self) -> bool {
        false
    }
    /// Returns when no write to the origin is under way any more; those that come wait until [`thaw`](Self::thaw).
    fn freeze(&mut self);
    /// The snapshot begins: what the origin holds now is what it shows. Called once, while frozen.
    fn attach(&mut self);
    /// Writes go on.
    fn thaw(&mut self);
}

/// Two sets of devices at one time could each wait for a device that the other has frozen.
static ONE: Mutex<()> = Mutex::new(());

/// Begins all of these snapshots at one moment. Writers of the origins are held up for as long as it takes. Origins that
/// have to wait for a disk come first, whatever the order here: those in memory are held up for the least time, and can be
/// what others lie on. Of two such origins of which one lies on the other the upper one must be given first.
pub fn take(pending: &mut [&mut dyn Pending]) {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    pending.sort_by_key(|one| !one.waits_for_disk());
    for one in &mut *pending {
        one.freeze();
    }
    for one in &mut *pending {
        one.attach();
    }
    for one in pending {
        one.thaw();
    }
}
