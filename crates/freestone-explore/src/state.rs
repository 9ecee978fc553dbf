//! A crash state, and the disk that has its content.

use std::ops::Range;
use std::sync::Arc;

use freestone_core::device::{Blocking as _, Flags};
use freestone_ram::ram::{ForkConfig, Ram};

use crate::digest::Digest;
use crate::epoch::{Epoch, Lost, Write};
use crate::report::LostWrite;
use crate::timeline::Timeline;
use crate::{Result, StateId, failed};

/// Longest piece of an entry that is copied at once, in bytes.
const CHUNK_BYTES: u64 = 1 << 20;

/// A content that the disk may have after a power loss.
#[derive(Clone)]
pub struct State {
    id: StateId,
    identity: u128,
    mark: Option<Arc<str>>,
    source: Source,
}

#[derive(Clone)]
enum Source {
    /// The content of a snapshot.
    Snapshot(Ram),
    /// The content of a window without the lost versions.
    Window(Arc<Window>, Arc<Lost>),
}

/// Point of the log with its unflushed writes.
pub struct Window {
    pub point: u64,
    pub mark: Option<Arc<str>>,
    pub epoch: Epoch,
    /// Digest of the content with all writes.
    pub digest: Digest,
    /// Content with all writes.
    pub newest: Ram,
    /// Content at the last flush.
    pub flushed: Ram,
    pub timeline: Arc<Timeline>,
}

impl State {
    pub(crate) fn prefix(point: u64, digest: Digest, mark: Option<Arc<str>>, snapshot: Ram) -> Self {
        let identity = digest.with_mark(mark.as_deref());
        Self { id: StateId::prefix(point), identity, mark, source: Source::Snapshot(snapshot) }
    }

    /// Returns the identifier, with which the state can be made again.
    pub const fn id(&self) -> &StateId {
        &self.id
    }

    /// Returns the number of entries of the log before the state.
    pub const fn point(&self) -> u64 {
        self.id.point
    }

    /// Returns the last mark before the state: what the workload had acknowledged.
    pub fn mark(&self) -> Option<&str> {
        self.mark.as_deref()
    }

    /// Returns a number that is equal for states with equal content and mark.
    pub(crate) const fn identity(&self) -> u128 {
        self.identity
    }

    /// Creates a disk with the content of the state. The disk can be written; other states and disks
    /// do not change.
    ///
    /// # Errors
    /// Memory is short, or the log cannot be read any more.
    pub fn disk(&self) -> Result<Ram> {
        match &self.source {
            Source::Snapshot(snapshot) => Ok(snapshot.fork(&ForkConfig::default())?),
            Source::Window(window, lost) => window.disk(lost),
        }
    }

    /// Returns the lost writes, in the order of the log.
    pub fn lost_writes(&self) -> Vec<LostWrite> {
        match &self.source {
            Source::Snapshot(_) => Vec::new(),
            Source::Window(window, lost) => window.lost_writes(lost),
        }
    }
}

impl Window {
    /// Returns the identity of the state that has lost these versions.
    pub fn identity(&self, lost: &Lost) -> u128 {
        self.digest.plus(self.epoch.loss_digest(lost)).with_mark(self.mark.as_deref())
    }

    /// Returns the state that has lost these versions.
    pub fn state(self: &Arc<Self>, lost: Lost) -> State {
        State {
            id: self.epoch.id(self.point, &lost),
            identity: self.identity(&lost),
            mark: self.mark.clone(),
            source: Source::Window(Arc::clone(self), Arc::new(lost)),
        }
    }

    fn lost_writes(&self, lost: &Lost) -> Vec<LostWrite> {
        let unit = self.epoch.unit;
        let versions = self.epoch.lost_versions(lost);
        let runs = versions.chunk_by(|(write, block), (next, after)| write == next && block + 1 == *after);
        let lost_write = |run: &[(usize, u64)]| {
            let Write { entry, mark, .. } = &self.epoch.writes[run[0].0];
            let start = (run[0].1 * unit).max(entry.offset);
            let end = ((run[run.len() - 1].1 + 1) * unit).min(entry.offset + entry.len);
            LostWrite {
                entry: entry.number + 1,
                offset: start,
                len: end - start,
                is_whole: end - start == entry.len,
                is_discard: entry.is_discard(),
                mark: mark.as_deref().map(ToOwned::to_owned),
            }
        };
        runs.map(lost_write).collect()
    }

