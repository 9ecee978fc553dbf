//! Memory devices, and servers that serve them to the NBD client of the test kit.
#![allow(dead_code, unused_imports, reason = "each test program uses a part of it")]
#![allow(clippy::missing_panics_doc, missing_docs, reason = "test code")]

pub mod device;
pub mod secure;

use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_core::device::Device;
use freestone_nbd::{Address, ExportOptions, Limits, Server, Workers};
use freestone_testkit::nbd::prelude::{Client, Headers};

use device::MemDevice;

/// Names that most tests use.
pub mod prelude {
    pub use super::device::{Manner, MemDevice};
    pub use super::{Fixture, connect, eventually, pattern};
    pub use freestone_testkit::nbd::prelude::*;
}

/// Time limit for one reply.
pub const PATIENCE: Option<Duration> = Some(Duration::from_secs(30));

/// Connects a client to a server.
pub fn connect(address: &Address) -> Client {
    match address {
        Address::Unix(path) => {
            let stream = UnixStream::connect(path).unwrap();
            stream.set_read_timeout(PATIENCE).unwrap();
            Client::over(stream)
        }
        Address::Tcp { host, port } => {
            let stream = TcpStream::connect((host.as_str(), *port)).unwrap();
            stream.set_read_timeout(PATIENCE).unwrap();
            Client::over(stream)
        }
        Address::Stdin => unreachable!("no connects at stdin"),
    }
}

/// A server that listens at one Unix address.
pub struct Fixture {
    pub server: Server,
    pub address: Address,
    pub directory: tempfile::TempDir,
}

impl Fixture {
    pub fn new() -> Self {
        Self::with(Limits::default())
    }

    pub fn with(limits: Limits) -> Self {
        Self::over(Server::new(limits))
    }

    /// Creates a server with as many worker threads as on a machine with `cpus` CPUs.
    pub fn with_workers(cpus: usize) -> Self {
        Self::over(Server::with_workers(Limits::default(), &Workers::new(cpus)))
    }

    fn over(server: Server) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let address = server.listen(&Address::Unix(directory.path().join("nbd.sock"))).unwrap();
        Self { server, address, directory }
    }

    /// Creates a server that exports `device` as "disk", the default export.
    pub fn serving(device: &Arc<impl Device + 'static>) -> Self {
        let fixture = Self::new();
        fixture.publish("disk", device);
        fixture
    }

    pub fn publish(&self, name: &str, device: &Arc<impl Device + 'static>) {
        let options = ExportOptions {
            default: name == "disk",
            description: format!("this is {name}"),
            ..ExportOptions::default()
        };
        let device: Arc<dyn Device> = device.clone();
        self.server.publish(&self.address, name, device, options).unwrap();
    }

    pub fn connect(&self) -> Client {
        connect(&self.address)
    }

    /// Returns a client in the transmission phase of "disk". The client selects `base:allocation` if replies
    /// have chunks. `true` negotiates structured replies, `false` simple replies.
    pub fn enter(&self, headers: impl Into<Headers>) -> Client {
        let mut client = self.connect();
        client.greet(3);
        client.agree(headers.into());
        if client.has_chunks() {
            client.set_context("disk");
        }
        client.go("disk");
        client
    }

    /// Checks that no connection is open, and that the server still serves a new client.
    pub fn assert_sound(&self) {
        self.assert_no_connections();
        let mut client = self.enter(true);
        assert_eq!(client.read(0, 512).unwrap().len(), 512);
        client.disconnect();
        self.assert_no_connections();
    }

    pub fn assert_no_connections(&self) {
        eventually(|| self.server.stats().connections == 0);
    }
}

/// Waits until `condition` is true, for at most 30 seconds.
pub fn eventually(mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < deadline, "timeout waiting for the condition");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns bytes that depend on their position and a seed.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|i| ((i / 8).wrapping_add(seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8)
        .collect()
}
