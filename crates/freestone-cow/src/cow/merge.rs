//! Merging a snapshot into its origin.
//!
//! From its beginning on the snapshot plays the origin's part: users of both see the snapshot's
//! content, from the COW device where it is not merged yet. Writes where it has no exception go to
//! the origin, which preserves them for other snapshots.
//!
//! # Steps
//! One run of exceptions after the other, newest first, as the store gives them:
//! 1. Other snapshots of the origin get exceptions for the run, but for what the origin has as zeroes:
//!    those come with step 4, if something else than zeroes is copied there.
//! 2. Its chunks are marked: writes that come to them wait.
//! 3. Writes to the COW device that are under way there are waited for.
//! 4. The chunks are copied to the origin.
//! 5. The origin is flushed.
//! 6. The store forgets the run, durably.
//! 7. The chunks have no exception any more. Who waited goes on, with the origin.
//!
//! Before the first run it is recorded on disk that a merge is under way: in the store's header,
//! and beside the origin's data where that is possible ([`Notes`](super::Notes)). Both records are
//! removed when all is in the origin. The snapshot of a store that is opened with such a record
//! plays the origin's part from the first moment on, and [`Snapshot::merge`] goes on. Where that
//! store is empty (a crash at the end, or a kernel that finished the merge), the merge is finished.
//!
//! A crash at any step leaves a store that still has the run, or one whose run is wholly in the
//! origin; opened again, it is merged on from there. Until the merge is finished the origin must
//! not be used without the snapshot. A failure ends the merge, takes the marks of the run's chunks
//! away, and fails the writes that waited; the merge can be begun again.
//!
//! Step 6 may have happened although it failed. Then the store writes the run's exceptions back. As
//! long as that fails as well the chunks stay marked: after a crash such a chunk may be read from
//! the origin or from the COW device, so both must stay the same, and neither is written. A write
//! that comes to such a chunk has the store try again.
//!
//! Lock order: see [`state`](super::state) and [`merge_state`](super::merge_state).

use std::io;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use super::gather::Job as _;
use super::loss::Loss;
use super::merge_state::{Merge, MergeFailure, MergeStatus};
use super::origin_write::OriginWrite;
use super::snapshot::Snapshot;
use super::state::{Merging, Mode, Snap};
use super::store::{self, Run};
use freestone_core::consistency_group::{FREEZE_MAX, NotInTime};
use freestone_core::device::{Blocking, Completion, Error, Flags, IoBuf, Op, Request, Result};
use freestone_core::mutants::{self, Mutant};
use freestone_core::sync::{mpsc, thread};
use freestone_core::unique;
use freestone_core::zeroes::are_zeroes;

/// Bytes of a run that are merged in one go; at least a chunk. Writes wait for about as long as
/// this takes.
const RUN_BYTES_MAX: u64 = 4 << 20;
/// Bytes that are copied at once.
const PIECE_BYTES: u64 = 1 << 20;

/// Why a merge could not be begun.
#[derive(Debug, Error)]
pub enum MergeSetupError {
    /// A transient snapshot.
    #[error("a transient snapshot (N) cannot be merged")]
    Transient,
    /// The snapshot is lost, or was removed.
    #[error("the snapshot is invalid or was removed")]
    Invalid,
    /// The origin cannot be written.
    #[error("the origin is read-only")]
    ReadOnly,
    /// Another snapshot of this origin is being merged.
    #[error("another snapshot is being merged into the origin")]
    Other,
    /// A snapshot of this origin is about to begin.
    #[error("a snapshot of the origin is being taken")]
    Preparing,
    /// Writes do not end.
    #[error("{0}")]
    NotInTime(NotInTime),
    /// The COW device cannot be marked.
    #[error("marking the exception store: {0}")]
    Mark(#[source] store::MergeError),
    /// A thread could not be started.
    #[error("a thread for the merge could not be started: {0}")]
    Thread(#[source] io::Error),
}

impl Snapshot {
    /// Begins to merge the snapshot into its origin, in the background, or goes on with it. Waits
    /// for writes that are under way, and marks the store. A merge that runs or is finished stays
    /// as it is.
    ///
    /// # Errors
    /// [`MergeSetupError`].
    pub fn merge(&self) -> std::result::Result<(), MergeSetupError> {
        self.0.snap.begin_merge()
    }

    /// How far the merge is.
    pub fn merge_status(&self) -> MergeStatus {
        self.0.snap.merge.status()
    }

    /// How much of the merge that runs is done, in percent of what was left when it was begun in
    /// this process.
    pub fn merged_percent(&self) -> Option<u64> {
        let snap = &self.0.snap;
        let runs = snap.merge.status() == MergeStatus::Running;
        runs.then(|| snap.merge.percent(snap.left_to_merge()))
    }

    /// Waits until the merge ends, one way or the other.
    pub fn wait_merge(&self) -> MergeStatus {
        self.0.snap.merge.wait()
    }

    /// Stops the merge after the run that is under way, and waits for that. The snapshot goes on
    /// playing the origin's part, also when it is dropped, until the origin is dropped too.
    pub fn stop_merge(&self) {
        self.ask_merge_to_stop();
        self.0.snap.merge.wait();
    }

    /// As [`stop_merge`](Self::stop_merge), without the wait.
    pub fn ask_merge_to_stop(&self) {
        self.0.snap.merge.stop();
    }
}

/// A merge that panics has failed: nobody waits for it for ever.
struct Ended<'a>(&'a Merge);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        // Only after a panic: where it ended by itself, it may have been begun again already.
        if thread::panicking() && self.0.status() == MergeStatus::Running {
            self.0.end(MergeStatus::Failed(MergeFailure::Device { what: "the merge", error: Error::Gone }));
        }
    }
}

