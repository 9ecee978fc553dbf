//! The null device with data in plain memory, compared with a model. `resident.rs` tests that the
//! device frees its memory.

use freestone::device::{Blocking, Buffer, Device, ExtentKind, Flags, Op, Request, TryResult};
use freestone::null::{Config, MEMORY_BYTES_MAX, Memory, SetupError};
use freestone_testkit::Rng;

const MIB: u64 = 1 << 20;

fn memory(size: u64, block: u32) -> Memory {
    Memory::new(Config::plain(size, block)).unwrap()
}

#[test]
fn too_large_sizes_are_refused() {
    let make = |size| Memory::new(Config::plain(size, 4096)).map(drop);
    assert_eq!(make(MEMORY_BYTES_MAX), Ok(()));
    let error = SetupError::Size { size: MEMORY_BYTES_MAX + 4096, block: 4096, largest: MEMORY_BYTES_MAX };
    assert_eq!(make(MEMORY_BYTES_MAX + 4096), Err(error));
}

/// Random operations on three distant regions of the device, compared with byte vectors.
#[test]
fn random_operations_against_a_model() {
    const REGION: u64 = 4 * MIB;
    const STARTS: [u64; 3] = [MIB, (1 << 30) - 2 * MIB, 37 << 30];
    for (seed, block) in [(1, 512_u64), (2, 4096), (3, 1024)] {
        let memory = memory(64 << 30, block as u32);
        let mut model = vec![vec![0_u8; REGION as usize]; STARTS.len()];
        let mut rng = Rng::new(seed);
        for step in 0..4000 {
            let n = rng.below(STARTS.len() as u64) as usize;
            let most = if rng.chance(20) { 800 << 10 } else { 32 << 10 };
            let len = (1 + rng.below(most / block)) * block;
            let at = rng.below((REGION - len) / block + 1) * block;
            let (offset, range) = (STARTS[n] + at, at as usize..(at + len) as usize);
            match rng.below(20) {
                0..=7 => {
                    let mut data = vec![0; len as usize];
                    rng.content(&mut data);
                    memory.write_at(offset, &data, Flags::empty()).unwrap();
                    model[n][range].copy_from_slice(&data);
                }
                8..=14 => {
                    let mut out = vec![0xa5; len as usize];
                    memory.read_at(offset, &mut out).unwrap();
                    assert!(out == model[n][range], "step {step} of seed {seed}: {len} bytes at {offset}");
                }
                15 | 16 => {
                    memory.discard(offset, len).unwrap();
                    model[n][range].fill(0);
                }
                17 | 18 => {
                    let flags = if rng.chance(50) { Flags::MAY_FREE } else { Flags::empty() };
                    memory.write_zeroes(offset, len, flags).unwrap();
                    model[n][range].fill(0);
                }
                _ if rng.chance(10) => {
                    memory.reset().unwrap();
                    for region in &mut model {
                        region.fill(0);
                    }
                }
                _ => check_extents(&memory, offset, &model[n][range]),
            }
        }
        for (start, region) in STARTS.into_iter().zip(&model) {
            let mut out = vec![0; region.len()];
            memory.read_at(start, &mut out).unwrap();
            assert!(out == *region);
        }
    }
}

/// Checks that the extents report all data that is not zero as data.
fn check_extents(memory: &Memory, offset: u64, content: &[u8]) {
    let mut at = offset;
    let end = offset + content.len() as u64;
    while at < end {
        at += memory
            .extents(at, end - at, &mut |row| {
                let range = (row.offset - offset) as usize..(row.offset + row.len - offset) as usize;
                assert!(row.kind == ExtentKind::Data || content[range].iter().all(|&byte| byte == 0));
                true
            })
            .unwrap();
    }
}

#[test]
fn extents_show_what_was_written() {
    let memory = memory(1 << 40, 512);
    memory.write_at((3 << 30) + 4096, &[1; 8192], Flags::empty()).unwrap();
    memory.write_at((5 << 30) + 512, &[1; 512], Flags::empty()).unwrap();
    let (mut at, mut data) = (0, Vec::new());
    let mut calls = 0;
    while at < 1 << 40 {
        at += memory
            .extents(at, (1 << 40) - at, &mut |row| {
                data.extend((row.kind == ExtentKind::Data).then_some((row.offset, row.len)));
                true
            })
            .unwrap();
        calls += 1;
    }
    assert_eq!(data, [((3 << 30) + 4096, 8192), (5 << 30, 4096)]);
    assert!(calls < 10, "empty regions are passed over, not walked: {calls} calls");
}

#[test]
fn reads_allocate_no_memory() {
    let memory = memory(16 << 40, 4096);
    let before = memory.used_bytes();
    let mut out = vec![1; MIB as usize];
    for gib in (0..16 << 10).step_by(97) {
        memory.read_at(gib << 30, &mut out).unwrap();
        memory.discard(gib << 30, 1 << 30).unwrap();
        memory.write_zeroes(gib << 30, MIB, Flags::MAY_FREE).unwrap();
    }
    assert!(out.iter().all(|&byte| byte == 0));
    assert_eq!(memory.used_bytes(), before);
    assert!(before < MIB);
    // Write zeroes without MAY_FREE must not leave a hole, so its range uses as much memory as
    // data.
    memory.write_zeroes(512 << 10, MIB, Flags::empty()).unwrap();
    assert!(memory.used_bytes() >= before + MIB);
    let mut kinds = Vec::new();
    let row = &mut |row: freestone::device::Extent| {
        kinds.push((row.len, row.kind));
        true
    };
    memory.extents(0, 2 * MIB, row).unwrap();
    let (hole, data) = (freestone::device::ExtentKind::Hole, freestone::device::ExtentKind::Data);
    assert_eq!(kinds, [(MIB / 2, hole), (MIB, data), (MIB / 2, hole)]);
}

#[test]
fn small_discards_free_an_emptied_page() {
    let memory = memory(1 << 30, 512);
    memory.write_at(0, &[7; 8192], Flags::empty()).unwrap();
    let data = || {
        let mut pages = Vec::new();
        let row = &mut |row: freestone::device::Extent| {
            pages.push((row.offset, row.len, row.kind));
            true
        };
        memory.extents(0, 8192, row).unwrap();
        pages
    };
    assert_eq!(data(), [(0, 8192, ExtentKind::Data)]);
    for sector in 0..7 {
        memory.discard(sector * 512, 512).unwrap();
        assert_eq!(data(), [(0, 8192, ExtentKind::Data)]);
    }
    memory.discard(7 * 512, 512).unwrap();
    assert_eq!(data(), [(0, 4096, ExtentKind::Hole), (4096, 4096, ExtentKind::Data)]);
    // A write to a part of the discarded page does not bring back old bytes of the rest.
    memory.write_at(512, &[9; 512], Flags::empty()).unwrap();
    let mut out = [1; 4096];
    memory.read_at(0, &mut out).unwrap();
    assert!(out.iter().enumerate().all(|(at, &byte)| byte == if at / 512 == 1 { 9 } else { 0 }));
}

#[test]
fn discard_without_support_is_ignored() {
    let memory = Memory::new(Config { discard: false, ..Config::plain(1 << 30, 4096) }).unwrap();
    memory.write_at(0, &[7; 4096], Flags::empty()).unwrap();
    assert_eq!(memory.try_io(&Request::new(Op::Discard, 0, 1 << 30), Buffer::None), Ok(TryResult::Done));
    let mut out = [0; 4096];
    memory.read_at(0, &mut out).unwrap();
    assert_eq!(out, [7; 4096]);
}
