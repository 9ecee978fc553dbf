//! loom models of the zones' locks: every interleaving of small cases.
//!
//! Run with `cargo xtask test --only models`.

use loom::cell::UnsafeCell;
use loom::thread;

use super::layout::Layout;
use super::states::{Change, Place, Step, Table};
use super::word::Word;
use freestone_core::device::Error;
use freestone_core::device::zoned::ZoneCondition::{self, Closed, Empty, ExplicitOpen, Full, ImplicitOpen};
use freestone_core::sync::{Arc, AtomicU64, Ordering};

const BLOCK: u64 = 512;
/// Blocks of a zone.
const BLOCKS: u64 = 2;

fn layout(zones: u32, max_open: u32, max_active: u32) -> Layout {
    Layout {
        size: u64::from(zones) * BLOCKS * BLOCK,
        block: BLOCK as u32,
        zone_shift: (BLOCKS * BLOCK).trailing_zeros(),
        capacity: BLOCKS * BLOCK,
        zones,
        conventional: 0,
        max_open,
        max_active,
        max_append: BLOCK as u32,
    }
}

fn table(layout: Layout, conditions: &[(ZoneCondition, u64)]) -> Arc<Table> {
    let word = |zone: u32| Word::new(conditions[zone as usize].0, conditions[zone as usize].1 * BLOCK);
    Arc::new(Table::new(layout, word).unwrap())
}

/// Every interleaving with at most so many preemptions.
fn bounded(preemptions: usize, body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(body);
}

/// An append of one block as the inline path does it: the zone's lock is held from the check to the
/// end.
fn append(table: &Table, zone: u32) -> Result<u64, Error> {
    loop {
        let guard = table.lock(zone);
        let at = table.position(zone, guard.word(), Place::Append, BLOCK)?;
        match table.enter(zone, guard.word(), Change::Write) {
            Step::Go(opened) => {
                guard.publish(table.advanced(zone, opened, BLOCK));
                return Ok(at);
            }
            Step::Refused(error) => return Err(error),
            Step::Held(other) => {
                assert_ne!(other, zone, "a zone is in its own way");
                drop(guard);
                table.wait_for(other);
            }
        }
    }
}

/// An append whose zone is its own while the data is on its way.
fn append_slowly(table: &Table, zone: u32) -> Result<(), Error> {
    loop {
        let guard = table.lock(zone);
        assert!(!guard.word().is_busy());
        match table.enter(zone, guard.word().with_busy(true), Change::Write) {
            Step::Go(opened) => {
                guard.publish(opened);
                break;
            }
            Step::Refused(error) => return Err(error),
            Step::Held(other) => {
                drop(guard);
                table.wait_for(other);
            }
        }
    }
    thread::yield_now();
    let guard = table.lock(zone);
    let after = table.advanced(zone, guard.word(), BLOCK);
    guard.publish(after.with_busy(false));
    Ok(())
}

fn change(table: &Table, zone: u32, change: Change) -> Result<(), Error> {
    table.change(zone, change, |_| Ok(()))
}

/// What the resources say is what the zones are, and within the limits.
fn check(table: &Table) {
    let of = |wanted: ZoneCondition| {
        (0..table.layout.zones).filter(|&zone| table.look(zone).condition() == wanted).count() as u32
    };
    let (open, active) =
        (of(ImplicitOpen) + of(ExplicitOpen), of(ImplicitOpen) + of(ExplicitOpen) + of(Closed));
    assert_eq!(table.used(), (open, active));
    assert!(table.layout.max_open == 0 || open <= table.layout.max_open);
    assert!(table.layout.max_active == 0 || active <= table.layout.max_active);
}

/// Appends take turns, and each gets a place of its own.
#[test]
fn appends_to_one_zone() {
    loom::model(|| {
        let table = table(layout(1, 0, 0), &[(Empty, 0)]);
        let other = thread::spawn({
            let table = Arc::clone(&table);
            move || append(&table, 0).unwrap()
        });
        let mut places = [append(&table, 0).unwrap(), other.join().unwrap()];
        places.sort_unstable();
        assert_eq!(places, [0, BLOCK]);
        assert_eq!(table.look(0), Word::new(Full, 2 * BLOCK));
        assert_eq!(append(&table, 0), Err(Error::ZoneCondition));
    });
}

/// A reader takes no lock, and yet what it accepts is what the zone held at one moment: data below
/// the write pointer that it saw, and never what a reset or a later write left behind.
#[test]
fn a_reader_looks_again() {
    bounded(3, || {
        // The data of the zone: 7 is written, 0 after the reset, then 8. As devices do, each access
        // synchronises.
        let data = Arc::new(AtomicU64::new(7));
        let table = table(layout(1, 0, 0), &[(Closed, 1)]);
        let reset = thread::spawn({
            let (table, data) = (Arc::clone(&table), Arc::clone(&data));
            move || {
                let guard = table.lock(0);
                let word = guard.word();
                guard.publish(table.emptied(0, word).with_busy(true));
                // Release: pairs with the Acquire of the reader, as a device's own locks do.
                data.store(0, Ordering::Release);
                let guard = table.lock(0);
                let word = guard.word();
                guard.publish(word.with_busy(false));
                let guard = table.lock(0);
                // Release: as above.
                data.store(8, Ordering::Release);
                let word = guard.word().with_condition(ImplicitOpen);
                guard.publish(table.advanced(0, word, BLOCK));
            }
        });
        let word = table.look(0);
        if word.pointer() > 0 {
            // Acquire: pairs with the Release of the writers above.
            let found = data.load(Ordering::Acquire);
            if table.is_still(0, word) {
                let expected = if word.generation() == 0 { 7 } else { 8 };
                assert_eq!(found, expected, "{word:?}");
            }
        }
        reset.join().unwrap();
        assert_eq!(table.look(0).pointer(), BLOCK);
    });
}

