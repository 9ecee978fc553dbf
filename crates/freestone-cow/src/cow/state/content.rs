//! Content version of an origin: detects that an exception store missed writes of its origin.
//!
//! If an origin is written while a persistent store is closed, the store's snapshot becomes a
//! mixture of old and new data. The store itself cannot detect this. So every write changes the
//! version of the origin's content, the [`Stamp`]. At an orderly close both store and origin record
//! the version, the origin in its [`Notes`]. The notes also reveal later changes by others. Each
//! record is removed durably when the store or origin is opened, before anything is written. So
//! after a crash the result is "unknown".
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
//! `written` after it has read this list. So a write that preserves nothing for the snapshot
//! changes the version after the store read it.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::cow::notes::{LastSession, Notes, Stamp};
use freestone_core::sync::Mutex;
use freestone_core::unique;

/// Result of the check whether a store missed writes of its origin while the store was closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MissedWrites {
    /// The store missed no writes, or is new.
    Nothing,
    /// Unknown: the origin or the store was not closed in order, or the origin has no record.
    Unknown,
    /// The origin was written or used without the store.
    Writes,
}

/// Tracks the content version of an origin.
pub struct ContentVersion {
    /// True if the origin was written since the version was last read.
    written: AtomicBool,
    session: u64,
    /// True if the previous session closed the origin in order.
    closed: bool,
    state: Mutex<VersionState>,
}

struct VersionState {
    content: Stamp,
    /// Number of the next content version of this session.
    next: u64,
    /// True if the origin's notes record that the origin is in use.
    is_noted: bool,
}

impl ContentVersion {
    pub fn new(notes: Option<&dyn Notes>) -> Self {
        let session = unique::random_id();
        let fresh = Stamp { session, number: 0 };
        let last_session = notes.and_then(Notes::last_session);
        let (closed, content) = match last_session {
            Some(LastSession::Closed { content, changed: false }) => (true, content),
            Some(LastSession::Closed { changed: true, .. }) => (true, fresh),
            Some(LastSession::InUse) | None => (false, fresh),
        };
        // An origin without a record has no store yet; its first record is written when a store is
        // opened.
        let in_use = last_session.is_some() && notes.is_some_and(Notes::record_in_use);
        let state = Mutex::new(VersionState { content, next: 1, is_noted: in_use });
        Self { written: AtomicBool::new(false), session, closed, state }
    }

    /// Records in the notes that the origin is in use. Called before a store is opened or written.
    /// May wait for a disk.
    pub fn note_in_use(&self, notes: Option<&dyn Notes>) {
        if !self.state.lock().is_noted && notes.is_some_and(Notes::record_in_use) {
            self.state.lock().is_noted = true;
        }
    }

    /// Marks the content as changed. Called before a write of the origin.
    pub fn mark_written(&self) {
        // The flag is usually set already; checking it first keeps the cache line shared between
        // CPUs.
        if !self.written.load(Ordering::SeqCst) {
            self.written.store(true, Ordering::SeqCst);
        }
    }

    /// Returns the current content version, or `None` if the origin's notes do not record that the
    /// origin is in use.
    pub fn content(&self) -> Option<Stamp> {
        let mut state = self.state.lock();
        let content = self.current(&mut state);
        state.is_noted.then_some(content)
    }

    fn current(&self, state: &mut VersionState) -> Stamp {
        if self.written.swap(false, Ordering::SeqCst) {
            state.content = Stamp { session: self.session, number: state.next };
            state.next += 1;
        }
        state.content
    }

    /// Returns what a store missed that was closed when the origin's content had the version
    /// `closed`.
    pub fn missed_writes(&self, closed: Option<Stamp>) -> MissedWrites {
        let now = self.current(&mut self.state.lock());
        match closed {
            Some(closed) if closed == now => MissedWrites::Nothing,
            Some(closed) if self.closed || closed.session == self.session => MissedWrites::Writes,
            _ => MissedWrites::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ContentVersion, LastSession, MissedWrites, Notes, Stamp};

    struct FakeNotes(Option<LastSession>);

    impl Notes for FakeNotes {
        fn merge_id(&self) -> Option<u64> {
            None
        }
        fn record_merge(&self, _: u64, _: &str) {}
        fn remove_merge(&self) -> bool {
            true
        }
        fn last_session(&self) -> Option<LastSession> {
            self.0
        }
        fn record_in_use(&self) -> bool {
            true
        }
    }

    #[test]
    fn missed_writes_are_known_after_orderly_close() {
        let (content, other) = (Stamp { session: 1, number: 2 }, Stamp { session: 1, number: 1 });
        let closed = |changed| Some(LastSession::Closed { content, changed });
        for (left, same, another) in [
            (closed(false), MissedWrites::Nothing, MissedWrites::Writes),
            (closed(true), MissedWrites::Writes, MissedWrites::Writes),
            (Some(LastSession::InUse), MissedWrites::Unknown, MissedWrites::Unknown),
            (None, MissedWrites::Unknown, MissedWrites::Unknown),
        ] {
            let content_version = ContentVersion::new(Some(&FakeNotes(left)));
            let missed_writes =
                [Some(content), Some(other), None].map(|stamp| content_version.missed_writes(stamp));
            assert_eq!(missed_writes, [same, another, MissedWrites::Unknown], "{left:?}");
            assert_eq!(content_version.content().is_some(), left.is_some());
            content_version.note_in_use(Some(&FakeNotes(left)));
            // All changes within this session are known.
            let now = content_version.content();
            assert!(now.is_some() && content_version.missed_writes(now) == MissedWrites::Nothing);
            assert_eq!(
                now == Some(content),
                left == closed(false),
                "an unwritten origin changed its version"
            );
            content_version.mark_written();
            assert_ne!(content_version.content(), now);
            let known = now != Some(content) || left == closed(false);
            assert!(known && content_version.missed_writes(now) == MissedWrites::Writes);
        }
    }
}
