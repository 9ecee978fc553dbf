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
    /// Creates a builder without a name.
    pub fn new() -> Self {
        Self { inner: std::thread::Builder::new(), name: None }
    }

    /// Sets the name.
    #[must_use]
    pub fn name(self, name: String) -> Self {
        Self { inner: self.inner.name(name.clone()), name: Some(name) }
    }

    /// Sets the stack size in bytes.
    #[must_use]
    pub fn stack_size(self, bytes: usize) -> Self {
        Self { inner: self.inner.stack_size(bytes), ..self }
    }

    /// Starts the thread.
    ///
    /// # Errors
    /// The error of the system.
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
        schedule::point();
        Ok(JoinHandle { inner: started?, task })
    }
}

/// Simulated `std::thread::spawn`.
///
/// # Panics
/// If the thread cannot be started.
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
    /// Waits for the end of the thread.
    ///
    /// # Errors
    /// The panic payload of the thread.
    pub fn join(self) -> std::thread::Result<T> {
        if let Some(task) = self.task.filter(|_| schedule::current_task().is_some()) {
            while !schedule::is_done(task) {
                schedule::block(schedule::end_key(task), None);
            }
        }
        // The task has left the simulation, so the thread exits soon.
        self.inner.join()
    }

    /// Returns true if the thread has ended.
    pub fn is_finished(&self) -> bool {
        match self.task {
            Some(task) if schedule::current_task().is_some() => schedule::is_done(task),
            _ => self.inner.is_finished(),
        }
    }

    /// Returns the thread.
    pub fn thread(&self) -> &Thread {
        self.inner.thread()
    }
}

/// Returns the number of simulated CPUs.
///
/// # Errors
/// None.
pub fn available_parallelism() -> io::Result<NonZero<usize>> {
    Ok(const { NonZero::new(super::CPUS).expect("at least one CPU") })
}

/// Sleeps in virtual time.
pub fn sleep(time: Duration) {
    if schedule::current_task().is_some() {
        // No wake uses key 0.
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
