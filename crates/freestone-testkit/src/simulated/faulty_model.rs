//! Bytes, faults and counts of a [`FaultyDisk`](super::FaultyDisk).

use std::ops::Range;
use std::time::Duration;

use freestone_core::device::{Error, Extent, ExtentKind, Geometry, Op, Request, Result};

use super::engine::{DiskModel, Start, Violations};
use crate::Rng;

/// Selects the operations to which a fault applies. Operations are numbered from 0 in order of arrival since
/// the disk was created. A fault for one kind of operation counts only that kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultSchedule {
    /// The fault applies to all operations.
    Always,
    /// The fault applies to the operation with this number.
    At(u64),
    /// The fault applies to the operation with this number and all later ones.
    From(u64),
}

/// Effect of a fault on an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultEffect {
    /// The operation fails with this error, without effect.
    Fail(Error),
    /// The operation takes effect, but fails with this error.
    FailDone(Error),
    /// A write stores its first half (rounded down to blocks) and fails with [`Error::Media`].
    /// Other operations fail without effect.
    Tear,
    /// The operation is held until [`heal`](super::FaultyDisk::heal) or [`release`](super::FaultyDisk::release), and then takes effect.
    Hang,
    /// The operation starts after this time; later operations may overtake it.
    Delay(Duration),
    /// A read succeeds, but one byte per block is damaged. Other operations are not affected.
    Corrupt,
}

/// Counts of operations since the disk was created. Requests refused as invalid are not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpCounts {
    pub reads: u64,
    pub writes: u64,
    pub flushes: u64,
    /// Number of discards and of writes of zeroes.
    pub frees: u64,
    /// Length in bytes of the longest operation.
    pub largest: u64,
    /// Number of bytes stored by writes.
    pub bytes_written: u64,
    /// Number of bytes returned by reads.
    pub bytes_read: u64,
    /// Number of operations that are held now.
    pub held: u64,
    /// Number of operations in flight now, including held ones.
    pub in_flight: u64,
    /// Largest number of operations that were in flight at the same time.
    pub in_flight_max: u64,
}

impl OpCounts {
    /// Returns the number of operations of all kinds, which is also the number of the next one.
    pub fn total(&self) -> u64 {
        self.reads + self.writes + self.flushes + self.frees
    }

    fn of(&mut self, op: Op) -> &mut u64 {
        match op {
            Op::Read => &mut self.reads,
            Op::Write => &mut self.writes,
            Op::Flush => &mut self.flushes,
            Op::Discard | Op::WriteZeroes => &mut self.frees,
        }
    }
}

pub(super) struct FaultyModel {
    geometry: Geometry,
    bytes: Vec<u8>,
    /// For each block, true if it was ever written.
    written: Vec<bool>,
    pub faults: Vec<Fault>,
    pub no_space_from: Option<u64>,
    pub no_space_after: Option<u64>,
    pub truncated_at: Option<u64>,
    pub strict_reads: bool,
    pub inline: bool,
    pub counts: OpCounts,
    pub shuffle: Option<Rng>,
    pub service_time: Duration,
}

#[derive(Clone, Copy)]
pub(super) struct Fault {
    pub op: Option<Op>,
    pub schedule: FaultSchedule,
    pub effect: FaultEffect,
}

impl FaultyModel {
    pub fn new(size: usize, logical_block: u32) -> Self {
        assert!(logical_block.is_power_of_two() && (512..=4096).contains(&logical_block));
        assert!(size > 0 && size.is_multiple_of(logical_block as usize));
        let geometry = Geometry {
            size: size as u64,
            logical_block,
            physical_block: logical_block,
            io_min: logical_block,
            io_opt: logical_block,
            discard_granularity: logical_block,
            fast_zeroes: false,
            volatile_cache: true,
            padding: 0,
            volatile_media: true,
            rotational: false,
            max_request: 0,
            read_only: false,
            ignores_data: false,
            zones: None,
        };
        Self {
            geometry,
            bytes: vec![0; size],
            written: vec![false; size / logical_block as usize],
            faults: Vec::new(),
            no_space_from: None,
            no_space_after: None,
            truncated_at: None,
            strict_reads: false,
            inline: false,
            counts: OpCounts::default(),
            shuffle: None,
            service_time: Duration::ZERO,
        }
    }

    pub fn heal(&mut self) {
        self.faults.clear();
        (self.no_space_from, self.no_space_after, self.truncated_at) = (None, None, None);
    }

