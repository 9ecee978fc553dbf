//! Tests of requests that the server refuses: ranges, lengths, flags, and commands that the device lacks.

use std::collections::HashMap;
use std::sync::atomic::Ordering::SeqCst;

use crate::common::prelude::*;
use freestone_core::device::Op;
use freestone_nbd::{ExportOptions, MAX_PAYLOAD_BYTES};

const MIB: u64 = 1 << 20;

#[test]
fn request_beyond_end_is_refused() {
    let device = MemDevice::new(MIB);
    let fixture = Fixture::serving(&device);
    for headers in Headers::ALL {
        let mut client = fixture.enter(headers);
        for offset in [MIB - 512, MIB, 1 << 40, u64::MAX - 511] {
            assert_eq!(client.read(offset, 1024), Err(EINVAL));
            assert_eq!(client.write(0, offset, &[1; 1024]), ENOSPC);
            assert_eq!(client.run(0, WRITE_ZEROES, offset, 1024), ENOSPC);
            assert_eq!(client.run(0, TRIM, offset, 1024), EINVAL);
            assert_eq!(client.run(0, CACHE, offset, 1024), EINVAL);
            assert_eq!(client.run(0, BLOCK_STATUS, offset, 1024), EINVAL);
        }
        assert_eq!(client.write(0, MIB - 512, &[3; 512]), 0);
        assert_eq!(client.read(MIB - 512, 512), Ok(vec![3; 512]));
        client.disconnect();
    }
    assert!(device.bytes(0, MIB as usize - 512).iter().all(|byte| *byte == 0));
}

#[test]
fn zero_and_maximum_length_are_refused() {
    let device = MemDevice::new(MIB);
    let fixture = Fixture::serving(&device);
    for structured in [false, true] {
        let mut client = fixture.enter(structured);
        assert_eq!(client.read(0, 0), Err(EINVAL));
        assert_eq!(client.write(0, 0, &[]), EINVAL);
        for command in [TRIM, CACHE, WRITE_ZEROES, BLOCK_STATUS] {
            assert_eq!(client.run(0, command, 0, 0), EINVAL, "command {command}");
        }
        assert_eq!(client.run(0, FLUSH, 0, 0), 0);
        assert_eq!(client.run(0, FLUSH, 0, 512), EINVAL);
        assert_eq!(client.run(0, FLUSH, 512, 0), EINVAL);
        for command in [TRIM, CACHE, WRITE_ZEROES, BLOCK_STATUS] {
            assert_ne!(client.run(0, command, 0, u32::MAX.into()), 0, "command {command}");
        }
        assert_eq!(client.read(0, u32::MAX), Err(EINVAL));
        assert_eq!(client.read(MIB - 1, 2), Err(EINVAL));
        assert_eq!(client.write(0, MIB - 511, &[1; 512]), 28);
        // The server discards the longest possible payload in bounded memory.
        let cookie = client.ask(0, WRITE, 0, u32::MAX.into());
        let waste = vec![9; 1 << 20];
        let mut left = u32::MAX as usize;
        while structured && left > 0 {
            let n = left.min(waste.len());
            client.send(&waste[..n]);
            left -= n;
        }
        if structured {
            assert_eq!(client.plain_reply(cookie), ENOSPC);
            assert_eq!(client.read(0, 512), Ok(vec![0; 512]));
            client.disconnect();
        }
    }
    fixture.assert_sound();
}

