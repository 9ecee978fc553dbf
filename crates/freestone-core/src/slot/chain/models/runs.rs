//! Requests beside snapshots that begin and end, and rewinds: who does what at one time, and what
//! must come of it.

use loom::thread;

use super::{NOTHING, World, bounded, carry_on, spawn};
use crate::sync::{Arc, AtomicU32, Ordering};

/// The first write since a snapshot, while the snapshot reads through to the origin.
#[test]
fn first_write_versus_read_through() {
    for first in [NOTHING, 1] {
        bounded(3, move || {
            let world = World::written(first);
            let snapshot = world.snapshot();
            let writer = spawn(&world, |world| world.write(2));
            assert_eq!(world.shows(&snapshot), first);
            let live = world.read();
            assert!(live == first || live == 2);
            writer.join().unwrap();
            assert_eq!(world.shows(&snapshot), first);
            assert_eq!(world.read(), 2);
            world.holds(&[&world.origin(), &snapshot.view.layer]);
        });
    }
}

/// Two writers of one page: what was there moves once, and one of the two is freed.
#[test]
fn two_writers_of_a_page_with_a_snapshot() {
    bounded(3, || {
        let world = World::written(1);
        let snapshot = world.snapshot();
        let other = spawn(&world, |world| world.write(2));
        world.write(3);
        assert_eq!(world.shows(&snapshot), 1);
        other.join().unwrap();
        assert_eq!(world.shows(&snapshot), 1);
        world.holds(&[&world.origin(), &snapshot.view.layer]);
    });
}

/// A page is emptied while it is read: it moves, and nobody takes the empty slot for a page.
#[test]
fn discard_versus_reads() {
    bounded(3, || {
        let world = World::written(1);
        let snapshot = world.snapshot();
        let other = spawn(&world, |world| world.discard());
        let live = world.read_through();
        assert!(live == 1 || live == NOTHING);
        assert_eq!(world.shows(&snapshot), 1);
        other.join().unwrap();
        assert_eq!((world.read_through(), world.shows(&snapshot)), (NOTHING, 1));
        world.holds(&[&world.origin(), &snapshot.view.layer]);
    });
}

/// A write with two snapshots, the older of which reads through the younger.
#[test]
fn origin_write_with_a_chain_of_two() {
    for between in [false, true] {
        bounded(3, move || {
            let world = World::written(1);
            let older = world.snapshot();
            if between {
                world.write(2);
            }
            let younger = world.snapshot();
            let wanted = if between { 2 } else { 1 };
            let writer = spawn(&world, |world| {
                world.write(3);
                world.write(4);
            });
            assert_eq!(world.shows(&older), 1);
            assert_eq!(world.shows(&younger), wanted);
            writer.join().unwrap();
            assert_eq!(world.shows(&older), 1);
            assert_eq!(world.shows(&younger), wanted);
            world.holds(&[&world.origin(), &older.view.layer, &younger.view.layer]);
        });
    }
}

/// A snapshot begins while the page is written: it shows one moment, which is not before what was
/// answered.
#[test]
fn creation_versus_writes() {
    bounded(3, || {
        let world = World::written(1);
        let answered = Arc::new(AtomicU32::new(1));
        let writer = spawn(&world, {
            let answered = Arc::clone(&answered);
            move |world| {
                for object in [2, 3] {
                    world.write(object);
                    answered.store(object as u32, Ordering::SeqCst);
                }
            }
        });
        let before = u64::from(answered.load(Ordering::SeqCst));
        let snapshot = world.snapshot();
        let shown = world.shows(&snapshot);
        assert!(shown >= before, "{shown} is older than {before}, which was answered");
        writer.join().unwrap();
        assert_eq!(world.shows(&snapshot), shown, "frozen");
        world.holds(&[&world.origin(), &snapshot.view.layer]);
    });
}

/// Two devices at one moment: what was written to the second after the first had it is not shown
/// without that.
#[test]
fn creation_on_two_devices_is_one_moment() {
    bounded(3, || {
        let worlds = [World::written(1), World::written(1)];
        let writer = {
            let worlds = worlds.clone();
            thread::spawn(move || {
                for world in &worlds {
                    world.write(2);
                }
            })
        };
        let chains = worlds.each_ref().map(|world| world.device.chain.freeze());
        let snapshots: Vec<_> =
            worlds.iter().zip(&chains).map(|(world, chain)| world.attach(chain)).collect();
        for chain in &chains {
            carry_on(chain.thaw());
        }
        writer.join().unwrap();
        let shown: Vec<_> = (0..2).map(|at| worlds[at].shows(&snapshots[at])).collect();
        assert!(shown[0] >= shown[1], "the second has what the first has not: {shown:?}");
    });
}

/// A rewind while the page is written and a snapshot is read.
#[test]
fn rewind_versus_io() {
    bounded(3, || {
        let world = World::written(1);
        let (old, snapshot) = (world.origin(), world.snapshot());
        let writer = spawn(&world, |world| world.write(2));
        world.rewind();
        assert_eq!(world.shows(&snapshot), 1);
        let live = world.read();
        assert!(live == NOTHING || live == 2, "{live} is from before the rewind");
        writer.join().unwrap();
        assert_eq!(world.shows(&snapshot), 1);
        world.holds(&[&world.origin(), &old, &snapshot.view.layer]);
    });
}

