//! The loop of a queue's thread. Each turn completes what the device has finished, begins requests
//! that have arrived, and enters the ring once. This system call submits all completions and waits
//! for events.

mod complete;
mod execute;
mod user_copy;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_core::bytes::Bytes;
use freestone_core::client_log;
use freestone_core::device::{Disk, Error};
use freestone_core::plug::Plug;
use freestone_core::workers::Costs;
use rustix::io::Errno;

use crate::kernel::{Arrived, Event, NOT_DONE, Ring, Wait};
use crate::parts::{Drained, Parts};
use crate::slots::{Place, Slots};
use crate::task::Finished;
use crate::zone_thread::ZoneThread;
use user_copy::UserCopies;

/// Bytes in flight at which a queue begins no more requests. The last request may exceed the limit.
const MAX_IN_FLIGHT_BYTES: usize = 32 << 20;
/// Completions are submitted after this many bytes of work, even if more requests wait.
const SUBMIT_AT_BYTES: usize = 256 << 10;
/// Minimum number of bytes that a request counts as work.
const MIN_WORK_BYTES: usize = 4096;
/// A queue without requests for this long frees the memory of its buffers.
pub const IDLE: Duration = Duration::from_secs(1);
/// Retry interval if there is no memory for a buffer.
const STARVED_PAUSE: Duration = Duration::from_millis(20);
/// Result of requests that are failed without the device.
const CUT: i32 = -Error::Media.errno();

fn no_memory(error: Error) -> io::Error {
    io::Error::new(io::ErrorKind::OutOfMemory, error)
}

/// Returns why a tag came back. A positive result is never expected.
fn errno_of(result: i32) -> Errno {
    if result < 0 { Errno::from_raw_os_error(-result) } else { Errno::INVAL }
}

pub struct Queue {
    parts: Parts,
    ring: Box<dyn Ring>,
    slots: Slots,
    disk: Arc<Disk>,
    device: Bytes,
    /// Tags whose requests are not begun, in order of arrival.
    waiting: VecDeque<u16>,
    /// User copies. Requests that fetch data precede those in `waiting`.
    copies: UserCopies,
    /// Tags whose completion waits for memory for a buffer.
    starved: Vec<(u16, i32)>,
    gone: usize,
    arrived: Vec<Arrived>,
    finished: Vec<Finished>,
    /// Requests that the device has, including those already failed by the queue.
    in_flight: usize,
    /// Bytes charged for requests in flight.
    charged: usize,
    costs: Arc<Costs>,
    zone_thread: ZoneThread,
    plug: Option<Plug>,
    applied_version: u64,
    /// The applied version must be reported to waiting threads.
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
    pub fn new(parts: Parts, ring: Box<dyn Ring>, disk: Arc<Disk>) -> io::Result<Self> {
        let slots = Slots::new(parts.depth, parts.max_bytes).map_err(no_memory)?;
        let device = Bytes::new(Arc::clone(&disk.device));
        let mut queue = Self {
            parts,
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
            zone_thread: ZoneThread::default(),
            plug: None,
            // The first turn always reads the shared state.
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
            let buffer = if self.parts.user_copy { 0 } else { self.slots.address(tag).map_err(no_memory)? };
            self.ring.fetch(tag, buffer);
        }
        while self.ring.has_queued() {
            self.ring.enter(Wait::No)?;
        }
        self.ring.arrived(&mut self.arrived);
        match self.arrived.iter().find(|arrived| arrived.result != 0) {
            None => Ok(()),
            Some(arrived) => Err(errno_of(arrived.result).into()),
        }
    }

    /// Serves requests until the kernel has returned all tags or the thread must end. Requests
    /// still in flight are left to [`drain`](Drained::drain).
    pub fn serve(mut self) -> Drained {
        loop {
            self.apply_state();
            self.complete_finished();
            let mut result = self.process_requests();
            self.plug = None;
            // The device may have completed submitted requests immediately.
            self.complete_finished();
            self.retry_starved();
            self.report_state();
            if self.gone == self.slots.tags().len() || self.parts.answers.is_ended() {
                break;
            }
            if result.is_ok() {
                result = self.wait_for_event();
            }
            if let Err(error) = result {
                tracing::error!(
                    queue = self.parts.index,
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
        if self.parts.shared.version() == self.applied_version {
            return;
        }
        let snapshot = self.parts.shared.snapshot();
        if let Some(disk) = snapshot.disk
            && !Arc::ptr_eq(&disk, &self.disk)
        {
            self.device = Bytes::new(Arc::clone(&disk.device));
            self.disk = disk;
        }
        self.held = snapshot.held;
        self.dead = snapshot.dead;
        if snapshot.cuts != self.cuts || self.dead {
            self.cuts = snapshot.cuts;
            self.cut();
        }
        self.applied_version = snapshot.version;
        self.must_report = true;
    }

    /// Reports the applied version. While requests are held, also reports the number in flight,
    /// because a thread may wait for the last one.
    fn report_state(&mut self) {
        if std::mem::take(&mut self.must_report) || self.held {
            self.parts.shared.record_applied(self.parts.index, self.applied_version, self.in_flight);
        }
    }

    /// Fails all requests that have arrived.
    fn cut(&mut self) {
        self.take_arrivals();
        self.waiting.clear();
        self.copies.cut();
        for tag in self.slots.tags() {
            if matches!(self.slots.get(tag).place, Place::Waiting | Place::Device) {
                self.commit(tag, CUT);
            }
        }
    }

    fn take_arrivals(&mut self) {
        let mut arrived = std::mem::take(&mut self.arrived);
        self.ring.arrived(&mut arrived);
        for Arrived { tag, event, result } in arrived.drain(..) {
            match event {
                Event::Fetched => self.copies.finish_fetch(tag, result),
                Event::Sent => self.copies.finish_send(),
                Event::Command => self.take_command(tag, result),
            }
        }
        self.arrived = arrived;
    }

    fn take_command(&mut self, tag: u16, result: i32) {
        if !self.slots.tags().contains(&tag) || self.slots.get(tag).place != Place::Kernel {
            return;
        }
        let slot = self.slots.get(tag);
        if result == 0 {
            slot.place = Place::Waiting;
            slot.serial += 1;
            self.waiting.push_back(tag);
            return;
        }
        if self.parts.user_copy && result == NOT_DONE {
            client_log!(error, "{}: ublk: the kernel has not taken the data of a read", self.disk.name);
            return self.commit(tag, CUT);
        }
        slot.place = Place::Gone;
        self.gone += 1;
        let errno = errno_of(result);
        if errno != Errno::NODEV {
            client_log!(
                error,
                tag,
                queue = self.parts.index,
                "{}: ublk: lost a tag: {errno}",
                self.disk.name
            );
        }
    }

    /// Begins the requests that have arrived, within the in-flight limit.
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
            self.parts.share.keep(0);
        }
        // If the kernel may write to buffers at any time, none is known to be unused.
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
            self.slots.give_back();
        }
        Ok(())
    }

    fn close(self) -> Drained {
        let Self { parts, ring, slots, copies, device, in_flight, gone, .. } = self;
        let all_back = gone == slots.tags().len();
        drop(ring);
        if !all_back {
            // The kernel frees a ring later than its file descriptor, and may write to buffers
            // until then.
            slots.leak();
            copies.leak();
        }
        Drained::new(parts, device, in_flight)
    }
}
