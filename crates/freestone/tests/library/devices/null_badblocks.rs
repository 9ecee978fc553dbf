//! Bad blocks of a device: changes of the ranges, failing requests, and the data transferred before
//! a failure.

use std::sync::Arc;

use freestone::device::{Blocking, Buffer, Completion, Device, Error, Flags, IoBuf, Op, Request, TryResult};
use freestone::null::{BAD_RANGES_MAX, BadBlocks, BadBlocksConfig, BadBlocksError};
use freestone_testkit::{DeferPolicy, DeferringDevice, Model, Rng};

const SIZE: usize = 1 << 20;
const SECTORS: u64 = SIZE as u64 / 512;

fn device(block: u32, once: bool, partial_io: bool) -> (Arc<Model>, BadBlocks) {
    let model = Arc::new(Model::new(SIZE, block));
    let bad = BadBlocks::new(Arc::clone(&model) as Arc<dyn Device>, BadBlocksConfig { once, partial_io });
    (model, bad)
}

#[test]
fn ranges_merge_and_split() {
    let (_, bad) = device(512, false, false);
    let steps: &[(&str, &[(u64, u64)])] = &[
        ("+8-15", &[(8, 15)]),
        ("+32-40", &[(8, 15), (32, 40)]),
        // The new range is adjacent to an existing one, so both are joined.
        ("+16-17", &[(8, 17), (32, 40)]),
        ("+0-0", &[(0, 0), (8, 17), (32, 40)]),
        ("+10-12", &[(0, 0), (8, 17), (32, 40)]),
        ("+17-32", &[(0, 0), (8, 40)]),
        ("-20-21", &[(0, 0), (8, 19), (22, 40)]),
        ("-100-200", &[(0, 0), (8, 19), (22, 40)]),
        ("-0-9", &[(10, 19), (22, 40)]),
        ("-19-22", &[(10, 18), (23, 40)]),
        ("+0-100", &[(0, 100)]),
        ("-0-2047", &[]),
        ("+2047-2047\n", &[(2047, 2047)]),
    ];
    for (text, ranges) in steps {
        bad.change(text).unwrap();
        assert_eq!(bad.ranges(), *ranges, "after {text}");
    }
}

#[test]
fn invalid_text_changes_nothing() {
    let (_, bad) = device(512, false, false);
    bad.change("+8-15").unwrap();
    for text in [
        "",
        "8-15",
        "+",
        "+8",
        "+-8",
        "+8-",
        "+a-b",
        "+8--9",
        "+ 8-9",
        "*8-9",
        "++8-9",
        "ä1-2",
        "+1-99999999999999999999",
    ] {
        assert_eq!(bad.change(text), Err(BadBlocksError::Text(text.into())), "{text}");
    }
    assert_eq!(bad.change("+9-8"), Err(BadBlocksError::ReversedRange { first: 9, last: 8 }));
    assert_eq!(bad.change("+8-2048"), Err(BadBlocksError::OutOfRange { last: 2048, sectors: SECTORS }));
    assert!(bad.change(&format!("+0-{}", u64::MAX)).is_err());
    assert_eq!(bad.ranges(), [(8, 15)]);
}

#[test]
fn at_most_512_ranges() {
    let (_, bad) = device(512, false, false);
    for n in 0..BAD_RANGES_MAX {
        bad.change(&format!("+{}-{}", n * 4, n * 4 + 2)).unwrap();
    }
    let full = bad.ranges();
    assert_eq!(full.len(), BAD_RANGES_MAX);
    // Removing the middle of a range splits it, and the list has no space for one more range.
    assert_eq!(bad.change("-1-1"), Err(BadBlocksError::TooMany));
    assert_eq!(bad.ranges(), full);
    // Adding the gap between two ranges joins them, which frees an entry for the split.
    bad.change("+3-3").unwrap();
    bad.change("-1-1").unwrap();
    assert_eq!(bad.ranges().len(), BAD_RANGES_MAX);
}

#[test]
fn ranges_against_a_set_of_sectors() {
    let (_, bad) = device(512, false, false);
    let mut rng = Rng::new(5);
    let mut model = vec![false; 256];
    for _ in 0..3000 {
        let first = rng.below(256);
        let last = (first + rng.below(20)).min(255);
        let add = rng.chance(50);
        bad.change(&format!("{}{first}-{last}", if add { '+' } else { '-' })).unwrap();
        model[first as usize..=last as usize].fill(add);
        let mut seen = vec![false; 256];
        let ranges = bad.ranges();
        for &(first, last) in &ranges {
            seen[first as usize..=last as usize].fill(true);
        }
        assert_eq!(seen, model);
        assert!(ranges.windows(2).all(|pair| pair[0].1 + 1 < pair[1].0), "neighbours are one: {ranges:?}");
        let (offset, len) = (rng.below(200), 1 + rng.below(50));
        let hit = model[offset as usize..(offset + len) as usize].contains(&true);
        assert_eq!(bad.bytes_before_bad(offset * 512, len * 512), hit.then_some(0));
    }
}

