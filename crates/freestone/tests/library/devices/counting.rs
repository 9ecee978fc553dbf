//! A device with request counters keeps the device contract, and counts each request exactly once.

use std::sync::Arc;

use freestone::device::{Blocking, Completion, Counting, Device, Error, Flags, IoBuf, Op, Request};
use freestone::ram::{Config, Ram};
use freestone_testkit::conformance;
use freestone_testkit::{DeferPolicy, DeferringDevice, FaultEffect, FaultSchedule, FaultyDisk};

use crate::devices::conformance_options;

fn ram() -> Arc<dyn Device> {
    Arc::new(Ram::new(Config { disksize: 24 << 20, ..Config::default() }).unwrap())
}

#[test]
fn counting_conforms_over_inline_and_deferring_devices() {
    let counting = |inner: Arc<dyn Device>| -> Arc<dyn Device> { Arc::new(Counting::new("d", inner)) };
    conformance::check("counted", &|| counting(ram()), conformance_options());
    let deferred = || counting(Arc::new(DeferringDevice::new(ram(), DeferPolicy::Sometimes(30), 3)));
    conformance::check("counted, deferred", &deferred, conformance_options());
}

#[test]
fn each_request_counts_once_with_its_bytes() {
    for percent in [0, 40, 100] {
        let device =
            Counting::new("d", Arc::new(DeferringDevice::new(ram(), DeferPolicy::Sometimes(percent), 9)));
        for n in 0..50 {
            device.write_at(n * 65536, &vec![1; 65536], Flags::empty()).unwrap();
            device.read_at(n * 65536, &mut [0; 8192]).unwrap();
        }
        device.discard(0, 1 << 20).unwrap();
        device.write_zeroes(0, 2 << 20, Flags::empty()).unwrap();
        device.flush().unwrap();
        assert_eq!(device.write_at(24 << 20, &[0; 512], Flags::empty()), Err(Error::OutOfRange));
        let counts = device.counts();
        assert_eq!((counts.writes, counts.written_bytes), (50, 50 * 65536), "{percent} %");
        assert_eq!((counts.reads, counts.read_bytes), (50, 50 * 8192));
        assert_eq!((counts.discards, counts.discarded_bytes), (1, 1 << 20));
        assert_eq!((counts.zeroes, counts.zeroed_bytes), (1, 2 << 20));
        assert_eq!((counts.flushes, counts.errors, counts.in_flight), (1, 1, 0));
    }
}

#[test]
fn incomplete_request_is_in_flight() {
    let disk = Arc::new(FaultyDisk::new(1 << 20, 512));
    let device = Counting::new("d", disk.clone());
    disk.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Hang);
    for n in 0..3 {
        let request = Request::write(n * 512, 512);
        device.submit(request, IoBuf::zeroed(512).unwrap(), Completion::new(|_, _| {}));
    }
    disk.wait_held(3);
    assert_eq!((device.counts().in_flight, device.counts().writes), (3, 0));
    disk.heal();
    while device.counts().in_flight > 0 {
        std::thread::yield_now();
    }
    assert_eq!(device.counts().writes, 3);
}