// ---- the merge itself ---------------------------------------------------------------------------

impl Snap {
    /// Sectors of the COW device.
    fn left_to_merge(&self) -> u64 {
        let usage = self.store.usage();
        usage.allocated.saturating_sub(usage.metadata)
    }

    fn begin_merge(self: &Arc<Self>) -> std::result::Result<(), MergeSetupError> {
        if !self.store.kind().is_persistent() {
            return Err(MergeSetupError::Transient);
        }
        if self.core.device.geometry().read_only {
            return Err(MergeSetupError::ReadOnly);
        }
        // No other merge begins, and no snapshot is prepared, while this one begins.
        let mut changing = self.core.changing.lock();
        if self.readable().is_err() {
            return Err(MergeSetupError::Invalid);
        }
        if !self.is_merging() && changing.merging != Merging::No {
            return Err(MergeSetupError::Other);
        }
        if changing.merging != Merging::Yes && !changing.preparing.is_empty() {
            return Err(MergeSetupError::Preparing);
        }
        if matches!(self.merge.status(), MergeStatus::Running | MergeStatus::Finished) {
            return Ok(());
        }
        if !self.is_merging() {
            self.play_origin()?;
        }
        changing.merging = Merging::Yes;
        self.merge.begin(self.left_to_merge());
        // Also where the merge was begun earlier: the origin may be a copy of the data without the
        // note.
        self.note();
        let snap = Arc::clone(self);
        let started = thread::Builder::new().name("cow-merge".into()).spawn(move || snap.run_merge());
        started.map(drop).map_err(|error| {
            self.merge.end(MergeStatus::Stopped);
            MergeSetupError::Thread(error)
        })
    }

    /// From now on no exception is made, and users of the origin see the snapshot.
    fn play_origin(self: &Arc<Self>) -> std::result::Result<(), MergeSetupError> {
        // The origin first: then nothing there asks for exceptions, and those that are pending end.
        let mut quiet = self.core.gate.close_within(FREEZE_MAX);
        quiet = self.gate.close_within(if quiet { FREEZE_MAX } else { Duration::ZERO }) && quiet;
        // Before anything else: what users write to the origin from now on may lie on the COW
        // device alone.
        let marked = if quiet { self.mark_store() } else { Err(MergeSetupError::NotInTime(NotInTime)) };
        if marked.is_ok() {
            self.switch();
        }
        for task in self.gate.open().into_iter().chain(self.core.gate.open()) {
            self.core.work_queue.push(task);
        }
        marked
    }

