//! Background changes of a compressed object in the pool while its word moves between slots: in-place
//! overwrite, read from the backing device, writeback, compaction.

use super::{ChainFamily as _, Family, Fixture, SLOT, bounded, spawn};
use crate::pin::pinned;
use crate::slot::{FlightId, Table, Word};
use crate::sync::{Arc, AtomicU32, Ordering};

/// Tag with which the background pass picks slots.
const TAG: u8 = 1;

impl Family {
    /// Writes back a page like a background pass: picks the slot, and frees the object when the write
    /// completes, if the page is unchanged. The written-back page is modelled as a same-filled word with the
    /// object's content.
    fn spill(&self, layer: &Table) {
        let Some(leaf) = layer.leaf(SLOT) else { return };
        let guard = leaf.lock(SLOT);
        if guard.word().object().is_none() {
            return;
        }
        let picked = guard.word().picked(TAG);
        guard.publish(picked);
        let guard = leaf.lock(SLOT);
        if let Some(object) = guard.word().object().filter(|_| guard.word().is_picked_by(TAG)) {
            let (old, shown) = (guard.word(), self.contents[object as usize].load(Ordering::SeqCst));
            guard.publish(Word::same(shown as u32));
            self.free(old);
        }
    }

    /// Moves an object as compaction does, if the slot recorded as the object's owner still refers to it.
    fn compact(&self, layers: &[&Table], from: u64, to: u64) {
        let owner = self.owners[from as usize].load(Ordering::SeqCst);
        self.objects[to as usize].store(1, Ordering::SeqCst);
        self.owners[to as usize].store(owner, Ordering::SeqCst);
        let mut unused = to;
        let layer = layers.iter().find(|layer| u64::from(layer.id()) == owner);
        if let Some(leaf) = layer.and_then(|layer| layer.leaf(SLOT)) {
            let guard = leaf.lock(SLOT);
            if guard.word().object() == Some(from) {
                let content = self.contents[from as usize].load(Ordering::SeqCst);
                self.contents[to as usize].store(content, Ordering::SeqCst);
                let moved = guard.word().moved_to(to);
                guard.publish(moved);
                unused = from;
            }
        }
        self.free(Word::huge(unused));
    }

    /// Starts to read a page from the backing device. Returns the flight.
    fn depart(&self, layer: &Table) -> FlightId {
        let guard = layer.leaf(SLOT).unwrap().lock(SLOT);
        self.flights.depart(guard, layer.id().into(), Vec::new())
    }

    /// Ends the read without a change of the page.
    fn land(&self, layer: &Table, flight: FlightId) {
        let guard = layer.leaf(SLOT).unwrap().lock(SLOT);
        if self.flights.is_in(&guard, flight) {
            self.flights.land(guard, |held| held);
        }
    }
}

impl Fixture {
    /// Ends the read and changes the page in one step. Returns false, without an effect, if writers are
    /// frozen.
    fn land_changed(&self, flight: FlightId, object: u64) -> bool {
        pinned(|pin| {
            let view = self.device.view.load(pin);
            if view.is_frozen() {
                return false;
            }
            let guard = view.layer.leaf(SLOT).unwrap().lock(SLOT);
            assert!(self.family.flights.is_in(&guard, flight));
            let held = self.family.flights.held(flight).unwrap();
            let new = self.family.store(object, &view.layer);
            let land = || self.family.flights.land(guard, |_| new);
            view.exchange(&self.family, SLOT, held, new, land).unwrap();
            true
        })
    }
}

/// A page is overwritten in place only if no snapshot needs the old content.
#[test]
fn in_place_write_versus_snapshot_creation() {
    bounded(3, || {
        let fixture = Fixture::written(1);
        let writer = spawn(&fixture, |fixture| {
            fixture.rewrite(2);
            fixture.rewrite(3);
        });
        let snapshot = fixture.snapshot();
        let shown = fixture.shows(&snapshot);
        writer.join().unwrap();
        assert_eq!(fixture.shows(&snapshot), shown, "frozen");
        assert_eq!(fixture.read(), 3);
        fixture.check_layers(&[&fixture.origin(), &snapshot.view.layer]);
    });
}

