//! Models of requests that run while snapshots are taken and removed, and while the device is rewound.

use loom::thread;

use super::{Fixture, NOTHING, bounded, continue_requests, spawn};
use crate::sync::{Arc, AtomicU32, Ordering};

/// First write after a snapshot, while the snapshot reads through to the origin.
#[test]
fn first_write_versus_read_through() {
    for first in [NOTHING, 1] {
        bounded(3, move || {
            let fixture = Fixture::written(first);
            let snapshot = fixture.snapshot();
            let writer = spawn(&fixture, |fixture| fixture.write(2));
            assert_eq!(fixture.shows(&snapshot), first);
            let live = fixture.read();
            assert!(live == first || live == 2);
            writer.join().unwrap();
            assert_eq!(fixture.shows(&snapshot), first);
            assert_eq!(fixture.read(), 2);
            fixture.check_layers(&[&fixture.origin(), &snapshot.view.layer]);
        });
    }
}

/// Two concurrent writers of a page. The old word moves to the snapshot once, and one of the new words is
/// freed.
#[test]
fn two_writers_with_snapshot() {
    bounded(3, || {
        let fixture = Fixture::written(1);
        let snapshot = fixture.snapshot();
        let other = spawn(&fixture, |fixture| fixture.write(2));
        fixture.write(3);
        assert_eq!(fixture.shows(&snapshot), 1);
        other.join().unwrap();
        assert_eq!(fixture.shows(&snapshot), 1);
        fixture.check_layers(&[&fixture.origin(), &snapshot.view.layer]);
    });
}

/// A discard during reads. The word moves to the snapshot, and no reader mistakes the empty slot for a page.
#[test]
fn discard_versus_reads() {
    bounded(3, || {
        let fixture = Fixture::written(1);
        let snapshot = fixture.snapshot();
        let other = spawn(&fixture, |fixture| fixture.discard());
        let live = fixture.read_through();
        assert!(live == 1 || live == NOTHING);
        assert_eq!(fixture.shows(&snapshot), 1);
        other.join().unwrap();
        assert_eq!((fixture.read_through(), fixture.shows(&snapshot)), (NOTHING, 1));
        fixture.check_layers(&[&fixture.origin(), &snapshot.view.layer]);
    });
}

/// A write with two snapshots, the older of which reads through the younger one.
#[test]
fn origin_write_with_a_chain_of_two() {
    for between in [false, true] {
        bounded(3, move || {
            let fixture = Fixture::written(1);
            let older = fixture.snapshot();
            if between {
                fixture.write(2);
            }
            let younger = fixture.snapshot();
            let wanted = if between { 2 } else { 1 };
            let writer = spawn(&fixture, |fixture| {
                fixture.write(3);
                fixture.write(4);
            });
            assert_eq!(fixture.shows(&older), 1);
            assert_eq!(fixture.shows(&younger), wanted);
            writer.join().unwrap();
            assert_eq!(fixture.shows(&older), 1);
            assert_eq!(fixture.shows(&younger), wanted);
            fixture.check_layers(&[&fixture.origin(), &older.view.layer, &younger.view.layer]);
        });
    }
}

/// A snapshot taken during writes shows the content at one point in time, including all writes completed
/// before.
#[test]
fn creation_versus_writes() {
    bounded(3, || {
        let fixture = Fixture::written(1);
        let completed = Arc::new(AtomicU32::new(1));
        let writer = spawn(&fixture, {
            let completed = Arc::clone(&completed);
            move |fixture| {
                for object in [2, 3] {
                    fixture.write(object);
                    completed.store(object as u32, Ordering::SeqCst);
                }
            }
        });
        let before = u64::from(completed.load(Ordering::SeqCst));
        let snapshot = fixture.snapshot();
        let shown = fixture.shows(&snapshot);
        assert!(shown >= before, "{shown} is older than {before}, which was completed");
        writer.join().unwrap();
        assert_eq!(fixture.shows(&snapshot), shown, "frozen");
        fixture.check_layers(&[&fixture.origin(), &snapshot.view.layer]);
    });
}

