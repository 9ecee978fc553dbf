//! One queue: the loop of its thread. Each turn takes what the device has finished, works through
//! what has arrived, and hands all that is done to the kernel with one system call, which also
//! waits for more.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_core::bytes::Bytes;
use freestone_core::device::{Buffer, Completion, Error, Geometry, IoBuf, Op, Request, Tried};
use freestone_core::plug::Plug;
use freestone_core::workers::{Costs, MIN_BYTES};
use rustix::io::Errno;

use crate::kernel::{Arrived, Ring, Wait};
use crate::params::Disk;
use crate::parts::{Drained, Parts};
use crate::slots::{Place, Slots};
use crate::task::{Finished, Task, failed, result_of};

/// Bytes of requests that a device may hold at once. One request may have as much on its own.
const MAX_IN_FLIGHT_BYTES: usize = 32 << 20;
/// Outcomes are told after so many bytes of work although there is more to do.
const TELL_AT_BYTES: usize = 256 << 10;
/// What a request counts as at least for that.
const LEAST_WORK_BYTES: usize = 4096;
/// A queue that has had nothing to do for so long gives the memory of its buffers back.
pub const IDLE: Duration = Duration::from_secs(1);
/// Pause before another try where there is no memory for a buffer.
const STARVED_PAUSE: Duration = Duration::from_millis(20);
/// What is told of a request whose time is over.
const CUT: i32 = -Error::Media.errno();

fn no_memory(error: Error) -> io::Error {
    io::Error::new(io::ErrorKind::OutOfMemory, error)
}

/// Why a tag has come back. A result above zero is nothing that was asked for.
fn errno_of(result: i32) -> Errno {
    if result < 0 { Errno::from_raw_os_error(-result) } else { Errno::INVAL }
}

/// The queue's thread.
pub struct Queue {
    parts: Parts,
    ring: Box<dyn Ring>,
    slots: Slots,
    disk: Arc<Disk>,
    device: Bytes,
    /// Tags whose requests are not begun, in their order.
    waiting: VecDeque<u16>,
    /// Tags whose outcome could not be told yet.
    starved: Vec<(u16, i32)>,
    /// Tags that will have no request any more.
    gone: usize,
    arrived: Vec<Arrived>,
    finished: Vec<Finished>,
    /// Requests that the device has, also those that were answered in its place.
    in_flight: usize,
    /// Bytes that those in flight are charged with.
    charged: usize,
    costs: Arc<Costs>,
    plug: Option<Plug>,
    seen: u64,
    /// Others are to be told what was obeyed.
    report: bool,
    held: bool,
    cuts: u64,
    dead: bool,
}

impl Queue {
    /// Asks for the first request of each tag.
    ///
    /// # Errors
    /// No memory for buffers, or the kernel refuses.
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
            starved: Vec::new(),
            gone: 0,
            arrived: Vec::new(),
            finished: Vec::new(),
            in_flight: 0,
            charged: 0,
            costs: Arc::default(),
            plug: None,
            // The first turn looks.
            seen: u64::MAX,
            report: false,
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
            let buffer = self.slots.address(tag).map_err(no_memory)?;
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

