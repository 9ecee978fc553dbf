//! Executes the requests of a disk: each request gets a fate on arrival, waits, and is performed.

use std::ops::Range;

use freestone::device::{Completion, Error, Flags, Geometry, IoBuf, Op, Request, Result};
use freestone_testkit::Rng;

use super::media::Media;
use super::plan::{Fate, Injected, Plan};
use super::{COMPLAINTS_MAX, DiskConfig, SECTOR};
use crate::oracle::SECTOR_BYTES;
use crate::rt::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use crate::rt::time::Instant;

pub(super) struct Shared {
    pub config: DiskConfig,
    /// Held for a lookup or one operation, never while a completion runs.
    pub state: Mutex<State>,
    pub changed: Condvar,
}

pub(super) struct State {
    pub media: Media,
    pub rng: Rng,
    pub plan: Plan,
    /// Free space in bytes; `None` is unlimited.
    pub room: Option<u64>,
    pub shrunk_to: Option<u64>,
    pub queue: Vec<Job>,
    pub hung: Vec<Job>,
    /// Sectors of the writes that have arrived and not completed.
    pub writing: Vec<Range<u64>>,
    pub injected: Injected,
    pub arrived: u64,
    pub complaints: Vec<String>,
    /// Power was lost, or the user died.
    pub dead: bool,
    pub stop: bool,
}

pub(super) struct Job {
    pub request: Request,
    pub buffer: IoBuf,
    pub done: Completion,
    pub fate: Fate,
    pub due: Instant,
}

/// Which sectors of a torn operation are done.
#[derive(Clone, Copy)]
pub(super) enum Torn {
    First(u64),
    Of(u64),
}

impl Torn {
    pub fn draw(rng: &mut Rng, sectors: u64) -> Self {
        if rng.chance(50) { Self::First(rng.below(sectors + 1)) } else { Self::Of(rng.word()) }
    }

    fn includes(self, index: u64) -> bool {
        match self {
            Self::First(count) => index < count,
            Self::Of(seed) => Rng::new(seed ^ index).chance(50),
        }
    }
}

pub(super) fn sectors(request: &Request) -> Range<u64> {
    request.offset / SECTOR..(request.offset + request.len) / SECTOR
}

impl Shared {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn geometry(&self, size: u64) -> Geometry {
        let block = self.config.logical_block;
        Geometry {
            size,
            logical_block: block,
            physical_block: block,
            io_min: block,
            io_opt: block,
            max_request: 0,
            discard_granularity: block,
            fast_zeroes: false,
            volatile_cache: self.config.volatile_cache,
            padding: 0,
            volatile_media: false,
            rotational: false,
            read_only: false,
            zones: None,
        }
    }

    /// Performs and completes submitted requests until the disk is dropped.
    pub fn execute(&self) {
        let mut state = self.lock();
        loop {
            let now = Instant::now();
            let stop = state.stop;
            let ready: Vec<usize> =
                (0..state.queue.len()).filter(|&at| stop || state.queue[at].due <= now).collect();
            if ready.is_empty() {
                if stop {
                    return;
                }
                let next = state.queue.iter().map(|job| job.due).min();
                state = match next {
                    Some(due) => {
                        let left = due.saturating_duration_since(now);
                        self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                    }
                    None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                };
                continue;
            }
            let at = ready[state.rng.below(ready.len() as u64) as usize];
            let Job { request, mut buffer, done, fate, .. } = state.queue.swap_remove(at);
            let outcome = state.perform(&request, &mut buffer, fate);
            drop(state);
            done.complete(outcome, buffer);
            state = self.lock();
        }
    }
}

impl State {
    /// Checks a request and draws its fate.
    pub fn arrive(&mut self, request: &Request, shared: &Shared) -> Result<Fate> {
        if self.dead {
            self.injected.gone += 1;
            return Err(Error::Gone);
        }
        if let Err(error) = request.check(&shared.geometry(self.media.len())) {
            self.complain(format!("{request:?} is refused: {error}"));
            return Err(error);
        }
        self.arrived += 1;
        if request.op == Op::Write {
            let range = sectors(request);
            let other = self.writing.iter().find(|other| other.start < range.end && range.start < other.end);
            if let Some(other) = other.cloned().filter(|_| !shared.config.overlap) {
                self.complain(format!("{request:?} while sectors {other:?} are being written"));
            }
            self.writing.push(range);
        }
        let plan = self.plan;
        Ok(plan.draw(request.op, &mut self.rng))
    }

