//! Executes the requests of a disk: the fate of each request is drawn on arrival; the request then
//! waits and is performed.

use std::ops::Range;

use freestone::device::{Completion, Error, Flags, Geometry, IoBuf, Op, Request, Result};
use freestone_testkit::Rng;

use super::media::Media;
use super::plan::{Fate, FaultCounts, Plan};
use super::{DiskConfig, MAX_VIOLATIONS, SECTOR};
use crate::oracle::SECTOR_BYTES;
use crate::rt::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use crate::rt::time::Instant;

pub(super) struct Shared {
    pub config: DiskConfig,
    /// Held during a lookup or one operation, never while a completion callback runs.
    pub state: Mutex<State>,
    pub changed: Condvar,
}

pub(super) struct State {
    pub media: Media,
    pub rng: Rng,
    pub plan: Plan,
    /// Free space in bytes; `None` means unlimited.
    pub free_space: Option<u64>,
    pub shrunk_to: Option<u64>,
    pub queue: Vec<Job>,
    pub hung: Vec<Job>,
    /// Sector ranges of the writes that have arrived and not completed.
    pub writing: Vec<Range<u64>>,
    pub fault_counts: FaultCounts,
    pub arrived: u64,
    pub violations: Vec<String>,
    /// The power was lost, or the user of the disk died. All further requests fail.
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

/// Selects the sectors of a torn operation that are done.
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
    /// Checks the contract for a request that arrives, and draws its fate.
    pub fn arrive(&mut self, request: &Request, shared: &Shared) -> Result<Fate> {
        if self.dead {
            self.fault_counts.gone += 1;
            return Err(Error::Gone);
        }
        if let Err(error) = request.check(&shared.geometry(self.media.len())) {
            self.record_violation(format!("{request:?} is refused: {error}"));
            return Err(error);
        }
        self.arrived += 1;
        if request.op == Op::Write {
            let range = sectors(request);
            let other = self.writing.iter().find(|other| other.start < range.end && range.start < other.end);
            if let Some(other) = other.cloned().filter(|_| !shared.config.overlap) {
                self.record_violation(format!("{request:?} while sectors {other:?} are being written"));
            }
            self.writing.push(range);
        }
        let plan = self.plan;
        Ok(plan.draw(request.op, &mut self.rng))
    }

    /// Reverts an arrival, for a request that a try does not complete: it will be submitted and
    /// arrive again.
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

    /// Performs a request that arrived, with its fate. `buffer` is empty unless the request reads
    /// or writes.
    pub fn perform(&mut self, request: &Request, buffer: &mut [u8], fate: Fate) -> Result<()> {
        self.remove_writing(request);
        if self.dead {
            self.fault_counts.gone += 1;
            return Err(Error::Gone);
        }
        match fate {
            Fate::Fail => {
                self.fault_counts.failed += 1;
                return Err(Error::Media);
            }
            Fate::Delay(_) => self.fault_counts.delayed += 1,
            _ => {}
        }
        if self.shrunk_to.is_some_and(|end| request.offset + request.len > end) {
            self.fault_counts.shrunk += 1;
            return Err(Error::Media);
        }
        if request.op == Op::Write
            && let Some(room) = &mut self.free_space
        {
            let takes = self.media.space_for(sectors(request));
            if takes > *room {
                self.fault_counts.no_space += 1;
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
            Fate::FailDone => self.fault_counts.failed_done += 1,
            Fate::FailPartly => self.fault_counts.failed_partly += 1,
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
                    if let Some(room) = self.free_space.as_mut().filter(|_| self.media.is_used(at)) {
                        *room += SECTOR;
                    }
                    self.media.write(at, None, fua);
                }
                Op::Read | Op::Flush => {}
            }
        }
    }

    /// Kills the disk and returns the requests in flight, which the caller must fail with
    /// [`Error::Gone`]. Each of these requests was done, torn or not done.
    pub fn kill(&mut self, rng: &mut Rng, power: bool) -> Vec<Job> {
        self.dead = true;
        let mut lost = std::mem::take(&mut self.queue);
        lost.append(&mut self.hung);
        for job in &lost {
            self.fault_counts.gone += 1;
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

    fn record_violation(&mut self, violation: String) {
        if self.violations.len() < MAX_VIOLATIONS {
            self.violations.push(violation);
        }
    }
}
