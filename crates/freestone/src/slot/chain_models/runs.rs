//! The models themselves: who does what at one time, and what must come of it.

use loom::thread;

use super::{Chain, NOTHING, Snapshot, World};
use crate::pin::pinned;
use crate::sync::{Arc, AtomicU32, Ordering};

/// What a snapshot shows to a thread that begins to read now.
fn shows(world: &World, chain: &Chain, snapshot: &Snapshot) -> u64 {
    pinned(|pin| world.read_snapshot(chain, pin, snapshot))
}

/// Every interleaving with at most two preemptions, which is known to find nearly all faults.
fn bounded(body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(body);
}

fn spawn(world: &Arc<World>, work: impl FnOnce(&World) + 'static) -> thread::JoinHandle<()> {
    let world = Arc::clone(world);
    thread::spawn(move || work(&world))
}

/// A world whose page has been written, or not.
fn written(first: u64) -> Arc<World> {
    let world = World::new();
    if first != NOTHING {
        world.write(first);
    }
    world
}

/// The first write since a snapshot, while the snapshot reads through to the origin.
#[test]
fn first_write_versus_read_through() {
    for first in [NOTHING, 1] {
        bounded(move || {
            let world = written(first);
            let (chain, snapshot) = (world.chain(), world.snapshot());
            let writer = spawn(&world, |world| world.write(2));
            assert_eq!(shows(&world, &chain, &snapshot), first);
            let live = world.read();
            assert!(live == first || live == 2);
            writer.join().unwrap();
            assert_eq!(shows(&world, &chain, &snapshot), first);
            assert_eq!(world.read(), 2);
            world.holds(&[&world.origin(), &snapshot.layer]);
        });
    }
}

/// Two writers of one page: what was there goes over once, and one of the two is freed.
#[test]
fn two_writers_of_a_page_with_a_snapshot() {
    bounded(|| {
        let world = written(1);
        let (chain, snapshot) = (world.chain(), world.snapshot());
        let other = spawn(&world, |world| world.write(2));
        world.write(3);
        assert_eq!(shows(&world, &chain, &snapshot), 1);
        other.join().unwrap();
        assert_eq!(shows(&world, &chain, &snapshot), 1);
        world.holds(&[&world.origin(), &snapshot.layer]);
    });
}

/// A write with two snapshots, the older of which reads through the younger.
#[test]
fn origin_write_with_a_chain_of_two() {
    for between in [false, true] {
        bounded(move || {
            let world = written(1);
            let chain = world.chain();
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
            assert_eq!(shows(&world, &chain, &older), 1);
            assert_eq!(shows(&world, &chain, &younger), wanted);
            writer.join().unwrap();
            assert_eq!(shows(&world, &chain, &older), 1);
            assert_eq!(shows(&world, &chain, &younger), wanted);
            world.holds(&[&world.origin(), &older.layer, &younger.layer]);
        });
    }
}

/// A snapshot begins while the page is written: it shows one moment, which is not before what was answered.
#[test]
fn creation_versus_writes() {
    bounded(|| {
        let world = written(1);
        let chain = world.chain();
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
        let shown = shows(&world, &chain, &snapshot);
        assert!(shown >= before, "{shown} is older than {before}, which was answered");
        writer.join().unwrap();
        assert_eq!(shows(&world, &chain, &snapshot), shown, "frozen");
        world.holds(&[&world.origin(), &snapshot.layer]);
    });
}

/// Two devices at one moment: what was written to the second after the first had it is not shown without that.
#[test]
fn creation_on_two_devices_is_one_moment() {
    bounded(|| {
        let worlds = [written(1), written(1)];
        let writer = {
            let worlds = worlds.clone();
            thread::spawn(move || {
                for world in &worlds {
                    world.write(2);
                }
            })
        };
        let chains = [worlds[0].freeze(), worlds[1].freeze()];
        let snapshots: Vec<_> =
            worlds.iter().zip(&chains).map(|(world, chain)| chain.attach(world)).collect();
        for (world, chain) in worlds.iter().zip(&chains) {
            chain.thaw(world);
        }
        writer.join().unwrap();
        let shown: Vec<_> = (0..2).map(|at| shows(&worlds[at], &chains[at], &snapshots[at])).collect();
        assert!(shown[0] >= shown[1], "the second has what the first has not: {shown:?}");
    });
}

