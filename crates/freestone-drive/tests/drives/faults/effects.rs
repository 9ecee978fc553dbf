//! Every effect and every condition of fault rules.

use std::sync::Arc;

use freestone_core::device::{Blocking, Buffer, Device, Error, Flags, Op, Request, TryResult};
use freestone_drive::faults::Faults;
use freestone_testkit::{DeferPolicy, DeferringDevice, Model, TestDevice};

use crate::faults::support::{BLOCK, faults, fired, read, rules, submit, take_durable, write};

const SIZE: usize = 1 << 20;

/// Returns pairs of a device and the fault layer over it: the first device completes inline, the
/// second one defers.
fn devices(text: &str) -> Vec<(Arc<dyn Device>, Faults)> {
    let model: Arc<dyn Device> = Arc::new(Model::new(SIZE, BLOCK as u32));
    let deferred: Arc<dyn Device> =
        Arc::new(DeferringDevice::new(Arc::new(Model::new(SIZE, BLOCK as u32)), DeferPolicy::Always, 1));
    [model, deferred].map(|inner| (Arc::clone(&inner), faults(inner, text))).into()
}

#[test]
fn error_rule_fails_requests_without_effect() {
    for (name, error) in [
        ("EIO", Error::Media),
        ("ENOSPC", Error::NoSpace),
        ("ENOMEM", Error::NoMemory),
        ("EROFS", Error::ReadOnly),
        ("EINVAL", Error::Misaligned),
        ("EOPNOTSUPP", Error::Unsupported),
        ("ESHUTDOWN", Error::Gone),
        ("ETOOMANYREFS", Error::ZoneTooManyOpen),
        ("EOVERFLOW", Error::ZoneTooManyActive),
    ] {
        for (inner, faults) in devices(&format!("all error={name} at=64K+4K; flush error={name}")) {
            write(&*inner, 0, 7, SIZE).unwrap();
            let around = (64 << 10) - BLOCK as u64;
            // A request that overlaps the range of the rule only in part fails as a whole.
            assert_eq!(write(&faults, around, 1, 3 * BLOCK), Err(error));
            assert_eq!(faults.write_zeroes(around, 3 * BLOCK as u64, Flags::empty()), Err(error));
            assert_eq!(faults.discard(0, SIZE as u64), Err(error));
            assert_eq!(faults.read_at(64 << 10, &mut [0; BLOCK]), Err(error));
            assert_eq!(faults.flush(), Err(error));
            assert_eq!(read(&*inner, 0, SIZE), vec![7; SIZE]);
            // The rule does not affect blocks next to its range.
            assert_eq!(write(&faults, around, 1, BLOCK), Ok(()));
            assert_eq!(write(&faults, 68 << 10, 1, BLOCK), Ok(()));
            assert_eq!(fired(&faults), [4, 1]);
        }
    }
}

#[test]
fn rule_applies_to_its_operation_only() {
    let run = |faults: &Faults, operation: &str| match operation {
        "read" => faults.read_at(0, &mut [0; BLOCK]),
        "write" => write(faults, 0, 1, BLOCK),
        "discard" => faults.discard(0, 4096),
        "zeroes" => faults.write_zeroes(0, 4096, Flags::MAY_FREE),
        _ => faults.flush(),
    };
    let all = ["read", "write", "discard", "zeroes", "flush"];
    for operation in all {
        let (_, faults) = devices(&format!("{operation} error=EIO")).remove(0);
        assert_eq!(run(&faults, operation), Err(Error::Media), "{operation}");
        for other in all.into_iter().filter(|other| *other != operation) {
            assert_eq!(run(&faults, other), Ok(()), "{other} where {operation} fails");
        }
    }
    let (_, faults) = devices("writes error=EIO").remove(0);
    for (operation, fails) in
        [("read", false), ("write", true), ("discard", true), ("zeroes", true), ("flush", false)]
    {
        assert_eq!(run(&faults, operation).is_err(), fails, "{operation}");
    }
}

