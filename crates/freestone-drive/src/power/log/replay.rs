//! Replays a log of writes up to any point, optionally with a simulated power cut at that point.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{Entry, Error, RESET_MARK, Reader};
use crate::power::choice::CutChoice;
use freestone_core::device::{self, Blocking, Device, Flags};

const CHUNK_BYTES: u64 = 1 << 20;
/// Maximum number of unflushed units at a power cut. Limited because each uses about 40 bytes of
/// memory.
pub const CUT_BLOCKS_MAX: usize = 16 << 20;
/// Maximum number of blocks of an entry that a power cut may lose. Larger entries are durable,
/// because the device writes them past its cache.
pub(in crate::power) const APART_MAX_BLOCKS: u64 = 4096;

/// Result of a simulated power cut at a point of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CutPoint {
    /// Number of units, of those written since the last flush, that have the content of one of
    /// these writes.
    pub kept_blocks: u64,
    /// Number of units, of those written since the last flush, that have the content from that
    /// flush.
    pub lost_blocks: u64,
}

/// Applies the first `entries` entries of the log to `device`, then flushes the device. Zeroes and
/// discards become write zeroes that may free space.
///
/// The device must have the content from the start of the recording. A [`RESET_MARK`] means that
/// the recorded device had this content again, so entries before the last such mark are skipped.
///
/// # Errors
/// Before anything is written: [`Error::NoEntry`], [`Error::Damaged`], [`Error::File`], and
/// [`Error::Device`] for an entry beyond the device's end. Later: errors of the file and the
/// device.
pub fn replay(reader: &mut Reader, entries: u64, device: &dyn Device) -> Result<(), Error> {
    Plan::new(reader, entries, device.geometry().size, None)?.run(reader, device).map(drop)
}

/// Replays the log like [`replay`], with a simulated power cut after the first `entries` entries.
///
/// All entries before the last flush are applied, and so are later writes with FUA. For each other
/// unit of `unit` bytes (at least a sector of the log), `seed` chooses the content: that at the
/// flush, or that after one of the later writes to the unit.
///
/// # Errors
/// The errors of [`replay`], and [`Error::TooManyUnflushed`] before anything is written.
pub fn replay_cut(
    reader: &mut Reader,
    entries: u64,
    (seed, unit): (u64, u64),
    device: &dyn Device,
) -> Result<CutPoint, Error> {
    let plan = Plan::new(reader, entries, device.geometry().size, Some((seed, unit)))?;
    Ok(plan.run(reader, device)?.unwrap_or_default())
}

/// Prepared replay. All its entries were checked, so that a damaged log fails before the first
/// write.
pub(in crate::power) struct Plan {
    entries: u64,
    from: u64,
    cut: Option<CutPlan>,
}

/// Simulated power cut at the end of a replay.
struct CutPlan {
    /// Index of the first entry after the last flush. Earlier entries are durable.
    flushed: u64,
    /// Size in bytes of a unit, which a power cut does not tear.
    unit: u64,
    choice: CutChoice,
    unit_writes: BTreeMap<u64, UnitWrites>,
}

impl Plan {
    /// Checks the first `entries` entries of the log for a device of `size` bytes. `cut` is the
    /// seed and the unit size in bytes of a power cut, if one is simulated.
    pub fn new(reader: &mut Reader, entries: u64, size: u64, cut: Option<(u64, u64)>) -> Result<Self, Error> {
        if entries > reader.entries() {
            return Err(Error::NoEntry { asked: entries, entries: reader.entries() });
        }
        let from = first_entry(reader, entries, size)?;
        let cut = cut.map(|(seed, unit)| CutPlan::new(reader, from..entries, seed, unit)).transpose()?;
        Ok(Self { entries, from, cut })
    }

    /// Runs the replay on `device`. Returns the result of the power cut, or `None` without one.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Damaged`] if the log has changed, or [`Error::Device`]. The device
    /// then contains a part of the replay.
    pub fn run(self, reader: &mut Reader, device: &dyn Device) -> Result<Option<CutPoint>, Error> {
        let Self { entries, from, cut } = self;
        reader.rewind();
        let Some(mut cut) = cut else {
            replay_range(reader, from, entries, device)?;
            return flush(entries, device).map(|()| None);
        };
        replay_range(reader, from, cut.flushed, device)?;
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
        let mut plan = Self {
            flushed,
            unit: unit.max(block),
            choice: CutChoice::new(seed),
            unit_writes: BTreeMap::new(),
        };
        reader.rewind();
        while let Some(entry) = reader.next_before(entries.end)? {
            if entry.number < flushed {
                continue;
            }
            let units = plan.units(&entry);
            if is_durable(&entry, block) {
                // A durable part of a unit makes all earlier writes to the unit durable.
                for (_, writes) in plan.unit_writes.range_mut(units) {
                    *writes = UnitWrites { from: entry.number, count: 0, seen: 0 };
                }
                continue;
            }
            for at in units {
                plan.unit_writes
                    .entry(at)
                    .or_insert(UnitWrites { from: flushed, count: 0, seen: 0 })
                    .count += 1;
                if plan.unit_writes.len() > CUT_BLOCKS_MAX {
                    return Err(Error::TooManyUnflushed);
                }
            }
        }
        Ok(plan)
    }

    const fn units(&self, entry: &Entry) -> Range<u64> {
        entry.offset / self.unit..(entry.offset + entry.len).div_ceil(self.unit)
    }

    /// Applies the part that survives the power cut of an entry after the last flush.
    fn apply(&mut self, reader: &Reader, entry: &Entry, device: &dyn Device) -> Result<(), Error> {
        if is_durable(entry, u64::from(reader.sector_bytes())) {
            return apply(reader, entry, 0, entry.len, device);
        }
        // Adjacent surviving units are written together.
        let mut run = 0..0;
        for at in self.units(entry) {
            if !self.unit_writes.get_mut(&at).is_some_and(|writes| writes.keeps(entry, at, self.choice)) {
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
        for (at, writes) in self.unit_writes.iter().filter(|(_, writes)| writes.count > 0) {
            match self.choice.of(*at, writes.count) {
                None => cut.lost_blocks += 1,
                Some(_) => cut.kept_blocks += 1,
            }
        }
        cut
    }
}

/// Writes to a unit since the last flush, of which a power cut may lose the newest ones.
struct UnitWrites {
    /// Entries with a smaller index are durable for this unit.
    from: u64,
    count: u64,
    /// Number of these writes that the replay has reached so far.
    seen: u64,
}

impl UnitWrites {
    /// Returns true if the entry's write to the unit survives the power cut. Must be called once
    /// for each such entry, in order.
    fn keeps(&mut self, entry: &Entry, unit: u64, choice: CutChoice) -> bool {
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

/// Returns the index of the first entry to replay: 0, or the one after the last [`RESET_MARK`].
/// Fails if a later entry lies beyond a device of `size` bytes.
fn first_entry(reader: &mut Reader, entries: u64, size: u64) -> Result<u64, Error> {
    let (mut from, mut beyond) = (0, None);
    reader.rewind();
    while let Some(entry) = reader.next_before(entries)? {
        if entry.mark.as_deref() == Some(RESET_MARK) {
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

fn replay_range(reader: &mut Reader, from: u64, entries: u64, device: &dyn Device) -> Result<(), Error> {
    while let Some(entry) = reader.next_before(entries)? {
        if entry.number < from {
            continue;
        }
        apply(reader, &entry, 0, entry.len, device)?;
    }
    Ok(())
}

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
    device.flush().map_err(|error| Error::Device { entry: entries.saturating_sub(1), error })
}
