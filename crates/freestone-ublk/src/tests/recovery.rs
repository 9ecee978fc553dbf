//! Recovery of the block device of a server that has ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use freestone_core::device::Device;
use freestone_testkit::TestDevice;

use super::*;
use crate::kernel::control::RECOVERY_FEATURES;
use crate::recovery::{Recovery, RecoveryTag, WaitingDevices};
use crate::stale_devices::StaleDeviceError;

const TAG: RecoveryTag = RecoveryTag::new(0x1234_5678_9abc, 1);

/// A change of the waiting block device, and the device of the next server.
type Case<'a> = (&'a dyn Fn(&Driver), &'a dyn Fn() -> Arc<dyn Device>);

fn recoverable(waiting: Option<u32>) -> Options {
    Options { recovery: Some(Recovery { tag: TAG, waiting }), ..options() }
}

fn recover(driver: &Driver, device: Arc<dyn Device>) -> Result<Export, StartError> {
    Export::with(Arc::new(driver.clone()), START_DEADLINE, "disk", device, recoverable(Some(ID)))
}

/// Returns a driver with the waiting block device of a server that has ended, and its disk.
fn waiting() -> (Driver, Arc<Ram>) {
    let (driver, ram) = (Driver::default(), ram());
    let export = start(&driver, Arc::clone(&ram) as _, recoverable(None));
    assert_eq!(driver.io(WRITE, 0, 8, &pattern(1, 4096)).0, 4096);
    let driver = driver.kill();
    assert!(export.shutdown(PATIENCE));
    driver.state().log.clear();
    (driver, ram)
}

fn state_of(driver: &Driver) -> Option<u16> {
    driver.state().info.map(|info| info.state)
}

#[test]
fn next_server_gets_unanswered_requests() {
    let (driver, ram) = (Driver::default(), ram());
    let hung = Arc::new(TestDevice::over(Arc::clone(&ram)).with_manner(Manner::Held));
    let export = start(&driver, hung.clone(), Options { queues: 2, ..recoverable(None) });
    assert_eq!(driver.state().info.unwrap().flags & RECOVERY_FEATURES, RECOVERY_FEATURES);
    let data = pattern(2, 8192);
    let write = driver.submit(0, WRITE, 8, 16, &data);
    let read = driver.submit(1, READ, 0, 8, &[]);
    wait_until(|| hung.held().len() == 2);
    let driver = driver.kill();
    assert_eq!(state_of(&driver), Some(state::QUIESCED));
    // The former server executes a request that the next one gets, too.
    hung.release_all_backwards();
    drop(export);
    assert!(!driver.has_received(control::STOP_DEV) && !driver.has_received(control::DEL_DEV_ASYNC));
    let later = driver.submit(1, READ, 8, 16, &[]);
    assert!(!driver.is_done(0, write) && !driver.is_done(1, read) && !driver.is_done(1, later));

    let export = recover(&driver, ram).unwrap();
    assert_eq!((export.id(), state_of(&driver)), (ID, Some(state::LIVE)));
    assert_eq!(driver.wait(0, write).0, 8192);
    assert_eq!(driver.wait(1, read), (4096, vec![0; 4096]));
    assert_eq!(driver.wait(1, later).0, 8192);
    assert_eq!(driver.io(READ, 8, 16, &[]), (8192, data));
    round_trip(&driver);
    assert_eq!(driver.state().log.iter().filter(|command| **command == control::ADD_DEV).count(), 1);
    assert!(export.shutdown(PATIENCE));
    assert!(driver.has_received(control::STOP_DEV) && driver.state().info.is_none());
}

#[test]
fn block_device_that_is_left_is_served_to_the_end() {
    let (driver, ram) = waiting();
    let export = recover(&driver, Arc::clone(&ram) as _).unwrap();
    export.begin_leave();
    export.begin_shutdown();
    assert!(export.shutdown(PATIENCE));
    drop(export);
    round_trip(&driver);
    assert!(!driver.has_received(control::STOP_DEV));
    let driver = driver.kill();
    let export = recover(&driver, ram).unwrap();
    round_trip(&driver);
    assert!(export.shutdown(PATIENCE));
    export.begin_leave();
    assert!(driver.state().info.is_none());
}

#[test]
fn recovery_waits_until_the_former_server_is_gone() {
    let (driver, ram) = waiting();
    driver.state().still_open = 3;
    let export = recover(&driver, Arc::clone(&ram) as _).unwrap();
    let starts = |driver: &Driver| {
        driver.state().log.iter().filter(|command| **command == control::START_USER_RECOVERY).count()
    };
    assert_eq!(starts(&driver), 4);
    let driver = driver.kill();
    drop(export);
    driver.state().still_open = u32::MAX;
    let error = recover(&driver, Arc::clone(&ram) as _).unwrap_err();
    assert!(matches!(&error, StartError::Control(error) if error.errno == Errno::BUSY), "{error}");
    driver.state().still_open = 0;
    let _export = recover(&driver, ram).unwrap();
    assert_eq!(driver.io(READ, 0, 8, &[]), (4096, pattern(1, 4096)));
}

