//! During a merge into an origin without a volatile cache, a completed write must be durable even
//! if it goes to the COW device.

use std::sync::{Arc, Mutex};

use freestone_core::device::{
    Blocking, Buffer, Completion, Device, Error, Extent, Flags, Geometry, IoBuf, Op, Request, Result,
    TryResult,
};
use freestone_cow::cow::{Config, MergeStatus, Origin, StoreKind};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Model};

const SIZE: usize = 128 << 10;
const NONE: Flags = Flags::empty();

/// A device with or without a volatile cache. Records the requests that it receives.
struct Recorder {
    inner: Arc<dyn Device>,
    volatile_cache: bool,
    asked: Mutex<Vec<Request>>,
}

impl Recorder {
    fn new(inner: Arc<dyn Device>, volatile_cache: bool) -> Arc<Self> {
        Arc::new(Self { inner, volatile_cache, asked: Mutex::default() })
    }

    /// Returns the writes since the previous call.
    fn writes(&self) -> Vec<Request> {
        let mut asked = std::mem::take(&mut *self.asked.lock().unwrap());
        asked.retain(|request| request.op == Op::Write);
        asked
    }
}

impl Device for Recorder {
    fn geometry(&self) -> Geometry {
        Geometry { volatile_cache: self.volatile_cache, ..self.inner.geometry() }
    }

    fn try_io(&self, _: &Request, _: Buffer<'_>) -> Result<TryResult> {
        Ok(TryResult::WouldBlock)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.asked.lock().unwrap().push(request);
        self.inner.submit(request, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.inner.extents(offset, len, row)
    }
}

#[test]
fn cow_writes_are_durable_if_origin_has_no_cache() {
    for volatile in [false, true] {
        let faulty = Arc::new(FaultyDisk::new(SIZE, 512));
        let below = Recorder::new(faulty.clone(), volatile);
        let cow = Recorder::new(Arc::new(Model::new(1 << 20, 512)), true);
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
        cow.writes();
        origin.write_at(8192 + 512, &[2; 1024], NONE).unwrap();
        let writes = cow.writes();
        assert_eq!(writes.len(), 1, "{writes:?}");
        assert_eq!(writes[0].flags.contains(Flags::FUA), !volatile, "{writes:?}");
    }
}
