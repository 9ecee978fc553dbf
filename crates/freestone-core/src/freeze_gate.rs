//! A gate that requests pass, and that a change of the whole device closes for a moment.
//!
//! # Protocol
//! * A request *enters*: pinned, it looks at what the gate holds (which snapshots there are) and
//!   decides what to do. What it then does, unpinned, on its thread or asynchronously, it counts
//!   with [`begin`](FreezeGate::begin), still pinned, and [`end`](FreezeGate::end). Every call of a
//!   device is such a thing.
//! * A change *closes* the gate: it puts a closed state in place and waits for the pins, so that
//!   whoever saw the gate open has been counted, and then for the count to fall to zero. Requests
//!   that find the gate closed leave a task, which runs when it opens.
//! * The last one under way either ended with a pin on the open state, and then the closer sees the
//!   count, or it sees the closed state and notifies the closer under `held`.
//!
//! Requests pay a pin and, where they wait for a device, one addition to a counter of their CPU.
//!
//! Lock order: `closers`, then `held`. `closers` is held while pins are waited for, so it is never
//! taken pinned.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::percpu::Counters;
use crate::pin::{self, Pin, Swap};
use crate::sync::{Condvar, Instant, Mutex};
use crate::work_queue::Task;

/// Requests that pass, and a change of the whole that stops them for a moment; `T` is what a change
/// changes.
pub struct FreezeGate<T> {
    state: Swap<GateState<T>>,
    under_way: Counters<1>,
    /// How many hold the gate closed.
    closers: Mutex<usize>,
    /// Requests that wait for it to open.
    held: Mutex<Vec<Task>>,
    idle: Condvar,
}

/// What is under way on this thread; it is over when this is dropped.
pub struct UnderWay<'a, T: Send + Sync>(&'a FreezeGate<T>);

struct GateState<T> {
    open: bool,
    value: Arc<T>,
}

impl<T: Send + Sync> FreezeGate<T> {
    /// An open gate.
    pub fn new(value: T) -> Self {
        Self {
            state: Swap::new(Box::new(GateState { open: true, value: Arc::new(value) })),
            under_way: Counters::default(),
            closers: Mutex::new(0),
            held: Mutex::default(),
            idle: Condvar::new(),
        }
    }

    /// Runs `work`, pinned, with what the gate holds; `None` where it is closed, and then
    /// [`hold`](Self::hold) may be called.
    pub fn enter<R>(&self, work: impl FnOnce(Option<&T>) -> R) -> R {
        pin::pinned(|pin| {
            let state = self.state.load(pin);
            work(state.open.then(|| &*state.value))
        })
    }

    /// Runs `work`, pinned, with what the gate holds, open or closed: for those whom a change need
    /// not hold up.
    pub fn enter_any<R>(&self, work: impl FnOnce(&T) -> R) -> R {
        pin::pinned(|pin| work(&self.state.load(pin).value))
    }

    /// What the gate holds, open or closed.
    pub fn value(&self) -> Arc<T> {
        pin::pinned(|pin| Arc::clone(&self.state.load(pin).value))
    }

    /// Something goes on after the pin. Only inside [`enter`](Self::enter), of an open gate.
    pub fn begin(&self) {
        self.under_way.add(0, 1);
    }

    /// What a request has begun and does on its own thread.
    pub fn under_way(&self) -> UnderWay<'_, T> {
        UnderWay(self)
    }

    /// Enters an open gate and leaves it again, with something under way.
    pub fn pass(&self) -> Option<UnderWay<'_, T>> {
        self.enter(|value| value.map(|_| self.begin())).map(|()| self.under_way())
    }

    /// It is over.
    pub fn end(&self) {
        pin::pinned(|pin: &Pin<'_>| {
            self.under_way.add(0, -1);
            if !self.state.load(pin).open {
                let _held = self.held.lock();
                self.idle.notify_all();
            }
        });
    }

    /// Runs `task` when the gate opens. Only inside [`enter`](Self::enter), of a closed gate.
    pub fn hold(&self, task: impl FnOnce() + Send + 'static) {
        self.held.lock().push(Box::new(task));
    }

    /// Closes the gate, and returns when nothing is under way: true. Waits for devices, at most so
    /// long: false where something is still under way then. Either way the gate is closed until it
    /// is [opened](Self::open).
    pub fn close_within(&self, most: Duration) -> bool {
        self.shut();
        let deadline = Instant::now() + most;
        // Nothing begins any more, so the sum of cells that are read one after the other is never
        // too small.
        let mut held = self.held.lock();
        while self.under_way.get(0) > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            held = self.idle.wait_timeout(held, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    fn shut(&self) {
        let mut closers = self.closers.lock();
        *closers += 1;
        if *closers == 1 {
            self.put(false, self.value());
        }
    }

    /// Takes one [`close_within`](Self::close_within) back; the last one opens the gate and returns
    /// what was held, for the caller to run.
    #[must_use]
    pub fn open(&self) -> Vec<Task> {
        let mut closers = self.closers.lock();
        *closers -= 1;
        if *closers > 0 {
            return Vec::new();
        }
        self.put(true, self.value());
        // Whoever saw it closed was pinned, so all that will ever be held is here.
        std::mem::take(&mut *self.held.lock())
    }

    /// Puts another value in place of the present one. Whoever entered before has left when this
    /// returns.
    pub fn change(&self, new: impl FnOnce(&T) -> T) {
        let closers = self.closers.lock();
        let new = new(&self.value());
        self.put(*closers == 0, Arc::new(new));
    }

    fn put(&self, open: bool, value: Arc<T>) {
        drop(self.state.replace(Box::new(GateState { open, value })));
    }
}

impl<T: Send + Sync> Drop for UnderWay<'_, T> {
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
    fn a_closed_gate_holds_up_what_comes_and_waits_for_what_is_under_way() {
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
            assert!(ended.load(Ordering::SeqCst), "something was under way");
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
    fn nothing_is_under_way_behind_a_closed_gate() {
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
