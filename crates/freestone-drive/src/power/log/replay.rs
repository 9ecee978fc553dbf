//! Replaying a log on a device, to any point, also with a power cut at that point.

use std::collections::BTreeMap;

use super::{BEGINNING, Entry, Error, Reader};
use crate::power::choice::Choice;
use freestone_core::device::{Blocking, Device, Flags};

/// How much is read and written at a time.
const CHUNK_BYTES: u64 = 1 << 20;
/// The most unflushed blocks that a cut at a point decides on; each takes some 40 bytes of memory.
pub const CUT_BLOCKS_MAX: usize = 16 << 20;
/// Entries of more blocks are never undone: the device did not keep them apart either.
pub(in crate::power) const APART_MAX_BLOCKS: u64 = 4096;

/// What a cut at a point did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CutPoint {
    /// Blocks written since the last flush that ended as one of the versions written since.
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
/// what was written with FUA, is done; of each other block the seed decides whether it has its
/// content of that time or one of those written since.
///
/// # Errors
/// As [`replay`]; [`Error::TooManyUnflushed`] before anything is written.
pub fn replay_cut(
    reader: &mut Reader,
    entries: u64,
    seed: u64,
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
    let mut versions: BTreeMap<u64, Tail> = BTreeMap::new();
    let block = u64::from(reader.sector_bytes());
    reader.rewind();
    while let Some(entry) = reader.next_before(entries)? {
        if entry.number < flushed {
            continue;
        }
        if is_durable(&entry, block) {
            let blocks = entry.offset / block..(entry.offset + entry.len) / block;
            let gone: Vec<u64> = versions.range(blocks).map(|(block, _)| *block).collect();
            for block in gone {
                versions.insert(block, Tail { from: entry.number, count: 0, seen: 0 });
            }
            continue;
        }
        for block in entry.offset / block..(entry.offset + entry.len) / block {
            versions.entry(block).or_insert(Tail { from: flushed, count: 0, seen: 0 }).count += 1;
            if versions.len() > CUT_BLOCKS_MAX {
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
        let first = entry.offset / block;
        let mut run = 0..0;
        for at in 0..entry.len / block {
            let keep =
                versions.get_mut(&(first + at)).is_some_and(|tail| tail.keeps(&entry, first + at, choice));
            if keep && run.end == at && at > run.start {
                run.end = at + 1;
            } else if keep {
                apply(reader, &entry, run.start * block, run.end * block, device)?;
                run = at..at + 1;
            }
        }
        apply(reader, &entry, run.start * block, run.end * block, device)?;
    }
    flush(entries, device)?;
    let unflushed = || versions.iter().filter(|(_, tail)| tail.count > 0);
    let lost_blocks =
        unflushed().filter(|(block, tail)| choice.of(**block, tail.count).is_none()).count() as u64;
    Ok(CutPoint { kept_blocks: unflushed().count() as u64 - lost_blocks, lost_blocks })
}

/// The versions of a block that a cut decides on.
struct Tail {
    /// Entries before this one are durable, or overwritten by what is.
    from: u64,
    count: u64,
    /// Of those, how many were replayed.
    seen: u64,
}

impl Tail {
    /// Whether the block's version in this entry is the one to keep.
    fn keeps(&mut self, entry: &Entry, block: u64, choice: Choice) -> bool {
        if entry.number < self.from {
            return false;
        }
        self.seen += 1;
        choice.of(block, self.count) == Some(self.seen - 1)
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
