//! One queue: the loop of its thread. Each turn takes what the device has finished, works through
//! what is available, and shows the driver all that is done, with one notification at most.

mod answering;
mod sleep;

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use freestone_core::answers::Answers;
use freestone_core::budget::{Granted, Share};
use freestone_core::bytes::Bytes;
use freestone_core::client_log;
use freestone_core::device::{Buffer, Completion, Disk, Error, Flags, IoBuf, Op, Request, Tried};
use freestone_core::plug::Plug;
use freestone_core::workers::{Costs, MIN_BYTES, Workers};
use rustix::event::{PollFd, PollFlags, poll};

use crate::guest::Guest;
use crate::inflight::Notes;
use crate::memory::Memory;
use crate::ring::{Addresses, Broken, Chain, Ring};
use crate::task::{Finished, Kind, Task, gather, scatter};
use crate::wire::{ID_BYTES, status};
use crate::zones;

pub use self::sleep::Sleep;

/// Requests of a queue that a device may hold at once.
const MAX_IN_FLIGHT: usize = 256;
/// Bytes of their buffers. One request may have as much on its own.
const MAX_IN_FLIGHT_BYTES: usize = 32 << 20;
/// So many answers are shown although there is more to do.
const PUBLISH_AT: u16 = 32;
/// Bytes of buffers that are kept for the next requests.
const MAX_SPARE_BYTES: usize = 512 << 10;
/// The longest look at the ring before a queue's thread sleeps: as QEMU's iothreads have it.
const LOOKOUT_MAX: Duration = Duration::from_micros(32);
const LOOKOUT_MIN: Duration = Duration::from_micros(4);
/// Looks between two at the clock.
const LOOKS: u32 = 16;
/// Buffers have at least so many bytes, so that each fits the next request.
const MIN_BUFFER_BYTES: usize = 4096;

/// What a queue's thread works with.
pub struct Parts {
    /// Which queue.
    pub index: usize,
    /// The device.
    pub disk: Arc<Disk>,
    /// What queues share.
    pub guest: Arc<Guest>,
    /// How its thread is woken.
    pub answers: Arc<Answers<Finished>>,
    /// Of the process's bytes.
    pub share: Share,
    /// For dear requests.
    pub workers: Workers,
    /// See [`Options`](crate::Options).
    pub look_out: bool,
    /// The ring in the memory.
    pub ring: Ring,
    /// Where that lies.
    pub addresses: Addresses,
    /// Where it is noted what is in flight, if the frontend wants that.
    pub notes: Option<Notes>,
    /// Chains that another connection has begun and not answered, the last one first.
    pub again: Vec<u16>,
    /// Ends when the driver has made something available.
    pub sleep: Sleep,
    /// Tells the driver; may change meanwhile, and is locked for one write.
    pub call: Arc<Mutex<Option<OwnedFd>>>,
    /// Tells the frontend that the queue has ended by itself.
    pub err: Option<Arc<OwnedFd>>,
}

/// How long the next look-out is, after one of that length and a wait behind it, which took so long
/// together. Where both use one CPU, the look-out is what makes it long.
fn next_lookout(last: Duration, took: Duration) -> Duration {
    if took > LOOKOUT_MAX { Duration::ZERO } else { (last * 2).clamp(LOOKOUT_MIN, LOOKOUT_MAX) }
}

/// What a share of the budget tells when it was granted.
pub fn granted(answers: &Arc<Answers<Finished>>) -> Arc<dyn Granted> {
    Arc::clone(answers) as Arc<dyn Granted>
}

/// The queue's thread.
struct Queue {
    parts: Parts,
    device: Bytes,
    memory: Arc<Memory>,
    generation: u64,
    chain: Chain,
    finished: Vec<Finished>,
    /// A buffer for the next request.
    spare: IoBuf,
    in_flight: usize,
    /// Bytes that those in flight are charged with.
    charged: usize,
    costs: Arc<Costs>,
    zoned: bool,
    plug: Option<Plug>,
    /// How long the ring is looked at before the thread sleeps.
    lookout: Duration,
    /// What an answer has found broken.
    broken: Option<Broken>,
}

/// Serves a queue until it is stopped or broken, and all it has begun is done. Answers where it
/// would go on.
pub fn run(parts: Parts) -> u16 {
    let device = Bytes::new(Arc::clone(&parts.disk.device));
    let zoned = device.geometry().zones.is_some();
    let generation = parts.guest.generation();
    let memory = parts.guest.memory();
    let mut queue = Queue {
        parts,
        device,
        memory,
        // The ring may be older than the memory: the first turn looks it up again.
        generation: generation.wrapping_sub(1),
        chain: Chain::default(),
        finished: Vec::new(),
        spare: IoBuf::empty(),
        in_flight: 0,
        charged: 0,
        costs: Arc::default(),
        zoned,
        plug: None,
        lookout: Duration::ZERO,
        broken: None,
    };
    if let Err(broken) = queue.serve() {
        queue.end(broken);
    }
    queue.drain();
    queue.parts.ring.next_avail
}

