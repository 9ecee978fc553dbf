//! The state of zones after restarts, crashes and power cuts. A write pointer never exceeds durable
//! data, and no acknowledged durable data is lost.

mod crashes;
mod files;
mod power_cuts;

use std::sync::Arc;

use freestone_core::device::Device;
use freestone_core::device::zoned::{Zone, Zoned};
use freestone_drive::zone::{Config, Zones};
use freestone_testkit::Model;

const BLOCK: u64 = 512;
const BLOCKS: u64 = 12;
const ZONE: u64 = 16 * BLOCK;
const ZONES: u64 = 8;
const SIZE: u64 = ZONES * ZONE;
/// Size in bytes of the state of fewer than 511 zones.
const STATE_BYTES: u64 = 3 * 4096;

fn config() -> Config {
    Config { zone_size: ZONE, zone_capacity: BLOCKS * BLOCK, zone_max_open: 3, ..Config::default() }
}

fn content(zone: u64, generation: u64, index: u64) -> Vec<u8> {
    let word = (zone + 1) << 48 | generation << 16 | index;
    word.to_le_bytes().repeat((BLOCK / 8) as usize)
}

fn model_of(bytes: &[u8]) -> Arc<dyn Device> {
    Arc::new(Model::filled(bytes.to_vec(), BLOCK as u32))
}

fn rows(zones: &Zones) -> Vec<Zone> {
    let mut rows = Vec::new();
    zones
        .report(0, &mut |row| {
            rows.push(row);
            true
        })
        .unwrap();
    rows
}
