//! Zoned devices pass the conformance suite of zones, over every kind of device.

use std::cell::Cell;
use std::sync::Arc;

use freestone_core::device::Device;
use freestone_drive::null::{self, BadBlocks, BadBlocksConfig, Memory};
use freestone_drive::power::{self, Power};
use freestone_drive::zone::{Config, StateLocation, Zones};
use freestone_image::file::{self, File};
use freestone_ram::ram::{self, Ram};
use freestone_testkit::conformance::{self, Options};
use freestone_testkit::{DeferPolicy, DeferringDevice, FaultyDisk, Model, TestDevice};

const SIZE: u64 = 4 << 20;

fn options(seed: u64) -> Options {
    Options {
        unwritten_byte: 0xFF,
        seed,
        rounds: 60,
        window: 1 << 20,
        max_io: 512 << 10,
        thread_rounds: 80,
        ..Options::default()
    }
}

/// Returns a configuration with conventional zones, a capacity below the zone size, and limits.
fn limited() -> Config {
    Config {
        zone_size: 256 << 10,
        zone_capacity: 192 << 10,
        zone_nr_conv: 2,
        zone_max_open: 3,
        zone_max_active: 5,
        ..Config::default()
    }
}

/// Returns a configuration with sequential zones only, and without limits.
fn plain() -> Config {
    Config { zone_size: 128 << 10, zone_append_max: 64 << 10, ..Config::default() }
}

fn zones(backing: impl Device + 'static, config: Config) -> Arc<dyn Device> {
    Arc::new(Zones::new(Arc::new(backing), config, StateLocation::Volatile, None).unwrap())
}

fn memory() -> Memory {
    Memory::new(null::Config::plain(SIZE, 4096)).unwrap()
}

#[test]
fn over_memory() {
    conformance::check_zoned("zones over memory", &|| zones(memory(), limited()), options(1));
    conformance::check_zoned("plain zones over memory", &|| zones(memory(), plain()), options(2));
}

#[test]
fn over_a_model_with_small_blocks_and_a_short_last_zone() {
    let make = || zones(Model::new(SIZE as usize - (64 << 10), 512), plain());
    conformance::check_zoned("zones over a model", &make, options(3));
}

#[test]
fn over_a_ram_disk() {
    let make = || {
        let config = ram::Config { disksize: SIZE, ..ram::Config::default() };
        zones(Ram::new(config).unwrap(), limited())
    };
    conformance::check_zoned("zones over a RAM disk", &make, options(4));
}

#[test]
fn over_deferring_devices() {
    for (policy, seed) in [(DeferPolicy::Always, 5), (DeferPolicy::Sometimes(40), 6)] {
        for config in [limited(), plain()] {
            let make = || {
                let model = Arc::new(Model::new(SIZE as usize, 4096));
                zones(DeferringDevice::new(model, policy, seed), config)
            };
            conformance::check_zoned("zones over a deferring device", &make, options(seed));
        }
    }
    let make = || zones(FaultyDisk::new(SIZE as usize, 512).shuffled(7), limited());
    conformance::check_zoned("zones over a slow disk", &make, options(7));
}

#[test]
fn below_a_deferring_device() {
    let make = || -> Arc<dyn Device> {
        Arc::new(DeferringDevice::new(zones(memory(), limited()), DeferPolicy::Sometimes(40), 8))
    };
    conformance::check_zoned("deferred zones", &make, options(8));
}

#[test]
fn over_bad_blocks_and_volatile_caches() {
    let make = || {
        let bad =
            Arc::new(BadBlocks::new(Arc::new(memory()), BadBlocksConfig { once: false, partial_io: true }));
        let zones = Zones::new(Arc::clone(&bad) as _, limited(), StateLocation::Volatile, Some(bad));
        Arc::new(zones.unwrap()) as Arc<dyn Device>
    };
    conformance::check_zoned("zones over bad blocks", &make, options(9));
    let make = || zones(Power::new(Arc::new(memory()), power::Config::default()).unwrap(), limited());
    conformance::check_zoned("zones over a device that can lose power", &make, options(10));
}

#[test]
fn over_a_file_with_a_state_file() {
    let dir = tempfile::tempdir().unwrap();
    let count = Cell::new(0);
    let make = || {
        count.set(count.get() + 1);
        let path = dir.path().join(format!("{}.img", count.get()));
        let state = dir.path().join(format!("{}.img.zones", count.get()));
        let file = File::open(&file::Config { size: Some(SIZE), ..file::Config::new(path) }).unwrap();
        let zones = Zones::new(Arc::new(file), limited(), StateLocation::File(&state), None).unwrap();
        Arc::new(zones) as Arc<dyn Device>
    };
    conformance::check_zoned("zones over a file", &make, options(11));
}

#[test]
fn conventional_zones_conform_as_a_plain_device() {
    let config = Config { zone_size: 256 << 10, zone_nr_conv: 8, ..Config::default() };
    let make = |backing: Arc<dyn Device>| {
        let zones = Zones::new(backing, config, StateLocation::Volatile, None).unwrap();
        let conventional = TestDevice::over(Arc::new(zones)).shaped(move |geometry| {
            (geometry.size, geometry.zones) = (8 * config.zone_size, None);
        });
        Arc::new(conventional) as Arc<dyn Device>
    };
    conformance::check("conventional zones", &|| make(Arc::new(memory())), options(12));
    let deferred = || {
        Arc::new(DeferringDevice::new(
            Arc::new(Model::new(SIZE as usize, 4096)),
            DeferPolicy::Sometimes(30),
            13,
        ))
    };
    conformance::check("conventional zones, deferred", &|| make(deferred()), options(13));
}
