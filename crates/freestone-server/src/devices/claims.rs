//! Claims: locks by device name that serialize verbs.
//!
//! Verbs that change the same device run one after the other, in the order of their requests. A verb claims a
//! name before the device exists, and releases it after the device is gone. So two verbs cannot create or
//! remove the same device at the same time.
//!
//! A verb claims all names at once, and holds them until it ends, even while it waits for a disk or a
//! disconnect. Each claim has a number, and is queued under that number for each of its names. A claim is
//! granted when none of its queues has a conflicting claim with a lower number. Claims wait only for lower
//! numbers, so they cannot deadlock.
//!
//! Addresses are claimed in the same way. Lock order: devices, then addresses. A verb that has claimed an
//! address claims no device.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone::mutants::{self, Mutant};
use freestone_control::protocol::RpcError;
use freestone_core::sync::{Condvar, Mutex};
use freestone_nbd::Address;

/// Longest wait for a running verb on the same device, counted from the grant of that verb's claim. So a long
/// queue of short verbs does not fail, and a hung disk blocks other verbs for no longer than this.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// Interval at which a waiting claim checks its queues while the claims ahead of it are not granted either.
const RECHECK_INTERVAL: Duration = Duration::from_secs(1);

/// All claims of a server. The mutex is locked only while queues are read or changed.
#[derive(Default)]
pub struct Claims {
    queues: Mutex<Queues>,
}

#[derive(Default)]
struct Queues {
    next: u64,
    /// Queued claims, by device name or address, then by claim number.
    names: HashMap<String, BTreeMap<u64, QueuedClaim>>,
}

struct QueuedClaim {
    verb: &'static str,
    /// True if other shared claims may hold the name at the same time.
    shared: bool,
    /// Time when the claim was granted, or `None` while the claim waits.
    granted: Option<Instant>,
    wakeup: Arc<Condvar>,
}

/// Guard of the devices or the address that a verb has claimed. Dropping the guard releases them.
pub struct Claim<'a> {
    claims: &'a Claims,
    number: u64,
    names: Vec<String>,
}

/// A claim that another claim waits for.
struct BlockingClaim<'a> {
    name: &'a str,
    verb: &'static str,
    granted: Option<Instant>,
}

