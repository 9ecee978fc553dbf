//! Tests of deadlines, cancellation, and hedged reads.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::{Duration, Instant};

use freestone_store::objects::{CallLimits, Fault, WriteCondition};
use freestone_testkit::LatencyProxy;
use freestone_testkit::s3::ServerFault;

use crate::{Store, soon};

/// Longest accepted delay of a call after its deadline, on a busy machine. The server itself stalls forever.
const LATE_MAX: Duration = Duration::from_secs(15);

fn stalled(trouble: ServerFault) -> Store {
    let store = Store::new();
    store.server.set_object("disks", "a/b/x", &[7; 1000]);
    store.server.add_fault(|_| true, trouble);
    store
}

#[test]
fn calls_end_at_their_deadline() {
    for trouble in [ServerFault::Stall(None), ServerFault::StallInBody(10, None)] {
        let store = stalled(trouble.clone());
        let objects = &store.objects;
        let time = Duration::from_millis(300);
        let calls: [(&str, &(dyn Fn() -> Option<Fault> + Sync)); 3] = [
            ("get", &|| objects.get("x", None, 1000, CallLimits::within(time)).err()),
            ("part", &|| objects.get("x", Some(0..100), 1000, CallLimits::within(time)).err()),
            ("list", &|| objects.list("", &mut |_| true, CallLimits::within(time)).err()),
        ];
        for (name, call) in calls {
            let since = Instant::now();
            assert_eq!(call(), Some(Fault::TimedOut), "{trouble:?} {name}");
            let took = since.elapsed();
            assert!(took >= time && took < LATE_MAX, "{trouble:?} {name}: {took:?}");
        }
    }
    let store = stalled(ServerFault::Stall(None));
    let since = Instant::now();
    let limits = || CallLimits::within(Duration::from_millis(100));
    assert_eq!(store.objects.put("y", b"", WriteCondition::Always, limits()), Err(Fault::TimedOut));
    assert_eq!(store.objects.head("x", limits()), Err(Fault::TimedOut));
    assert_eq!(store.objects.delete("x", limits()), Err(Fault::TimedOut));
    assert!(since.elapsed() < LATE_MAX, "{:?}", since.elapsed());
    assert_eq!(store.objects.get("x", None, 1, CallLimits::within(Duration::ZERO)), Err(Fault::TimedOut));
}

#[test]
fn cancelled_call_ends_promptly() {
    let store = stalled(ServerFault::Stall(None));
    let is_cancelled = AtomicBool::new(false);
    thread::scope(|scope| {
        let call = scope.spawn(|| {
            let asks = || is_cancelled.load(SeqCst);
            let limits = CallLimits { is_cancelled: &asks, ..soon() };
            store.objects.get("x", None, 1000, limits)
        });
        thread::sleep(Duration::from_millis(100));
        is_cancelled.store(true, SeqCst);
        let since = Instant::now();
        assert_eq!(call.join().unwrap(), Err(Fault::Cancelled));
        assert!(since.elapsed() < LATE_MAX, "{:?}", since.elapsed());
    });
}

#[test]
fn stalled_calls_do_not_block_others() {
    let store = Store::new();
    store.server.set_object("disks", "a/b/x", b"1");
    store.server.add_fault(|asked| asked.key.ends_with("stalls"), ServerFault::Stall(None));
    let is_cancelled = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..32 {
            scope.spawn(|| {
                let asks = || is_cancelled.load(SeqCst);
                let ended =
                    store.objects.get("stalls", None, 1, CallLimits { is_cancelled: &asks, ..soon() });
                assert_eq!(ended, Err(Fault::Cancelled));
            });
        }
        while store.requests("GET", "stalls") < 32 {
            thread::sleep(Duration::from_millis(5));
        }
        for _ in 0..20 {
            store.objects.get("x", None, 1, soon()).unwrap();
        }
        is_cancelled.store(true, SeqCst);
    });
}

