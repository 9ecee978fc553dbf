//! Null devices (test drives) pass the conformance suite, alone and with layers above them.

use std::sync::Arc;
use std::time::Duration;

use freestone::device::Device;
use freestone::null::{BadBlocks, BadBlocksConfig, Config, Memory, Null, PaceConfig, PacedDevice};
use freestone_testkit::conformance::{self, Options};
use freestone_testkit::{DeferPolicy, DeferringDevice, effort};

use crate::devices::conformance_options;

fn null(size: u64, logical_block: u32) -> Arc<dyn Device> {
    Arc::new(Null::new(Config::plain(size, logical_block)).unwrap())
}

fn memory(size: u64, logical_block: u32) -> Arc<dyn Device> {
    Arc::new(Memory::new(Config::plain(size, logical_block)).unwrap())
}

fn deferred(inner: Arc<dyn Device>) -> Arc<dyn Device> {
    Arc::new(DeferringDevice::new(inner, DeferPolicy::Sometimes(50), 7))
}

fn bad(inner: Arc<dyn Device>) -> Arc<dyn Device> {
    Arc::new(BadBlocks::new(inner, BadBlocksConfig { once: true, partial_io: true }))
}

fn paced(inner: Arc<dyn Device>, mbps: u32, micros: u64) -> Arc<dyn Device> {
    let config = PaceConfig { mbps, completion: Duration::from_micros(micros) };
    Arc::new(PacedDevice::new(inner, config).unwrap())
}

fn stores_nothing() -> Options {
    Options { stores_data: false, window: 1 << 20, rounds: effort(30, 100), ..Options::default() }
}

#[test]
fn null_alone() {
    for (size, block) in [(1 << 20, 512), (3 << 40, 4096), (i64::MAX as u64 & !4095, 1024)] {
        conformance::check("null", &|| null(size, block), stores_nothing());
    }
}

#[test]
fn null_in_pieces_and_read_only() {
    let config = Config { max_request: 16 << 10, discard: false, ..Config::plain(1 << 30, 512) };
    let make = || Arc::new(Null::new(config).unwrap()) as Arc<dyn Device>;
    conformance::check("null with max_request", &make, stores_nothing());
    let config = Config { read_only: true, ..config };
    let make = || Arc::new(Null::new(config).unwrap()) as Arc<dyn Device>;
    conformance::check("read-only null", &make, stores_nothing());
}

#[test]
fn deferred_null() {
    conformance::check("deferred null", &|| deferred(null(1 << 30, 512)), stores_nothing());
}

#[test]
fn memory_alone() {
    // The size of the third device is not a whole number of pages.
    for (size, block) in [(64 << 20, 512), (5 << 40, 4096), ((3 << 20) + 512, 512), (9 << 20, 2048)] {
        conformance::check("memory", &|| memory(size, block), conformance_options());
    }
}

#[test]
fn memory_without_discard_and_in_pieces() {
    let config = Config { discard: false, max_request: 12 << 10, ..Config::plain(64 << 20, 1024) };
    let make = || Arc::new(Memory::new(config).unwrap()) as Arc<dyn Device>;
    conformance::check("memory with max_request", &make, conformance_options());
    let config = Config { read_only: true, ..config };
    let make = || Arc::new(Memory::new(config).unwrap()) as Arc<dyn Device>;
    conformance::check("read-only memory", &make, conformance_options());
}

#[test]
fn bad_blocks_without_ranges() {
    conformance::check("bad blocks over memory", &|| bad(memory(64 << 20, 512)), conformance_options());
    let make = || bad(deferred(memory(64 << 20, 4096)));
    conformance::check("bad blocks over deferred memory", &make, conformance_options());
}

#[test]
fn paced_devices() {
    let options = Options { rounds: effort(20, 60), thread_rounds: effort(20, 60), ..conformance_options() };
    for (name, mbps, micros) in [("limited", 4096, 0), ("delayed", 0, 50), ("both", 4096, 20)] {
        let name = format!("{name} memory");
        conformance::check(&name, &|| paced(memory(64 << 20, 512), mbps, micros), options);
        let name = format!("{name}, deferred");
        conformance::check(&name, &|| paced(deferred(memory(64 << 20, 512)), mbps, micros), options);
    }
}

#[test]
fn stacks() {
    let options = Options { rounds: effort(20, 60), thread_rounds: effort(20, 60), ..conformance_options() };
    let make = || deferred(paced(bad(memory(64 << 20, 4096)), 8192, 10));
    conformance::check("deferred, paced, with bad blocks, in memory", &make, options);
    let make = || bad(paced(paced(memory(64 << 20, 512), 8192, 10), 4096, 0));
    conformance::check("bad blocks over two paces", &make, options);
}
