//! Which versions each sector of a device may hold: one judgement for reads, failed writes, power
//! cuts and crashes.
//!
//! The oracle is told when each write begins and how it ends. It keeps, for each sector, the
//! versions that a read may find now and those that only a crash may bring back:
//!
//! * A write may be seen from its beginning on. When it is **answered well**, everything that was
//!   answered before it began is gone. Writes that overlap in time leave either.
//! * A write that **failed** leaves the old or the new, sector by sector, until a later write is
//!   answered well.
//! * A **read** that no write overlapped shows which of several versions it is, and that stays.
//! * A **crash** brings back what no flush and no FUA made sure of. The next read of a sector
//!   settles it for good. What is in flight is over then. At a **cut** it is not: who asked for it
//!   lives on, and it may come before or after.
//!
//! A **tick** is the time of an oracle: a counter of all beginnings and ends. What runs beside
//! something else is known by its ticks, so the caller begins each thing before he asks the device,
//! and ends it after the answer. The lists are sparse: a sector that was never written costs
//! nothing.
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
#[cfg(test)]
mod tests;
mod violation;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::rt::sync::Arc;
pub use content::{Content, Fill, Found, SECTOR_BYTES, content, fill};
use sector::{Past, Sector, State, Version};
use violation::Told;
pub use violation::Violation;

/// A moment of an oracle.
pub type Tick = u64;

/// Writes that are remembered for messages.
const HISTORY_MAX: usize = 1024;

/// What a device still has after a crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// Nothing: it is all zeroes.
    Nothing,
    /// What was flushed; of what was not, any of it.
    Flushed,
    /// What was answered.
    Answered,
}

/// What a write does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Puts the content of its id there.
    Write,
    /// Puts zeroes there.
    Zeroes,
    /// A discard.
    Discard {
        /// It leaves zeroes for certain; else zeroes or what was there.
        zeroing: bool,
    },
}

/// How a write ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Well.
    Done {
        /// It was to be durable before its answer.
        fua: bool,
    },
    /// With an error, though it may have happened.
    Failed,
    /// With an error that says that nothing happened.
    Refused,
}

/// A write that was begun.
#[derive(Debug)]
#[must_use = "each write that is begun ends"]
pub struct WriteToken {
    content: Content,
    kind: Kind,
    range: Range<u64>,
    began: Tick,
    /// Crashes before it.
    life: u64,
}

/// A flush that was begun.
#[derive(Debug)]
#[must_use = "each flush that is begun ends"]
pub struct FlushToken {
    began: Tick,
    life: u64,
}

/// A read that was begun, or a verb that takes a snapshot or replaces a content.
#[derive(Debug)]
#[must_use = "each read that is begun ends"]
pub struct ReadToken {
    began: Tick,
}

/// The time of one oracle, or of several of which the order of events matters.
#[derive(Debug, Clone, Default)]
pub struct Clock(Arc<AtomicU64>);

/// The versions of a device. A sector is a number; ranges are of sectors. A clone is a copy for
/// looking ahead: tokens of the original that read belong to the original alone.
#[derive(Debug, Clone)]
pub struct Oracle {
    name: String,
    size: u64,
    durability: Durability,
    clock: Clock,
    /// Its last.
    tick: Tick,
    /// Crashes so far.
    life: u64,
    /// When the last of them was.
    crashed: Tick,
    /// All that are not zeroes since ever.
    sectors: BTreeMap<u64, Sector>,
    /// Those with versions that reads that begin now do not find.
    with_past: BTreeSet<u64>,
    /// When the reads began that are under way.
    reads: BTreeSet<Tick>,
    /// When a verb began that replaces the content, and by what.
    turning: Option<(Tick, Arc<Self>)>,
    history: VecDeque<Told>,
}

impl Oracle {
    /// Of a device of `size` sectors, all zeroes.
    pub fn new(name: &str, size: u64, durability: Durability) -> Self {
        Self::timed(name, size, durability, &Clock::default())
    }

    /// The same, with the time of others.
    pub fn timed(name: &str, size: u64, durability: Durability, clock: &Clock) -> Self {
        Self {
            name: name.to_owned(),
            size,
            durability,
            clock: clock.clone(),
            tick: 0,
            life: 0,
            crashed: 0,
            sectors: BTreeMap::new(),
            with_past: BTreeSet::new(),
            reads: BTreeSet::new(),
            turning: None,
            history: VecDeque::new(),
        }
    }