    /// Creates the disk from the nearer of the two snapshots.
    fn disk(&self, lost: &Lost) -> Result<Ram> {
        let unchanged = lost.values().filter(|kept| **kept == 0).count();
        // Content before a bulk discard is only in the flushed snapshot, so the discard must be repeated.
        if self.epoch.has_bulk || self.epoch.blocks.len() - unchanged < lost.len() {
            self.replay_kept(lost)
        } else {
            self.revert_lost(lost)
        }
    }

    /// Returns a point with the content of the last flush.
    pub fn flushed_point(&self) -> u64 {
        self.epoch.writes.first().map_or(self.point, |write| write.entry.number)
    }

    fn replay_kept(&self, lost: &Lost) -> Result<Ram> {
        let disk = self.flushed.fork(&ForkConfig::default())?;
        self.replay_kept_on(lost, &disk)?;
        Ok(disk)
    }

    /// Applies the kept versions to a disk with the content at the last flush.
    pub fn replay_kept_on(&self, lost: &Lost, disk: &Ram) -> Result<()> {
        let unit = self.epoch.unit;
        for (index, write) in self.epoch.writes.iter().enumerate() {
            let (start, end) = (write.entry.offset, write.entry.offset + write.entry.len);
            let mut run = start..start;
            for block in write.blocks(unit) {
                let piece = (block * unit).max(start)..((block + 1) * unit).min(end);
                if !write.is_bulk && !self.epoch.keeps(lost, index, block) {
                    continue;
                }
                if run.end != piece.start {
                    self.copy(write, &run, disk)?;
                    run.start = piece.start;
                }
                run.end = piece.end;
            }
            self.copy(write, &run, disk)?;
        }
        Ok(())
    }

    /// Replaces the lost versions in the content with all writes.
    fn revert_lost(&self, lost: &Lost) -> Result<Ram> {
        let disk = self.newest.fork(&ForkConfig::default())?;
        let unit = self.epoch.unit;
        let mut content = Vec::new();
        for (&block, &kept) in lost {
            let piece = block * unit..((block + 1) * unit).min(self.timeline.size());
            content.resize((piece.end - piece.start) as usize, 0);
            self.read_version(block, kept, &piece, &mut content)?;
            disk.write_at(piece.start, &content, Flags::empty()).map_err(failed("making a state"))?;
        }
        Ok(disk)
    }

    /// Reads the content of a block after its first `kept` unflushed versions.
    fn read_version(&self, block: u64, kept: usize, piece: &Range<u64>, out: &mut [u8]) -> Result<()> {
        let versions = &self.epoch.blocks[&block].versions[..kept];
        let covers = |write: &Write| {
            write.entry.offset <= piece.start && piece.end <= write.entry.offset + write.entry.len
        };
        let writes = versions.iter().map(|version| &self.epoch.writes[version.write]);
        // Versions before one that covers the whole block do not matter.
        let first = writes.clone().rposition(covers);
        if first.is_none() {
            self.flushed.read_at(piece.start, out).map_err(failed("reading the flushed content"))?;
        }
        for write in writes.skip(first.unwrap_or(0)) {
            let start = piece.start.max(write.entry.offset);
            let end = piece.end.min(write.entry.offset + write.entry.len);
            let part = &mut out[(start - piece.start) as usize..(end - piece.start) as usize];
            if write.entry.is_discard() {
                part.fill(0);
            } else {
                self.timeline.data().read_data(&write.entry, start - write.entry.offset, part)?;
            }
        }
        Ok(())
    }

    /// Applies the part `run` of a write, in bytes of the device, to a disk.
    fn copy(&self, write: &Write, run: &Range<u64>, disk: &Ram) -> Result<()> {
        let mut at = run.start;
        let mut chunk = Vec::new();
        while at < run.end {
            let len = CHUNK_BYTES.min(run.end - at);
            let done = if write.entry.is_discard() {
                disk.write_zeroes(at, len, Flags::MAY_FREE)
            } else {
                chunk.resize(len as usize, 0);
                self.timeline.data().read_data(&write.entry, at - write.entry.offset, &mut chunk)?;
                disk.write_at(at, &chunk, Flags::empty())
            };
            done.map_err(failed("making a state"))?;
            at += len;
        }
        Ok(())
    }
}
