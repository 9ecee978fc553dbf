//! What happens to an object where it is, while its word goes from slot to slot: it is written over
//! in place, it is on its way from the backing device, it is spilled, compaction moves it.

use super::{Family, Kin as _, SLOT, World, bounded, spawn};
use crate::pin::pinned;
use crate::slot::{Table, Word};
use crate::sync::{Arc, AtomicU32, Ordering};

/// What a pass works with.
const TAG: u8 = 1;

impl Family {
    /// As a pass does that spills: the slot is picked, and when the write is answered the object
    /// goes, if nobody has changed the page. (A page that shows what the object did stands for the
    /// one on the device.)
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

    /// As compaction does: moves an object, if the slot that has it by its note still does.
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

    /// A page begins to come from the backing device.
    fn depart(&self, layer: &Table) -> u64 {
        let guard = layer.leaf(SLOT).unwrap().lock(SLOT);
        self.flights.depart(guard, layer.id().into(), Vec::new())
    }

    /// It has come, and is as it was.
    fn land(&self, layer: &Table, flight: u64) {
        let guard = layer.leaf(SLOT).unwrap().lock(SLOT);
        if guard.word() == Word::in_flight(flight) {
            self.flights.land(guard, |held| held);
        }
    }
}

impl World {
    /// It has come, and is changed before anybody sees it. False: that must not be at this moment.
    fn land_changed(&self, flight: u64, object: u64) -> bool {
        pinned(|pin| {
            let view = self.device.view.load(pin);
            if view.is_frozen() {
                return false;
            }
            let guard = view.layer.leaf(SLOT).unwrap().lock(SLOT);
            assert_eq!(guard.word(), Word::in_flight(flight));
            let held = self.family.flights.held(flight).unwrap();
            let new = self.family.store(object, &view.layer);
            let land = || self.family.flights.land(guard, |_| new);
            view.exchange(&self.family, SLOT, held, new, land).unwrap();
            true
        })
    }
}

/// A page is written over in place only where no snapshot needs what it holds.
#[test]
fn rewrites_in_place_versus_a_snapshot_that_begins() {
    bounded(3, || {
        let world = World::written(1);
        let writer = spawn(&world, |world| {
            world.rewrite(2);
            world.rewrite(3);
        });
        let snapshot = world.snapshot();
        let shown = world.shows(&snapshot);
        writer.join().unwrap();
        assert_eq!(world.shows(&snapshot), shown, "frozen");
        assert_eq!(world.read(), 3);
        world.holds(&[&world.origin(), &snapshot.view.layer]);
    });
}

/// A pass picks a page that moves before its write is answered: it stays in memory, and is no
/// longer of any batch.
#[test]
fn a_page_goes_over_while_the_origin_is_spilled() {
    bounded(3, || {
        let world = World::written(1);
        let snapshot = world.snapshot();
        let pass = spawn(&world, |world| world.family.spill(&world.origin()));
        world.write(2);
        assert_eq!(world.shows(&snapshot), 1);
        pass.join().unwrap();
        assert_eq!((world.read(), world.shows(&snapshot)), (2, 1));
        world.holds(&[&world.origin(), &snapshot.view.layer]);
    });
}

/// A pass needs no other lock than that of the slot which has the page: it may free the object as
/// soon as that has it.
#[test]
fn an_object_that_goes_over_is_spilled_at_once() {
    bounded(3, || {
        let world = World::written(1);
        let snapshot = world.snapshot();
        let pass = spawn(&world, {
            let layer = Arc::clone(&snapshot.view.layer);
            move |world| world.family.spill(&layer)
        });
        world.write(2);
        pass.join().unwrap();
        assert_eq!((world.read(), world.shows(&snapshot)), (2, 1));
        world.holds(&[&world.origin(), &snapshot.view.layer]);
    });
}

/// Compaction finds the object of a page that moves in one slot or in the other.
#[test]
fn an_object_that_goes_over_is_moved() {
    bounded(3, || {
        let world = World::written(1);
        let snapshot = world.snapshot();
        let compaction = spawn(&world, {
            let layers = [world.origin(), Arc::clone(&snapshot.view.layer)];
            move |world| world.family.compact(&[&layers[0], &layers[1]], 1, 5)
        });
        world.write(2);
        assert_eq!(world.shows(&snapshot), 1);
        compaction.join().unwrap();
        assert_eq!((world.read(), world.shows(&snapshot)), (2, 1));
        world.holds(&[&world.origin(), &snapshot.view.layer]);
    });
}

/// What a removed snapshot has on its way from the backing device stays there until it has landed.
#[test]
fn a_page_in_flight_is_passed_on_when_it_has_landed() {
    bounded(3, || {
        let world = World::written(1);
        let chain = world.chain();
        let (older, younger) = (world.snapshot(), world.snapshot());
        world.write(2);
        let flight = world.family.depart(&younger.view.layer);
        let disk = spawn(&world, {
            let layer = Arc::clone(&younger.view.layer);
            move |world| world.family.land(&layer, flight)
        });
        chain.begin_delete(younger.number);
        let left = world.pass_on(&chain, younger.number);
        disk.join().unwrap();
        if left {
            assert!(!world.pass_on(&chain, younger.number));
        }
        world.unlink(&chain, younger.number);
        assert_eq!(world.shows(&older), 1);
        world.holds(&[&world.origin(), &older.view.layer]);
    });
}

/// A page of the origin that comes from the backing device to be changed moves as it was.
#[test]
fn a_page_that_lands_changed_goes_over() {
    bounded(3, || {
        let world = World::written(1);
        let flight = world.family.depart(&world.origin());
        // 1: the snapshot has begun; 2: and the page was changed after that.
        let began = Arc::new(AtomicU32::new(0));
        let disk = spawn(&world, {
            let began = Arc::clone(&began);
            move |world| {
                let after = began.load(Ordering::SeqCst) == 1;
                if !world.land_changed(flight, 2) {
                    world.family.land(&world.origin(), flight);
                    world.write(2);
                }
                if after {
                    began.store(2, Ordering::SeqCst);
                }
            }
        });
        let snapshot = world.snapshot();
        began.store(1, Ordering::SeqCst);
        disk.join().unwrap();
        let shown = world.shows(&snapshot);
        assert!(shown == 1 || began.load(Ordering::SeqCst) == 1 && shown == 2, "{shown}");
        assert_eq!(world.read(), 2);
        world.write(3);
        assert_eq!(world.shows(&snapshot), shown, "frozen");
        world.holds(&[&world.origin(), &snapshot.view.layer]);
    });
}