    /// Serves until the kernel has taken all tags back, or the thread is told to end. What the device
    /// has then is left to [`drain`](Drained::drain).
    pub fn serve(mut self) -> Drained {
        loop {
            self.obey();
            self.harvest();
            let mut result = self.work();
            self.plug = None;
            // What was submitted may have been answered at once.
            self.harvest();
            self.feed();
            self.report();
            if self.gone == self.slots.tags().len() || self.parts.answers.is_ended() {
                break;
            }
            if result.is_ok() {
                result = self.rest();
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

    /// Looks whether there are orders.
    fn obey(&mut self) {
        if self.parts.shared.version() == self.seen {
            return;
        }
        let standing = self.parts.shared.standing();
        if let Some(disk) = standing.disk
            && !Arc::ptr_eq(&disk, &self.disk)
        {
            self.device = Bytes::new(Arc::clone(&disk.device));
            self.disk = disk;
        }
        self.held = standing.held;
        self.dead = standing.dead;
        if standing.cuts != self.cuts || self.dead {
            self.cuts = standing.cuts;
            self.cut();
        }
        self.seen = standing.version;
        self.report = true;
    }

    /// Tells what was obeyed, and while requests are held also what is in flight: somebody may wait
    /// for the last one.
    fn report(&mut self) {
        if std::mem::take(&mut self.report) || self.held {
            self.parts.shared.obeyed(self.parts.index, self.seen, self.in_flight);
        }
    }

    /// Answers all that was asked for with an error.
    fn cut(&mut self) {
        self.take_arrivals();
        self.waiting.clear();
        for tag in self.slots.tags() {
            if matches!(self.slots.get(tag).place, Place::Waiting | Place::Device) {
                self.commit(tag, CUT);
            }
        }
    }

    /// Takes what the kernel has brought.
    fn take_arrivals(&mut self) {
        self.ring.arrived(&mut self.arrived);
        for Arrived { tag, result } in self.arrived.drain(..) {
            if !self.slots.tags().contains(&tag) || self.slots.get(tag).place != Place::Kernel {
                continue;
            }
            let slot = self.slots.get(tag);
            if result == 0 {
                slot.place = Place::Waiting;
                slot.serial += 1;
                self.waiting.push_back(tag);
                continue;
            }
            slot.place = Place::Gone;
            self.gone += 1;
            let errno = errno_of(result);
            if errno != Errno::NODEV {
                tracing::error!(
                    tag,
                    queue = self.parts.index,
                    "{}: ublk: lost a tag: {errno}",
                    self.disk.name
                );
            }
        }
    }

    /// Works through what has arrived, as far as there is room.
    fn work(&mut self) -> io::Result<()> {
        let mut work = 0;
        while let Some(&tag) = self.waiting.front() {
            if !self.dead && (self.held || self.charged >= MAX_IN_FLIGHT_BYTES) {
                break;
            }
            let Some(bytes) = self.begin_next(tag) else { break };
            work += bytes.max(LEAST_WORK_BYTES);
            if work >= TELL_AT_BYTES && !self.waiting.is_empty() {
                work = 0;
                self.harvest();
                self.tell()?;
                self.take_arrivals();
            }
        }
        Ok(())
    }

    /// Hands over what is done, without waiting.
    fn tell(&mut self) -> io::Result<()> {
        if self.ring.has_queued() { self.ring.enter(Wait::No) } else { Ok(()) }
    }

    /// Waits for something to do, and hands over what is done with the same call.
    fn rest(&mut self) -> io::Result<()> {
        let is_idle = self.in_flight == 0 && self.waiting.is_empty() && self.starved.is_empty();
        if self.in_flight == 0 && self.waiting.is_empty() {
            self.parts.share.keep(0);
        }
        // Where the kernel writes to buffers at any time, nobody knows that one is free.
        let gives_back = is_idle && self.slots.are_touched() && self.ring.is_deferred();
        let wait = if !self.starved.is_empty() {
            Wait::AtMost(STARVED_PAUSE)
        } else if gives_back {
            Wait::AtMost(IDLE)
        } else {
            Wait::Forever
        };
        let began = gives_back.then(Instant::now);
        self.ring.enter(wait)?;
        self.take_arrivals();
        let was_idle = began.is_some_and(|began| began.elapsed() >= IDLE);
        if was_idle && self.waiting.is_empty() && !self.ring.has_queued() {
            self.slots.give_back();
        }
        Ok(())
    }

    /// Begins the request of a tag, the first that waits. The bytes that it has moved; `None`: there
    /// is no room for it yet.
    fn begin_next(&mut self, tag: u16) -> Option<usize> {
        if self.dead {
            self.waiting.pop_front();
            self.commit(tag, CUT);
            return Some(0);
        }
        let descriptor = self.ring.descriptor(tag);
        let task = match Task::parse(&descriptor, self.slots.bytes()) {
            Ok(task) => Task { tag, serial: self.slots.get(tag).serial, ..task },
            Err(error) => {
                self.waiting.pop_front();
                self.refuse(tag, descriptor.op(), error);
                return Some(0);
            }
        };
        let geometry = Geometry { read_only: self.disk.read_only, ..self.device.geometry() };
        if let Err(error) = task.request.check(&geometry) {
            self.waiting.pop_front();
            self.fail(&task, error);
            return Some(0);
        }
        if task.len > 0 && !self.reserve(task.len) {
            return None;
        }
        self.waiting.pop_front();
        self.execute(task);
        Some(task.len)
    }

    /// Has bytes for a request, or waits for them from now on.
    fn reserve(&mut self, bytes: usize) -> bool {
        if self.parts.share.reach((self.charged + bytes) as u64) {
            return true;
        }
        // What was granted meanwhile is noticed by the next look, for which this wakes the thread.
        self.parts.share.wait_for(self.charged as u64, bytes as u64);
        false
    }

    /// Does a request, or begins it.
    fn execute(&mut self, mut task: Task) {
        let request = task.request;
        let mut buffer = if task.len > 0 { self.slots.take(task.tag, task.len) } else { IoBuf::empty() };
        let large = task.len > 0 && request.len >= MIN_BYTES;
        if large && self.hands_on(&request) {
            let done = self.begin(task, &request);
            self.device.hand_on(&self.parts.workers, &self.costs, request, buffer, done);
            return;
        }
        let began = if large { self.costs.begin() } else { None };
        let outcome = loop {
            let rest = request.rest(task.done as u64);
            let part = match request.op {
                Op::Read => Buffer::Read(&mut buffer[task.done..]),
                Op::Write => Buffer::Write(&buffer[task.done..]),
                Op::Flush | Op::Discard | Op::WriteZeroes => Buffer::None,
            };
            match self.device.try_io(&rest, part) {
                Ok(Tried::Done) => {
                    self.costs.learn(&request, began);
                    break Ok(());
                }
                Ok(Tried::Partly(bytes)) => {
                    task.done += bytes as usize;
                    self.harvest();
                    // An error comes again where the thread rests.
                    let _ = self.tell();
                }
                Ok(Tried::WouldBlock) => return self.submit(task, rest, buffer),
                Err(error) => break Err(error),
            }
        };
        if task.len > 0 {
            self.slots.put(task.tag, buffer);
        }
        match outcome {
            Ok(()) => self.commit(task.tag, task.result()),
            Err(error) => self.fail(&task, error),
        }
    }

    /// Whether a worker should do a large request. What comes alone has nothing to gain.
    fn hands_on(&self, request: &Request) -> bool {
        let (workers, behind) = (&self.parts.workers, self.waiting.len() as u64);
        (behind > 0 || self.in_flight > 0)
            && workers.has_room()
            && self.costs.are_worth_it(request, 1 + behind, workers.are_awake())
    }

    /// Hands what is left of a request to the device.
    fn submit(&mut self, task: Task, rest: Request, buffer: IoBuf) {
        let part = if task.len == 0 || task.done == 0 {
            buffer
        } else {
            // The rest gets a buffer of its own; what is done stays in the tag's.
            let part = match task.request.op {
                Op::Read => IoBuf::zeroed(task.len - task.done),
                _ => IoBuf::copy_of(&buffer[task.done..]),
            };
            self.slots.put(task.tag, buffer);
            match part {
                Ok(part) => part,
                Err(error) => return self.fail(&task, error),
            }
        };
        let done = self.begin(task, &rest);
        self.plug.get_or_insert_with(Plug::start);
        self.device.submit(rest, part, done);
    }

    /// Accounts for a request that is going to be another's, and says how its outcome comes back.
    fn begin(&mut self, mut task: Task, request: &Request) -> Completion {
        task.charge = task.len + self.device.beside(request);
        self.charged += task.charge;
        self.in_flight += 1;
        self.slots.get(task.tag).place = Place::Device;
        let answers = Arc::clone(&self.parts.answers);
        Completion::new(move |outcome, buffer| answers.push(Finished { task, outcome, buffer }))
    }

    /// Answers what the device has finished.
    fn harvest(&mut self) {
        if self.in_flight == 0 {
            return;
        }
        let mut finished = std::mem::take(&mut self.finished);
        self.parts.answers.take(&mut finished);
        for Finished { task, outcome, buffer } in finished.drain(..) {
            self.in_flight -= 1;
            self.charged -= task.charge;
            let slot = self.slots.get(task.tag);
            if slot.place != Place::Device || slot.serial != task.serial {
                // It was answered in the device's place.
                continue;
            }
            match outcome.and_then(|()| self.take_data(&task, buffer)) {
                Ok(()) => self.commit(task.tag, task.result()),
                Err(error) => self.fail(&task, error),
            }
        }
        self.finished = finished;
    }

    /// Puts what a device has handed back to where it belongs.
    fn take_data(&mut self, task: &Task, buffer: IoBuf) -> Result<(), Error> {
        if task.len == 0 {
            return Ok(());
        }
        let is_read = task.request.op == Op::Read;
        // A device that hands back another buffer has no data for the kernel.
        let fits = buffer.len() == task.len - task.done;
        if task.done == 0 {
            let fits = fits && buffer.capacity() >= self.slots.bytes();
            self.slots.put(task.tag, buffer);
            return if fits || !is_read { Ok(()) } else { Err(Error::Media) };
        }
        if is_read {
            if !fits {
                return Err(Error::Media);
            }
            let mut whole = self.slots.take(task.tag, task.len);
            whole[task.done..].copy_from_slice(&buffer);
            self.slots.put(task.tag, whole);
        }
        Ok(())
    }

    /// Counts what failed for who looks after the device, and answers.
    #[cold]
    fn fail(&mut self, task: &Task, error: Error) {
        let (disk, failed) = (&self.disk, failed(task.request.op));
        if let Some(held_back) = disk.failures.count(failed, error) {
            tracing::warn!(request = ?task.request, "{}: {failed}: {error}{held_back}", disk.name);
        } else {
            tracing::debug!(request = ?task.request, "{}: {failed}: {error}", disk.name);
        }
        self.commit(task.tag, result_of(error));
    }

    /// Answers what is no request for the device.
    #[cold]
    fn refuse(&mut self, tag: u16, op: u8, error: Error) {
        tracing::debug!(op, "{}: ublk: refused: {error}", self.disk.name);
        self.commit(tag, result_of(error));
    }

    /// Tells an outcome with the next entry of the ring; the tag and its buffer are the kernel's.
    fn commit(&mut self, tag: u16, result: i32) {
        if let Ok(buffer) = self.slots.address(tag) {
            self.ring.commit(tag, result, buffer);
            self.slots.get(tag).place = Place::Kernel;
        } else {
            // There is no data to tell without a buffer: only a read that is done has any.
            self.starved.push((tag, result));
            self.slots.get(tag).place = Place::Starved;
        }
    }

    /// Tries again where there was no memory.
    fn feed(&mut self) {
        for (tag, result) in std::mem::take(&mut self.starved) {
            self.commit(tag, result);
        }
    }

    /// The kernel has the tags back, or is not asked any more.
    fn close(self) -> Drained {
        let Self { parts, ring, slots, device, in_flight, gone, .. } = self;
        let all_back = gone == slots.tags().len();
        drop(ring);
        if !all_back {
            // The ring goes later than its descriptor does, and may write until then.
            slots.leak();
        }
        Drained::new(parts, device, in_flight)
    }
}
