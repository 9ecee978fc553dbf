//! How far the merge of a snapshot is, and what writes to that snapshot have to do with it. The
//! merge itself: [`merge`](super::merge).

use std::collections::HashMap;
use std::ops::Range;

use thiserror::Error;

use super::gather::Waiter;
use super::store_answers::MergeError;
use freestone_core::device::{Error, Result};
use freestone_core::pin::wait;
use freestone_core::sync::{Condvar, Mutex};

/// How far a merge is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum MergeStatus {
    /// None was begun.
    #[default]
    None,
    /// It is under way.
    Running,
    /// It was stopped, or was under way when the store was closed, and can be begun again.
    Stopped,
    /// All is in the origin. The snapshot shows the origin from now on.
    Finished,
    /// It met an error, and can be begun again.
    Failed(MergeFailure),
}

/// Why a merge ended early.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MergeFailure {
    /// The exception store.
    #[error("the exception store: {0}")]
    Store(#[from] MergeError),
    /// The origin or the COW device.
    #[error("{what} failed: {error}")]
    Device {
        /// What was done.
        what: &'static str,
        /// The device's answer.
        error: Error,
    },
}

/// The merge of one snapshot.
///
/// Lock order: a slot, then `tracking`. `progress` with the origin's `changing` held, or nothing.
/// Both are held for a few instructions; neither while a waiter is answered.
#[derive(Default)]
pub(super) struct Merge {
    tracking: Mutex<Tracking>,
    drained: Condvar,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Default)]
struct Tracking {
    /// Writes to the COW device under way, by chunk of the origin.
    writes: HashMap<u64, usize>,
    /// Writes that came to a marked chunk.
    held: Vec<Waiter>,
    /// A run is being merged, or written back.
    busy: bool,
    /// Chunks that stay marked until the store has written them back.
    torn: Option<Range<u64>>,
}

#[derive(Default)]
struct Progress {
    status: MergeStatus,
    stop: bool,
    /// What was to be merged when it was begun first.
    whole: u64,
}

impl Merge {
    /// One that was under way when the store was closed.
    pub fn stopped() -> Self {
        let progress = Progress { status: MergeStatus::Stopped, ..Progress::default() };
        Self { progress: Mutex::new(progress), ..Self::default() }
    }

    /// A write to this chunk on the COW device begins. The chunk's slot is locked.
    pub fn track(&self, chunk: u64) {
        *self.tracking.lock().writes.entry(chunk).or_insert(0) += 1;
    }

    /// A write to this chunk on the COW device has ended.
    pub fn untrack(&self, chunk: u64) {
        let mut tracking = self.tracking.lock();
        if let Some(count) = tracking.writes.get_mut(&chunk) {
            *count -= 1;
            if *count == 0 {
                tracking.writes.remove(&chunk);
                self.drained.notify_all();
            }
        }
    }

    /// Waits for the writes to the COW device that are under way for these chunks.
    pub fn drain(&self, chunks: &Range<u64>) {
        let mut tracking = self.tracking.lock();
        while tracking.writes.keys().any(|chunk| chunks.contains(chunk)) {
            tracking = wait(&self.drained, tracking);
        }
    }

    /// A write came to a marked chunk: `waiter` hears of the end of the run. The chunk's slot is
    /// locked. True: no run is being merged or written back, so the caller has it written back, and
    /// then [ends](Self::end_run) it.
    pub fn hold(&self, waiter: Waiter) -> bool {
        let mut tracking = self.tracking.lock();
        tracking.held.push(waiter);
        !std::mem::replace(&mut tracking.busy, true)
    }

    /// Chunks that stay marked until the store has written them back.
    pub fn torn(&self) -> Option<Range<u64>> {
        self.tracking.lock().torn.clone()
    }

    /// A run begins, when no other is being written back.
    pub fn begin_run(&self) {
        let mut tracking = self.tracking.lock();
        while tracking.busy {
            tracking = wait(&self.drained, tracking);
        }
        tracking.busy = true;
    }

    /// A run has ended, or was written back; `torn` of it stays marked.
    pub fn end_run(&self, torn: Option<Range<u64>>, outcome: Result<()>) {
        let mut tracking = self.tracking.lock();
        tracking.busy = false;
        tracking.torn = torn;
        let held = std::mem::take(&mut tracking.held);
        drop(tracking);
        self.drained.notify_all();
        for waiter in held {
            waiter.arrived(outcome);
        }
    }

    /// How far it is.
    pub fn status(&self) -> MergeStatus {
        self.progress.lock().status.clone()
    }

    pub fn is_finished(&self) -> bool {
        self.progress.lock().status == MergeStatus::Finished
    }

    pub fn has_failed(&self) -> bool {
        matches!(self.progress.lock().status, MergeStatus::Failed(_))
    }

    /// It runs from now on, and has so much left.
    pub fn begin(&self, left: u64) {
        let mut progress = self.progress.lock();
        let whole = progress.whole.max(left);
        *progress = Progress { status: MergeStatus::Running, stop: false, whole };
    }

    /// How much is merged where so much is left, in percent.
    pub fn percent(&self, left: u64) -> u64 {
        let Progress { whole, .. } = *self.progress.lock();
        (whole.saturating_sub(left) * 100).checked_div(whole).unwrap_or(0)
    }

    /// It has ended.
    pub fn end(&self, status: MergeStatus) {
        self.progress.lock().status = status;
        self.changed.notify_all();
    }

    /// Stops it after the run that is under way, if one is.
    pub fn stop(&self) {
        self.progress.lock().stop = true;
    }

    pub fn is_to_stop(&self) -> bool {
        self.progress.lock().stop
    }

    /// Waits until it does not run.
    pub fn wait(&self) -> MergeStatus {
        let mut progress = self.progress.lock();
        while progress.status == MergeStatus::Running {
            progress = wait(&self.changed, progress);
        }
        progress.status.clone()
    }
}
