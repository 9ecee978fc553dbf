//! Rate limits of an export and of a device. Requests above a limit wait in order. Waiting requests fail if the
//! export or device is dropped.

use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use freestone::device::{
    Blocking, Completion, Counter, Counting, Device, Error, Flags, IoBuf, Op, Request, Result,
    StatSource as _,
};
use freestone::limits::Limits;
use freestone::null::Null;
use freestone::ram::Ram;
use freestone::zone::{StateLocation, Zones};
use freestone::{null, ram, zone};
use freestone_testkit::conformance;
use freestone_testkit::{DeferPolicy, DeferringDevice};

use crate::devices::conformance_options;

const PATIENCE: Duration = Duration::from_secs(60);
const PAGE: u64 = 4096;

fn disk() -> Arc<dyn Device> {
    Arc::new(Ram::new(ram::Config { disksize: 24 << 20, ..ram::Config::default() }).unwrap())
}

/// Returns a zoned device with two zones and without data.
fn zoned() -> Arc<dyn Device> {
    let drive = Null::new(null::Config::plain(256 << 20, 4096)).unwrap();
    let config = zone::Config { zone_size: 128 << 20, stores: false, ..zone::Config::default() };
    Arc::new(Zones::new(Arc::new(drive), config, StateLocation::Volatile, None).unwrap())
}

fn limited(limits: Limits) -> Counting {
    let device = Counting::new("d", disk());
    device.set_device_limits(&limits).unwrap();
    device
}

fn per_second(iops: u64, iops_burst: u64) -> Limits {
    Limits { iops, iops_burst, ..Limits::default() }
}

/// Submits `count` writes of one page each. Returns a receiver of the number and the result of each write.
fn writes(device: &dyn Device, count: u64) -> Receiver<(u64, Result<()>)> {
    let (tx, rx) = mpsc::channel();
    for number in 0..count {
        let tx = tx.clone();
        let done = Completion::new(move |outcome, _| {
            // The test may have dropped the receiver, which is not an error.
            let _ = tx.send((number, outcome));
        });
        device.submit(Request::write(number * PAGE, PAGE), IoBuf::zeroed(PAGE as usize).unwrap(), done);
    }
    rx
}

#[test]
fn limited_device_conforms_with_any_burst() {
    let limits = Limits { iops: 1000, bps: 1 << 20, iops_burst: 10_000_000, bps_burst: 1 << 40 };
    let options = conformance_options();
    conformance::check("limited", &|| Arc::new(limited(limits)), options);
    // With a burst of one request, nearly every request waits.
    let limits = Limits { iops: 1_000_000, iops_burst: 1, bps: 2 << 30, bps_burst: PAGE };
    conformance::check("limited, without a burst", &|| Arc::new(limited(limits)), options);
    let deferred = || -> Arc<dyn Device> {
        let inner = Arc::new(DeferringDevice::new(disk(), DeferPolicy::Sometimes(30), 3));
        let first = Counting::new("d", inner);
        first.set_device_limits(&limits).unwrap();
        let way = first.new_access_path();
        way.set_limits(&limits).unwrap();
        Arc::new(way)
    };
    conformance::check("limited twice, deferred", &deferred, options);
}

#[test]
fn limited_requests_wait_in_order_and_are_counted() {
    let device = limited(per_second(200, 1));
    let begun = Instant::now();
    let completions = writes(&device, 41);
    for number in 0..41 {
        assert_eq!(completions.recv_timeout(PATIENCE).unwrap(), (number, Ok(())));
        let least = Duration::from_millis(5) * u32::try_from(number).unwrap();
        assert!(begun.elapsed() >= least, "{number} after {:?}", begun.elapsed());
    }
    let account = device.stats();
    assert_eq!((account.ops.writes, account.ops.in_flight), (41, 0));
    // A request that is submitted late enough does not wait, so the exact number of waits is unknown.
    assert!((20..=40).contains(&account.ops.limited), "{}", account.ops.limited);
    // The latency of a request includes its wait for the limit.
    assert!(account.latency[Counter::Write].quantile(500).unwrap() >= Duration::from_millis(50));
}

