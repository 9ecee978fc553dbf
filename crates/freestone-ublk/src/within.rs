//! Calls of the kernel that may take longer than anybody should wait.

use std::io;
use std::sync::mpsc::channel;
use std::time::Duration;

/// Does `work` on a thread of its own. `None`: it is not done after `time`, and goes on there.
///
/// # Errors
/// There is no thread for it.
pub fn within<T: Send + 'static>(
    time: Duration,
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Option<T>> {
    let (tell, done) = channel();
    std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        // Nobody may wait for it any more.
        let _ = tell.send(work());
    })?;
    Ok(done.recv_timeout(time).ok())
}