    /// Reverts an arrival: the request will be submitted and arrive again.
    pub fn revert_arrival(&mut self, request: &Request) {
        self.arrived -= 1;
        self.remove_writing(request);
    }

    pub fn remove_writing(&mut self, request: &Request) {
        if request.op == Op::Write
            && let Some(at) = self.writing.iter().rposition(|other| *other == sectors(request))
        {
            self.writing.swap_remove(at);
        }
    }

    /// Performs a request that arrived. `buffer` is empty unless the request reads or writes.
    pub fn perform(&mut self, request: &Request, buffer: &mut [u8], fate: Fate) -> Result<()> {
        self.remove_writing(request);
        if self.dead {
            self.injected.gone += 1;
            return Err(Error::Gone);
        }
        match fate {
            Fate::Fail => {
                self.injected.failed += 1;
                return Err(Error::Media);
            }
            Fate::Delay(_) => self.injected.delayed += 1,
            _ => {}
        }
        if self.shrunk_to.is_some_and(|end| request.offset + request.len > end) {
            self.injected.shrunk += 1;
            return Err(Error::Media);
        }
        if request.op == Op::Write
            && let Some(room) = &mut self.room
        {
            let takes = self.media.room_for(sectors(request));
            if takes > *room {
                self.injected.no_space += 1;
                return Err(Error::NoSpace);
            }
            *room -= takes;
        }
        let range = sectors(request);
        let torn = (fate == Fate::FailPartly).then(|| Torn::draw(&mut self.rng, range.end - range.start));
        match request.op {
            Op::Read => self.media.read(request.offset, buffer),
            Op::Flush if torn.is_none() => self.media.flush(),
            Op::Flush => self.media.flush_some(&mut self.rng),
            Op::Write | Op::WriteZeroes | Op::Discard => self.store(request, buffer, torn),
        }
        match fate {
            Fate::FailDone => self.injected.failed_done += 1,
            Fate::FailPartly => self.injected.failed_partly += 1,
            _ => return Ok(()),
        }
        Err(Error::Media)
    }

    pub fn store(&mut self, request: &Request, buffer: &[u8], torn: Option<Torn>) {
        let fua = request.flags.contains(Flags::FUA);
        for (index, at) in sectors(request).enumerate() {
            if torn.is_some_and(|torn| !torn.includes(index as u64)) {
                continue;
            }
            match request.op {
                Op::Write => {
                    let bytes = &buffer[index * SECTOR_BYTES..(index + 1) * SECTOR_BYTES];
                    self.media.write(at, Some(bytes), fua);
                }
                Op::Discard | Op::WriteZeroes => {
                    if let Some(room) = self.room.as_mut().filter(|_| self.media.is_used(at)) {
                        *room += SECTOR;
                    }
                    self.media.write(at, None, fua);
                }
                Op::Read | Op::Flush => {}
            }
        }
    }

    /// Kills the disk and returns the requests in flight, which must fail with [`Error::Gone`].
    /// Each of them was done, torn or not done.
    pub fn die(&mut self, rng: &mut Rng, power: bool) -> Vec<Job> {
        self.dead = true;
        let mut lost = std::mem::take(&mut self.queue);
        lost.append(&mut self.hung);
        for job in &lost {
            self.injected.gone += 1;
            let outcome = rng.below(3);
            let sectors = sectors(&job.request);
            let torn = Torn::draw(rng, sectors.end - sectors.start);
            if outcome > 0 && job.request.op == Op::Flush {
                self.media.flush_some(rng);
            } else if outcome > 0 {
                let torn = (outcome == 1).then_some(torn);
                self.store(&job.request, &job.buffer, torn);
            }
        }
        if power {
            self.media.lose_power(rng);
        }
        self.writing.clear();
        lost
    }

    fn complain(&mut self, complaint: String) {
        if self.complaints.len() < COMPLAINTS_MAX {
            self.complaints.push(complaint);
        }
    }
}