/// What was written below a write pointer is seen by who sees the pointer.
#[test]
fn a_write_pointer_is_published_after_the_data() {
    loom::model(|| {
        let data = Arc::new(UnsafeCell::new(0_u32));
        let table = table(layout(1, 0, 0), &[(Empty, 0)]);
        let writer = thread::spawn({
            let (table, data) = (Arc::clone(&table), Arc::clone(&data));
            move || {
                let guard = table.lock(0);
                data.with_mut(|data| cell::set(data, 5));
                let word = guard.word().with_condition(ImplicitOpen);
                guard.publish(table.advanced(0, word, BLOCK));
            }
        });
        if table.look(0).pointer() > 0 {
            assert_eq!(data.with(|data| cell::get(data)), 5);
        }
        writer.join().unwrap();
    });
}

/// One zone may be open. Each of two threads writes to a zone whose way is barred by the other's:
/// they choose each other as victims.
#[test]
fn two_zones_close_each_other() {
    bounded(3, || {
        let table = table(layout(3, 1, 0), &[(ImplicitOpen, 1), (Closed, 1), (Empty, 0)]);
        let other = thread::spawn({
            let table = Arc::clone(&table);
            move || append(&table, 1)
        });
        // Zone 0 is open or was closed for the other.
        assert_eq!(append(&table, 0), Ok(BLOCK));
        assert_eq!(other.join().unwrap(), Ok(table.layout.start(1) + BLOCK));
        check(&table);
        assert_eq!((table.look(0).condition(), table.look(1).condition()), (Full, Full));
    });
}

/// The same with zones that stay open: each opening closes the other, again and again.
#[test]
fn two_empty_zones_close_each_other() {
    bounded(2, || {
        let table = table(layout(3, 1, 0), &[(Empty, 0), (Empty, 0), (ImplicitOpen, 1)]);
        let other = thread::spawn({
            let table = Arc::clone(&table);
            move || append(&table, 1)
        });
        assert!(append(&table, 0).is_ok());
        assert!(other.join().unwrap().is_ok());
        check(&table);
        assert_eq!(table.look(2).condition(), Closed);
    });
}

/// A victim with a write on its way: it is closed, and what is on its way still lands in it.
#[test]
fn a_victim_in_flight() {
    bounded(2, || {
        let table = table(layout(3, 1, 2), &[(Empty, 0), (Closed, 1), (Empty, 0)]);
        let other = thread::spawn({
            let table = Arc::clone(&table);
            move || append_slowly(&table, 0)
        });
        // Where the other has made two zones active, no room is made for this one: as in the
        // kernel.
        let wrote = append(&table, 1);
        assert!(matches!(wrote, Ok(_) | Err(Error::ZoneTooManyOpen)), "{wrote:?}");
        other.join().unwrap().unwrap();
        check(&table);
        assert_eq!(table.look(0).pointer(), BLOCK);
        assert_eq!(table.look(1).pointer(), if wrote.is_ok() { 2 * BLOCK } else { BLOCK });
    });
}

/// Whatever two threads do to zones at their limits, the resources stay what the zones are.
#[test]
fn resources_are_accounted() {
    let changes = [Change::Open, Change::Close, Change::Finish];
    for (mine, others) in [(0, 1), (1, 1), (2, 0), (0, 0), (2, 1)] {
        bounded(2, move || {
            let table = table(layout(3, 1, 2), &[(ImplicitOpen, 1), (Empty, 0), (Empty, 0)]);
            let other = thread::spawn({
                let table = Arc::clone(&table);
                move || {
                    // Refused or not: the resources must be right.
                    let _ = append(&table, 1);
                    let _ = change(&table, 0, changes[others]);
                }
            });
            let _ = change(&table, 1, changes[mine]);
            let guard = table.lock(0);
            let word = guard.word();
            guard.publish(table.emptied(0, word));
            other.join().unwrap();
            check(&table);
        });
    }
}

mod cell {
    #![expect(unsafe_code)]
    // UNSAFETY: the modelled data is reached through loom's raw cells.
    pub fn get(data: *const u32) -> u32 {
        // SAFETY: loom has checked that nobody writes.
        unsafe { *data }
    }
    pub fn set(data: *mut u32, value: u32) {
        // SAFETY: loom has checked that the access is exclusive.
        unsafe { *data = value };
    }
}