    fn blocks(&self, range: &Range<u64>) -> Range<usize> {
        let block = u64::from(self.geometry.logical_block);
        (range.start / block) as usize..(range.end / block) as usize
    }
}

impl DiskModel for FaultyModel {
    type Fate = Option<FaultEffect>;

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn is_inline(&mut self) -> bool {
        self.inline
    }

    fn arrive(&mut self, request: &Request, violations: &mut Violations) -> Option<FaultEffect> {
        let all = self.counts.total();
        let count = self.counts.of(request.op);
        let of_kind = *count;
        *count += 1;
        self.counts.largest = self.counts.largest.max(request.len);
        self.counts.in_flight += 1;
        self.counts.in_flight_max = self.counts.in_flight_max.max(self.counts.in_flight);
        if request.op == Op::Read && self.strict_reads {
            let mut blocks = self.blocks(&(request.offset..request.offset + request.len));
            if let Some(block) = blocks.find(|&block| !self.written[block]) {
                violations.record(format!("{request:?} reads block {block}, which was never written"));
            }
        }
        let matches_fault = |fault: &&Fault| {
            let number = match fault.op {
                Some(op) if op == request.op => of_kind,
                Some(_) => return false,
                None => all,
            };
            match fault.schedule {
                FaultSchedule::Always => true,
                FaultSchedule::At(n) => n == number,
                FaultSchedule::From(n) => n <= number,
            }
        };
        self.faults.iter().find(matches_fault).map(|fault| fault.effect)
    }

    fn withdraw(&mut self, request: &Request, _: Option<FaultEffect>) {
        *self.counts.of(request.op) -= 1;
        self.counts.in_flight -= 1;
    }

    fn start(fault: Option<FaultEffect>) -> Start {
        match fault {
            Some(FaultEffect::Hang) => Start::Held,
            Some(FaultEffect::Delay(delay)) => Start::After(delay),
            _ => Start::Now,
        }
    }

    fn perform(&mut self, request: &Request, data: &mut [u8], fault: Option<FaultEffect>) -> Result<()> {
        self.counts.in_flight -= 1;
        let range = request.offset..request.offset + request.len;
        match fault {
            Some(FaultEffect::Fail(error)) => return Err(error),
            Some(FaultEffect::Tear) if request.op != Op::Write => return Err(Error::Media),
            _ => {}
        }
        if self.truncated_at.is_some_and(|at| range.end > at) {
            return Err(Error::Media);
        }
        let at = range.start as usize..range.end as usize;
        let block = self.geometry.logical_block as usize;
        match request.op {
            Op::Write => {
                let written = self.counts.bytes_written + request.len;
                if self.no_space_from.is_some_and(|from| range.end > from)
                    || self.no_space_after.is_some_and(|most| written > most)
                {
                    return Err(Error::NoSpace);
                }
                let torn = fault == Some(FaultEffect::Tear);
                let len = if torn { data.len() / 2 / block * block } else { data.len() };
                self.bytes[at.start..at.start + len].copy_from_slice(&data[..len]);
                self.counts.bytes_written += len as u64;
                let blocks = self.blocks(&(range.start..range.start + len as u64));
                self.written[blocks].fill(true);
                if torn {
                    return Err(Error::Media);
                }
            }
            Op::Read => {
                data.copy_from_slice(&self.bytes[at]);
                self.counts.bytes_read += request.len;
                if fault == Some(FaultEffect::Corrupt) {
                    for block in data.chunks_mut(block) {
                        // Damage the middle of the block: in a header, a checksum might detect the damage.
                        let middle = block.len() / 2;
                        block[middle] ^= 0x55;
                    }
                }
            }
            Op::Discard | Op::WriteZeroes => {
                self.bytes[at].fill(0);
                let blocks = self.blocks(&range);
                self.written[blocks].fill(request.op == Op::WriteZeroes);
            }
            Op::Flush => {}
        }
        if let Some(FaultEffect::FailDone(error)) = fault { Err(error) } else { Ok(()) }
    }

    fn choose(&mut self, ready: usize) -> usize {
        self.shuffle.as_mut().map_or(0, |rng| rng.below(ready as u64) as usize)
    }

    fn gathers(&self) -> bool {
        self.shuffle.is_some()
    }

    fn service_time(&self) -> Duration {
        self.service_time
    }

    fn extents(&self, range: Range<u64>) -> Vec<Extent> {
        vec![Extent { offset: range.start, len: range.end - range.start, kind: ExtentKind::Data }]
    }
}
