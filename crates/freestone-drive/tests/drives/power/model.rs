//! Random operations with power cuts, compared with a model of the contents that each block may
//! have.

use std::sync::Arc;

use freestone_core::device::{Blocking, Device, Flags};
use freestone_drive::power::{Config, Power, log};
use freestone_testkit::{DeferPolicy, DeferringDevice, Model, Rng, effort};

pub const BLOCK: usize = 512;
pub const BLOCKS: usize = 1500;

/// Contents that each block may have after a cut: first the durable content, then those of all
/// later writes. The first eight bytes of a block identify its content.
pub struct BlockModel {
    blocks: Vec<Vec<u64>>,
}

impl BlockModel {
    pub fn new() -> Self {
        Self { blocks: vec![vec![0]; BLOCKS] }
    }

    fn now(&self, block: usize) -> u64 {
        *self.blocks[block].last().unwrap()
    }

    /// Checks after a cut that each block has an allowed content, and records that content as
    /// durable. Returns how many blocks have the oldest, an intermediate or the newest content.
    fn settle(&mut self, device: &dyn Device, context: &str) -> Ends {
        let mut ends = Ends::default();
        for (number, content) in contents(device).into_iter().enumerate() {
            let allowed = &mut self.blocks[number];
            assert!(
                allowed.contains(&content),
                "{context}: block {number} has {content}, allowed are {allowed:?}"
            );
            if allowed.len() > 1 {
                ends.old += u32::from(content == allowed[0]);
                ends.newest += u32::from(content == allowed[allowed.len() - 1]);
                ends.middle += u32::from(allowed[1..allowed.len() - 1].contains(&content));
            }
            *allowed = vec![content];
        }
        ends
    }
}

#[derive(Default, Debug, Clone, Copy)]
struct Ends {
    old: u32,
    middle: u32,
    newest: u32,
}

/// Returns the number that identifies the content of each block. Panics if a block is torn.
pub fn contents(device: &dyn Device) -> Vec<u64> {
    let mut all = vec![0; BLOCKS * BLOCK];
    device.read_at(0, &mut all).unwrap();
    all.chunks(BLOCK)
        .map(|block| {
            let word = u64::from_le_bytes(block[..8].try_into().unwrap());
            assert!(block.chunks(8).all(|part| part == word.to_le_bytes()), "a torn block: {block:?}");
            word
        })
        .collect()
}

pub fn filled(from: u64, count: usize) -> Vec<u8> {
    (0..count).flat_map(|at| (from + at as u64).to_le_bytes().repeat(BLOCK / 8)).collect()
}

/// Runs one random operation on the device and on the model.
pub fn operate(rng: &mut Rng, device: &Power, shadow: &mut BlockModel, next: &mut u64) {
    let most = if rng.chance(10) { 400 } else { 12 };
    let count = 1 + rng.below(most) as usize;
    let first = rng.below((BLOCKS - count) as u64) as usize;
    let (offset, len) = ((first * BLOCK) as u64, (count * BLOCK) as u64);
    let range = first..first + count;
    let fua = if rng.chance(15) { Flags::FUA } else { Flags::empty() };
    match rng.below(20) {
        0..=11 => {
            device.write_at(offset, &filled(*next, count), fua).unwrap();
            for (at, block) in range.clone().enumerate() {
                shadow.blocks[block].push(*next + at as u64);
            }
            *next += count as u64;
        }
        12 | 13 => {
            device.write_zeroes(offset, len, fua).unwrap();
            range.clone().for_each(|block| shadow.blocks[block].push(0));
        }
        14 => {
            device.discard(offset, len).unwrap();
            range.for_each(|block| shadow.blocks[block].push(0));
            return;
        }
        15 | 16 => {
            let mut data = vec![0; count * BLOCK];
            device.read_at(offset, &mut data).unwrap();
            for (block, data) in range.zip(data.chunks(BLOCK)) {
                assert_eq!(data[..8], shadow.now(block).to_le_bytes(), "block {block}");
            }
            return;
        }
        17 => {
            device.keep(offset, len).unwrap();
            for block in range {
                shadow.blocks[block] = vec![shadow.now(block)];
            }
            return;
        }
        18 => {
            device.flush().unwrap();
            for block in 0..BLOCKS {
                shadow.blocks[block] = vec![shadow.now(block)];
            }
            return;
        }
        _ => return,
    }
    if !fua.is_empty() {
        for block in range {
            shadow.blocks[block] = vec![shadow.now(block)];
        }
    }
}

pub fn below(kind: usize, seed: u64) -> Arc<dyn Device> {
    let model = Arc::new(Model::new(BLOCKS * BLOCK, BLOCK as u32));
    match kind {
        0 => model,
        1 => Arc::new(DeferringDevice::new(model, DeferPolicy::Sometimes(50), seed)),
        _ => Arc::new(DeferringDevice::new(model, DeferPolicy::Always, seed)),
    }
}

#[test]
fn cut_leaves_allowed_contents_and_flushed_data() {
    let folder = tempfile::tempdir().unwrap();
    let mut total = Ends::default();
    for seed in 0..effort(8, 30) {
        let mut rng = Rng::new(seed);
        let capacity = [0, 1, 8 << 10, 200 << 10][rng.below(4) as usize];
        let below = below(rng.below(3) as usize, seed);
        let path = folder.path().join(seed.to_string());
        let record = Some(log::Writer::create(&path).unwrap());
        let device =
            Power::new(Arc::clone(&below), Config { capacity, record, ..Config::default() }).unwrap();
        let mut shadow = BlockModel::new();
        let mut next = 1;
        for round in 0..4 {
            for _ in 0..rng.below(60) {
                operate(&mut rng, &device, &mut shadow, &mut next);
            }
            let changed = shadow.blocks.iter().filter(|versions| versions.len() > 1).count() as u64;
            let cut = device.cut(seed * 7 + round).unwrap();
            assert!(cut.kept_blocks + cut.lost_blocks <= changed);
            if capacity == 0 {
                assert_eq!(cut.kept_blocks + cut.lost_blocks, changed, "seed {seed}");
            }
            assert_eq!(device.unflushed_bytes(), 0);
            let ends = shadow.settle(&device, &format!("seed {seed}, round {round}"));
            total.old += ends.old;
            total.middle += ends.middle;
            total.newest += ends.newest;
        }
        let last = contents(&device);
        drop(device);
        assert_eq!(contents(&*below), last, "seed {seed}: what is below after a clean end");

        // Replaying the log onto an empty device gives the same content, including the effects of
        // cuts.
        let fresh = Model::new(BLOCKS * BLOCK, BLOCK as u32);
        let mut reader = log::Reader::open(&path).unwrap();
        let entries = reader.entries();
        log::replay(&mut reader, entries, &fresh).unwrap();
        assert_eq!(contents(&fresh), last, "seed {seed}: what the log says");
    }
    // The checks above would also accept cuts that lose nothing or everything, so all three
    // outcomes must be frequent.
    let (ends, middle) = effort((100, 30), (500, 150));
    assert!(total.old > ends && total.middle > middle && total.newest > ends, "{total:?}");
}