#[test]
fn byte_limit_counts_reads_and_writes_only() {
    let device = limited(Limits { bps: 4 << 20, bps_burst: PAGE, ..Limits::default() });
    // Discards, write zeroes and flushes transfer no data, so the byte limit does not apply to them.
    let begun = Instant::now();
    device.discard(0, 16 << 20).unwrap();
    device.write_zeroes(0, 16 << 20, Flags::empty()).unwrap();
    device.flush().unwrap();
    assert_eq!(device.counts().limited, 0);
    device.write_at(0, &vec![7; 1 << 20], Flags::empty()).unwrap();
    let took = begun.elapsed();
    assert!((Duration::from_millis(240)..PATIENCE).contains(&took), "{took:?}");
    let mut data = vec![0; 1 << 20];
    device.read_at(0, &mut data).unwrap();
    assert!(data.iter().all(|byte| *byte == 7) && begun.elapsed() >= Duration::from_millis(480));
}

#[test]
fn refused_requests_do_not_count() {
    let device = limited(per_second(1, 1));
    for _ in 0..5 {
        assert_eq!(device.write_at(24 << 20, &[0; 4096], Flags::empty()), Err(Error::OutOfRange));
    }
    device.write_at(0, &[0; 4096], Flags::empty()).unwrap();
    assert_eq!((device.counts().limited, device.counts().errors), (0, 5));
}

#[test]
fn export_limits_apply_below_the_device_limit() {
    let device = Counting::new("d", disk());
    let (slow, fast) = (device.new_access_path(), device.new_access_path());
    slow.set_limits(&per_second(1, 1)).unwrap();
    let held = writes(&slow, 3);
    assert_eq!(held.recv_timeout(PATIENCE).unwrap(), (0, Ok(())));
    // Neither another export nor the device itself waits for the slow export.
    for way in [&fast, &device] {
        let completions = writes(way, 1000);
        (0..1000).for_each(|_| assert_eq!(completions.recv_timeout(PATIENCE).unwrap().1, Ok(())));
        assert_eq!(way.tally().op_stats().limited, 0);
    }
    assert_eq!((slow.limits(), fast.limits()), (per_second(1, 1), Limits::default()));
    // The limit of the device applies to the sum of all exports.
    device.set_device_limits(&per_second(100, 1)).unwrap();
    let begun = Instant::now();
    let (one, other) = (writes(&fast, 11), writes(&device, 10));
    (0..11).for_each(|_| assert_eq!(one.recv_timeout(PATIENCE).unwrap().1, Ok(())));
    (0..10).for_each(|_| assert_eq!(other.recv_timeout(PATIENCE).unwrap().1, Ok(())));
    assert!(begun.elapsed() >= Duration::from_millis(200), "{:?}", begun.elapsed());
    assert!(device.counts().limited > 10);
}

#[test]
fn changed_limit_applies_to_waiting_requests() {
    let device = limited(per_second(1, 1));
    let completions = writes(&device, 500);
    device.set_device_limits(&per_second(1_000_000, 1)).unwrap();
    (0..500).for_each(|number| assert_eq!(completions.recv_timeout(PATIENCE).unwrap(), (number, Ok(()))));
    device.set_device_limits(&per_second(1, 1)).unwrap();
    let completions = writes(&device, 500);
    device.set_device_limits(&Limits::default()).unwrap();
    (0..500).for_each(|number| assert_eq!(completions.recv_timeout(PATIENCE).unwrap(), (number, Ok(()))));
    // Without limits, requests complete inline again.
    let end = Instant::now() + PATIENCE;
    while device.try_io(&Request::flush(), freestone::device::Buffer::None).unwrap()
        != freestone::device::TryResult::Done
    {
        assert!(Instant::now() < end);
    }
}

