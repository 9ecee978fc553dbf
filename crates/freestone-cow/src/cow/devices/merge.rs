//! Merge of a snapshot into its origin.
//!
//! A snapshot *serves* the origin from the start of its merge: users of both see the snapshot's
//! content. Chunks that are not merged yet are read from the COW device. Writes to chunks without
//! an exception are sent to the origin, which preserves the old data for other snapshots.
//!
//! # Steps
//! The exception store returns runs of exceptions (contiguous on both devices), newest first. For
//! each run:
//! 1. Exceptions for the run are made in other snapshots of the origin, except where the origin
//!    reads as zeroes. Step 4 makes the omitted ones if it copies other data than zeroes there.
//! 2. The run's chunks are marked as being merged: new writes to these chunks wait.
//! 3. The merge waits for writes in flight to these chunks on the COW device.
//! 4. The chunks are copied to the origin.
//! 5. The origin is flushed.
//! 6. The store removes the run's exceptions durably.
//! 7. The slots of the chunks become empty, and the held writes continue on the origin.
//!
//! # Resume after a crash
//! Before the first run the merge is recorded durably: in the store's header and, if possible, in
//! the origin's [`Notes`](crate::cow::Notes). Both records are removed when all exceptions are in the
//! origin.
//!
//! A crash at any step leaves a store that still has the run, or an origin that has all of it. A
//! store with the record opens as a snapshot that serves the origin at once, and
//! [`Snapshot::merge`] resumes the merge. If the store has no exceptions, the merge is finished:
//! the crash was after the last run, or a kernel finished the merge. Until a merge is finished the
//! origin must not be used without the snapshot.
//!
//! # Failures
//! A failure ends the merge, clears the marks of the run's chunks and fails the held writes. The
//! merge can be resumed.
//!
//! A failed step 6 may have removed the exceptions on disk. The store then restores them. If the
//! restore fails, too, the chunks stay marked and are written on neither device. A crash could make
//! a reader use either device, so both must keep the same data. A write to such a chunk makes the
//! store retry the restore.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use super::snapshot::Snapshot;
use crate::cow::requests::origin_write::OriginWrite;
use crate::cow::state::loss::Loss;
use crate::cow::state::merge_state::{MergeFailure, MergeState, MergeStatus};
use crate::cow::state::wait_group::Continuation as _;
use crate::cow::state::{Merging, Mode, Snap};
use crate::cow::store::{self, Run};
use freestone_core::consistency_group::{FREEZE_MAX, FreezeTimeout};
use freestone_core::device::{Blocking, Completion, Error, Flags, IoBuf, Op, Request, Result};
use freestone_core::mutants::{self, Mutant};
use freestone_core::sync::{mpsc, thread};
use freestone_core::unique;
use freestone_core::zeroes::are_zeroes;

/// Maximum size of a merged run in bytes, but at least one chunk. Writes to its chunks wait until
/// the run is merged.
const RUN_BYTES_MAX: u64 = 4 << 20;
/// Maximum number of bytes copied by one read and write.
const PIECE_BYTES: u64 = 1 << 20;

