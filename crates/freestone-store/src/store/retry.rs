//! Retries of requests to a store.

use crate::rt::thread;
use crate::rt::time::{Duration, Instant};

use crate::objects::{CallLimits, Fault};

/// Timeout of one attempt of a request.
pub const TRY_MAX: Duration = Duration::from_secs(15);
/// Maximum pause after the first attempt. The maximum doubles after each attempt, up to `PAUSE_MAX`.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
/// Maximum pause after any attempt.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Interval between checks for cancellation during a pause.
const STEP: Duration = Duration::from_millis(50);

/// Repeats `call` until it succeeds or fails permanently, or the deadline or a cancellation in `limits` ends
/// the retries. Between attempts there is a random pause whose maximum doubles each time, so clients that
/// failed together do not retry together.
pub(super) fn retry<T>(
    limits: CallLimits<'_>,
    mut call: impl FnMut() -> crate::objects::Result<T>,
) -> crate::objects::Result<T> {
    freestone_core::trail::step!();
    let mut longest = PAUSE_FIRST;
    loop {
        let fault = match call() {
            Ok(done) => return Ok(done),
            Err(fault) if fault.is_retryable() => fault,
            Err(fault) => return Err(fault),
        };
        let resume = Instant::now() + longest.mul_f64(random());
        longest = PAUSE_MAX.min(longest * 2);
        loop {
            match limits.check() {
                Ok(()) => {}
                // The last fault of the store is more useful than a timeout.
                Err(Fault::TimedOut) => return Err(fault),
                Err(over) => return Err(over),
            }
            let now = Instant::now();
            if now >= resume {
                break;
            }
            // Sleeps until the deadline at most, to report the timeout promptly.
            thread::sleep(STEP.min(resume - now).min(limits.deadline.saturating_duration_since(now)));
        }
    }
}

/// Returns a random number from 0.5 to 1.
fn random() -> f64 {
    let bits = crate::rt::unique_id().as_u128() as u32;
    0.5 + f64::from(bits) / f64::from(u32::MAX) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transient_fault_is_retried() {
        let mut left = 3;
        let answer = retry(CallLimits::within(Duration::from_secs(10)), || {
            left -= 1;
            if left == 0 { Ok(7) } else { Err(Fault::Transient("busy".into())) }
        });
        assert_eq!(answer, Ok(7));
        let mut calls = 0;
        let answer = retry::<()>(CallLimits::within(Duration::from_secs(10)), || {
            calls += 1;
            Err(Fault::Denied("no".into()))
        });
        assert_eq!((answer, calls), (Err(Fault::Denied("no".into())), 1));
    }

    #[test]
    fn deadline_reports_last_fault_of_store() {
        let busy = || Err::<(), _>(Fault::Transient("busy".into()));
        let since = Instant::now();
        let answer = retry(CallLimits::within(Duration::from_millis(300)), busy);
        assert_eq!(answer, Err(Fault::Transient("busy".into())));
        assert!(since.elapsed() < Duration::from_secs(5));
        // Pauses are shorter if little time is left until the deadline.
        let fastest = (0..20).map(|_| {
            let since = Instant::now();
            assert_eq!(
                retry(CallLimits::within(Duration::from_millis(2)), busy),
                Err(Fault::Transient("busy".into()))
            );
            since.elapsed()
        });
        assert!(fastest.min() < Some(Duration::from_millis(20)));
        let over = CallLimits { is_cancelled: &|| true, ..CallLimits::within(Duration::from_secs(300)) };
        assert_eq!(retry(over, busy), Err(Fault::Cancelled));
    }
}
