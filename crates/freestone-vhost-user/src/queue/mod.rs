//! The loop of a queue's thread. Each turn completes the requests that the device has finished, begins the
//! available requests, and publishes all completions with at most one notification.

mod complete;
mod execute;
mod kick_waiter;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_core::budget::Share;
use freestone_core::bytes::Bytes;
use freestone_core::client_log;
use freestone_core::completion_queue::CompletionQueue;
use freestone_core::device::{Disk, IoBuf};
use freestone_core::plug::Plug;
use freestone_core::sync::Mutex;
use freestone_core::workers::{Costs, Workers};

use crate::frontend::FrontendState;
use crate::inflight::QueueLog;
use crate::memory::Memory;
use crate::ring::{Addresses, Chain, Ring, RingError};
use crate::task::CompletedRequest;

pub use self::kick_waiter::KickWaiter;

/// Maximum number of requests in flight per queue.
const MAX_IN_FLIGHT: usize = 256;
/// Number of bytes in flight at which a queue begins no more requests. The last request may exceed the limit.
const MAX_IN_FLIGHT_BYTES: usize = 32 << 20;
/// Number of completions that are published at once, even if more requests wait.
const PUBLISH_AT: u16 = 32;
/// Longest and shortest time of polling the ring before the thread sleeps. The longest is that of QEMU's
/// iothreads.
const POLL_TIME_MAX: Duration = Duration::from_micros(32);
const POLL_TIME_MIN: Duration = Duration::from_micros(4);
/// Number of polls of the ring between two reads of the clock.
const POLLS_PER_CLOCK_READ: u32 = 16;

/// Resources of a queue's thread.
pub struct QueueResources {
    pub index: usize,
    pub disk: Arc<Disk>,
    /// State shared by the queues of the frontend.
    pub frontend: Arc<FrontendState>,
    /// Receives the device's completions and wakes the queue's thread.
    pub answers: Arc<CompletionQueue<CompletedRequest>>,
    /// The queue's share of the memory budget.
    pub share: Share,
    /// Threads that run expensive requests.
    pub workers: Workers,
    /// See [`Options::busy_poll`](crate::Options::busy_poll).
    pub busy_poll: bool,
    pub ring: Ring,
    /// Addresses of the ring in the frontend's memory.
    pub addresses: Addresses,
    /// The in-flight log, if the frontend uses one.
    pub queue_log: Option<QueueLog>,
    /// Heads of the chains that the previous connection began but did not complete, in reverse order.
    pub resubmit: Vec<u16>,
    pub kick_waiter: KickWaiter,
    /// Eventfd that notifies the driver. May change at any time; locked for one write.
    pub call: Arc<Mutex<Option<OwnedFd>>>,
    /// Eventfd that signals to the frontend that the queue has ended because of an error.
    pub err: Option<Arc<OwnedFd>>,
}

/// Returns the time for which the queue polls before its next sleep. `last` is the last such time, and `took`
/// is the duration of that polling and the sleep. If driver and queue share a CPU, polling itself delays the
/// driver, and the time drops to zero.
fn next_poll_time(last: Duration, took: Duration) -> Duration {
    if took > POLL_TIME_MAX { Duration::ZERO } else { (last * 2).clamp(POLL_TIME_MIN, POLL_TIME_MAX) }
}

struct Queue {
    resources: QueueResources,
    device: Bytes,
    memory: Arc<Memory>,
    generation: u64,
    chain: Chain,
    finished: Vec<CompletedRequest>,
    spare: IoBuf,
    in_flight: usize,
    /// Bytes charged for requests in flight.
    charged: usize,
    costs: Arc<Costs>,
    zoned: bool,
    /// See [`Geometry::ignores_data`](freestone_core::device::Geometry::ignores_data).
    ignores_data: bool,
    plug: Option<Plug>,
    /// Time for which the ring is polled before the thread sleeps; zero means no polling.
    poll_time: Duration,
    /// An error found while completing a request, which ends the queue.
    broken: Option<RingError>,
}

/// Serves a queue until it is stopped or broken, and waits for its requests in flight. Returns the index of
/// the next available entry of the ring.
pub fn run(resources: QueueResources) -> u16 {
    let device = Bytes::new(Arc::clone(&resources.disk.device));
    let geometry = device.geometry();
    let generation = resources.frontend.generation();
    let memory = resources.frontend.memory();
    let mut queue = Queue {
        resources,
        device,
        memory,
        // The ring may be older than the memory: the first turn maps it again.
        generation: generation.wrapping_sub(1),
        chain: Chain::default(),
        finished: Vec::new(),
        spare: IoBuf::empty(),
        in_flight: 0,
        charged: 0,
        costs: Arc::default(),
        zoned: geometry.zones.is_some(),
        ignores_data: geometry.ignores_data,
        plug: None,
        poll_time: Duration::ZERO,
        broken: None,
    };
    if let Err(broken) = queue.serve() {
        queue.end(broken);
    }
    queue.drain();
    queue.resources.ring.next_avail
}

