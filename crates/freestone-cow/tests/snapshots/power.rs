//! Power loss of an origin, its snapshots and their COW devices.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use freestone_core::device::{Blocking, Error, Flags, Op};
use freestone_cow::cow::{Origin, Snapshot, Status, StoreKind};
use freestone_drive::quiesce::Quiesce;
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk};

use crate::support::{CHUNK, bytes, config, read_all};

const SIZE: u64 = 64 << 10;
const NONE: Flags = Flags::empty();
/// Deadline for any single operation.
const LONG: Duration = Duration::from_secs(30);

struct Machine {
    below: Arc<FaultyDisk>,
    cow: Arc<FaultyDisk>,
    lead: Arc<Quiesce>,
    origin: Origin,
    snapshot: Snapshot,
}

fn machine() -> Machine {
    let faulty = |size: u64| Arc::new(FaultyDisk::new(size as usize, 512));
    let (below, cow) = (faulty(SIZE), faulty(512 << 10));
    below.write_at(0, &bytes(1, SIZE), NONE).unwrap();
    let origin = Origin::new(below.clone());
    let lead = Arc::new(Quiesce::new(cow.clone()));
    let snapshot = origin.snapshot(lead.clone(), &config(StoreKind::Persistent, CHUNK)).unwrap();
    Machine { below, cow, lead, origin, snapshot }
}

/// Runs `then` while a write to the origin hangs in its copy to the COW device. Returns the result
/// of the write.
fn hang_write_until(machine: &Machine, then: impl FnOnce()) -> Result<(), Error> {
    machine.cow.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Hang);
    thread::scope(|scope| {
        let writer = scope.spawn(|| machine.origin.write_at(3 * CHUNK, &bytes(5, CHUNK), NONE));
        machine.cow.wait_held(1);
        then();
        writer.join().unwrap()
    })
}

#[test]
fn no_write_from_before_power_loss_arrives_after_it() {
    let machine = machine();
    let lose = || {
        let off = machine.origin.power_off(LONG, || {
            // The disk completes the hanging copy, because it had accepted that write before the
            // power loss.
            machine.cow.heal();
            machine.lead.close(LONG).unwrap().keep_closed();
            true
        });
        off.unwrap().invalidate_snapshots();
    };
    assert_eq!(hang_write_until(&machine, lose), Err(Error::Gone));
    assert!(read_all(&*machine.below) == bytes(1, SIZE), "the origin was written");
    assert_eq!(machine.snapshot.status(), Status::Invalid);
    assert_eq!(machine.snapshot.read_at(0, &mut [0; 512]), Err(Error::Gone));
    assert_eq!(machine.origin.snapshot_count(), 0);

    // After the reboot, the origin and a new snapshot on the same COW device are usable.
    let snapshot =
        machine.origin.snapshot(machine.cow.clone(), &config(StoreKind::Persistent, CHUNK)).unwrap();
    assert_ne!(snapshot.status(), Status::Invalid);
    machine.origin.write_at(0, &bytes(7, SIZE), NONE).unwrap();
    assert!(read_all(&snapshot) == bytes(1, SIZE));
    assert!(read_all(&machine.origin) == bytes(7, SIZE));
    // Dropping the old snapshot must not change the COW device.
    drop(machine.snapshot);
    assert!(read_all(&snapshot) == bytes(1, SIZE));
    assert_ne!(snapshot.status(), Status::Invalid);
}

#[test]
fn merge_resumes_after_power_loss() {
    let machine = machine();
    machine.snapshot.write_at(CHUNK, &bytes(2, 2 * CHUNK), NONE).unwrap();
    let shown = read_all(&machine.snapshot);
    machine.below.fault(Some(Op::Flush), FaultSchedule::Always, FaultEffect::Hang);
    machine.snapshot.merge().unwrap();
    machine.below.wait_held(1);
    let off = machine.origin.power_off(LONG, || {
        machine.lead.close(LONG).unwrap().keep_closed();
        machine.below.heal();
        true
    });
    off.unwrap().invalidate_snapshots();
    let config = config(StoreKind::Persistent, CHUNK);
    let snapshot = machine.origin.snapshot(machine.cow.clone(), &config).unwrap();
    // The origin shows the snapshot's content as soon as the snapshot is opened.
    assert!(read_all(&machine.origin) == shown && read_all(&snapshot) == shown);
    snapshot.merge().unwrap();
    snapshot.wait_merge();
    assert!(read_all(&*machine.below) == shown);
}

#[test]
fn cancelled_power_off_lets_writes_continue() {
    let machine = machine();
    let give_up = || {
        assert!(machine.origin.power_off(LONG, || false).is_none());
        machine.cow.heal();
    };
    assert_eq!(hang_write_until(&machine, give_up), Ok(()));
    assert!(read_all(&machine.snapshot) == bytes(1, SIZE));
    assert_eq!(machine.origin.snapshot_count(), 1);
}
