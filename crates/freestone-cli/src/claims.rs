//! Who works on which device. Verbs that change one device run one after the other, in the order in
//! which they came; verbs on others are not held up. A name is claimed before there is a device,
//! and until there is none any more, so two verbs that make or remove the same one never meet.
//!
//! A verb claims all that it needs at once, and holds it for as long as it works, also while it
//! waits for a disk or for clients that are cut off. Each claim has a number, and stands in the
//! queue of every name that it wants under that number. It is granted when nothing that it could
//! meet stands before it in any of these queues. So the waits of claims go from higher to lower
//! numbers, and no ring can come about.
//!
//! Addresses are claimed in the same way, with devices claimed already; devices are never claimed
//! by who has an address. So the waits for addresses end.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use freestone_nbd::Address;
use freestone_spec::refusal::Errno;

use crate::control::protocol::Fault;
use freestone::mutants::{self, Mutant};

/// How long a verb waits for one that runs on the same device, counted from when that one began: so
/// a long queue is no error, and a disk that hangs holds up nobody for longer.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// How often one looks again that waits for others that wait themselves.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The claims of a server. One lock, held to look at queues and to change them.
#[derive(Default)]
pub struct Claims {
    queues: Mutex<Queues>,
}

#[derive(Default)]
struct Queues {
    next: u64,
    /// By name, then by number.
    names: HashMap<String, BTreeMap<u64, Wish>>,
}

struct Wish {
    verb: &'static str,
    /// Others may have it, too, if they share it as well.
    shared: bool,
    granted: Option<Instant>,
    bell: Arc<Condvar>,
}

/// Devices that a verb has for itself, or shares, until this is dropped.
pub struct Claim<'a> {
    claims: &'a Claims,
    number: u64,
    names: Vec<String>,
}

/// What stands before a wish.
struct Before<'a> {
    name: &'a str,
    verb: &'static str,
    granted: Option<Instant>,
}

impl Claims {
    /// Devices by name for a verb: `own` for it alone, `shared` with others that only need them to
    /// stay as they are.
    pub fn devices(&self, verb: &'static str, own: &[&str], shared: &[&str]) -> Result<Claim<'_>, Fault> {
        let mut wanted: BTreeMap<String, bool> =
            shared.iter().map(|name| ((*name).to_owned(), true)).collect();
        wanted.extend(own.iter().map(|name| ((*name).to_owned(), false)));
        // Not for addresses, too: who has devices claims those beside them, and would wait for
        // itself.
        if mutants::on(Mutant::OneVerbAtATime) {
            wanted.insert("every verb".to_owned(), false);
        }
        self.claim(verb, wanted)
    }

    /// An address for a verb alone. No device is claimed by who has it.
    pub fn address(&self, verb: &'static str, address: &Address) -> Result<Claim<'_>, Fault> {
        // Names of devices have no '='.
        self.claim(verb, BTreeMap::from([(format!("={address}"), false)]))
    }

    fn claim(&self, verb: &'static str, wanted: BTreeMap<String, bool>) -> Result<Claim<'_>, Fault> {
        let bell = Arc::new(Condvar::new());
        let mut queues = self.lock();
        let number = queues.next;
        queues.next += 1;
        for (name, &shared) in &wanted {
            let wish = Wish { verb, shared, granted: None, bell: Arc::clone(&bell) };
            queues.names.entry(name.clone()).or_default().insert(number, wish);
        }
        // From here on it goes from the queues when it is dropped.
        let claim = Claim { claims: self, number, names: wanted.into_keys().collect() };
        loop {
            let Some(before) = queues.before(&claim) else {
                queues.grant(&claim);
                return Ok(claim);
            };
            let left = before.granted.map(|since| WAIT_MAX.saturating_sub(since.elapsed()));
            if left == Some(Duration::ZERO) {
                let why =
                    format!("{}: {} is running there", before.name.trim_start_matches('='), before.verb);
                // Before the claim, which locks them to leave.
                drop(queues);
                return Err(Fault::failed(Errno::EBUSY, why));
            }
            let rung = bell.wait_timeout(queues, left.unwrap_or(LOOK_EVERY));
            queues = rung.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queues> {
        // Nothing in here can be half done.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queues {
    /// Something that a claim has to wait for: what has run for longest, else anything.
    fn before<'a>(&self, claim: &'a Claim<'_>) -> Option<Before<'a>> {
        let mut found: Option<Before<'a>> = None;
        for name in &claim.names {
            let Some(queue) = self.names.get(name) else { continue };
            let shared = queue.get(&claim.number).is_some_and(|wish| wish.shared);
            for (_, wish) in queue.range(..claim.number).filter(|(_, wish)| !(shared && wish.shared)) {
                let longer = match (wish.granted, found.as_ref().and_then(|found| found.granted)) {
                    (Some(this), Some(other)) => this < other,
                    (this, _) => this.is_some() || found.is_none(),
                };
                if longer {
                    found = Some(Before { name, verb: wish.verb, granted: wish.granted });
                }
            }
        }
        found
    }

    fn grant(&mut self, claim: &Claim<'_>) {
        for name in &claim.names {
            if let Some(wish) = self.names.get_mut(name).and_then(|queue| queue.get_mut(&claim.number)) {
                wish.granted = Some(Instant::now());
            }
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut queues = self.claims.lock();
        for name in &self.names {
            let Some(queue) = queues.names.get_mut(name) else { continue };
            queue.remove(&self.number);
            if queue.is_empty() {
                queues.names.remove(name);
                continue;
            }
            // Whose turn it may be now: the first one, and those that share it with that.
            for (at, wish) in queue.values().enumerate() {
                if at > 0 && !wish.shared {
                    break;
                }
                if wish.granted.is_none() {
                    wish.bell.notify_one();
                }
                if !wish.shared {
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
    fn a_device_is_one_verbs_or_shared_and_others_are_not_held_up() {
        let claims = Claims::default();
        let first = claims.devices("remove", &["a"], &[]).unwrap();
        drop(claims.devices("remove", &["b"], &[]).unwrap());
        let (order, came) = mpsc::channel();
        thread::scope(|scope| {
            let claim = |verb, own: &'static [&str], shared: &'static [&str]| {
                let (order, claims) = (order.clone(), &claims);
                let before = claims.lock().next;
                scope.spawn(move || {
                    let claim = claims.devices(verb, own, shared).unwrap();
                    order.send(verb).unwrap();
                    drop(claim);
                });
                while claims.lock().next == before {
                    thread::yield_now();
                }
            };
            claim("snapshot", &["c", "a"], &[]);
            claim("fork", &["d"], &["a"]);
            // Behind the snapshot, which waits.
            claim("merge", &["c"], &[]);
            assert_eq!(came.try_recv(), Err(mpsc::TryRecvError::Empty));
            drop(first);
            assert_eq!(came.recv(), Ok("snapshot"));
            let mut others = [came.recv().unwrap(), came.recv().unwrap()];
            others.sort_unstable();
            assert_eq!(others, ["fork", "merge"]);
        });
        let (one, other) =
            (claims.devices("fork", &["x"], &["base"]), claims.devices("fork", &["y"], &["base"]));
        assert!(one.is_ok() && other.is_ok(), "they share the base");
        drop((one, other));
        assert!(claims.lock().names.is_empty());
    }

    #[test]
    fn many_claims_of_many_names_in_any_order_are_all_granted_and_never_two_of_one() {
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
        assert!(claims.lock().names.is_empty());
    }
}