impl Queue {
    fn serve(&mut self) -> Result<(), RingError> {
        while !self.resources.answers.is_shut_down() {
            self.apply_memory_change()?;
            self.complete_finished();
            // The sum is at most twice the queue size, so it cannot overflow.
            let ready = self.resources.ring.available()? + self.resources.resubmit.len() as u16;
            for behind in (0..ready).rev() {
                if self.resources.answers.is_shut_down() || !self.has_room() {
                    break;
                }
                self.next_request(behind)?;
                if self.resources.ring.unpublished() >= PUBLISH_AT {
                    self.publish();
                }
            }
            self.plug = None;
            self.publish();
            if let Some(broken) = self.broken {
                return Err(broken);
            }
            if self.is_dead() {
                return Err(RingError::Memory);
            }
            if self.has_room() {
                self.wait_for_requests()?;
            } else {
                self.wait_for_device();
            }
        }
        Ok(())
    }

    fn has_room(&self) -> bool {
        self.in_flight < MAX_IN_FLIGHT && self.charged < MAX_IN_FLIGHT_BYTES
    }

    /// Applies a change of the memory that the frontend shares.
    fn apply_memory_change(&mut self) -> Result<(), RingError> {
        let generation = self.resources.frontend.generation();
        if generation != self.generation {
            // The generation is read before the memory, so that a change in between is applied in the next
            // turn.
            self.generation = generation;
            self.memory = self.resources.frontend.memory();
            self.resources.ring = self.resources.ring.remap(&self.memory, &self.resources.addresses)?;
        }
        Ok(())
    }

    /// Returns true if the frontend has truncated its memory or the in-flight log.
    fn is_dead(&self) -> bool {
        self.memory.is_dead() || self.resources.queue_log.as_ref().is_some_and(QueueLog::is_dead)
    }

    /// Polls the ring, and then sleeps if no request is available.
    fn wait_for_requests(&mut self) -> Result<(), RingError> {
        if self.resources.ring.available()? > 0 || !self.resources.resubmit.is_empty() {
            return Ok(());
        }
        let began = Instant::now();
        if self.poll_ring()? {
            return Ok(());
        }
        self.resources.ring.enable_notifications();
        if self.resources.ring.available()? == 0 {
            // A lost ring reads as zeroes, so that no request may seem available.
            if self.is_dead() {
                return Err(RingError::Memory);
            }
            if self.in_flight == 0 {
                self.resources.share.shrink_to(self.spare.capacity() as u64);
            }
            self.sleep();
            if self.resources.busy_poll {
                self.poll_time = next_poll_time(self.poll_time, began.elapsed());
            }
        }
        self.resources.ring.disable_notifications();
        Ok(())
    }

    /// Polls the ring for `poll_time`. A driver that submits a request in this time need not notify the
    /// queue. Returns true if a request is available.
    fn poll_ring(&mut self) -> Result<bool, RingError> {
        // Polling would not see completions of the device.
        if self.poll_time.is_zero() || self.in_flight > 0 {
            return Ok(false);
        }
        let began = Instant::now();
        while began.elapsed() < self.poll_time {
            for _ in 0..POLLS_PER_CLOCK_READ {
                if self.resources.ring.available()? > 0 {
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            if self.resources.answers.is_shut_down()
                || self.resources.frontend.generation() != self.generation
            {
                break;
            }
        }
        Ok(false)
    }

    fn sleep(&mut self) {
        self.plug = None;
        if self.resources.kick_waiter.wait() {
            self.resources.answers.rearm();
        }
    }

    fn wait_for_device(&mut self) {
        self.plug = None;
        self.resources.answers.wait();
    }

    /// Waits until the device has completed all requests in flight.
    fn drain(&mut self) {
        self.plug = None;
        self.resources.share.release_all();
        self.complete_finished();
        self.publish();
        while self.in_flight > 0 {
            self.wait_for_device();
            self.complete_finished();
            self.publish();
        }
    }

    /// Ends the queue after a protocol violation or the loss of memory.
    #[cold]
    fn end(&mut self, broken: RingError) {
        client_log!(warn, queue = self.resources.index, "{}: vhost-user: {broken}", self.resources.disk.name);
        if let Some(err) = &self.resources.err {
            freestone_core::eventfd::wake(err);
        }
        if self.is_dead() {
            let _ = rustix::net::shutdown(&self.resources.frontend.socket, rustix::net::Shutdown::Both);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poll_time_follows_recent_waits() {
        let (short, long) = (POLL_TIME_MAX / 2, POLL_TIME_MAX * 2);
        assert_eq!(next_poll_time(Duration::ZERO, long), Duration::ZERO);
        assert_eq!(next_poll_time(Duration::ZERO, short), POLL_TIME_MIN);
        let mut now = Duration::ZERO;
        for _ in 0..8 {
            now = next_poll_time(now, short);
        }
        assert_eq!(now, POLL_TIME_MAX);
        assert_eq!(next_poll_time(now, long), Duration::ZERO);
    }
}