fn hedging(after: u64) -> Store {
    let store = Store::with(|options| options.hedge = Some(Duration::from_millis(after)));
    store.server.set_object("disks", "a/b/x", &[7; 1000]);
    store
}

#[test]
fn hanging_read_is_hedged() {
    for trouble in [ServerFault::Stall(None), ServerFault::StallInBody(10, None)] {
        let store = hedging(100);
        store.server.add_fault(|asked| asked.nth == 1, trouble);
        let since = Instant::now();
        assert_eq!(store.objects.get("x", None, 1000, soon()).unwrap().bytes, [7; 1000]);
        let took = since.elapsed();
        assert!((100..5000).contains(&took.as_millis()), "{took:?}");
        assert_eq!(store.requests("GET", "x"), 2);
    }
}

#[test]
fn fast_read_is_not_hedged() {
    let store = hedging(5000);
    for _ in 0..3 {
        store.objects.get("x", None, 1000, soon()).unwrap();
    }
    assert_eq!(store.requests("GET", "x"), 3);
    // A read that returns a fault in time is not hedged or retried. Only callers retry.
    store.server.add_fault(|_| true, ServerFault::Status(503, "SlowDown"));
    store.objects.get("x", None, 1000, soon()).unwrap_err();
    assert_eq!(store.requests("GET", "x"), 4);
    // Writes are never hedged.
    let store = hedging(50);
    store.server.add_fault(|_| true, ServerFault::Stall(Some(Duration::from_millis(300))));
    store.objects.put("y", b"", WriteCondition::Absent, soon()).unwrap();
    assert_eq!(store.requests("PUT", "y"), 1);
}

#[test]
fn hedged_read_returns_good_response() {
    // The second request fails at once, and the first request succeeds late.
    let store = hedging(50);
    store.server.add_fault(|asked| asked.nth == 1, ServerFault::Stall(Some(Duration::from_millis(400))));
    store.server.add_fault(|asked| asked.nth == 2, ServerFault::Status(500, "InternalError"));
    assert_eq!(store.objects.get("x", None, 1000, soon()).unwrap().bytes, [7; 1000]);
    assert_eq!(store.requests("GET", "x"), 2);
    // Both requests of the hedged read fail.
    let store = hedging(50);
    store.server.add_fault(|asked| asked.nth == 1, ServerFault::Stall(Some(Duration::from_millis(200))));
    store.server.add_fault(|asked| asked.nth == 2, ServerFault::Status(500, "InternalError"));
    store.server.remove_bucket("disks");
    let missing = Fault::Other("the bucket disks is not there".to_owned());
    assert_eq!(store.objects.get("x", None, 1000, soon()), Err(missing));
}

#[test]
fn slow_link_only_delays_calls() {
    let near = Store::new();
    near.server.set_object("disks", "a/b/x", &vec![7; 1 << 20]);
    let line = LatencyProxy::start(near.server.address(), Duration::from_millis(20), Some(100_000_000));
    let far = Store::with(|options| options.endpoint = Some(line.endpoint()));
    far.objects.head("x", soon()).unwrap();
    let since = Instant::now();
    assert_eq!(far.objects.get("x", None, 1 << 20, soon()).unwrap().bytes.len(), 1 << 20);
    // The read takes a round trip of 20 ms, and 84 ms for the data at 100 Mbit/s.
    assert!((95..5000).contains(&since.elapsed().as_millis()), "{:?}", since.elapsed());
    assert!(line.bytes().1 > 1 << 20);
    // The proxy and the server count the same requests.
    far.objects.put("y", &vec![7; 100_000], WriteCondition::Always, soon()).unwrap();
    far.objects.list("", &mut |_| true, soon()).unwrap();
    let path = |key: String| if key == "disks/" { "/disks".to_owned() } else { format!("/disks/{key}") };
    let asked = near.server.traffic().requests.into_iter();
    let asked: BTreeMap<_, _> = asked.map(|((method, key), count)| ((method, path(key)), count)).collect();
    assert_eq!(line.requests(), asked);
    assert_eq!(asked.len(), 4);
}