#[test]
fn payload_above_maximum_is_refused() {
    let device = MemDevice::new(128 * MIB);
    let fixture = Fixture::serving(&device);
    let max = MAX_PAYLOAD_BYTES as usize;
    assert_eq!(max, 64 << 20);
    let mut client = fixture.enter(true);
    assert_eq!(client.read(0, MAX_PAYLOAD_BYTES + 512), Err(EOVERFLOW));
    assert_eq!(client.write(0, 0, &vec![1; max + 512]), EINVAL);
    assert!(device.requests(Op::Write).is_empty());
    let data = pattern(3, max);
    assert_eq!(client.write(FUA, 511, &data), 0);
    assert!(client.read(511, MAX_PAYLOAD_BYTES).unwrap() == data);
    // With DF, a read is one chunk, which must fit into one buffer of 32 MiB.
    let mut wanted = HashMap::new();
    for (len, answer) in [((32 << 20) + 1, Err(EOVERFLOW)), (32 << 20, Ok(data[..32 << 20].to_vec()))] {
        let cookie = client.ask(DF, READ, 511, len);
        wanted.insert(cookie, (511, len));
        assert!(client.read_replies(&mut wanted)[&cookie] == answer);
    }
    // A simple reply needs no buffer for all its data: the server sends the data in two windows.
    for manner in [Manner::Inline, Manner::Thread] {
        device.set(manner);
        let mut simple = fixture.enter(false);
        for offset in [511, 512] {
            assert!(
                simple.read(offset, MAX_PAYLOAD_BYTES - 1).unwrap()
                    == data[offset as usize - 511..][..max - 1]
            );
        }
        // Other requests are in flight before and after the large read.
        let bytes = [(1, READ, 4096), (2, READ, 48 << 20), (3, FLUSH, 0), (4, READ, 7)];
        let bytes: Vec<u8> =
            bytes.iter().flat_map(|(cookie, command, len)| request(0, *command, *cookie, 0, *len)).collect();
        simple.send(&bytes);
        let mut wanted: HashMap<u64, (u64, u64)> =
            [(1, (0, 4096)), (2, (0, 48 << 20)), (3, (0, 0)), (4, (0, 7))].into();
        let got = simple.read_replies(&mut wanted);
        assert!(got[&2].as_ref().unwrap()[511..] == data[..(48 << 20) - 511]);
        assert_eq!(got[&4], Ok(vec![0; 7]));
        // A failure in the first window gives an error reply. A later failure ends the connection.
        device.bad_byte.store(1, SeqCst);
        assert_eq!(simple.read(0, 48 << 20), Err(EIO));
        assert!(simple.read(512, 512).is_ok());
        device.bad_byte.store(40 << 20, SeqCst);
        simple.ask(0, READ, 0, 48 << 20);
        assert_eq!(simple.bytes(16)[4..8], [0; 4]);
        assert!(simple.bytes(32 << 20)[511..] == data[..(32 << 20) - 511]);
        simple.assert_closed();
        device.bad_byte.store(u64::MAX, SeqCst);
    }
    device.set(Manner::Inline);
    // The payload limit does not apply to commands without a payload.
    assert_eq!(client.run(0, WRITE_ZEROES, 0, 64 << 20), 0);
    assert_eq!(client.run(0, TRIM, 0, 64 << 20), 0);
    assert_eq!(client.run(0, CACHE, 0, 64 << 20), 0);
    assert_eq!(client.status(0, 0, 64 << 20), Ok(vec![(64 << 20, 3)]));
}

#[test]
fn unknown_flags_and_commands_are_refused() {
    let fixture = Fixture::serving(&MemDevice::new(MIB));
    let mut client = fixture.enter(true);
    for command in [8, 9, 255, u16::MAX] {
        assert_eq!(client.run(0, command, 0, 512), EINVAL);
    }
    let allowed = [
        (READ, FUA | DF),
        (FLUSH, FUA),
        (TRIM, FUA),
        (CACHE, FUA),
        (WRITE_ZEROES, FUA | NO_HOLE | FAST_ZERO),
        (BLOCK_STATUS, FUA | REQ_ONE),
    ];
    for (command, allowed) in allowed {
        for bit in 0..16 {
            let flags = 1 << bit;
            let len = if command == FLUSH { 0 } else { 4096 };
            let error = match command {
                READ => {
                    let cookie = client.ask(flags, READ, 0, len);
                    let mut wanted = HashMap::from([(cookie, (0, len))]);
                    client.read_replies(&mut wanted)[&cookie].as_ref().err().copied().unwrap_or(0)
                }
                BLOCK_STATUS => client.status(flags, 0, len).err().unwrap_or(0),
                command => client.run(flags, command, 0, len),
            };
            assert_eq!(error, if flags & allowed != 0 { 0 } else { EINVAL }, "{command} with flag {flags}");
        }
    }
    // The payload of a refused write is discarded.
    for bit in 1..16 {
        assert_eq!(client.write(1 << bit, 0, &[1; 4096]), EINVAL);
    }
    assert_eq!(client.read(0, 4096), Ok(vec![0; 4096]));
    // DF and block status require structured replies.
    let mut simple = fixture.enter(false);
    assert_eq!(simple.run(DF, READ, 0, 512), EINVAL);
    assert_eq!(simple.run(0, BLOCK_STATUS, 0, 512), EINVAL);
}

