//! The way of outcomes, and of the word to stop, to a queue's thread.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use freestone_core::budget::Granted;
use freestone_core::device::{IoBuf, Result};
use freestone_core::plug::{self, Unplug};
use rustix::event::{EventfdFlags, eventfd};

use crate::task::Task;

/// The outcome of a submitted request.
#[derive(Debug)]
pub struct Finished {
    /// The request.
    pub task: Task,
    /// What the device says.
    pub outcome: Result<()>,
    /// Its buffer.
    pub buffer: IoBuf,
}

/// What waits for a queue's thread. `finished` is locked for a push or a swap only, and no other
/// lock is taken under it.
#[derive(Debug)]
pub struct Line {
    finished: Mutex<Vec<Finished>>,
    wake: OwnedFd,
    stopped: AtomicBool,
}

impl Line {
    /// Nothing waits.
    pub fn new() -> std::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { finished: Mutex::default(), wake, stopped: AtomicBool::new(false) })
    }

    /// Called by a device's completion, on any thread.
    pub fn push(self: &Arc<Self>, finished: Finished) {
        let mut queue = self.finished.lock().unwrap_or_else(PoisonError::into_inner);
        let first = queue.is_empty();
        queue.push(finished);
        drop(queue);
        // One wake for all that is there when the thread looks.
        if first && !plug::hold(self) {
            self.wake();
        }
    }

    /// Swaps what has finished into `into`, which is empty.
    pub fn take(&self, into: &mut Vec<Finished>) {
        debug_assert!(into.is_empty(), "outcomes would be lost");
        std::mem::swap(&mut *self.finished.lock().unwrap_or_else(PoisonError::into_inner), into);
    }

    /// Readable when there is something to look at.
    pub fn wake_fd(&self) -> &OwnedFd {
        &self.wake
    }

    /// Makes [`wake_fd`](Self::wake_fd) unreadable again; to be called before anything is looked
    /// at.
    pub fn rearm(&self) {
        // It fails with EAGAIN where it is unreadable already.
        let _ = rustix::io::read(self.wake.as_fd(), &mut [0_u8; 8]);
    }

    /// The thread is to take no more requests, and to end when those it has are done.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Whether [`stop`](Self::stop) was called.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Has the thread look at everything.
    pub fn wake(&self) {
        // It fails only where the counter is full, and then it is readable.
        let _ = rustix::io::write(self.wake.as_fd(), &1_u64.to_ne_bytes());
    }
}

impl Unplug for Line {
    fn unplug(&self) {
        self.wake();
    }
}

impl Granted for Line {
    fn granted(&self) {
        self.wake();
    }
}
