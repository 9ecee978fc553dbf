//! Timer: runs actions, such as delayed completions, on one thread of the process.
//!
//! A delayed request occupies an entry in a tree instead of a thread. Callers bound the number of entries.
//!
//! Lock order: `pending` is innermost. Actions run, and are dropped, without the lock.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::sync::{Condvar, Instant, LazyLock, Mutex};

/// Timer slack of the thread in nanoseconds. The kernel's default of 50 us exceeds the shortest delays.
const SLACK_NS: NonZeroU64 = NonZeroU64::MIN;
/// Maximum number of due actions removed while the lock is held once. Bounds the time that callers wait for
/// the lock.
const BATCH: usize = 64;

type Action = Box<dyn FnOnce() + Send>;
/// Due time, and a sequence number that orders actions of the same time.
type Key = (Instant, u64);

/// Handle of a scheduled action, by which it can be cancelled.
#[derive(Debug, Clone, Copy)]
pub struct Alarm(Key);

impl Alarm {
    /// Returns the time at which the action is due.
    pub fn due(&self) -> Instant {
        self.0.0
    }
}

struct Timer {
    pending: Mutex<Pending>,
    changed: Condvar,
}

#[derive(Default)]
struct Pending {
    actions: BTreeMap<Key, Action>,
    next: u64,
    running: bool,
}

static TIMER: LazyLock<Timer> =
    LazyLock::new(|| Timer { pending: Mutex::default(), changed: Condvar::new() });

/// Starts the timer thread unless it runs. After a success, [`schedule`] cannot fail.
pub fn start() -> std::io::Result<()> {
    TIMER.start(&mut TIMER.pending.lock())
}

/// Schedules `action` to run on the timer thread at `when` or later. Actions with the same time run in the
/// order of the calls. All delayed completions share the thread, so actions must be short and must not block.
///
/// # Errors
/// The error from starting the thread. The action is dropped.
pub fn schedule(when: Instant, action: impl FnOnce() + Send + 'static) -> std::io::Result<Alarm> {
    // The action is boxed before the lock is taken, and on an error dropped after the lock is released.
    let action: Action = Box::new(action);
    let mut pending = TIMER.pending.lock();
    TIMER.start(&mut pending)?;
    let key = (when, pending.next);
    pending.next += 1;
    let first = pending.actions.first_key_value().is_none_or(|(first, _)| key < *first);
    pending.actions.insert(key, action);
    drop(pending);
    if first {
        TIMER.changed.notify_one();
    }
    Ok(Alarm(key))
}

/// Cancels and drops an action, unless it has started.
pub fn cancel(alarm: Alarm) {
    let action = TIMER.pending.lock().actions.remove(&alarm.0);
    // Dropped after the lock is released, because `pending` is innermost and the action's destructor may run
    // any code.
    drop(action);
}

impl Timer {
    fn start(&'static self, pending: &mut Pending) -> std::io::Result<()> {
        if !pending.running {
            crate::sync::thread::Builder::new().name("timer".into()).spawn(|| self.run())?;
            pending.running = true;
        }
        Ok(())
    }

    fn run(&self) {
        if let Err(error) = rustix::thread::set_current_timer_slack(Some(SLACK_NS)) {
            tracing::warn!(%error, "cannot set the timer slack; delays are rounded up to about 50 us");
        }
        let mut due: Vec<Action> = Vec::with_capacity(BATCH);
        loop {
            self.take_due(&mut due);
            for action in due.drain(..) {
                // The panic hook has reported the panic, which must not affect other devices.
                let _ = catch_unwind(AssertUnwindSafe(action));
            }
        }
    }

    /// Waits until actions are due, and moves up to `BATCH` due actions into `due`.
    fn take_due(&self, due: &mut Vec<Action>) {
        let mut pending = self.pending.lock();
        loop {
            let now = Instant::now();
            while due.len() < BATCH
                && let Some(first) = pending.actions.first_entry()
                && first.key().0 <= now
            {
                due.push(first.remove());
            }
            if !due.is_empty() {
                return;
            }
            let wait = pending.actions.first_key_value().map(|(first, _)| first.0 - now);
            pending = match wait {
                None => self.changed.wait(pending),
                Some(wait) => self.changed.wait_timeout(pending, wait).0,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn actions_run_in_order_and_never_early() {
        let (tx, rx) = mpsc::channel();
        // All actions are due only after all calls of `schedule`.
        let now = Instant::now() + Duration::from_millis(300);
        let delays = [30, 5, 20, 5, 0, 12];
        for (n, delay) in delays.into_iter().enumerate() {
            let (tx, when) = (tx.clone(), now + Duration::from_millis(delay));
            schedule(when, move || tx.send((n, when, Instant::now())).unwrap()).unwrap();
        }
        let ran: Vec<_> = delays.iter().map(|_| rx.recv_timeout(PATIENCE).unwrap()).collect();
        assert_eq!(ran.iter().map(|ran| ran.0).collect::<Vec<_>>(), [4, 1, 3, 5, 2, 0]);
        for (_, when, ran) in ran {
            assert!(ran >= when);
        }
    }

    #[test]
    fn earlier_action_wakes_sleeping_timer() {
        let (tx, rx) = mpsc::channel();
        let (late_tx, late) = mpsc::channel();
        schedule(Instant::now() + Duration::from_secs(3600), move || late_tx.send(()).unwrap()).unwrap();
        let start = Instant::now();
        schedule(start + Duration::from_millis(1), move || tx.send(()).unwrap()).unwrap();
        rx.recv_timeout(PATIENCE).unwrap();
        assert!(start.elapsed() >= Duration::from_millis(1));
        assert_eq!(late.try_recv(), Err(mpsc::TryRecvError::Empty), "the later action is still pending");
    }

    #[test]
    fn timer_survives_panic_and_nested_actions() {
        let (tx, rx) = mpsc::channel();
        schedule(Instant::now(), || panic!("a panic that the test wants")).unwrap();
        // Actions run without the lock, so they can schedule other actions.
        schedule(Instant::now(), move || {
            schedule(Instant::now(), move || tx.send("ran").unwrap()).unwrap();
        })
        .unwrap();
        assert_eq!(rx.recv_timeout(PATIENCE), Ok("ran"));
    }

    #[test]
    fn cancelled_action_is_dropped() {
        let (tx, rx) = mpsc::channel::<()>();
        let alarm =
            schedule(Instant::now() + Duration::from_secs(3600), move || tx.send(()).unwrap()).unwrap();
        assert_eq!(rx.try_recv(), Err(mpsc::TryRecvError::Empty));
        cancel(alarm);
        assert_eq!(rx.try_recv(), Err(mpsc::TryRecvError::Disconnected));
    }

    #[test]
    fn actions_of_one_time_all_run() {
        let (tx, rx) = mpsc::channel();
        let when = Instant::now() + Duration::from_millis(5);
        for n in 0..1000 {
            let tx = tx.clone();
            schedule(when, move || tx.send(n).unwrap()).unwrap();
        }
        let ran: Vec<i32> = (0..1000).map(|_| rx.recv_timeout(PATIENCE).unwrap()).collect();
        assert!(ran.is_sorted(), "in order of the calls");
    }
}