/// A page moves to a snapshot after a background pass has picked it. The page stays in memory, and its
/// "picked" mark is cleared.
#[test]
fn writeback_of_origin_versus_moving_page() {
    bounded(3, || {
        let fixture = Fixture::written(1);
        let snapshot = fixture.snapshot();
        let pass = spawn(&fixture, |fixture| fixture.family.spill(&fixture.origin()));
        fixture.write(2);
        assert_eq!(fixture.shows(&snapshot), 1);
        pass.join().unwrap();
        assert_eq!((fixture.read(), fixture.shows(&snapshot)), (2, 1));
        fixture.check_layers(&[&fixture.origin(), &snapshot.view.layer]);
    });
}

/// A background pass needs only the lock of the slot that has the page, so it may free the object right after
/// the word has moved.
#[test]
fn writeback_of_snapshot_versus_moving_page() {
    bounded(3, || {
        let fixture = Fixture::written(1);
        let snapshot = fixture.snapshot();
        let pass = spawn(&fixture, {
            let layer = Arc::clone(&snapshot.view.layer);
            move |fixture| fixture.family.spill(&layer)
        });
        fixture.write(2);
        pass.join().unwrap();
        assert_eq!((fixture.read(), fixture.shows(&snapshot)), (2, 1));
        fixture.check_layers(&[&fixture.origin(), &snapshot.view.layer]);
    });
}

/// Compaction finds the object of a moving page in one slot or the other.
#[test]
fn compaction_versus_moving_page() {
    bounded(3, || {
        let fixture = Fixture::written(1);
        let snapshot = fixture.snapshot();
        let compaction = spawn(&fixture, {
            let layers = [fixture.origin(), Arc::clone(&snapshot.view.layer)];
            move |fixture| fixture.family.compact(&[&layers[0], &layers[1]], 1, 5)
        });
        fixture.write(2);
        assert_eq!(fixture.shows(&snapshot), 1);
        compaction.join().unwrap();
        assert_eq!((fixture.read(), fixture.shows(&snapshot)), (2, 1));
        fixture.check_layers(&[&fixture.origin(), &snapshot.view.layer]);
    });
}

/// A page of a removed snapshot stays in the snapshot's slot while the page is in flight.
#[test]
fn page_in_flight_is_passed_on_after_landing() {
    bounded(3, || {
        let fixture = Fixture::written(1);
        let chain = fixture.chain();
        let (older, younger) = (fixture.snapshot(), fixture.snapshot());
        fixture.write(2);
        let flight = fixture.family.depart(&younger.view.layer);
        let disk = spawn(&fixture, {
            let layer = Arc::clone(&younger.view.layer);
            move |fixture| fixture.family.land(&layer, flight)
        });
        chain.begin_delete(younger.number);
        let left = fixture.pass_on(&chain, younger.number);
        disk.join().unwrap();
        if left {
            assert!(!fixture.pass_on(&chain, younger.number));
        }
        fixture.unlink(&chain, younger.number);
        assert_eq!(fixture.shows(&older), 1);
        fixture.check_layers(&[&fixture.origin(), &older.view.layer]);
    });
}

/// A page of the origin that is read from the backing device for a change moves unchanged.
#[test]
fn page_changed_at_landing_moves_to_snapshot() {
    bounded(3, || {
        let fixture = Fixture::written(1);
        let flight = fixture.family.depart(&fixture.origin());
        // 1: the snapshot was taken. 2: the page was changed after the snapshot was taken.
        let began = Arc::new(AtomicU32::new(0));
        let disk = spawn(&fixture, {
            let began = Arc::clone(&began);
            move |fixture| {
                let after = began.load(Ordering::SeqCst) == 1;
                if !fixture.land_changed(flight, 2) {
                    fixture.family.land(&fixture.origin(), flight);
                    fixture.write(2);
                }
                if after {
                    began.store(2, Ordering::SeqCst);
                }
            }
        });
        let snapshot = fixture.snapshot();
        began.store(1, Ordering::SeqCst);
        disk.join().unwrap();
        let shown = fixture.shows(&snapshot);
        assert!(shown == 1 || began.load(Ordering::SeqCst) == 1 && shown == 2, "{shown}");
        assert_eq!(fixture.read(), 2);
        fixture.write(3);
        assert_eq!(fixture.shows(&snapshot), shown, "frozen");
        fixture.check_layers(&[&fixture.origin(), &snapshot.view.layer]);
    });
}