/// Snapshots of two devices at one point in time. If the first snapshot lacks a write, the second lacks the
/// writes issued after it.
#[test]
fn creation_on_two_devices_is_one_moment() {
    bounded(3, || {
        let worlds = [Fixture::written(1), Fixture::written(1)];
        let writer = {
            let worlds = worlds.clone();
            thread::spawn(move || {
                for fixture in &worlds {
                    fixture.write(2);
                }
            })
        };
        let chains = worlds.each_ref().map(|fixture| fixture.device.chain.freeze());
        let snapshots: Vec<_> =
            worlds.iter().zip(&chains).map(|(fixture, chain)| fixture.attach(chain)).collect();
        for chain in &chains {
            continue_requests(chain.thaw());
        }
        writer.join().unwrap();
        let shown: Vec<_> = (0..2).map(|at| worlds[at].shows(&snapshots[at])).collect();
        assert!(shown[0] >= shown[1], "the second has what the first has not: {shown:?}");
    });
}

/// A rewind during a write and a read of a snapshot.
#[test]
fn rewind_versus_io() {
    bounded(3, || {
        let fixture = Fixture::written(1);
        let (old, snapshot) = (fixture.origin(), fixture.snapshot());
        let writer = spawn(&fixture, |fixture| fixture.write(2));
        fixture.rewind();
        assert_eq!(fixture.shows(&snapshot), 1);
        let live = fixture.read();
        assert!(live == NOTHING || live == 2, "{live} is from before the rewind");
        writer.join().unwrap();
        assert_eq!(fixture.shows(&snapshot), 1);
        fixture.check_layers(&[&fixture.origin(), &old, &snapshot.view.layer]);
    });
}

/// A rewind while a snapshot is taken. The snapshot shows the old content or an unwritten page.
#[test]
fn creation_versus_rewind() {
    bounded(3, || {
        let fixture = Fixture::written(1);
        let old = fixture.origin();
        let other = spawn(&fixture, Fixture::rewind);
        let snapshot = fixture.snapshot();
        let shown = fixture.shows(&snapshot);
        other.join().unwrap();
        assert!(shown == 1 || shown == NOTHING);
        assert_eq!((fixture.read(), fixture.shows(&snapshot)), (NOTHING, shown), "frozen");
        fixture.check_layers(&[&fixture.origin(), &old, &snapshot.view.layer]);
    });
}

/// A rewind without snapshots frees the old layer after its last use.
#[test]
fn rewound_layer_is_freed_after_last_use() {
    bounded(3, || {
        let fixture = Fixture::written(1);
        let writer = spawn(&fixture, |fixture| fixture.write(2));
        fixture.rewind();
        writer.join().unwrap();
        fixture.check_layers(&[&fixture.origin()]);
    });
}

/// The only snapshot is removed during a write. The device keeps its own layer.
#[test]
fn deletion_of_only_snapshot_versus_write() {
    bounded(3, || {
        let fixture = Fixture::written(1);
        let (chain, snapshot) = (fixture.chain(), fixture.snapshot());
        let writer = spawn(&fixture, |fixture| fixture.write(2));
        fixture.remove(&chain, snapshot.number);
        writer.join().unwrap();
        assert_eq!(fixture.read(), 2);
        fixture.check_layers(&[&fixture.origin()]);
        assert_eq!(Arc::strong_count(&snapshot.view.layer), 1, "a removed layer is still referenced");
    });
}

/// The only snapshot is removed during a rewind: the last user frees the old layer.
#[test]
fn deletion_of_only_snapshot_versus_rewind() {
    bounded(3, || {
        let fixture = Fixture::written(1);
        let (chain, snapshot) = (fixture.chain(), fixture.snapshot());
        let other = spawn(&fixture, Fixture::rewind);
        fixture.remove(&chain, snapshot.number);
        other.join().unwrap();
        assert_eq!(fixture.read(), NOTHING);
        fixture.check_layers(&[&fixture.origin()]);
    });
}