#[test]
fn failed_attempt_leaves_the_block_device() {
    let early = [control::GET_DEV_INFO2, control::GET_PARAMS, control::START_USER_RECOVERY];
    for command in early {
        let (driver, ram) = waiting();
        let request = driver.submit(0, READ, 0, 8, &[]);
        driver.state().refused.insert(command, Errno::IO);
        let error = recover(&driver, Arc::clone(&ram) as _).unwrap_err();
        assert!(matches!(&error, StartError::Control(error) if error.errno == Errno::IO), "{error}");
        assert_eq!((state_of(&driver), driver.is_done(0, request)), (Some(state::QUIESCED), false));
        driver.state().refused.clear();
        let _export = recover(&driver, ram).unwrap();
        assert_eq!(driver.wait(0, request), (4096, pattern(1, 4096)));
    }
    let (driver, ram) = waiting();
    driver.state().no_node = true;
    assert!(matches!(recover(&driver, Arc::clone(&ram) as _), Err(StartError::Node { .. })));
    driver.state().no_node = false;
    drop(recover(&driver, ram).unwrap());
}

#[test]
fn late_failure_fails_the_requests() {
    let with = |set: &dyn Fn(&Driver)| {
        let (driver, ram) = waiting();
        let request = driver.submit(0, READ, 0, 8, &[]);
        set(&driver);
        let error = recover(&driver, ram).unwrap_err();
        assert_eq!((state_of(&driver), driver.wait(0, request).0), (None, EIO));
        error
    };
    let refuse = |driver: &Driver| {
        driver.state().refused.insert(control::END_USER_RECOVERY, Errno::BUSY);
    };
    assert!(matches!(with(&refuse), StartError::Control(error) if error.command == "END_USER_RECOVERY"));
    assert!(matches!(with(&|driver| driver.state().no_fetch = true), StartError::Queue(_)));
}

#[test]
fn absent_or_foreign_block_device_is_not_recovered() {
    // The block device goes before its recovery, at its recovery, or has gone and its id is in use by another server.
    let gone = |driver: &Driver| driver.state().info = None;
    let goes = |driver: &Driver| driver.state().goes = true;
    let foreign = |driver: &Driver| {
        let other = RecoveryTag::new(1, 1).flags();
        driver.state().info.as_mut().unwrap().ublksrv_flags = other;
    };
    for (set, starts) in [(&gone as &dyn Fn(&Driver), false), (&goes, true), (&foreign, false)] {
        let (driver, ram) = waiting();
        set(&driver);
        let export = recover(&driver, ram).unwrap();
        assert_eq!(driver.has_received(control::START_USER_RECOVERY), starts);
        assert!(driver.has_received(control::ADD_DEV) && !driver.has_received(control::DEL_DEV_ASYNC));
        assert_eq!(driver.io(READ, 0, 8, &[]).1, pattern(1, 4096));
        assert!(export.shutdown(PATIENCE));
    }
}