#[test]
fn read_only_export_refuses_writes() {
    let device = MemDevice::new(MIB);
    let fixture = Fixture::serving(&device);
    let options = ExportOptions { read_only: true, ..ExportOptions::default() };
    fixture.server.publish(&fixture.address, "ro", device.clone(), options).unwrap();
    let mut client = fixture.connect();
    client.greet(3);
    client.agree(Headers::Structured);
    client.go("ro");
    for len in [4096, 1 << 20] {
        assert_eq!(client.write(0, 0, &vec![1; len]), EPERM);
    }
    assert_eq!(client.run(0, WRITE_ZEROES, 0, 4096), EPERM);
    assert_eq!(client.run(0, TRIM, 0, 4096), EPERM);
    assert_eq!(client.run(0, FLUSH, 0, 0), 0);
    assert!(client.read(0, 4096).is_ok());
    assert!(device.requests(Op::Write).is_empty());
    assert!(fixture.server.exports().iter().any(|export| export.name == "ro" && export.read_only));
}

#[test]
fn fast_zero_without_support_is_refused() {
    let device = MemDevice::with(MIB, |geometry| geometry.fast_zeroes = false);
    let fixture = Fixture::serving(&device);
    device.fill(0, &[7; 4096]);
    let mut client = fixture.enter(true);
    assert_eq!(client.run(FAST_ZERO, WRITE_ZEROES, 0, 4096), ENOTSUP);
    assert_eq!(client.run(FAST_ZERO | NO_HOLE, WRITE_ZEROES, 0, 4096), ENOTSUP);
    assert!(device.log.lock().is_empty());
    assert_eq!(device.bytes(0, 4096), [7; 4096]);
    assert_eq!(client.run(0, WRITE_ZEROES, 0, 4096), 0);
    assert_eq!(device.bytes(0, 4096), [0; 4096]);
}

#[test]
fn trim_without_discard_support_is_refused() {
    let device = MemDevice::with(MIB, |geometry| geometry.discard_granularity = 0);
    let fixture = Fixture::serving(&device);
    assert_eq!(fixture.enter(true).run(0, TRIM, 0, 4096), EINVAL);
}

#[test]
fn invalid_request_ends_only_its_connection() {
    let fixture = Fixture::serving(&MemDevice::new(MIB));
    let mut bystander = fixture.enter(true);
    let mut client = fixture.enter(true);
    // Requests before the invalid bytes are completed.
    let mut bytes = request(0, FLUSH, 5, 0, 0);
    bytes.extend([0x42; 100]);
    client.send(&bytes);
    assert_eq!(client.chunk(), Chunk::Simple { cookie: 5, error: 0 });
    client.assert_closed();
    assert!(bystander.read(0, 512).is_ok());
    bystander.disconnect();
    fixture.assert_sound();
}

#[test]
fn error_chunk_has_message() {
    let fixture = Fixture::serving(&MemDevice::new(MIB));
    let mut client = fixture.enter(true);
    let cookie = client.ask(0, 99, 0, 0);
    assert_eq!(client.chunk(), Chunk::Error { cookie, error: EINVAL, text: "unknown command".to_owned() });
}