/// Errors from starting a merge.
#[derive(Debug, Error)]
pub enum MergeSetupError {
    /// The snapshot is transient.
    #[error("a transient snapshot (N) cannot be merged")]
    Transient,
    /// The snapshot is lost or was removed.
    #[error("the snapshot is invalid or was removed")]
    Invalid,
    /// The origin is read-only.
    #[error("the origin is read-only")]
    ReadOnly,
    /// Another snapshot of this origin is being merged.
    #[error("another snapshot is being merged into the origin")]
    OtherMerge,
    /// A snapshot of this origin is being prepared, so no merge can be started.
    #[error("a snapshot of the origin is being taken")]
    Preparing,
    /// Writes in flight did not complete in time.
    #[error("{0}")]
    FreezeTimeout(FreezeTimeout),
    /// The merge mark could not be written to the exception store.
    #[error("marking the exception store failed: {0}")]
    Mark(#[source] store::MergeError),
    /// A thread could not be started.
    #[error("a thread for the merge could not be started: {0}")]
    Thread(#[source] io::Error),
}

impl Snapshot {
    /// Starts or resumes the merge of the snapshot into its origin, in the background. Waits for
    /// writes in flight and marks the exception store. Does nothing if the merge is running or
    /// finished.
    pub fn merge(&self) -> std::result::Result<(), MergeSetupError> {
        self.0.snap.start_or_resume_merge()
    }

    /// Returns the status of the snapshot's merge.
    pub fn merge_status(&self) -> MergeStatus {
        self.0.snap.merge.status()
    }

    /// Returns the merged part in percent, or `None` if the merge is not running. 100 % is the
    /// largest amount that was left to merge when the merge was started or resumed in this process.
    pub fn merged_percent(&self) -> Option<u64> {
        let snap = &self.0.snap;
        let runs = snap.merge.status() == MergeStatus::Running;
        runs.then(|| snap.merge.percent(snap.remaining_sectors()))
    }

    /// Waits until the merge is not running, and returns its status.
    pub fn wait_merge(&self) -> MergeStatus {
        self.0.snap.merge.wait()
    }

    /// Stops the merge after the current run, and waits until the merge has stopped. The snapshot
    /// serves the origin until the origin is dropped, even if the snapshot is dropped earlier.
    pub fn stop_merge(&self) {
        self.request_merge_stop();
        self.0.snap.merge.wait();
    }

    /// Requests that the merge stops after the current run, without waiting.
    pub fn request_merge_stop(&self) {
        self.0.snap.merge.request_stop();
    }
}

/// Guard that sets the status of a merge to failed if its thread panics, so that waiters do not
/// wait forever.
struct PanicGuard<'a>(&'a MergeState);

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        // The status is set only after a panic: a merge that ended normally may have been resumed
        // already.
        if thread::panicking() && self.0.status() == MergeStatus::Running {
            self.0.set_ended(MergeStatus::Failed(MergeFailure::Device {
                what: "the merge",
                error: Error::Gone,
            }));
        }
    }
}

// ---- start and resume ---------------------------------------------------------------------------

impl Snap {
    /// Returns the number of sectors of the COW device that are left to merge.
    fn remaining_sectors(&self) -> u64 {
        let usage = self.store.usage();
        usage.allocated.saturating_sub(usage.metadata)
    }

    fn start_or_resume_merge(self: &Arc<Self>) -> std::result::Result<(), MergeSetupError> {
        if !self.store.kind().is_persistent() {
            return Err(MergeSetupError::Transient);
        }
        if self.core.device.geometry().read_only {
            return Err(MergeSetupError::ReadOnly);
        }
        // The lock excludes other merges and new snapshots while the merge is started.
        let mut setup = self.core.setup.lock();
        if self.check_readable().is_err() {
            return Err(MergeSetupError::Invalid);
        }
        if !self.is_merging() && setup.merging != Merging::No {
            return Err(MergeSetupError::OtherMerge);
        }
        if setup.merging != Merging::Yes && !setup.preparing.is_empty() {
            return Err(MergeSetupError::Preparing);
        }
        if matches!(self.merge.status(), MergeStatus::Running | MergeStatus::Finished) {
            return Ok(());
        }
        if !self.is_merging() {
            self.serve_origin()?;
        }
        setup.merging = Merging::Yes;
        self.merge.set_running(self.remaining_sectors());
        // The note is also written for a resumed merge, because the origin may be a copy of the
        // data without the note.
        self.write_merge_note();
        let snap = Arc::clone(self);
        let started = thread::Builder::new().name("cow-merge".into()).spawn(move || snap.run_merge());
        started.map(drop).map_err(|error| {
            self.merge.set_ended(MergeStatus::Stopped);
            MergeSetupError::Thread(error)
        })
    }

