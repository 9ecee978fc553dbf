//! Completion queue between devices and the thread that reads requests of a connection or a virtqueue.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::budget::GrantReceiver;
use crate::plug::{self, Unplug};
use crate::sync::{AtomicU32, Mutex, Ordering};

/// Completions that wait for the thread of the queue, and the eventfd that wakes this thread.
///
/// Lock order: `waiting` is innermost, and is held for a push or a swap only.
#[derive(Debug)]
pub struct CompletionQueue<T> {
    waiting: Mutex<Vec<T>>,
    wake: OwnedFd,
    shut_down: AtomicU32,
}

impl<T: Send + 'static> CompletionQueue<T> {
    /// Creates an empty queue.
    ///
    /// # Errors
    /// Errors of `eventfd(2)`, such as EMFILE.
    pub fn new() -> std::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { waiting: Mutex::default(), wake, shut_down: AtomicU32::new(0) })
    }

    /// Adds a completion. Devices call this function on any thread.
    pub fn push(self: &Arc<Self>, completion: T) {
        let mut waiting = self.waiting.lock();
        let first = waiting.is_empty();
        waiting.push(completion);
        drop(waiting);
        // Only the first waiting completion needs a wake-up, because the thread takes all waiting completions
        // at once.
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
    /// when budget is [granted](GrantReceiver), and after [`shut_down`](Self::shut_down) and [`wake`](Self::wake).
    pub fn wake_fd(&self) -> &OwnedFd {
        &self.wake
    }

    /// Makes [`wake_fd`](Self::wake_fd) unreadable. Must be called before the thread checks for work, or
    /// wake-ups are lost.
    pub fn rearm(&self) {
        // EAGAIN: the eventfd is already unreadable.
        let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
    }

    /// Waits for a wake-up. A signal may end the wait early, so the caller must check for work.
    pub fn wait(&self) {
        let _ = poll(&mut [PollFd::new(&self.wake, PollFlags::IN)], None);
        self.rearm();
    }

    /// Asks the thread to accept no more requests, and wakes it.
    pub fn shut_down(&self) {
        self.shut_down.store(1, Ordering::SeqCst);
        self.wake();
    }

    /// Returns true if [`shut_down`](Self::shut_down) was called.
    pub fn is_shut_down(&self) -> bool {
        self.shut_down.load(Ordering::SeqCst) != 0
    }

    /// Wakes the thread of the queue, which then checks for all kinds of work.
    pub fn wake(&self) {
        crate::eventfd::wake(&self.wake);
    }
}

impl<T: Send + 'static> Unplug for CompletionQueue<T> {
    fn unplug(&self) {
        self.wake();
    }
}

impl<T: Send + 'static> GrantReceiver for CompletionQueue<T> {
    fn receive_grant(&self) {
        self.wake();
    }
}

#[cfg(all(test, not(freestone_sim)))]
mod tests {
    use super::*;

    #[test]
    fn several_completions_wake_once() {
        let queue = Arc::new(CompletionQueue::new().unwrap());
        for number in 0..3 {
            queue.push(number);
        }
        let mut count = [0_u8; 8];
        assert_eq!(rustix::io::read(queue.wake_fd(), &mut count), Ok(8));
        assert_eq!(u64::from_ne_bytes(count), 1);
        let mut taken = Vec::new();
        queue.take(&mut taken);
        assert_eq!(taken, [0, 1, 2]);
    }
}