/// A device is rewound while a snapshot of it begins: that shows what was before, or nothing.
#[test]
fn creation_versus_rewind() {
    bounded(3, || {
        let world = World::written(1);
        let old = world.origin();
        let other = spawn(&world, World::rewind);
        let snapshot = world.snapshot();
        let shown = world.shows(&snapshot);
        other.join().unwrap();
        assert!(shown == 1 || shown == NOTHING);
        assert_eq!((world.read(), world.shows(&snapshot)), (NOTHING, shown), "frozen");
        world.holds(&[&world.origin(), &old, &snapshot.view.layer]);
    });
}

/// A rewind without snapshots frees what was there, once nobody works on it.
#[test]
fn a_rewound_layer_is_freed_when_nobody_uses_it() {
    bounded(3, || {
        let world = World::written(1);
        let writer = spawn(&world, |world| world.write(2));
        world.rewind();
        writer.join().unwrap();
        world.holds(&[&world.origin()]);
    });
}

/// The only snapshot is removed while the page is written: the device keeps its layer.
#[test]
fn the_only_snapshot_is_removed() {
    bounded(3, || {
        let world = World::written(1);
        let (chain, snapshot) = (world.chain(), world.snapshot());
        let writer = spawn(&world, |world| world.write(2));
        world.remove(&chain, snapshot.number);
        writer.join().unwrap();
        assert_eq!(world.read(), 2);
        world.holds(&[&world.origin()]);
        assert_eq!(Arc::strong_count(&snapshot.view.layer), 1, "a layer that is gone is kept");
    });
}

/// The device is rewound while the only snapshot is removed: who comes last frees the former layer.
#[test]
fn the_only_snapshot_is_removed_versus_rewind() {
    bounded(3, || {
        let world = World::written(1);
        let (chain, snapshot) = (world.chain(), world.snapshot());
        let other = spawn(&world, World::rewind);
        world.remove(&chain, snapshot.number);
        other.join().unwrap();
        assert_eq!(world.read(), NOTHING);
        world.holds(&[&world.origin()]);
    });
}

/// The younger of two snapshots is removed while the page is written and the older one is read.
#[test]
fn deletion_in_the_middle_versus_readers_and_writers() {
    for written_before in [false, true] {
        bounded(2, move || {
            let world = World::written(1);
            let chain = world.chain();
            let (older, younger) = (world.snapshot(), world.snapshot());
            if written_before {
                // The younger one has it.
                world.write(3);
            }
            let cleaner = spawn(&world, move |world| world.remove(&chain, younger.number));
            let writer = spawn(&world, |world| world.write(2));
            assert_eq!(world.shows(&older), 1);
            writer.join().unwrap();
            cleaner.join().unwrap();
            assert_eq!(world.shows(&older), 1);
            world.holds(&[&world.origin(), &older.view.layer]);
        });
    }
}

/// The two younger ones of three snapshots are removed at one time: what the youngest has goes past
/// the other.
#[test]
fn two_in_a_row_are_removed_while_the_page_is_written() {
    bounded(3, || {
        let world = World::written(1);
        let chain = world.chain();
        let oldest = world.snapshot();
        let (middle, youngest) = (world.snapshot(), world.snapshot());
        let writer = spawn(&world, |world| world.write(2));
        chain.begin_delete(middle.number);
        world.pass_on(&chain, middle.number);
        chain.begin_delete(youngest.number);
        world.pass_on(&chain, youngest.number);
        world.unlink(&chain, middle.number);
        world.pass_on(&chain, youngest.number);
        world.unlink(&chain, youngest.number);
        assert_eq!(world.shows(&oldest), 1);
        writer.join().unwrap();
        assert_eq!(world.shows(&oldest), 1);
        world.holds(&[&world.origin(), &oldest.view.layer]);
    });
}

/// The two younger ones of three snapshots are removed, each with a page of its own: what the
/// oldest reads is the nearer one's, and the other is freed.
#[test]
fn two_in_a_row_are_removed_with_pages_of_their_own() {
    bounded(3, || {
        let world = World::written(1);
        let chain = world.chain();
        let (oldest, middle) = (world.snapshot(), world.snapshot());
        world.write(2);
        let youngest = world.snapshot();
        let writer = spawn(&world, |world| world.write(3));
        chain.begin_delete(middle.number);
        chain.begin_delete(youngest.number);
        world.pass_on(&chain, youngest.number);
        assert_eq!(world.shows(&oldest), 1);
        world.pass_on(&chain, middle.number);
        world.unlink(&chain, middle.number);
        writer.join().unwrap();
        world.pass_on(&chain, youngest.number);
        world.unlink(&chain, youngest.number);
        assert_eq!((world.read(), world.shows(&oldest)), (3, 1));
        world.holds(&[&world.origin(), &oldest.view.layer]);
    });
}

/// A snapshot is removed while its origin is rewound and written.
#[test]
fn deletion_versus_rewind_and_writes() {
    bounded(3, || {
        let world = World::written(1);
        let chain = world.chain();
        let (older, younger) = (world.snapshot(), world.snapshot());
        let cleaner = spawn(&world, {
            let chain = Arc::clone(&chain);
            move |world| world.remove(&chain, younger.number)
        });
        let writer = spawn(&world, |world| world.write(2));
        world.rewind();
        writer.join().unwrap();
        cleaner.join().unwrap();
        assert_eq!(world.shows(&older), 1);
        world.holds(&[&world.origin(), &chain.origin(), &older.view.layer]);
    });
}
