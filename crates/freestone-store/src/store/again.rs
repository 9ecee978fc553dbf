//! Another try.

use crate::rt::thread;
use crate::rt::time::{Duration, Instant};

use crate::objects::{Fault, Until};

/// How long one try may take.
pub const TRY_MAX: Duration = Duration::from_secs(15);
/// The longest pause after the first try, and the longest of all.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// How often it is asked meanwhile whether anybody still waits.
const STEP: Duration = Duration::from_millis(50);

/// Tries until it works, fails for good, or `until` is over. Between two tries there is a pause of
/// random length, twice as long at most as the one before: so many that failed together do not come
/// back together.
pub(super) fn again<T>(
    until: Until<'_>,
    mut call: impl FnMut() -> crate::objects::Result<T>,
) -> crate::objects::Result<T> {
    let mut longest = PAUSE_FIRST;
    loop {
        let fault = match call() {
            Ok(done) => return Ok(done),
            Err(fault) if fault.may_pass() => fault,
            Err(fault) => return Err(fault),
        };
        let resume = Instant::now() + longest.mul_f64(random());
        longest = PAUSE_MAX.min(longest * 2);
        loop {
            match until.check() {
                Ok(()) => {}
                // What the store said tells more than that the time is up.
                Err(Fault::Late) => return Err(fault),
                Err(over) => return Err(over),
            }
            let now = Instant::now();
            if now >= resume {
                break;
            }
            // Not longer than there is time: then it is known that there is none.
            thread::sleep(STEP.min(resume - now).min(until.deadline.saturating_duration_since(now)));
        }
    }
}

/// From a half to one.
fn random() -> f64 {
    let bits = crate::rt::unique_id().as_u128() as u32;
    0.5 + f64::from(bits) / f64::from(u32::MAX) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_work_later_is_tried_again() {
        let mut left = 3;
        let answer = again(Until::within(Duration::from_secs(10)), || {
            left -= 1;
            if left == 0 { Ok(7) } else { Err(Fault::Transient("busy".into())) }
        });
        assert_eq!(answer, Ok(7));
        let mut calls = 0;
        let answer = again::<()>(Until::within(Duration::from_secs(10)), || {
            calls += 1;
            Err(Fault::Denied("no".into()))
        });
        assert_eq!((answer, calls), (Err(Fault::Denied("no".into())), 1));
    }

    #[test]
    fn it_ends_with_what_the_store_said() {
        let busy = || Err::<(), _>(Fault::Transient("busy".into()));
        let since = Instant::now();
        let answer = again(Until::within(Duration::from_millis(300)), busy);
        assert_eq!(answer, Err(Fault::Transient("busy".into())));
        assert!(since.elapsed() < Duration::from_secs(5));
        // Where there is little time the pause is no longer than that.
        let fastest = (0..20).map(|_| {
            let since = Instant::now();
            assert_eq!(
                again(Until::within(Duration::from_millis(2)), busy),
                Err(Fault::Transient("busy".into()))
            );
            since.elapsed()
        });
        assert!(fastest.min() < Some(Duration::from_millis(20)));
        let over = Until { is_over: &|| true, ..Until::within(Duration::from_secs(300)) };
        assert_eq!(again(over, busy), Err(Fault::Cancelled));
    }
}
