//! The versions of one sector: those that a read may return now, and those that only earlier reads
//! or a crash may.

use super::content::{Content, IdentifiedBytes};
use super::{Outcome, Tick};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    InFlight,
    /// The write has completed: versions completed before its start are gone.
    Done,
    /// The write may have taken effect: it failed, or was a discard, which need not change
    /// anything.
    Doubtful,
}

/// A version that a read may return now.
#[derive(Debug, Clone, Copy)]
pub(super) struct Version {
    pub content: Content,
    pub state: State,
    pub began: Tick,
    /// Tick of the completion of the write. Has no meaning while the write is in flight.
    pub ended: Tick,
}

/// A version that no read starting now can return.
#[derive(Debug, Clone, Copy)]
pub(super) struct PastVersion {
    pub content: Content,
    pub ended: Tick,
    /// Reads that started at this tick or later cannot return the version.
    pub gone_since: Tick,
    /// Content of the write that replaced the version; `None` if a read showed another version.
    pub replaced_by: Option<Content>,
    /// A flush that starts after this tick makes the replacement durable, so that a crash no longer
    /// restores the version. `None` if no later write completed successfully.
    pub durable_after: Option<Tick>,
    pub may_return: bool,
}

impl PastVersion {
    /// Merges another version with the same content into this one, which then allows everything
    /// that either allows.
    fn merge(&mut self, other: &Self) {
        self.durable_after = self.durable_after.zip(other.durable_after).map(|(a, b)| a.max(b));
        self.gone_since = self.gone_since.max(other.gone_since);
        self.ended = self.ended.max(other.ended);
        self.may_return |= other.may_return;
        self.replaced_by = other.replaced_by;
    }
}

#[derive(Debug, Clone)]
pub(super) struct Sector {
    pub now: Vec<Version>,
    pub past: Vec<PastVersion>,
}

impl Sector {
    /// Returns a sector that was never written: zeroes.
    pub fn untouched() -> Self {
        let zeroes = Version { content: Content::Zero, state: State::Done, began: 0, ended: 0 };
        Self { now: vec![zeroes], past: Vec::new() }
    }

    pub fn is_untouched(&self) -> bool {
        self.past.is_empty()
            && matches!(self.now[..], [Version { content: Content::Zero, state: State::Done, .. }])
    }

    pub fn begin(&mut self, content: Content, began: Tick) {
        self.now.push(Version { content, state: State::InFlight, began, ended: 0 });
    }

    /// Records the completion at `tick` of the write of `content` that started at `began`.
    /// `restores_unflushed`: a crash may restore unflushed versions.
    pub fn end(
        &mut self,
        content: Content,
        began: Tick,
        outcome: Outcome,
        tick: Tick,
        restores_unflushed: bool,
    ) {
        let own = |version: &Version| {
            version.state == State::InFlight && version.began == began && version.content == content
        };
        let Some(at) = self.now.iter().position(own) else { return };
        let fua = match outcome {
            Outcome::Refused => {
                self.now.remove(at);
                return;
            }
            Outcome::Failed => {
                (self.now[at].state, self.now[at].ended) = (State::Doubtful, tick);
                return;
            }
            Outcome::Done { fua } => fua,
        };
        (self.now[at].state, self.now[at].ended) = (State::Done, tick);
        for past in self.past.iter_mut().filter(|past| past.ended < began) {
            past.may_return &= !fua;
            past.durable_after = past.durable_after.or(Some(tick));
        }
        let replaced = |version: &Version| version.state != State::InFlight && version.ended < began;
        let past = |version: &Version| PastVersion {
            content: version.content,
            ended: version.ended,
            gone_since: tick,
            replaced_by: Some(content),
            durable_after: Some(tick),
            may_return: restores_unflushed && !fua,
        };
        self.retire(replaced, past);
    }

    /// Moves the versions for which `leaves` returns true from `now` to the past versions,
    /// converted by `past`.
    pub fn retire(&mut self, leaves: impl Fn(&Version) -> bool, past: impl Fn(&Version) -> PastVersion) {
        let Self { now, past: list } = self;
        now.retain(|version| {
            if leaves(version) {
                list.push(past(version));
            }
            !leaves(version)
        });
    }