impl Claims {
    /// Claims devices by name: `own` exclusively, `shared` together with other verbs that only need the
    /// device to remain unchanged.
    pub fn devices(&self, verb: &'static str, own: &[&str], shared: &[&str]) -> Result<Claim<'_>, RpcError> {
        let mut wanted: BTreeMap<String, bool> =
            shared.iter().map(|name| ((*name).to_owned(), true)).collect();
        wanted.extend(own.iter().map(|name| ((*name).to_owned(), false)));
        // Claims of addresses omit this name: a verb claims them in addition to devices, and would wait for
        // itself.
        if mutants::on(Mutant::OneVerbAtATime) {
            wanted.insert("every verb".to_owned(), false);
        }
        self.claim(verb, wanted)
    }

    /// Claims an address exclusively. The holder must not claim devices, because devices are claimed before
    /// addresses.
    pub fn address(&self, verb: &'static str, address: &Address) -> Result<Claim<'_>, RpcError> {
        // Device names cannot contain '=', so the name of an address never equals a device name.
        self.claim(verb, BTreeMap::from([(format!("={address}"), false)]))
    }

    fn claim(&self, verb: &'static str, wanted: BTreeMap<String, bool>) -> Result<Claim<'_>, RpcError> {
        freestone_core::trail::step!();
        let wakeup = Arc::new(Condvar::new());
        let mut queues = self.queues.lock();
        let number = queues.next;
        queues.next += 1;
        for (name, &shared) in &wanted {
            let waiting = QueuedClaim { verb, shared, granted: None, wakeup: Arc::clone(&wakeup) };
            queues.names.entry(name.clone()).or_default().insert(number, waiting);
        }
        // From here on, an early return drops the claim, which removes it from the queues.
        let claim = Claim { claims: self, number, names: wanted.into_keys().collect() };
        loop {
            let Some(blocker) = queues.blocker_of(&claim) else {
                queues.grant(&claim);
                return Ok(claim);
            };
            let left = blocker.granted.map(|since| WAIT_MAX.saturating_sub(since.elapsed()));
            if left == Some(Duration::ZERO) {
                let why = format!(
                    "{}: is in use by {}, which has been running for more than {} s; try again later",
                    blocker.name.trim_start_matches('='),
                    blocker.verb,
                    WAIT_MAX.as_secs()
                );
                // The queues are unlocked before `claim` is dropped, because its destructor locks them.
                drop(queues);
                refuse!(EBUSY, "{why}");
            }
            queues = wakeup.wait_timeout(queues, left.unwrap_or(RECHECK_INTERVAL)).0;
        }
    }
}

impl Queues {
    /// Returns a claim that blocks `claim`: the one granted first, or else a waiting one. Returns `None` if
    /// `claim` can be granted.
    fn blocker_of<'a>(&self, claim: &'a Claim<'_>) -> Option<BlockingClaim<'a>> {
        let mut found: Option<BlockingClaim<'a>> = None;
        for name in &claim.names {
            let Some(queue) = self.names.get(name) else { continue };
            let shared = queue.get(&claim.number).is_some_and(|queued| queued.shared);
            for (_, queued) in queue.range(..claim.number).filter(|(_, queued)| !(shared && queued.shared)) {
                let longer = match (queued.granted, found.as_ref().and_then(|found| found.granted)) {
                    (Some(this), Some(other)) => this < other,
                    (this, _) => this.is_some() || found.is_none(),
                };
                if longer {
                    found = Some(BlockingClaim { name, verb: queued.verb, granted: queued.granted });
                }
            }
        }
        found
    }

    fn grant(&mut self, claim: &Claim<'_>) {
        for name in &claim.names {
            if let Some(queued) = self.names.get_mut(name).and_then(|queue| queue.get_mut(&claim.number)) {
                queued.granted = Some(Instant::now());
            }
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut queues = self.claims.queues.lock();
        for name in &self.names {
            let Some(queue) = queues.names.get_mut(name) else { continue };
            queue.remove(&self.number);
            if queue.is_empty() {
                queues.names.remove(name);
                continue;
            }
            // Wakes the first claim in the queue, and the shared claims directly behind a shared first claim.
            for (at, queued) in queue.values().enumerate() {
                if at > 0 && !queued.shared {
                    break;
                }
                if queued.granted.is_none() {
                    queued.wakeup.notify_one();
                }
                if !queued.shared {
                    break;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::thread;

    use super::Claims;

    #[test]
    fn claim_waits_in_order_and_shared_claims_coexist() {
        let claims = Claims::default();
        let first = claims.devices("remove", &["a"], &[]).unwrap();
        drop(claims.devices("remove", &["b"], &[]).unwrap());
        let (order, received) = mpsc::channel();
        thread::scope(|scope| {
            let claim = |verb, own: &'static [&str], shared: &'static [&str]| {
                let (order, claims) = (order.clone(), &claims);
                let before = claims.queues.lock().next;
                scope.spawn(move || {
                    let claim = claims.devices(verb, own, shared).unwrap();
                    order.send(verb).unwrap();
                    drop(claim);
                });
                while claims.queues.lock().next == before {
                    thread::yield_now();
                }
            };
            claim("snapshot", &["c", "a"], &[]);
            claim("fork", &["d"], &["a"]);
            // The merge waits behind the snapshot, which is queued for "c" but not granted.
            claim("merge", &["c"], &[]);
            assert_eq!(received.try_recv(), Err(mpsc::TryRecvError::Empty));
            drop(first);
            assert_eq!(received.recv(), Ok("snapshot"));
            let mut others = [received.recv().unwrap(), received.recv().unwrap()];
            others.sort_unstable();
            assert_eq!(others, ["fork", "merge"]);
        });
        let (one, other) =
            (claims.devices("fork", &["x"], &["base"]), claims.devices("fork", &["y"], &["base"]));
        assert!(one.is_ok() && other.is_ok(), "they share the base");
        drop((one, other));
        assert!(claims.queues.lock().names.is_empty());
    }

    #[test]
    fn concurrent_claims_are_exclusive_and_all_granted() {
        const NAMES: [&str; 4] = ["a", "b", "c", "d"];
        let claims = Claims::default();
        let inside: [AtomicUsize; 4] = Default::default();
        thread::scope(|scope| {
            for number in 0..8 {
                let (claims, inside) = (&claims, &inside);
                scope.spawn(move || {
                    for round in 0..500 {
                        let (one, other) = ((number + round) % 4, (number * 3 + round * 2 + 1) % 4);
                        let claim = claims.devices("set", &[NAMES[one], NAMES[other]], &[]).unwrap();
                        for at in [one, other] {
                            let there = inside[at].fetch_add(1, Ordering::SeqCst);
                            assert_eq!(there, usize::from(at == other && one == other && there == 1));
                        }
                        for at in [one, other] {
                            inside[at].fetch_sub(1, Ordering::SeqCst);
                        }
                        drop(claim);
                    }
                });
            }
        });
        assert!(claims.queues.lock().names.is_empty());
    }
}
