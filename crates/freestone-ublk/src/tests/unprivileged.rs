//! Tests of unprivileged devices.

use super::*;
use crate::fake::OWNER;
use crate::owner::{OwnerError, device_owner};

/// Returns a driver whose caller has no privileges.
fn of_user() -> Driver {
    let driver = Driver::default();
    driver.state().is_user = true;
    driver
}

fn refused(driver: &Driver) -> StartError {
    let kernel = Arc::new(driver.clone());
    Export::with(kernel, START_DEADLINE, "disk", ram(), options()).unwrap_err()
}

#[test]
fn unprivileged_commands_carry_node_path() {
    let driver = of_user();
    let export = start(&driver, ram(), options());
    round_trip(&driver);
    assert_eq!(device_owner(&driver, "ublkb7").unwrap(), Some(OWNER));
    export.resize().unwrap();
    assert_eq!(driver.state().sectors, SIZE / 512);
    driver.state().claimed = true;
    assert!(export.try_shutdown(PATIENCE).is_err());
    driver.state().claimed = false;
    assert!(export.try_shutdown(PATIENCE).unwrap());
    assert!(driver.state().info.is_none());
}

#[test]
fn root_gets_privileged_device() {
    let (driver, export) = export(ram());
    assert_eq!(device_owner(&driver, "ublkc7").unwrap(), None);
    let features = driver.state().info.unwrap().flags;
    assert_eq!(features & feature::UNPRIVILEGED_DEV, 0);
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn unprivileged_start_error_names_cause() {
    let driver = of_user();
    driver.state().lacks = feature::UNPRIVILEGED_DEV;
    assert!(matches!(refused(&driver), StartError::PermissionDenied));

    let driver = of_user();
    driver.state().refused.insert(control::ADD_DEV, Errno::ACCESS);
    assert!(matches!(refused(&driver), StartError::DeviceLimit));

    // Without the udev rule the node belongs to root, so the device cannot be removed either.
    let driver = of_user();
    driver.state().not_given = true;
    let error = refused(&driver);
    assert!(matches!(&error, StartError::NodeNotOwned(node) if node == "ublkc7"), "{error}");
    assert!(error.to_string().contains("udev rule"), "{error}");
    wait_until(|| driver.has_received(control::DEL_DEV_ASYNC));
    assert!(driver.state().info.is_some());
}

#[test]
fn abandoned_unprivileged_device_is_removed() {
    let driver = of_user();
    assert!(start(&driver, ram(), options()).shutdown(PATIENCE));
    let info = crate::kernel::abi::DevInfo {
        dev_id: ID,
        state: state::DEAD,
        flags: feature::UNPRIVILEGED_DEV,
        ublksrv_flags: mark(0x7fff_fffe),
        ..Default::default()
    };
    driver.state().info = Some(info);
    // Devices of other users are ignored.
    driver.state().not_given = true;
    assert_eq!(stale_devices::remove(driver.clone()).unwrap(), [0; 0]);
    assert!(matches!(device_owner(&driver, "ublkb7"), Err(OwnerError::Control { .. })));
    driver.state().not_given = false;
    assert_eq!(stale_devices::remove(driver.clone()).unwrap(), [ID]);
    assert!(driver.state().info.is_none());
}

#[test]
fn owner_refuses_other_node_names() {
    let error = device_owner(&Driver::default(), "sda").unwrap_err();
    assert_eq!(error.to_string(), "sda: must be ublkcN or ublkbN");
}
