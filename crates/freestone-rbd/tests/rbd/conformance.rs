//! Conformance suite over RBD images: plain, deferred, read-only, and as the backing device of a RAM disk.

use std::sync::Arc;

use freestone_core::device::Device;
use freestone_ram::ram::{self, Ram};
use freestone_rbd::{Config, Rbd};
use freestone_testkit::conformance::{self, Options};
use freestone_testkit::{DeferPolicy, DeferringDevice, TestDevice};

use crate::harness::Cluster;

const SIZE: u64 = 8 << 20;

/// Returns an RBD device that owns its fake cluster.
fn device(size: u64, change: impl FnOnce(&mut Config)) -> Arc<dyn Device> {
    let cluster = Cluster::new(size);
    let mut config = cluster.config();
    change(&mut config);
    Arc::new(TestDevice::over(Arc::new(Rbd::open(&config).unwrap())).owning(cluster))
}

fn options(seed: u64) -> Options {
    Options { seed, rounds: 60, window: 1 << 20, max_io: 512 << 10, thread_rounds: 60, ..Options::default() }
}

#[test]
fn rbd_device() {
    conformance::check("rbd", &|| device(SIZE, |_| {}), options(1));
}

#[test]
fn deferring_wrapper_over_rbd() {
    let make = || -> Arc<dyn Device> {
        Arc::new(DeferringDevice::new(device(SIZE, |_| {}), DeferPolicy::Sometimes(30), 5))
    };
    conformance::check("deferred", &make, options(2));
}

#[test]
fn read_only_rbd_device() {
    conformance::check("read-only", &|| device(SIZE, |config| config.read_only = true), options(3));
}

/// During the suite, the RAM disk writes pages back to the image all the time.
#[test]
fn rbd_as_backing_device_of_ram_disk() {
    let make = || -> Arc<dyn Device> {
        let config = ram::Config { disksize: SIZE, mem_limit: 1 << 20, ..ram::Config::default() };
        Arc::new(Ram::new(config.backed_by(device(64 << 20, |_| {}), true)).unwrap())
    };
    conformance::check("spilled", &make, options(4));
}
