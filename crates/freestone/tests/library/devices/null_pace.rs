//! Null devices with a limited speed: completions are never early, the rate is about right, and a
//! deeper queue does not increase the latency.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use freestone::device::{Blocking, Buffer, Completion, Device, Error, Flags, IoBuf, Op, Request, TryResult};
use freestone::null::{COMPLETION_MAX, Config, MBPS_MAX, Memory, Null, PaceConfig, PacedDevice};
use freestone_testkit::{ModelZoned, ZonedConfig};

fn paced(mbps: u32, completion: Duration) -> PacedDevice {
    let null = Arc::new(Null::new(Config::plain(1 << 40, 512)).unwrap());
    PacedDevice::new(null, PaceConfig { mbps, completion }).unwrap()
}

/// Submits `depth` requests at once. Returns the time until all of them complete, and checks that
/// none completes before `completion` has passed.
fn at_once(device: &dyn Device, depth: u64, completion: Duration) -> Duration {
    let begun = Instant::now();
    let (tx, rx) = mpsc::channel();
    for n in 0..depth {
        let (tx, issued) = (tx.clone(), Instant::now());
        let request = match n % 4 {
            0 => Request::read(n * 512, 512),
            1 => Request::write(n * 512, 512),
            2 => Request::new(Op::Discard, n * 512, 512),
            _ => Request::flush(),
        };
        let buffer = if n % 4 < 2 { IoBuf::zeroed(512).unwrap() } else { IoBuf::empty() };
        let done = Completion::new(move |outcome, _| {
            outcome.unwrap();
            tx.send(issued.elapsed()).unwrap();
        });
        device.submit(request, buffer, done);
    }
    for _ in 0..depth {
        let took = rx.recv_timeout(Duration::from_secs(20)).unwrap();
        assert!(took >= completion, "answered after {took:?}, which is early");
    }
    begun.elapsed()
}

#[test]
fn limits_are_checked() {
    let null: Arc<dyn Device> = Arc::new(Null::new(Config::plain(1 << 40, 512)).unwrap());
    let make =
        |mbps, completion| PacedDevice::new(Arc::clone(&null), PaceConfig { mbps, completion }).is_ok();
    assert!(make(MBPS_MAX, COMPLETION_MAX));
    assert!(!make(MBPS_MAX + 1, Duration::ZERO));
    assert!(!make(0, COMPLETION_MAX + Duration::from_nanos(1)));
}

#[test]
fn completions_are_not_early_and_overlap() {
    let completion = Duration::from_millis(30);
    let device = paced(0, completion);
    let alone = at_once(&device, 1, completion);
    let deep = at_once(&device, 64, completion);
    assert!(alone >= completion);
    // Executed one by one, the 64 requests would take two seconds.
    assert!(deep < completion * 16, "64 requests at once took {deep:?}, one takes {alone:?}");
}

#[test]
fn delayed_requests_are_submitted_errors_are_not_delayed() {
    let device = paced(0, Duration::from_secs(30));
    assert_eq!(device.try_io(&Request::flush(), Buffer::None), Ok(TryResult::WouldBlock));
    assert_eq!(device.try_io(&Request::write(0, 512), Buffer::Write(&[0; 512])), Ok(TryResult::WouldBlock));
    let begun = Instant::now();
    assert_eq!(device.write_at(1, &[0; 512], Flags::empty()), Err(Error::Misaligned));
    assert_eq!(device.discard(1 << 40, 512), Err(Error::OutOfRange));
    let (tx, rx) = mpsc::channel();
    let done = Completion::new(move |outcome, _| tx.send(outcome).unwrap());
    device.submit(Request::read(1 << 40, 512), IoBuf::zeroed(512).unwrap(), done);
    assert_eq!(rx.recv().unwrap(), Err(Error::OutOfRange));
    assert!(begun.elapsed() < Duration::from_secs(20));
}

/// Returns the rate in bytes per second at which `issue` transfers data, after the burst is used
/// up.
fn rate(device: &PacedDevice, bytes: u64, issue: &mut dyn FnMut(&PacedDevice)) -> f64 {
    issue(device);
    let begun = Instant::now();
    let mut moved = 0;
    while begun.elapsed() < Duration::from_secs(1) {
        issue(device);
        moved += bytes;
    }
    moved as f64 / begun.elapsed().as_secs_f64()
}

