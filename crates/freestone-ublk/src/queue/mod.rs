//! The loop of a queue's thread. Each turn completes the requests that the device has finished,
//! begins requests that have arrived, and enters the ring once. This system call submits all
//! completions and waits for events.
//!
//! A [`Queue`] owns its ring, its tags with their buffers ([`slots`]), and its thread for zone operations. Only the
//! queue's thread uses these. The device thread starts the queues.

mod complete;
mod execute;
pub mod resources;
pub mod slots;
mod user_copy;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_core::bytes::Bytes;
use freestone_core::client_log;
use freestone_core::device::{Disk, Error};
use freestone_core::plug::Plug;
use freestone_core::work_queue::OwnedQueue;
use freestone_core::workers::Costs;
use rustix::io::Errno;

use self::resources::{DrainingQueue, QueueResources};
use self::slots::{Slots, TagState};
use self::user_copy::UserCopies;
use crate::format::task::CompletedRequest;
use crate::kernel::{COMMIT_CANCELLED, Ring, RingEvent, RingEventKind, Wait};

/// Number of bytes in flight at which a queue begins no more requests. The last request may exceed
/// the limit.
const MAX_IN_FLIGHT_BYTES: usize = 32 << 20;
/// Number of bytes of work after which completions are submitted, even if more requests wait.
const SUBMIT_AT_BYTES: usize = 256 << 10;
/// Smallest number of bytes that a request counts as work.
const MIN_WORK_BYTES: usize = 4096;
/// Time without requests after which a queue frees the memory of its buffers.
pub const IDLE: Duration = Duration::from_secs(1);
/// Retry interval if no memory is left for a buffer.
const STARVED_PAUSE: Duration = Duration::from_millis(20);
/// Result of requests that the queue fails without the device's result.
const CUT: i32 = -Error::Media.errno();

fn no_memory(error: Error) -> io::Error {
    io::Error::new(io::ErrorKind::OutOfMemory, error)
}

/// Returns the reason why a tag receives no more requests. A positive result is never expected.
fn errno_of(result: i32) -> Errno {
    if result < 0 { Errno::from_raw_os_error(-result) } else { Errno::INVAL }
}

pub struct Queue {
    resources: QueueResources,
    ring: Box<dyn Ring>,
    slots: Slots,
    disk: Arc<Disk>,
    device: Bytes,
    /// Tags whose requests have arrived and not begun, in order of arrival.
    waiting: VecDeque<u16>,
    /// Copies of request data in flight. Requests that fetch data arrived before those in
    /// `waiting`.
    copies: UserCopies,
    /// Tags whose completion waits for memory for a buffer, with the results of their requests.
    starved: Vec<(u16, i32)>,
    gone: usize,
    arrived: Vec<RingEvent>,
    finished: Vec<CompletedRequest>,
    /// Number of requests that the device has not completed, including those that the queue has
    /// already failed.
    in_flight: usize,
    /// Bytes charged for requests in flight.
    charged: usize,
    costs: Arc<Costs>,
    /// Thread for zone operations, which may block. Started on first use.
    zone_thread: OwnedQueue,
    plug: Option<Plug>,
    applied_version: u64,
    /// Set if the applied version must be reported to threads that wait for it.
    must_report: bool,
    held: bool,
    cuts: u64,
    dead: bool,
}

impl Queue {
    /// Creates the queue and fetches the first request of each tag.
    ///
    /// # Errors
    /// Fails if there is no memory for buffers or if the kernel rejects a fetch.
    pub fn new(resources: QueueResources, ring: Box<dyn Ring>, disk: Arc<Disk>) -> io::Result<Self> {
        let slots = Slots::new(resources.depth, resources.max_bytes).map_err(no_memory)?;
        let device = Bytes::new(Arc::clone(&disk.device));
        let mut queue = Self {
            resources,
            ring,
            slots,
            disk,
            device,
            waiting: VecDeque::new(),
            copies: UserCopies::default(),
            starved: Vec::new(),
            gone: 0,
            arrived: Vec::new(),
            finished: Vec::new(),
            in_flight: 0,
            charged: 0,
            costs: Arc::default(),
            zone_thread: OwnedQueue::new("ublk-zones"),
            plug: None,
            // No state has this version, so the first turn reads the shared state.
            applied_version: u64::MAX,
            must_report: false,
            held: false,
            cuts: 0,
            dead: false,
        };
        match queue.fetch() {
            Ok(()) => Ok(queue),
            Err(error) => {
                drop(queue.close());
                Err(error)
            }
        }
    }

    fn fetch(&mut self) -> io::Result<()> {
        for tag in self.slots.tags() {
            let buffer =
                if self.resources.user_copy { 0 } else { self.slots.address(tag).map_err(no_memory)? };
            self.ring.fetch(tag, buffer);
        }
        while self.ring.has_queued() {
            self.ring.enter(Wait::No)?;
        }
        self.ring.take_events(&mut self.arrived);
        match self.arrived.iter().find(|arrived| arrived.result != 0) {
            None => Ok(()),
            Some(arrived) => Err(errno_of(arrived.result).into()),
        }
    }

    /// Serves requests until the kernel has returned all tags or the thread must end. Returns the
    /// requests still in flight for [`drain`](DrainingQueue::drain).
    pub fn serve(mut self) -> DrainingQueue {
        loop {
            self.apply_state();
            self.complete_finished();
            let mut result = self.process_requests();
            self.plug = None;
            // The device may have completed submitted requests immediately.
            self.complete_finished();
            self.retry_starved();
            self.report_state();
            if self.gone == self.slots.tags().len() || self.resources.answers.is_shut_down() {
                break;
            }
            if result.is_ok() {
                result = self.wait_for_event();
            }
            if let Err(error) = result {
                tracing::error!(
                    queue = self.resources.index,
                    "{}: ublk: io_uring failed: {error}",
                    self.disk.name
                );
                break;
            }
        }
        self.close()
    }

