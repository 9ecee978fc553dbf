//! Checks that dropped NBD devices leave no thread or descriptor. The test is a separate program,
//! because it counts the threads and descriptors of the process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_core::device::{Blocking as _, Flags};
use freestone_nbd::{Address, ExportOptions, Limits, Server};
use freestone_nbd_client::{Config, Nbd};
use freestone_testkit::Model;

fn counts() -> (usize, usize) {
    let of = |path: &str| std::fs::read_dir(path).unwrap().count();
    (of("/proc/self/task"), of("/proc/self/fd"))
}

fn round(lose: bool) {
    let dir = tempfile::tempdir().unwrap();
    let address = Address::Unix(dir.path().join("s"));
    let server = Server::new(Limits::default());
    server.listen(&address).unwrap();
    let disk = Arc::new(Model::new(1 << 20, 512));
    server.publish(&address, "disk", disk, ExportOptions::default()).unwrap();
    let config =
        Config { timeout: Duration::from_secs(1), ..Config::new(address.uri("disk").parse().unwrap()) };
    let device = Nbd::open(&config).unwrap();
    device.write_at(0, &[1; 4096], Flags::empty()).unwrap();
    if lose {
        server.cut_connections_during("disk", || {});
        device.write_at(0, &[1; 4096], Flags::empty()).unwrap();
        drop(server);
        assert!(device.read_at(0, &mut [0; 512]).is_err());
    }
}

/// Opens and drops several devices. Returns an error if the process then has more threads or
/// descriptors than before.
fn nothing_is_left() -> Result<(), String> {
    let before = counts();
    for n in 0..12 {
        round(n % 6 == 0);
    }
    let end = Instant::now() + Duration::from_secs(20);
    while counts() != before {
        // Threads of dropped servers end a short time later.
        if Instant::now() >= end {
            return Err(format!("{:?}, and {before:?} before", counts()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

#[test]
fn dropped_devices_leave_no_thread_or_descriptor() {
    // The first rounds also create threads and descriptors that the process keeps.
    round(true);
    round(false);
    // ThreadSanitizer starts a symbolizer with pipes at its first suppressed report, so the first
    // check may fail. A leak of devices would fail the second check, too.
    if let Err(first) = nothing_is_left() {
        nothing_is_left().unwrap_or_else(|second| panic!("{first}; then {second}"));
    }
}
