//! loom model of the [header](super::header) of a group with two pages: an eviction, a write and a
//! read of its pages at once. Nobody uses freed pieces or a freed object, and all is freed once.
#![expect(unsafe_code)]
// UNSAFETY: pieces and object are loom's raw cells, which check every access.

use loom::cell::UnsafeCell;
use loom::thread;

use super::header::{Header, HeaderGuard};
use freestone_core::parking::Parking;
use freestone_core::slot::{Kind, SlotGuard, Word, lock};
use freestone_core::sync::{Arc, AtomicU32, AtomicU64, Ordering};

/// Memory that is allocated or not. loom reports an access that is concurrent with a change.
struct Allocation(UnsafeCell<bool>);

impl Allocation {
    fn new(exists: bool) -> Self {
        Self(UnsafeCell::new(exists))
    }

    fn read(&self) {
        // SAFETY: loom has checked that no thread changes the cell.
        self.0.with(|exists| assert!(unsafe { *exists }, "freed memory is read"));
    }

    fn change(&self, exists: bool) {
        self.0.with_mut(|cell| {
            // SAFETY: loom has checked that the access is exclusive.
            let before = unsafe { std::mem::replace(&mut *cell, exists) };
            assert_ne!(before, exists, "allocated or freed twice");
        });
    }
}

struct Group {
    header: AtomicU64,
    /// Words of the two pages.
    slots: [AtomicU64; 2],
    parking: Parking,
    pieces: Allocation,
    object: Allocation,
    numbers_freed: AtomicU32,
}

impl Group {
    /// Returns a group in memory.
    fn new() -> Self {
        let group = Self {
            header: AtomicU64::new(0),
            slots: [AtomicU64::new(0), AtomicU64::new(0)],
            parking: Parking::default(),
            pieces: Allocation::new(true),
            object: Allocation::new(false),
            numbers_freed: AtomicU32::new(0),
        };
        let header = Header { in_memory: 2, on_device: 0, pieces: 1, pages: 2 };
        lock(&group.header, &group.parking).publish(header.word());
        for slot in 0..2 {
            group.lock(slot).publish(Word::grouped(slot as u64, 1));
        }
        group
    }

    fn lock(&self, slot: usize) -> SlotGuard<'_> {
        lock(&self.slots[slot], &self.parking)
    }

    fn header(&self) -> HeaderGuard<'_> {
        HeaderGuard::new(lock(&self.header, &self.parking))
    }

    fn leave(&self, in_memory: u32, on_device: u32) {
        let is_unused = self.header().leave(in_memory, on_device, |_, unused| {
            if unused.pieces {
                self.pieces.change(false);
            }
            if unused.object {
                self.object.change(false);
            }
        });
        if is_unused {
            self.numbers_freed.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn leave_with(&self, word: Word) {
        match word.kind() {
            Kind::Grouped => self.leave(1, 0),
            Kind::Spilled => self.leave(0, 1),
            _ => {}
        }
    }

    /// Moves both pages to the device, if the first is in memory.
    fn evict(&self) {
        let guard = self.lock(0);
        if guard.word().kind() != Kind::Grouped {
            return;
        }
        let on_device = self.header().hold();
        drop(guard);
        self.pieces.read();
        if on_device == 0 {
            assert!(self.header().put_on_device(|| self.object.change(true)));
        }
        for slot in 0..2 {
            let guard = self.lock(slot);
            if guard.word().kind() == Kind::Grouped {
                self.header().spill();
                guard.publish(Word::spilled_in_group(slot as u64));
            }
        }
        self.leave(1, 1);
    }

    /// Writes a page: it leaves the group.
    fn write(&self, slot: usize) {
        let guard = self.lock(slot);
        let word = guard.word();
        guard.publish(Word::EMPTY);
        self.leave_with(word);
    }

    /// Reads a page, and brings it back to memory.
    fn read(&self, slot: usize) {
        let guard = self.lock(slot);
        let word = guard.word();
        match word.kind() {
            Kind::Grouped => self.pieces.read(),
            Kind::Spilled => {
                self.object.read();
                if !self.header().enter() {
                    let header = self.header();
                    if header.get().in_memory > 0 {
                        assert!(header.enter());
                    } else {
                        self.pieces.change(true);
                        header.load();
                    }
                }
                guard.publish(Word::grouped(slot as u64, 1));
                self.leave(0, 1);
            }
            _ => {}
        }
    }
}

/// Checks the interleavings of threads with at most `preemptions` preemptions. The threads take many
/// locks: three threads with two preemptions would take minutes.
fn check(preemptions: usize, threads: &'static [fn(&Group)]) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let group = Arc::new(Group::new());
        let threads: Vec<_> = threads
            .iter()
            .map(|work| {
                let group = Arc::clone(&group);
                thread::spawn(move || work(&group))
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert!((0..2).any(|slot| group.lock(slot).word() != Word::EMPTY) == (group.freed() == 0));
        (0..2).for_each(|slot| group.write(slot));
        assert_eq!(group.freed(), 1);
        group.pieces.change(true);
        group.object.change(true);
    });
}

impl Group {
    fn freed(&self) -> u32 {
        self.numbers_freed.load(Ordering::SeqCst)
    }
}

#[test]
fn eviction_while_a_page_is_written() {
    check(2, &[Group::evict, |group| group.write(0)]);
}

#[test]
fn eviction_while_a_page_is_read() {
    check(2, &[Group::evict, |group| group.read(1)]);
}

#[test]
fn eviction_while_pages_are_read_and_written() {
    check(1, &[Group::evict, |group| group.read(1), |group| group.write(0)]);
}

#[test]
fn page_returns_while_the_other_leaves() {
    check(
        2,
        &[
            |group| {
                group.evict();
                group.read(0);
            },
            |group| group.write(1),
        ],
    );
}
