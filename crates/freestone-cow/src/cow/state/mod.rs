//! State shared by an origin and its snapshots: the list of snapshots, their states, and the
//! permits to copy (`permits`).
//!
//! # Lock order
//! 1. The origin's `setup`.
//! 2. The gate of the origin, then that of a snapshot.
//! 3. A slot of `exceptions`.
//! 4. Under a slot, one after the other: the store's queue, `copy_tokens`, a wait group,
//!    `loss_waiters`, the write tracking of `merge`.
//! 5. The work queue, with no lock of item 4 held.
//!
//! No lock is held during a call of a device, but a try (`try_io`) may run on a pinned thread.

pub(super) mod content;
pub(super) mod loss;
pub(super) mod merge_state;
pub(super) mod permits;
mod small_blocks;
mod snapshot;
pub(super) mod wait_group;

use std::ops::Deref;
use std::sync::Arc;

use crossbeam_utils::CachePadded;

use crate::cow::config::Config;
use crate::cow::exceptions::Exceptions;
use crate::cow::notes::Notes;
use crate::cow::store::Store;
use crate::cow::tokens::Tokens;
use content::{ContentVersion, MissedWrites};
use freestone_core::device::{Completion, Device, IoBuf, Request};
use freestone_core::freeze_gate::FreezeGate;
use freestone_core::per_cpu_arc::PerCpuArc;
use freestone_core::percpu::Counters;
use freestone_core::slot::Common;
use freestone_core::sync::{AtomicU32, Mutex, OnceLock, Ordering};
use freestone_core::work_queue::WorkQueue;
use freestone_core::zeroes::leading_zeroes;
use merge_state::MergeState;
use permits::PermitTask;
use wait_group::Waiter;

/// Indexes of a snapshot's counters.
pub(super) mod counter {
    pub const COPIED: usize = 0;
    pub const FULL: usize = 1;
    pub const ORIGIN_WAITED: usize = 2;
    pub const ORIGIN_READS: usize = 3;
    pub const REREADS: usize = 4;
    pub const COUNT: usize = 5;
}

/// Per-CPU reference to an origin, on its own cache line.
pub(super) struct OriginCore(CachePadded<Arc<OriginState>>);

/// State shared by all references to an origin.
pub(super) struct OriginState {
    pub device: Arc<dyn Device>,
    pub notes: Option<Box<dyn Notes>>,
    /// Entered by writes to the origin. Closed to attach a snapshot or to start a merge.
    pub gate: FreezeGate<View>,
    pub work_queue: Arc<WorkQueue>,
    /// Runs queries of the origin's extents, which may wait for a disk.
    pub extents_queue: Arc<WorkQueue>,
    pub common: OnceLock<Arc<Common>>,
    /// Serializes changes of the snapshot list. Requests do not take this lock. The start of a
    /// merge holds the lock while it waits for writes in flight.
    pub setup: Mutex<SetupState>,
    /// Becomes 1 just before a snapshot serves the origin for the first time. Until then reads skip
    /// the view.
    merge_announced: AtomicU32,
    /// Content version of the origin, to detect exception stores that missed writes.
    pub content_version: ContentVersion,
    /// Function that submits a write to the snapshot that serves the origin.
    pub write_merging: WriteSnapshot,
}

/// Function that submits a write, write zeroes or discard to a snapshot.
pub(super) type WriteSnapshot = fn(Arc<Snap>, Request, IoBuf, Completion);

/// Snapshots in preparation, and the state of a merge into the origin.
#[derive(Default)]
pub(super) struct SetupState {
    /// COW devices of snapshots that are prepared but not attached.
    pub preparing: Vec<Arc<dyn Device>>,
    pub merging: Merging,
}

/// State of a merge into the origin.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Merging {
    #[default]
    No,
    /// A snapshot with an interrupted merge is open, and the merge was not resumed yet. Other
    /// existing exception stores can still be opened.
    Interrupted,
    Yes,
}

/// Snapshots that a write to the origin must check.
#[derive(Clone, Default)]
pub(super) struct View {
    /// Attached snapshots, sorted by chunk size, largest first.
    pub snapshots: Vec<PerCpuArc<Snap>>,
    /// Snapshot that serves the origin during a merge.
    pub merging: Option<PerCpuArc<Snap>>,
    /// Number of the view, increased with every change of the view.
    pub generation: u64,
    /// Boot number, increased with every simulated power loss.
    pub boot: u64,
}

