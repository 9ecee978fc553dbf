//! Tests of `serve`.

use std::panic::{AssertUnwindSafe, catch_unwind};

use freestone_nbd::{Address, CONNECTION_MEMORY_BYTES, Limits};

use super::plan::Plan;
use super::{MAX_CONNECTIONS_HELP, Running};
use crate::access::AccessOf;
use crate::declared::Declared;
use crate::tls::Tls;
use crate::until::Events;

#[test]
fn a_panic_leaves_no_socket() {
    let dir = tempfile::tempdir().unwrap();
    let (nbd, control) = (dir.path().join("n"), dir.path().join("c"));
    let plan = Plan {
        devices: vec![Declared::word("n=null,size=1M".parse().unwrap())],
        addresses: vec![Address::Unix(nbd.clone())],
        sockets: Vec::new(),
        control: Some(control.clone()),
        control_read_only: None,
        access: AccessOf::default(),
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
fn the_help_tells_the_default_and_the_memory() {
    let (most, memory) = (Limits::default().max_connections, CONNECTION_MEMORY_BYTES.div_ceil(1 << 20));
    assert!(MAX_CONNECTIONS_HELP.contains(&format!("{memory} MiB [default: {most}]")));
}
