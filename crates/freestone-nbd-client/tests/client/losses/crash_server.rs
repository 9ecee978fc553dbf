//! A server that can crash, over a disk with a volatile cache.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use freestone_core::device::{
    Blocking as _, Buffer, Completion, Device, Extent, Flags, Geometry, IoBuf, Op, Request, Result, TryResult,
};
use freestone_nbd::Server;
use freestone_nbd_client::{Config, Nbd};
use freestone_testkit::Model;

use super::{BLOCK, SIZE};
use crate::harness::TestAddress;

/// A disk with a volatile cache. `stable` contains the content that was flushed.
struct CachedDisk {
    cache: Model,
    stable: Mutex<Vec<u8>>,
}

impl CachedDisk {
    fn new(stable: Vec<u8>) -> Arc<Self> {
        let cache = Model::new(stable.len(), BLOCK as u32);
        cache.write_at(0, &stable, Flags::empty()).unwrap();
        Arc::new(Self { cache, stable: Mutex::new(stable) })
    }

    fn stable(&self) -> Vec<u8> {
        self.stable.lock().unwrap().clone()
    }

    fn settle(&self, offset: u64, len: u64) {
        let range = offset as usize..(offset + len) as usize;
        let mut stable = self.stable.lock().unwrap();
        self.cache.read_at(offset, &mut stable[range]).unwrap();
    }
}

impl Device for CachedDisk {
    fn geometry(&self) -> Geometry {
        Geometry { volatile_cache: true, ..self.cache.geometry() }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        let done = self.cache.try_io(request, buffer)?;
        assert_eq!(done, TryResult::Done);
        if request.op == Op::Flush {
            self.settle(0, self.geometry().size);
        } else if request.flags.contains(Flags::FUA) {
            self.settle(request.offset, request.len);
        }
        Ok(done)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.cache.submit(request, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.cache.extents(offset, len, row)
    }
}

/// A server over a [`CachedDisk`] that can crash.
pub struct CrashServer {
    place: TestAddress,
    running: Option<(Server, Arc<CachedDisk>)>,
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
        self.running = Some((self.place.serve(disk.clone()), disk));
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