impl Queue {
    fn serve(&mut self) -> Result<(), Broken> {
        while !self.parts.answers.is_ended() {
            self.renew()?;
            self.harvest();
            // No more than twice the entries of a queue.
            let ready = self.parts.ring.available()? + self.parts.again.len() as u16;
            for behind in (0..ready).rev() {
                if self.parts.answers.is_ended() || !self.has_room() {
                    break;
                }
                self.next_request(behind)?;
                if self.parts.ring.unpublished() >= PUBLISH_AT {
                    self.publish();
                }
            }
            self.plug = None;
            self.publish();
            if let Some(broken) = self.broken {
                return Err(broken);
            }
            if self.is_dead() {
                return Err(Broken::Memory);
            }
            if self.has_room() {
                self.rest()?;
            } else {
                self.wait_for_device();
            }
        }
        Ok(())
    }

    fn has_room(&self) -> bool {
        self.in_flight < MAX_IN_FLIGHT && self.charged < MAX_IN_FLIGHT_BYTES
    }

    /// Notices other memory, and memory that is gone.
    fn renew(&mut self) -> Result<(), Broken> {
        let generation = self.parts.guest.generation();
        if generation != self.generation {
            // In this order a change in between is seen in the next turn.
            self.generation = generation;
            self.memory = self.parts.guest.memory();
            self.parts.ring = self.parts.ring.again(&self.memory, &self.parts.addresses)?;
        }
        Ok(())
    }

    /// Whether the frontend has taken memory away.
    fn is_dead(&self) -> bool {
        self.memory.is_dead() || self.parts.notes.as_ref().is_some_and(Notes::is_dead)
    }

    /// Sleeps where nothing is available.
    fn rest(&mut self) -> Result<(), Broken> {
        if self.parts.ring.available()? > 0 || !self.parts.again.is_empty() {
            return Ok(());
        }
        let began = Instant::now();
        if self.look_out()? {
            return Ok(());
        }
        self.parts.ring.want_notification();
        if self.parts.ring.available()? == 0 {
            // A ring that is gone may look as if nothing were available.
            if self.is_dead() {
                return Err(Broken::Memory);
            }
            if self.in_flight == 0 {
                self.parts.share.keep(self.spare.capacity() as u64);
            }
            self.sleep();
            if self.parts.look_out {
                self.lookout = next_lookout(self.lookout, began.elapsed());
            }
        }
        self.parts.ring.want_no_notification();
        Ok(())
    }

