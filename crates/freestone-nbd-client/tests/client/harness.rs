//! Servers in this process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_core::device::{Buffer, Completion, Device, IoBuf, Op, Request, Result, Tried};
use freestone_nbd::{Address, ExportOptions, Limits, Server};
use freestone_nbd_client::{Config, Nbd, Uri};
use tempfile::TempDir;

/// How long anything may take.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A directory with a socket, at which a server is or is not.
pub struct Place {
    _dir: TempDir,
    pub address: Address,
}

impl Place {
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

    /// A server with this device as its only export.
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

/// A device of a server, and that server.
pub struct Served {
    pub nbd: Nbd,
    /// After the device.
    _server: Server,
    _place: Place,
}

impl Served {
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self::with(device, |_| {})
    }

    pub fn with(device: Arc<dyn Device>, change: impl FnOnce(&mut Config)) -> Self {
        let place = Place::new();
        let server = place.serve(device);
        let mut config = place.config();
        change(&mut config);
        Self { nbd: Nbd::open(&config).unwrap(), _server: server, _place: place }
    }
}

/// As the device is, so that the suite can have all in one.
impl Device for Served {
    fn geometry(&self) -> freestone_core::device::Geometry {
        self.nbd.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        self.nbd.try_io(request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.nbd.submit(request, buffer, done);
    }

    fn extents(
        &self,
        offset: u64,
        len: u64,
        row: &mut dyn FnMut(freestone_core::device::Extent) -> bool,
    ) -> Result<u64> {
        self.nbd.extents(offset, len, row)
    }
}

/// Begins a request; the answer comes to the receiver.
pub fn begin(device: &dyn Device, request: Request, data: &[u8]) -> std::sync::mpsc::Receiver<Result<IoBuf>> {
    let (tell, told) = std::sync::mpsc::channel();
    let buffer = match request.op {
        Op::Read => IoBuf::zeroed(request.len as usize).unwrap(),
        Op::Write => IoBuf::copy_of(data).unwrap(),
        _ => IoBuf::empty(),
    };
    let done = Completion::new(move |outcome, buffer| {
        // Who asked may not want to know.
        let _ = tell.send(outcome.map(|()| buffer));
    });
    device.submit(request, buffer, done);
    told
}

/// The answer, which comes.
pub fn answer(told: &std::sync::mpsc::Receiver<Result<IoBuf>>) -> Result<IoBuf> {
    told.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no answer"))
}

/// Waits for what must come true soon.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "it did not come true: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
