//! A gate that every request of a device passes, and that a change of the whole device closes for a short
//! time.
//!
//! # Protocol
//! * A request *enters*: while pinned, it reads the gate's value (such as the list of snapshots) and decides
//!   what to do. Work that continues after the pin, on this thread or asynchronously, is counted:
//!   [`begin`](FreezeGate::begin) while still pinned, [`end`](FreezeGate::end) on completion. Every call of
//!   another device counts as such work.
//! * A change *closes* the gate: it publishes a closed state, waits for the pins, so that every request that
//!   saw the open state has been counted, and then waits for the count to become zero. Requests that find the
//!   gate closed leave a task that runs when the gate opens.
//! * No wake-up is lost: `end` either runs with a pin on the open state, and then the closer sees the count,
//!   or it sees the closed state and notifies the closer under `held`.
//!
//! The cost for a request is a pin, and one increment of a per-CPU counter if the request waits for a device.
//!
//! Lock order: `closers`, then `held`. `closers` is held while waiting for pins, so a pinned thread must not
//! lock it.

use std::sync::Arc;
use std::time::Duration;

use crate::percpu::Counters;
use crate::pin::{self, Pin, Swap};
use crate::sync::{Condvar, Mutex};
use crate::work_queue::Task;

/// A gate between requests and changes of a whole device. `T` is the value that changes replace.
pub struct FreezeGate<T> {
    state: Swap<GateState<T>>,
    in_flight: Counters<1>,
    /// Number of callers that keep the gate closed.
    closers: Mutex<usize>,
    /// Tasks of requests that wait for the gate to open.
    held: Mutex<Vec<Task>>,
    idle: Condvar,
}

/// Guard for counted work of this thread. Calls [`end`](FreezeGate::end) on drop.
pub struct WorkGuard<'a, T: Send + Sync>(&'a FreezeGate<T>);

struct GateState<T> {
    open: bool,
    value: Arc<T>,
}

impl<T: Send + Sync> FreezeGate<T> {
    /// Creates an open gate.
    pub fn new(value: T) -> Self {
        Self {
            state: Swap::new(Box::new(GateState { open: true, value: Arc::new(value) })),
            in_flight: Counters::default(),
            closers: Mutex::new(0),
            held: Mutex::default(),
            idle: Condvar::new(),
        }
    }

    /// Runs `work`, pinned, with the gate's value, or with `None` if the gate is closed. In that case `work`
    /// may call [`hold`](Self::hold).
    pub fn enter<R>(&self, work: impl FnOnce(Option<&T>) -> R) -> R {
        crate::trail::step!();
        pin::pinned(|pin| {
            let state = self.state.load(pin);
            work(state.open.then(|| &*state.value))
        })
    }

    /// Runs `work`, pinned, with the gate's value, open or closed, for requests that changes need not block.
    pub fn enter_any<R>(&self, work: impl FnOnce(&T) -> R) -> R {
        pin::pinned(|pin| work(&self.state.load(pin).value))
    }

    /// Returns the gate's value, open or closed.
    pub fn value(&self) -> Arc<T> {
        pin::pinned(|pin| Arc::clone(&self.state.load(pin).value))
    }

    /// Counts work that continues after the pin is released. Call only inside [`enter`](Self::enter) of an
    /// open gate.
    pub fn begin(&self) {
        self.in_flight.add(0, 1);
    }

