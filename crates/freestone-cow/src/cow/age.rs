//! Whether a store missed writes of its origin.
//!
//! An origin that was written while a persistent store was not open makes a mixture of that store's
//! snapshot, and nothing in the store tells. So the origin's content has a number, the [`Stamp`],
//! which is another one after every write. A store that is closed in order records that number; the
//! origin has it beside its data ([`Notes`]), with what shows whether others changed it since.
//! Either record is removed when store or origin is opened, durably and before anything is written:
//! after a crash the answer is "unknown".
//!
//! | origin | store | |
//! |---|---|---|
//! | closed, not changed | the same number | it missed nothing |
//! | closed | another number, or the origin was changed | it missed writes, or a use of the origin that did not end in order |
//! | in use, or nothing | | unknown |
//!
//! In one session the same holds for a store that is removed and opened again.
//!
//! A store's stamp is taken before its snapshot leaves the origin's list, and a write sets
//! `written` after it looked at that list. So a write that preserves nothing for the snapshot
//! changes the stamp after the store got it.

use std::sync::atomic::{AtomicBool, Ordering};

use super::notes::{Left, Notes, Stamp};
use freestone_core::sync::Mutex;
use freestone_core::unique;

/// Whether a store missed writes of its origin before it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missed {
    /// It did not, or it is new.
    Nothing,
    /// It is unknown: the origin or the store was not closed in order, or nothing is recorded
    /// beside the origin's data.
    Unknown,
    /// The origin was written, or used, without it.
    Writes,
}

/// Which content an origin holds, as a number.
pub struct Age {
    /// There was a write since the stamp was taken.
    written: AtomicBool,
    session: u64,
    /// The origin was closed in order before this session.
    closed: bool,
    state: Mutex<AgeState>,
}

struct AgeState {
    content: Stamp,
    /// The next number of this session.
    next: u64,
    /// Beside the origin's data it is noted that the origin is in use.
    noted: bool,
}

impl Age {
    pub fn new(notes: Option<&dyn Notes>) -> Self {
        let session = unique::number();
        let fresh = Stamp { session, number: 0 };
        let left = notes.and_then(Notes::left);
        let (closed, content) = match left {
            Some(Left::Closed { content, changed: false }) => (true, content),
            Some(Left::Closed { changed: true, .. }) => (true, fresh),
            Some(Left::InUse) | None => (false, fresh),
        };
        // An origin without a record gets none before it has a store.
        let in_use = left.is_some() && notes.is_some_and(Notes::in_use);
        let state = Mutex::new(AgeState { content, next: 1, noted: in_use });
        Self { written: AtomicBool::new(false), session, closed, state }
    }

    /// A store is about to be opened: before anything is written it is noted that the origin is in
    /// use. Blocks.
    pub fn has_store(&self, notes: Option<&dyn Notes>) {
        if !self.state.lock().noted && notes.is_some_and(Notes::in_use) {
            self.state.lock().noted = true;
        }
    }

    /// The origin is about to be written.
    pub fn wrote(&self) {
        // Mostly it is set already; then the cache line stays shared.
        if !self.written.load(Ordering::SeqCst) {
            self.written.store(true, Ordering::SeqCst);
        }
    }

    /// What the origin holds now; `None` where that cannot be noted beside its data.
    pub fn content(&self) -> Option<Stamp> {
        let mut state = self.state.lock();
        let content = self.now(&mut state);
        state.noted.then_some(content)
    }

    fn now(&self, state: &mut AgeState) -> Stamp {
        if self.written.swap(false, Ordering::SeqCst) {
            state.content = Stamp { session: self.session, number: state.next };
            state.next += 1;
        }
        state.content
    }

    /// What a store missed that was closed when the origin held `closed`.
    pub fn missed(&self, closed: Option<Stamp>) -> Missed {
        let now = self.now(&mut self.state.lock());
        match closed {
            Some(closed) if closed == now => Missed::Nothing,
            Some(closed) if self.closed || closed.session == self.session => Missed::Writes,
            _ => Missed::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Age, Left, Missed, Notes, Stamp};

    struct Beside(Option<Left>);

    impl Notes for Beside {
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
    fn what_was_missed_is_known_where_all_was_closed_in_order() {
        let (content, other) = (Stamp { session: 1, number: 2 }, Stamp { session: 1, number: 1 });
        let closed = |changed| Some(Left::Closed { content, changed });
        for (left, same, another) in [
            (closed(false), Missed::Nothing, Missed::Writes),
            (closed(true), Missed::Writes, Missed::Writes),
            (Some(Left::InUse), Missed::Unknown, Missed::Unknown),
            (None, Missed::Unknown, Missed::Unknown),
        ] {
            let age = Age::new(Some(&Beside(left)));
            let missed = [Some(content), Some(other), None].map(|stamp| age.missed(stamp));
            assert_eq!(missed, [same, another, Missed::Unknown], "{left:?}");
            assert_eq!(age.content().is_some(), left.is_some());
            age.has_store(Some(&Beside(left)));
            // Of this session all is known.
            let now = age.content();
            assert!(now.is_some() && age.missed(now) == Missed::Nothing);
            assert_eq!(now == Some(content), left == closed(false), "what was not written is the same");
            age.wrote();
            assert_ne!(age.content(), now);
            let known = now != Some(content) || left == closed(false);
            assert!(known && age.missed(now) == Missed::Writes);
        }
    }
}
