//! A thread that carries on what the device below has answered: a completion must not call the device, and a write that follows
//! a read does.

use std::panic::{AssertUnwindSafe, catch_unwind};

use freestone_core::device::{Error, Result};
use freestone_core::sync::{
    Mutex,
    mpsc::{Sender, channel},
    thread,
};

/// Something to do.
pub type Task = Box<dyn FnOnce() + Send>;

/// The thread, which is started when it is first needed. It ends with the last that could give it a task.
#[derive(Default)]
pub struct Carry {
    /// Innermost lock.
    tasks: Mutex<Option<Sender<Task>>>,
}

impl Carry {
    /// Where tasks are sent.
    ///
    /// # Errors
    /// [`Error::NoMemory`] where the thread could not be started.
    pub fn tasks(&self) -> Result<Sender<Task>> {
        let mut tasks = self.tasks.lock();
        if let Some(tasks) = &*tasks {
            return Ok(tasks.clone());
        }
        let (sender, queue) = channel::<Task>();
        let run = move || {
            for task in queue {
                // A panic was reported by its hook; the request of the task is answered "gone" by being dropped.
                let _ = catch_unwind(AssertUnwindSafe(task));
            }
        };
        thread::Builder::new().name("faults".into()).spawn(run).map_err(|_| Error::NoMemory)?;
        *tasks = Some(sender.clone());
        Ok(sender)
    }
}
