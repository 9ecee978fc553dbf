//! Shared parts of the snapshot tests: devices of several kinds, and their content.
#![allow(dead_code, reason = "each test uses a part")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use freestone_core::device::{Blocking, Device};
use freestone_cow::cow::{Config, StoreKind};
use freestone_image::file::{self, Direct, File};
use freestone_ram::ram::{self, Ram};
use freestone_testkit::{DeferPolicy, DeferringDevice, Model, Rng};

pub const CHUNK: u64 = 4096;

/// A kind of device under an origin or a snapshot.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// Bytes in memory. All requests complete inline.
    Model,
    /// Bytes in memory. All requests are submitted, and complete in random order.
    Deferred,
    /// Bytes in memory. Some requests are submitted, and some complete in part.
    Sometimes,
    /// A RAM disk, which compresses its pages.
    Ram,
    /// A file on disk.
    File,
}

pub const KINDS: [Kind; 5] = [Kind::Model, Kind::Deferred, Kind::Sometimes, Kind::Ram, Kind::File];

impl Kind {
    pub fn make(self, size: u64) -> Arc<dyn Device> {
        let model = || Arc::new(Model::new(size as usize, 512));
        match self {
            Self::Model => model(),
            Self::Deferred => Arc::new(DeferringDevice::new(model(), DeferPolicy::Always, 7)),
            Self::Sometimes => Arc::new(DeferringDevice::new(model(), DeferPolicy::Sometimes(40), 8)),
            Self::Ram => Arc::new(Ram::new(ram::Config { disksize: size, ..Default::default() }).unwrap()),
            Self::File => {
                // The file name is removed when this function returns. The file exists as long as
                // the device keeps it open.
                let file = tempfile::NamedTempFile::new().unwrap();
                file.as_file().set_len(size).unwrap();
                let config =
                    file::Config { direct: Direct::Off, ..file::Config::new(file.path().to_path_buf()) };
                Arc::new(File::open(&config).unwrap())
            }
        }
    }
}

/// Returns the configuration of a snapshot with this store and chunk size in bytes, and with
/// `force` set.
pub fn config(kind: StoreKind, chunk: u64) -> Config {
    Config { kind, chunk_bytes: Some(chunk), force: true, ..Config::default() }
}

/// Returns `len` incompressible bytes, which depend only on the seed.
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

/// Sets the flag when dropped, so that other threads also stop after a failed assertion.
pub struct Stop<'a>(pub &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
