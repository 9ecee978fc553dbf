//! State shared by an export's owner, its device thread and its queues.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use freestone_core::completion_queue::CompletionQueue;
use freestone_core::device::Disk;

use crate::format::task::CompletedRequest;
use crate::kernel::BlockDevice;

/// The shared state of an export. Lock order: the lock of `state` is the innermost lock.
pub struct Shared {
    name: String,
    /// Version of the state that queues apply, increased by each change; written under the lock of
    /// `state`.
    version: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

/// The state of an export, protected by the lock.
#[derive(Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts, each with a name")]
pub struct State {
    /// The exported device. The device thread removes it at the end.
    pub disk: Option<Arc<Disk>>,
    /// Number of holds. While it is not zero, queues begin no requests.
    pub holds: usize,
    /// Number of times that all requests were failed, as in a loss of power.
    pub cuts: u64,
    /// True once the grace period is over: all requests fail.
    pub dead: bool,
    /// True once the block device must be removed.
    pub shutting_down: bool,
    /// True once the kernel has removed the device.
    pub removed: bool,
    /// True once all threads have released the device.
    pub ended: bool,
    pub id: Option<u32>,
    /// [`feature`](crate::kernel::abi::feature) bits that the driver granted.
    pub features: u64,
    pub block: Option<Arc<dyn BlockDevice>>,
    pub queues: Vec<QueueState>,
}

/// State of a queue, as visible to other threads.
pub struct QueueState {
    /// Wakes the queue's thread.
    pub answers: Arc<CompletionQueue<CompletedRequest>>,
    /// Last version of the shared state that the queue applied.
    pub applied_version: u64,
    /// Number of requests in flight in the device when the version was applied or last reported.
    pub in_flight: usize,
    /// True if the kernel has no more requests of the queue, and its ring is closed.
    pub closed: bool,
}

/// A snapshot of the part of the state that queues apply.
pub struct StateSnapshot {
    pub version: u64,
    pub disk: Option<Arc<Disk>>,
    pub held: bool,
    pub cuts: u64,
    pub dead: bool,
}

impl State {
    /// Wakes all queues, which then apply the state.
    fn wake_queues(&self) {
        for queue in &self.queues {
            queue.answers.wake();
        }
    }

    pub fn path(&self) -> Option<PathBuf> {
        self.block.as_ref().map(|block| block.path())
    }

    /// Returns true if every queue has applied `version` or later and has no requests in flight.
    /// Closed queues count as idle.
    pub fn is_idle(&self, version: u64) -> bool {
        self.queues
            .iter()
            .all(|queue| queue.closed || (queue.applied_version >= version && queue.in_flight == 0))
    }
}

impl Shared {
    /// Creates the state of an export that is not started.
    pub fn new(disk: Disk) -> Self {
        let name = disk.name.clone();
        let state = State { disk: Some(Arc::new(disk)), ..State::default() };
        Self { name, version: AtomicU64::new(0), state: Mutex::new(state), changed: Condvar::new() }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes state that queues do not apply, and wakes the threads that wait for a change.
    pub fn update<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = change(&mut self.lock());
        self.changed.notify_all();
        changed
    }

    /// Changes state that queues apply, and wakes the queues and the threads that wait for a
    /// change.
    pub fn update_and_wake<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        let changed = change(&mut state);
        self.version.fetch_add(1, Ordering::SeqCst);
        state.wake_queues();
        drop(state);
        self.changed.notify_all();
        changed
    }

    pub fn wait<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the state meets a condition, at most until `end`. Returns false on timeout.
    pub fn wait_until(&self, end: Instant, condition: impl Fn(&State) -> bool) -> bool {
        let mut state = self.lock();
        while !condition(&state) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Returns the current version of the state that queues apply.
    #[inline]
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::SeqCst)
    }

    pub fn snapshot(&self) -> StateSnapshot {
        let state = self.lock();
        StateSnapshot {
            version: self.version(),
            disk: state.disk.clone(),
            held: state.holds > 0,
            cuts: state.cuts,
            dead: state.dead,
        }
    }

    /// Records the version that a queue has applied, and its number of requests in flight.
    pub fn record_applied(&self, queue: u16, version: u64, in_flight: usize) {
        self.update(|state| {
            let queue = &mut state.queues[usize::from(queue)];
            (queue.applied_version, queue.in_flight) = (version, in_flight);
        });
    }
}
