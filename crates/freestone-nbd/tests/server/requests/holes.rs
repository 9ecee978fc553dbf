//! Tests of the data in read replies: zeroes are sent as hole chunks, and failed reads send no data.

use std::sync::atomic::Ordering::SeqCst;

use crate::common::device::SPOILT;
use crate::common::prelude::*;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Reads a range. Returns the offset of each chunk with the data, or with the length of the hole as `Err`, in
/// order of offset.
fn read(client: &mut Client, flags: u16, offset: u64, len: u32) -> Vec<(u64, Result<Vec<u8>, u32>)> {
    let wanted = client.ask(flags, READ, offset, len.into());
    let mut parts = Vec::new();
    loop {
        let chunk = client.chunk();
        assert_eq!(chunk.cookie(), wanted);
        let ends = chunk.ends();
        match chunk {
            Chunk::Data { offset, data, .. } => parts.push((offset, Ok(data))),
            Chunk::Hole { offset, len, .. } => parts.push((offset, Err(len))),
            Chunk::None { .. } => {}
            other => panic!("{other:?}"),
        }
        if ends {
            parts.sort_by_key(|(offset, _)| *offset);
            return parts;
        }
    }
}

#[test]
fn zero_pieces_are_sent_as_holes() {
    let device = MemDevice::new(8 * MIB);
    let fixture = Fixture::serving(&device);
    let data = pattern(3, 4096);
    device.fill(MIB, &data);
    for headers in [Headers::Structured, Headers::Extended] {
        for manner in [Manner::Inline, Manner::Thread] {
            device.set(manner);
            let mut client = fixture.enter(headers);
            // A read in one piece returns one chunk: data, or a hole for zeroes, also with DF (do not
            // fragment).
            for flags in [0, DF] {
                assert_eq!(read(&mut client, flags, 512, 4096), [(512, Err(4096))]);
                assert_eq!(read(&mut client, flags, 1, 700), [(1, Err(700))]);
                assert_eq!(read(&mut client, flags, MIB, 4096), [(MIB, Ok(data.clone()))]);
            }
            assert_eq!(read(&mut client, DF, 0, 1 << 20), [(0, Err(1 << 20))]);
            // Zeroes shorter than 512 bytes are sent as data.
            assert_eq!(read(&mut client, 0, 0, 511), [(0, Ok(vec![0; 511]))]);
            // The server splits a large read into pieces, and sends each piece as data or as a hole.
            let parts = read(&mut client, 0, MIB - 512 * KIB, 1 << 20);
            let told: Vec<_> = parts.iter().map(|(at, part)| (at / KIB, part.is_ok())).collect();
            assert_eq!(told, [(512, false), (768, false), (1024, true), (1280, false)]);
            // With DF, the whole read is one chunk, which is sent as data if any byte is not zero.
            let all = read(&mut client, DF, 0, 2 << 20);
            let Ok(all) = &all[0].1 else { panic!("a hole over data") };
            assert!(all[..1 << 20].iter().all(|byte| *byte == 0) && all[1 << 20..][..4096] == data);
            client.disconnect();
        }
        device.set(Manner::Inline);
    }
    let mut simple = fixture.enter(Headers::Simple);
    assert_eq!(simple.read(0, 4096), Ok(vec![0; 4096]));
}

#[test]
fn single_nonzero_byte_is_sent_as_data() {
    let device = MemDevice::new(MIB);
    let fixture = Fixture::serving(&device);
    let mut client = fixture.enter(Headers::Structured);
    for at in [0, 1, 63, 64, 2048, 4032, 4094, 4095] {
        let mut page = vec![0; 4096];
        page[at] = 1;
        device.fill(0, &page);
        assert_eq!(read(&mut client, 0, 0, 4096), [(0, Ok(page))]);
        assert_eq!(read(&mut client, 0, 4096, 4096), [(4096, Err(4096))]);
    }
}

#[test]
fn read_of_holes_sends_few_bytes() {
    let device = MemDevice::new(64 * MIB);
    let fixture = Fixture::serving(&device);
    let mut client = fixture.enter(Headers::Structured);
    let before = fixture.server.stats().sent_bytes;
    assert_eq!(client.read(0, 64 << 20).unwrap().len(), 64 << 20);
    eventually(|| fixture.server.stats().sent_bytes > before);
    let sent = fixture.server.stats().sent_bytes - before;
    assert!(sent <= 256 * 40, "{sent} bytes for 256 pieces");
}

/// The device fills the buffer of a failed read with other bytes, inline or submitted, whole or in parts.
/// Replies do not contain these bytes.
#[test]
fn failed_read_buffer_is_not_sent() {
    let device = MemDevice::new(8 * MIB);
    let fixture = Fixture::serving(&device);
    let data = pattern(9, 2 << 20);
    device.fill(0, &data);
    for headers in Headers::ALL {
        for manner in [Manner::Inline, Manner::Partly(8 * KIB), Manner::Thread] {
            device.set(manner);
            let mut client = fixture.enter(headers);
            for len in [512, 4096, 100 << 10, 256 << 10, 700 << 10, 2 << 20] {
                device.bad_byte.store(u64::from(len) - 1, SeqCst);
                for flags in if client.has_chunks() { &[0, DF][..] } else { &[0] } {
                    let wanted = client.ask(*flags, READ, 0, len.into());
                    loop {
                        match client.chunk() {
                            Chunk::Data { cookie, offset, data: part, .. } => {
                                assert_eq!(cookie, wanted);
                                assert!(part == data[offset as usize..][..part.len()]);
                            }
                            Chunk::Error { cookie, error, text } => {
                                assert_eq!((cookie, error, &text[..]), (wanted, EIO, "I/O error"));
                                break;
                            }
                            Chunk::Simple { cookie, error } => {
                                assert_eq!((cookie, error), (wanted, EIO));
                                break;
                            }
                            other => panic!("{other:?}"),
                        }
                    }
                }
                device.bad_byte.store(u64::MAX, SeqCst);
                // Later reads reuse the same buffers, and return the right data.
                assert!(client.read(0, len).unwrap() == data[..len as usize]);
                assert_eq!(client.read(4 * MIB, len), Ok(vec![0; len as usize]));
            }
            assert!(!data.iter().all(|byte| *byte == SPOILT));
            client.disconnect();
        }
    }
}

/// Descriptors of the first context are discarded if the query of the second context fails.
#[test]
fn failed_block_status_sends_no_descriptors() {
    let device = MemDevice::new(MIB);
    device.forked.store(true, SeqCst);
    for page in (0..200).step_by(2) {
        device.fill(page * 4096, &[7; 4096]);
    }
    let fixture = Fixture::serving(&device);
    let mut client = fixture.connect();
    client.greet(3);
    client.agree(Headers::Extended);
    assert_eq!(client.set_contexts("disk", &["base:allocation", "freestone:changed"]).len(), 2);
    client.go("disk");
    // The query of the second context, `freestone:changed`, fails.
    device.bad_byte.store(1, SeqCst);
    let mut cookies = Vec::new();
    for flags in [0, REQ_ONE] {
        cookies.push(client.ask(flags, BLOCK_STATUS, 0, 1 << 20));
    }
    for wanted in cookies {
        let Chunk::Error { cookie, text, .. } = client.chunk() else { panic!("no error") };
        assert_eq!((cookie, &text[..]), (wanted, "the device is gone"));
    }
    assert_eq!(client.read(4096, 4096), Ok(vec![0; 4096]));
    client.disconnect();
}
