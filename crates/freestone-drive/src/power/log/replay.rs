//! Replaying a log on a device, to any point, also with a power cut at that point.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{BEGINNING, Entry, Error, Reader};
use crate::power::choice::Choice;
use freestone_core::device::{self, Blocking, Device, Flags};

/// How much is read and written at a time.
const CHUNK_BYTES: u64 = 1 << 20;
/// The most unflushed units that a cut at a point decides on; each takes some 40 bytes of memory.
pub const CUT_BLOCKS_MAX: usize = 16 << 20;
/// Entries of more blocks are never undone: the device did not keep them apart either.
pub(in crate::power) const APART_MAX_BLOCKS: u64 = 4096;

/// What a cut at a point did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CutPoint {
    /// Units written since the last flush that ended as after one of the writes since.
    pub kept_blocks: u64,
    /// Those that ended as they were at that flush.
    pub lost_blocks: u64,
}

/// Does to `device` what the first `entries` entries say, in order, and flushes it. The device must
/// have the content that the recorded one had when the recording began; so it had again at each
/// mark [`BEGINNING`], and what stands before the last one of them is passed over. Zeroes and
/// discards become zeroes that may be holes.
///
/// # Errors
/// [`Error::NoEntry`], [`Error::Damaged`] and [`Error::Device`] of an entry that lies beyond the
/// device before anything is written; those of the file and of the device then.
pub fn replay(reader: &mut Reader, entries: u64, device: &dyn Device) -> Result<(), Error> {
    Plan::new(reader, entries, device.geometry().size, None)?.run(reader, device).map(drop)
}

/// As [`replay`], with a power cut after `entries` entries: what stands before the last flush, and
/// what was written with FUA, is done; of each other unit of `unit` bytes (at least a sector of the
/// log) the seed decides whether it is as it was then, or as after one of the writes to it since.
///
/// # Errors
/// As [`replay`]; [`Error::TooManyUnflushed`] before anything is written.
pub fn replay_cut(
    reader: &mut Reader,
    entries: u64,
    (seed, unit): (u64, u64),
    device: &dyn Device,
) -> Result<CutPoint, Error> {
    let plan = Plan::new(reader, entries, device.geometry().size, Some((seed, unit)))?;
    Ok(plan.run(reader, device)?.unwrap_or_default())
}

/// A replay whose entries were all looked at, so that a damaged log is refused before the first
/// write.
pub(in crate::power) struct Plan {
    entries: u64,
    /// The first entry that is replayed.
    from: u64,
    cut: Option<CutPlan>,
}

/// A replay with a power cut at its end.
struct CutPlan {
    /// Entries before this one are durable.
    flushed: u64,
    /// Bytes that a cut does not tear.
    unit: u64,
    choice: Choice,
    tails: BTreeMap<u64, Tail>,
}

impl Plan {
    /// Looks at the first `entries` entries, to be replayed on a device of `size` bytes; `cut` is the
    /// seed and the unit of a power cut there.
    pub fn new(reader: &mut Reader, entries: u64, size: u64, cut: Option<(u64, u64)>) -> Result<Self, Error> {
        if entries > reader.entries() {
            return Err(Error::NoEntry { asked: entries, entries: reader.entries() });
        }
        let from = beginning(reader, entries, size)?;
        let cut = cut.map(|(seed, unit)| CutPlan::new(reader, from..entries, seed, unit)).transpose()?;
        Ok(Self { entries, from, cut })
    }

    /// Does to `device` what was planned.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Damaged`] of a log that was changed meanwhile, [`Error::Device`]. The
    /// device then has a part of it.
    pub fn run(self, reader: &mut Reader, device: &dyn Device) -> Result<Option<CutPoint>, Error> {
        let Self { entries, from, cut } = self;
        reader.rewind();
        let Some(mut cut) = cut else {
            whole(reader, from, entries, device)?;
            return flush(entries, device).map(|()| None);
        };
        whole(reader, from, cut.flushed, device)?;
        while let Some(entry) = reader.next_before(entries)? {
            cut.apply(reader, &entry, device)?;
        }
        flush(entries, device)?;
        Ok(Some(cut.outcome()))
    }
}

impl CutPlan {
    fn new(reader: &mut Reader, entries: Range<u64>, seed: u64, unit: u64) -> Result<Self, Error> {
        let mut flushed = entries.start;
        reader.rewind();
        while let Some(entry) = reader.next_before(entries.end)? {
            if entry.is_flush() {
                flushed = flushed.max(entry.number + 1);
            }
        }
        let block = u64::from(reader.sector_bytes());
        let mut plan =
            Self { flushed, unit: unit.max(block), choice: Choice::new(seed), tails: BTreeMap::new() };
        reader.rewind();
        while let Some(entry) = reader.next_before(entries.end)? {
            if entry.number < flushed {
                continue;
            }
            let units = plan.units(&entry);
            if is_durable(&entry, block) {
                // With a part of a unit all that came before is there.
                for (_, tail) in plan.tails.range_mut(units) {
                    *tail = Tail { from: entry.number, count: 0, seen: 0 };
                }
                continue;
            }
            for at in units {
                plan.tails.entry(at).or_insert(Tail { from: flushed, count: 0, seen: 0 }).count += 1;
                if plan.tails.len() > CUT_BLOCKS_MAX {
                    return Err(Error::TooManyUnflushed);
                }
            }
        }
        Ok(plan)
    }