/// Mode in which a snapshot handles writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Writes to the snapshot make exceptions.
    Normal,
    /// The snapshot is being merged and serves the origin.
    Merging,
}

/// Per-CPU reference to a snapshot, on its own cache line.
pub(super) struct Snap(CachePadded<Arc<SnapState>>);

/// State shared by all references to a snapshot.
pub(super) struct SnapState {
    pub core: PerCpuArc<OriginCore>,
    pub store: Arc<Store>,
    pub exceptions: Exceptions<Waiter>,
    /// Entered by writes to the snapshot and by new exceptions.
    pub gate: FreezeGate<Mode>,
    /// Permits for copies in flight. The lock is held for a few instructions.
    copy_tokens: Tokens<PermitTask>,
    pub config: Config,
    pub size: u64,
    pub merge: MergeState,
    /// Location of the exception store, for messages.
    pub location: OnceLock<String>,
    /// Result of the check for missed writes. Set when the snapshot is attached.
    pub missed_writes: OnceLock<MissedWrites>,
    pub counters: Counters<{ counter::COUNT }>,
    /// COW device, wrapped if necessary so that its logical blocks are at most as large as the
    /// origin's.
    pub cow: Arc<dyn Device>,
    pub logical_block: u32,
    state: AtomicU32,
    /// Writes of the origin that wait until the COW device is marked invalid. The lock is held for
    /// a few instructions.
    loss_waiters: Mutex<Vec<Waiter>>,
}

impl Deref for OriginCore {
    type Target = OriginState;
    fn deref(&self) -> &OriginState {
        &self.0
    }
}

impl OriginCore {
    pub fn new(
        device: Arc<dyn Device>,
        notes: Option<Box<dyn Notes>>,
        write_merging: WriteSnapshot,
    ) -> PerCpuArc<Self> {
        let core = Arc::new(OriginState {
            content_version: ContentVersion::new(notes.as_deref()),
            device,
            notes,
            gate: FreezeGate::new(View::default()),
            work_queue: WorkQueue::plugged("cow"),
            extents_queue: WorkQueue::new("cow-extents"),
            common: OnceLock::new(),
            setup: Mutex::default(),
            merge_announced: AtomicU32::new(0),
            write_merging,
        });
        PerCpuArc::new(|| Self(CachePadded::new(Arc::clone(&core))))
    }
}

impl OriginState {
    /// Returns the id of the merge in progress according to the origin's notes, or `None` without
    /// such a note.
    pub fn noted_merge_id(&self) -> Option<u64> {
        self.notes.as_ref()?.merge_id()
    }

    /// Announces that a snapshot will serve the origin, so that reads check the view.
    pub fn announce_merge(&self) {
        self.merge_announced.store(1, Ordering::SeqCst);
    }

    /// Returns true if a snapshot may serve the origin.
    pub fn may_have_merge(&self) -> bool {
        self.merge_announced.load(Ordering::SeqCst) != 0
    }

    /// Returns the end of the zeroes at the start of a range, and the end of the known data after
    /// these zeroes. May wait for a disk, so must be called on
    /// [`extents_queue`](Self::extents_queue).
    pub fn leading_zeroes(&self, at: u64, end: u64) -> (u64, u64) {
        leading_zeroes(at, end, |from, len, row| self.device.extents(from, len, row).map(drop))
    }

    pub fn remove_snapshot(&self, snap: &Snap) {
        self.gate.change(|view| {
            view.changed(|view| {
                view.snapshots.retain(|other| !other.is_same(snap));
                view.merging.take_if(|other| other.is_same(snap));
            })
        });
    }
}

impl Drop for OriginState {
    fn drop(&mut self) {
        self.work_queue.stop();
        self.extents_queue.stop();
        // No request is in flight, so the content does not change any more.
        if let (Some(notes), Some(content)) = (&self.notes, self.content_version.content()) {
            notes.record_close(content);
        }
    }
}

impl View {
    /// Returns a copy of the view with `change` applied and a new generation.
    pub fn changed(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut view = self.clone();
        change(&mut view);
        view.generation += 1;
        view.snapshots.sort_by_key(|snap| std::cmp::Reverse(snap.chunk()));
        view
    }
}
