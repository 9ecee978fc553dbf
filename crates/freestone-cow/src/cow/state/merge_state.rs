//! Progress of a snapshot's merge, and coordination of the merge with writes. See
//! [`merge`](crate::cow::devices::merge).

use std::collections::HashMap;
use std::ops::Range;

use thiserror::Error;

use super::wait_group::Waiter;
use crate::cow::store::MergeError;
use freestone_core::device::{Error, Result};
use freestone_core::pin::wait;
use freestone_core::sync::{Condvar, Mutex};

/// Progress of a merge.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum MergeStatus {
    /// No merge of the snapshot was started.
    #[default]
    None,
    /// The merge is running.
    Running,
    /// The merge was stopped or interrupted, and can be resumed.
    Stopped,
    /// All exceptions are in the origin. Requests to the snapshot are now executed by the origin.
    Finished,
    /// The merge failed, and can be resumed.
    Failed(MergeFailure),
}

/// Errors that end a merge.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MergeFailure {
    /// The exception store failed.
    #[error("the exception store: {0}")]
    Store(#[from] MergeError),
    /// The origin or the COW device failed.
    #[error("{what} failed: {error}")]
    Device {
        /// Name of the operation that failed.
        what: &'static str,
        /// Error from the device.
        error: Error,
    },
}

/// State of one snapshot's merge.
///
/// Lock order: a slot, then `tracking`. `progress` is taken under the origin's `setup`, or without
/// other locks. Both locks are held for a few instructions, and never while a waiter is notified.
#[derive(Default)]
pub(in crate::cow) struct MergeState {
    tracking: Mutex<Tracking>,
    runs_changed: Condvar,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Default)]
struct Tracking {
    /// Number of writes in flight to the COW device, by chunk of the origin.
    writes: HashMap<u64, usize>,
    /// Writes that wait because their chunk is being merged.
    held: Vec<Waiter>,
    /// True while a run is being merged, or its exceptions are being restored.
    busy: bool,
    /// Chunks that stay marked as being merged until the store has restored their exceptions.
    torn: Option<Range<u64>>,
}

#[derive(Default)]
struct Progress {
    status: MergeStatus,
    stop: bool,
    /// Largest number of sectors that were left when the merge was started or resumed.
    total: u64,
}

impl MergeState {
    /// Creates the state of a merge that was interrupted.
    pub fn interrupted() -> Self {
        let progress = Progress { status: MergeStatus::Stopped, ..Progress::default() };
        Self { progress: Mutex::new(progress), ..Self::default() }
    }

    /// Counts a write to this chunk on the COW device. The caller holds the chunk's slot lock.
    pub fn begin_cow_write(&self, chunk: u64) {
        *self.tracking.lock().writes.entry(chunk).or_insert(0) += 1;
    }

    /// Ends a write counted by [`begin_cow_write`](Self::begin_cow_write).
    pub fn end_cow_write(&self, chunk: u64) {
        let mut tracking = self.tracking.lock();
        if let Some(count) = tracking.writes.get_mut(&chunk) {
            *count -= 1;
            if *count == 0 {
                tracking.writes.remove(&chunk);
                self.runs_changed.notify_all();
            }
        }
    }

    pub fn wait_for_cow_writes(&self, chunks: &Range<u64>) {
        let mut tracking = self.tracking.lock();
        while tracking.writes.keys().any(|chunk| chunks.contains(chunk)) {
            tracking = wait(&self.runs_changed, tracking);
        }
    }

    /// Holds a write to a chunk that is being merged until the end of the run. The caller holds the
    /// chunk's slot lock.
    ///
    /// Returns true if no run is being merged or restored. The caller must then restore the
    /// exceptions of the torn run and call [`end_run`](Self::end_run).
    pub fn hold_write(&self, waiter: Waiter) -> bool {
        let mut tracking = self.tracking.lock();
        tracking.held.push(waiter);
        !std::mem::replace(&mut tracking.busy, true)
    }

    /// Returns the chunks that stay marked as being merged until their exceptions are restored, or
    /// `None` if there are none.
    pub fn torn(&self) -> Option<Range<u64>> {
        self.tracking.lock().torn.clone()
    }

    /// Starts the merge of a run, after waiting for a restore in progress.
    pub fn begin_run(&self) {
        let mut tracking = self.tracking.lock();
        while tracking.busy {
            tracking = wait(&self.runs_changed, tracking);
        }
        tracking.busy = true;
    }

    /// Ends the merge of a run or its restore, and notifies the held writes. The chunks in `torn`
    /// stay marked.
    pub fn end_run(&self, torn: Option<Range<u64>>, outcome: Result<()>) {
        let mut tracking = self.tracking.lock();
        tracking.busy = false;
        tracking.torn = torn;
        let held = std::mem::take(&mut tracking.held);
        drop(tracking);
        self.runs_changed.notify_all();
        for waiter in held {
            waiter.notify(outcome);
        }
    }

    pub fn status(&self) -> MergeStatus {
        self.progress.lock().status.clone()
    }

    pub fn is_finished(&self) -> bool {
        self.progress.lock().status == MergeStatus::Finished
    }

    pub fn has_failed(&self) -> bool {
        matches!(self.progress.lock().status, MergeStatus::Failed(_))
    }

    /// Sets the status to running, with `left` sectors to merge.
    pub fn set_running(&self, left: u64) {
        let mut progress = self.progress.lock();
        let total = progress.total.max(left);
        *progress = Progress { status: MergeStatus::Running, stop: false, total };
    }

    /// Returns the merged part in percent if `left` sectors are left to merge.
    pub fn percent(&self, left: u64) -> u64 {
        let Progress { total, .. } = *self.progress.lock();
        (total.saturating_sub(left) * 100).checked_div(total).unwrap_or(0)
    }

    /// Sets the status of a merge that has ended, and wakes the threads in [`wait`](Self::wait).
    pub fn set_ended(&self, status: MergeStatus) {
        self.progress.lock().status = status;
        self.changed.notify_all();
    }

    /// Requests that the merge stops after the current run.
    pub fn request_stop(&self) {
        self.progress.lock().stop = true;
    }

    pub fn is_stop_requested(&self) -> bool {
        self.progress.lock().stop
    }

    /// Waits until the merge is not running, and returns its status.
    pub fn wait(&self) -> MergeStatus {
        let mut progress = self.progress.lock();
        while progress.status == MergeStatus::Running {
            progress = wait(&self.changed, progress);
        }
        progress.status.clone()
    }
}
