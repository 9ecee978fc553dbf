//! After its own merge, a snapshot shows the origin's content, even while another snapshot is being
//! merged.

use std::sync::Arc;

use freestone_core::device::{Blocking, Device, Error, Flags, Op};
use freestone_cow::cow::{MergeStatus, Origin, StoreKind};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Model};

use crate::support::{CHUNK, Kind, bytes, config, read, read_all};

const SIZE: u64 = 16 * CHUNK;
const COW_SIZE: u64 = 512 << 10;
const NONE: Flags = Flags::empty();

#[test]
fn merged_snapshot_follows_the_next_merge() {
    let device = Arc::new(Model::new(SIZE as usize, 512));
    let origin = Origin::new(device.clone());
    let persistent = config(StoreKind::Persistent, CHUNK);
    let first = origin.snapshot(Kind::Model.make(COW_SIZE), &persistent).unwrap();
    let cow = Arc::new(FaultyDisk::new(COW_SIZE as usize, 512));
    let second = origin.snapshot(cow.clone(), &persistent).unwrap();
    first.write_at(0, &bytes(1, CHUNK), NONE).unwrap();
    first.merge().unwrap();
    assert_eq!(first.wait_merge(), MergeStatus::Finished);
    second.write_at(0, &bytes(2, 3 * CHUNK), NONE).unwrap();
    // The origin shows the second snapshot, of which nothing is merged yet because the COW device
    // fails.
    cow.fault(Some(Op::Read), FaultSchedule::Always, FaultEffect::Fail(Error::Media));
    second.merge().unwrap();
    assert!(matches!(second.wait_merge(), MergeStatus::Failed(_)));
    cow.heal();

    assert!(read_all(&first) == read_all(&origin), "the merged snapshot shows what is half merged");
    first.write_at(CHUNK, &bytes(3, CHUNK), NONE).unwrap();
    first.write_zeroes(2 * CHUNK, 512, NONE).unwrap();
    first.flush().unwrap();
    for shows in [&first as &dyn Device, &origin, &second] {
        assert!(read(shows, CHUNK, CHUNK) == bytes(3, CHUNK), "what was answered is lost");
        assert!(read(shows, 2 * CHUNK, 512) == [0; 512]);
    }
    let shown = read_all(&origin);
    second.merge().unwrap();
    assert_eq!(second.wait_merge(), MergeStatus::Finished);
    assert!(read_all(&*device) == shown);
    first.remove();
    assert!(first.read_at(0, &mut [0; 512]).is_err() && first.write_at(0, &[0; 512], NONE).is_err());
}
