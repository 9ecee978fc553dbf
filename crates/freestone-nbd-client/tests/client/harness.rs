//! Freestone's NBD servers in the test process, and client devices.

use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_core::device::{Completion, Device, IoBuf, Op, Request, Result};
use freestone_nbd::{Address, ExportOptions, Limits, Server};
use freestone_nbd_client::{Config, Nbd, Uri};
use freestone_testkit::TestDevice;
use tempfile::TempDir;

/// Longest time that a test waits for an event.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A temporary directory with the socket path of a server.
pub struct TestAddress {
    _dir: TempDir,
    pub address: Address,
}

impl TestAddress {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let address = Address::Unix(dir.path().join("nbd.sock"));
        Self { _dir: dir, address }
    }

    pub fn uri(&self) -> Uri {
        self.address.uri("disk").parse().unwrap()
    }

    pub fn config(&self) -> Config {
        Config { name: "test".into(), ..Config::new(self.uri()) }
    }

    /// Starts a server with this device as its only export.
    pub fn serve(&self, device: Arc<dyn Device>) -> Server {
        self.serve_with(device, ExportOptions::default())
    }

    pub fn serve_with(&self, device: Arc<dyn Device>, options: ExportOptions) -> Server {
        let server = Server::new(Limits::default());
        server.listen(&self.address).unwrap();
        server.publish(&self.address, "disk", device, options).unwrap();
        server
    }
}

/// Returns an NBD client device that owns its server, which is dropped after the client device.
pub fn served(device: Arc<dyn Device>) -> Arc<TestDevice<Nbd>> {
    served_with(device, |_| {})
}

pub fn served_with(device: Arc<dyn Device>, change: impl FnOnce(&mut Config)) -> Arc<TestDevice<Nbd>> {
    let place = TestAddress::new();
    let server = place.serve(device);
    let mut config = place.config();
    change(&mut config);
    Arc::new(TestDevice::over(Arc::new(Nbd::open(&config).unwrap())).owning((server, place)))
}

/// Submits a request. The returned channel receives the result.
pub fn begin(device: &dyn Device, request: Request, data: &[u8]) -> std::sync::mpsc::Receiver<Result<IoBuf>> {
    let (tell, told) = std::sync::mpsc::channel();
    let buffer = match request.op {
        Op::Read => IoBuf::zeroed(request.len as usize).unwrap(),
        Op::Write => IoBuf::copy_of(data).unwrap(),
        _ => IoBuf::empty(),
    };
    let done = Completion::new(move |outcome, buffer| {
        // The test may have dropped the receiver.
        let _ = tell.send(outcome.map(|()| buffer));
    });
    device.submit(request, buffer, done);
    told
}

/// Waits for the result of a submitted request.
pub fn wait_result(told: &std::sync::mpsc::Receiver<Result<IoBuf>>) -> Result<IoBuf> {
    told.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no answer"))
}

/// Waits until `condition` is true, for at most [`PATIENCE`].
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "it did not come true: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
