//! Delayed and hanging requests: effects of the fault rules `delay` and `hang`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_core::device::{Device, Error, Request};
use freestone_testkit::{DeferPolicy, DeferringDevice, Model};

use crate::faults::support::{BLOCK, faults, read, rules, submit, write};

fn model() -> Arc<dyn Device> {
    Arc::new(Model::new(1 << 20, 512))
}

#[test]
fn delay_is_not_shortened_and_blocks_no_thread() {
    const REQUESTS: u64 = 200;
    for inner in [model(), Arc::new(DeferringDevice::new(model(), DeferPolicy::Always, 1))] {
        let faults = faults(inner, "read delay=100ms; write delay=10ms; write delay=60ms at=0+4K");
        let begin = Instant::now();
        let completions: Vec<_> =
            (0..REQUESTS).map(|at| submit(&faults, Request::read(at * 512, 512), &[0; 512])).collect();
        for completion in &completions {
            completion.wait().unwrap();
        }
        let took = begin.elapsed();
        assert!(took >= Duration::from_millis(100), "{took:?}");
        // Executed one by one, the delayed requests would take 20 s.
        assert!(took < Duration::from_secs(10), "{took:?}");
        // If several delays apply to a request, the longest one is used.
        let begin = Instant::now();
        write(&faults, 0, 1, 512).unwrap();
        assert!(begin.elapsed() >= Duration::from_millis(60));
        assert_eq!(faults.hung_requests(), 0, "what is delayed does not hang");
        assert_eq!(faults.release(), 0);
    }
}

#[test]
fn delayed_error_completes_late() {
    let faults = faults(model(), "read error=EIO delay=50ms");
    let begin = Instant::now();
    assert_eq!(submit(&faults, Request::read(0, 512), &[0; 512]).wait(), Err(Error::Media));
    assert!(begin.elapsed() >= Duration::from_millis(50));
}

#[test]
fn released_requests_complete() {
    let inner = model();
    let faults = faults(Arc::clone(&inner), "write hang; flush hang times=1; read hang error=EIO at=64K+4K");
    let first = submit(&faults, Request::write(0, 4096), &[1; BLOCK]);
    let flush = submit(&faults, Request::flush(), &[]);
    let failing = submit(&faults, Request::read(64 << 10, 512), &[0; 512]);
    assert_eq!(read(&*inner, 0, BLOCK), [1; BLOCK], "it is done at once");
    assert_eq!(faults.hung_requests(), 3);
    // Requests without a matching rule complete while others hang.
    assert_eq!(read(&faults, 0, BLOCK), [1; BLOCK]);
    assert_eq!(submit(&faults, Request::flush(), &[]).wait(), Ok(()));
    std::thread::sleep(Duration::from_millis(20));
    assert!(first.is_open() && flush.is_open() && failing.is_open());
    assert_eq!(faults.release(), 3);
    assert_eq!((first.wait(), flush.wait(), failing.wait()), (Ok(()), Ok(()), Err(Error::Media)));
    assert_eq!((faults.hung_requests(), faults.release()), (0, 0));
    // A release does not remove the rule, so the next request hangs again. A hung request still
    // hangs after the rules are replaced.
    let next = submit(&faults, Request::write(0, 4096), &[2; BLOCK]);
    faults.set(rules(""), None);
    assert!(next.is_open());
    assert_eq!(faults.release(), 1);
    assert_eq!(next.wait(), Ok(()));
}

#[test]
fn dropping_the_device_completes_hung_requests() {
    for policy in [None, Some(DeferPolicy::Always)] {
        let inner: Arc<dyn Device> = match policy {
            None => model(),
            Some(policy) => Arc::new(DeferringDevice::new(model(), policy, 1)),
        };
        let faults = faults(inner, "write hang; read delay=3600s");
        let hanging: Vec<_> =
            (0..8).map(|at| submit(&faults, Request::write(at * 512, 512), &[1; 512])).collect();
        let delayed = submit(&faults, Request::read(0, 512), &[0; 512]);
        drop(faults);
        for completion in hanging {
            assert_eq!(completion.wait(), Err(Error::Gone));
        }
        assert_eq!(delayed.wait(), Err(Error::Gone));
    }
}

#[test]
fn closed_device_completes_hung_requests() {
    let faults = faults(model(), "write hang; read delay=3600s at=0+4K");
    let hanging = submit(&faults, Request::write(0, 512), &[1; 512]);
    let delayed = submit(&faults, Request::read(0, 512), &[0; 512]);
    faults.close();
    assert_eq!((hanging.wait(), delayed.wait()), (Err(Error::Gone), Err(Error::Gone)));
    assert_eq!(submit(&faults, Request::write(0, 512), &[1; 512]).wait(), Err(Error::Gone));
    assert_eq!(submit(&faults, Request::read(0, 512), &[1; 512]).wait(), Err(Error::Gone));
    assert_eq!(submit(&faults, Request::read(8192, 512), &[1; 512]).wait(), Ok(()));
    assert_eq!(faults.hung_requests(), 0);
}
