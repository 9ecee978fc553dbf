//! loom models of the zone locks, which check every thread interleaving of small cases.
//!
//! Run with `cargo xtask test --only models`.

use loom::cell::UnsafeCell;
use loom::thread;

use super::layout::Layout;
use super::word::Word;
use super::{Change, ChangeResult, Place, Table};
use freestone_core::device::Error;
use freestone_core::device::zoned::ZoneCondition::{self, Closed, Empty, ExplicitOpen, Full, ImplicitOpen};
use freestone_core::sync::{Arc, AtomicU64, Ordering};

const BLOCK: u64 = 512;
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

/// Runs `body` in every thread interleaving with at most `preemptions` preemptions.
fn bounded(preemptions: usize, body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(body);
}

/// Appends one block like an inline append: the zone's lock is held from the check to the end.
/// Returns the offset of the block.
fn append(table: &Table, zone: u32) -> Result<u64, Error> {
    loop {
        let guard = table.lock(zone);
        let at = table.position(zone, guard.word(), Place::Append, BLOCK)?;
        match table.enter(zone, guard.word(), Change::Write) {
            ChangeResult::Go(opened) => {
                guard.publish(table.advanced_word(zone, opened, BLOCK));
                return Ok(at);
            }
            ChangeResult::Refused(error) => return Err(error),
            ChangeResult::Locked(other) => {
                assert_ne!(other, zone, "a zone waits for itself");
                drop(guard);
                table.wait_for(other);
            }
        }
    }
}

/// Appends one block like a submitted append, which owns the zone while the data is in flight.
fn append_slowly(table: &Table, zone: u32) -> Result<(), Error> {
    loop {
        let guard = table.lock(zone);
        assert!(!guard.word().is_busy());
        match table.enter(zone, guard.word().with_busy(true), Change::Write) {
            ChangeResult::Go(opened) => {
                guard.publish(opened);
                break;
            }
            ChangeResult::Refused(error) => return Err(error),
            ChangeResult::Locked(other) => {
                drop(guard);
                table.wait_for(other);
            }
        }
    }
    thread::yield_now();
    let guard = table.lock(zone);
    let after = table.advanced_word(zone, guard.word(), BLOCK);
    guard.publish(after.with_busy(false));
    Ok(())
}

fn change(table: &Table, zone: u32, change: Change) -> Result<(), Error> {
    table.change(zone, change, |_| Ok(()))
}

/// Checks that the counted open and active zones match the conditions of the zones, and respect the
/// limits.
fn check(table: &Table) {
    let of = |wanted: ZoneCondition| {
        (0..table.layout.zones).filter(|&zone| table.load(zone).condition() == wanted).count() as u32
    };
    let (open, active) =
        (of(ImplicitOpen) + of(ExplicitOpen), of(ImplicitOpen) + of(ExplicitOpen) + of(Closed));
    assert_eq!(table.used(), (open, active));
    assert!(table.layout.max_open == 0 || open <= table.layout.max_open);
    assert!(table.layout.max_active == 0 || active <= table.layout.max_active);
}

#[test]
fn concurrent_appends_get_different_offsets() {
    loom::model(|| {
        let table = table(layout(1, 0, 0), &[(Empty, 0)]);
        let other = thread::spawn({
            let table = Arc::clone(&table);
            move || append(&table, 0).unwrap()
        });
        let mut places = [append(&table, 0).unwrap(), other.join().unwrap()];
        places.sort_unstable();
        assert_eq!(places, [0, BLOCK]);
        assert_eq!(table.load(0), Word::new(Full, 2 * BLOCK));
        assert_eq!(append(&table, 0), Err(Error::ZoneCondition));
    });
}

/// A reader takes no lock. It accepts only data before the write pointer that it loaded, and
/// rejects data that a reset or a later write changed meanwhile.
#[test]
fn reader_rejects_data_after_reset() {
    bounded(3, || {
        // Data of the zone: first 7, then 0 after the reset, then 8. Each access synchronizes, as
        // the accesses of a device do.
        let data = Arc::new(AtomicU64::new(7));
        let table = table(layout(1, 0, 0), &[(Closed, 1)]);
        let reset = thread::spawn({
            let (table, data) = (Arc::clone(&table), Arc::clone(&data));
            move || {
                let guard = table.lock(0);
                let word = guard.word();
                guard.publish(table.emptied_word(0, word).with_busy(true));
                // Release: pairs with the Acquire of the reader. In a device, its own locks have
                // the same effect.
                data.store(0, Ordering::Release);
                let guard = table.lock(0);
                let word = guard.word();
                guard.publish(word.with_busy(false));
                let guard = table.lock(0);
                // Release: pairs with the Acquire of the reader.
                data.store(8, Ordering::Release);
                let word = guard.word().with_condition(ImplicitOpen);
                guard.publish(table.advanced_word(0, word, BLOCK));
            }
        });
        let word = table.load(0);
        if word.pointer() > 0 {
            // Acquire: pairs with the Release stores of the resetting thread.
            let found = data.load(Ordering::Acquire);
            if table.is_same_generation(0, word) {
                let expected = if word.generation() == 0 { 7 } else { 8 };
                assert_eq!(found, expected, "{word:?}");
            }
        }
        reset.join().unwrap();
        assert_eq!(table.load(0).pointer(), BLOCK);
    });
}