    /// Applies changes of the shared state.
    fn apply_state(&mut self) {
        if self.resources.shared.version() == self.applied_version {
            return;
        }
        let (disk, cuts) = {
            let state = self.resources.shared.lock();
            (self.held, self.dead) = (state.holds > 0, state.own.dead);
            self.applied_version = self.resources.shared.version();
            (state.disk.clone(), state.own.cuts)
        };
        if let Some(disk) = disk
            && !Arc::ptr_eq(&disk, &self.disk)
        {
            self.device = Bytes::new(Arc::clone(&disk.device));
            self.disk = disk;
        }
        if cuts != self.cuts || self.dead {
            self.cuts = cuts;
            self.cut();
        }
        self.must_report = true;
    }

    /// Reports the applied version to the shared state. While requests are held, also reports the
    /// number in flight, because a thread may wait for the last one.
    fn report_state(&mut self) {
        if std::mem::take(&mut self.must_report) || self.held {
            self.resources.shared.update(|state| {
                let queue = &mut state.own.queues[usize::from(self.resources.index)];
                (queue.applied_version, queue.in_flight) = (self.applied_version, self.in_flight);
            });
        }
    }

    /// Fails all requests that have arrived, even those that the device is executing.
    fn cut(&mut self) {
        self.take_arrivals();
        self.waiting.clear();
        self.copies.cut();
        for tag in self.slots.tags() {
            if matches!(self.slots.get(tag).state, TagState::Waiting | TagState::Device) {
                self.commit(tag, CUT);
            }
        }
    }

    fn take_arrivals(&mut self) {
        let mut arrived = std::mem::take(&mut self.arrived);
        self.ring.take_events(&mut arrived);
        for RingEvent { tag, kind: event, result } in arrived.drain(..) {
            match event {
                RingEventKind::Fetched => self.copies.finish_fetch(tag, result),
                RingEventKind::Sent => self.copies.finish_send(),
                RingEventKind::Command => self.take_command(tag, result),
            }
        }
        self.arrived = arrived;
    }

    fn take_command(&mut self, tag: u16, result: i32) {
        if !self.slots.tags().contains(&tag) || self.slots.get(tag).state != TagState::Kernel {
            return;
        }
        let slot = self.slots.get(tag);
        if result == 0 {
            slot.state = TagState::Waiting;
            slot.serial += 1;
            self.waiting.push_back(tag);
            return;
        }
        if self.resources.user_copy && result == COMMIT_CANCELLED {
            client_log!(error, "{}: ublk: the kernel has not taken the data of a read", self.disk.name);
            return self.commit(tag, CUT);
        }
        slot.state = TagState::Gone;
        self.gone += 1;
        let errno = errno_of(result);
        if errno != Errno::NODEV {
            client_log!(
                error,
                tag,
                queue = self.resources.index,
                "{}: ublk: lost a tag: {errno}",
                self.disk.name
            );
        }
    }

    /// Begins the requests that have arrived, within the in-flight limits.
    fn process_requests(&mut self) -> io::Result<()> {
        let mut work = 0;
        loop {
            let done = if let Some(fetched) = self.copies.next_ready(self.held) {
                self.begin_fetched(fetched)
            } else if let Some(&tag) = self.waiting.front()
                && (self.dead || !(self.held || self.charged >= MAX_IN_FLIGHT_BYTES))
                && let Some(bytes) = self.begin_next(tag)
            {
                bytes
            } else {
                return Ok(());
            };
            work += done.max(MIN_WORK_BYTES);
            if work >= SUBMIT_AT_BYTES && !self.waiting.is_empty() {
                work = 0;
                self.complete_finished();
                self.submit_completions()?;
                self.take_arrivals();
            }
        }
    }

    fn submit_completions(&mut self) -> io::Result<()> {
        if self.ring.has_queued() { self.ring.enter(Wait::No) } else { Ok(()) }
    }

    /// Waits for an event, and submits queued completions with the same call.
    fn wait_for_event(&mut self) -> io::Result<()> {
        let is_drained = self.in_flight == 0 && self.waiting.is_empty() && self.copies.is_empty();
        let is_idle = is_drained && self.starved.is_empty();
        if is_drained {
            self.resources.share.shrink_to(0);
        }
        // If the kernel may write to buffers at any time, the queue cannot know that a buffer is
        // unused.
        let can_free = is_idle && self.slots.are_touched() && self.ring.is_deferred();
        let wait = if !self.starved.is_empty() {
            Wait::AtMost(STARVED_PAUSE)
        } else if can_free {
            Wait::AtMost(IDLE)
        } else {
            Wait::Forever
        };
        let began = can_free.then(Instant::now);
        self.ring.enter(wait)?;
        self.take_arrivals();
        let was_idle = began.is_some_and(|began| began.elapsed() >= IDLE);
        if was_idle && self.waiting.is_empty() && self.copies.is_empty() && !self.ring.has_queued() {
            self.slots.free_memory();
        }
        Ok(())
    }

    fn close(self) -> DrainingQueue {
        let Self { resources, ring, slots, copies, device, in_flight, gone, .. } = self;
        let all_back = gone == slots.tags().len();
        drop(ring);
        if !all_back {
            // The kernel frees a ring later than its file descriptor, and may write to buffers
            // until then.
            slots.leak();
            copies.leak();
        }
        DrainingQueue::new(resources, device, in_flight)
    }
}