#[test]
fn torn_writes_arrive_in_units() {
    for (text, unit) in [("512", 512), ("4K", 4096), ("16K", 16384)] {
        for (inner, faults) in devices(&format!("write torn={text}")) {
            let mut patterns = Vec::new();
            for round in 0..8 {
                write(&*inner, 0, 1, SIZE).unwrap();
                let (offset, len) = (BLOCK * round, 64 << 10);
                write(&faults, offset as u64, 2, len).unwrap();
                let found = read(&*inner, 0, SIZE);
                assert!(
                    found[..offset].iter().chain(&found[offset + len..]).all(|byte| *byte == 1),
                    "the rest is touched"
                );
                let mut pattern = Vec::new();
                let mut at = offset;
                while at < offset + len {
                    let next = ((at / unit + 1) * unit).min(offset + len);
                    assert!(
                        found[at..next].iter().all(|byte| *byte == found[at]),
                        "a unit of {unit} is torn"
                    );
                    pattern.push(found[at] == 2);
                    at = next;
                }
                assert!(pattern.contains(&true) && pattern.contains(&false), "{pattern:?}");
                patterns.push(pattern);
            }
            assert!(patterns.iter().any(|pattern| *pattern != patterns[0]), "all are torn alike");
            assert_eq!(fired(&faults), [8]);
            if unit >= BLOCK {
                write(&faults, 0, 3, BLOCK).unwrap();
                assert_eq!(read(&*inner, 0, BLOCK), [3; BLOCK], "one unit is not torn");
                assert_eq!(fired(&faults), [8]);
            }
        }
    }
}

#[test]
fn torn_write_can_return_an_error() {
    for (inner, faults) in devices("write torn=4K error=EIO") {
        write(&*inner, 0, 1, SIZE).unwrap();
        assert_eq!(write(&faults, 0, 2, 16 * BLOCK), Err(Error::Media));
        let found = read(&*inner, 0, 16 * BLOCK);
        assert!(found.contains(&1) && found.contains(&2));
    }
}

#[test]
fn lost_writes_complete() {
    for (inner, faults) in devices("writes lost at=0+8K") {
        write(&*inner, 0, 1, SIZE).unwrap();
        assert_eq!(write(&faults, 0, 2, 4 * BLOCK), Ok(()));
        assert_eq!(faults.write_zeroes(0, 8192, Flags::empty()), Ok(()));
        assert_eq!(faults.discard(4096, 8192), Ok(()));
        assert_eq!(read(&faults, 0, SIZE), vec![1; SIZE]);
        assert_eq!(fired(&faults), [3]);
    }
}

#[test]
fn misdirected_writes_arrive_elsewhere() {
    for (inner, faults) in devices("write misdirected") {
        let mut places = Vec::new();
        for round in 0..20 {
            write(&*inner, 0, 1, SIZE).unwrap();
            assert_eq!(write(&faults, 8192, 2, 2 * BLOCK), Ok(()));
            let found = read(&*inner, 0, SIZE);
            let place = found.iter().position(|byte| *byte == 2).unwrap();
            assert!(place % BLOCK == 0 && place != 8192, "round {round}: at {place}");
            let whole = place..place + 2 * BLOCK;
            for (at, byte) in found.into_iter().enumerate() {
                assert_eq!(byte, if whole.contains(&at) { 2 } else { 1 }, "round {round}: at {at}");
            }
            places.push(place);
        }
        places.sort_unstable();
        places.dedup();
        assert!(places.len() > 10, "the places are {places:?}");
    }
    // For a write of the whole device there is no other place, so the write is dropped.
    let (inner, faults) = devices("write misdirected").remove(0);
    assert_eq!(write(&faults, 0, 2, SIZE), Ok(()));
    assert_eq!(read(&*inner, 0, SIZE), vec![0; SIZE]);
}

#[test]
fn lying_flush_has_no_effect() {
    let recorder = Arc::new(TestDevice::over(Arc::new(Model::new(SIZE, 512))));
    let faults = faults(recorder.clone(), "flush lie nth=2; writes lie at=0+4K");
    for flushes in [1, 1, 2] {
        faults.flush().unwrap();
        assert_eq!(recorder.requests(Op::Flush).len(), flushes);
    }
    for (offset, durable) in [(0, 0), (4096, 1)] {
        faults.write_at(offset, &[1; 512], Flags::FUA).unwrap();
        assert_eq!(take_durable(&recorder), durable, "write at {offset}");
        faults.write_zeroes(offset + 512, 512, Flags::FUA | Flags::MAY_FREE).unwrap();
        assert_eq!(take_durable(&recorder), durable, "zeroes at {offset}");
    }
    assert_eq!(read(&faults, 0, 512), [1; 512], "what is written is written");
    // Without the FUA flag, the rule has no flag to remove.
    write(&faults, 0, 1, 512).unwrap();
    assert_eq!(fired(&faults), [1, 2]);
}