    /// Returns a guard for work counted by [`begin`](Self::begin) that this thread executes. Dropping the guard
    /// calls [`end`](Self::end).
    pub fn work_guard(&self) -> WorkGuard<'_, T> {
        WorkGuard(self)
    }

    /// Counts work of this thread until the guard is dropped, or returns `None` if the gate is closed.
    pub fn try_begin(&self) -> Option<WorkGuard<'_, T>> {
        self.enter(|value| value.map(|_| self.begin())).map(|()| self.work_guard())
    }

    /// Ends work counted by [`begin`](Self::begin).
    pub fn end(&self) {
        pin::pinned(|pin: &Pin<'_>| {
            self.in_flight.add(0, -1);
            if !self.state.load(pin).open {
                let _held = self.held.lock();
                self.idle.notify_all();
            }
        });
    }

    /// Holds `task` until the gate opens. Call only inside [`enter`](Self::enter) of a closed gate.
    pub fn hold(&self, task: impl FnOnce() + Send + 'static) {
        self.held.lock().push(Box::new(task));
    }

    /// Closes the gate and waits up to `most` for the work in flight. Returns false if some work is still in
    /// flight after that time. In both cases the gate stays closed until [`open`](Self::open).
    pub fn close_within(&self, most: Duration) -> bool {
        self.count_closer();
        // No new work begins, so cells only decrease, and a sum of cells read one after the other is never
        // too small.
        !self.idle.wait_timeout_while(self.held.lock(), most, |_| self.in_flight.get(0) > 0).1
    }

    fn count_closer(&self) {
        let mut closers = self.closers.lock();
        *closers += 1;
        if *closers == 1 {
            self.publish(false, self.value());
        }
    }

    /// Reverts one [`close_within`](Self::close_within). The last call opens the gate and returns the held
    /// tasks, which the caller must run.
    #[must_use]
    pub fn open(&self) -> Vec<Task> {
        let mut closers = self.closers.lock();
        *closers -= 1;
        if *closers > 0 {
            return Vec::new();
        }
        self.publish(true, self.value());
        // `publish` waited for the pins of requests that saw the gate closed, so the list is complete.
        std::mem::take(&mut *self.held.lock())
    }

    /// Replaces the value. On return, all requests that entered with the old value have left.
    pub fn change(&self, new: impl FnOnce(&T) -> T) {
        let closers = self.closers.lock();
        let new = new(&self.value());
        self.publish(*closers == 0, Arc::new(new));
    }

    fn publish(&self, open: bool, value: Arc<T>) {
        drop(self.state.replace(Box::new(GateState { open, value })));
    }
}

impl<T: Send + Sync> Drop for WorkGuard<'_, T> {
    fn drop(&mut self) {
        self.0.end();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::time::Duration;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn closed_gate_holds_new_and_waits_for_begun_requests() {
        let gate = FreezeGate::new(1);
        gate.enter(|value| {
            assert_eq!(value, Some(&1));
            gate.begin();
        });
        let ended = AtomicBool::new(false);
        let ran = Arc::new(AtomicU32::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                ended.store(true, Ordering::SeqCst);
                gate.end();
            });
            assert!(gate.close_within(LONG));
            assert!(ended.load(Ordering::SeqCst), "a request was in flight");
        });
        assert!(gate.close_within(LONG));
        gate.change(|value| value + 1);
        let held = Arc::clone(&ran);
        gate.enter(|value| {
            assert_eq!(value, None);
            gate.hold(move || held.store(1, Ordering::SeqCst));
        });
        assert!(gate.open().is_empty(), "the second close still holds it");
        gate.enter(|value| assert_eq!(value, None));
        gate.open().into_iter().for_each(|task| task());
        assert_eq!(ran.load(Ordering::SeqCst), 1);
        gate.enter(|value| assert_eq!(value, Some(&2)));
    }

    #[test]
    fn closed_gate_has_no_request_in_flight() {
        let gate = Arc::new(FreezeGate::new(()));
        let (running, stop) = (AtomicU32::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !stop.load(Ordering::SeqCst) {
                        let entered = gate.enter(|value| value.map(|()| gate.begin()).is_some());
                        if entered {
                            running.fetch_add(1, Ordering::SeqCst);
                            std::thread::yield_now();
                            running.fetch_sub(1, Ordering::SeqCst);
                            gate.end();
                        }
                    }
                });
            }
            for _ in 0..200 {
                assert!(gate.close_within(LONG));
                assert_eq!(running.load(Ordering::SeqCst), 0);
                drop(gate.open());
            }
            stop.store(true, Ordering::SeqCst);
        });
    }
}
