//! Deadlines, calls that nobody waits for any more, and reads that are sent twice.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::{Duration, Instant};

use freestone_store::objects::{Fault, Until, When};
use freestone_testkit::Latency;
use freestone_testkit::s3::Trouble;

use crate::{Store, soon};

/// Longest time of a call after its deadline on a busy machine. The server stalls for good.
const LATE_MAX: Duration = Duration::from_secs(15);

fn stalled(trouble: Trouble) -> Store {
    let store = Store::new();
    store.server.set_object("disks", "a/b/x", &[7; 1000]);
    store.server.trouble(|_| true, trouble);
    store
}

#[test]
fn no_call_lasts_longer_than_it_may() {
    for trouble in [Trouble::Stall(None), Trouble::StallInBody(10, None)] {
        let store = stalled(trouble.clone());
        let objects = &store.objects;
        let time = Duration::from_millis(300);
        let calls: [(&str, &(dyn Fn() -> Option<Fault> + Sync)); 3] = [
            ("get", &|| objects.get("x", None, 1000, Until::within(time)).err()),
            ("part", &|| objects.get("x", Some(0..100), 1000, Until::within(time)).err()),
            ("list", &|| objects.list("", &mut |_| true, Until::within(time)).err()),
        ];
        for (name, call) in calls {
            let since = Instant::now();
            assert_eq!(call(), Some(Fault::Late), "{trouble:?} {name}");
            let took = since.elapsed();
            assert!(took >= time && took < LATE_MAX, "{trouble:?} {name}: {took:?}");
        }
    }
    let store = stalled(Trouble::Stall(None));
    let since = Instant::now();
    let until = || Until::within(Duration::from_millis(100));
    assert_eq!(store.objects.put("y", b"", When::Always, until()), Err(Fault::Late));
    assert_eq!(store.objects.head("x", until()), Err(Fault::Late));
    assert_eq!(store.objects.delete("x", until()), Err(Fault::Late));
    assert!(since.elapsed() < LATE_MAX, "{:?}", since.elapsed());
    assert_eq!(store.objects.get("x", None, 1, Until::within(Duration::ZERO)), Err(Fault::Late));
}

#[test]
fn a_call_ends_when_nobody_wants_it() {
    let store = stalled(Trouble::Stall(None));
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let call = scope.spawn(|| {
            let asks = || is_over.load(SeqCst);
            let until = Until { is_over: &asks, ..soon() };
            store.objects.get("x", None, 1000, until)
        });
        thread::sleep(Duration::from_millis(100));
        is_over.store(true, SeqCst);
        let since = Instant::now();
        assert_eq!(call.join().unwrap(), Err(Fault::Cancelled));
        assert!(since.elapsed() < LATE_MAX, "{:?}", since.elapsed());
    });
}

#[test]
fn calls_that_stall_hold_up_no_others() {
    let store = Store::new();
    store.server.set_object("disks", "a/b/x", b"1");
    store.server.trouble(|asked| asked.key.ends_with("stalls"), Trouble::Stall(None));
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..32 {
            scope.spawn(|| {
                let asks = || is_over.load(SeqCst);
                let ended = store.objects.get("stalls", None, 1, Until { is_over: &asks, ..soon() });
                assert_eq!(ended, Err(Fault::Cancelled));
            });
        }
        while store.requests("GET", "stalls") < 32 {
            thread::sleep(Duration::from_millis(5));
        }
        for _ in 0..20 {
            store.objects.get("x", None, 1, soon()).unwrap();
        }
        is_over.store(true, SeqCst);
    });
}

fn hedging(after: u64) -> Store {
    let store = Store::with(|options| options.hedge = Some(Duration::from_millis(after)));
    store.server.set_object("disks", "a/b/x", &[7; 1000]);
    store
}

#[test]
fn a_read_that_hangs_is_sent_a_second_time() {
    for trouble in [Trouble::Stall(None), Trouble::StallInBody(10, None)] {
        let store = hedging(100);
        store.server.trouble(|asked| asked.nth == 1, trouble);
        let since = Instant::now();
        assert_eq!(store.objects.get("x", None, 1000, soon()).unwrap().bytes, [7; 1000]);
        let took = since.elapsed();
        assert!((100..5000).contains(&took.as_millis()), "{took:?}");
        assert_eq!(store.requests("GET", "x"), 2);
    }
}

#[test]
fn a_read_is_not_sent_twice_without_need() {
    let store = hedging(5000);
    for _ in 0..3 {
        store.objects.get("x", None, 1000, soon()).unwrap();
    }
    assert_eq!(store.requests("GET", "x"), 3);
    // A fault is an answer, too: who calls tries again.
    store.server.trouble(|_| true, Trouble::Status(503, "SlowDown"));
    store.objects.get("x", None, 1000, soon()).unwrap_err();
    assert_eq!(store.requests("GET", "x"), 4);
    // Writes never are.
    let store = hedging(50);
    store.server.trouble(|_| true, Trouble::Stall(Some(Duration::from_millis(300))));
    store.objects.put("y", b"", When::Absent, soon()).unwrap();
    assert_eq!(store.requests("PUT", "y"), 1);
}

#[test]
fn of_two_reads_the_good_one_counts() {
    // The second fails at once, the first is late and good.
    let store = hedging(50);
    store.server.trouble(|asked| asked.nth == 1, Trouble::Stall(Some(Duration::from_millis(400))));
    store.server.trouble(|asked| asked.nth == 2, Trouble::Status(500, "InternalError"));
    assert_eq!(store.objects.get("x", None, 1000, soon()).unwrap().bytes, [7; 1000]);
    assert_eq!(store.requests("GET", "x"), 2);
    // Both are bad.
    let store = hedging(50);
    store.server.trouble(|asked| asked.nth == 1, Trouble::Stall(Some(Duration::from_millis(200))));
    store.server.trouble(|asked| asked.nth == 2, Trouble::Status(500, "InternalError"));
    store.server.remove_bucket("disks");
    let missing = Fault::Other("the bucket disks is not there".to_owned());
    assert_eq!(store.objects.get("x", None, 1000, soon()), Err(missing));
}

#[test]
fn a_long_way_is_only_slow() {
    let near = Store::new();
    near.server.set_object("disks", "a/b/x", &vec![7; 1 << 20]);
    let line = Latency::start(near.server.address(), Duration::from_millis(20), Some(100_000_000));
    let far = Store::with(|options| options.endpoint = Some(line.endpoint()));
    far.objects.head("x", soon()).unwrap();
    let since = Instant::now();
    assert_eq!(far.objects.get("x", None, 1 << 20, soon()).unwrap().bytes.len(), 1 << 20);
    // 20 ms there and back, and 84 ms for the bytes.
    assert!((95..5000).contains(&since.elapsed().as_millis()), "{:?}", since.elapsed());
    assert!(line.bytes().1 > 1 << 20);
    // The line has seen what the server was asked.
    far.objects.put("y", &vec![7; 100_000], When::Always, soon()).unwrap();
    far.objects.list("", &mut |_| true, soon()).unwrap();
    let path = |key: String| if key == "disks/" { "/disks".to_owned() } else { format!("/disks/{key}") };
    let asked = near.server.traffic().requests.into_iter();
    let asked: BTreeMap<_, _> = asked.map(|((method, key), count)| ((method, path(key)), count)).collect();
    assert_eq!(line.requests(), asked);
    assert_eq!(asked.len(), 4);
}
