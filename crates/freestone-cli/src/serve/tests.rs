//! Tests of `serve`.

use std::panic::{AssertUnwindSafe, catch_unwind};

use freestone_nbd::{Address, CONNECTION_MEMORY_BYTES, Limits};

use super::plan::Plan;
use super::{MAX_CONNECTIONS_HELP, Running};
use crate::access::ServerAccess;
use crate::declared::DeclaredDevice;
use crate::events::Events;
use crate::tls::Tls;

#[test]
fn panic_of_running_server_removes_sockets() {
    let dir = tempfile::tempdir().unwrap();
    let (nbd, control) = (dir.path().join("n"), dir.path().join("c"));
    let plan = Plan {
        devices: vec![DeclaredDevice::word("n=null,size=1M".parse().unwrap())],
        addresses: vec![Address::Unix(nbd.clone())],
        sockets: Vec::new(),
        control: Some(control.clone()),
        control_read_only: None,
        access: ServerAccess::default(),
        allow: None,
        tls: Tls::default(),
        limits: Limits::default(),
        ublk: false,
        state: None,
        metrics: None,
        page: None,
        private: None,
    };
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let _running = Running::start(plan, &Events::listen().unwrap()).unwrap();
        assert!(nbd.exists() && control.exists());
        panic!("on purpose");
    }));
    assert_eq!(outcome.unwrap_err().downcast_ref::<&str>(), Some(&"on purpose"));
    assert!(!nbd.exists() && !control.exists());
}

#[test]
fn help_states_default_and_memory_of_connections() {
    let (most, memory) = (Limits::default().max_connections, CONNECTION_MEMORY_BYTES.div_ceil(1 << 20));
    assert!(MAX_CONNECTIONS_HELP.contains(&format!("{memory} MiB of buffers [default: {most}]")));
}
