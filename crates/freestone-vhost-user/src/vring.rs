//! The configuration of a queue, and its thread while it runs.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use freestone_core::budget::Budget;
use freestone_core::completion_queue::CompletionQueue;
use freestone_core::device::Disk;
use freestone_core::sync::Mutex;
use freestone_core::workers::Workers;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::frontend::FrontendState;
use crate::inflight::InflightLog;
use crate::queue::{self, KickWaiter, QueueResources};
use crate::ring::{Addresses, Ring, RingError};
use crate::task::CompletedRequest;
use crate::wire::feature;

/// Configuration that all queues of a connection share.
#[derive(Debug)]
pub struct ConnectionConfig {
    pub disk: Arc<Disk>,
    /// State shared by the queues of the frontend.
    pub frontend: Arc<FrontendState>,
    /// Memory budget of the process for bytes in flight.
    pub budget: Arc<Budget>,
    /// Threads that run expensive requests.
    pub workers: Workers,
    /// See [`Options::busy_poll`](crate::Options::busy_poll).
    pub busy_poll: bool,
    /// The in-flight log, if the frontend uses one.
    pub inflight: Option<InflightLog>,
}

#[derive(Debug, Default)]
pub struct Vring {
    /// Number of entries of the rings; 0 if not set.
    pub size: u16,
    pub addresses: Option<Addresses>,
    /// Index of the available entry at which the queue starts.
    pub base: u16,
    /// Eventfd that the driver writes to.
    pub kick: Option<Arc<OwnedFd>>,
    /// Eventfd that notifies the driver; may change while the queue runs.
    pub call: Arc<Mutex<Option<OwnedFd>>>,
    /// Eventfd that signals an error to the frontend.
    pub err: Option<Arc<OwnedFd>>,
    pub enabled: bool,
    running: Option<RunningQueue>,
}

#[derive(Debug)]
struct RunningQueue {
    answers: Arc<CompletionQueue<CompletedRequest>>,
    thread: JoinHandle<u16>,
}

/// Checks that `fd` is an eventfd, and makes it nonblocking. Other files are refused, because a
/// write to a full pipe, for example, would block forever.
pub fn check_eventfd(fd: OwnedFd) -> io::Result<OwnedFd> {
    let kind = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    if kind.as_os_str() != "anon_inode:[eventfd]" {
        return Err(io::Error::other("the file descriptor is not an eventfd"));
    }
    fcntl_setfl(&fd, fcntl_getfl(&fd)? | OFlags::NONBLOCK)?;
    Ok(fd)
}

impl Vring {
    /// Starts or stops the queue according to its configuration. A stop waits for requests in
    /// flight.
    pub fn apply_config(
        &mut self,
        index: usize,
        config: &ConnectionConfig,
        features: u64,
    ) -> Result<(), StartError> {
        let (Some(addresses), Some(kick), true, true) =
            (self.addresses, self.kick.clone(), self.enabled, self.size > 0)
        else {
            self.stop();
            return Ok(());
        };
        if self.running.is_some() {
            return Ok(());
        }
        let has = |bit| features & bit != 0;
        let memory = config.frontend.memory();
        let kinds = (has(feature::EVENT_IDX), has(feature::INDIRECT_DESC));
        let mut ring = Ring::new(&memory, &addresses, self.size, kinds, self.base)?;
        let mut queue_log =
            config.inflight.as_ref().and_then(|inflight| inflight.queue_log(index, self.size));
        let used = ring.used_index();
        let mut resubmit = Vec::new();
        if let Some(begun) = queue_log.as_mut().and_then(|queue_log| queue_log.recover(used)) {
            // Every chain that the previous server took is either used or still in flight. This
            // gives the next available index.
            ring.next_avail = used.wrapping_add(begun.len() as u16);
            resubmit = begun;
            resubmit.reverse();
        }
        let answers = Arc::new(CompletionQueue::new()?);
        let resources = QueueResources {
            index,
            disk: Arc::clone(&config.disk),
            frontend: Arc::clone(&config.frontend),
            share: config.budget.share(&config.disk.failures, Arc::clone(&answers) as _),
            answers: Arc::clone(&answers),
            workers: config.workers.clone(),
            busy_poll: config.busy_poll,
            ring,
            addresses,
            queue_log,
            resubmit,
            kick_waiter: KickWaiter::new(&*kick, answers.wake_fd())?,
            call: Arc::clone(&self.call),
            err: self.err.clone(),
        };
        // Set before the queue's thread can complete a read, whose data the driver may cache.
        config.frontend.has_driver.store(true, Ordering::SeqCst);
        let name = format!("vhost-q{index}");
        let thread = std::thread::Builder::new().name(name).spawn(move || queue::run(resources))?;
        self.running = Some(RunningQueue { answers, thread });
        // A killed server may have published completions without the notification. With event indices,
        // the notification of later completions would be missing, too.
        self.notify_driver();
        Ok(())
    }

    /// Stops the queue, and waits for its requests in flight.
    pub fn stop(&mut self) {
        self.begin_stop();
        if let Some(RunningQueue { thread, .. }) = self.running.take()
            && let Ok(base) = thread.join()
        {
            self.base = base;
        }
    }

    /// Requests the stop of the queue's thread, without waiting for it.
    pub fn begin_stop(&self) {
        if let Some(running) = &self.running {
            running.answers.shut_down();
        }
    }

    /// Wakes the queue's thread, which then checks for changed memory.
    pub fn wake(&self) {
        if let Some(running) = &self.running {
            running.answers.wake();
        }
    }

    /// Sets the eventfd that notifies the driver. QEMU does that again after it has enabled the queue, which
    /// may have notified the former eventfd by then.
    pub fn set_call(&self, call: Option<OwnedFd>) {
        *self.call.lock() = call;
        if self.running.is_some() {
            self.notify_driver();
        }
    }

    /// Notifies the driver, which then finds the completions that it has not seen.
    fn notify_driver(&self) {
        if let Some(call) = &*self.call.lock() {
            freestone_core::eventfd::wake(call);
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The rings are invalid.
    #[error("{0}")]
    Ring(#[from] RingError),
    /// A system call failed.
    #[error("{0}")]
    System(#[from] io::Error),
}