    fn switch(self: &Arc<Self>) {
        self.set_merging();
        self.core.will_merge();
        self.gate.change(|_| Mode::Merging);
        self.core.gate.change(|view| {
            view.changed(|view| {
                let (merging, others) = view.snapshots.drain(..).partition(|snap| snap.is(self));
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
        match self.store.mark_merge(new_id()) {
            Ok(_) => Ok(()),
            Err(store::MergeError::Invalid) => {
                self.invalidate(Loss::of("marking the COW device", Error::Media), None);
                Err(MergeSetupError::Invalid)
            }
            Err(error) => Err(MergeSetupError::Mark(error)),
        }
    }

    /// Notes beside the origin's data what the store's header says.
    fn note(&self) {
        if let (Some(id), Some(notes)) = (self.store.merge_id(), &self.core.notes) {
            notes.merge_begins(id, self.place.get().map_or("", |place| place));
        }
    }

    /// All is in the origin: removes the records of the merge. Should the store's stay, a marked
    /// store without exceptions means the same.
    fn unmark(&self) {
        if self.store.merge_id().is_none() {
            return;
        }
        if self.core.notes.as_ref().is_some_and(|notes| !notes.merge_ended()) {
            return;
        }
        if let Err(error) = self.store.unmark_merge() {
            tracing::warn!("the mark of a merge that is finished could not be taken away: {error}");
        }
    }

    fn run_merge(self: Arc<Self>) {
        let _ended = Ended(&self.merge);
        let status = loop {
            if self.merge.is_to_stop() {
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
                self.unmark();
                self.core.forget(&self);
                // Together, before another merge can begin: what comes to this snapshot then goes
                // to the origin, and so to the snapshot that is merged next.
                let mut changing = self.core.changing.lock();
                self.merge.end(status);
                changing.merging = Merging::No;
                return;
            }
            MergeStatus::Failed(failure) => tracing::warn!("a merge stopped: {failure}"),
            _ => {}
        }
        self.merge.end(status);
    }

    /// Merges the end of a run.
    fn merge_run(self: &Arc<Self>, run: &Run) -> std::result::Result<(), MergeFailure> {
        let chunk = self.chunk();
        let count = run.count.min((RUN_BYTES_MAX / chunk).max(1));
        let (old, new) = (run.old + run.count - count, run.new + run.count - count);
        let chunks = old..old + count;
        let start = chunks.start * chunk;
        let end = (chunks.end * chunk).min(self.size);
        let failed = |what| move |error| MergeFailure::Device { what, error };
        // 1
        if start < end {
            to_origin(|done| OriginWrite::preserve(Arc::clone(&self.core), start, end - start, done))
                .map_err(failed("copying to other snapshots"))?;
        }
        // 2
        self.merge.begin_run();
        chunks.clone().for_each(|chunk| self.exceptions.mark(chunk, true));
        // 3
        self.merge.drain(&chunks);
        // 4, 5
        let copied = self
            .copy_back(new * chunk, start, end)
            .and_then(|()| self.core.device.flush().map_err(failed("flushing the origin")));
        // 6
        let forgotten = copied.and_then(|()| Ok(self.store.commit_merge(run, count)?));
        // 7
        if forgotten.is_err() && self.store.is_torn() {
            self.merge.end_run(Some(chunks), Err(Error::Media));
            return forgotten;
        }
        for chunk in chunks.rev() {
            match (self.exceptions.lock_present(chunk), &forgotten) {
                (Some(locked), Ok(())) => locked.forget(),
                (Some(locked), Err(_)) => locked.mark(false),
                (None, _) => {}
            }
        }
        self.merge.end_run(None, if forgotten.is_ok() { Ok(()) } else { Err(Error::Media) });
        forgotten
    }

    fn copy_back(self: &Arc<Self>, from: u64, start: u64, end: u64) -> std::result::Result<(), MergeFailure> {
        let failed = |what| move |error| MergeFailure::Device { what, error };
        let mut at = start;
        while at < end {
            let len = (end - at).min(PIECE_BYTES);
            let mut data = IoBuf::zeroed(len as usize).map_err(failed("copying"))?;
            let cow = self.store.device();
            cow.read_at(from + (at - start), &mut data).map_err(failed("reading the COW device"))?;
            self.write_back(at, &data).map_err(failed("writing the origin"))?;
            at += len;
        }
        Ok(())
    }

    /// Writes merged chunks to the origin: those of zeroes as zeroes, which over a hole change nothing
    /// for other snapshots.
    fn write_back(self: &Arc<Self>, at: u64, data: &[u8]) -> Result<()> {
        let chunks = data.chunks(self.chunk() as usize);
        let mut from = 0;
        for run in chunks.collect::<Vec<_>>().chunk_by(|one, next| are_zeroes(one) == are_zeroes(next)) {
            let len: usize = run.iter().map(|chunk| chunk.len()).sum();
            let (place, part) = (at + from as u64, &data[from..from + len]);
            let (request, part) = if are_zeroes(part) {
                (Request::new(Op::WriteZeroes, place, len as u64).with(Flags::MAY_FREE), IoBuf::empty())
            } else {
                (Request::write(place, len as u64), IoBuf::copy_of(part)?)
            };
            to_origin(|done| OriginWrite::past_merge(self, request, part, done))?;
            from += len;
        }
        Ok(())
    }
}

/// A number for a merge; not 0.
fn new_id() -> u64 {
    unique::number().max(1)
}

/// Runs a write of the origin to its end.
fn to_origin(write: impl FnOnce(Completion) -> OriginWrite) -> Result<()> {
    let (tx, rx) = mpsc::sync_channel(1);
    let done = Completion::new(move |outcome, _| {
        // The receiver waits below; it cannot be gone.
        let _ = tx.send(outcome);
    });
    write(done).go(Ok(()));
    rx.recv().unwrap_or(Err(Error::Gone))
}
