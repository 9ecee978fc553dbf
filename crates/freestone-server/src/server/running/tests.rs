//! Tests of a running server.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;
use crate::persistence::saves::SaveSchedule;

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

/// A thread that ends late may hold the service after the shutdown, which must not keep the next server from starting.
#[test]
fn shutdown_releases_state_of_held_service() {
    let dir = tempfile::tempdir().unwrap();
    let mut held = Vec::new();
    for is_dropped in [false, true, false] {
        let plan = Plan {
            devices: vec![DeclaredDevice::word("r=ram,disksize=1M,keep=yes".parse().unwrap())],
            state: Some(StateSettings {
                dir: dir.path().join("state"),
                saves: SaveSchedule::default(),
                apply: false,
                recoverable: false,
                has_file: false,
            }),
            ..Plan::default()
        };
        let keep = |service: &Arc<Service>| held.push(Arc::clone(service));
        let mut running = Running::start(plan, keep, Arc::new(|_| {})).unwrap();
        if is_dropped {
            continue;
        }
        let [flush, close] = [(); 2].map(|()| OwnedQueue::started("end").unwrap());
        let flushed = running.shutdown(&flush, || ()).recv().unwrap();
        assert_eq!(flushed.failed, 0);
        assert_eq!(running.close(&close, || (), flushed.end).recv(), Ok(0));
    }
    let late =
        held[0].records.put_all(held[0].records.state().unwrap().topology().devices().cloned().collect());
    assert!(late.unwrap_err().message.contains("the server has ended"));
}