    /// Looks at the ring for a while, where the last waits were short: a driver that comes again at once
    /// need not wake anybody. Whether there is something.
    fn look_out(&mut self) -> Result<bool, Broken> {
        // What the device has is not seen here.
        if self.lookout.is_zero() || self.in_flight > 0 {
            return Ok(false);
        }
        let began = Instant::now();
        while began.elapsed() < self.lookout {
            for _ in 0..LOOKS {
                if self.parts.ring.available()? > 0 {
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            if self.parts.answers.is_ended() || self.parts.guest.generation() != self.generation {
                break;
            }
        }
        Ok(false)
    }

    /// Waits until the driver or the device has something.
    fn sleep(&mut self) {
        self.plug = None;
        if self.parts.sleep.wait() {
            self.parts.answers.rearm();
        }
    }

    /// Waits until the device has something.
    fn wait_for_device(&mut self) {
        self.plug = None;
        let answers = &self.parts.answers;
        // A signal may end the wait early: every caller looks again.
        let _ = poll(&mut [PollFd::new(answers.wake_fd(), PollFlags::IN)], None);
        answers.rearm();
    }

    /// Begins the next request; it stays the next one where the queue is stopped first.
    fn next_request(&mut self, behind: u16) -> Result<(), Broken> {
        let again = self.parts.again.last().copied();
        let head = again.unwrap_or_else(|| self.parts.ring.next_head());
        self.parts.ring.chain(head, &self.memory, &mut self.chain)?;
        let task = Task::parse(head, &mut self.chain, &self.memory)?;
        if task.len > 0 && !self.reserve(task.len) {
            return Ok(());
        }
        if again.is_some() {
            self.parts.again.pop();
        } else {
            if let Some(notes) = &mut self.parts.notes {
                notes.begin(head);
            }
            self.parts.ring.take();
        }
        match task.kind {
            Kind::Io(request) => return self.execute(task, request, behind),
            Kind::Append(offset) => return self.append(task, offset),
            Kind::Refused(status) => self.answer(&task, status, 0),
            Kind::Id => {
                let mut id = [0; ID_BYTES];
                let name = self.parts.disk.name.as_bytes();
                let n = name.len().min(ID_BYTES);
                id[..n].copy_from_slice(&name[..n]);
                self.tell(&task, &id[..task.len.min(ID_BYTES)]);
            }
            Kind::Zone(_) if task.changes() && self.parts.disk.read_only => {
                self.fail(&task, Error::ReadOnly);
            }
            Kind::Zone(request) => match zones::execute(&*self.parts.disk.device, request, task.len) {
                Err(error) => self.fail(&task, error),
                Ok(said) => self.tell(&task, &said),
            },
        }
        Ok(())
    }

    /// Answers with these bytes.
    fn tell(&mut self, task: &Task, bytes: &[u8]) {
        match scatter(&self.memory, task.room(&self.chain.segments), 0, bytes) {
            Ok(()) => self.answer(task, status::OK, bytes.len()),
            Err(_) => self.answer(task, status::IOERR, 0),
        }
    }

    /// Has bytes for a request, waits for them if need be. False: the queue was stopped first.
    fn reserve(&mut self, bytes: usize) -> bool {
        let bytes = bytes.max(MIN_BUFFER_BYTES).next_power_of_two();
        while !self.parts.share.reach((self.charged + self.spare.capacity() + bytes) as u64) {
            self.spare = IoBuf::empty();
            self.parts.share.wait_for(self.charged as u64, bytes as u64);
            self.publish();
            // What was granted meanwhile is noticed by the next look.
            self.wait_for_device();
            if self.parts.answers.is_ended() {
                return false;
            }
            self.harvest();
        }
        true
    }

    fn buffer(&mut self, len: usize) -> Result<IoBuf, Error> {
        if self.spare.capacity() < len {
            self.spare = IoBuf::empty();
            self.spare = IoBuf::zeroed(len.max(MIN_BUFFER_BYTES).next_power_of_two())?;
        }
        let mut buffer = std::mem::replace(&mut self.spare, IoBuf::empty());
        buffer.show(len);
        Ok(buffer)
    }

    fn keep(&mut self, buffer: IoBuf) {
        if buffer.capacity() > self.spare.capacity() && buffer.capacity() <= MAX_SPARE_BYTES {
            self.spare = buffer;
        }
    }

    /// Copies what is to be written. False: a part of it is not in the memory.
    fn gather(&self, task: &Task, buffer: &mut IoBuf) -> Result<bool, Broken> {
        let gathered = gather(&self.memory, task.sent(&self.chain.segments), buffer);
        // Memory that is gone read as zeroes: they are not written.
        if self.memory.is_dead() { Err(Broken::Memory) } else { Ok(gathered.is_ok()) }
    }

    /// Whether what changes the device is to be durable when it is answered.
    fn is_write_through(&self) -> bool {
        !self.parts.guest.writeback.load(Ordering::SeqCst)
    }

    /// Does a request, or begins it.
    fn execute(&mut self, mut task: Task, mut request: Request, behind: u16) -> Result<(), Broken> {
        let mut buffer = IoBuf::empty();
        if request.op != Op::Read && task.changes() {
            if self.parts.disk.read_only {
                self.fail(&task, Error::ReadOnly);
                return Ok(());
            }
            if self.is_write_through() {
                request.flags |= Flags::FUA;
            }
        }
        if task.len > 0 {
            buffer = match self.buffer(task.len) {
                Ok(buffer) => buffer,
                Err(error) => {
                    self.fail(&task, error);
                    return Ok(());
                }
            };
            if request.op == Op::Write && !self.gather(&task, &mut buffer)? {
                self.answer(&task, status::IOERR, 0);
                return Ok(());
            }
        }
        let large = task.len as u64 >= MIN_BYTES;
        if large && self.hands_on(&request, behind) {
            let done = self.begin(task, &request, &buffer);
            self.device.hand_on(&self.parts.workers, &self.costs, request, buffer, done);
            return Ok(());
        }
        let began = if large { self.costs.begin() } else { None };
        loop {
            let rest = request.rest(task.done as u64);
            let part = Buffer::rest(request.op, &mut buffer, task.done);
            match self.device.try_io(&rest, part) {
                Ok(Tried::Done) => {
                    if large {
                        self.costs.learn(&request, began);
                    }
                    task.done = 0;
                    self.succeed(&task, buffer, 0);
                    return Ok(());
                }
                Ok(Tried::Partly(bytes)) => {
                    task.done += bytes as usize;
                    self.harvest();
                    self.publish();
                }
                Ok(Tried::WouldBlock) => {
                    self.submit(task, rest, buffer);
                    return Ok(());
                }
                Err(error) => {
                    self.keep(buffer);
                    self.fail(&task, error);
                    return Ok(());
                }
            }
        }
    }

    /// Does an append, or begins it.
    fn append(&mut self, task: Task, offset: u64) -> Result<(), Broken> {
        if self.parts.disk.read_only {
            self.fail(&task, Error::ReadOnly);
            return Ok(());
        }
        let mut buffer = match self.buffer(task.len) {
            Ok(buffer) => buffer,
            Err(error) => {
                self.fail(&task, error);
                return Ok(());
            }
        };
        if !self.gather(&task, &mut buffer)? {
            self.answer(&task, status::IOERR, 0);
            return Ok(());
        }
        let device = Arc::clone(&self.parts.disk.device);
        let Some(zones) = device.zoned() else {
            self.fail(&task, Error::Unsupported);
            return Ok(());
        };
        let flags = if self.is_write_through() { Flags::FUA } else { Flags::empty() };
        match zones.try_append(offset, &buffer, flags) {
            Ok(Some(at)) => self.succeed(&task, buffer, at),
            Ok(None) => {
                let request = Request::write(offset, buffer.len() as u64);
                let finish = self.charge(task, &request, &buffer);
                self.plug.get_or_insert_with(Plug::start);
                let done = Box::new(move |outcome| finish(outcome, IoBuf::empty()));
                zones.submit_append(offset, buffer, flags, done);
            }
            Err(error) => {
                self.keep(buffer);
                self.fail(&task, error);
            }
        }
        Ok(())
    }

    /// Whether a worker should do a large request; writes to zones begin in their order.
    fn hands_on(&self, request: &Request, behind: u16) -> bool {
        !(self.zoned && request.op == Op::Write)
            && self.costs.hand_on(&self.parts.workers, request, behind.into(), self.in_flight > 0)
    }

    /// Hands what is left of a request to the device.
    fn submit(&mut self, task: Task, rest: Request, buffer: IoBuf) {
        let buffer = if task.done == 0 || buffer.is_empty() {
            buffer
        } else {
            let room = task.room(&self.chain.segments);
            if task.is_read() && scatter(&self.memory, room, 0, &buffer[..task.done]).is_err() {
                return self.answer(&task, status::IOERR, 0);
            }
            match IoBuf::copy_of(&buffer[task.done..]) {
                Ok(buffer) => buffer,
                Err(error) => return self.fail(&task, error),
            }
        };
        let done = self.begin(task, &rest, &buffer);
        self.plug.get_or_insert_with(Plug::start);
        self.device.submit(rest, buffer, done);
    }

    /// Accounts for a request that is going to be another's, and says how its outcome comes back.
    fn begin(&mut self, task: Task, request: &Request, buffer: &IoBuf) -> Completion {
        let finish = self.charge(task, request, buffer);
        Completion::new(move |outcome, buffer| finish(outcome.map(|()| 0), buffer))
    }

    /// Accounts for a request that is going to be another's, with the segments of the chain at hand;
    /// what it calls with its outcome.
    fn charge(
        &mut self,
        mut task: Task,
        request: &Request,
        buffer: &IoBuf,
    ) -> impl FnOnce(Result<u64, Error>, IoBuf) + Send + 'static {
        task.charge = buffer.capacity() + self.device.beside(request);
        self.charged += task.charge;
        self.in_flight += 1;
        let segments = std::mem::take(&mut self.chain.segments);
        let answers = Arc::clone(&self.parts.answers);
        move |outcome, buffer| answers.push(Finished { task, segments, outcome, buffer })
    }

    /// Waits for what the device has.
    fn drain(&mut self) {
        self.plug = None;
        self.parts.share.leave();
        self.harvest();
        self.publish();
        while self.in_flight > 0 {
            self.wait_for_device();
            self.harvest();
            self.publish();
        }
    }

    /// The driver has broken the rules, or the frontend its memory.
    #[cold]
    fn end(&mut self, broken: Broken) {
        client_log!(warn, queue = self.parts.index, "{}: vhost-user: {broken}", self.parts.disk.name);
        if let Some(err) = &self.parts.err {
            freestone_core::eventfd::wake(err);
        }
        if self.is_dead() {
            let _ = rustix::net::shutdown(&self.parts.guest.socket, rustix::net::Shutdown::Both);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn look_outs_follow_the_waits() {
        let (short, long) = (LOOKOUT_MAX / 2, LOOKOUT_MAX * 2);
        assert_eq!(next_lookout(Duration::ZERO, long), Duration::ZERO);
        assert_eq!(next_lookout(Duration::ZERO, short), LOOKOUT_MIN);
        let mut now = Duration::ZERO;
        for _ in 0..8 {
            now = next_lookout(now, short);
        }
        assert_eq!(now, LOOKOUT_MAX);
        assert_eq!(next_lookout(now, long), Duration::ZERO);
    }
}
