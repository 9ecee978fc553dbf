//! Header of a group: counts the users of the group in memory and on the backing device.
//!
//! | field       | bits  | meaning |
//! |-------------|-------|---------|
//! | `in_memory` | 0-7   | words that refer to the group in memory, and holds of threads |
//! | `on_device` | 8-15  | words that refer to the group on the device, and holds of threads |
//! | `pieces`    | 16-23 | number of pieces of the object in memory |
//! | `pages`     | 24-31 | number of pages in the object |
//!
//! Invariants, when the header is unlocked:
//! * The pieces are in the pool if and only if `in_memory` is not 0.
//! * The object has a place on the device if and only if `on_device` is not 0.
//! * The group exists if and only if one of the counts is not 0. A thread adds a user only if it is
//!   a user already, or has locked the slot of one.
//!
//! So a thread that is a user of a kind can use the pieces or the object without the header's lock.

use freestone_core::slot::{Kind, SlotGuard, Word};

/// Content of a group's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Header {
    pub in_memory: u32,
    pub on_device: u32,
    pub pieces: u32,
    pub pages: u32,
}

/// Parts of a group that have no user any more, after users were removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unused {
    pub pieces: bool,
    pub object: bool,
    /// The group has no users.
    pub number: bool,
}

impl Header {
    /// Returns the content of a header; that of a group without users if `word` is empty.
    pub fn of(word: Word) -> Self {
        debug_assert!(matches!(word.kind(), Kind::Same | Kind::Empty));
        let bits = word.location();
        let field = |shift: u32| (bits >> shift & 0xFF) as u32;
        Self { in_memory: field(0), on_device: field(8), pieces: field(16), pages: field(24) }
    }

    pub fn word(self) -> Word {
        debug_assert!([self.in_memory, self.on_device, self.pieces, self.pages].iter().all(|&n| n <= 0xFF));
        Word::same(self.in_memory | self.on_device << 8 | self.pieces << 16 | self.pages << 24)
    }

    /// Returns true if at least half of the group's pages have left.
    pub fn is_sparse(self) -> bool {
        (self.in_memory + self.on_device) * 2 <= self.pages
    }

    /// Returns true if at most half of the group's pages are in memory.
    pub fn is_sparse_in_memory(self) -> bool {
        self.in_memory * 2 <= self.pages
    }
}

/// A locked header.
pub(super) struct HeaderGuard<'a> {
    guard: SlotGuard<'a>,
    header: Header,
}

impl<'a> HeaderGuard<'a> {
    pub fn new(guard: SlotGuard<'a>) -> Self {
        let header = Header::of(guard.word());
        Self { guard, header }
    }

    pub fn get(&self) -> Header {
        self.header
    }

    fn publish(self, in_memory: u32, on_device: u32) {
        self.guard.publish(Header { in_memory, on_device, ..self.header }.word());
    }

    /// Adds a user in memory. Returns false if the group is not in memory.
    pub fn enter(self) -> bool {
        let Header { in_memory, on_device, .. } = self.header;
        if in_memory > 0 {
            self.publish(in_memory + 1, on_device);
        }
        in_memory > 0
    }

    /// Adds the first user in memory, whose group is on the device. The pieces are in their slots.
    pub fn load(self) {
        debug_assert_eq!(self.header.in_memory, 0);
        let on_device = self.header.on_device;
        self.publish(1, on_device);
    }

    /// Adds a user in memory and, if the group is on the device, one there. Returns the number of
    /// users added on the device. The thread has locked the slot of a page in memory.
    pub fn hold(self) -> u32 {
        let Header { in_memory, on_device, .. } = self.header;
        let added = u32::from(on_device > 0);
        self.publish(in_memory + 1, on_device + added);
        added
    }

    /// Adds a user on the device, where the group is.
    pub fn hold_on_device(self) {
        debug_assert!(self.header.on_device > 0);
        let Header { in_memory, on_device, .. } = self.header;
        self.publish(in_memory, on_device + 1);
    }

    /// Adds a user on the device, when the object has been written. `set_place` records its place;
    /// not called if the group has a place already. Returns true if it was called.
    pub fn put_on_device(self, set_place: impl FnOnce()) -> bool {
        let Header { in_memory, on_device, .. } = self.header;
        if on_device == 0 {
            set_place();
        }
        self.publish(in_memory, on_device + 1);
        on_device == 0
    }

    /// Moves a user from memory to the device. The thread holds the group in both.
    pub fn spill(self) {
        let Header { in_memory, on_device, .. } = self.header;
        debug_assert!(in_memory > 1 && on_device > 0, "{:?}", self.header);
        self.publish(in_memory - 1, on_device + 1);
    }

    /// Removes users. `free` receives the new header, and frees what is unused then, apart from the
    /// group's number. Returns true if the caller must free the number.
    pub fn leave(self, in_memory: u32, on_device: u32, free: impl FnOnce(Header, Unused)) -> bool {
        let before = self.header;
        debug_assert!(before.in_memory >= in_memory && before.on_device >= on_device, "{before:?}");
        let after = Header {
            in_memory: before.in_memory - in_memory,
            on_device: before.on_device - on_device,
            ..before
        };
        let unused = Unused {
            pieces: before.in_memory > 0 && after.in_memory == 0,
            object: before.on_device > 0 && after.on_device == 0,
            number: after.in_memory == 0 && after.on_device == 0,
        };
        free(after, unused);
        self.guard.publish(after.word());
        unused.number
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn header_fields_do_not_overlap() {
        let header = Header { in_memory: 255, on_device: 254, pieces: 7, pages: 8 };
        assert_eq!(Header::of(header.word()), header);
        assert_eq!(Header::of(Word::EMPTY), Header::default());
    }
}