    /// Makes the snapshot serve the origin's requests. After this no exception is made.
    fn serve_origin(self: &Arc<Self>) -> std::result::Result<(), MergeSetupError> {
        // The origin's gate is closed first: then the origin requests no more exceptions, and
        // pending exceptions end.
        let mut quiet = self.core.gate.close_within(FREEZE_MAX);
        quiet = self.gate.close_within(if quiet { FREEZE_MAX } else { Duration::ZERO }) && quiet;
        // The merge mark must be durable first, because later writes to the origin may exist on the
        // COW device only.
        let marked =
            if quiet { self.mark_store() } else { Err(MergeSetupError::FreezeTimeout(FreezeTimeout)) };
        if marked.is_ok() {
            self.switch_views();
        }
        for task in self.gate.open().into_iter().chain(self.core.gate.open()) {
            self.core.work_queue.push(task);
        }
        marked
    }

    fn switch_views(self: &Arc<Self>) {
        self.set_merging();
        self.core.announce_merge();
        self.gate.change(|_| Mode::Merging);
        self.core.gate.change(|view| {
            view.changed(|view| {
                let (merging, others) = view.snapshots.drain(..).partition(|snap| snap.is_same(self));
                view.snapshots = others;
                view.merging = merging.into_iter().next();
            })
        });
    }

    // ---- the marks ------------------------------------------------------------------------------

    fn mark_store(self: &Arc<Self>) -> std::result::Result<(), MergeSetupError> {
        if mutants::on(Mutant::MergeUnmarked) {
            return Ok(());
        }
        match self.store.mark_merge(new_merge_id()) {
            Ok(_) => Ok(()),
            Err(store::MergeError::Invalid) => {
                self.invalidate(Loss::of("marking the COW device", Error::Media), None);
                Err(MergeSetupError::Invalid)
            }
            Err(error) => Err(MergeSetupError::Mark(error)),
        }
    }

    /// Records the merge id from the store's header in the origin's notes.
    fn write_merge_note(&self) {
        if let (Some(id), Some(notes)) = (self.store.merge_id(), &self.core.notes) {
            notes.record_merge(id, self.location.get().map_or("", |location| location));
        }
    }

    /// Removes the records of a finished merge. If the mark in the store remains, a marked store
    /// without exceptions also means that the merge is finished.
    fn remove_merge_records(&self) {
        if self.store.merge_id().is_none() {
            return;
        }
        if self.core.notes.as_ref().is_some_and(|notes| !notes.remove_merge()) {
            return;
        }
        if let Err(error) = self.store.unmark_merge() {
            tracing::warn!("the mark of a finished merge could not be removed: {error}");
        }
    }

    fn run_merge(self: Arc<Self>) {
        let _guard = PanicGuard(&self.merge);
        let status = loop {
            if self.merge.is_stop_requested() {
                break MergeStatus::Stopped;
            }
            match self.store.last_run() {
                Ok(None) => break MergeStatus::Finished,
                Ok(Some(run)) => {
                    if let Err(failure) = self.merge_run(&run) {
                        break MergeStatus::Failed(failure);
                    }
                }
                Err(error) => break MergeStatus::Failed(error.into()),
            }
        };
        match &status {
            MergeStatus::Finished => {
                self.remove_merge_records();
                self.core.remove_snapshot(&self);
                // Both changes are made under one lock, before another merge can start. Requests to
                // this snapshot are then passed to the origin, and from the origin to the next
                // merging snapshot.
                let mut setup = self.core.setup.lock();
                self.merge.set_ended(status);
                setup.merging = Merging::No;
                return;
            }
            MergeStatus::Failed(failure) => tracing::warn!("a merge failed: {failure}"),
            _ => {}
        }
        self.merge.set_ended(status);
    }