#[test]
fn waiting_requests_fail_if_the_device_is_dropped() {
    let device = limited(per_second(1, 1));
    let completions = writes(&device, 10);
    assert_eq!(completions.recv_timeout(PATIENCE).unwrap(), (0, Ok(())));
    let gone = Counting::reject_waiting([&device].into_iter());
    (1..10).for_each(|number| {
        assert_eq!(completions.recv_timeout(PATIENCE).unwrap(), (number, Err(Error::Gone)));
    });
    assert_eq!(device.flush(), Err(Error::Gone), "it would have to wait");
    drop(gone);
    let completions = writes(&device, 10);
    let lifted = Counting::suspend_limits([&device].into_iter());
    (0..10).for_each(|number| assert_eq!(completions.recv_timeout(PATIENCE).unwrap(), (number, Ok(()))));
    device.flush().unwrap();
    drop(lifted);

    let way = device.new_access_path();
    way.set_limits(&per_second(1, 1)).unwrap();
    device.set_device_limits(&per_second(2, 1)).unwrap();
    let (of_way, of_device) = (writes(&way, 10), writes(&device, 10));
    drop(way);
    // Only requests that waited at the limit of the export or of the device fail.
    let outcomes: Vec<_> = of_way.iter().take(10).map(|(_, outcome)| outcome).collect();
    assert!(outcomes.iter().filter(|outcome| **outcome == Err(Error::Gone)).count() >= 8, "{outcomes:?}");
    let early = Instant::now();
    drop(device);
    let outcomes: Vec<_> = of_device.iter().take(10).map(|(_, outcome)| outcome).collect();
    assert!(outcomes.contains(&Err(Error::Gone)) && early.elapsed() < Duration::from_secs(4), "{outcomes:?}");
}

#[test]
fn requests_keep_their_order_while_limits_change() {
    const COUNT: u64 = 20_000;
    const FIRST: u64 = 100;
    let device = Arc::new(Counting::new("d", zoned()));
    device.set_device_limits(&per_second(20_000, 1)).unwrap();
    // The device has zones, so each write must start at the write pointer, and a reordered request fails.
    let (tx, rx) = mpsc::channel();
    let write = |number: u64| {
        let request = Request::write(number * PAGE, PAGE);
        let tx = tx.clone();
        let tried = device.try_io(&request, freestone::device::Buffer::Write(&[1; PAGE as usize])).unwrap();
        if tried == freestone::device::TryResult::Done {
            return tx.send(Ok(())).unwrap();
        }
        let done = Completion::new(move |outcome, _| tx.send(outcome).unwrap());
        device.submit(request, IoBuf::copy_of(&[1; PAGE as usize]).unwrap(), done);
    };
    // Some requests are already waiting when the limits change.
    (0..FIRST).for_each(write);
    let changing = Arc::clone(&device);
    let stop = Arc::new(Mutex::new(false));
    let stopped = Arc::clone(&stop);
    let changes = std::thread::spawn(move || {
        for round in 0_u64.. {
            if *stopped.lock().unwrap() {
                break;
            }
            let iops = [20_000, 0, 200_000, 0][(round % 4) as usize];
            changing.set_device_limits(&per_second(iops, 1)).unwrap();
            std::thread::sleep(Duration::from_micros(300));
        }
        changing.set_device_limits(&Limits::default()).unwrap();
    });
    (FIRST..COUNT).for_each(write);
    for _ in 0..COUNT {
        assert_eq!(rx.recv_timeout(PATIENCE).unwrap(), Ok(()));
    }
    *stop.lock().unwrap() = true;
    changes.join().unwrap();
    assert!(device.counts().limited > 0, "no request waited");
    assert_eq!(device.counts().requests(Counter::from(Op::Write)), COUNT);
}

#[test]
fn limited_appends_wait_and_fail_if_dropped() {
    let device = Counting::new("d", zoned());
    device.set_device_limits(&per_second(1, 2)).unwrap();
    let zoned = device.zoned().unwrap();
    assert_eq!(zoned.try_append(0, &[1; 4096], Flags::empty()), Ok(None), "it may have to wait");
    let (tx, rx) = mpsc::channel();
    for _ in 0..4 {
        let tx = tx.clone();
        let data = IoBuf::copy_of(&[1; 4096]).unwrap();
        let done = move |outcome| tx.send(outcome).unwrap();
        zoned.submit_append(0, data, Flags::empty(), Box::new(done));
    }
    assert_eq!([0; 2].map(|_| rx.recv_timeout(PATIENCE).unwrap()), [Ok(0), Ok(4096)]);
    let _gone = Counting::reject_waiting([&device].into_iter());
    assert_eq!([0; 2].map(|_| rx.recv_timeout(PATIENCE).unwrap()), [Err(Error::Gone); 2]);
    assert_eq!((device.counts().appends, device.counts().limited), (2, 2));
}
