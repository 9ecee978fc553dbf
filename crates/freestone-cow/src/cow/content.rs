//! Content version of an origin: detects that a store missed writes of its origin.
//!
//! If an origin is written while a persistent store is closed, the store's snapshot becomes a
//! mixture of old and new data, and the store cannot tell. So every write changes the version of
//! the origin's content, the [`Stamp`]. At an orderly close both store and origin record the
//! version, the origin in its [`Notes`]. The notes also reveal later changes by others. Each record
//! is removed durably when the store or origin is opened, before anything is written. So the answer
//! after a crash is "unknown".
//!
//! | origin | store | |
//! |---|---|---|
//! | closed, not changed | same version | missed nothing |
//! | closed | other version, or the origin was changed | missed writes, or a session of the origin that crashed |
//! | in use, or no record | | unknown |
//!
//! The same applies to a store that is removed and opened again in one session.
//!
//! A store reads the version before its snapshot leaves the origin's list, and a write sets
//! `written` after it read that list. So a write that preserves nothing for the snapshot changes
//! the version after the store read it.

use std::sync::atomic::{AtomicBool, Ordering};

use super::notes::{Left, Notes, Stamp};
use freestone_core::sync::Mutex;
use freestone_core::unique;

/// Whether a store missed writes of its origin while it was closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missed {
    /// The store missed nothing, or is new.
    Nothing,
    /// Unknown: the origin or the store was not closed in order, or the origin has no record.
    Unknown,
    /// The origin was written or used without the store.
    Writes,
}

/// Tracks the content version of an origin.
pub struct ContentVersion {
    /// The origin was written since the version was read last.
    written: AtomicBool,
    session: u64,
    /// The session before this one closed the origin in order.
    closed: bool,
    state: Mutex<VersionState>,
}

struct VersionState {
    content: Stamp,
    /// Next number of this session.
    next: u64,
    /// The origin's notes say that the origin is in use.
    noted: bool,
}

impl ContentVersion {
    pub fn new(notes: Option<&dyn Notes>) -> Self {
        let session = unique::number();
        let fresh = Stamp { session, number: 0 };
        let left = notes.and_then(Notes::left);
        let (closed, content) = match left {
            Some(Left::Closed { content, changed: false }) => (true, content),
            Some(Left::Closed { changed: true, .. }) => (true, fresh),
            Some(Left::InUse) | None => (false, fresh),
        };
        // An origin gets its first record only when it gets a store.
        let in_use = left.is_some() && notes.is_some_and(Notes::in_use);
        let state = Mutex::new(VersionState { content, next: 1, noted: in_use });
        Self { written: AtomicBool::new(false), session, closed, state }
    }

    /// Notes that the origin is in use. Called before a store is opened or written. Blocks.
    pub fn note_in_use(&self, notes: Option<&dyn Notes>) {
        if !self.state.lock().noted && notes.is_some_and(Notes::in_use) {
            self.state.lock().noted = true;
        }
    }

    /// Marks the content as changed. Called before a write of the origin.
    pub fn mark_written(&self) {
        // Usually set already; a load keeps the cache line shared.
        if !self.written.load(Ordering::SeqCst) {
            self.written.store(true, Ordering::SeqCst);
        }
    }

    /// Returns the current content version, or `None` if the origin cannot record it.
    pub fn content(&self) -> Option<Stamp> {
        let mut state = self.state.lock();
        let content = self.current(&mut state);
        state.noted.then_some(content)
    }

    fn current(&self, state: &mut VersionState) -> Stamp {
        if self.written.swap(false, Ordering::SeqCst) {
            state.content = Stamp { session: self.session, number: state.next };
            state.next += 1;
        }
        state.content
    }

    /// Returns what a store missed that was closed when the origin held `closed`.
    pub fn missed(&self, closed: Option<Stamp>) -> Missed {
        let now = self.current(&mut self.state.lock());
        match closed {
            Some(closed) if closed == now => Missed::Nothing,
            Some(closed) if self.closed || closed.session == self.session => Missed::Writes,
            _ => Missed::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ContentVersion, Left, Missed, Notes, Stamp};

    struct FakeNotes(Option<Left>);

    impl Notes for FakeNotes {
        fn merge(&self) -> Option<u64> {
            None
        }
        fn merge_begins(&self, _: u64, _: &str) {}
        fn merge_ended(&self) -> bool {
            true
        }
        fn left(&self) -> Option<Left> {
            self.0
        }
        fn in_use(&self) -> bool {
            true
        }
    }

    #[test]
    fn missed_writes_are_known_after_orderly_close() {
        let (content, other) = (Stamp { session: 1, number: 2 }, Stamp { session: 1, number: 1 });
        let closed = |changed| Some(Left::Closed { content, changed });
        for (left, same, another) in [
            (closed(false), Missed::Nothing, Missed::Writes),
            (closed(true), Missed::Writes, Missed::Writes),
            (Some(Left::InUse), Missed::Unknown, Missed::Unknown),
            (None, Missed::Unknown, Missed::Unknown),
        ] {
            let content_version = ContentVersion::new(Some(&FakeNotes(left)));
            let missed = [Some(content), Some(other), None].map(|stamp| content_version.missed(stamp));
            assert_eq!(missed, [same, another, Missed::Unknown], "{left:?}");
            assert_eq!(content_version.content().is_some(), left.is_some());
            content_version.note_in_use(Some(&FakeNotes(left)));
            // Everything in this session is known.
            let now = content_version.content();
            assert!(now.is_some() && content_version.missed(now) == Missed::Nothing);
            assert_eq!(
                now == Some(content),
                left == closed(false),
                "an unwritten origin changed its version"
            );
            content_version.mark_written();
            assert_ne!(content_version.content(), now);
            let known = now != Some(content) || left == closed(false);
            assert!(known && content_version.missed(now) == Missed::Writes);
        }
    }
}