/// A rewind while the page is written and a snapshot is read.
#[test]
fn rewind_versus_io() {
    bounded(|| {
        let world = written(1);
        let (chain, snapshot) = (world.chain(), world.snapshot());
        let writer = spawn(&world, |world| world.write(2));
        world.rewind();
        assert_eq!(shows(&world, &chain, &snapshot), 1);
        let live = world.read();
        assert!(live == NOTHING || live == 2, "{live} is from before the rewind");
        writer.join().unwrap();
        assert_eq!(shows(&world, &chain, &snapshot), 1);
        let old = Arc::clone(&chain.state.lock().origin);
        world.holds(&[&world.origin(), &old, &snapshot.layer]);
    });
}

/// A rewind without snapshots frees what was there, once nobody works on it.
#[test]
fn a_rewound_layer_is_freed_when_nobody_uses_it() {
    bounded(|| {
        let world = written(1);
        let writer = spawn(&world, |world| world.write(2));
        world.rewind();
        writer.join().unwrap();
        world.holds(&[&world.origin()]);
    });
}

/// The younger of two snapshots is removed while the page is written and the older one is read.
#[test]
fn deletion_in_the_middle_versus_readers_and_writers() {
    for written_before in [false, true] {
        bounded(move || {
            let world = written(1);
            let chain = world.chain();
            let (older, younger) = (world.snapshot(), world.snapshot());
            if written_before {
                // The younger one has it.
                world.write(3);
            }
            let cleaner = spawn(&world, {
                let chain = Arc::clone(&chain);
                move |world| chain.remove(world, younger.number)
            });
            let writer = spawn(&world, |world| world.write(2));
            assert_eq!(shows(&world, &chain, &older), 1);
            writer.join().unwrap();
            cleaner.join().unwrap();
            assert_eq!(shows(&world, &chain, &older), 1);
            world.holds(&[&world.origin(), &older.layer]);
        });
    }
}

/// The two younger ones of three snapshots are removed at one time: what the youngest has goes past the other.
#[test]
fn two_in_a_row_are_removed_while_the_page_is_written() {
    bounded(|| {
        let world = written(1);
        let chain = world.chain();
        let oldest = world.snapshot();
        let (middle, youngest) = (world.snapshot(), world.snapshot());
        let writer = spawn(&world, |world| world.write(2));
        chain.doom(&world, middle.number);
        chain.pass_on(&world, middle.number);
        chain.doom(&world, youngest.number);
        chain.pass_on(&world, youngest.number);
        chain.bury(&world, middle.number);
        chain.pass_on(&world, youngest.number);
        chain.bury(&world, youngest.number);
        assert_eq!(shows(&world, &chain, &oldest), 1);
        writer.join().unwrap();
        assert_eq!(shows(&world, &chain, &oldest), 1);
        world.holds(&[&world.origin(), &oldest.layer]);
    });
}

/// A snapshot is removed while its origin is rewound and written.
#[test]
fn deletion_versus_rewind_and_writes() {
    bounded(|| {
        let world = written(1);
        let chain = world.chain();
        let (older, younger) = (world.snapshot(), world.snapshot());
        let cleaner = spawn(&world, {
            let chain = Arc::clone(&chain);
            move |world| chain.remove(world, younger.number)
        });
        let writer = spawn(&world, |world| world.write(2));
        world.rewind();
        writer.join().unwrap();
        cleaner.join().unwrap();
        assert_eq!(shows(&world, &chain, &older), 1);
        let old = Arc::clone(&chain.state.lock().origin);
        world.holds(&[&world.origin(), &old, &older.layer]);
    });
}
