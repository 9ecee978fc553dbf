//! Replaying a log on a device, to any point, also with a power cut at that point.

use std::collections::BTreeMap;

use super::{BEGINNING, Entry, Error, Reader};
use crate::power::choice::Choice;
use freestone_core::device::{Blocking, Device, Flags};

/// How much is read and written at a time.
const CHUNK_BYTES: u64 = 1 << 20;
/// The most unflushed units that a cut at a point decides on; each takes some 40 bytes of memory.
pub const CUT_BLOCKS_MAX: usize = 16 << 20;
/// Entries of more blocks are never undone: the device did not keep them apart either.
pub(in crate::power) const APART_MAX_BLOCKS: u64 = 4096;

/// What a cut at a point did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
/// [`Error::NoEntry`] before anything is written; those of the file, [`Error::Damaged`] and
/// [`Error::Device`] then.
pub fn replay(reader: &mut Reader, entries: u64, device: &dyn Device) -> Result<(), Error> {
    check(reader, entries)?;
    let from = beginning(reader, entries)?;
    reader.rewind();
    whole(reader, from, entries, device)?;
    flush(entries, device)
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
    check(reader, entries)?;
    let from = beginning(reader, entries)?;
    let mut flushed = from;
    reader.rewind();
    while let Some(entry) = reader.next_before(entries)? {
        if entry.is_flush() {
            flushed = flushed.max(entry.number + 1);
        }
    }
    let mut tails: BTreeMap<u64, Tail> = BTreeMap::new();
    let block = u64::from(reader.sector_bytes());
    let unit = unit.max(block);
    let units = |entry: &Entry| entry.offset / unit..(entry.offset + entry.len).div_ceil(unit);
    reader.rewind();
    while let Some(entry) = reader.next_before(entries)? {
        if entry.number < flushed {
            continue;
        }
        if is_durable(&entry, block) {
            // With a part of a unit all that came before is there.
            for (_, tail) in tails.range_mut(units(&entry)) {
                *tail = Tail { from: entry.number, count: 0, seen: 0 };
            }
            continue;
        }
        for at in units(&entry) {
            tails.entry(at).or_insert(Tail { from: flushed, count: 0, seen: 0 }).count += 1;
            if tails.len() > CUT_BLOCKS_MAX {
                return Err(Error::TooManyUnflushed);
            }
        }
    }

    reader.rewind();
    whole(reader, from, flushed, device)?;
    let choice = Choice::new(seed);
    while let Some(entry) = reader.next_before(entries)? {
        if is_durable(&entry, block) {
            apply(reader, &entry, 0, entry.len, device)?;
            continue;
        }
        // Neighbours that are kept are written together.
        let mut run = 0..0;
        for at in units(&entry) {
            if !tails.get_mut(&at).is_some_and(|tail| tail.keeps(&entry, at, choice)) {
                continue;
            }
            let from = (at * unit).saturating_sub(entry.offset);
            let to = ((at + 1).saturating_mul(unit) - entry.offset).min(entry.len);
            if run.end != from {
                apply(reader, &entry, run.start, run.end, device)?;
                run.start = from;
            }
            run.end = to;
        }
        apply(reader, &entry, run.start, run.end, device)?;
    }
    flush(entries, device)?;
    let mut cut = CutPoint { kept_blocks: 0, lost_blocks: 0 };
    for (at, tail) in tails.iter().filter(|(_, tail)| tail.count > 0) {
        match choice.of(*at, tail.count) {
            None => cut.lost_blocks += 1,
            Some(_) => cut.kept_blocks += 1,
        }
    }
    Ok(cut)
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

fn check(reader: &Reader, asked: u64) -> Result<(), Error> {
    let entries = reader.entries();
    if asked > entries { Err(Error::NoEntry { asked, entries }) } else { Ok(()) }
}

/// Where a replay starts: behind the last return to the beginning.
fn beginning(reader: &mut Reader, entries: u64) -> Result<u64, Error> {
    let mut from = 0;
    reader.rewind();
    while let Some(entry) = reader.next_before(entries)? {
        if entry.mark.as_deref() == Some(BEGINNING) {
            from = entry.number + 1;
        }
    }
    Ok(from)
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