#[test]
fn request_at_bad_block_transfers_nothing() {
    let (model, bad) = device(512, false, false);
    bad.write_at(0, &[1; 8192], Flags::empty()).unwrap();
    bad.change("+8-9").unwrap();
    for (first, count, fails) in [(0, 8, false), (10, 6, false), (7, 2, true), (9, 1, true), (0, 16, true)] {
        let (offset, len) = (first * 512, count * 512);
        let expected = if fails { Err(Error::Media) } else { Ok(()) };
        assert_eq!(bad.read_at(offset, &mut vec![0; len as usize]), expected);
        assert_eq!(bad.write_at(offset, &vec![2; len as usize], Flags::empty()), expected);
        assert_eq!(bad.discard(offset, len), expected);
        assert_eq!(bad.write_zeroes(offset, len, Flags::MAY_FREE), expected);
        let mut all = vec![0; 8192];
        model.read_at(0, &mut all).unwrap();
        let touched = |byte: usize| !fails && (byte as u64) >= offset && (byte as u64) < offset + len;
        assert!(all.iter().enumerate().all(|(at, &byte)| byte == u8::from(!touched(at))));
        model.write_at(0, &[1; 8192], Flags::empty()).unwrap();
    }
    bad.flush().unwrap();
    // An invalid request fails with the error for its own fault, not because of the bad blocks.
    assert_eq!(bad.write_at(SIZE as u64, &[0; 512], Flags::empty()), Err(Error::OutOfRange));
    assert_eq!(bad.write_at(4096 + 1, &[0; 512], Flags::empty()), Err(Error::Misaligned));
    assert_eq!(bad.try_io(&Request::write(4096, 0), Buffer::Write(&[])), Err(Error::Misaligned));
}

#[test]
fn partial_io_transfers_blocks_before_bad_sector() {
    for deferred in [false, true] {
        let (model, _) = device(4096, false, true);
        let inner: Arc<dyn Device> = Arc::clone(&model) as Arc<dyn Device>;
        let inner =
            if deferred { Arc::new(DeferringDevice::new(inner, DeferPolicy::Always, 3)) } else { inner };
        let bad = BadBlocks::new(inner, BadBlocksConfig { once: false, partial_io: true });
        // The bad sectors are in the middle of the third block.
        bad.change("+19-20").unwrap();
        assert_eq!(bad.bytes_before_bad(0, 16384), Some(8192));
        assert_eq!(bad.bytes_before_bad(4096, 16384), Some(4096));
        assert_eq!((bad.bytes_before_bad(8192, 4096), bad.bytes_before_bad(0, 8192)), (Some(0), None));
        assert_eq!(bad.write_at(0, &[5; 16384], Flags::empty()), Err(Error::Media));
        let mut all = vec![0; 16384];
        model.read_at(0, &mut all).unwrap();
        assert!(all[..8192].iter().all(|&b| b == 5) && all[8192..].iter().all(|&b| b == 0));
        // A failed read still returns the blocks before the bad one.
        let mut out = [9; 16384];
        let tried = bad.try_io(&Request::read(0, 16384), Buffer::Read(&mut out));
        assert_eq!(tried, if deferred { Ok(TryResult::WouldBlock) } else { Err(Error::Media) });
        if !deferred {
            assert!(out[..8192].iter().all(|&b| b == 5) && out[8192..].iter().all(|&b| b == 9));
        }
        assert_eq!(bad.discard(0, 16384), Err(Error::Media));
        model.read_at(0, &mut all).unwrap();
        assert!(all.iter().all(|&b| b == 0));
    }
}

#[test]
fn submitted_request_returns_its_whole_buffer() {
    let (_, bad) = device(512, false, true);
    bad.change("+4-4").unwrap();
    let (tx, rx) = std::sync::mpsc::channel();
    let done = Completion::new(move |outcome, buffer| tx.send((outcome, buffer.len())).unwrap());
    bad.submit(Request::read(0, 4096), IoBuf::zeroed(4096).unwrap(), done);
    assert_eq!(rx.recv().unwrap(), (Err(Error::Media), 4096));
}

#[test]
fn range_with_once_fails_once() {
    for partial_io in [false, true] {
        let (_, bad) = device(512, true, partial_io);
        bad.change("+8-9").unwrap();
        bad.change("+12-12").unwrap();
        bad.change("+20-29").unwrap();
        // The request touches two bad ranges. Only the first one is reported and removed.
        assert_eq!(bad.read_at(6 * 512, &mut [0; 4096]), Err(Error::Media));
        assert_eq!(bad.ranges(), [(12, 12), (20, 29)]);
        assert_eq!(bad.read_at(6 * 512, &mut [0; 4096]), Err(Error::Media));
        assert_eq!(bad.ranges(), [(20, 29)]);
        bad.read_at(6 * 512, &mut [0; 4096]).unwrap();
        // A bad range is removed as a whole, even if the request touches only one sector.
        assert_eq!(bad.discard(25 * 512, 512), Err(Error::Media));
        assert_eq!(bad.ranges(), []);
        // `bytes_before_bad` is a query, so it does not remove the bad range.
        bad.change("+1-1").unwrap();
        assert!(bad.bytes_before_bad(512, 512).is_some() && bad.bytes_before_bad(512, 512).is_some());
        assert_eq!(bad.run(Request::new(Op::WriteZeroes, 512, 512)), Err(Error::Media));
        bad.run(Request::new(Op::WriteZeroes, 512, 512)).unwrap();
    }
}