    /// Merges the last chunks of a run, at most [`RUN_BYTES_MAX`] bytes.
    fn merge_run(self: &Arc<Self>, run: &Run) -> std::result::Result<(), MergeFailure> {
        let chunk = self.chunk();
        let count = run.count.min((RUN_BYTES_MAX / chunk).max(1));
        let (old, new) = (run.old + run.count - count, run.new + run.count - count);
        let chunks = old..old + count;
        let start = chunks.start * chunk;
        let end = (chunks.end * chunk).min(self.size);
        let failed = |what| move |error| MergeFailure::Device { what, error };
        // Step 1: make exceptions for the run in other snapshots.
        if start < end {
            run_origin_write(|done| OriginWrite::preserve(Arc::clone(&self.core), start, end - start, done))
                .map_err(failed("copying to other snapshots"))?;
        }
        // Step 2: mark the chunks as being merged.
        self.merge.begin_run();
        chunks.clone().for_each(|chunk| self.exceptions.set_merging(chunk, true));
        // Step 3: wait for writes in flight to the chunks on the COW device.
        self.merge.wait_for_cow_writes(&chunks);
        // Steps 4 and 5: copy the chunks to the origin and flush it.
        let copied = self
            .copy_back(new * chunk, start, end)
            .and_then(|()| self.core.device.flush().map_err(failed("flushing the origin")));
        // Step 6: remove the exceptions of the run from the store.
        let removed = copied.and_then(|()| Ok(self.store.commit_merge(run, count)?));
        // Step 7: empty the slots and continue the held writes.
        if removed.is_err() && self.store.is_torn() {
            self.merge.end_run(Some(chunks), Err(Error::Media));
            return removed;
        }
        for chunk in chunks.rev() {
            match (self.exceptions.lock_present(chunk), &removed) {
                (Some(locked), Ok(())) => locked.remove(),
                (Some(locked), Err(_)) => locked.set_merging(false),
                (None, _) => {}
            }
        }
        self.merge.end_run(None, if removed.is_ok() { Ok(()) } else { Err(Error::Media) });
        removed
    }

    fn copy_back(self: &Arc<Self>, from: u64, start: u64, end: u64) -> std::result::Result<(), MergeFailure> {
        let failed = |what| move |error| MergeFailure::Device { what, error };
        let mut at = start;
        while at < end {
            let len = (end - at).min(PIECE_BYTES);
            let mut data = IoBuf::zeroed(len as usize).map_err(failed("copying"))?;
            let cow = self.store.device();
            cow.read_at(from + (at - start), &mut data).map_err(failed("reading the COW device"))?;
            self.write_to_origin(at, &data).map_err(failed("writing the origin"))?;
            at += len;
        }
        Ok(())
    }

    /// Writes merged chunks to the origin. Chunks of zeroes are written with write zeroes, which
    /// needs no exceptions in other snapshots if the origin reads as zeroes there.
    fn write_to_origin(self: &Arc<Self>, at: u64, data: &[u8]) -> Result<()> {
        let chunks = data.chunks(self.chunk() as usize);
        let mut from = 0;
        for run in chunks.collect::<Vec<_>>().chunk_by(|one, next| are_zeroes(one) == are_zeroes(next)) {
            let len: usize = run.iter().map(|chunk| chunk.len()).sum();
            let (offset, part) = (at + from as u64, &data[from..from + len]);
            let (request, part) = if are_zeroes(part) {
                (Request::new(Op::WriteZeroes, offset, len as u64).with(Flags::MAY_FREE), IoBuf::empty())
            } else {
                (Request::write(offset, len as u64), IoBuf::copy_of(part)?)
            };
            run_origin_write(|done| OriginWrite::from_merging_snapshot(self, request, part, done))?;
            from += len;
        }
        Ok(())
    }
}

/// Returns a random id for a merge; not 0.
fn new_merge_id() -> u64 {
    unique::random_id().max(1)
}

/// Runs a write to the origin and waits for its completion.
fn run_origin_write(write: impl FnOnce(Completion) -> OriginWrite) -> Result<()> {
    let (tx, rx) = mpsc::sync_channel(1);
    let done = Completion::new(move |outcome, _| {
        // The receiver `rx` exists until the completion was called, so sending cannot fail.
        let _ = tx.send(outcome);
    });
    write(done).resume(Ok(()));
    rx.recv().unwrap_or(Err(Error::Gone))
}