    const fn units(&self, entry: &Entry) -> Range<u64> {
        entry.offset / self.unit..(entry.offset + entry.len).div_ceil(self.unit)
    }

    /// Does what the cut leaves of an entry behind the last flush.
    fn apply(&mut self, reader: &Reader, entry: &Entry, device: &dyn Device) -> Result<(), Error> {
        if is_durable(entry, u64::from(reader.sector_bytes())) {
            return apply(reader, entry, 0, entry.len, device);
        }
        // Neighbours that are kept are written together.
        let mut run = 0..0;
        for at in self.units(entry) {
            if !self.tails.get_mut(&at).is_some_and(|tail| tail.keeps(entry, at, self.choice)) {
                continue;
            }
            let from = (at * self.unit).saturating_sub(entry.offset);
            let to = ((at + 1).saturating_mul(self.unit) - entry.offset).min(entry.len);
            if run.end != from {
                apply(reader, entry, run.start, run.end, device)?;
                run.start = from;
            }
            run.end = to;
        }
        apply(reader, entry, run.start, run.end, device)
    }

    fn outcome(&self) -> CutPoint {
        let mut cut = CutPoint::default();
        for (at, tail) in self.tails.iter().filter(|(_, tail)| tail.count > 0) {
            match self.choice.of(*at, tail.count) {
                None => cut.lost_blocks += 1,
                Some(_) => cut.kept_blocks += 1,
            }
        }
        cut
    }
}

/// The writes to a unit that a cut decides on.
struct Tail {
    /// Entries before this one are durable.
    from: u64,
    count: u64,
    /// Of those, how many were replayed.
    seen: u64,
}

impl Tail {
    /// Whether this entry's write to the unit happened.
    fn keeps(&mut self, entry: &Entry, unit: u64, choice: Choice) -> bool {
        if entry.number < self.from {
            return true;
        }
        self.seen += 1;
        choice.of(unit, self.count).is_some_and(|last| self.seen - 1 <= last)
    }
}

fn is_durable(entry: &Entry, block: u64) -> bool {
    entry.is_fua() || entry.len / block > APART_MAX_BLOCKS
}

/// Where a replay starts: behind the last return to the beginning. No entry from there on lies
/// beyond a device of `size` bytes.
fn beginning(reader: &mut Reader, entries: u64, size: u64) -> Result<u64, Error> {
    let (mut from, mut beyond) = (0, None);
    reader.rewind();
    while let Some(entry) = reader.next_before(entries)? {
        if entry.mark.as_deref() == Some(BEGINNING) {
            (from, beyond) = (entry.number + 1, None);
        } else if entry.len > 0 && entry.offset + entry.len > size {
            beyond = beyond.or(Some(entry.number));
        }
    }
    match beyond {
        Some(entry) => Err(Error::Device { entry, error: device::Error::OutOfRange }),
        None => Ok(from),
    }
}

fn whole(reader: &mut Reader, from: u64, entries: u64, device: &dyn Device) -> Result<(), Error> {
    while let Some(entry) = reader.next_before(entries)? {
        if entry.number < from {
            continue;
        }
        apply(reader, &entry, 0, entry.len, device)?;
    }
    Ok(())
}

/// Does the bytes `from..to` of an entry.
fn apply(reader: &Reader, entry: &Entry, from: u64, to: u64, device: &dyn Device) -> Result<(), Error> {
    if from == to {
        return Ok(());
    }
    let failed = |error| Error::Device { entry: entry.number, error };
    if entry.is_discard() {
        return device.write_zeroes(entry.offset + from, to - from, Flags::MAY_FREE).map_err(failed);
    }
    let mut chunk = vec![0; CHUNK_BYTES.min(to - from) as usize];
    let mut at = from;
    while at < to {
        let len = CHUNK_BYTES.min(to - at);
        let data = &mut chunk[..len as usize];
        reader.read_data(entry, at, data)?;
        let written = if data.iter().all(|&byte| byte == 0) {
            device.write_zeroes(entry.offset + at, len, Flags::MAY_FREE)
        } else {
            device.write_at(entry.offset + at, data, Flags::empty())
        };
        written.map_err(failed)?;
        at += len;
    }
    Ok(())
}

fn flush(entries: u64, device: &dyn Device) -> Result<(), Error> {
    device.flush().map_err(|error| Error::Device { entry: entries, error })
}
