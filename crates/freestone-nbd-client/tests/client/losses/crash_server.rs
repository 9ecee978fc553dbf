//! A server that can crash, over a disk with a volatile cache.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use freestone_core::device::{Flags, Op};
use freestone_nbd::Server;
use freestone_nbd_client::{Config, Nbd};
use freestone_testkit::{Model, TestDevice};

use super::{BLOCK, SIZE};
use crate::harness::TestAddress;

/// A disk with a volatile cache, and the content that was flushed.
struct CachedDisk {
    disk: Arc<TestDevice>,
    stable: Arc<Mutex<Vec<u8>>>,
}

impl CachedDisk {
    fn new(stable: Vec<u8>) -> Self {
        let cache = Arc::new(Model::filled(stable.clone(), BLOCK as u32));
        let stable = Arc::new(Mutex::new(stable));
        let (cached, settled) = (Arc::clone(&cache), Arc::clone(&stable));
        let disk = TestDevice::over(cache).shaped(|geometry| geometry.volatile_cache = true).on_done(
            move |request, _| {
                let mut stable = settled.lock().unwrap();
                if request.op == Op::Flush {
                    *stable = cached.content();
                } else if request.flags.contains(Flags::FUA) {
                    let range = request.offset as usize..(request.offset + request.len) as usize;
                    stable[range].copy_from_slice(&cached.bytes(request.offset, request.len as usize));
                }
            },
        );
        Self { disk: Arc::new(disk), stable }
    }

    fn stable(&self) -> Vec<u8> {
        self.stable.lock().unwrap().clone()
    }
}

/// A server over a [`CachedDisk`] that can crash.
pub struct CrashServer {
    place: TestAddress,
    running: Option<(Server, CachedDisk)>,
    stable: Vec<u8>,
}

impl CrashServer {
    pub fn new() -> Self {
        let mut machine = Self { place: TestAddress::new(), running: None, stable: vec![0; SIZE] };
        machine.start();
        machine
    }

    pub fn start(&mut self) {
        let disk = CachedDisk::new(std::mem::take(&mut self.stable));
        self.running = Some((self.place.serve(disk.disk.clone()), disk));
    }

    /// Crashes the server: cuts all connections without replies, and discards the disk's cache.
    pub fn kill(&mut self) {
        let (server, disk) = self.running.take().unwrap();
        server.cut_connections_during("disk", || {});
        drop(server);
        // A client may reconnect after the cut, so the flushed content is read after the server has
        // ended.
        self.stable = disk.stable();
    }

    /// Cuts all connections; the disk keeps its cache.
    pub fn cut(&self) {
        self.running.as_ref().unwrap().0.cut_connections_during("disk", || {});
    }

    pub fn config(&self, timeout: Duration) -> Config {
        Config { timeout, ..self.place.config() }
    }

    pub fn open(&self, timeout: Duration) -> Nbd {
        Nbd::open(&self.config(timeout)).unwrap()
    }
}
