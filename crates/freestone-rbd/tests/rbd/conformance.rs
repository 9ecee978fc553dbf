//! Conformance suite over RBD images: plain, deferred, read-only, and as the backing device of a RAM disk.

use std::sync::Arc;

use freestone_core::device::{
    Buffer, Completion, Device, Extent, Geometry, IoBuf, Request, Result, TryResult,
};
use freestone_ram::ram::{self, Ram};
use freestone_rbd::{Config, Rbd};
use freestone_testkit::conformance::{self, Options};
use freestone_testkit::{DeferPolicy, DeferringDevice};

use crate::harness::Cluster;

const SIZE: u64 = 8 << 20;

/// An RBD device with its fake cluster.
struct DeviceWithCluster {
    device: Rbd,
    _cluster: Cluster,
}

impl DeviceWithCluster {
    fn make(size: u64, change: impl FnOnce(&mut Config)) -> Arc<dyn Device> {
        let cluster = Cluster::new(size);
        let mut config = cluster.config();
        change(&mut config);
        Arc::new(Self { device: Rbd::open(&config).unwrap(), _cluster: cluster })
    }
}

impl Device for DeviceWithCluster {
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        self.device.try_io(request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.device.submit(request, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.device.extents(offset, len, row)
    }
}

fn options(seed: u64) -> Options {
    Options { seed, rounds: 60, window: 1 << 20, max_io: 512 << 10, thread_rounds: 60, ..Options::default() }
}

#[test]
fn rbd_device() {
    conformance::check("rbd", &|| DeviceWithCluster::make(SIZE, |_| {}), options(1));
}

#[test]
fn deferring_wrapper_over_rbd() {
    let make = || -> Arc<dyn Device> {
        Arc::new(DeferringDevice::new(DeviceWithCluster::make(SIZE, |_| {}), DeferPolicy::Sometimes(30), 5))
    };
    conformance::check("deferred", &make, options(2));
}

#[test]
fn read_only_rbd_device() {
    conformance::check(
        "read-only",
        &|| DeviceWithCluster::make(SIZE, |config| config.read_only = true),
        options(3),
    );
}

/// During the suite, the RAM disk writes pages back to the image all the time.
#[test]
fn rbd_as_backing_device_of_ram_disk() {
    let make = || -> Arc<dyn Device> {
        let config = ram::Config { disksize: SIZE, mem_limit: 1 << 20, ..ram::Config::default() };
        Arc::new(Ram::new(config.backed_by(DeviceWithCluster::make(64 << 20, |_| {}), true)).unwrap())
    };
    conformance::check("spilled", &make, options(4));
}
