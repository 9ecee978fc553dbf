//! What an export's owner, its keeper and its queues share.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use freestone_core::answers::Answers;
use freestone_core::device::Disk;

use crate::kernel::BlockDevice;
use crate::task::Finished;

/// Lock order: `state` is innermost, held for a look or a change, or to wait for one.
pub struct Shared {
    name: String,
    /// Changes of what queues have to know, written under `state`.
    version: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

/// What is true of an export.
#[derive(Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts, each with a name")]
pub struct State {
    /// What is served; the keeper takes it along when it ends.
    pub disk: Option<Arc<Disk>>,
    /// While there are any, no request is begun.
    pub holds: usize,
    /// How often all that was asked for was answered with an error.
    pub cuts: u64,
    /// All requests fail: their time is over.
    pub dead: bool,
    /// The block device is to go.
    pub ending: bool,
    /// The kernel has nothing of it any more.
    pub removed: bool,
    /// All threads have let go of the device.
    pub ended: bool,
    /// Its number.
    pub id: Option<u32>,
    /// Features that the driver has granted.
    pub features: u64,
    /// The block device, once there is one.
    pub block: Option<Arc<dyn BlockDevice>>,
    /// Each queue.
    pub queues: Vec<Line>,
}

/// A queue, as others see it.
pub struct Line {
    /// Wakes its thread.
    pub answers: Arc<Answers<Finished>>,
    /// The version that it has obeyed.
    pub seen: u64,
    /// Requests that the device has, as of then.
    pub in_flight: usize,
    /// The kernel has no request of it any more, and its ring is gone.
    pub closed: bool,
}

/// What a queue has to obey.
pub struct Standing {
    /// As of which version.
    pub version: u64,
    /// [`State::disk`].
    pub disk: Option<Arc<Disk>>,
    /// Whether none is begun.
    pub held: bool,
    /// [`State::cuts`].
    pub cuts: u64,
    /// [`State::dead`].
    pub dead: bool,
}

impl State {
    /// Has the queues look.
    fn wake_queues(&self) {
        for line in &self.queues {
            line.answers.wake();
        }
    }

    /// Where the block device is.
    pub fn path(&self) -> Option<PathBuf> {
        self.block.as_ref().map(|block| block.path())
    }

    /// Whether the device has no request, as of `version` or later.
    pub fn is_quiet(&self, version: u64) -> bool {
        self.queues.iter().all(|line| line.closed || (line.seen >= version && line.in_flight == 0))
    }
}

impl Shared {
    /// Of an export that has not begun.
    pub fn new(disk: Disk) -> Self {
        let name = disk.name.clone();
        let state = State { disk: Some(Arc::new(disk)), ..State::default() };
        Self { name, version: AtomicU64::new(0), state: Mutex::new(state), changed: Condvar::new() }
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// For a look.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A change that no queue has to know of.
    pub fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = change(&mut self.lock());
        self.changed.notify_all();
        changed
    }

    /// A change that queues have to obey; they do soon.
    pub fn order<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        let changed = change(&mut state);
        self.version.fetch_add(1, Ordering::SeqCst);
        state.wake_queues();
        drop(state);
        self.changed.notify_all();
        changed
    }

    /// Waits for a change.
    pub fn wait<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until something is so. False: it is not at `end`.
    pub fn wait_until(&self, end: Instant, is_so: impl Fn(&State) -> bool) -> bool {
        let mut state = self.lock();
        while !is_so(&state) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Which version there is for queues.
    #[inline]
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::SeqCst)
    }

    /// What there is to obey.
    pub fn standing(&self) -> Standing {
        let state = self.lock();
        Standing {
            version: self.version(),
            disk: state.disk.clone(),
            held: state.holds > 0,
            cuts: state.cuts,
            dead: state.dead,
        }
    }

    /// A queue has obeyed, and the device has so many of its requests.
    pub fn obeyed(&self, queue: u16, version: u64, in_flight: usize) {
        self.change(|state| {
            let line = &mut state.queues[usize::from(queue)];
            (line.seen, line.in_flight) = (version, in_flight);
        });
    }
}
