//! What is left of devices that are gone: no thread, no descriptor. A program of its own, as it counts
//! those of the process.

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
        server.restart("disk", || {});
        device.write_at(0, &[1; 4096], Flags::empty()).unwrap();
        drop(server);
        assert!(device.read_at(0, &mut [0; 512]).is_err());
    }
}

/// Whether as much is there after many rounds as before, a moment later.
fn nothing_is_left() -> Result<(), String> {
    let before = counts();
    for n in 0..12 {
        round(n % 6 == 0);
    }
    let end = Instant::now() + Duration::from_secs(20);
    while counts() != before {
        // Those of the servers that were dropped end a moment later.
        if Instant::now() >= end {
            return Err(format!("{:?}, and {before:?} before", counts()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

#[test]
fn no_thread_and_no_descriptor_is_left() {
    // What the process keeps is there after the first ones.
    round(true);
    round(false);
    // But for the pipes of ThreadSanitizer's symbolizer, which it starts at the first report that it
    // suppresses: what is left of devices is left by the next ones, too.
    if let Err(first) = nothing_is_left() {
        nothing_is_left().unwrap_or_else(|second| panic!("{first}; then {second}"));
    }
}