    /// Records the success of a flush that started at tick `began`.
    pub fn record_flush(&mut self, began: Tick) {
        for past in &mut self.past {
            past.may_return &= past.durable_after.is_none_or(|durable_after| durable_after > began);
        }
    }

    /// Allows every version that a crash may restore, and ends the writes in flight.
    pub fn crash(&mut self, tick: Tick) {
        self.die(tick);
        self.cut(tick);
    }

    /// Allows every version that a power cut may restore. Writes in flight continue.
    pub fn cut(&mut self, tick: Tick) {
        for version in self.now.iter_mut().filter(|version| version.state != State::InFlight) {
            (version.state, version.ended) = (State::Done, tick);
        }
        for past in self.past.extract_if(.., |past| past.may_return) {
            if !self.now.iter().any(|version| version.content == past.content) {
                let PastVersion { content, ended, .. } = past;
                self.now.push(Version { content, state: State::Done, began: ended, ended: tick });
            }
        }
    }

    /// Ends the writes in flight as doubtful: their issuer is dead.
    pub fn die(&mut self, tick: Tick) {
        for version in self.now.iter_mut().filter(|version| version.state == State::InFlight) {
            (version.state, version.ended) = (State::Doubtful, tick);
        }
    }

    /// Returns true if a read of sector `at` that started at tick `began` may return `found`.
    pub fn allows(&self, at: u64, found: &IdentifiedBytes, began: Tick) -> bool {
        self.now.iter().any(|version| found.matches(at, version.content))
            || self.past.iter().any(|past| past.gone_since > began && found.matches(at, past.content))
    }

    /// Records the bytes found by a read that started at tick `began`. If no write was in flight
    /// since then, the version found has been present since the last completion, and only it stays.
    pub fn settle(
        &mut self,
        at: u64,
        found: &IdentifiedBytes,
        began: Tick,
        last_crash: Tick,
        restores_unflushed: bool,
    ) {
        if self.now.len() < 2 {
            return;
        }
        let quiet = self.now.iter().all(|version| version.state != State::InFlight && version.ended <= began);
        let shown = self.now.iter().filter(|version| found.matches(at, version.content));
        if !quiet || shown.clone().next().is_none() {
            return;
        }
        // Zeroes can match several versions; a conclusion must then be true for all matches.
        let done = shown.clone().all(|version| version.state == State::Done);
        let survived = shown.clone().all(|version| version.ended == last_crash);
        let since = self.now.iter().map(|version| version.ended).max().unwrap_or(0);
        let past = |version: &Version| PastVersion {
            content: version.content,
            ended: version.ended,
            gone_since: since,
            replaced_by: None,
            durable_after: (done && version.state == State::Done).then_some(since),
            // A crash leaves one of the versions. Once a read shows which one, no later crash
            // restores the others.
            may_return: restores_unflushed && !(survived && version.ended == last_crash),
        };
        self.retire(|version| !found.matches(at, version.content), past);
    }

    /// Drops past versions that neither a crash nor a read that started at or after `oldest_read`
    /// can return.
    pub fn prune(&mut self, oldest_read: Tick) {
        self.past.retain(|past| past.may_return || past.gone_since > oldest_read);
        // Zeroes have no id, so all versions of zeroes are merged into one, with the latest ticks.
        if let Some(first) = self.past.iter().position(|past| past.content == Content::Zero) {
            let mut at = first + 1;
            while at < self.past.len() {
                if self.past[at].content == Content::Zero {
                    let other = self.past.remove(at);
                    self.past[first].merge(&other);
                } else {
                    at += 1;
                }
            }
        }
        for state in [State::Done, State::Doubtful] {
            let zero = |version: &Version| version.content == Content::Zero && version.state == state;
            let Some(youngest) =
                self.now.iter().filter(|version| zero(version)).map(|version| version.ended).max()
            else {
                continue;
            };
            let mut kept = false;
            self.now.retain(|version| {
                let goes = zero(version) && (kept || version.ended != youngest);
                kept |= zero(version) && !goes;
                !goes
            });
        }
    }
}
