//! The life of an export: start, claims, holds, resizes, and its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use freestone_core::device::Device;
use freestone_testkit::TestDevice;
use rustix::io::Errno;

use super::{EIO, READ, WRITE, export, options, ram, round_trip, silent, start, wait_until};
use crate::device_thread::{START_DEADLINE, StartError};
use crate::export::{Export, InUse, Options, ResizeError};
use crate::fake::{Driver, ID, PATIENCE};
use crate::kernel::abi::{control, feature, state};
use crate::kernel::control::mark;
use crate::stale_devices;

#[test]
fn end_fails_requests_of_hung_device() {
    let device = silent();
    let (driver, export) = export(device.clone());
    let tickets: Vec<_> = (0..3).map(|at| driver.submit(0, READ, at * 8, 8, &[])).collect();
    wait_until(|| device.held().len() == 3);
    let began = Instant::now();
    assert!(!export.shutdown(Duration::from_millis(50)));
    assert!(began.elapsed() < PATIENCE / 2);
    for ticket in tickets {
        assert_eq!(driver.wait(0, ticket).0, EIO);
    }
    // The kernel has removed the device; the device thread ends when the device completes.
    driver.wait_for(|state| state.info.is_none().then_some(()));
    assert!(!export.shutdown(Duration::ZERO));
    device.release_all_backwards();
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn start_with_hung_device_times_out() {
    let device = silent();
    let driver = Driver::default();
    driver.state().scans = true;
    // The deadline is long enough for the queue to start.
    let (deadline, options) = (Duration::from_secs(2), Options { depth: 1, ..options() });
    let started = Export::with(Arc::new(driver.clone()), deadline, "disk", device.clone(), options);
    assert!(matches!(started, Err(StartError::Deadline)));
    driver.wait_for(|state| state.info.is_none().then_some(()));
    assert_eq!(device.held().len(), 1);
}

#[test]
fn failed_start_removes_device() {
    let device: Arc<dyn Device> = ram();
    for command in [control::GET_FEATURES, control::ADD_DEV, control::SET_PARAMS, control::START_DEV] {
        let driver = Driver::default();
        driver.state().refused.insert(command, Errno::BUSY);
        let started =
            Export::with(Arc::new(driver.clone()), START_DEADLINE, "disk", Arc::clone(&device), options());
        let Err(StartError::Control(error)) = started else { panic!("{started:?}") };
        assert_eq!(error.errno, Errno::BUSY);
        assert_eq!(driver.has_received(control::DEL_DEV_ASYNC), driver.has_received(control::SET_PARAMS));
        let state = driver.state();
        assert!(state.info.is_none() && state.lanes.iter().all(|lane| !lane.is_open));
    }
    let with = |set: &dyn Fn(&Driver)| {
        let driver = Driver::default();
        set(&driver);
        let device = Arc::clone(&device);
        let error = Export::with(Arc::new(driver.clone()), START_DEADLINE, "disk", device, options());
        assert!(driver.state().info.is_none());
        error.unwrap_err()
    };
    let error = with(&|driver| driver.state().is_absent = true);
    assert!(error.to_string().contains("modprobe ublk_drv"), "{error}");
    let refuse = |command, errno| {
        with(&move |driver: &Driver| {
            driver.state().refused.insert(command, errno);
        })
    };
    assert!(matches!(refuse(control::GET_FEATURES, Errno::OPNOTSUPP), StartError::DriverTooOld));
    assert!(matches!(refuse(control::GET_FEATURES, Errno::PERM), StartError::PermissionDenied));
    assert!(matches!(with(&|driver| driver.state().no_node = true), StartError::Node { .. }));
    assert!(matches!(with(&|driver| driver.state().no_fetch = true), StartError::Queue(_)));
    let old = with(&|driver| driver.state().lacks = feature::CMD_IOCTL_ENCODE);
    assert!(matches!(old, StartError::DriverTooOld));
}

#[test]
fn older_driver_works_without_new_features() {
    let driver = Driver::default();
    {
        let mut state = driver.state();
        state.lacks = feature::UPDATE_SIZE | feature::SAFE_STOP_DEV;
        state.refused.insert(control::DEL_DEV_ASYNC, Errno::OPNOTSUPP);
    }
    let export = start(&driver, ram(), options());
    assert!(matches!(export.resize(), Err(ResizeError::Unsupported)));
    driver.state().claimed = true;
    assert!(export.is_connected());
    assert_eq!(export.try_shutdown(PATIENCE), Err(InUse));
    driver.state().claimed = false;
    assert_eq!(export.try_shutdown(PATIENCE), Ok(true));
    assert!(driver.has_received(control::DEL_DEV) && !driver.has_received(control::TRY_STOP_DEV));
}

#[test]
fn try_end_fails_while_device_is_in_use() {
    let (driver, export) = export(ram());
    driver.state().claimed = true;
    assert_eq!(export.try_shutdown(PATIENCE), Err(InUse));
    round_trip(&driver);
    driver.state().claimed = false;
    assert_eq!(export.try_shutdown(PATIENCE), Ok(true));
    assert_eq!(export.try_shutdown(PATIENCE), Ok(true));
}

#[test]
fn claim_keeps_others_out_until_it_ends() {
    let (driver, export) = export(ram());
    let claim = export.claim().unwrap();
    // Copied first, because the driver locks its state to complete requests of the export.
    let is_claimed = driver.state().claimed;
    assert!(is_claimed && export.is_connected());
    round_trip(&driver);
    claim.drop_cache().unwrap();
    let (is_claimed, cache_drops) = {
        let state = driver.state();
        (state.claimed, state.cache_drops)
    };
    assert_eq!((is_claimed, cache_drops), (false, 1));
    drop(export.claim().unwrap());
    assert!(!export.is_connected());
}

#[test]
fn claim_of_a_mounted_disk_names_the_mount() {
    let (driver, export) = export(ram());
    driver.state().claimed = true;
    let message = || export.claim().err().unwrap().to_string();
    assert!(message().starts_with("/dev/ublkb7 is mounted or in use"), "{}", message());
    driver.state().mounted_at = Some("/mnt".into());
    assert_eq!(message(), "/dev/ublkb7 is mounted at /mnt");
    driver.state().claimed = false;
}

#[test]
fn resize_updates_block_device_size() {
    let size = Arc::new(AtomicU64::new(1 << 20));
    let current = Arc::clone(&size);
    let device =
        TestDevice::over(ram()).shaped(move |geometry| geometry.size = current.load(Ordering::SeqCst));
    let (driver, export) = export(Arc::new(device));
    assert_eq!(driver.state().sectors, 2048);
    assert_eq!(driver.io(READ, 2048, 8, &[]).0, -22);
    size.store(2 << 20, Ordering::SeqCst);
    export.resize().unwrap();
    assert_eq!(driver.state().sectors, 4096);
    assert_eq!(driver.io(READ, 2048, 8, &[]).0, 4096);
    export.begin_shutdown();
    assert!(matches!(export.resize(), Err(ResizeError::Gone)));
}

#[test]
fn cut_fails_requests_and_hold_delays_new_ones() {
    let device = silent();
    let (driver, export) = export(device.clone());
    let cut = driver.submit(0, WRITE, 0, 8, &[1; 4096]);
    wait_until(|| device.held().len() == 1);
    let held = export.hold();
    assert!(!held.wait_idle(Instant::now() + Duration::from_millis(30)), "the device has it");
    assert!(held.fail_requests());
    assert_eq!(driver.wait(0, cut).0, EIO);
    let later = driver.submit(0, READ, 0, 8, &[]);
    // The device's late completion must be ignored.
    device.release(0);
    assert!(held.wait_idle(Instant::now() + PATIENCE));
    export.replace(ram(), Arc::default());
    assert!(!driver.is_done(0, later));
    drop(held);
    assert_eq!(driver.wait(0, later), (4096, vec![0; 4096]));
    round_trip(&driver);
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn end_during_hold_fails_held_requests() {
    let (driver, export) = export(ram());
    let held = export.hold();
    let waits = driver.submit(0, READ, 0, 8, &[]);
    assert!(export.shutdown(Duration::from_millis(20)) || driver.state().info.is_none());
    assert_eq!(driver.wait(0, waits).0, EIO);
    drop(held);
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn external_stop_ends_export() {
    let (driver, export) = export(ram());
    let header = crate::kernel::abi::CtrlCmd::new(ID, 0);
    crate::kernel::Kernel::command(&driver, control::STOP_DEV, header, &mut []).unwrap();
    driver.wait_for(|state| state.info.is_none().then_some(()));
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn abandoned_device_is_removed() {
    let driver = Driver::default();
    let export = start(&driver, ram(), options());
    assert_eq!(stale_devices::remove(driver.clone()).unwrap(), [0; 0], "it is served");
    assert!(export.shutdown(PATIENCE));
    let mut info = crate::kernel::abi::DevInfo { dev_id: ID, state: state::DEAD, ..Default::default() };
    driver.state().info = Some(info);
    assert_eq!(stale_devices::remove(driver.clone()).unwrap(), [0; 0], "it is not ours");
    // A process id that no process can have.
    info.ublksrv_flags = mark(0x7fff_fffe);
    driver.state().info = Some(info);
    assert_eq!(stale_devices::remove(driver.clone()).unwrap(), [ID]);
    assert!(driver.state().info.is_none());
    driver.state().refused.insert(control::GET_DEV_INFO2, Errno::IO);
    driver.state().info = Some(info);
    assert!(stale_devices::remove(driver).is_err());
}
