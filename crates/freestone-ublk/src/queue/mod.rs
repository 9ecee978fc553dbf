//! One queue: the loop of its thread. Each turn takes what the device has finished, works through
//! what has arrived, and hands all that is done to the kernel with one system call, which also
//! waits for more.

mod answering;
mod copying;
mod doing;

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

use crate::aside::Aside;
use crate::kernel::{Arrived, Event, NOT_DONE, Ring, Wait};
use crate::parts::{Drained, Parts};
use crate::slots::{Place, Slots};
use crate::task::Finished;
use copying::Copying;

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
    /// Requests behind them, whose data is on the way.
    copying: Copying,
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
    aside: Aside,
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
            copying: Copying::default(),
            starved: Vec::new(),
            gone: 0,
            arrived: Vec::new(),
            finished: Vec::new(),
            in_flight: 0,
            charged: 0,
            costs: Arc::default(),
            aside: Aside::default(),
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
        self.copying.cut();
        for tag in self.slots.tags() {
            if matches!(self.slots.get(tag).place, Place::Waiting | Place::Device) {
                self.commit(tag, CUT);
            }
        }
    }

    /// Takes what the kernel has brought.
    fn take_arrivals(&mut self) {
        let mut arrived = std::mem::take(&mut self.arrived);
        self.ring.arrived(&mut arrived);
        for Arrived { tag, event, result } in arrived.drain(..) {
            match event {
                Event::Fetched => self.copying.fetched(tag, result),
                Event::Sent => self.copying.sent(),
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

    /// Works through what has arrived, as far as there is room.
    fn work(&mut self) -> io::Result<()> {
        let mut work = 0;
        loop {
            let done = if let Some(copied) = self.copying.next(self.held) {
                self.begin_copied(copied)
            } else if let Some(&tag) = self.waiting.front()
                && (self.dead || !(self.held || self.charged >= MAX_IN_FLIGHT_BYTES))
                && let Some(bytes) = self.begin_next(tag)
            {
                bytes
            } else {
                return Ok(());
            };
            work += done.max(LEAST_WORK_BYTES);
            if work >= TELL_AT_BYTES && !self.waiting.is_empty() {
                work = 0;
                self.harvest();
                self.tell()?;
                self.take_arrivals();
            }
        }
    }

    /// Hands over what is done, without waiting.
    fn tell(&mut self) -> io::Result<()> {
        if self.ring.has_queued() { self.ring.enter(Wait::No) } else { Ok(()) }
    }

    /// Waits for something to do, and hands over what is done with the same call.
    fn rest(&mut self) -> io::Result<()> {
        let has_none = self.in_flight == 0 && self.waiting.is_empty() && self.copying.is_empty();
        let is_idle = has_none && self.starved.is_empty();
        if has_none {
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
        if was_idle && self.waiting.is_empty() && self.copying.is_empty() && !self.ring.has_queued() {
            self.slots.give_back();
        }
        Ok(())
    }

    /// The kernel has the tags back, or is not asked any more.
    fn close(self) -> Drained {
        let Self { parts, ring, slots, copying, device, in_flight, gone, .. } = self;
        let all_back = gone == slots.tags().len();
        drop(ring);
        if !all_back {
            // The ring goes later than its descriptor does, and may write until then.
            slots.leak();
            copying.leak();
        }
        Drained::new(parts, device, in_flight)
    }
}