/// A reader that loads a write pointer also sees all data before it.
#[test]
fn write_pointer_is_published_after_data() {
    loom::model(|| {
        let data = Arc::new(UnsafeCell::new(0_u32));
        let table = table(layout(1, 0, 0), &[(Empty, 0)]);
        let writer = thread::spawn({
            let (table, data) = (Arc::clone(&table), Arc::clone(&data));
            move || {
                let guard = table.lock(0);
                data.with_mut(|data| cell::set(data, 5));
                let word = guard.word().with_condition(ImplicitOpen);
                guard.publish(table.advanced_word(0, word, BLOCK));
            }
        });
        if table.load(0).pointer() > 0 {
            assert_eq!(data.with(|data| cell::get(data)), 5);
        }
        writer.join().unwrap();
    });
}

/// At most one zone may be open. Two threads write to different zones, and each must close the zone
/// of the other.
#[test]
fn two_writers_close_each_others_zone() {
    bounded(3, || {
        let table = table(layout(3, 1, 0), &[(ImplicitOpen, 1), (Closed, 1), (Empty, 0)]);
        let other = thread::spawn({
            let table = Arc::clone(&table);
            move || append(&table, 1)
        });
        // Zone 0 is still open, or the other thread closed it.
        assert_eq!(append(&table, 0), Ok(BLOCK));
        assert_eq!(other.join().unwrap(), Ok(table.layout.start(1) + BLOCK));
        check(&table);
        assert_eq!((table.load(0).condition(), table.load(1).condition()), (Full, Full));
    });
}

/// At most one zone may be open. Two threads write to empty zones, which stay open afterwards, so
/// that each must close the zone of the other.
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
        assert_eq!(table.load(2).condition(), Closed);
    });
}

/// A write in flight completes in its zone even if another thread closes the zone implicitly.
#[test]
fn zone_closed_in_flight_completes_its_write() {
    bounded(2, || {
        let table = table(layout(3, 1, 2), &[(Empty, 0), (Closed, 1), (Empty, 0)]);
        let other = thread::spawn({
            let table = Arc::clone(&table);
            move || append_slowly(&table, 0)
        });
        // If the other thread has made the second zone active, this append cannot open its zone, as
        // in the kernel.
        let wrote = append(&table, 1);
        assert!(matches!(wrote, Ok(_) | Err(Error::ZoneTooManyOpen)), "{wrote:?}");
        other.join().unwrap().unwrap();
        check(&table);
        assert_eq!(table.load(0).pointer(), BLOCK);
        assert_eq!(table.load(1).pointer(), if wrote.is_ok() { 2 * BLOCK } else { BLOCK });
    });
}

/// The counted open and active zones match the zones after any two concurrent operations at the
/// limits.
#[test]
fn resources_match_zones_at_limits() {
    let changes = [Change::Open, Change::Close, Change::Finish];
    for (mine, others) in [(0, 1), (1, 1), (2, 0), (0, 0), (2, 1)] {
        bounded(2, move || {
            let table = table(layout(3, 1, 2), &[(ImplicitOpen, 1), (Empty, 0), (Empty, 0)]);
            let other = thread::spawn({
                let table = Arc::clone(&table);
                move || {
                    // The results do not matter, only the counted zones.
                    let _ = append(&table, 1);
                    let _ = change(&table, 0, changes[others]);
                }
            });
            let _ = change(&table, 1, changes[mine]);
            let guard = table.lock(0);
            let word = guard.word();
            guard.publish(table.emptied_word(0, word));
            other.join().unwrap();
            check(&table);
        });
    }
}

mod cell {
    #![expect(unsafe_code)]
    // UNSAFETY: the modelled data is accessed through loom's raw cells.
    pub fn get(data: *const u32) -> u32 {
        // SAFETY: loom checks that no thread writes.
        unsafe { *data }
    }
    pub fn set(data: *mut u32, value: u32) {
        // SAFETY: loom checks that the access is exclusive.
        unsafe { *data = value };
    }
}
