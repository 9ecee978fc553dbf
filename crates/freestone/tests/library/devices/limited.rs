//! Limits of a way into a device, and of all ways together: who comes too early waits, in order, and
//! is told when its turn never comes.

use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use freestone::device::{
    Blocking, Completion, Counter, Counting, Device, Error, Flags, IoBuf, Op, Request, Result, Told as _,
};
use freestone::limits::Limits;
use freestone::null::Null;
use freestone::ram::Ram;
use freestone::zone::{State, Zones};
use freestone::{null, ram, zone};
use freestone_testkit::conformance;
use freestone_testkit::{Deferred, Policy};

use crate::devices::conformance_options;

const PATIENCE: Duration = Duration::from_secs(60);
const PAGE: u64 = 4096;

fn disk() -> Arc<dyn Device> {
    Arc::new(Ram::new(ram::Config { disksize: 24 << 20, ..ram::Config::default() }).unwrap())
}

/// Two zones, whose data goes nowhere.
fn zoned() -> Arc<dyn Device> {
    let drive = Null::new(null::Config::plain(256 << 20, 4096)).unwrap();
    let config = zone::Config { zone_size: 128 << 20, stores: false, ..zone::Config::default() };
    Arc::new(Zones::new(Arc::new(drive), config, State::Volatile, None).unwrap())
}

fn limited(limits: Limits) -> Counting {
    let device = Counting::new("d", disk());
    device.set_device_limits(&limits).unwrap();
    device
}

fn per_second(iops: u64, iops_burst: u64) -> Limits {
    Limits { iops, iops_burst, ..Limits::default() }
}

/// Submits so many writes of a page; hears their numbers and outcomes.
fn writes(device: &dyn Device, count: u64) -> Receiver<(u64, Result<()>)> {
    let (tell, told) = mpsc::channel();
    for number in 0..count {
        let tell = tell.clone();
        let done = Completion::new(move |outcome, _| {
            // The test may not want to hear it any more.
            let _ = tell.send((number, outcome));
        });
        device.submit(Request::write(number * PAGE, PAGE), IoBuf::zeroed(PAGE as usize).unwrap(), done);
    }
    told
}

#[test]
fn it_conforms_with_little_and_a_large_burst() {
    let limits = Limits { iops: 1000, bps: 1 << 20, iops_burst: 10_000_000, bps_burst: 1 << 40 };
    let options = conformance_options();
    conformance::check("limited", &|| Arc::new(limited(limits)), options);
    // Where nearly each request waits.
    let limits = Limits { iops: 1_000_000, iops_burst: 1, bps: 2 << 30, bps_burst: PAGE };
    conformance::check("limited, without a burst", &|| Arc::new(limited(limits)), options);
    let deferred = || -> Arc<dyn Device> {
        let inner = Arc::new(Deferred::new(disk(), Policy::Sometimes(30), 3));
        let first = Counting::new("d", inner);
        first.set_device_limits(&limits).unwrap();
        let way = first.another_way();
        way.set_limits(&limits).unwrap();
        Arc::new(way)
    };
    conformance::check("limited twice, deferred", &deferred, options);
}

#[test]
fn requests_wait_for_their_turn_in_order_and_are_counted() {
    let device = limited(per_second(200, 1));
    let begun = Instant::now();
    let told = writes(&device, 41);
    for number in 0..41 {
        assert_eq!(told.recv_timeout(PATIENCE).unwrap(), (number, Ok(())));
        let least = Duration::from_millis(5) * u32::try_from(number).unwrap();
        assert!(begun.elapsed() >= least, "{number} after {:?}", begun.elapsed());
    }
    let account = device.account();
    assert_eq!((account.counted.writes, account.counted.limited, account.counted.in_flight), (41, 40, 0));
    // The time is part of what it took.
    assert!(account.latency[Counter::Write].within(500).unwrap() >= Duration::from_millis(50));
}