/// The younger of two snapshots is removed during a write and reads of the older one.
#[test]
fn deletion_in_the_middle_versus_readers_and_writers() {
    for written_before in [false, true] {
        bounded(2, move || {
            let fixture = Fixture::written(1);
            let chain = fixture.chain();
            let (older, younger) = (fixture.snapshot(), fixture.snapshot());
            if written_before {
                // The write moves the old word to the younger snapshot.
                fixture.write(3);
            }
            let cleaner = spawn(&fixture, move |fixture| fixture.remove(&chain, younger.number));
            let writer = spawn(&fixture, |fixture| fixture.write(2));
            assert_eq!(fixture.shows(&older), 1);
            writer.join().unwrap();
            cleaner.join().unwrap();
            assert_eq!(fixture.shows(&older), 1);
            fixture.check_layers(&[&fixture.origin(), &older.view.layer]);
        });
    }
}

/// The two younger of three snapshots are removed together. Pages of the youngest are passed on beyond the
/// other removed one.
#[test]
fn deletion_of_two_snapshots_versus_write() {
    bounded(3, || {
        let fixture = Fixture::written(1);
        let chain = fixture.chain();
        let oldest = fixture.snapshot();
        let (middle, youngest) = (fixture.snapshot(), fixture.snapshot());
        let writer = spawn(&fixture, |fixture| fixture.write(2));
        chain.begin_delete(middle.number);
        fixture.pass_on(&chain, middle.number);
        chain.begin_delete(youngest.number);
        fixture.pass_on(&chain, youngest.number);
        fixture.unlink(&chain, middle.number);
        fixture.pass_on(&chain, youngest.number);
        fixture.unlink(&chain, youngest.number);
        assert_eq!(fixture.shows(&oldest), 1);
        writer.join().unwrap();
        assert_eq!(fixture.shows(&oldest), 1);
        fixture.check_layers(&[&fixture.origin(), &oldest.view.layer]);
    });
}

/// The two younger of three snapshots are removed, each with its own page. The oldest reads the page of the
/// middle one, and the page of the youngest is freed.
#[test]
fn deletion_of_two_snapshots_with_own_pages() {
    bounded(3, || {
        let fixture = Fixture::written(1);
        let chain = fixture.chain();
        let (oldest, middle) = (fixture.snapshot(), fixture.snapshot());
        fixture.write(2);
        let youngest = fixture.snapshot();
        let writer = spawn(&fixture, |fixture| fixture.write(3));
        chain.begin_delete(middle.number);
        chain.begin_delete(youngest.number);
        fixture.pass_on(&chain, youngest.number);
        assert_eq!(fixture.shows(&oldest), 1);
        fixture.pass_on(&chain, middle.number);
        fixture.unlink(&chain, middle.number);
        writer.join().unwrap();
        fixture.pass_on(&chain, youngest.number);
        fixture.unlink(&chain, youngest.number);
        assert_eq!((fixture.read(), fixture.shows(&oldest)), (3, 1));
        fixture.check_layers(&[&fixture.origin(), &oldest.view.layer]);
    });
}

/// A snapshot is removed while its origin is rewound and written.
#[test]
fn deletion_versus_rewind_and_writes() {
    bounded(3, || {
        let fixture = Fixture::written(1);
        let chain = fixture.chain();
        let (older, younger) = (fixture.snapshot(), fixture.snapshot());
        let cleaner = spawn(&fixture, {
            let chain = Arc::clone(&chain);
            move |fixture| fixture.remove(&chain, younger.number)
        });
        let writer = spawn(&fixture, |fixture| fixture.write(2));
        fixture.rewind();
        writer.join().unwrap();
        cleaner.join().unwrap();
        assert_eq!(fixture.shows(&older), 1);
        fixture.check_layers(&[&fixture.origin(), &chain.origin(), &older.view.layer]);
    });
}