#[test]
fn stale_reads_return_old_content() {
    for (_, faults) in devices("") {
        write(&faults, 0, 1, 16 * BLOCK).unwrap();
        faults.set(rules("read stale nth=2; read stale at=128K+64K"), None);
        let offset = 4096;
        write(&faults, offset, 2, BLOCK).unwrap();
        assert_eq!(read(&faults, offset, BLOCK), [2; BLOCK], "the first time");
        assert_eq!(read(&faults, offset, BLOCK), [1; BLOCK], "the second time");
        assert_eq!(read(&faults, offset, BLOCK), [2; BLOCK], "the third time");
        // Old content is kept for each block, so a larger read returns the old content of each
        // overwritten block.
        read(&faults, 0, 4 * BLOCK);
        write(&faults, 0, 3, BLOCK).unwrap();
        let found = read(&faults, 0, 4 * BLOCK);
        assert_eq!(found.chunks(BLOCK).map(|block| block[0]).collect::<Vec<_>>(), [1, 1, 1, 1]);
        // The old content is that before the last overwrite, and write zeroes is an overwrite.
        let place = 128 << 10;
        write(&faults, place, 4, BLOCK).unwrap();
        write(&faults, place, 5, BLOCK).unwrap();
        assert_eq!(read(&faults, place, BLOCK), [4; BLOCK]);
        faults.write_zeroes(place, 2 * BLOCK as u64, Flags::empty()).unwrap();
        assert_eq!(read(&faults, place, BLOCK), [5; BLOCK]);
        // Setting new rules discards the recorded old content.
        faults.set(rules("read stale"), None);
        assert_eq!(read(&faults, place, BLOCK), [0; BLOCK]);
    }
}

#[test]
fn rot_flips_one_bit() {
    let flipped = |data: &[u8], byte: u8| data.iter().map(|found| (found ^ byte).count_ones()).sum::<u32>();
    for (inner, faults) in devices("read rot at=0+64K; write rot at=64K+64K") {
        write(&faults, 0, 0xa5, 2 * BLOCK).unwrap();
        let mut all = Vec::new();
        for _ in 0..10 {
            let found = read(&faults, 0, 2 * BLOCK);
            assert_eq!(flipped(&found, 0xa5), 1);
            all.push(found);
        }
        assert!(all.iter().any(|found| *found != all[0]), "the same bit each time");
        assert_eq!(read(&*inner, 0, 2 * BLOCK), [0xa5; 2 * BLOCK], "what is stored is sound");
        write(&faults, 64 << 10, 0xa5, 2 * BLOCK).unwrap();
        assert_eq!(flipped(&read(&faults, 64 << 10, 2 * BLOCK), 0xa5), 1);
        assert_eq!(read(&faults, 64 << 10, 2 * BLOCK), read(&faults, 64 << 10, 2 * BLOCK), "it is stored so");
    }
}

#[test]
fn nth_times_and_after_count() {
    let outcomes = |text: &str, requests: &[u64]| -> String {
        let (_, faults) = devices(text).remove(0);
        requests
            .iter()
            .map(|at| if write(&faults, at * 4096, 1, BLOCK).is_err() { 'x' } else { '.' })
            .collect()
    };
    assert_eq!(outcomes("write error=EIO nth=3", &[0, 0, 0, 0, 0]), "..x..");
    assert_eq!(outcomes("write error=EIO nth=2", &[0, 1, 2, 1, 0, 0, 2]), "...xx.x");
    assert_eq!(outcomes("write error=EIO times=2", &[0, 1, 2, 3]), "xx..");
    assert_eq!(outcomes("write error=EIO after=2", &[0, 1, 2, 3]), "..xx");
    assert_eq!(outcomes("write error=EIO after=1 times=1", &[0, 1, 2, 3]), ".x..");
    assert_eq!(outcomes("write error=EIO nth=2 times=1", &[0, 1, 1, 0]), "..x.");
    assert_eq!(outcomes("write error=EIO at=4K+4K after=1", &[1, 0, 1, 0, 1]), "..x.x");
}

