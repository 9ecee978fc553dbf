//! The power layer keeps the device contract, over every kind of device and with any cache
//! capacity.

use std::sync::Arc;

use freestone_core::device::Device;
use freestone_drive::power::{Config, Power, log};
use freestone_testkit::conformance::{self, Options};
use freestone_testkit::{DeferPolicy, DeferringDevice, FaultyDisk, Model, effort};

const MIB: usize = 1 << 20;
/// Size of the device in bytes, which is not a whole number of regions.
const SIZE: usize = 6 * MIB + 1536;

fn options() -> Options {
    let rounds = effort(30, 100);
    Options { rounds, window: 1 << 20, max_io: 256 << 10, thread_rounds: rounds, ..Options::default() }
}

fn check(name: &str, below: &dyn Fn() -> Arc<dyn Device>) {
    for (capacity, max_io) in [(0, 256 << 10), (1, 64 << 10), (100 << 10, 256 << 10)] {
        let make = || -> Arc<dyn Device> {
            Arc::new(Power::new(below(), Config { capacity, ..Config::default() }).unwrap())
        };
        // A cache of one block evicts blocks to the device below all the time.
        let rounds = if capacity == 1 { effort(6, 30) } else { effort(10, 60) };
        let options = Options { max_io, rounds, thread_rounds: rounds, ..options() };
        conformance::check(&format!("{name}, capacity {capacity}"), &make, options);
    }
}

#[test]
fn over_an_inline_device() {
    check("model", &|| Arc::new(Model::new(SIZE, 512)));
    check("model of large blocks", &|| Arc::new(Model::new(6 * MIB, 4096)));
}

#[test]
fn over_a_deferring_device() {
    check("deferred", &|| {
        Arc::new(DeferringDevice::new(Arc::new(Model::new(SIZE, 512)), DeferPolicy::Sometimes(50), 3))
    });
}

#[test]
fn device_that_always_blocks_conforms() {
    check("always deferred", &|| {
        Arc::new(DeferringDevice::new(Arc::new(Model::new(SIZE, 512)), DeferPolicy::Always, 4))
    });
}

#[test]
fn over_a_disk() {
    check("disk", &|| Arc::new(FaultyDisk::new(6 * MIB, 512).shuffled(5)));
}

#[test]
fn below_a_deferring_device() {
    let make = || -> Arc<dyn Device> {
        let power = Power::new(Arc::new(Model::new(SIZE, 512)), Config::default()).unwrap();
        Arc::new(DeferringDevice::new(Arc::new(power), DeferPolicy::Sometimes(50), 7))
    };
    conformance::check("deferred above", &make, options());
}

#[test]
fn during_a_recording() {
    let folder = tempfile::tempdir().unwrap();
    let number = std::cell::Cell::new(0);
    let make = || -> Arc<dyn Device> {
        number.set(number.get() + 1);
        let record = Some(log::Writer::create(&folder.path().join(number.get().to_string())).unwrap());
        let below = DeferringDevice::new(Arc::new(Model::new(SIZE, 512)), DeferPolicy::Sometimes(50), 9);
        Arc::new(
            Power::new(Arc::new(below), Config { capacity: 1 << 20, record, ..Config::default() }).unwrap(),
        )
    };
    conformance::check("recorded", &make, options());
}
