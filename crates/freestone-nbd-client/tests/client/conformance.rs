//! Conformance suite over exports of Freestone's NBD server: plain, deferred, with one and several
//! connections, read-only, without flush, and with larger blocks.

use std::sync::Arc;

use freestone_core::device::Device;
use freestone_drive::null::{self, Null};
use freestone_ram::ram::{Config, Ram};
use freestone_testkit::conformance::{self, Options};
use freestone_testkit::{DeferPolicy, DeferringDevice, Model};

use crate::harness::{served, served_with};

const SIZE: u64 = 8 << 20;

fn options(seed: u64) -> Options {
    Options { seed, rounds: 60, window: 1 << 20, max_io: 512 << 10, thread_rounds: 80, ..Options::default() }
}

fn ram() -> Arc<dyn Device> {
    Arc::new(Ram::new(Config { disksize: SIZE, ..Config::default() }).unwrap())
}

#[test]
fn ram_disk_over_four_and_one_connections() {
    for connections in [4, 1] {
        let make = || -> Arc<dyn Device> { served_with(ram(), |config| config.connections = connections) };
        conformance::check(&format!("{connections} connections"), &make, options(1));
    }
}

#[test]
fn deferring_wrapper_over_client() {
    let make = || -> Arc<dyn Device> {
        Arc::new(DeferringDevice::new(served(ram()), DeferPolicy::Sometimes(30), 5))
    };
    conformance::check("deferred", &make, options(2));
}

#[test]
fn client_over_deferring_device() {
    let make = || -> Arc<dyn Device> {
        let slow = DeferringDevice::new(ram(), DeferPolicy::Sometimes(50), 6);
        served(Arc::new(slow))
    };
    conformance::check("over deferred", &make, options(3));
}

#[test]
fn client_over_512_and_4096_byte_blocks() {
    for block in [512, 4096] {
        let make = || -> Arc<dyn Device> { served(Arc::new(Model::new(SIZE as usize, block))) };
        conformance::check(&format!("blocks of {block}"), &make, options(4));
    }
}

#[test]
fn read_only_client() {
    let make = || -> Arc<dyn Device> { served_with(ram(), |config| config.read_only = true) };
    conformance::check("read-only", &make, options(5));
}

#[test]
fn client_over_null_device() {
    let make = || -> Arc<dyn Device> {
        let config = null::Config::plain(SIZE, 512);
        served(Arc::new(Null::new(config).unwrap()))
    };
    conformance::check("null", &make, Options { stores_data: false, ..options(6) });
}

/// During the suite, the RAM disk writes pages back to the export all the time.
#[test]
fn client_as_backing_device_of_ram_disk() {
    for packed in [true, false] {
        let make = || -> Arc<dyn Device> {
            let backing = served(Arc::new(Model::new(64 << 20, 4096)));
            let config = Config { disksize: SIZE, mem_limit: 1 << 20, ..Config::default() };
            Arc::new(Ram::new(config.backed_by(backing, packed)).unwrap())
        };
        conformance::check("spilled", &make, options(7));
    }
}
