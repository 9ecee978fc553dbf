//! Content, faults and counts of a [`SimDisk`](super::SimDisk).

use std::ops::Range;

use freestone::device::{Error, Extent, ExtentKind, Flags, Geometry, Op, Request, Result};
use freestone_testkit::{DiskModel, Job, Rng, Start, Violations};

use super::media::Media;
use super::plan::{Fate, FaultCounts, Plan};
use super::{DiskConfig, SECTOR};
use crate::oracle::SECTOR_BYTES;

pub(super) struct SimModel {
    pub config: DiskConfig,
    pub media: Media,
    rng: Rng,
    pub plan: Plan,
    /// Free space in bytes; `None` means unlimited.
    pub free_space: Option<u64>,
    pub shrunk_to: Option<u64>,
    pub fault_counts: FaultCounts,
    pub arrived: u64,
    /// The power was lost, or the user of the disk died. All further requests fail.
    pub dead: bool,
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

fn sectors(request: &Request) -> Range<u64> {
    request.offset / SECTOR..(request.offset + request.len) / SECTOR
}

impl SimModel {
    pub fn new(config: DiskConfig, content: Vec<u8>, seed: u64) -> Self {
        let block = config.logical_block;
        assert!(block.is_power_of_two() && (512..=4096).contains(&block));
        assert!(!content.is_empty() && content.len().is_multiple_of(block as usize));
        Self {
            config,
            media: Media::new(content, config.volatile_cache),
            rng: Rng::new(seed),
            plan: config.plan,
            free_space: None,
            shrunk_to: None,
            fault_counts: FaultCounts::default(),
            arrived: 0,
            dead: false,
        }
    }

    pub fn heal(&mut self) {
        (self.plan, self.free_space, self.shrunk_to) = (Plan::default(), None, None);
    }

    fn store(&mut self, request: &Request, buffer: &[u8], torn: Option<Torn>) {
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

    /// Kills the disk. Each request in flight was done, torn or not done.
    pub fn kill(&mut self, rng: &mut Rng, power: bool, in_flight: &[Job<Fate>]) {
        self.dead = true;
        for job in in_flight {
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
    }
}

impl DiskModel for SimModel {
    type Fate = Fate;

    fn geometry(&self) -> Geometry {
        let block = self.config.logical_block;
        Geometry {
            size: self.media.len(),
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
            ignores_data: false,
            zones: None,
        }
    }

    fn admit(&mut self) -> Result<()> {
        if self.dead {
            self.fault_counts.gone += 1;
            return Err(Error::Gone);
        }
        Ok(())
    }

    fn is_inline(&mut self) -> bool {
        self.rng.below(1000) < u64::from(self.config.inline)
    }

    fn arrive(&mut self, request: &Request, _: &mut Violations) -> Fate {
        self.arrived += 1;
        let fate = self.plan.draw(request.op, &mut self.rng);
        self.fault_counts.hung += u64::from(fate == Fate::Hang);
        fate
    }

    fn withdraw(&mut self, _: &Request, fate: Fate) {
        self.arrived -= 1;
        self.fault_counts.hung -= u64::from(fate == Fate::Hang);
    }

    fn start(fate: Fate) -> Start {
        match fate {
            Fate::Delay(delay) => Start::After(delay),
            Fate::Hang => Start::Held,
            _ => Start::Now,
        }
    }

    /// Sometimes completes only the beginning of a try, so that the caller must submit the rest.
    fn part_of_try(&mut self, request: &Request) -> u64 {
        let block = u64::from(self.config.logical_block);
        let blocks = request.len / block;
        let part = blocks > 1 && self.rng.chance(10);
        if part { (1 + self.rng.below(blocks - 1)) * block } else { request.len }
    }

    fn perform(&mut self, request: &Request, buffer: &mut [u8], fate: Fate) -> Result<()> {
        self.admit()?;
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

    fn choose(&mut self, ready: usize) -> usize {
        self.rng.below(ready as u64) as usize
    }

    fn allows_overlap(&self) -> bool {
        self.config.overlap
    }

    fn extents(&self, range: Range<u64>) -> Vec<Extent> {
        let block = u64::from(self.config.logical_block);
        let kind = |at: u64| {
            // A block is a hole if none of its sectors takes up space.
            let first = (at / block * block).max(range.start) / SECTOR;
            let last = (at / block * block + block).min(range.end).div_ceil(SECTOR);
            let data = (first..last).any(|sector| self.media.is_used(sector));
            if data { ExtentKind::Data } else { ExtentKind::Hole }
        };
        let mut extents = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let (offset, is) = (at, kind(at));
            while at < range.end && kind(at) == is {
                at = (at / block * block + block).min(range.end);
            }
            extents.push(Extent { offset, len: at - offset, kind: is });
        }
        extents
    }

    fn lose(&mut self, held: usize) {
        self.fault_counts.gone += held as u64;
    }
}
