//! Answers that are given at a time: one thread for the whole process.
//!
//! Devices that delay answers hand them over here, so that a request which waits costs an entry of
//! a tree, and no thread. Who hands over bounds how many there are.
//!
//! Lock order: `pending` is innermost. Actions run, and are dropped, outside of it.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;

use crate::sync::{Condvar, Instant, LazyLock, Mutex};

/// How late the kernel may wake the thread to save work; its usual 50 us are longer than the
/// shortest delays.
const SLACK_NS: NonZeroU64 = NonZeroU64::MIN;
/// Actions that are taken out at once; who asks for another one waits for no more than that.
const BATCH: usize = 64;

type Action = Box<dyn FnOnce() + Send>;
/// When, and in which order those of one moment were asked for.
type Key = (Instant, u64);

/// An action that was asked for.
#[derive(Debug, Clone, Copy)]
pub struct Alarm(Key);

impl Alarm {
    /// When it is due.
    pub fn when(&self) -> Instant {
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

/// Starts the thread, if it does not run yet. [`at`] cannot fail once this succeeded.
///
/// # Errors
/// The thread could not be started.
pub fn start() -> std::io::Result<()> {
    TIMER.start(&mut TIMER.pending.lock())
}

/// Runs `action` on the timer's thread as soon as `when` has come, never earlier; actions of one
/// moment in the order in which they were asked for. All delayed answers of the process share the
/// thread, so an action is short and waits for nothing.
///
/// # Errors
/// The thread could not be started; the action is dropped.
pub fn at(when: Instant, action: impl FnOnce() + Send + 'static) -> std::io::Result<Alarm> {
    // Boxed before the lock is taken, and dropped after it is let go.
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

/// Drops an action, unless it runs already or has run.
pub fn cancel(alarm: Alarm) {
    let action = TIMER.pending.lock().actions.remove(&alarm.0);
    // Outside of the lock.
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
            tracing::warn!("delays are rounded up to some 50 us: the timer slack stays as it is: {error}");
        }
        let mut due: Vec<Action> = Vec::with_capacity(BATCH);
        loop {
            self.wait_for(&mut due);
            for action in due.drain(..) {
                // A panic was reported by its hook, and is not the other devices' affair.
                let _ = catch_unwind(AssertUnwindSafe(action));
            }
        }
    }

    /// Waits until something is due, and takes it.
    fn wait_for(&self, due: &mut Vec<Action>) {
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
                None => self.changed.wait(pending).unwrap_or_else(PoisonError::into_inner),
                Some(wait) => {
                    self.changed.wait_timeout(pending, wait).unwrap_or_else(PoisonError::into_inner).0
                }
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
        // Late enough that all are asked for before the first is due.
        let now = Instant::now() + Duration::from_millis(300);
        let delays = [30, 5, 20, 5, 0, 12];
        for (n, delay) in delays.into_iter().enumerate() {
            let (tx, when) = (tx.clone(), now + Duration::from_millis(delay));
            at(when, move || tx.send((n, when, Instant::now())).unwrap()).unwrap();
        }
        let ran: Vec<_> = delays.iter().map(|_| rx.recv_timeout(PATIENCE).unwrap()).collect();
        assert_eq!(ran.iter().map(|ran| ran.0).collect::<Vec<_>>(), [4, 1, 3, 5, 2, 0]);
        for (_, when, ran) in ran {
            assert!(ran >= when);
        }
    }

    #[test]
    fn an_earlier_one_overtakes_a_sleep() {
        let (tx, rx) = mpsc::channel();
        let (late_tx, late) = mpsc::channel();
        at(Instant::now() + Duration::from_secs(3600), move || late_tx.send(()).unwrap()).unwrap();
        let asked = Instant::now();
        at(asked + Duration::from_millis(1), move || tx.send(()).unwrap()).unwrap();
        rx.recv_timeout(PATIENCE).unwrap();
        assert!(asked.elapsed() >= Duration::from_millis(1));
        assert_eq!(late.try_recv(), Err(mpsc::TryRecvError::Empty), "it waits for its hour");
    }

    #[test]
    fn a_panic_stops_nothing_and_actions_may_ask_for_actions() {
        let (tx, rx) = mpsc::channel();
        at(Instant::now(), || panic!("a panic that the test wants")).unwrap();
        // The lock is not held while an action runs.
        at(Instant::now(), move || {
            at(Instant::now(), move || tx.send("ran").unwrap()).unwrap();
        })
        .unwrap();
        assert_eq!(rx.recv_timeout(PATIENCE), Ok("ran"));
    }

    #[test]
    fn cancelled_action_is_dropped() {
        let (tx, rx) = mpsc::channel::<()>();
        let alarm = at(Instant::now() + Duration::from_secs(3600), move || tx.send(()).unwrap()).unwrap();
        assert_eq!(rx.try_recv(), Err(mpsc::TryRecvError::Empty));
        cancel(alarm);
        assert_eq!(rx.try_recv(), Err(mpsc::TryRecvError::Disconnected));
    }

    #[test]
    fn many_at_one_moment_all_run() {
        let (tx, rx) = mpsc::channel();
        let when = Instant::now() + Duration::from_millis(5);
        for n in 0..1000 {
            let tx = tx.clone();
            at(when, move || tx.send(n).unwrap()).unwrap();
        }
        let ran: Vec<i32> = (0..1000).map(|_| rx.recv_timeout(PATIENCE).unwrap()).collect();
        assert!(ran.is_sorted(), "in the order in which they were asked for");
    }
}
