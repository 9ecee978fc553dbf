//! Without a matching rule, or with delays only, the fault layer keeps the device contract.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use freestone_core::device::Device;
use freestone_testkit::conformance::{self, Options};
use freestone_testkit::{DeferPolicy, DeferringDevice, Model, ModelZoned, ZonedConfig, effort};

use crate::faults::support::{faults, rules};

/// Rules that do not change results: none, rules that match and count all requests but never fire,
/// and a rule that records old content.
const QUIET: [&str; 3] =
    ["", "all error=EIO chance=1/18446744073709551615; all hang nth=16777214", "read stale nth=16777214"];
const DELAYS: &str = "all delay=30us; reset delay=1us at=0+1M; writes delay=100us chance=10%";

fn options(seed: u64) -> Options {
    Options {
        seed,
        window: 1 << 20,
        rounds: effort(20, 60),
        thread_rounds: effort(40, 100),
        ..Options::default()
    }
}

fn plain(policy: Option<DeferPolicy>) -> Arc<dyn Device> {
    let model = Arc::new(Model::new(2 << 20, 512));
    match policy {
        None => model,
        Some(policy) => Arc::new(DeferringDevice::new(model, policy, 3)),
    }
}

fn zoned(conventional: u32, policy: Option<DeferPolicy>) -> Arc<dyn Device> {
    let config = ZonedConfig {
        zone_size: 256 << 10,
        zone_capacity: 192 << 10,
        nr_zones: 6,
        conventional,
        max_open: 2,
        max_active: 3,
    };
    let model = Arc::new(ModelZoned::new(config));
    match policy {
        None => model,
        Some(policy) => Arc::new(DeferringDevice::new(model, policy, 3)),
    }
}

#[test]
fn plain_devices() {
    for text in QUIET.into_iter().chain([DELAYS]) {
        for policy in [None, Some(DeferPolicy::Always), Some(DeferPolicy::Sometimes(30))] {
            let make = || Arc::new(faults(plain(policy), text)) as Arc<dyn Device>;
            conformance::check(&format!("faults {text:?} over a model, {policy:?}"), &make, options(1));
        }
    }
}

#[test]
fn zoned_devices() {
    for text in QUIET.into_iter().chain([DELAYS]) {
        for policy in [None, Some(DeferPolicy::Always), Some(DeferPolicy::Sometimes(30))] {
            let make = || Arc::new(faults(zoned(1, policy), text)) as Arc<dyn Device>;
            conformance::check_zoned(&format!("faults {text:?} over zones, {policy:?}"), &make, options(2));
        }
    }
}

#[test]
fn deferring_device_over_faults() {
    let make = || {
        let faults = Arc::new(faults(plain(None), DELAYS));
        Arc::new(DeferringDevice::new(faults, DeferPolicy::Sometimes(30), 5)) as Arc<dyn Device>
    };
    conformance::check("deferred faults", &make, options(3));
}

#[test]
fn read_only_devices() {
    let make =
        || Arc::new(faults(Arc::new(Model::read_only(vec![7; 1 << 20], 512)), DELAYS)) as Arc<dyn Device>;
    conformance::check("faults over a read-only model", &make, options(4));
}

#[test]
fn growing_device_with_changing_rules() {
    let model = Arc::new(Model::new(1 << 20, 512));
    let faults = Arc::new(faults(model.clone(), ""));
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for text in QUIET.into_iter().chain([DELAYS]).cycle() {
                if over.load(Ordering::SeqCst) {
                    break;
                }
                faults.set(rules(text), None);
            }
        });
        let outcome = conformance::check_grown(&*faults, &options(5), &|| model.grow(2 << 20))
            .and_then(|()| conformance::check_content(&*faults, &options(6)))
            .and_then(|()| conformance::check_concurrent(&*faults, &options(7)));
        over.store(true, Ordering::SeqCst);
        outcome.unwrap();
    });
}
