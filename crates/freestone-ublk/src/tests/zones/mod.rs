//! Tests of zoned exports over the fake driver.

mod data;
mod operations;

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use freestone_core::budget::Budget;
use freestone_core::device::zoned::{AppendCompletion, ZoneOp, Zoned};
use freestone_core::device::{
    Buffer, Completion, Device, Extent, Flags, Geometry, IoBuf, Request, Result, TryResult, Zone,
};
use freestone_drive::zone::{Config, StateLocation, Zones};
use freestone_ram::ram::{Config as RamConfig, Ram};

use crate::device_thread::{START_DEADLINE, StartError};
use crate::export::{Export, Options};
use crate::fake::{Driver, PATIENCE};
use crate::kernel::abi::op;

/// Zone types and conditions, as numbered by the kernel.
mod zone_type {
    pub const CONVENTIONAL: u8 = 1;
    pub const SEQUENTIAL_REQUIRED: u8 = 2;
}
mod condition {
    pub const NOT_WRITE_POINTER: u8 = 0;
    pub const EMPTY: u8 = 1;
    pub const IMPLICIT_OPEN: u8 = 2;
    pub const EXPLICIT_OPEN: u8 = 3;
    pub const CLOSED: u8 = 4;
    pub const READ_ONLY: u8 = 13;
    pub const FULL: u8 = 14;
    pub const OFFLINE: u8 = 15;
}

const READ: u32 = op::READ as u32;
const WRITE: u32 = op::WRITE as u32;
const APPEND: u32 = op::ZONE_APPEND as u32;
const RESET: u32 = op::ZONE_RESET as u32;
const EIO: i32 = -5;
/// Zone size and capacity in sectors.
const ZONE: u64 = 8192;
const CAPACITY: u64 = 6144;
const ZONES: u64 = 16;

/// Two of sixteen zones are conventional; three may be open and five active.
fn config() -> Config {
    Config {
        zone_size: ZONE * 512,
        zone_capacity: CAPACITY * 512,
        zone_nr_conv: 2,
        zone_max_open: 3,
        zone_max_active: 5,
        ..Config::default()
    }
}

fn zones(config: Config) -> Zones {
    let ram = Ram::new(RamConfig { disksize: ZONES * ZONE * 512, ..RamConfig::default() }).unwrap();
    Zones::new(Arc::new(ram), config, StateLocation::Volatile, None).unwrap()
}

fn options() -> Options {
    Options { queues: 1, ..Options::new(Budget::new(0)) }
}

fn try_start(
    driver: &Driver,
    device: Arc<dyn Device>,
    options: Options,
) -> std::result::Result<Export, StartError> {
    Export::with(Arc::new(driver.clone()), START_DEADLINE, "disk", device, options)
}

fn export() -> (Driver, Export, Arc<Zones>) {
    let (driver, device) = (Driver::default(), Arc::new(zones(config())));
    let export = try_start(&driver, Arc::clone(&device) as _, options()).unwrap();
    (driver, export, device)
}

/// Zones whose operations block until the test sets `is_open`.
struct Slow {
    zones: Arc<Zones>,
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Slow {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            zones: Arc::new(zones(config())),
            is_open: Mutex::new(false),
            opened: Condvar::new(),
        })
    }

    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    fn wait(&self) {
        let mut is_open = self.is_open.lock().unwrap();
        while !*is_open {
            is_open = self.opened.wait(is_open).unwrap();
        }
    }
}

/// The device over [`Slow`], which is shared with the waiting threads.
struct SlowDevice(Arc<Slow>);

impl Device for SlowDevice {
    fn geometry(&self) -> Geometry {
        self.0.zones.geometry()
    }
    fn try_io(&self, _: &Request, _: Buffer<'_>) -> Result<TryResult> {
        Ok(TryResult::WouldBlock)
    }
    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let slow = Arc::clone(&self.0);
        std::thread::spawn(move || {
            slow.wait();
            slow.zones.submit(request, buffer, done);
        });
    }
    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.0.zones.extents(offset, len, row)
    }
    fn zoned(&self) -> Option<&dyn Zoned> {
        Some(self)
    }
}

impl Zoned for SlowDevice {
    fn report(&self, offset: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()> {
        self.0.zones.report(offset, row)
    }
    fn zone_op(&self, op: ZoneOp, offset: u64) -> Result<()> {
        self.0.wait();
        self.0.zones.zone_op(op, offset)
    }
    fn reset_all(&self) -> Result<()> {
        self.0.wait();
        self.0.zones.reset_all()
    }
    fn try_append(&self, _: u64, _: &[u8], _: Flags) -> Result<Option<u64>> {
        Ok(None)
    }
    fn submit_append(&self, offset: u64, data: IoBuf, flags: Flags, done: AppendCompletion) {
        if offset == 15 * ZONE * 512 {
            // Dropping `done` fails the append.
            return;
        }
        let slow = Arc::clone(&self.0);
        std::thread::spawn(move || {
            slow.wait();
            slow.zones.submit_append(offset, data, flags, done);
        });
    }
}

fn slow_export() -> (Driver, Export, Arc<Slow>) {
    let (driver, slow) = (Driver::default(), Slow::new());
    let export = try_start(&driver, Arc::new(SlowDevice(Arc::clone(&slow))), options()).unwrap();
    (driver, export, slow)
}

fn data(seed: u8, sectors: u32) -> Vec<u8> {
    (0..sectors as usize * 512).map(|at| (at / 512) as u8 ^ (at % 253) as u8 ^ seed).collect()
}

fn wait_until(condition: impl Fn() -> bool) {
    let end = std::time::Instant::now() + PATIENCE;
    while !condition() {
        assert!(std::time::Instant::now() < end, "timed out waiting for a condition");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs a request without data, and returns its result.
fn code(driver: &Driver, op: u8, sector: u64) -> i32 {
    driver.io(op.into(), sector, ZONE as u32, &[]).0
}

/// Appends to a zone, and returns the sector that was written.
fn append(driver: &Driver, zone: u64, data: &[u8]) -> std::result::Result<u64, i32> {
    let (result, place) = driver.io(APPEND, zone * ZONE, (data.len() / 512) as u32, data);
    if result < 0 { Err(result) } else { Ok(u64::from_ne_bytes(place.try_into().unwrap())) }
}

fn zone(driver: &Driver, zone: u64) -> (u8, u64) {
    let rows = driver.report().unwrap();
    let row = &rows[zone as usize];
    (row.condition, row.write_pointer - row.start)
}