    /// Its name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Gives it another name.
    pub fn rename(&mut self, name: &str) {
        name.clone_into(&mut self.name);
    }

    /// In sectors.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// What it still has after a crash.
    pub fn durability(&self) -> Durability {
        self.durability
    }

    /// Now.
    pub fn tick(&self) -> Tick {
        self.tick
    }

    /// The device has more sectors, which are zeroes. A smaller number changes nothing.
    pub fn grow(&mut self, size: u64) {
        self.size = self.size.max(size);
    }

    /// What was taken of the device has only so many sectors: it had not grown yet.
    pub fn ends_at(&mut self, size: u64) {
        self.size = size;
        self.sectors.retain(|at, _| *at < size);
        self.with_past.retain(|at| *at < size);
    }

    // ---- writes and flushes ---------------------------------------------------------------------

    /// A write is about to be asked for. `id` is unique among all writes to devices that have
    /// anything to do with this one, see [`Fill::id`].
    pub fn begin_write(&mut self, id: u64, range: Range<u64>, kind: Kind) -> WriteToken {
        assert!(range.start < range.end && range.end <= self.size, "{range:?} of {}", self.size);
        let began = self.next();
        let content = if kind == Kind::Write { Content::Data(id) } else { Content::Zero };
        for at in range.clone() {
            self.may_turn(at);
            self.sector_mut(at).begin(content, began);
        }
        if self.history.len() == HISTORY_MAX {
            self.history.pop_front();
        }
        self.history.push_back(Told { content, kind, range: range.clone(), began, ended: None });
        WriteToken { content, kind, range, began, life: self.life }
    }

    /// It was answered.
    pub fn end(&mut self, write: WriteToken, outcome: Outcome) {
        let tick = self.next();
        if let Some(told) = self.history.iter_mut().rev().find(|told| told.began == write.began) {
            told.ended = Some((tick, matches!(outcome, Outcome::Done { .. })));
        }
        if write.life != self.life {
            // The crash has already made it one of the versions that may be there.
            return;
        }
        let outcome = match (write.kind, outcome) {
            (Kind::Discard { zeroing: false }, Outcome::Done { .. }) => Outcome::Failed,
            (_, Outcome::Done { fua }) => {
                Outcome::Done { fua: fua || self.durability == Durability::Answered }
            }
            (_, outcome) => outcome,
        };
        let keeps = self.keeps();
        for at in write.range {
            self.sector_mut(at).end(write.content, write.began, outcome, tick, keeps);
            self.settled(at);
        }
    }

    /// A flush is about to be asked for.
    pub fn begin_flush(&mut self) -> FlushToken {
        FlushToken { began: self.next(), life: self.life }
    }

    /// It was answered. One that failed promises nothing.
    pub fn end_flush(&mut self, FlushToken { began, life }: FlushToken, done: bool) {
        self.next();
        if !done || life != self.life {
            return;
        }
        for at in self.with_past.clone() {
            self.sector_mut(at).flushed(began);
            self.settled(at);
        }
    }

    // ---- reads ----------------------------------------------------------------------------------

    /// A read, or a verb that looks at the content, is about to be asked for.
    pub fn begin_read(&mut self) -> ReadToken {
        let began = self.next();
        self.reads.insert(began);
        ReadToken { began }
    }

    /// The read was answered with an error: there is nothing to judge.
    pub fn abandon(&mut self, read: ReadToken) {
        self.close(read);
    }

    /// The read was answered with these bytes, from sector `first` on.
    ///
    /// # Errors
    /// A sector has a version that was not allowed at any moment since the read began.
    pub fn check_read(&mut self, read: ReadToken, first: u64, bytes: &[u8]) -> Result<(), Violation> {
        assert!(bytes.len().is_multiple_of(SECTOR_BYTES), "whole sectors");
        self.next();
        let (keeps, crashed) = (self.keeps(), self.crashed);
        let mut wrong: Option<(u64, Found)> = None;
        let mut more = 0;
        for (at, bytes) in (first..).zip(bytes.chunks(SECTOR_BYTES)) {
            let found = Found::in_bytes(bytes);
            let allowed = match self.sectors.get(&at) {
                Some(sector) => sector.allows(at, &found, read.began),
                None => found == Found::Zero,
            };
            if !allowed {
                more += u64::from(wrong.is_some());
                wrong.get_or_insert((at, found));
            } else if self.sectors.get(&at).is_some_and(|sector| sector.now.len() > 1) {
                self.sector_mut(at).settle(at, &found, read.began, crashed, keeps);
                self.settled(at);
            }
        }
        let judged = wrong.map_or(Ok(()), |(at, found)| Err(self.violation(at, &found, read.began, more)));
        self.close(read);
        judged
    }

