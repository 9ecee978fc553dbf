//! Checks that a run leaves no threads or file descriptors behind.

use crate::rt::thread;
use crate::rt::time::{Duration, Instant};
use crate::stack::Finding;

pub(super) struct Process {
    threads: usize,
    descriptors: usize,
}

impl Process {
    pub(super) fn now() -> Self {
        let count = |path| std::fs::read_dir(path).map_or(0, Iterator::count);
        Self { threads: count("/proc/self/task"), descriptors: count("/proc/self/fd") }
    }

    /// Waits until the counts equal those of `self`. A thread ends a moment after it has reported
    /// its last completion.
    pub(super) fn wait_restored(&self, bound: Duration) -> Result<(), Finding> {
        let began = Instant::now();
        loop {
            let now = Self::now();
            if now.threads == self.threads && now.descriptors == self.descriptors {
                return Ok(());
            }
            if began.elapsed() > bound {
                return Err(Finding::Message(format!(
                    "the process had {} threads and {} descriptors, and has {} and {}",
                    self.threads, self.descriptors, now.threads, now.descriptors
                )));
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}
