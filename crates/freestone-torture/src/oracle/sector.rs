//! The versions of one sector.

use super::content::{Content, Found};
use super::{Outcome, Tick};

/// How far the write of a version came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// Not answered.
    InFlight,
    /// Answered well: what was there before it began is gone.
    Done,
    /// It may have happened: it failed, or was a discard that need not do anything.
    Doubtful,
}

/// A version that a read may find now.
#[derive(Debug, Clone, Copy)]
pub(super) struct Version {
    pub content: Content,
    pub state: State,
    pub began: Tick,
    /// When it was answered. No meaning while it is in flight.
    pub ended: Tick,
}

/// A version that no read finds that begins now.
#[derive(Debug, Clone, Copy)]
pub(super) struct Past {
    pub content: Content,
    pub ended: Tick,
    /// Reads that began from here on do not find it.
    pub gone: Tick,
    /// The write that took its place; `None` where a read showed that it is not there.
    pub by: Option<Content>,
    /// From here on a flush takes it out of what a crash may bring back. `None` where nothing that
    /// took its place was answered well.
    pub firm: Option<Tick>,
    /// A crash may bring it back.
    pub returns: bool,
}

impl Past {
    /// One for two versions that look the same: whatever either allows.
    fn merge(&mut self, other: &Self) {
        self.firm = self.firm.zip(other.firm).map(|(a, b)| a.max(b));
        self.gone = self.gone.max(other.gone);
        self.ended = self.ended.max(other.ended);
        self.returns |= other.returns;
        self.by = other.by;
    }
}

#[derive(Debug, Clone)]
pub(super) struct Sector {
    pub now: Vec<Version>,
    pub past: Vec<Past>,
}

impl Sector {
    /// Zeroes since ever.
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

    /// The write of `content` that began at `began` was answered at `tick`. `keeps`: a crash brings
    /// unflushed versions back.
    pub fn end(&mut self, content: Content, began: Tick, outcome: Outcome, tick: Tick, keeps: bool) {
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
            past.returns &= !fua;
            past.firm = past.firm.or(Some(tick));
        }
        let replaced = |version: &Version| version.state != State::InFlight && version.ended < began;
        let past = |version: &Version| Past {
            content: version.content,
            ended: version.ended,
            gone: tick,
            by: Some(content),
            firm: Some(tick),
            returns: keeps && !fua,
        };
        self.retire(replaced, past);
    }

    /// Moves what `leaves` says from now to the past.
    pub fn retire(&mut self, leaves: impl Fn(&Version) -> bool, past: impl Fn(&Version) -> Past) {
        let Self { now, past: list } = self;
        now.retain(|version| {
            if leaves(version) {
                list.push(past(version));
            }
            !leaves(version)
        });
    }

    /// A flush that began at `began` was answered well.
    pub fn flushed(&mut self, began: Tick) {
        for past in &mut self.past {
            past.returns &= past.firm.is_none_or(|firm| firm > began);
        }
    }

    /// Everything that may come back is there again. What is in flight is so no more.
    pub fn crash(&mut self, tick: Tick) {
        self.die(tick);
        self.cut(tick);
    }

    /// Everything that may come back is there again. What is in flight stays so.
    pub fn cut(&mut self, tick: Tick) {
        for version in self.now.iter_mut().filter(|version| version.state != State::InFlight) {
            (version.state, version.ended) = (State::Done, tick);
        }
        for past in self.past.extract_if(.., |past| past.returns) {
            if !self.now.iter().any(|version| version.content == past.content) {
                let Past { content, ended, .. } = past;
                self.now.push(Version { content, state: State::Done, began: ended, ended: tick });
            }
        }
    }

    /// Nothing is in flight any more: who asked for it is dead.
    pub fn die(&mut self, tick: Tick) {
        for version in self.now.iter_mut().filter(|version| version.state == State::InFlight) {
            (version.state, version.ended) = (State::Doubtful, tick);
        }
    }

    /// Whether a read that began at `began` may find this.
    pub fn allows(&self, at: u64, found: &Found, began: Tick) -> bool {
        self.now.iter().any(|version| found.matches(at, version.content))
            || self.past.iter().any(|past| past.gone > began && found.matches(at, past.content))
    }

    /// A read that began at `began` found this. If no write was in flight meanwhile, that is what
    /// is there since the last one was answered, and will be.
    pub fn settle(&mut self, at: u64, found: &Found, began: Tick, crashed: Tick, keeps: bool) {
        if self.now.len() < 2 {
            return;
        }
        let quiet = self.now.iter().all(|version| version.state != State::InFlight && version.ended <= began);
        let shown = self.now.iter().filter(|version| found.matches(at, version.content));
        if !quiet || shown.clone().next().is_none() {
            return;
        }
        // Zeroes can be several versions: what is to be known must hold of each.
        let done = shown.clone().all(|version| version.state == State::Done);
        let survived = shown.clone().all(|version| version.ended == crashed);
        let since = self.now.iter().map(|version| version.ended).max().unwrap_or(0);
        let past = |version: &Version| Past {
            content: version.content,
            ended: version.ended,
            gone: since,
            by: None,
            firm: (done && version.state == State::Done).then_some(since),
            // What a crash left is one of the versions; once it is seen, the others never come
            // back.
            returns: keeps && !(survived && version.ended == crashed),
        };
        self.retire(|version| !found.matches(at, version.content), past);
    }

    /// Forgets what neither a crash nor a read that began before `oldest_read` can find.
    pub fn prune(&mut self, oldest_read: Tick) {
        self.past.retain(|past| past.returns || past.gone > oldest_read);
        // Zeroes have no id: several versions of them are one, as old as the youngest.
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
