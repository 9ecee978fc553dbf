//! Tests of NBD requests with any offset and length, not only whole blocks.

use std::collections::HashMap;

use crate::common::prelude::*;
use freestone_core::device::{Flags, Op};
use freestone_nbd::CONNECTION_MEMORY_BYTES;
use freestone_testkit::effort;

const MIB: u64 = 1 << 20;

/// Compares the export with a model after each random write, write zeroes or trim.
#[test]
fn random_requests_match_model() {
    let size = 4 * MIB - 300;
    for manner in [Manner::Inline, Manner::Thread] {
        let device = MemDevice::with(4 * MIB, |geometry| geometry.padding = 300);
        device.set(manner);
        let fixture = Fixture::serving(&device);
        for structured in [false, true] {
            let mut client = fixture.enter(structured);
            let mut model = client.read(0, size as u32).unwrap();
            let mut seed = 1_u64;
            let mut below = |most: u64| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (seed >> 33) % most
            };
            for round in 0..effort(100, 400) {
                let most = [10, 700, 5000, 300 << 10, MIB + 3][below(5) as usize];
                let len = 1 + below(most);
                let offset = if round % 9 == 0 { size - len } else { below(size - len) };
                let range = offset as usize..(offset + len) as usize;
                match below(4) {
                    0 | 1 => {
                        let data = pattern(round, len as usize);
                        assert_eq!(client.write(0, offset, &data), 0);
                        model[range.clone()].copy_from_slice(&data);
                    }
                    2 => {
                        assert_eq!(client.run(0, WRITE_ZEROES, offset, len), 0);
                        model[range.clone()].fill(0);
                    }
                    _ => {
                        assert_eq!(client.run(0, TRIM, offset, len), 0);
                        let whole = offset.next_multiple_of(512)..(offset + len) / 512 * 512;
                        if whole.start < whole.end {
                            model[whole.start as usize..whole.end as usize].fill(0);
                        }
                    }
                }
                let (from, to) = (range.start.saturating_sub(600), (range.end + 600).min(model.len()));
                let found = client.read(from as u64, (to - from) as u32).unwrap();
                assert!(found == model[from..to], "round {round}: {offset}, {len}");
            }
            assert!(client.read(0, size as u32).unwrap() == model);
            // Requests beyond the end of the export fail.
            assert_eq!(client.read(size, 1), Err(22));
            assert_eq!(client.write(0, size - 1, &[1; 2]), 28);
        }
        assert!(device.bytes(size, 300).iter().all(|byte| *byte == 0));
    }
}

/// Two connections write bytes of one block through two export names, while two others write whole blocks.
#[test]
fn partial_block_writes_keep_bytes_of_others() {
    for manner in [Manner::Inline, Manner::Thread] {
        let device = MemDevice::new(MIB);
        device.set(manner);
        let fixture = Fixture::serving(&device);
        fixture.publish("other", &device);
        let rounds = if manner == Manner::Inline { effort(600, 3000) } else { effort(100, 300_u32) };
        std::thread::scope(|scope| {
            for at in 0..2 {
                let mut client = fixture.connect();
                client.greet(3);
                client.go(if at == 0 { "disk" } else { "other" });
                scope.spawn(move || {
                    for round in 0..rounds {
                        assert_eq!(client.write(0, 700 + at, &[round as u8]), 0);
                        assert_eq!(client.read(700 + at, 1), Ok(vec![round as u8]), "byte {at}");
                    }
                });
            }
            for block in [0, 1024] {
                let (mut parts, mut whole) = (fixture.enter(true), fixture.enter(true));
                scope.spawn(move || {
                    (0..rounds).for_each(|round| assert_eq!(parts.write(0, block + 77, &[round as u8]), 0));
                });
                scope.spawn(move || {
                    for round in 0..rounds {
                        let wanted = vec![round as u8; 512];
                        assert_eq!(whole.write(0, block, &wanted), 0);
                        let mut found = whole.read(block, 512).unwrap();
                        found[77] = round as u8;
                        assert_eq!(found, wanted, "the block at {block}");
                    }
                });
            }
        });
        fixture.assert_sound();
    }
}

/// The client negotiates nothing and chooses the export with `OPT_EXPORT_NAME`, like old clients.
#[test]
fn export_name_without_negotiation_serves_bytes() {
    let device = MemDevice::with(MIB, |geometry| geometry.padding = 24);
    let fixture = Fixture::serving(&device);
    let mut client = fixture.connect();
    client.greet(3);
    client.send(&option(EXPORT_NAME, b"disk"));
    assert_eq!(client.bytes(10)[..8], (MIB - 24).to_be_bytes());
    assert_eq!(client.write(FUA, MIB - 1000, &[7; 976]), 0);
    assert_eq!(client.read(MIB - 1001, 977), Ok([[0; 1].to_vec(), vec![7; 976]].concat()));
    assert!(device.requests(Op::Write).iter().all(|request| request.flags == Flags::FUA));
    assert_eq!(client.write(0, MIB - 24, &[1]), 28);
    let mut other = fixture.connect();
    other.greet(3);
    let replies = other.option(GO, &info_data("disk", &[]));
    assert_eq!(export_info(&replies).unwrap().0, MIB - 24);
}

#[test]
fn block_status_is_cut_to_requested_range() {
    let device = MemDevice::new(MIB);
    let fixture = Fixture::serving(&device);
    let mut client = fixture.enter(true);
    assert_eq!(client.write(0, 8192, &[1; 4096]), 0);
    assert_eq!(client.status(0, 8000, 5000), Ok(vec![(192, 3), (4096, 0), (712, 3)]));
    assert_eq!(client.status(0, 9000, 10), Ok(vec![(10, 0)]));
    // A block that was zeroed only in part is reported as data.
    assert_eq!(client.run(0, WRITE_ZEROES, 20001, 1), 0);
    assert_eq!(client.status(0, 20001, 1), Ok(vec![(1, 0)]));
    assert_eq!(client.run(0, TRIM, 8193, 4000), 0);
    assert_eq!(client.read(8193, 1), Ok(vec![1]));
}

/// The server widens small reads to whole blocks. 200 of them in flight do not exceed a connection's memory
/// limit.
#[test]
fn small_parts_in_flight_stay_in_memory_limit() {
    let device = MemDevice::with(MIB, |geometry| geometry.logical_block = 4096);
    let fixture = Fixture::serving(&device);
    let mut client = fixture.enter(true);
    device.set(Manner::Held);
    let mut wanted = HashMap::new();
    for number in 0..200 {
        let cookie = client.ask(0, READ, number * 7, 3);
        wanted.insert(cookie, (number * 7, 3));
    }
    crate::common::eventually(|| device.held().len() == 200);
    let held: u64 = device.held().iter().map(|request| request.len).sum();
    assert!(held <= CONNECTION_MEMORY_BYTES as u64);
    device.release_all_backwards();
    assert!(client.read_replies(&mut wanted).values().all(|got| *got == Ok(vec![0; 3])));
}
