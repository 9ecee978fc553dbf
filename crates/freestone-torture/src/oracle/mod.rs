//! The oracle: tracks the versions that each sector of a device may hold, and judges reads. Failed writes,
//! power cuts and crashes follow the same rules.
//!
//! The caller reports the start and the completion of each write. For each sector the oracle stores the versions that
//! a read may return now, and those that only a crash may restore:
//!
//! * A write may be visible from its start. When it **completes successfully**, every version completed
//!   before the start of the write is gone. Of writes that overlap in time, either version may stay.
//! * A **failed** write leaves the old or the new version, sector by sector, until a later write completes
//!   successfully.
//! * A **read** that overlaps no write shows which of several versions is present, and only that version
//!   stays.
//! * A **crash** may restore versions that no flush and no FUA replaced durably. The next read of a sector
//!   shows which version the crash left. A crash ends the requests in flight. At a power **cut** these
//!   requests survive with their issuer, and may take effect before or after the cut.
//!
//! A **tick** is the time of an oracle: a counter of all starts and completions. Ticks show which events overlap, so
//! the caller must record each start before issuing the request, and each completion after it. The maps are sparse: a
//! sector that was never written needs no memory.
//!
//! ```
//! use freestone_torture::oracle::{Durability, Fill, Kind, Oracle, Outcome, fill};
//!
//! let mut oracle = Oracle::new("disk", 128, Durability::Flushed);
//! let id = Fill::Text.id(1);
//! let write = oracle.begin_write(id, 8..16, Kind::Write);
//! let mut disk = [0; 8 * 512];
//! fill(id, 8, &mut disk);
//! oracle.end(write, Outcome::Done { fua: false });
//! let read = oracle.begin_read();
//! assert_eq!(oracle.check_read(read, 8, &disk), Ok(()));
//! let read = oracle.begin_read();
//! assert!(oracle.check_read(read, 8, &[0; 8 * 512]).is_err(), "the write is lost");
//! oracle.crash();
//! let read = oracle.begin_read();
//! assert_eq!(oracle.check_read(read, 8, &[0; 8 * 512]), Ok(()), "it was not flushed");
//! ```

mod content;
mod sector;
mod snapshot;
#[cfg(test)]
mod tests;
mod violation;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::rt::sync::Arc;
pub use content::{Content, Fill, IdentifiedBytes, SECTOR_BYTES, content, fill};
use sector::Sector;
pub use violation::Violation;
use violation::WriteRecord;

/// A point in time of an oracle: the value of the event counter.
pub type Tick = u64;

/// Maximum number of writes remembered for the messages of violations.
const HISTORY_MAX: usize = 1024;

/// The content of a device that survives a crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// No write survives: the device is all zeroes.
    Nothing,
    /// Flushed writes survive; each other write may or may not survive.
    Flushed,
    Completed,
}

/// The kind of a write, which decides the content that it leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Writes the content of the write's id.
    Write,
    Zeroes,
    Discard {
        /// The sectors are zeroes for certain; otherwise zeroes or the old content.
        zeroing: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Done {
        /// The request had the FUA flag set, so the write is durable.
        fua: bool,
    },
    /// The write failed, but may have taken effect.
    Failed,
    /// The write failed without effect.
    Refused,
}

#[derive(Debug)]
#[must_use = "each write that is begun ends"]
pub struct WriteToken {
    content: Content,
    kind: Kind,
    range: Range<u64>,
    began: Tick,
    /// Number of crashes before the write started.
    crash_count: u64,
}

#[derive(Debug)]
#[must_use = "each flush that is begun ends"]
pub struct FlushToken {
    began: Tick,
    crash_count: u64,
}

/// A read in progress, or a verb that takes a snapshot or replaces the content.
#[derive(Debug)]
#[must_use = "each read that is begun ends"]
pub struct ReadToken {
    began: Tick,
}

/// The event counter of one oracle, or of several oracles if the order of their events matters.
#[derive(Debug, Clone, Default)]
pub struct Clock(Arc<AtomicU64>);

/// The versions of all sectors of a device. Sectors are numbered from 0; ranges are of sectors. A clone
/// serves for trial reads: tokens of the original are not valid for the clone.
#[derive(Debug, Clone)]
pub struct Oracle {
    name: String,
    size: u64,
    durability: Durability,
    clock: Clock,
    /// Tick of the last event.
    tick: Tick,
    crash_count: u64,
    last_crash: Tick,
    /// Sectors that have or had versions other than the initial zeroes. All others were never written.
    sectors: BTreeMap<u64, Sector>,
    /// Sectors with versions that reads starting now cannot return (past versions).
    sectors_with_past: BTreeSet<u64>,
    /// Start ticks of the reads in progress.
    reads: BTreeSet<Tick>,
    /// Start of the verb in progress that replaces the content, and the new content. `None` without such a
    /// verb.
    replacing: Option<(Tick, Arc<Self>)>,
    history: VecDeque<WriteRecord>,
}

impl Oracle {
    /// Creates the oracle of a device of `size` sectors, initially all zeroes. `name` appears in messages.
    pub fn new(name: &str, size: u64, durability: Durability) -> Self {
        Self::with_clock(name, size, durability, &Clock::default())
    }

