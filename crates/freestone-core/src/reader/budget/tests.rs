use super::*;
use crate::sync::{AtomicU32, Ordering};

const MIB: u64 = 1 << 20;

#[derive(Default)]
struct GrantCount(AtomicU32);

impl GrantReceiver for GrantCount {
    fn receive_grant(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Creates `N` shares of one new device, each with the counter of its grants.
fn shares<const N: usize>(budget: &Arc<Budget>) -> [(Share, Arc<GrantCount>); N] {
    let device = Arc::default();
    std::array::from_fn(|_| {
        let count = Arc::new(GrantCount::default());
        (budget.share(&device, Arc::clone(&count) as Arc<dyn GrantReceiver>), count)
    })
}

/// Creates a share of a new device, with the counter of its grants.
fn share(budget: &Arc<Budget>) -> (Share, Arc<GrantCount>) {
    let [share] = shares(budget);
    share
}

fn grants(count: &GrantCount) -> u32 {
    count.0.load(Ordering::SeqCst)
}

/// Reserves `bytes` bytes, or waits for them holding no bytes. Returns true if the bytes were available.
fn take_or_wait(share: &mut Share, bytes: u64) -> bool {
    let there = share.try_reserve(bytes);
    if !there {
        share.wait_for(0, bytes);
    }
    there
}

/// Reserves `request` bytes for each share repeatedly until the budget refuses. Returns the number of bytes
/// reserved.
fn fill(shares: &mut [(Share, Arc<GrantCount>)], request: u64) -> u64 {
    let mut all = 0;
    for (share, _) in shares {
        let mut held = 0;
        while share.try_reserve(held + request) {
            held += request;
        }
        all += held;
    }
    all
}

#[test]
fn waiting_share_returns_released_bytes() {
    let budget = Budget::new(64 * MIB);
    let (mut a, grants_a) = share(&budget);
    assert!(a.try_reserve(4 * MIB) && !a.try_reserve(14 * MIB));
    a.wait_for(4 * MIB, 10 * MIB);
    assert_eq!(grants(&grants_a), 0);
    // The share's requests have completed. If the wait did not return bytes, the share would wait for bytes
    // that only it holds.
    assert!(!a.try_reserve(10 * MIB));
    a.wait_for(0, 10 * MIB);
    assert_eq!(grants(&grants_a), 1);
    assert!(a.try_reserve(10 * MIB));
    a.release_all();
    assert_eq!(budget.bytes().1, 0);
}

#[test]
fn share_that_stops_waiting_keeps_its_bytes() {
    let budget = Budget::new(64 * MIB);
    let [(mut a, _), (mut b, grants_b), (mut c, grants_c)] = shares(&budget);
    assert!(take_or_wait(&mut a, 20 * MIB) && b.try_reserve(MIB) && !b.try_reserve(31 * MIB));
    b.wait_for(MIB, 30 * MIB);
    b.stop_waiting(MIB);
    a.release_all();
    assert_eq!((grants(&grants_b), budget.bytes().1), (0, MIB));
    b.release_all();
    // The share stops waiting after the bytes were granted.
    assert!(take_or_wait(&mut a, 40 * MIB) && !take_or_wait(&mut c, 20 * MIB));
    a.release_all();
    assert_eq!(grants(&grants_c), 1);
    c.stop_waiting(0);
    assert_eq!(budget.bytes().1, 0);
}

#[test]
fn shares_of_device_are_served_in_order() {
    let budget = Budget::new(64 * MIB);
    let [(mut a, _), (mut b, _), (mut c, grants_c), (mut d, grants_d)] = shares(&budget);
    assert!(take_or_wait(&mut a, 20 * MIB));
    // A single share of each device may exceed the device's limit.
    assert!(take_or_wait(&mut b, 20 * MIB));
    assert!(!take_or_wait(&mut c, 10 * MIB) && c.is_waiting());
    assert!(!take_or_wait(&mut d, 600 << 10));
    a.release_all();
    assert_eq!((grants(&grants_c), grants(&grants_d)), (0, 0), "20 MiB are more than a quarter of 36");
    b.release_all();
    assert_eq!((grants(&grants_c), grants(&grants_d)), (1, 1));
    assert!(c.try_reserve(10 * MIB) && d.try_reserve(600 << 10) && !c.is_waiting());
    drop((a, b, c, d));
    assert_eq!(budget.bytes(), (64 * MIB, 0));
}

#[test]
fn stuck_device_leaves_room_for_next() {
    let budget = Budget::new(DEFAULT_BYTES);
    let mut stuck: Vec<_> = Vec::new();
    for number in 0..7 {
        let mut device: [_; 16] = shares(&budget);
        let held = fill(&mut device, MIB);
        assert!(held <= DEFAULT_BYTES / 5, "device {number} holds {held}");
        stuck.push(device);
    }
    let (mut share, _) = share(&budget);
    assert!(share.try_reserve(32 * MIB), "the largest request of another device passes");
}

#[test]
fn stuck_shares_leave_room_for_next_of_device() {
    let budget = Budget::new(DEFAULT_BYTES);
    let mut all: [_; 3] = shares(&budget);
    assert!(fill(&mut all[..2], MIB) > 32 * MIB);
    assert!(all[2].0.try_reserve(4 * MIB));
}

#[test]
fn shares_with_little_pass_shares_that_hold_all() {
    let budget = Budget::new(64 * MIB);
    let [(mut slow, _), (mut over_limit, _), (mut large, grants_large), (mut small, _)] = shares(&budget);
    assert!(take_or_wait(&mut slow, 40 * MIB) && take_or_wait(&mut over_limit, 16 * MIB));
    assert!(!take_or_wait(&mut large, MIB));
    assert!(take_or_wait(&mut small, SMALL_SHARE_BYTES));
    assert!(!small.try_reserve(SMALL_SHARE_BYTES + 1), "that exceeds SMALL_SHARE_BYTES");
    drop((slow, over_limit));
    assert_eq!(grants(&grants_large), 1);
    assert!(large.try_reserve(MIB) && small.try_reserve(SMALL_SHARE_BYTES + 1));
}

/// A share that waits while it holds many bytes can be served after it has returned them.
#[test]
fn waiting_share_is_served_when_it_holds_little() {
    let budget = Budget::new(64 * MIB);
    let [(mut stuck, _), (mut over_limit, _), (mut share, grants_share)] = shares(&budget);
    assert!(share.try_reserve(SMALL_SHARE_BYTES));
    assert!(take_or_wait(&mut stuck, 8 * MIB) && !take_or_wait(&mut over_limit, 60 * MIB));
    // First the share waits with SMALL_SHARE_BYTES held, then with more.
    share.wait_for(SMALL_SHARE_BYTES, 4096);
    assert_eq!(grants(&grants_share), 1, "the device has room");
    let (mut others, _) = self::share(&budget);
    assert!(others.try_reserve(30 * MIB));
    assert!(share.try_reserve(SMALL_SHARE_BYTES + 4096));
    share.wait_for(SMALL_SHARE_BYTES + 4096, SMALL_SHARE_BYTES);
    assert_eq!(grants(&grants_share), 1);
    others.release_all();
    assert_eq!(grants(&grants_share), 2, "bytes of another device are granted");
}

#[test]
fn released_waiting_share_delays_no_other() {
    let budget = Budget::new(64 * MIB);
    let [(mut a, _), (mut b, _), (mut c, grants_c)] = shares(&budget);
    let (mut other, _) = share(&budget);
    assert!(take_or_wait(&mut a, 16 * MIB) && take_or_wait(&mut other, 24 * MIB));
    assert!(!take_or_wait(&mut b, 30 * MIB) && !take_or_wait(&mut c, 16 * MIB + 1));
    b.release_all();
    assert!(!b.is_waiting());
    assert_eq!(grants(&grants_c), 0);
    other.release_all();
    assert_eq!(grants(&grants_c), 1);
    assert!(c.try_reserve(16 * MIB + 1));
    drop((a, b, c, other));
    assert_eq!(budget.bytes().1, 0);
    let state = budget.state.lock();
    assert!(state.by_device.is_empty() && state.waiting.is_empty());
    assert_eq!((state.free_shares.len(), state.free_groups.len()), (4, 2));
}

#[test]
fn devices_that_want_more_than_free_both_go_on() {
    let budget = Budget::new(64 * MIB);
    let [(mut a, grants_a), (mut b, grants_b)] = [share(&budget), share(&budget)];
    assert!(a.try_reserve(28 * MIB) && b.try_reserve(28 * MIB));
    // The wait returns bytes that are reserved but not in use.
    assert!(!take_or_wait(&mut a, 32 * MIB));
    assert_eq!(grants(&grants_a), 0);
    assert!(!take_or_wait(&mut b, 32 * MIB));
    assert_eq!((grants(&grants_a), grants(&grants_b)), (1, 0));
    assert!(a.try_reserve(32 * MIB));
    a.release_all();
    assert_eq!(grants(&grants_b), 1);
}

/// A simulated connection that keeps `depth` requests in flight, in virtual time.
struct Connection {
    share: Share,
    depth: usize,
    request: u64,
    /// Completion times of requests in flight, in ticks.
    ends: VecDeque<u64>,
    /// Duration of a request in ticks.
    takes: u64,
    done: u64,
}

impl Connection {
    fn tick(&mut self, now: u64) {
        while self.ends.front().is_some_and(|end| *end <= now) {
            self.ends.pop_front();
            self.done += 1;
        }
        let held = |ends: &VecDeque<u64>| ends.len() as u64 * self.request;
        match held(&self.ends) {
            0 if !self.share.is_waiting() => self.share.release_all(),
            bytes => self.share.shrink_to(bytes),
        }
        while self.ends.len() < self.depth {
            let bytes = held(&self.ends);
            if !self.share.try_reserve(bytes + self.request) {
                return self.share.wait_for(bytes, self.request);
            }
            self.ends.push_back(now.saturating_add(self.takes));
        }
    }
}

/// Simulates tenants, each a device with connections (number, queue depth, request bytes, ticks for each
/// request). Returns the number of requests that each tenant completed.
fn run(tenants: &[(usize, usize, u64, u64)]) -> Vec<u64> {
    let budget = Budget::new(DEFAULT_BYTES);
    let mut all: Vec<Vec<Connection>> = Vec::new();
    for &(connections, depth, request, takes) in tenants {
        let device = Arc::default();
        let connection = |_| {
            let share = budget.share(&device, Arc::new(GrantCount::default()));
            Connection { share, depth, request, ends: VecDeque::new(), takes, done: 0 }
        };
        all.push((0..connections).map(connection).collect());
    }
    for now in 0..2000 {
        all.iter_mut().flatten().for_each(|connection| connection.tick(now));
    }
    all.iter().map(|connections| connections.iter().map(|connection| connection.done).sum()).collect()
}

/// The stuck tenants start first and reserve all bytes that they can.
#[test]
fn ten_tenants_three_stuck_others_keep_speed() {
    const HUNG: u64 = u64::MAX;
    let stuck = [(16, 128, MIB, HUNG), (16, 128, 256 << 10, 1000), (16, 1, 32 * MIB, HUNG)];
    let healthy = [
        (1, 1, 4 << 10, 1),
        (8, 32, 4 << 10, 2),
        (1, 32, 128 << 10, 2),
        (4, 16, 128 << 10, 2),
        (1, 8, MIB, 3),
        (4, 2, MIB, 3),
        (64, 1, 64 << 10, 5),
    ];
    let alone = run(&healthy);
    let beside = run(&[&stuck[..], &healthy[..]].concat());
    for (number, (beside, alone)) in beside[stuck.len()..].iter().zip(&alone).enumerate() {
        assert!(beside * 10 >= alone * 9, "tenant {number}: {beside} of {alone} requests");
    }
}
