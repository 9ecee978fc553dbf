//! During a merge into an origin without a volatile cache, a completed write must be durable even
//! if it goes to the COW device.

use std::sync::Arc;

use freestone_core::device::{Blocking, Device, Error, Flags, Op};
use freestone_cow::cow::{Config, MergeStatus, Origin, StoreKind};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Manner, Model, TestDevice};

const SIZE: usize = 128 << 10;
const NONE: Flags = Flags::empty();

/// A device with or without a volatile cache, which logs submitted requests.
fn recorder<D: Device>(inner: Arc<D>, volatile_cache: bool) -> Arc<TestDevice<D>> {
    let device = TestDevice::over(inner).shaped(move |geometry| geometry.volatile_cache = volatile_cache);
    Arc::new(device.with_manner(Manner::Submitted))
}

#[test]
fn cow_writes_are_durable_if_origin_has_no_cache() {
    for volatile in [false, true] {
        let faulty = Arc::new(FaultyDisk::new(SIZE, 512));
        let below = recorder(faulty.clone(), volatile);
        let cow = recorder(Arc::new(Model::new(1 << 20, 512)), true);
        let origin = Origin::new(below);
        let config =
            Config { kind: StoreKind::Persistent, chunk_bytes: Some(4096), force: true, ..Config::default() };
        let snapshot = origin.snapshot(cow.clone(), &config).unwrap();
        snapshot.write_at(8192, &[1; 4096], NONE).unwrap();
        snapshot.flush().unwrap();
        // The failing origin keeps the chunk half merged, so writes to the chunk go to the COW
        // device.
        faulty.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Fail(Error::Media));
        snapshot.merge().unwrap();
        assert!(matches!(snapshot.wait_merge(), MergeStatus::Failed(_)));
        cow.log.lock().clear();
        origin.write_at(8192 + 512, &[2; 1024], NONE).unwrap();
        let writes = cow.requests(Op::Write);
        assert_eq!(writes.len(), 1, "{writes:?}");
        assert_eq!(writes[0].flags.contains(Flags::FUA), !volatile, "{writes:?}");
    }
}