    pub fn with_clock(name: &str, size: u64, durability: Durability, clock: &Clock) -> Self {
        Self {
            name: name.to_owned(),
            size,
            durability,
            clock: clock.clone(),
            tick: 0,
            crash_count: 0,
            last_crash: 0,
            sectors: BTreeMap::new(),
            sectors_with_past: BTreeSet::new(),
            reads: BTreeSet::new(),
            replacing: None,
            history: VecDeque::new(),
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn rename(&mut self, name: &str) {
        name.clone_into(&mut self.name);
    }

    /// Returns the size of the device in sectors.
    pub fn size(&self) -> u64 {
        self.size
    }

    pub fn durability(&self) -> Durability {
        self.durability
    }

    pub fn tick(&self) -> Tick {
        self.tick
    }

    /// Grows the device to `size` sectors; the new sectors are zeroes. A size below the current one has no
    /// effect.
    pub fn grow(&mut self, size: u64) {
        self.size = self.size.max(size);
    }

    /// Truncates the oracle of a copy that was taken before the device grew to `size` sectors.
    pub fn truncate(&mut self, size: u64) {
        self.size = size;
        self.sectors.retain(|at, _| *at < size);
        self.sectors_with_past.retain(|at| *at < size);
    }

    // ---- writes and flushes ---------------------------------------------------------------------

    /// Records the start of a write. `id` must be unique among all writes to devices that share content, see
    /// [`Fill::id`].
    pub fn begin_write(&mut self, id: u64, range: Range<u64>, kind: Kind) -> WriteToken {
        assert!(range.start < range.end && range.end <= self.size, "{range:?} of {}", self.size);
        let began = self.next();
        let content = if kind == Kind::Write { Content::Data(id) } else { Content::Zero };
        for at in range.clone() {
            self.add_new_content(at);
            self.sector_mut(at).begin(content, began);
        }
        if self.history.len() == HISTORY_MAX {
            self.history.pop_front();
        }
        self.history.push_back(WriteRecord { content, kind, range: range.clone(), began, ended: None });
        WriteToken { content, kind, range, began, crash_count: self.crash_count }
    }

    /// Records the completion of a write, and updates the versions of its sectors.
    pub fn end(&mut self, write: WriteToken, outcome: Outcome) {
        let tick = self.next();
        if let Some(record) = self.history.iter_mut().rev().find(|record| record.began == write.began) {
            record.ended = Some((tick, matches!(outcome, Outcome::Done { .. })));
        }
        if write.crash_count != self.crash_count {
            // The crash has already ended this write and made it one of the possible versions.
            return;
        }
        let outcome = match (write.kind, outcome) {
            (Kind::Discard { zeroing: false }, Outcome::Done { .. }) => Outcome::Failed,
            (_, Outcome::Done { fua }) => {
                Outcome::Done { fua: fua || self.durability == Durability::Completed }
            }
            (_, outcome) => outcome,
        };
        let restores_unflushed = self.restores_unflushed();
        for at in write.range {
            self.sector_mut(at).end(write.content, write.began, outcome, tick, restores_unflushed);
            self.drop_unneeded(at);
        }
    }

    pub fn begin_flush(&mut self) -> FlushToken {
        FlushToken { began: self.next(), crash_count: self.crash_count }
    }

    /// Records the completion of a flush. `done`: the flush succeeded. A failed flush makes nothing durable.
    pub fn end_flush(&mut self, FlushToken { began, crash_count }: FlushToken, done: bool) {
        self.next();
        if !done || crash_count != self.crash_count {
            return;
        }
        for at in self.sectors_with_past.clone() {
            self.sector_mut(at).record_flush(began);
            self.drop_unneeded(at);
        }
    }

    // ---- reads ----------------------------------------------------------------------------------

    /// Records the start of a read, or of a verb that reads the content.
    pub fn begin_read(&mut self) -> ReadToken {
        let began = self.next();
        self.reads.insert(began);
        ReadToken { began }
    }

    /// Ends a read without judging it, for example because it failed.
    pub fn abandon(&mut self, read: ReadToken) {
        self.close(read);
    }

    /// Judges the bytes of a successful read from sector `first` on.
    ///
    /// # Errors
    /// Fails if a sector has a version that was not allowed at any time since the read started.
    pub fn check_read(&mut self, read: ReadToken, first: u64, bytes: &[u8]) -> Result<(), Violation> {
        assert!(bytes.len().is_multiple_of(SECTOR_BYTES), "whole sectors");
        self.next();
        let (restores_unflushed, last_crash) = (self.restores_unflushed(), self.last_crash);
        let mut wrong: Option<(u64, IdentifiedBytes)> = None;
        let mut more = 0;
        for (at, bytes) in (first..).zip(bytes.chunks(SECTOR_BYTES)) {
            let found = IdentifiedBytes::identify(bytes);
            let allowed = match self.sectors.get(&at) {
                Some(sector) => sector.allows(at, &found, read.began),
                None => found == IdentifiedBytes::Zero,
            };
            if !allowed {
                more += u64::from(wrong.is_some());
                wrong.get_or_insert((at, found));
            } else if self.sectors.get(&at).is_some_and(|sector| sector.now.len() > 1) {
                self.sector_mut(at).settle(at, &found, read.began, last_crash, restores_unflushed);
                self.drop_unneeded(at);
            }
        }
        let judged = wrong.map_or(Ok(()), |(at, found)| Err(self.violation(at, &found, read.began, more)));
        self.close(read);
        judged
    }

    /// Returns the latest start among the writes whose content appears in `bytes`, the content of the whole
    /// device. The tick is at least the start of `verb`.
    pub fn latest(&self, verb: &ReadToken, bytes: &[u8]) -> Tick {
        let began = (0..).zip(bytes.chunks(SECTOR_BYTES)).filter_map(|(at, bytes)| {
            let sector = self.sectors.get(&at)?;
            // Skip zeroes: they do not show which write they are from.
            let found =
                Some(IdentifiedBytes::identify(bytes)).filter(|found| *found != IdentifiedBytes::Zero)?;
            let shown = sector.now.iter().filter(|version| found.matches(at, version.content));
            shown.map(|version| version.began).min()
        });
        began.max().unwrap_or(0).max(verb.began)
    }

    /// Checks that `bytes`, the content of the whole device, is a possible content since the start of `verb`
    /// that includes all writes completed before `moment`.
    ///
    /// # Errors
    /// Fails if a sector has a version that was superseded before that time.
    pub fn check_moment(&self, verb: &ReadToken, moment: Tick, bytes: &[u8]) -> Result<(), Violation> {
        let since = moment.max(verb.began);
        for (at, bytes) in (0..).zip(bytes.chunks(SECTOR_BYTES)) {
            let found = IdentifiedBytes::identify(bytes);
            let allowed = match self.sectors.get(&at) {
                Some(sector) => sector.allows(at, &found, since),
                None => found == IdentifiedBytes::Zero,
            };
            if !allowed {
                return Err(self.violation(at, &found, since, 0));
            }
        }
        Ok(())
    }

    // ---- crashes --------------------------------------------------------------------------------

    /// Records a power loss or the death of the process. Requests in flight may have taken effect; their
    /// later completions are ignored. The caller abandons reads in progress first.
    pub fn crash(&mut self) {
        self.crash_count += 1;
        self.lose_unflushed(Sector::crash);
    }

    /// Records a power loss of the disk which the issuer of the requests in flight survives. These requests
    /// may take effect before or after the loss.
    pub fn cut(&mut self) {
        self.lose_unflushed(Sector::cut);
    }

    fn lose_unflushed(&mut self, how: fn(&mut Sector, Tick)) {
        let tick = self.next();
        self.last_crash = tick;
        if self.durability == Durability::Nothing {
            self.sectors.clear();
            self.sectors_with_past.clear();
            return;
        }
        let all: Vec<u64> = self.sectors.keys().copied().collect();
        for at in all {
            how(self.sector_mut(at), tick);
            self.drop_unneeded(at);
        }
    }

    /// Records the death of the process while the disks survive: completed writes stay, and requests in flight may
    /// have taken effect. A later power loss can still remove unflushed writes.
    pub fn die(&mut self) {
        if self.durability == Durability::Nothing {
            return self.crash();
        }
        let tick = self.next();
        self.crash_count += 1;
        let all: Vec<u64> = self.sectors.keys().copied().collect();
        for at in all {
            self.sector_mut(at).die(tick);
        }
    }

    // ---- helpers --------------------------------------------------------------------------------

    fn next(&mut self) -> Tick {
        self.tick = self.clock.0.fetch_add(1, Ordering::SeqCst) + 1;
        self.tick
    }

    fn restores_unflushed(&self) -> bool {
        self.durability != Durability::Nothing
    }

    fn close(&mut self, ReadToken { began }: ReadToken) {
        self.reads.remove(&began);
        if self.reads.is_empty() && !self.restores_unflushed() {
            // Without reads in progress and without unflushed versions that a crash may restore, no past
            // version is needed.
            for at in std::mem::take(&mut self.sectors_with_past) {
                self.drop_unneeded(at);
            }
        }
    }

    fn sector(&self, at: u64) -> Sector {
        self.sectors.get(&at).cloned().unwrap_or_else(Sector::untouched)
    }

    fn sector_mut(&mut self, at: u64) -> &mut Sector {
        self.sectors.entry(at).or_insert_with(Sector::untouched)
    }

    /// Drops the versions of this sector that are no longer needed, and the sector itself if it is as if
    /// never written.
    fn drop_unneeded(&mut self, at: u64) {
        let oldest_read = self.reads.first().copied().unwrap_or(self.tick);
        let Some(sector) = self.sectors.get_mut(&at) else { return };
        sector.prune(oldest_read);
        if sector.past.is_empty() {
            self.sectors_with_past.remove(&at);
        } else {
            self.sectors_with_past.insert(at);
        }
        if sector.is_untouched() {
            self.sectors.remove(&at);
        }
    }
}
