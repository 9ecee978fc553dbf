//! Tests of commands, one by one, on a device that executes requests inline.

use std::collections::HashMap;
use std::sync::atomic::Ordering::SeqCst;

use crate::common::device::Manner;
use crate::common::prelude::*;
use freestone_core::device::{Flags, Op, Request};
use freestone_nbd::MAX_DESCRIPTORS;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

#[test]
fn written_data_reads_back() {
    let device = MemDevice::new(8 * MIB);
    let fixture = Fixture::serving(&device);
    for headers in Headers::ALL {
        let mut client = fixture.enter(headers);
        // Lengths below, at and above the sizes of the server's buffers.
        for (round, len) in [512, 4096, 64 << 10, 256 << 10, (256 << 10) + 4096, (264 << 10) + 512, 3 << 20]
            .into_iter()
            .enumerate()
        {
            let offset = 512 * (round as u64 + 1);
            let data = pattern(offset + headers as u64, len);
            assert_eq!(client.write(0, offset, &data), 0);
            assert!(device.bytes(offset, len) == data, "{len} bytes on the device");
            assert!(client.read(offset, len as u32).unwrap() == data, "{len} bytes read back");
        }
        client.disconnect();
    }
    fixture.assert_sound();
}

#[test]
fn large_read_is_split_unless_df() {
    let device = MemDevice::new(8 * MIB);
    let fixture = Fixture::serving(&device);
    let data = pattern(7, 3 * MIB as usize);
    device.fill(4096, &data);
    let mut client = fixture.enter(true);
    for (flags, pieces) in [(0, 12), (DF, 1)] {
        client.ask(flags, READ, 4096, 3 << 20);
        let mut got = vec![0; data.len()];
        let mut count = 0;
        loop {
            match client.chunk() {
                // Workers may complete the pieces of a read out of order.
                Chunk::Data { data, done, offset, .. } => {
                    assert!(flags == DF || data.len() <= 256 << 10);
                    count += 1;
                    got[offset as usize - 4096..][..data.len()].copy_from_slice(&data);
                    if done {
                        break;
                    }
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(count, pieces);
        assert!(got == data);
    }
    let reads = device.requests(Op::Read);
    assert!(reads[..12].iter().all(|read| read.len == 256 * KIB), "{reads:?}");
}

#[test]
fn replies_of_32_requests_share_sends() {
    let device = MemDevice::new(MIB);
    let fixture = Fixture::serving(&device);
    let data = pattern(1, MIB as usize);
    device.fill(0, &data);
    for structured in [false, true] {
        let mut client = fixture.enter(structured);
        let before = fixture.server.stats();
        let mut bytes = Vec::new();
        let mut wanted = HashMap::new();
        for i in 0..32_u64 {
            bytes.extend(request(0, READ, 1000 + i, i * 8192, 4096));
            wanted.insert(1000 + i, (i * 8192, 4096));
        }
        client.send(&bytes);
        for (cookie, result) in client.read_replies(&mut wanted) {
            let at = (cookie - 1000) as usize * 8192;
            assert!(result.unwrap() == data[at..at + 4096]);
        }
        // The server updates its counters one by one, so the test waits for both counters.
        eventually(|| {
            let now = fixture.server.stats();
            now.replies == before.replies + 32 && now.receives > before.receives
        });
        let after = fixture.server.stats();
        assert_eq!(after.requests - before.requests, 32);
        // The 32 requests (896 bytes) arrive at once. A socket may accept their 128 KiB of replies in a few
        // parts.
        assert_eq!(after.receives - before.receives, 1);
        assert!(after.sends - before.sends <= 3, "{} sends", after.sends - before.sends);
        assert_eq!(after.submitted, 0);

        let mut bytes = Vec::new();
        for i in 0..32_u64 {
            bytes.extend(request(0, WRITE, i, i * 4096, 4096));
            bytes.extend(pattern(i, 4096));
        }
        let before = fixture.server.stats();
        client.send(&bytes);
        for i in 0..32 {
            assert_eq!(client.chunk(), Chunk::Simple { cookie: i, error: 0 });
            assert!(device.bytes(i * 4096, 4096) == pattern(i, 4096));
        }
        let after = fixture.server.stats();
        assert!(after.sends - before.sends <= after.receives - before.receives + 1);
        device.fill(0, &data);
        client.disconnect();
    }
}

#[test]
fn request_flags_reach_device() {
    let device = MemDevice::new(MIB);
    let fixture = Fixture::serving(&device);
    let mut client = fixture.enter(true);
    assert_eq!(client.write(0, 0, &[1; 4096]), 0);
    assert_eq!(client.write(FUA, 4096, &[1; 4096]), 0);
    assert_eq!(client.run(0, WRITE_ZEROES, 0, 4096), 0);
    assert_eq!(client.run(FUA | NO_HOLE, WRITE_ZEROES, 0, 4096), 0);
    assert_eq!(client.run(FAST_ZERO, WRITE_ZEROES, 0, 4096), 0);
    assert_eq!(client.run(FUA, TRIM, 8192, 4096), 0);
    assert_eq!(client.run(0, FLUSH, 0, 0), 0);
    assert_eq!(client.run(0, CACHE, 4096, 8192), 0);
    let with = |op, offset, flags| Request::new(op, offset, 4096).with(flags);
    let wanted = [
        with(Op::Write, 0, Flags::empty()),
        with(Op::Write, 4096, Flags::FUA),
        with(Op::WriteZeroes, 0, Flags::MAY_FREE),
        with(Op::WriteZeroes, 0, Flags::FUA),
        with(Op::WriteZeroes, 0, Flags::MAY_FREE),
        with(Op::Discard, 8192, Flags::FUA),
        Request::flush(),
    ];
    assert_eq!(*device.log.lock(), wanted);
    assert_eq!(*device.prefetched.lock(), [(4096, 8192)]);
    // Each piece of a write with FUA has FUA.
    assert_eq!(client.write(FUA, 512, &vec![1; 768 << 10]), 0);
    let writes = device.requests(Op::Write);
    assert!(writes.len() > 4, "in pieces");
    assert!(writes[2..].iter().all(|write| write.flags == Flags::FUA));
    assert_eq!(writes[2..].iter().map(|write| write.len).sum::<u64>(), 768 * KIB);
    // All pieces except the first start at a block boundary.
    assert!(writes[3..].iter().all(|write| write.offset % 4096 == 0));
}

#[test]
fn block_status_reports_data_zeroes_and_holes() {
    let device = MemDevice::new(4 * MIB);
    let fixture = Fixture::serving(&device);
    let mut client = fixture.enter(true);
    assert_eq!(client.status(0, 0, 4 << 20), Ok(vec![(4 << 20, 3)]));
    assert_eq!(client.write(0, 8192, &[1; 8192]), 0);
    assert_eq!(client.run(NO_HOLE, WRITE_ZEROES, 16384, 4096), 0);
    let whole = vec![(8192, 3), (8192, 0), (4096, 2), ((4 << 20) - 20480, 3)];
    assert_eq!(client.status(0, 0, 4 << 20), Ok(whole));
    assert_eq!(client.status(REQ_ONE, 8192, 1 << 20), Ok(vec![(8192, 0)]));
    assert_eq!(client.status(REQ_ONE, 8192, 4096), Ok(vec![(4096, 0)]));
    assert_eq!(client.status(0, 8704, 512), Ok(vec![(512, 0)]));
    assert_eq!(client.status(0, 8192 + 4096, 8192), Ok(vec![(4096, 0), (4096, 2)]));
    device.bad_byte.store(4096, SeqCst);
    assert_eq!(client.status(0, 4096, 4096), Err(EIO));
    device.bad_byte.store(u64::MAX, SeqCst);
    // Block status fails if the client selected no context.
    let mut other = fixture.connect();
    other.greet(3);
    other.agree(Headers::Structured);
    other.go("disk");
    assert_eq!(other.status(0, 0, 4096), Err(EINVAL));
}

#[test]
fn block_status_descriptors_are_limited() {
    let pages = 3 * MAX_DESCRIPTORS as u64;
    let device = MemDevice::new(pages * 4096);
    for page in (0..pages).step_by(2) {
        device.fill(page * 4096, &[1; 4096]);
    }
    let fixture = Fixture::serving(&device);
    let mut client = fixture.enter(true);
    let mut at = 0;
    let mut rounds = 0;
    while at < pages * 4096 {
        let extents = client.status(0, at, pages * 4096 - at).unwrap();
        assert!(extents.len() <= MAX_DESCRIPTORS);
        for (len, flags) in extents {
            assert_eq!((len, flags), (4096, if at / 4096 % 2 == 0 { 0 } else { 3 }));
            at += len;
        }
        rounds += 1;
    }
    assert_eq!(rounds, 3);
}

#[test]
fn device_error_fails_only_its_request() {
    let device = MemDevice::new(32 * MIB);
    let fixture = Fixture::serving(&device);
    for headers in Headers::ALL {
        let mut client = fixture.enter(headers);
        device.bad_byte.store(5000, SeqCst);
        assert_eq!(client.read(4096, 4096), Err(EIO));
        assert_eq!(client.read(0, 2 << 20), Err(EIO));
        assert_eq!(client.write(0, 4096, &[1; 4096]), EIO);
        assert_eq!(client.run(0, WRITE_ZEROES, 4096, 4096), EIO);
        // The device fails in the middle of a large write: the server discards the rest of the payload.
        device.bad_byte.store(600 * KIB, SeqCst);
        device.log.lock().clear();
        assert_eq!(client.write(0, 0, &vec![8; 24 << 20]), EIO);
        // Workers may have started some of the 96 pieces after the failed piece.
        let begun = device.requests(Op::Write).len();
        assert!((3..96).contains(&begun), "{begun}");
        assert_eq!(client.read(24 << 20, 1 << 20), Ok(vec![0; 1 << 20]));
        let cookie = client.ask(DF * u16::from(client.has_chunks()), READ, 0, 2 << 20);
        let mut wanted = HashMap::from([(cookie, (0, 2 << 20))]);
        assert_eq!(client.read_replies(&mut wanted)[&cookie], Err(EIO));
        device.bad_byte.store(u64::MAX, SeqCst);
        assert!(client.read(0, 2 << 20).is_ok());
        client.disconnect();
    }
    let mut client = fixture.enter(true);
    device.bad_byte.store(0, SeqCst);
    let cookie = client.ask(0, READ, 0, 512);
    assert_eq!(client.chunk(), Chunk::Error { cookie, error: EIO, text: "I/O error".to_owned() });
}

#[test]
fn partly_done_requests_are_continued() {
    let device = MemDevice::new(8 * MIB);
    let fixture = Fixture::serving(&device);
    for per_try in [512, 8192, 100 * KIB] {
        device.set(Manner::Partly(per_try));
        for headers in Headers::ALL {
            let mut client = fixture.enter(headers);
            for len in [4096, 128 << 10, 256 << 10, 1 << 20] {
                let data = pattern(per_try + len as u64, len);
                assert_eq!(client.write(0, 4096, &data), 0);
                assert!(client.read(4096, len as u32).unwrap() == data);
            }
            assert_eq!(client.run(0, WRITE_ZEROES, 0, 1 << 20), 0);
            assert!(client.read(0, 1 << 20).unwrap() == vec![0; 1 << 20]);
            // A read that is executed in parts does not damage replies that were pending before.
            let mut bytes = client.header(0, FLUSH, 1, 0, 0);
            bytes.extend(client.header(0, READ, 2, 4096, 128 << 10));
            bytes.extend(client.header(0, FLUSH, 3, 0, 0));
            client.send(&bytes);
            assert_eq!(client.plain_reply(1), 0);
            let mut wanted = HashMap::from([(2, (4096, 128 << 10))]);
            assert_eq!(client.read_replies(&mut wanted)[&2], Ok(vec![0; 128 << 10]));
            assert_eq!(client.plain_reply(3), 0);
            client.disconnect();
        }
    }
}

#[test]
fn zoned_device_gets_writes_unsplit() {
    let device = MemDevice::zoned(64 * MIB);
    let fixture = Fixture::serving(&device);
    let mut client = fixture.enter(true);
    for len in [4096, 256 << 10, 1 << 20, 32 << 20] {
        let data = pattern(len as u64, len);
        assert_eq!(client.write(0, 4096, &data), 0);
        assert!(device.bytes(4096, len) == data);
    }
    assert_eq!(device.requests(Op::Write).len(), 4);
    assert_eq!(client.write(0, 0, &vec![1; (32 << 20) + 4096]), EINVAL);
    for (offset, len) in [(1, 512), (0, 511)] {
        assert_eq!(client.write(0, offset, &vec![1; len]), EINVAL);
        assert_eq!(client.read(offset, len as u32), Err(EINVAL));
    }
    assert_eq!(device.requests(Op::Write).len(), 4);
    device.bad_byte.store(1 << 20, SeqCst);
    assert_eq!(client.write(0, 0, &vec![1; 2 << 20]), EIO);
    assert!(client.read(0, 512).is_ok());
}

#[test]
fn requests_before_disconnect_get_replies() {
    let device = MemDevice::new(MIB);
    let fixture = Fixture::serving(&device);
    let mut client = fixture.enter(true);
    let mut bytes = request(0, WRITE, 5, 0, 512);
    bytes.extend([6; 512]);
    bytes.extend(request(0, DISC, 6, 0, 0));
    client.send(&bytes);
    assert_eq!(client.chunk(), Chunk::Simple { cookie: 5, error: 0 });
    client.assert_closed();
    fixture.assert_sound();
}

#[test]
fn device_panic_ends_only_its_connection() {
    let device = MemDevice::new(MIB);
    let fixture = Fixture::serving(&device);
    let mut bystander = fixture.enter(true);
    let mut client = fixture.enter(true);
    device.panics.store(true, SeqCst);
    client.ask(0, READ, 0, 512);
    client.assert_closed();
    assert!(bystander.read(0, 512).is_ok());
    eventually(|| fixture.server.stats().panics == 1);
    bystander.disconnect();
    fixture.assert_sound();
}

#[test]
fn grown_device_is_usable_by_connected_client() {
    let device = MemDevice::new(MIB);
    let fixture = Fixture::serving(&device);
    let mut client = fixture.enter(true);
    assert_eq!(client.write(0, MIB, &[1; 4096]), ENOSPC);
    device.grow(2 << 20);
    assert_eq!(client.write(0, MIB, &[1; 4096]), 0);
    assert_eq!(client.read(MIB, 4096), Ok(vec![1; 4096]));
    let mut newer = fixture.connect();
    newer.greet(3);
    assert_eq!(newer.go("disk").0, 2 * MIB);
}
