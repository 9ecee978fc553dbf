//! Devices of users without privileges.

use super::*;
use crate::fake::OWNER;
use crate::owner::{OwnerError, owner};

/// A driver that a user without privileges asks.
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
fn a_user_names_the_character_device_in_each_command() {
    let driver = of_user();
    let export = start(&driver, ram(), options());
    round_trip(&driver);
    assert_eq!(owner(&driver, "ublkb7").unwrap(), Some(OWNER));
    export.resize().unwrap();
    assert_eq!(driver.state().sectors, SIZE / 512);
    driver.state().claimed = true;
    assert!(export.try_end(PATIENCE).is_err());
    driver.state().claimed = false;
    assert!(export.try_end(PATIENCE).unwrap());
    assert!(driver.state().info.is_none());
}

#[test]
fn root_gets_a_device_of_its_own_kind() {
    let (driver, export) = export(ram());
    assert_eq!(owner(&driver, "ublkc7").unwrap(), None);
    let features = driver.state().info.unwrap().flags;
    assert_eq!(features & feature::UNPRIVILEGED_DEV, 0);
    assert!(export.end(PATIENCE));
}

#[test]
fn what_a_user_lacks_is_named() {
    let driver = of_user();
    driver.state().lacks = feature::UNPRIVILEGED_DEV;
    assert!(matches!(refused(&driver), StartError::Denied));

    let driver = of_user();
    driver.state().refused.insert(control::ADD_DEV, Errno::ACCESS);
    assert!(matches!(refused(&driver), StartError::TooMany));

    // Without the rule of udev the node stays root's, and so the device cannot be removed either.
    let driver = of_user();
    driver.state().not_given = true;
    let error = refused(&driver);
    assert!(matches!(&error, StartError::NotGiven(node) if node == "ublkc7"), "{error}");
    assert!(error.to_string().contains("udev rule"), "{error}");
    until(|| driver.has_come(control::DEL_DEV_ASYNC));
    assert!(driver.state().info.is_some());
}

#[test]
fn what_a_users_killed_server_left_is_removed() {
    let driver = of_user();
    assert!(start(&driver, ram(), options()).end(PATIENCE));
    let info = crate::abi::DevInfo {
        dev_id: ID,
        state: state::DEAD,
        flags: feature::UNPRIVILEGED_DEV,
        ublksrv_flags: mark(0x7fff_fffe),
        ..Default::default()
    };
    driver.state().info = Some(info);
    // Another user's is none of our business.
    driver.state().not_given = true;
    assert_eq!(ours::remove(driver.clone()).unwrap(), [0; 0]);
    assert!(matches!(owner(&driver, "ublkb7"), Err(OwnerError::Control { .. })));
    driver.state().not_given = false;
    assert_eq!(ours::remove(driver.clone()).unwrap(), [ID]);
    assert!(driver.state().info.is_none());
}

#[test]
fn a_node_that_is_none_of_these_is_refused() {
    let error = owner(&Driver::default(), "sda").unwrap_err();
    assert_eq!(error.to_string(), "sda: must be ublkcN or ublkbN");
}
