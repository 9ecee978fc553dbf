//! Threads that are started before their work exists. The shutdown of a server needs threads at a time when
//! the system may refuse new ones (pids.max, `RLIMIT_NPROC`).

use std::sync::mpsc::{self, SendError, Sender};
use std::{io, thread};

type Work = Box<dyn FnOnce() + Send>;

/// A thread that waits for one function to run. Dropping it unused ends the thread.
pub struct Standby(Sender<Work>);

impl Standby {
    /// Starts the thread.
    ///
    /// # Errors
    /// Fails if the thread cannot be started.
    pub fn start(name: &str) -> io::Result<Self> {
        let (sender, receiver) = mpsc::channel::<Work>();
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            if let Ok(work) = receiver.recv() {
                work();
            }
        })?;
        Ok(Self(sender))
    }

    /// Runs the work on the thread, or on the calling thread if that thread is gone.
    pub fn run(self, work: impl FnOnce() + Send + 'static) {
        if let Err(SendError(work)) = self.0.send(Box::new(work)) {
            work();
        }
    }
}
