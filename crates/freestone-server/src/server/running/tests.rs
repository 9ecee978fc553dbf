//! Tests of a running server.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;

#[test]
fn panic_of_running_server_removes_sockets() {
    let dir = tempfile::tempdir().unwrap();
    let (nbd, control) = (dir.path().join("n"), dir.path().join("c"));
    let plan = Plan {
        devices: vec![DeclaredDevice::word("n=null,size=1M".parse().unwrap())],
        addresses: vec![Address::Unix(nbd.clone())],
        control: Some(control.clone()),
        ..Plan::default()
    };
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let _running = Running::start(plan, |_| {}, Arc::new(|_| {})).unwrap();
        assert!(nbd.exists() && control.exists());
        panic!("on purpose");
    }));
    assert_eq!(outcome.unwrap_err().downcast_ref::<&str>(), Some(&"on purpose"));
    assert!(!nbd.exists() && !control.exists());
}
