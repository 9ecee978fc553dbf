//! Tasks, with the interface of `std::thread`.

use std::io;
use std::num::NonZero;
pub use std::thread::{Thread, ThreadId, current, panicking, scope};
use std::time::Duration;

use super::schedule;

/// As `std::thread::Builder`.
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
    /// Without a name.
    pub fn new() -> Self {
        Self { inner: std::thread::Builder::new(), name: None }
    }

    /// With this name.
    #[must_use]
    pub fn name(self, name: String) -> Self {
        Self { inner: self.inner.name(name.clone()), name: Some(name) }
    }

    /// With a stack of so many bytes.
    #[must_use]
    pub fn stack_size(self, bytes: usize) -> Self {
        Self { inner: self.inner.stack_size(bytes), ..self }
    }

    /// Starts it.
    ///
    /// # Errors
    /// The system's.
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
            schedule::never_started(task);
        }
        schedule::point();
        Ok(JoinHandle { inner: started?, task })
    }
}

/// As `std::thread::spawn`.
///
/// # Panics
/// The thread could not be started.
pub fn spawn<F, T>(work: F) -> JoinHandle<T>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    Builder::new().spawn(work).expect("a thread cannot be started")
}

/// As `std::thread::JoinHandle`.
#[derive(Debug)]
pub struct JoinHandle<T> {
    inner: std::thread::JoinHandle<T>,
    task: Option<usize>,
}

impl<T> JoinHandle<T> {
    /// Waits for its end.
    ///
    /// # Errors
    /// What it panicked with.
    pub fn join(self) -> std::thread::Result<T> {
        if let Some(task) = self.task.filter(|_| schedule::me().is_some()) {
            while !schedule::is_done(task) {
                schedule::block(schedule::end_of(task), None);
            }
        }
        // It has left the simulation, so it ends soon.
        self.inner.join()
    }

    /// Whether it has ended.
    pub fn is_finished(&self) -> bool {
        match self.task {
            Some(task) if schedule::me().is_some() => schedule::is_done(task),
            _ => self.inner.is_finished(),
        }
    }

    /// Its thread.
    pub fn thread(&self) -> &Thread {
        self.inner.thread()
    }
}

/// As `std`'s: the CPUs of the simulation.
///
/// # Errors
/// None.
pub fn available_parallelism() -> io::Result<NonZero<usize>> {
    Ok(const { NonZero::new(super::CPUS).expect("there are some") })
}

/// Lets so much time pass.
pub fn sleep(time: Duration) {
    if schedule::me().is_some() {
        // Nobody wakes this key.
        schedule::block(0, Some(time));
    } else {
        std::thread::sleep(time);
    }
}

/// Others go first.
pub fn yield_now() {
    if !schedule::give_way() {
        std::thread::yield_now();
    }
}
