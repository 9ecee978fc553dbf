//! Fault rules of the image store.

use freestone::store::objects::Fault;
use freestone_testkit::Rng;
use freestone_testkit::objects::{Effect, MemoryStore};

use super::super::Causes;
use crate::rt::sync::atomic::{AtomicU64, Ordering};
use crate::rt::sync::{Arc, Mutex, PoisonError};
use crate::rt::thread;
use crate::rt::time::{Duration, Instant};

/// Time during which a fault of the image store can affect requests: a later request may have waited for the
/// same object.
const SHOWS_MAX: Duration = Duration::from_secs(3);

/// Number of the faults of the image store, and time of the last one.
#[derive(Default)]
pub struct StoreFaults {
    count: AtomicU64,
    last: Mutex<Option<Instant>>,
}

impl StoreFaults {
    fn record(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    fn time_left(&self) -> Duration {
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.map_or(Duration::ZERO, |last| SHOWS_MAX.saturating_sub(last.elapsed()))
    }

    pub fn causes(&self) -> Causes {
        Causes {
            errors: self.count.load(Ordering::SeqCst),
            hung: u64::from(self.time_left() > Duration::ZERO),
        }
    }

    pub fn wait_until_over(&self) {
        loop {
            let shows = self.time_left();
            if shows.is_zero() {
                return;
            }
            thread::sleep(shows);
        }
    }
}

/// Sets rules under which requests to the image store fail at random, according to the seed.
pub fn set_random(memory: &MemoryStore, faults: &Arc<StoreFaults>, seed: u64) {
    let mut rng = Rng::new(seed);
    let percent = [3, 15, 50, 100][rng.below(4) as usize];
    let only = rng.chance(50).then(|| rng.below(8));
    let faults = Arc::clone(faults);
    memory.set_fault_rule(move |call| {
        let mut rng = Rng::new(seed ^ call.number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        if !rng.chance(percent) {
            return Effect::Pass;
        }
        let busy = || Fault::Transient("503: slow down".into());
        let effect = match only.unwrap_or_else(|| rng.below(8)) {
            0 => Effect::Fail(busy()),
            1 => Effect::FailAfter(busy()),
            2 => Effect::Delay(Duration::from_millis(rng.below(700))),
            3 => Effect::Hang,
            4 | 5 => Effect::Flip(rng.below(1 << 20) as usize),
            6 => Effect::Truncate(rng.below(5000) as usize),
            _ => Effect::Fail(Fault::Denied("403".into())),
        };
        faults.record();
        effect
    });
}

/// Makes all requests fail after the next `after` ones. `is_done`: the first failing request takes effect
/// nevertheless.
pub fn fail_from(memory: &MemoryStore, after: u64, is_done: bool) {
    let first = memory.calls() + after;
    let killed = || Fault::Other("killed".into());
    memory.set_fault_rule(move |call| match call.number.checked_sub(first) {
        None => Effect::Pass,
        Some(0) if is_done => Effect::FailAfter(killed()),
        Some(_) => Effect::Fail(killed()),
    });
}
