//! The examples that use an export without a server: their devices serve real clients.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use freestone::device::{Blocking as _, Device, Error, Flags, IoBuf, Request};
use freestone::ram::{Config, Ram};
use freestone_nbd::Address;
use freestone_nbd_client::{Config as ClientConfig, Nbd};
use freestone_testkit::ExportClient as _;
use freestone_testkit::vhost_user::{Machine, MachineConfig};

#[path = "../examples/own_device.rs"]
#[expect(dead_code, reason = "the test has its own main function")]
mod own_device;
#[path = "../examples/own_nbd.rs"]
#[expect(dead_code, reason = "the test has its own main function")]
mod own_nbd;

const PATIENCE: Duration = Duration::from_secs(60);
const BLOCK: usize = 4096;
const OFFSET: u64 = 7 << 20;

fn client(server: &freestone_nbd::Server) -> Nbd {
    let exports = server.exports();
    let [export] = &exports[..] else { panic!("{} exports", exports.len()) };
    Nbd::open(&ClientConfig::new(export.uri().parse().unwrap())).unwrap()
}

fn socket(dir: &Path) -> Address {
    Address::Unix(dir.join("nbd.sock"))
}

/// Checks a block of the example's device: each eight bytes are their own offset.
fn assert_offsets(block: &[u8]) {
    for (number, bytes) in (OFFSET..).step_by(8).zip(block.chunks_exact(8)) {
        assert_eq!(bytes, number.to_le_bytes());
    }
}

#[test]
fn own_nbd_serves_a_disk_of_the_program() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::new(Ram::new(Config { disksize: 64 << 20, ..Config::default() }).unwrap());
    let server = own_nbd::serve(Arc::clone(&disk), &socket(dir.path())).unwrap();
    client(&server).write_at(OFFSET, &[5; BLOCK], Flags::FUA).unwrap();
    let mut block = [0; BLOCK];
    disk.read_at(OFFSET, &mut block).unwrap();
    assert_eq!(block, [5; BLOCK]);
    drop(server);
    assert!(!dir.path().join("nbd.sock").exists());
}

#[test]
fn own_device_serves_nbd_clients() {
    let dir = tempfile::tempdir().unwrap();
    let device: Arc<dyn Device> = Arc::new(own_device::Offsets { size: 64 << 20 });
    let server = own_device::serve_nbd(device, &socket(dir.path())).unwrap();
    let client = client(&server);
    let mut block = [0; BLOCK];
    client.read_at(OFFSET, &mut block).unwrap();
    assert_offsets(&block);
    assert_eq!(client.geometry().size, 64 << 20);
    assert_eq!(client.write_at(0, &block, Flags::empty()), Err(Error::ReadOnly));
}

#[test]
fn own_device_serves_a_virtual_machine() {
    let dir = tempfile::tempdir().unwrap();
    let device: Arc<dyn Device> = Arc::new(own_device::Offsets { size: 64 << 20 });
    let export = own_device::serve_vhost_user(device, &dir.path().join("vm.sock")).unwrap();
    let mut machine = Machine::connect(export.path(), MachineConfig::default(), PATIENCE).unwrap();
    assert_eq!(machine.config().capacity() * 512, 64 << 20);
    let mut block = IoBuf::zeroed(BLOCK).unwrap();
    machine.queues[0].run_request(&Request::read(OFFSET, BLOCK as u64), &mut block).unwrap();
    assert_offsets(&block);
}
