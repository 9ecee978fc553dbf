//! Deadlines for kernel calls that may block for long.

use std::io;
use std::sync::mpsc::channel;
use std::time::Duration;

/// Runs `work` on a new thread and waits for its result. Returns `None` after `time`; the thread
/// then continues in the background.
///
/// # Errors
/// Fails if the thread cannot be created.
pub fn run_with_deadline<T: Send + 'static>(
    time: Duration,
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Option<T>> {
    let (sender, done) = channel();
    std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        // The receiver is gone after the deadline.
        let _ = sender.send(work());
    })?;
    Ok(done.recv_timeout(time).ok())
}
