//! Verbs on the content of a whole device: snapshots of it, and its replacement by that of another device.

use std::collections::BTreeSet;

use super::sector::{PastVersion, Sector, State, Version};
use super::{Durability, Oracle, ReadToken};
use crate::rt::sync::Arc;

impl Oracle {
    /// Creates the oracle of a snapshot taken now: the current content, with any part of the writes in
    /// flight.
    #[must_use]
    pub fn snapshot(&mut self, name: &str, durability: Durability) -> Self {
        let now = self.begin_read();
        self.snapshot_since(now, name, durability)
    }

    /// Creates the oracle of a snapshot taken at some moment since `verb` started.
    #[must_use]
    pub fn snapshot_since(&mut self, verb: ReadToken, name: &str, durability: Durability) -> Self {
        let tick = self.next();
        let mut taken = Self::with_clock(name, self.size, durability, &self.clock);
        (taken.tick, taken.crash_count) = (tick, self.crash_count);
        taken.history.clone_from(&self.history);
        for (&at, sector) in &self.sectors {
            let mut now: Vec<Version> = Vec::with_capacity(sector.now.len());
            let lately = sector.past.iter().filter(|past| past.gone_since > verb.began);
            // A read of the snapshot shows which of several versions it has, but a flush of the snapshot
            // makes none of them durable.
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
            let restores_unflushed = taken.restores_unflushed();
            // A flush of the snapshot does not flush the original device, so these past versions are never
            // durably replaced.
            let past = sector.past.iter().filter(|past| restores_unflushed && past.may_return);
            let past = past.map(|past| PastVersion { durable_after: None, ..*past }).collect();
            taken.sectors.insert(at, Sector { now, past });
            taken.drop_unneeded(at);
        }
        self.close(verb);
        taken
    }

    /// Records the start of a verb that replaces the content with that of `other`, such as a rewind. From now on reads
    /// may return the new content. The replacement ends with [`replace_content`](Self::replace_content).
    pub fn begin_replacement(&mut self, other: &Arc<Self>) -> ReadToken {
        let token = self.begin_read();
        let all: BTreeSet<u64> = self.sectors.keys().chain(other.sectors.keys()).copied().collect();
        self.replacing = Some((token.began, Arc::clone(other)));
        let size = self.size;
        all.into_iter().filter(|&at| at < size).for_each(|at| self.add_new_content(at));
        token
    }

    /// Adds the new content of a running replacement as a version of this sector: it may appear at any time.
    pub(super) fn add_new_content(&mut self, at: u64) {
        let Some((began, other)) = self.replacing.clone() else { return };
        let sector = self.sector_mut(at);
        if sector.now.iter().all(|version| version.state != State::InFlight || version.began != began) {
            other.sector(at).now.iter().for_each(|version| sector.begin(version.content, began));
        }
    }

    /// Records that the content of `other` replaced that of the device at some moment since `verb` started,
    /// as by a rewind. Writes during the verb may be present or not. `old_returns`: a crash may restore the
    /// old content.
    pub fn replace_content(&mut self, verb: ReadToken, other: &Self, old_returns: bool) {
        self.replace_head(verb, self.size, other, old_returns);
    }

    /// Records that the content of `other` may have replaced that of the device, or any part of it.
    pub fn replace_doubtfully(&mut self, other: &Self) {
        let (ended, size) = (self.next(), self.size);
        let all: BTreeSet<u64> = self.sectors.keys().chain(other.sectors.keys()).copied().collect();
        for at in all.into_iter().filter(|&at| at < size) {
            let theirs = other.sector(at).now;
            let new = theirs.iter().map(|version| Version { state: State::Doubtful, ended, ..*version });
            self.sector_mut(at).now.extend(new);
            self.drop_unneeded(at);
        }
    }

    /// Like [`replace_content`](Self::replace_content), but replaces only the first `size` sectors.
    pub fn replace_head(&mut self, verb: ReadToken, size: u64, other: &Self, old_returns: bool) {
        let tick = self.next();
        let (restores_unflushed, size) = (self.restores_unflushed(), size.min(self.size));
        self.replacing = None;
        let all: BTreeSet<u64> = self.sectors.keys().chain(other.sectors.keys()).copied().collect();
        for at in all.into_iter().filter(|&at| at < size) {
            let theirs = other.sector(at);
            let sector = self.sector_mut(at);
            sector.now.retain(|version| version.state != State::InFlight || version.began != verb.began);
            let past = |version: &Version| PastVersion {
                content: version.content,
                ended: version.ended,
                gone_since: tick,
                replaced_by: theirs.now.first().map(|version| version.content),
                durable_after: Some(tick),
                may_return: restores_unflushed && old_returns,
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
            let returning = theirs.past.iter().filter(|past| restores_unflushed && past.may_return);
            sector.past.extend(returning.map(|past| PastVersion {
                ended: tick,
                gone_since: 0,
                durable_after: past.durable_after.map(|_| tick),
                ..*past
            }));
            self.drop_unneeded(at);
        }
        self.close(verb);
    }
}
