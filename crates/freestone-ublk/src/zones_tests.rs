//! Tests of zoned exports over the fake driver.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use freestone_core::budget::{Budget, DEFAULT_BYTES};
use freestone_core::device::zoned::{AppendCompletion, ZoneOp, Zoned};
use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, Flags, Geometry, IoBuf, Request, Result, TryResult, Zone,
};
use freestone_drive::zone::{Config, StateLocation, Zones};
use freestone_ram::ram::{Config as RamConfig, Ram};
use rustix::io::Errno;

use crate::abi::{control, feature, op, param};
use crate::device_thread::{START_DEADLINE, StartError};
use crate::export::{Export, MAX_REQUEST_BYTES, Options};
use crate::fake::{Driver, PATIENCE};
use crate::zones::UnsupportedZones;

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

#[test]
fn start_reports_zones() {
    let (driver, export, device) = export();
    {
        let state = driver.state();
        let (info, params) = (state.info.unwrap(), state.params.unwrap());
        let both = feature::ZONED | feature::USER_COPY;
        assert_eq!(info.flags & both, both);
        assert_eq!(params.types, param::BASIC | param::ZONED);
        assert_eq!((params.zoned.max_open_zones, params.zoned.max_active_zones), (3, 5));
        assert_eq!(state.zones.len() as u64, ZONES);
        let kinds: Vec<_> =
            state.zones[..3].iter().map(|row| (row.kind, row.condition, row.capacity)).collect();
        let conventional = (zone_type::CONVENTIONAL, condition::NOT_WRITE_POINTER, ZONE);
        let sequential = (zone_type::SEQUENTIAL_REQUIRED, condition::EMPTY, CAPACITY);
        assert_eq!(kinds, [conventional, conventional, sequential]);
    }
    device.set_read_only(4 * ZONE * 512).unwrap();
    device.set_offline(5 * ZONE * 512).unwrap();
    assert_eq!(zone(&driver, 4), (condition::READ_ONLY, ZONE));
    assert_eq!(zone(&driver, 5), (condition::OFFLINE, ZONE));
    assert_eq!(driver.io(READ, 4 * ZONE, 8, &[]).0, 4096);
    assert_eq!(driver.io(READ, 5 * ZONE, 8, &[]).0, EIO);
    assert_eq!(append(&driver, 4, &data(0, 8)), Err(EIO));
    assert_eq!(code(&driver, op::ZONE_RESET, 5 * ZONE), EIO);
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn zone_operations_change_conditions() {
    let (driver, export, _) = export();
    let (first, second) = (data(1, 64), data(2, 8));
    let start = 2 * ZONE;
    assert_eq!(driver.io(WRITE, start, 64, &first).0, 64 * 512);
    assert_eq!(driver.io(WRITE, start, 64, &first).0, EIO, "not at the write pointer");
    assert_eq!(append(&driver, 2, &second), Ok(start + 64));
    assert_eq!(driver.io(READ, start, 64, &[]), (64 * 512, first));
    assert_eq!(driver.io(READ, start + 64, 8, &[]), (4096, second.clone()));
    assert_eq!(driver.io(READ, start + 72, 8, &[]), (4096, vec![0xff; 4096]));
    assert_eq!(zone(&driver, 2), (condition::IMPLICIT_OPEN, 72));
    // Conventional zones accept any order and writes across their boundary.
    assert_eq!(driver.io(WRITE, ZONE - 8, 16, &data(3, 16)).0, 8192);
    assert_eq!(driver.io(WRITE, ZONE - 16, 8, &second).0, 4096);
    assert_eq!(driver.io(READ, ZONE - 8, 16, &[]), (8192, data(3, 16)));
    assert_eq!(append(&driver, 0, &second), Err(EIO));
    assert_eq!(driver.io(op::FLUSH.into(), 0, 0, &[]).0, 0);
    assert_eq!(driver.io(op::WRITE_ZEROES.into(), start + 72, 8, &[]).0, 0);
    assert_eq!(driver.io(op::DISCARD.into(), start, 8, &[]).0, 0);

    assert_eq!(code(&driver, op::ZONE_CLOSE, start), 0);
    assert_eq!(zone(&driver, 2), (condition::CLOSED, 80));
    assert_eq!(code(&driver, op::ZONE_OPEN, start), 0);
    assert_eq!(zone(&driver, 2), (condition::EXPLICIT_OPEN, 80));
    assert_eq!(code(&driver, op::ZONE_FINISH, start), 0);
    assert_eq!(zone(&driver, 2), (condition::FULL, ZONE));
    assert_eq!(append(&driver, 2, &second), Err(EIO));
    assert_eq!(code(&driver, op::ZONE_RESET, start), 0);
    assert_eq!(zone(&driver, 2), (condition::EMPTY, 0));
    for zone in 4..7 {
        append(&driver, zone, &second).unwrap();
    }
    assert_eq!(code(&driver, op::ZONE_RESET_ALL, 0), 0);
    for number in 2..ZONES {
        assert_eq!(zone(&driver, number), (condition::EMPTY, 0));
    }
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn zone_limit_errors_have_distinct_errnos() {
    let (driver, _export, _) = export();
    for zone in 2..5 {
        assert_eq!(code(&driver, op::ZONE_OPEN, zone * ZONE), 0);
    }
    let open = -Errno::TOOMANYREFS.raw_os_error();
    assert_eq!(code(&driver, op::ZONE_OPEN, 5 * ZONE), open);
    assert_eq!(append(&driver, 5, &data(0, 8)), Err(open));
    assert_eq!(driver.io(WRITE, 5 * ZONE, 8, &data(0, 8)).0, open);
    for zone in 2..7 {
        assert_eq!(append(&driver, zone, &data(0, 8)), Ok(zone * ZONE));
        assert_eq!(code(&driver, op::ZONE_CLOSE, zone * ZONE), 0);
    }
    let active = -Errno::OVERFLOW.raw_os_error();
    assert_eq!(append(&driver, 7, &data(0, 8)), Err(active));
    assert_eq!(driver.io(WRITE, 7 * ZONE, 8, &data(0, 8)).0, active);
    assert_eq!(code(&driver, op::ZONE_FINISH, 2 * ZONE), 0);
    assert_eq!(append(&driver, 7, &data(0, 8)), Ok(7 * ZONE));
}

#[test]
fn small_requests_take_few_system_calls() {
    const REQUESTS: u64 = 9984;
    let driver = Driver::default();
    let device = Arc::new(zones(Config { zone_capacity: 0, ..config() }));
    let _export = try_start(&driver, device, Options { depth: 32, ..options() }).unwrap();
    let each = |op| {
        let before = driver.state().lanes[0].enters;
        let requests = (0..REQUESTS).map(|number| (op, 2 * ZONE + number * 8, 8));
        for ticket in driver.submit_all(0, requests) {
            assert_eq!(driver.wait(0, ticket).0, 4096);
        }
        (driver.state().lanes[0].enters - before) as f64 / REQUESTS as f64
    };
    // The writes are in zone order, so they cannot fail.
    let (writes, reads) = (each(WRITE), each(READ));
    assert!(writes <= 0.1 && reads <= 0.1, "{writes} calls a write, {reads} a read");
}

#[test]
fn zone_writes_begin_in_arrival_order() {
    let (driver, _export, _) = export();
    driver.state().holds_fetched = true;
    let write = |at: u8| driver.submit(0, WRITE, 2 * ZONE + u64::from(at) * 8, 8, &data(at, 8));
    let tickets: Vec<_> = (0..20).map(write).collect();
    wait_until(|| driver.state().lanes[0].fetched.len() == 20);
    driver.deliver_fetched(0, 5);
    // A read does not wait for the writes. When it is done, the five delivered fetches have been
    // processed.
    assert_eq!(driver.io(READ, 0, 8, &[]).0, 4096);
    assert!(tickets.iter().all(|ticket| !driver.is_done(0, *ticket)));
    driver.deliver_fetched(0, 20);
    for (at, ticket) in tickets.into_iter().enumerate() {
        assert_eq!(driver.wait(0, ticket).0, 4096, "{at}");
    }
    for at in 0..20 {
        assert_eq!(driver.io(READ, 2 * ZONE + u64::from(at) * 8, 8, &[]).1, data(at, 8));
    }
}

#[test]
fn failed_data_copy_fails_request() {
    let (driver, export, _) = export();
    let start = 3 * ZONE;
    for fault in [100, 0, -14, 4095] {
        driver.state().copies.push_back(fault);
        assert_eq!(driver.io(WRITE, start, 8, &data(1, 8)).0, EIO, "{fault}");
        driver.state().copies.push_back(fault);
        assert_eq!(append(&driver, 3, &data(1, 8)), Err(EIO), "{fault}");
    }
    assert_eq!(zone(&driver, 3), (condition::EMPTY, 0));
    assert_eq!(driver.io(WRITE, start, 8, &data(1, 8)).0, 4096);
    for fault in [100, 0, -14, 4095] {
        driver.state().copies.push_back(fault);
        assert_eq!(driver.io(READ, start, 8, &[]).0, EIO, "{fault}");
        if fault < 320 {
            driver.state().copies.push_back(fault);
            assert_eq!(driver.report(), Err(Errno::IO), "{fault}");
        }
    }
    assert_eq!(driver.io(READ, start, 8, &[]), (4096, data(1, 8)));
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn invalid_zone_requests_fail() {
    let (driver, export, _) = export();
    let io = |op: u8, sector, sectors| driver.io(op.into(), sector, sectors, &[]).0;
    for op in [4, 6, 9, 16, 17, 200] {
        assert_eq!(io(op, 0, 8), -95, "{op}");
    }
    let beyond = ZONES * ZONE;
    for op in [op::ZONE_OPEN, op::ZONE_CLOSE, op::ZONE_FINISH, op::ZONE_RESET, op::REPORT_ZONES] {
        assert_eq!(io(op, beyond, 8), -22, "{op}");
        assert_eq!(io(op, u64::MAX / 512, 8), -22, "{op}");
        assert_eq!(io(op, u64::MAX, 8), -22, "{op}");
    }
    for op in [op::ZONE_OPEN, op::ZONE_RESET, op::ZONE_APPEND] {
        assert_eq!(io(op, 2 * ZONE + 8, 8), -22, "{op}: within a zone");
    }
    assert_eq!(io(op::REPORT_ZONES, 0, 0), -22);
    assert_eq!(io(op::ZONE_APPEND, 2 * ZONE, 0), -22);
    assert_eq!(io(op::ZONE_APPEND, 2 * ZONE, MAX_REQUEST_BYTES / 512 + 1), -22);
    assert_eq!(io(op::WRITE, beyond, 8), -22);
    // A report that starts inside a zone and requests more zones than exist.
    let (_, rows) = driver.io(op::REPORT_ZONES.into(), 14 * ZONE + 9, 4, &[]);
    assert!(rows[..2 * 64].chunks(64).all(|row| row[..16] != [0; 16]) && rows[2 * 64..] == [0; 2 * 64]);
    assert_eq!(append(&driver, 2, &data(0, 8)), Ok(2 * ZONE));
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn cut_during_data_fetch_writes_nothing() {
    let (driver, export, device) = export();
    driver.state().holds_fetched = true;
    let cut: Vec<_> = (0..3).map(|at| driver.submit(0, WRITE, 2 * ZONE + at * 8, 8, &data(1, 8))).collect();
    wait_until(|| driver.state().lanes[0].fetched.len() == 3);
    let held = export.hold();
    assert!(held.fail_requests());
    assert!(held.wait_idle(std::time::Instant::now() + PATIENCE), "the device has nothing");
    driver.deliver_fetched(0, 20);
    for ticket in cut {
        assert_eq!(driver.wait(0, ticket).0, EIO);
    }
    // A request that arrives while requests are held is neither fetched nor begun.
    let waits = driver.submit(0, WRITE, 2 * ZONE, 8, &data(2, 8));
    std::thread::sleep(Duration::from_millis(20));
    assert!(driver.state().lanes[0].fetched.is_empty() && !driver.is_done(0, waits));
    driver.state().holds_fetched = false;
    let mut first = None;
    device.report(2 * ZONE * 512, &mut |zone| first.replace(zone).is_some()).unwrap();
    assert_eq!(first.unwrap().write_pointer, 2 * ZONE * 512);
    drop(held);
    assert_eq!(driver.wait(0, waits).0, 4096);
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn write_fetched_during_hold_begins_after_release() {
    let (driver, export, _) = export();
    driver.state().holds_fetched = true;
    let write = driver.submit(0, WRITE, 2 * ZONE, 8, &data(1, 8));
    wait_until(|| driver.state().lanes[0].fetched.len() == 1);
    let held = export.hold();
    driver.deliver_fetched(0, 20);
    std::thread::sleep(Duration::from_millis(20));
    assert!(!driver.is_done(0, write));
    drop(held);
    assert_eq!(driver.wait(0, write).0, 4096);
}

#[test]
fn reset_runs_alongside_appends() {
    let (driver, export, slow) = slow_export();
    let all: Vec<_> = (0..12)
        .map(|at| {
            let is_append = at % 4 != 3;
            let data = if is_append { data(1, 8) } else { Vec::new() };
            let sectors = if is_append { 8 } else { ZONE as u32 };
            driver.submit(0, if is_append { APPEND } else { RESET }, 2 * ZONE, sectors, &data)
        })
        .collect();
    std::thread::sleep(Duration::from_millis(20));
    assert!(all.iter().all(|ticket| !driver.is_done(0, *ticket)));
    slow.open();
    let mut places = Vec::new();
    for (at, ticket) in all.into_iter().enumerate() {
        let (result, place) = driver.wait(0, ticket);
        if at % 4 == 3 {
            assert_eq!((result, place.len()), (0, 0));
        } else {
            assert_eq!(result, 4096);
            places.push(u64::from_ne_bytes(place.try_into().unwrap()));
        }
    }
    assert!(places.contains(&(2 * ZONE)) && places.iter().all(|place| (2 * ZONE..3 * ZONE).contains(place)));
    // The device kept the buffers of the appends; each tag must have a buffer again.
    for at in 0..200 {
        assert_eq!(append(&driver, 6, &data(at, 8)), Ok(6 * ZONE + u64::from(at) * 8));
        assert_eq!(driver.io(READ, 6 * ZONE + u64::from(at) * 8, 8, &[]), (4096, data(at, 8)));
    }
    assert_eq!(append(&driver, 15, &data(1, 8)), Err(-108), "the device forgets it");
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn end_fails_requests_of_hung_zones() {
    let (driver, export, slow) = slow_export();
    let reset = driver.submit(0, RESET, 2 * ZONE, ZONE as u32, &[]);
    let append = driver.submit(0, APPEND, 3 * ZONE, 8, &data(1, 8));
    let finish = driver.submit(0, op::ZONE_FINISH.into(), 4 * ZONE, ZONE as u32, &[]);
    std::thread::sleep(Duration::from_millis(20));
    assert!(!export.shutdown(Duration::from_millis(50)));
    for ticket in [reset, append, finish] {
        assert_eq!(driver.wait(0, ticket).0, EIO);
    }
    driver.wait_for(|state| state.info.is_none().then_some(()));
    slow.open();
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn read_only_zones_are_reported_but_not_changed() {
    let driver = Driver::default();
    let device = Arc::new(zones(config()));
    let _export = try_start(&driver, device, Options { read_only: true, ..options() }).unwrap();
    assert_eq!(driver.io(READ, 2 * ZONE, 8, &[]).0, 4096);
    assert_eq!(driver.io(WRITE, 2 * ZONE, 8, &data(1, 8)).0, -1);
    assert_eq!(append(&driver, 2, &data(1, 8)), Err(-1));
    for op in [op::ZONE_OPEN, op::ZONE_FINISH, op::ZONE_RESET, op::ZONE_RESET_ALL] {
        assert_eq!(code(&driver, op, 2 * ZONE), -1, "{op}");
    }
    assert_eq!(zone(&driver, 2), (condition::EMPTY, 0));
}

#[test]
fn many_large_requests_keep_data() {
    let (driver, export, _) = export();
    for round in 0..3_u8 {
        let start = (2 + u64::from(round)) * ZONE;
        let sectors = MAX_REQUEST_BYTES / 512;
        let tickets: Vec<_> = (0..6_u8)
            .map(|at| {
                let place = start + u64::from(at) * u64::from(sectors);
                driver.submit(0, WRITE, place, sectors, &data(round ^ at, sectors))
            })
            .collect();
        for ticket in tickets {
            assert_eq!(driver.wait(0, ticket).0, MAX_REQUEST_BYTES as i32);
        }
        let requests = (0..6).map(|at| (READ, start + at * u64::from(sectors), sectors));
        for (at, ticket) in driver.submit_all(0, requests).into_iter().enumerate() {
            assert_eq!(driver.wait(0, ticket).1, data(round ^ at as u8, sectors));
        }
    }
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn data_fetches_are_charged_to_budget() {
    let (driver, budget) = (Driver::default(), Budget::new(DEFAULT_BYTES));
    driver.state().holds_fetched = true;
    let options = Options { queues: 1, ..Options::new(Arc::clone(&budget)) };
    let export = try_start(&driver, Arc::new(zones(config())), options).unwrap();
    let sectors = MAX_REQUEST_BYTES / 512;
    // Writes to conventional zones, with more data than a queue may have in flight.
    let requests = (0..100).map(|at| (WRITE, at % 16 * u64::from(sectors), sectors));
    let tickets = driver.submit_all(0, requests);
    wait_until(|| driver.state().lanes[0].fetched.len() == 64);
    let held = 64 * u64::from(MAX_REQUEST_BYTES);
    assert!(budget.bytes().1 >= held && budget.bytes().1 <= 2 * held, "{:?}", budget.bytes());
    for ticket in tickets {
        wait_until(|| {
            driver.deliver_fetched(0, 7);
            driver.is_done(0, ticket)
        });
        assert_eq!(driver.wait(0, ticket).0, MAX_REQUEST_BYTES as i32);
    }
    assert!(export.shutdown(PATIENCE));
    assert_eq!(budget.bytes().1, 0);
}

#[test]
fn start_without_zone_support_fails() {
    let with = |set: &dyn Fn(&Driver)| {
        let driver = Driver::default();
        set(&driver);
        let error = try_start(&driver, Arc::new(zones(config())), options()).unwrap_err();
        assert!(driver.state().info.is_none());
        (driver, error)
    };
    for missing in [feature::ZONED, feature::USER_COPY] {
        let (driver, error) = with(&|driver| driver.state().lacks = missing);
        assert!(matches!(error, StartError::NoZones) && !driver.has_received(control::ADD_DEV));
        let (driver, error) = with(&|driver| driver.state().withholds = missing);
        assert!(matches!(error, StartError::NoZones) && driver.has_received(control::DEL_DEV_ASYNC));
    }
    let (_, error) = with(&|driver| driver.state().no_zones = true);
    assert!(error.to_string().contains("CONFIG_BLK_DEV_ZONED"), "{error}");
    let (driver, error) = with(&|driver| driver.state().is_user = true);
    assert!(
        matches!(error, StartError::UnprivilegedZones) && !driver.has_received(control::ADD_DEV),
        "{error}"
    );
    // The zone report at the start fails.
    let (_, error) = with(&|driver| driver.state().copies.push_back(-14));
    assert!(matches!(error, StartError::Control(error) if error.errno == Errno::IO), "{error}");

    let unfit = |config| {
        let driver = Driver::default();
        let error = try_start(&driver, Arc::new(zones(config)), options()).unwrap_err();
        assert!(driver.state().log.is_empty());
        let StartError::UnsupportedZones(unfit) = error else { panic!("{error}") };
        unfit
    };
    assert_eq!(unfit(Config { zone_append_max: 0, ..config() }), UnsupportedZones::NoAppend);
    let short = Config { zone_size: 64 << 20, zone_capacity: 0, ..config() };
    let ram = Ram::new(RamConfig { disksize: 72 << 20, ..RamConfig::default() }).unwrap();
    let device = Zones::new(Arc::new(ram), short, StateLocation::Volatile, None).unwrap();
    let error = try_start(&Driver::default(), Arc::new(device), options()).unwrap_err();
    assert!(error.to_string().contains("whole zones"), "{error}");
    let error = Error::ZoneTooManyOpen;
    assert_eq!(crate::task::result_of(error), -109);
}
