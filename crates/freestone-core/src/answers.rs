//! Completion queue between devices and the thread that reads requests of a connection or a virtqueue.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

use crate::budget::Granted;
use crate::plug::{self, Unplug};
use crate::sync::{AtomicU32, Mutex, Ordering};

/// Completions that wait for their thread, and the eventfd that wakes it.
///
/// Lock order: `waiting` is innermost, and is held for a push or a swap only.
#[derive(Debug)]
pub struct Answers<T> {
    waiting: Mutex<Vec<T>>,
    wake: OwnedFd,
    ended: AtomicU32,
}

impl<T: Send + 'static> Answers<T> {
    /// Creates an empty queue.
    ///
    /// # Errors
    /// Errors of `eventfd(2)`, such as EMFILE.
    pub fn new() -> std::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { waiting: Mutex::default(), wake, ended: AtomicU32::new(0) })
    }

    /// Adds a completion. Devices call this function on any thread.
    pub fn push(self: &Arc<Self>, answer: T) {
        let mut waiting = self.waiting.lock();
        let first = waiting.is_empty();
        waiting.push(answer);
        drop(waiting);
        // The first completion wakes the thread, which takes later ones together with it.
        if first && !plug::hold(self) {
            self.wake();
        }
    }

    /// Swaps the waiting completions into `into`, which must be empty.
    pub fn take(&self, into: &mut Vec<T>) {
        debug_assert!(into.is_empty(), "answers would be lost");
        std::mem::swap(&mut *self.waiting.lock(), into);
    }

    /// Returns the eventfd of the queue. The descriptor becomes readable on the first waiting completion,
    /// when budget is [granted](Granted), and after [`end`](Self::end) and [`wake`](Self::wake).
    pub fn wake_fd(&self) -> &OwnedFd {
        &self.wake
    }

    /// Makes [`wake_fd`](Self::wake_fd) unreadable. Must be called before the thread checks for work, or
    /// wake-ups are lost.
    pub fn rearm(&self) {
        // EAGAIN: already unreadable.
        let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
    }

    /// Asks the thread to take no more requests.
    pub fn end(&self) {
        self.ended.store(1, Ordering::SeqCst);
        self.wake();
    }

    /// Returns true if [`end`](Self::end) was called.
    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst) != 0
    }

    /// Wakes the thread, which then checks for all kinds of work.
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
    fn several_completions_wake_once() {
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