#[test]
fn chance_matches_its_probability() {
    const REQUESTS: u64 = 40_000;
    let model = Arc::new(Model::new(512 * REQUESTS as usize, 512));
    for (text, p) in [("1%", 0.01), ("1/1000", 0.001), ("0.25", 0.25), ("99.5%", 0.995), ("100%", 1.0)] {
        for seed in 0..3 {
            let faults =
                Faults::new(model.clone(), rules(&format!("read error=EIO chance={text}")), seed).unwrap();
            let failed = (0..REQUESTS).filter(|at| faults.read_at(at * 512, &mut [0; 512]).is_err()).count();
            let (mean, deviation) = (REQUESTS as f64 * p, (REQUESTS as f64 * p * (1.0 - p)).sqrt());
            let off = (failed as f64 - mean).abs();
            assert!(off <= 5.0 * deviation, "chance={text}, seed {seed}: {failed} of {REQUESTS}");
        }
    }
    // The chance also applies to repeated requests at a single offset.
    let faults = Faults::new(model, rules("read error=EIO chance=25%"), 1).unwrap();
    let failed = (0..4000).filter(|_| faults.read_at(0, &mut [0; 512]).is_err()).count();
    assert!((863..=1137).contains(&failed), "{failed} of 4000");
}

#[test]
fn effects_of_several_rules_combine() {
    // The first matching error is returned. Nothing is written, although another rule would write a
    // part.
    let (inner, faults) =
        devices("write torn=4K nth=1; write error=ENOSPC nth=1; write error=EIO; read rot; read stale")
            .remove(0);
    assert_eq!(write(&faults, 0, 1, 4 * BLOCK), Err(Error::NoSpace));
    assert_eq!(write(&faults, 0, 1, 4 * BLOCK), Err(Error::Media));
    assert_eq!(read(&*inner, 0, 4 * BLOCK), [0; 4 * BLOCK]);
    assert_eq!(fired(&faults), [1, 1, 2, 0, 0]);
}

#[test]
fn request_counts_once_and_an_invalid_one_never() {
    let (_, faults) = devices("all error=EIO nth=2").remove(1);
    let bad = [
        (Request::write(0, 100), Error::Misaligned),
        (Request::write(SIZE as u64, 4096), Error::OutOfRange),
        (Request::new(Op::Flush, 1, 0), Error::Misaligned),
    ];
    for (request, error) in bad {
        let data = vec![0; if request.op == Op::Write { request.len as usize } else { 0 }];
        let buffer = if data.is_empty() { Buffer::None } else { Buffer::Write(&data) };
        assert_eq!(faults.try_io(&request, buffer), Err(error));
        assert_eq!(submit(&faults, request, &data).wait(), Err(error));
    }
    for _ in 0..10 {
        let tried = faults.try_io(&Request::write(0, 4096), Buffer::Write(&[0; BLOCK]));
        assert_eq!(tried, Ok(TryResult::WouldBlock), "it is decided when it is submitted");
    }
    assert_eq!(faults.counts()[0].matched, 0);
    assert_eq!(write(&faults, 0, 1, BLOCK), Ok(()));
    assert_eq!(write(&faults, 0, 1, BLOCK), Err(Error::Media));
    assert_eq!((faults.counts()[0].matched, faults.counts()[0].fired), (2, 1));
    assert_eq!(faults.counts()[0].rule, "all error=EIO nth=2");
}

#[test]
fn rules_and_seed_are_shown_and_changed() {
    let (_, faults) = devices("write error=EIO chance=0.01").remove(0);
    assert_eq!((faults.rules().to_string().as_str(), faults.seed()), ("write error=EIO chance=1%", 42));
    faults.set(rules("read hang"), None);
    assert_eq!((faults.rules().to_string().as_str(), faults.seed()), ("read hang", 42));
    faults.set(rules(""), Some(7));
    assert_eq!((faults.rules().is_empty(), faults.seed()), (true, 7));
    assert_eq!(write(&faults, 0, 1, BLOCK), Ok(()));
    assert_eq!(faults.uncounted(), 0);
}

#[test]
fn request_without_a_rule_stays_inline() {
    let (_, faults) = devices("write error=EIO at=64K+4K; zeroes hang").remove(0);
    assert_eq!(faults.try_io(&Request::read(0, 4096), Buffer::Read(&mut [0; BLOCK])), Ok(TryResult::Done));
    assert_eq!(faults.try_io(&Request::write(0, 4096), Buffer::Write(&[0; BLOCK])), Ok(TryResult::Done));
    assert_eq!(
        faults.try_io(&Request::write(64 << 10, 4096), Buffer::Write(&[0; BLOCK])),
        Ok(TryResult::WouldBlock)
    );
}