#[test]
fn bandwidth_is_close_to_the_configured_rate() {
    const MIB: u64 = 1 << 20;
    let mut out = vec![0; MIB as usize];
    // Requests of 4 KiB, and requests larger than the burst of 20 ms. Reads and writes share one
    // budget.
    for (mbps, size, write) in [(20, 4096, false), (20, 4096, true), (50, 256 << 10, true), (8, MIB, false)] {
        let device = paced(mbps, Duration::ZERO);
        let mut issue = |device: &PacedDevice| {
            let part = &mut out[..size as usize];
            if write {
                device.write_at(0, part, Flags::empty()).unwrap();
            } else {
                device.read_at(0, part).unwrap();
            }
        };
        let wanted = f64::from(mbps) * MIB as f64;
        // The rate never exceeds the limit. The rate may be lower on a busy machine, but hardly in
        // all five attempts.
        let reached = (0..5).any(|_| {
            let rate = rate(&device, size, &mut issue);
            assert!(
                rate < wanted * 1.5,
                "{rate:.0} bytes a second in requests of {size} where {wanted:.0} may be"
            );
            rate > wanted / 1.5
        });
        assert!(reached, "{wanted:.0} bytes a second were not reached in requests of {size}");
    }
}

#[test]
fn large_request_delays_the_next_one() {
    let device = paced(1, Duration::ZERO);
    let begun = Instant::now();
    // The write needs the budget of half a second at once.
    device.write_at(0, &vec![0; 512 << 10], Flags::empty()).unwrap();
    device.read_at(0, &mut [0; 512]).unwrap();
    let took = begun.elapsed();
    // The burst of an idle device is 20 ms, so that much of the half second is free.
    assert!(took >= Duration::from_millis(475), "{took:?}");
    assert!(took < Duration::from_secs(5), "{took:?}");
    // Requests without data do not use the budget, so they do not wait.
    device.write_at(0, &vec![0; 8 << 20], Flags::empty()).unwrap();
    let begun = Instant::now();
    device.flush().unwrap();
    device.discard(0, 1 << 40).unwrap();
    device.write_zeroes(0, 1 << 40, Flags::MAY_FREE).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(4));
}

#[test]
fn deferred_request_counts_once() {
    let config = Config { max_request: 4096, ..Config::plain(1 << 30, 512) };
    let device = PacedDevice::new(
        Arc::new(Memory::new(config).unwrap()),
        PaceConfig { mbps: 4, completion: Duration::ZERO },
    )
    .unwrap();
    let data: Vec<u8> = (0..1 << 20).map(|n: u32| (n / 512) as u8).collect();
    let begun = Instant::now();
    // The write uses the budget of 256 blocks at 4 MiB per second.
    device.write_at(0, &data, Flags::empty()).unwrap();
    device.write_at(1 << 20, &data[..512], Flags::empty()).unwrap();
    let took = begun.elapsed();
    assert!((Duration::from_millis(225)..Duration::from_secs(2)).contains(&took), "{took:?}");
    let mut out = vec![0; 1 << 20];
    device.read_at(0, &mut out).unwrap();
    assert!(out == data);
}

#[test]
fn appends_are_paced_zone_operations_are_not() {
    use freestone::device::zoned::ZoneOp;

    let config = ZonedConfig {
        zone_size: 1 << 20,
        zone_capacity: 1 << 20,
        nr_zones: 8,
        conventional: 0,
        max_open: 0,
        max_active: 0,
    };
    let model: Arc<dyn Device> = Arc::new(ModelZoned::new(config));
    let completion = Duration::from_millis(20);
    let device = PacedDevice::new(model, PaceConfig { mbps: 0, completion }).unwrap();
    let zones = device.zoned().expect("the zones show through");
    assert_eq!(zones.try_append(0, &[1; 4096], Flags::empty()), Ok(None));
    let issued = Instant::now();
    let (tx, rx) = mpsc::channel();
    for _ in 0..8 {
        let tx = tx.clone();
        let done = Box::new(move |outcome| tx.send(outcome).unwrap());
        zones.submit_append(0, IoBuf::copy_of(&[3; 4096]).unwrap(), Flags::empty(), done);
    }
    let places: Vec<u64> =
        (0..8).map(|_| rx.recv_timeout(Duration::from_secs(20)).unwrap().unwrap()).collect();
    assert!(issued.elapsed() >= completion);
    assert_eq!(places, (0..8).map(|n| n * 4096).collect::<Vec<u64>>());
    zones.zone_op(ZoneOp::Reset, 0).unwrap();
    let mut seen = 0;
    zones
        .report(0, &mut |zone| {
            seen += u32::from(zone.write_pointer == zone.start);
            true
        })
        .unwrap();
    assert_eq!(seen, 8);
    zones.reset_all().unwrap();
}