    /// When the youngest of the writes began, since `verb` did, that these bytes of the whole
    /// device have.
    pub fn latest(&self, verb: &ReadToken, bytes: &[u8]) -> Tick {
        let began = (0..).zip(bytes.chunks(SECTOR_BYTES)).filter_map(|(at, bytes)| {
            let sector = self.sectors.get(&at)?;
            // Zeroes are of many.
            let found = Some(Found::in_bytes(bytes)).filter(|found| *found != Found::Zero)?;
            let shown = sector.now.iter().filter(|version| found.matches(at, version.content));
            shown.map(|version| version.began).min()
        });
        began.max().unwrap_or(0).max(verb.began)
    }

    /// Whether these bytes of the whole device can be of a moment since `verb` began at which what
    /// was answered before `moment` was there.
    ///
    /// # Errors
    /// A sector has a version that was superseded before.
    pub fn check_moment(&self, verb: &ReadToken, moment: Tick, bytes: &[u8]) -> Result<(), Violation> {
        let since = moment.max(verb.began);
        for (at, bytes) in (0..).zip(bytes.chunks(SECTOR_BYTES)) {
            let found = Found::in_bytes(bytes);
            let allowed = match self.sectors.get(&at) {
                Some(sector) => sector.allows(at, &found, since),
                None => found == Found::Zero,
            };
            if !allowed {
                return Err(self.violation(at, &found, since, 0));
            }
        }
        Ok(())
    }

    // ---- crashes, snapshots ---------------------------------------------------------------------

    /// The power went, or the process died. What is in flight may have happened or not; its answers
    /// no longer count. Reads that are under way are abandoned before.
    pub fn crash(&mut self) {
        self.life += 1;
        self.fall(Sector::crash);
    }

    /// The power of the disk went, and who asked for what is in flight lives on: that may come
    /// before or after.
    pub fn cut(&mut self) {
        self.fall(Sector::cut);
    }

    fn fall(&mut self, how: fn(&mut Sector, Tick)) {
        let tick = self.next();
        self.crashed = tick;
        if self.durability == Durability::Nothing {
            self.sectors.clear();
            self.with_past.clear();
            return;
        }
        let all: Vec<u64> = self.sectors.keys().copied().collect();
        for at in all {
            how(self.sector_mut(at), tick);
            self.settled(at);
        }
    }

    /// The process died, and the disks live on: what was answered stays, and what is in flight may
    /// have happened or not. What was not flushed can still be lost with the power.
    pub fn die(&mut self) {
        if self.durability == Durability::Nothing {
            return self.crash();
        }
        let tick = self.next();
        self.life += 1;
        let all: Vec<u64> = self.sectors.keys().copied().collect();
        for at in all {
            self.sector_mut(at).die(tick);
        }
    }

    /// A device with what this one has now; of what is in flight, any of it.
    #[must_use]
    pub fn snapshot(&mut self, name: &str, durability: Durability) -> Self {
        let now = self.begin_read();
        self.snapshot_since(now, name, durability)
    }

    /// The same, of a moment since `verb` began.
    #[must_use]
    pub fn snapshot_since(&mut self, verb: ReadToken, name: &str, durability: Durability) -> Self {
        let tick = self.next();
        let mut taken = Self::timed(name, self.size, durability, &self.clock);
        (taken.tick, taken.life) = (tick, self.life);
        taken.history.clone_from(&self.history);
        for (&at, sector) in &self.sectors {
            let mut now: Vec<Version> = Vec::with_capacity(sector.now.len());
            let lately = sector.past.iter().filter(|past| past.gone > verb.began);
            // A read shows which of several versions it is, but a flush of the new device makes none durable.
            let is_certain = sector.now.len() == 1 && lately.clone().next().is_none();
            for version in &sector.now {
                let is_done = is_certain && version.state != State::InFlight;
                let state = if is_done { version.state } else { State::Doubtful };
                now.push(Version { state, ended: tick, ..*version });
            }
            for past in lately {
                now.push(Version {
                    content: past.content,
                    state: State::Doubtful,
                    began: past.ended,
                    ended: tick,
                });
            }
            let keeps = taken.keeps();
            // A flush of the new device is none of the old one.
            let past = sector.past.iter().filter(|past| keeps && past.returns);
            let past = past.map(|past| Past { firm: None, ..*past }).collect();
            taken.sectors.insert(at, Sector { now, past });
            taken.settled(at);
        }
        self.close(verb);
        taken
    }

