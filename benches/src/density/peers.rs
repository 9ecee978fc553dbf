//! Memory of the peers that store the same data: nbdkit's `memory` plugin with zstd, and the kernel's zram.

use std::path::Path;

use anyhow::Result;

use crate::compare::groups;
use crate::compare::peers::Peers;
use crate::compare::sides::{Side, Starter};
use crate::data::Data;
use crate::engine::zram_device::ZramDevice;
use crate::programs::run_dir::RunDir;

pub const NBDKIT: &str = "nbdkit memory zstd";
pub const ZRAM: &str = "zram lz4";

/// Device sizes of nbdkit are multiples of this.
const MIB: u64 = 1 << 20;

/// Returns the bytes by which nbdkit's process grows when its device is filled with the data. Pages of zeroes
/// are not written, because the device is empty.
pub fn nbdkit(peers: &Peers, run_dir: &RunDir, data: &Data) -> Result<u64> {
    let bytes = data.bytes().next_multiple_of(MIB);
    let image = run_dir.image(data, bytes)?;
    let freestone = Path::new("freestone");
    let starter = Starter { run_dir, peers, freestone, image: &image, bytes, tls: None };
    let running = starter.start(Side::Zstd)?;
    let before = running.server.memory()?.bytes;
    groups::copy(&image, &running.socket, &["--destination-is-zero"])?;
    Ok(running.server.memory()?.bytes.saturating_sub(before))
}

/// Returns the bytes of memory of the kernel's device `name` with the data.
pub fn zram(name: &str, data: &Data) -> Result<u64> {
    let device = ZramDevice::claim(name, "lz4", data.bytes())?;
    device.fill(data.pages, |page, into| data.read(page, into))?;
    Ok(device.stat()?.memory(data.pages))
}
