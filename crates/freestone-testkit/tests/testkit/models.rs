//! Conformance suite over the model devices, plain and deferred.

use std::sync::Arc;

use freestone_core::device::Device;
use freestone_drive::null::{self, Null};
use freestone_testkit::conformance::{self, Options};
use freestone_testkit::{
    DeferPolicy, DeferringDevice, Manner, Model, ModelZoned, Rng, TestDevice, ZonedConfig,
};

const SIZE: usize = 2 << 20;

fn options(seed: u64) -> Options {
    Options { seed, window: 1 << 20, rounds: 150, thread_rounds: 200, ..Options::default() }
}

#[test]
fn model() {
    for block in [512, 1024, 4096] {
        conformance::check("model", &|| Arc::new(Model::new(SIZE, block)), options(1));
    }
}

#[test]
fn model_read_only() {
    let mut content = vec![0; SIZE];
    Rng::new(3).fill(&mut content[SIZE / 2..]);
    let make = || Arc::new(Model::read_only(content.clone(), 512)) as Arc<dyn Device>;
    conformance::check("read-only model", &make, options(2));
}

#[test]
fn model_grows() {
    let device = Model::new(SIZE, 512);
    conformance::check_grown(&device, &options(3), &|| device.grow(2 * SIZE)).unwrap();
}

#[test]
fn deferred_model() {
    for (seed, policy) in
        [(1, DeferPolicy::Always), (2, DeferPolicy::Sometimes(50)), (3, DeferPolicy::Sometimes(5))]
    {
        let make = || {
            let model = Arc::new(Model::new(SIZE, 512));
            Arc::new(DeferringDevice::new(model, policy, seed)) as Arc<dyn Device>
        };
        conformance::check(&format!("deferred model, {policy:?}"), &make, options(seed));
    }
}

#[test]
fn test_device_in_each_manner() {
    for manner in [Manner::Inline, Manner::Partly(1024), Manner::Submitted, Manner::Thread] {
        let make = || {
            let device = TestDevice::new(SIZE as u64);
            device.set(manner);
            device as Arc<dyn Device>
        };
        conformance::check(&format!("test device, {manner:?}"), &make, options(5));
    }
}

#[test]
fn null() {
    let make = || {
        let null = Null::new(null::Config::plain(1 << 40, 512)).unwrap();
        Arc::new(null) as Arc<dyn Device>
    };
    conformance::check("null", &make, Options { stores_data: false, ..options(4) });
    let deferred =
        || Arc::new(DeferringDevice::new(make(), DeferPolicy::Sometimes(50), 4)) as Arc<dyn Device>;
    conformance::check("deferred null", &deferred, Options { stores_data: false, ..options(4) });
}

fn zoned(config: ZonedConfig) {
    let make = || Arc::new(ModelZoned::new(config)) as Arc<dyn Device>;
    conformance::check_zoned("zoned model", &make, options(5));
    for policy in [DeferPolicy::Always, DeferPolicy::Sometimes(50)] {
        let deferred = || Arc::new(DeferringDevice::new(make(), policy, 5)) as Arc<dyn Device>;
        conformance::check_zoned(&format!("deferred zoned model, {policy:?}"), &deferred, options(5));
    }
}

#[test]
fn zoned_models() {
    let plain = ZonedConfig {
        zone_size: 256 << 10,
        zone_capacity: 256 << 10,
        nr_zones: 6,
        conventional: 0,
        max_open: 0,
        max_active: 0,
    };
    zoned(plain);
    zoned(ZonedConfig { zone_capacity: 192 << 10, conventional: 2, ..plain });
    zoned(ZonedConfig { max_open: 2, max_active: 3, ..plain });
    zoned(ZonedConfig { max_open: 2, max_active: 2, conventional: 1, ..plain });
}