#[test]
fn block_device_that_does_not_fit_is_removed() {
    let smaller = || Arc::new(TestDevice::over(ram()).shaped(|geometry| geometry.size = SIZE / 2)) as _;
    let cached = || Arc::new(TestDevice::over(ram()).shaped(|geometry| geometry.volatile_cache = true)) as _;
    let dead = |driver: &Driver| driver.state().info.as_mut().unwrap().state = state::DEAD;
    let read_only = |driver: &Driver| driver.state().params.as_mut().unwrap().basic.attrs = 1;
    let same = || ram() as Arc<dyn Device>;
    let cases: [Case<'_>; 4] = [(&|_| {}, &smaller), (&|_| {}, &cached), (&dead, &same), (&read_only, &same)];
    for (index, (set, device)) in cases.into_iter().enumerate() {
        let (driver, _) = waiting();
        let request = driver.submit(0, READ, 0, 8, &[]);
        set(&driver);
        let _export = recover(&driver, device()).unwrap();
        let log = driver.state().log.clone();
        let at = |command| log.iter().position(|found| *found == command).unwrap();
        assert!(at(control::DEL_DEV_ASYNC) < at(control::ADD_DEV), "case {index}");
        assert!(!driver.has_received(control::START_USER_RECOVERY), "case {index}");
        // The new block device of the fake driver has new queues.
        assert!(!driver.is_done(0, request), "case {index}");
    }
}

#[test]
fn disk_that_has_grown_announces_its_size() {
    let size = Arc::new(AtomicU64::new(SIZE / 2));
    let current = Arc::clone(&size);
    let device: Arc<dyn Device> = Arc::new(
        TestDevice::over(ram()).shaped(move |geometry| geometry.size = current.load(Ordering::SeqCst)),
    );
    let driver = Driver::default();
    let former = start(&driver, Arc::clone(&device), recoverable(None));
    let driver = driver.kill();
    drop(former);
    size.store(SIZE, Ordering::SeqCst);
    let export = recover(&driver, Arc::clone(&device)).unwrap();
    assert_eq!(driver.state().sectors, SIZE / 512);
    let driver = driver.kill();
    drop(export);
    // Older drivers keep the size.
    driver.state().info.as_mut().unwrap().flags &= !feature::UPDATE_SIZE;
    driver.state().params.as_mut().unwrap().basic.dev_sectors = 8;
    driver.state().log.clear();
    let _export = recover(&driver, device).unwrap();
    assert!(!driver.has_received(control::UPDATE_SIZE));
}

#[test]
fn recovery_needs_root_and_a_device_without_zones() {
    let features = |driver: &Driver| driver.state().info.unwrap();
    for set in [
        &(|state: &mut crate::fake::State| state.is_user = true) as &dyn Fn(&mut crate::fake::State),
        &|state| state.lacks = feature::USER_RECOVERY_REISSUE,
    ] {
        let driver = Driver::default();
        set(&mut driver.state());
        let export = start(&driver, ram(), recoverable(None));
        let info = features(&driver);
        assert_eq!(info.flags & RECOVERY_FEATURES, 0);
        assert_eq!(info.ublksrv_flags, mark(std::process::id()));
        // Leaving it to the next process is its end.
        export.begin_leave();
        assert!(export.shutdown(PATIENCE));
        assert_eq!(state_of(&driver), None);
    }
}

#[test]
fn waiting_devices_are_found_kept_and_removed() {
    let (driver, ram) = waiting();
    let request = driver.submit(0, READ, 0, 8, &[]);
    assert_eq!(stale_devices::remove(driver.clone()).unwrap(), [0; 0], "it waits for its server");
    let found = || WaitingDevices::with(Arc::new(driver.clone())).unwrap();
    let older = RecoveryTag::new(0x1234_5678_9abc, 2);
    let devices = found();
    assert_eq!((devices.get(TAG), devices.get(older)), (Some(ID), None));
    assert_eq!(devices.remove(RecoveryTag::new(5, 1), false).unwrap(), [0; 0], "another server's");
    assert_eq!(devices.remove(TAG, true).unwrap(), [0; 0]);
    let export = recover(&driver, ram).unwrap();
    assert!(matches!(devices.remove(TAG, false), Err(StaleDeviceError::Served(ID))));
    assert_eq!(driver.wait(0, request).0, 4096);
    let driver = driver.kill();
    drop(export);

    let devices = WaitingDevices::with(Arc::new(driver.clone())).unwrap();
    let request = driver.submit(0, READ, 0, 8, &[]);
    driver.state().refused.insert(control::DEL_DEV_ASYNC, Errno::IO);
    assert!(matches!(devices.remove(older, true), Err(StaleDeviceError::Control { id: ID, .. })));
    driver.state().refused.clear();
    // The content is of another generation.
    assert_eq!(devices.remove(older, true).unwrap(), [ID]);
    assert_eq!((driver.wait(0, request).0, devices.get(TAG)), (EIO, None));
    driver.state().refused.insert(control::GET_DEV_INFO2, Errno::IO);
    assert_eq!(devices.remove(TAG, false).unwrap(), [0; 0]);
}

#[test]
fn removal_spares_an_id_that_was_reused() {
    let (driver, _) = waiting();
    let devices = WaitingDevices::with(Arc::new(driver.clone())).unwrap();
    driver.state().info.as_mut().unwrap().ublksrv_flags = mark(1);
    assert_eq!(devices.remove(TAG, false).unwrap(), [ID]);
    assert!(!driver.has_received(control::DEL_DEV_ASYNC));
    driver.state().refused.insert(control::GET_DEV_INFO2, Errno::IO);
    assert!(WaitingDevices::with(Arc::new(driver.clone())).is_err());
    driver.state().is_absent = true;
    assert_eq!(WaitingDevices::with(Arc::new(driver.clone())).unwrap().get(TAG), None);
    driver.state().is_absent = false;
    driver.state().refused.insert(control::GET_DEV_INFO2, Errno::NODEV);
    assert_eq!(WaitingDevices::with(Arc::new(driver)).unwrap().get(TAG), None);
}
