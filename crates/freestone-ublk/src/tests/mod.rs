//! Tests of complete exports over the fake driver.

mod conformance;
mod life;
mod recovery;
mod serving;
mod unprivileged;
mod zones;

use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_core::budget::Budget;
use freestone_core::device::Device;
use freestone_ram::ram::{Config, Ram};
use freestone_testkit::{Manner, TestDevice};
use rustix::io::Errno;

use crate::device_thread::{START_DEADLINE, StartError};
use crate::export::{Export, Options};
use crate::fake::{Driver, ID, PATIENCE};
use crate::kernel::abi::{control, feature, op, op_flag, state};
use crate::kernel::control::mark;
use crate::stale_devices;

const READ: u32 = op::READ as u32;
const WRITE: u32 = op::WRITE as u32;
const EIO: i32 = -5;
const SIZE: u64 = 64 << 20;

fn ram() -> Arc<Ram> {
    Arc::new(Ram::new(Config { disksize: SIZE, ..Config::default() }).unwrap())
}

fn options() -> Options {
    Options { queues: 1, ..Options::new(Budget::new(0)) }
}

fn start(driver: &Driver, device: Arc<dyn Device>, options: Options) -> Export {
    Export::with(Arc::new(driver.clone()), START_DEADLINE, "disk", device, options).unwrap()
}

fn export(device: Arc<dyn Device>) -> (Driver, Export) {
    let driver = Driver::default();
    let export = start(&driver, device, options());
    (driver, export)
}

/// Returns a device that tries no request inline, and completes submitted requests in this manner.
fn deferred(manner: Manner) -> TestDevice<Ram> {
    TestDevice::over(ram()).shaped(|geometry| geometry.volatile_cache = true).with_manner(manner)
}

/// Returns a device that completes submitted requests on another thread after a delay.
fn delayed() -> TestDevice<Ram> {
    deferred(Manner::Delayed(Duration::from_millis(5)))
}

/// Returns a device whose requests the test completes.
fn silent() -> Arc<TestDevice<Ram>> {
    Arc::new(deferred(Manner::Held))
}

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 512) as u8 ^ (at % 251) as u8 ^ seed).collect()
}

fn wait_until(condition: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "timed out waiting for a condition");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn round_trip(driver: &Driver) {
    for (seed, sectors) in [(1, 8), (2, 1), (3, 1024), (4, 7)] {
        let data = pattern(seed, sectors * 512);
        assert_eq!(driver.io(WRITE, 16, sectors as u32, &data).0, data.len() as i32);
        assert_eq!(driver.io(READ, 16, sectors as u32, &[]), (data.len() as i32, data));
    }
    let data = pattern(5, 8192);
    assert_eq!(driver.io(WRITE | op_flag::FUA, 0, 16, &data).0, 8192);
    assert_eq!(driver.io(op::FLUSH.into(), 0, 0, &[]).0, 0);
    assert_eq!(driver.io(op::WRITE_ZEROES.into(), 0, 8, &[]).0, 0);
    assert_eq!(driver.io(READ, 0, 8, &[]), (4096, vec![0; 4096]));
    assert_eq!(driver.io(READ, 8, 8, &[]), (4096, data[4096..].to_vec()));
    assert_eq!(driver.io(op::DISCARD.into(), 8, 8, &[]).0, 0);
}
