//! The null device keeps the device contract.

use std::sync::Arc;

use freestone::device::Device;
use freestone::null::{Config, Null};
use freestone_testkit::conformance::{self, Options};
use freestone_testkit::{Deferred, Policy};

fn null(size: u64, logical_block: u32) -> Arc<dyn Device> {
    Arc::new(Null::new(Config { size, logical_block }).unwrap())
}

#[test]
fn alone() {
    for (size, block) in [(1 << 20, 512), (3 << 40, 4096), (i64::MAX as u64 & !4095, 1024)] {
        let options = Options { stores: false, window: 1 << 20, rounds: 100, ..Options::default() };
        conformance::check("null", &|| null(size, block), options);
    }
}

#[test]
fn deferred() {
    let make = || Arc::new(Deferred::new(null(1 << 30, 512), Policy::Sometimes(50), 7)) as Arc<dyn Device>;
    let options = Options { stores: false, window: 1 << 20, rounds: 100, ..Options::default() };
    conformance::check("deferred null", &make, options);
}
