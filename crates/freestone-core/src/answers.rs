//! What devices have answered, on its way to the thread that reads a queue of requests: a
//! connection's, or a virtqueue's.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

use crate::budget::Granted;
use crate::plug::{self, Unplug};
use crate::sync::{AtomicU32, Mutex, Ordering};

/// Answers that wait for their thread, and what else wakes it. `waiting` is locked for a push or a
/// swap only, and no other lock is taken under it.
#[derive(Debug)]
pub struct Answers<T> {
    waiting: Mutex<Vec<T>>,
    wake: OwnedFd,
    ended: AtomicU32,
}

impl<T: Send + 'static> Answers<T> {
    /// None wait.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn new() -> std::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { waiting: Mutex::default(), wake, ended: AtomicU32::new(0) })
    }

    /// Called by a device's completion, on any thread.
    pub fn push(self: &Arc<Self>, answer: T) {
        let mut waiting = self.waiting.lock();
        let first = waiting.is_empty();
        waiting.push(answer);
        drop(waiting);
        // Only the first wakes the thread, which takes what was pushed since with it.
        if first && !plug::hold(self) {
            self.wake();
        }
    }

    /// Swaps what waits into `into`, which is empty.
    pub fn take(&self, into: &mut Vec<T>) {
        debug_assert!(into.is_empty(), "answers would be lost");
        std::mem::swap(&mut *self.waiting.lock(), into);
    }

    /// Readable after the first of the answers that wait, when bytes were [granted](Granted), and
    /// after [`end`](Self::end) and [`wake`](Self::wake).
    pub fn wake_fd(&self) -> &OwnedFd {
        &self.wake
    }

    /// Makes [`wake_fd`](Self::wake_fd) unreadable again; to be called before anything is looked
    /// at.
    pub fn rearm(&self) {
        // It fails with EAGAIN where it is unreadable already.
        let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
    }

    /// The thread is to take no more requests.
    pub fn end(&self) {
        self.ended.store(1, Ordering::SeqCst);
        self.wake();
    }

    /// Whether [`end`](Self::end) was called.
    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst) != 0
    }

    /// Has the thread look at everything.
    pub fn wake(&self) {
        crate::eventfd::wake(&self.wake);
    }
}

impl<T: Send + 'static> Unplug for Answers<T> {
    fn unplug(&self) {
        self.wake();
    }
}

impl<T: Send + 'static> Granted for Answers<T> {
    fn granted(&self) {
        self.wake();
    }
}

#[cfg(all(test, not(freestone_sim)))]
mod tests {
    use super::*;

    #[test]
    fn one_wake_for_many() {
        let answers = Arc::new(Answers::new().unwrap());
        for number in 0..3 {
            answers.push(number);
        }
        let mut count = [0_u8; 8];
        assert_eq!(rustix::io::read(answers.wake_fd(), &mut count), Ok(8));
        assert_eq!(u64::from_ne_bytes(count), 1);
        let mut taken = Vec::new();
        answers.take(&mut taken);
        assert_eq!(taken, [0, 1, 2]);
    }
}
