//! Points at which a test kills the process, to check that another one can adopt its memory. Without debug
//! assertions [`pass`] is empty.
//!
//! The environment variable [`VARIABLE`] has the name of a point and the number of times that the process
//! passes it, such as `WordMoved:3`: it is killed the third time.

/// Name of the environment variable.
pub const VARIABLE: &str = "FREESTONE_KILL_POINT";

/// A step of a change that another process can find half done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KillPoint {
    /// An object is about to be overwritten in place.
    OverwriteRecorded,
    /// Half of an object is overwritten in place.
    HalfOverwritten,
    /// An object and its word are overwritten, and the slot is locked.
    Overwritten,
    /// A word is in its new slot, and still in the former one.
    WordMoved,
    /// A word has left its former slot.
    WordPassedOn,
    /// An object has moved in the pool, and its former place is not free yet.
    ObjectMoved,
    /// A snapshot is taken and not recorded.
    SnapshotAttached,
    /// The removal of a snapshot is recorded and has not begun.
    RemovalRecorded,
    /// A rewind is recorded, and requests still use the former layer.
    RewindRecorded,
    /// A rewind is done, and the former layer is not freed yet.
    Rewound,
    /// The nodes of a page table are free, and its root is not.
    NodesFreed,
    /// Pages are on the backing device, and their slots do not refer to it yet.
    PagesWritten,
    /// A slot refers to the backing device, and the object in memory is not free yet.
    PageWrittenBack,
    /// A slot is in flight: its page is being read from the backing device.
    PageInFlight,
    /// A slot refers to the object that was read from the backing device, whose space there is not free yet.
    PageRead,
    /// The object of a group is stored, and no page refers to it.
    GroupStored,
    /// An object is in the table of shared objects, and its page has it still.
    ObjectShared,
    /// A page has its object again, which is still in the table of shared objects.
    ObjectTakenBack,
}

impl KillPoint {
    /// All points.
    pub const ALL: [Self; 18] = [
        Self::OverwriteRecorded,
        Self::HalfOverwritten,
        Self::Overwritten,
        Self::WordMoved,
        Self::WordPassedOn,
        Self::ObjectMoved,
        Self::SnapshotAttached,
        Self::RemovalRecorded,
        Self::RewindRecorded,
        Self::Rewound,
        Self::NodesFreed,
        Self::PagesWritten,
        Self::PageWrittenBack,
        Self::PageInFlight,
        Self::PageRead,
        Self::GroupStored,
        Self::ObjectShared,
        Self::ObjectTakenBack,
    ];
}

/// Kills the process if it passes this point for the given time.
#[inline]
pub fn pass(point: KillPoint) {
    #[cfg(all(debug_assertions, not(loom)))]
    armed::pass(point, || ());
    let _ = point;
}

/// As [`pass`]. Runs `half` before the process is killed.
#[inline]
pub fn pass_with(point: KillPoint, half: impl FnOnce()) {
    #[cfg(all(debug_assertions, not(loom)))]
    armed::pass(point, half);
    #[cfg(not(all(debug_assertions, not(loom))))]
    drop(half);
    let _ = point;
}

#[cfg(all(debug_assertions, not(loom)))]
mod armed {
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicI64, Ordering};

    use super::{KillPoint, VARIABLE};

    /// The point of this process, and how often it is still to be passed.
    static ARMED: LazyLock<Option<(KillPoint, AtomicI64)>> = LazyLock::new(|| {
        let text = std::env::var(VARIABLE).ok()?;
        let (name, times) = text.split_once(':')?;
        let point = KillPoint::ALL.into_iter().find(|point| format!("{point:?}") == name)?;
        Some((point, AtomicI64::new(times.parse().ok()?)))
    });

    pub fn pass(point: KillPoint, half: impl FnOnce()) {
        let Some((_, left)) = ARMED.as_ref().filter(|(armed, _)| *armed == point) else { return };
        // Relaxed: one thread sees the last value.
        if left.fetch_sub(1, Ordering::Relaxed) != 1 {
            return;
        }
        half();
        let own = rustix::process::getpid();
        let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
        // The signal is delivered before the call returns, or to another thread a moment later.
        loop {
            std::thread::park();
        }
    }
}
