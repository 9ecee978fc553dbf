//! Simulated threads (tasks), with the interface of `std::thread`.

use std::io;
use std::num::NonZero;
pub use std::thread::{Thread, ThreadId, current, panicking, scope};
use std::time::Duration;

use super::schedule;

/// Simulated `std::thread::Builder`.
#[derive(Debug)]
pub struct Builder {
    inner: std::thread::Builder,
    name: Option<String>,
}

impl Default for Builder {
    fn default() -> Self {
        Self::new()
    }
}

impl Builder {
    /// Creates a builder for a thread without a name.
    pub fn new() -> Self {
        Self { inner: std::thread::Builder::new(), name: None }
    }

    /// Sets the name of the thread.
    #[must_use]
    pub fn name(self, name: String) -> Self {
        Self { inner: self.inner.name(name.clone()), name: Some(name) }
    }

    /// Sets the stack size of the thread in bytes.
    #[must_use]
    pub fn stack_size(self, bytes: usize) -> Self {
        Self { inner: self.inner.stack_size(bytes), ..self }
    }

    /// Starts a thread that runs `work`. In a simulation, the thread becomes a new task.
    ///
    /// # Errors
    /// Fails if the system cannot start a thread.
    pub fn spawn<F, T>(self, work: F) -> io::Result<JoinHandle<T>>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        let task = schedule::add(self.name.as_deref().unwrap_or("thread"));
        let started = self.inner.spawn(move || {
            if let Some(task) = task {
                schedule::enter(task);
            }
            work()
        });
        if let (Err(_), Some(task)) = (&started, task) {
            schedule::remove_unstarted(task);
        }
        schedule::pass_point();
        Ok(JoinHandle { inner: started?, task })
    }
}

/// Simulated `std::thread::spawn`.
///
/// # Panics
/// Panics if the thread cannot be started.
pub fn spawn<F, T>(work: F) -> JoinHandle<T>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    Builder::new().spawn(work).expect("cannot start a thread")
}

/// Simulated `std::thread::JoinHandle`.
#[derive(Debug)]
pub struct JoinHandle<T> {
    inner: std::thread::JoinHandle<T>,
    task: Option<usize>,
}

impl<T> JoinHandle<T> {
    /// Waits for the end of the thread, and returns the value of its closure.
    ///
    /// # Errors
    /// Returns the panic payload if the thread panicked.
    pub fn join(self) -> std::thread::Result<T> {
        if let Some(task) = self.task.filter(|_| schedule::current_task().is_some()) {
            while !schedule::is_done(task) {
                schedule::block(schedule::end_key(task), None);
            }
        }
        // The task has ended in the simulation, so the real thread exits soon.
        self.inner.join()
    }

    /// Returns true if the thread has ended, without waiting.
    pub fn is_finished(&self) -> bool {
        match self.task {
            Some(task) if schedule::current_task().is_some() => schedule::is_done(task),
            _ => self.inner.is_finished(),
        }
    }

    /// Returns a handle to the thread.
    pub fn thread(&self) -> &Thread {
        self.inner.thread()
    }
}

/// Returns the number of simulated CPUs.
///
/// # Errors
/// Never fails; the result type is that of `std`.
pub fn available_parallelism() -> io::Result<NonZero<usize>> {
    Ok(const { NonZero::new(super::CPUS).expect("at least one CPU") })
}

/// Sleeps in virtual time, or in real time outside a simulation.
pub fn sleep(time: Duration) {
    if schedule::current_task().is_some() {
        // No wake-up uses key 0, so only the timeout ends the wait.
        schedule::block(0, Some(time));
    } else {
        std::thread::sleep(time);
    }
}

/// Lets other threads run first.
pub fn yield_now() {
    if !schedule::yield_now() {
        std::thread::yield_now();
    }
}
