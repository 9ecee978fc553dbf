//! Runs the device conformance suite through the queues of a virtual machine.

use std::sync::Arc;
use std::time::Duration;

use freestone_core::budget::{self, Budget};
use freestone_core::device::Device;
use freestone_drive::null::{self, Memory};
use freestone_drive::zone::{self, StateLocation, Zones};
use freestone_ram::ram::{Config, Ram};
use freestone_testkit::vhost_user::{Machine, MachineConfig};
use freestone_testkit::{DeferPolicy, DeferringDevice, ExportClient, ExportedDevice, conformance};
use freestone_vhost_user::{Export, Options};

const SIZE: u64 = 16 << 20;
const MAX_IO: u64 = 256 << 10;
const PATIENCE: Duration = Duration::from_secs(20);

fn through(inner: Arc<dyn Device>, shape: MachineConfig) -> Arc<dyn Device> {
    let dir = tempfile::tempdir().unwrap();
    let options = Options::new(Budget::new(budget::DEFAULT_BYTES));
    let export = Export::new(&dir.path().join("v"), "disk", Arc::clone(&inner), options).unwrap();
    let mut machine = Machine::connect(export.path(), shape, PATIENCE).unwrap();
    assert_eq!(machine.config().capacity() * 512, inner.geometry().size);
    let queues = std::mem::take(&mut machine.queues);
    let carriers = queues.into_iter().map(|queue| Box::new(queue) as Box<dyn ExportClient>);
    Arc::new(ExportedDevice::new(inner, carriers.collect(), Box::new((machine, export, dir))))
}

fn options() -> conformance::Options {
    conformance::Options {
        max_io: MAX_IO,
        rounds: 100,
        thread_rounds: 100,
        // Requests are atomic per sector of the frontend, and sectors are smaller than pages.
        atomic_bytes: 512,
        ..conformance::Options::default()
    }
}

fn check(name: &str, make: &dyn Fn() -> Arc<dyn Device>) {
    for indirect in [true, false] {
        let shape = MachineConfig {
            queues: 3,
            slot_bytes: MAX_IO,
            indirect,
            event_idx: indirect,
            ..MachineConfig::default()
        };
        conformance::check(name, &|| through(make(), shape), options());
    }
}

fn memory() -> Arc<dyn Device> {
    Arc::new(Memory::new(null::Config::plain(SIZE, 512)).unwrap())
}

#[test]
fn ram() {
    check("ram", &|| Arc::new(Ram::new(Config { disksize: SIZE, ..Config::default() }).unwrap()));
}

#[test]
fn null_memory() {
    check("memory", &memory);
}

#[test]
fn out_of_order_device() {
    check("deferred", &|| Arc::new(DeferringDevice::new(memory(), DeferPolicy::Sometimes(50), 7)));
}

/// Runs the zoned suite through a single queue, which keeps requests in order.
fn check_zoned(name: &str, config: zone::Config) {
    let make = || {
        let memory = Memory::new(null::Config::plain(SIZE, 4096)).unwrap();
        let zones = Zones::new(Arc::new(memory), config, StateLocation::Volatile, None).unwrap();
        through(Arc::new(zones), MachineConfig { slot_bytes: 2 << 20, ..MachineConfig::default() })
    };
    let options = conformance::Options { atomic_bytes: u64::MAX, unwritten_byte: 0xff, ..options() };
    conformance::check_zoned(name, &make, options);
}

#[test]
fn zones() {
    let config = zone::Config {
        zone_size: 1 << 20,
        zone_capacity: 768 << 10,
        zone_nr_conv: 1,
        zone_max_open: 3,
        zone_max_active: 5,
        ..zone::Config::default()
    };
    check_zoned("zones", config);
}

#[test]
fn zones_with_one_limit() {
    let config =
        zone::Config { zone_size: 1 << 20, zone_max_open: 2, zone_max_active: 2, ..zone::Config::default() };
    check_zoned("zones with one limit", config);
}
