//! Zone reports, zone operations and their errors.

use std::sync::Arc;

use freestone_core::device::Error;
use freestone_drive::zone::{Config, StateLocation, Zones};
use freestone_ram::ram::{Config as RamConfig, Ram};
use rustix::io::Errno;

use super::{
    CAPACITY, EIO, READ, WRITE, ZONE, ZONES, append, code, condition, config, data, export, options,
    try_start, zone, zone_type, zones,
};
use crate::device_thread::StartError;
use crate::export::{MAX_REQUEST_BYTES, Options};
use crate::fake::{Driver, PATIENCE};
use crate::format::zones::UnsupportedZones;
use crate::kernel::abi::{control, feature, op, param};

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
    assert_eq!(crate::format::task::result_of(error), -109);
}