    /// A verb is about to be asked for that gives the device what `other` has, as a rewind: from
    /// now on reads may find that. Ends with [`turn_into`](Self::turn_into).
    pub fn begin_turn(&mut self, other: &Arc<Self>) -> ReadToken {
        let token = self.begin_read();
        let all: BTreeSet<u64> = self.sectors.keys().chain(other.sectors.keys()).copied().collect();
        self.turning = Some((token.began, Arc::clone(other)));
        let size = self.size;
        all.into_iter().filter(|&at| at < size).for_each(|at| self.may_turn(at));
        token
    }

    /// While a verb replaces the content: what it brings may be in this sector at any time.
    fn may_turn(&mut self, at: u64) {
        let Some((began, other)) = self.turning.clone() else { return };
        let sector = self.sector_mut(at);
        if sector.now.iter().all(|version| version.state != State::InFlight || version.began != began) {
            other.sector(at).now.iter().for_each(|version| sector.begin(version.content, began));
        }
    }

    /// The device takes what `other` has now, as with a rewind or a merge, at some moment since
    /// `verb` began: what was written meanwhile may be there or not. `old_returns`: a crash may
    /// bring back what was there before.
    pub fn turn_into(&mut self, verb: ReadToken, other: &Self, old_returns: bool) {
        self.turn_head_into(verb, self.size, other, old_returns);
    }

    /// The same of the first `size` sectors; what lies behind them stays.
    pub fn turn_head_into(&mut self, verb: ReadToken, size: u64, other: &Self, old_returns: bool) {
        let tick = self.next();
        let (keeps, size) = (self.keeps(), size.min(self.size));
        self.turning = None;
        let all: BTreeSet<u64> = self.sectors.keys().chain(other.sectors.keys()).copied().collect();
        for at in all.into_iter().filter(|&at| at < size) {
            let theirs = other.sector(at);
            let sector = self.sector_mut(at);
            sector.now.retain(|version| version.state != State::InFlight || version.began != verb.began);
            let past = |version: &Version| Past {
                content: version.content,
                ended: version.ended,
                gone: tick,
                by: theirs.now.first().map(|version| version.content),
                firm: Some(tick),
                returns: keeps && old_returns,
            };
            sector.retire(|version| version.state != State::InFlight && version.ended <= verb.began, past);
            for version in &theirs.now {
                let state = if version.state == State::InFlight { State::Doubtful } else { version.state };
                sector.now.push(Version {
                    content: version.content,
                    state,
                    began: version.began,
                    ended: tick,
                });
            }
            let returning = theirs.past.iter().filter(|past| keeps && past.returns);
            sector.past.extend(returning.map(|past| Past {
                ended: tick,
                gone: 0,
                firm: past.firm.map(|_| tick),
                ..*past
            }));
            self.settled(at);
        }
        self.close(verb);
    }

    // ---- parts ----------------------------------------------------------------------------------

    fn next(&mut self) -> Tick {
        self.tick = self.clock.0.fetch_add(1, Ordering::SeqCst) + 1;
        self.tick
    }

    fn keeps(&self) -> bool {
        self.durability != Durability::Nothing
    }

    fn close(&mut self, ReadToken { began }: ReadToken) {
        self.reads.remove(&began);
        if self.reads.is_empty() && !self.keeps() {
            // All of the past was kept for reads.
            for at in std::mem::take(&mut self.with_past) {
                self.settled(at);
            }
        }
    }

    fn sector(&self, at: u64) -> Sector {
        self.sectors.get(&at).cloned().unwrap_or_else(Sector::untouched)
    }

    fn sector_mut(&mut self, at: u64) -> &mut Sector {
        self.sectors.entry(at).or_insert_with(Sector::untouched)
    }

    /// Drops what is no longer needed after a change of this sector.
    fn settled(&mut self, at: u64) {
        let oldest_read = self.reads.first().copied().unwrap_or(self.tick);
        let Some(sector) = self.sectors.get_mut(&at) else { return };
        sector.prune(oldest_read);
        if sector.past.is_empty() {
            self.with_past.remove(&at);
        } else {
            self.with_past.insert(at);
        }
        if sector.is_untouched() {
            self.sectors.remove(&at);
        }
    }
}
