//! Shared parts of the snapshot tests: devices of several kinds.
#![allow(dead_code, reason = "each test uses a part")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use freestone::cow::{Config, StoreKind};
use freestone::device::{Blocking, Device};
use freestone::file::{self, Direct, File};
use freestone::ram::{self, Ram};
use freestone_testkit::{Deferred, Model, Policy, Rng};

pub const CHUNK: u64 = 4096;

/// A kind of device.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// Bytes in memory, completed inline.
    Model,
    /// Bytes in memory, always submitted, completed in random order.
    Deferred,
    /// Bytes in memory, sometimes submitted, sometimes completed in part.
    Sometimes,
    /// A compressed RAM disk.
    Ram,
    /// A file.
    File,
}

pub const KINDS: [Kind; 5] = [Kind::Model, Kind::Deferred, Kind::Sometimes, Kind::Ram, Kind::File];

impl Kind {
    pub fn make(self, size: u64) -> Arc<dyn Device> {
        let model = || Arc::new(Model::new(size as usize, 512));
        match self {
            Self::Model => model(),
            Self::Deferred => Arc::new(Deferred::new(model(), Policy::Always, 7)),
            Self::Sometimes => Arc::new(Deferred::new(model(), Policy::Sometimes(40), 8)),
            Self::Ram => Arc::new(Ram::new(ram::Config { disksize: size, ..Default::default() }).unwrap()),
            Self::File => {
                // The name is removed when this returns; the file exists while it is open.
                let file = tempfile::NamedTempFile::new().unwrap();
                file.as_file().set_len(size).unwrap();
                let config =
                    file::Config { direct: Direct::Off, ..file::Config::new(file.path().to_path_buf()) };
                Arc::new(File::open(&config).unwrap())
            }
        }
    }
}

/// Returns the configuration of a forced snapshot with this store and chunk size.
pub fn config(kind: StoreKind, chunk: u64) -> Config {
    Config { kind, chunk_bytes: Some(chunk), force: true, ..Config::default() }
}

/// Returns incompressible bytes, the same for the same seed.
pub fn bytes(seed: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    Rng::new(seed).fill(&mut bytes);
    bytes
}

pub fn read(device: &dyn Device, offset: u64, len: u64) -> Vec<u8> {
    let mut back = vec![0xee; len as usize];
    device.read_at(offset, &mut back).unwrap();
    back
}

pub fn read_all(device: &dyn Device) -> Vec<u8> {
    read(device, 0, device.geometry().size)
}

/// Sets the flag when dropped, so that threads also stop after a failure.
pub struct Stop<'a>(pub &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