#[test]
fn bytes_are_limited_of_reads_and_writes_and_a_large_request_pays_first() {
    let device = limited(Limits { bps: 4 << 20, bps_burst: PAGE, ..Limits::default() });
    // No bytes of data.
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
fn what_is_refused_pays_nothing() {
    let device = limited(per_second(1, 1));
    for _ in 0..5 {
        assert_eq!(device.write_at(24 << 20, &[0; 4096], Flags::empty()), Err(Error::OutOfRange));
    }
    device.write_at(0, &[0; 4096], Flags::empty()).unwrap();
    assert_eq!((device.counts().limited, device.counts().errors), (0, 5));
}

#[test]
fn ways_have_limits_of_their_own_below_that_of_the_device() {
    let device = Counting::new("d", disk());
    let (slow, fast) = (device.another_way(), device.another_way());
    slow.set_limits(&per_second(1, 1)).unwrap();
    let held = writes(&slow, 3);
    assert_eq!(held.recv_timeout(PATIENCE).unwrap(), (0, Ok(())));
    // Neither waits for the slow one.
    for way in [&fast, &device] {
        let told = writes(way, 1000);
        (0..1000).for_each(|_| assert_eq!(told.recv_timeout(PATIENCE).unwrap().1, Ok(())));
        assert_eq!(way.tally().counted().limited, 0);
    }
    assert_eq!((slow.limits(), fast.limits()), (per_second(1, 1), Limits::default()));
    // All together have one limit, whichever way they come.
    device.set_device_limits(&per_second(100, 1)).unwrap();
    let begun = Instant::now();
    let (one, other) = (writes(&fast, 11), writes(&device, 10));
    (0..11).for_each(|_| assert_eq!(one.recv_timeout(PATIENCE).unwrap().1, Ok(())));
    (0..10).for_each(|_| assert_eq!(other.recv_timeout(PATIENCE).unwrap().1, Ok(())));
    assert!(begun.elapsed() >= Duration::from_millis(200), "{:?}", begun.elapsed());
    assert!(device.counts().limited >= 21);
}

#[test]
fn a_change_is_heeded_by_who_waits() {
    let device = limited(per_second(1, 1));
    let told = writes(&device, 500);
    device.set_device_limits(&per_second(1_000_000, 1)).unwrap();
    (0..500).for_each(|number| assert_eq!(told.recv_timeout(PATIENCE).unwrap(), (number, Ok(()))));
    device.set_device_limits(&per_second(1, 1)).unwrap();
    let told = writes(&device, 500);
    device.set_device_limits(&Limits::default()).unwrap();
    (0..500).for_each(|number| assert_eq!(told.recv_timeout(PATIENCE).unwrap(), (number, Ok(()))));
    // Without limits what can be done at once is.
    let end = Instant::now() + PATIENCE;
    while device.try_io(&Request::flush(), freestone::device::Buffer::None).unwrap()
        != freestone::device::Tried::Done
    {
        assert!(Instant::now() < end);
    }
}

#[test]
fn who_waits_is_gone_when_the_device_or_its_content_goes_and_goes_on_when_limits_are_lifted() {
    let device = limited(per_second(1, 1));
    let told = writes(&device, 10);
    assert_eq!(told.recv_timeout(PATIENCE).unwrap(), (0, Ok(())));
    let gone = Counting::end_waiting([&device].into_iter());
    (1..10).for_each(|number| assert_eq!(told.recv_timeout(PATIENCE).unwrap(), (number, Err(Error::Gone))));
    assert_eq!(device.flush(), Err(Error::Gone), "it would have to wait");
    drop(gone);
    let told = writes(&device, 10);
    let lifted = Counting::lift_limits([&device].into_iter());
    (0..10).for_each(|number| assert_eq!(told.recv_timeout(PATIENCE).unwrap(), (number, Ok(()))));
    device.flush().unwrap();
    drop(lifted);

    let way = device.another_way();
    way.set_limits(&per_second(1, 1)).unwrap();
    device.set_device_limits(&per_second(2, 1)).unwrap();
    let (of_way, of_device) = (writes(&way, 10), writes(&device, 10));
    drop(way);
    // What waited in either line of it, and nothing of others.
    let outcomes: Vec<_> = of_way.iter().take(10).map(|(_, outcome)| outcome).collect();
    assert!(outcomes.iter().filter(|outcome| **outcome == Err(Error::Gone)).count() >= 8, "{outcomes:?}");
    let early = Instant::now();
    drop(device);
    let outcomes: Vec<_> = of_device.iter().take(10).map(|(_, outcome)| outcome).collect();
    assert!(outcomes.contains(&Err(Error::Gone)) && early.elapsed() < Duration::from_secs(4), "{outcomes:?}");
}

#[test]
fn requests_of_one_caller_keep_their_order_while_limits_come_and_go() {
    const COUNT: u64 = 20_000;
    let device = Arc::new(Counting::new("d", zoned()));
    device.set_device_limits(&per_second(20_000, 1)).unwrap();
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
    // Each at the write pointer, none waited for: one that gets by another fails.
    let (tell, told) = mpsc::channel();
    for number in 0..COUNT {
        let request = Request::write(number * PAGE, PAGE);
        let tell = tell.clone();
        let tried = device.try_io(&request, freestone::device::Buffer::Write(&[1; PAGE as usize])).unwrap();
        if tried == freestone::device::Tried::Done {
            tell.send(Ok(())).unwrap();
            continue;
        }
        let done = Completion::new(move |outcome, _| tell.send(outcome).unwrap());
        device.submit(request, IoBuf::copy_of(&[1; PAGE as usize]).unwrap(), done);
    }
    for _ in 0..COUNT {
        assert_eq!(told.recv_timeout(PATIENCE).unwrap(), Ok(()));
    }
    *stop.lock().unwrap() = true;
    changes.join().unwrap();
    assert!(device.counts().limited > 0, "some have waited");
    assert_eq!(device.counts().requests(Counter::from(Op::Write)), COUNT);
}

#[test]
fn appends_pay_and_are_told_when_they_are_gone() {
    let device = Counting::new("d", zoned());
    device.set_device_limits(&per_second(1, 2)).unwrap();
    let zoned = device.zoned().unwrap();
    assert_eq!(zoned.try_append(0, &[1; 4096], Flags::empty()), Ok(None), "it may have to wait");
    let (tell, told) = mpsc::channel();
    for _ in 0..4 {
        let tell = tell.clone();
        let data = IoBuf::copy_of(&[1; 4096]).unwrap();
        let done = move |outcome| tell.send(outcome).unwrap();
        zoned.submit_append(0, data, Flags::empty(), Box::new(done));
    }
    assert_eq!([0; 2].map(|_| told.recv_timeout(PATIENCE).unwrap()), [Ok(0), Ok(4096)]);
    let _gone = Counting::end_waiting([&device].into_iter());
    assert_eq!([0; 2].map(|_| told.recv_timeout(PATIENCE).unwrap()), [Err(Error::Gone); 2]);
    assert_eq!((device.counts().appends, device.counts().limited), (2, 2));
}
