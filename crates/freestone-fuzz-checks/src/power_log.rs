//! Replay of a log of writes with arbitrary content.
//!
//! An input is two bytes of options, the log header (28 bytes), and the header of each entry (32 bytes). The
//! check pads entry headers to a sector and generates the data. Options correct the magic number, the version
//! and the sector size, truncate the file, and choose the entry for a power cut. Properties:
//! * The entries are those that the reference parser finds, up to the same error.
//! * Replaying to any entry gives the content that the entries describe. The replay fails if an entry does
//!   not fit on the device.
//! * After a power cut, each block has the content at the last flush or a later one, and the numbers of kept
//!   and lost blocks are correct.

use std::collections::BTreeMap;

use freestone::device::{Blocking, Device};
use freestone::power::log::{self, Error, Reader};
use freestone_testkit::Model;

use crate::scratch::Scratch;

const DEVICE_BYTES: usize = 64 << 10;
const HEAD: usize = 28;
const ENTRY: usize = 32;
/// Maximum number of data sectors that the check generates for an entry. Larger entries have no data.
const DATA_SECTORS_MAX: u64 = 24;
const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn build(options: u8, input: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; HEAD];
    let (head, entries) = input.split_at(HEAD.min(input.len()));
    bytes[..head.len()].copy_from_slice(head);
    if options & 1 != 0 {
        bytes[..8].copy_from_slice(&0x006a_7366_7773_6872_u64.to_le_bytes());
        bytes[8..16].copy_from_slice(&1_u64.to_le_bytes());
        let sector = if options & 2 != 0 { 4096_u32 } else { 512 };
        bytes[24..28].copy_from_slice(&sector.to_le_bytes());
    }
    let sector = (u32::from_le_bytes(bytes[24..28].try_into().expect("four bytes")) as usize).clamp(64, 8192);
    bytes.resize(sector, 0);
    for (number, entry) in entries.chunks_exact(ENTRY).enumerate() {
        let at = bytes.len();
        bytes.extend_from_slice(entry);
        bytes.resize(at + sector, b'a' + number as u8 % 20);
        let sectors = word(entry, 8);
        if word(entry, 16) & DISCARD == 0 && sectors <= DATA_SECTORS_MAX {
            // Replay handles data of zeroes separately, so every fifth entry has only zeroes.
            let fill = if number % 5 == 4 { 0 } else { number as u8 + 1 };
            bytes.resize(bytes.len() + sectors as usize * sector, fill);
        }
    }
    if options & 4 != 0 {
        let cut = usize::from(options >> 3) * sector / 3;
        bytes.truncate(bytes.len().saturating_sub(cut));
    }
    bytes
}

struct ReferenceEntry {
    offset: u64,
    len: u64,
    flags: u64,
    data: Vec<u8>,
}

/// Reference parser: returns the entries up to the first invalid one, and the number of entries in the header;
/// or None if the file is not a log.
fn reference_entries(bytes: &[u8]) -> Option<(Vec<ReferenceEntry>, u64)> {
    if bytes.len() < HEAD || word(bytes, 0) != 0x006a_7366_7773_6872 || word(bytes, 8) != 1 {
        return None;
    }
    let sector = u64::from(u32::from_le_bytes(bytes[24..28].try_into().expect("four bytes")));
    if ![512, 1024, 2048, 4096].contains(&sector) {
        return None;
    }
    let (count, mut entries, mut at) = (word(bytes, 16), Vec::new(), sector as usize);
    while (entries.len() as u64) < count {
        let Some(head) = bytes.get(at..at + sector as usize) else { break };
        let (offset, len) = (word(head, 0).checked_mul(sector), word(head, 8).checked_mul(sector));
        let (Some(offset), Some(len)) = (offset, len) else { break };
        let flags = word(head, 16);
        let long = flags & MARK != 0 && word(head, 24) > sector - ENTRY as u64;
        if offset.checked_add(len).is_none() || long {
            break;
        }
        let bytes_held = if flags & DISCARD == 0 { len } else { 0 };
        let from = at + sector as usize;
        if bytes_held > (bytes.len() - from) as u64 {
            break;
        }
        at = from + bytes_held as usize;
        entries.push(ReferenceEntry { offset, len, flags, data: bytes[from..at].to_vec() });
    }
    Some((entries, count))
}

impl ReferenceEntry {
    /// Returns the content that the entry writes to the sector at `offset`. A discard writes zeroes.
    fn at(&self, offset: u64, sector: u64) -> Vec<u8> {
        let from = (offset - self.offset) as usize;
        self.data.get(from..from + sector as usize).map_or_else(|| vec![0; sector as usize], <[u8]>::to_vec)
    }
}

/// Checks one input. Returns true if entries were replayed.
///
/// # Panics
/// Panics if a property does not hold.
pub fn check(scratch: &Scratch, input: &[u8]) -> bool {
    let Some((&[options, point], rest)) = input.split_first_chunk() else { return false };
    let bytes = build(options, rest);
    let expected = reference_entries(&bytes);
    let mut reader = match Reader::open(scratch.file(&bytes)) {
        Ok(reader) => reader,
        Err(error) => {
            assert!(matches!(error, Error::Foreign { .. }) && expected.is_none(), "{error}");
            return false;
        }
    };
    let (entries, count) = expected.expect("the reference parser refuses it");
    assert_eq!(reader.entries(), count);
    for (number, entry) in entries.iter().enumerate() {
        let found = reader.next_entry().expect("the reference parser has it").expect("the header counts it");
        assert_eq!((found.number, found.offset, found.len), (number as u64, entry.offset, entry.len));
        assert_eq!(found.flags, entry.flags);
        assert_eq!(found.mark.is_some(), entry.flags & MARK != 0);
    }
    let whole = entries.len() as u64 == count;
    match reader.next_entry() {
        Ok(None) => assert!(whole),
        Ok(Some(entry)) => panic!("{entry:?} is not in the log"),
        Err(error) => assert!(!whole && matches!(error, Error::Damaged { .. }), "{error}"),
    }
    match reader.epochs() {
        Ok(epochs) => {
            assert!(whole);
            let mut at = 0;
            for epoch in epochs {
                assert_eq!(epoch.entries.start, at);
                at = epoch.entries.end;
            }
            assert_eq!(at, count);
        }
        Err(error) => assert!(!whole, "{error}"),
    }
    replay(&mut reader, &entries, count, point)
}

fn replay(reader: &mut Reader, entries: &[ReferenceEntry], count: u64, point: u8) -> bool {
    let sector = u64::from(reader.sector_bytes());
    let device = Model::new(DEVICE_BYTES, sector as u32);
    let target = u64::from(point) % (entries.len() as u64 + 2);
    let fits = |entry: &ReferenceEntry| entry.len == 0 || entry.offset + entry.len <= DEVICE_BYTES as u64;
    let done = entries.iter().take(target as usize);
    let good = target <= entries.len() as u64 && done.clone().all(fits);
    let outcome = log::replay(reader, target, &device);
    assert_eq!(outcome.is_ok(), good && target <= count, "{outcome:?}");
    if let Err(error) = outcome {
        let known = matches!(error, Error::NoEntry { .. } | Error::Damaged { .. } | Error::Device { .. });
        assert!(known, "{error}");
        // The replay of a power cut may succeed, as an entry that does not fit may be lost by the cut.
        let _ = log::replay_cut(reader, target, (point.into(), sector), &device);
        return false;
    }
    let mut bytes = vec![0; DEVICE_BYTES];
    // For each sector, its content at the last flush and all later contents.
    let mut versions: BTreeMap<u64, Vec<Vec<u8>>> = BTreeMap::new();
    for entry in done {
        for offset in (entry.offset..entry.offset + entry.len).step_by(sector as usize) {
            let content = entry.at(offset, sector);
            let block = &mut bytes[offset as usize..(offset + sector) as usize];
            let before = versions.entry(offset).or_insert_with(|| vec![block.to_vec()]);
            if entry.flags & FUA != 0 {
                before.clear();
            }
            before.push(content.clone());
            block.copy_from_slice(&content);
        }
        if entry.flags & FLUSH != 0 {
            versions.clear();
        }
    }
    assert!(content(&device) == bytes, "replayed to {target}");
    let after = Model::new(DEVICE_BYTES, sector as u32);
    let cut =
        log::replay_cut(reader, target, (point.into(), sector), &after).expect("it was replayed before");
    let unflushed = versions.values().filter(|versions| versions.len() > 1).count() as u64;
    assert_eq!(cut.kept_blocks + cut.lost_blocks, unflushed, "{cut:?}");
    for (number, found) in content(&after).chunks(sector as usize).enumerate() {
        let offset = number as u64 * sector;
        match versions.get(&offset) {
            Some(versions) => assert!(versions.iter().any(|version| version == found), "sector {number}"),
            None => assert!(found == &bytes[offset as usize..][..found.len()], "sector {number}"),
        }
    }
    target > 0
}

fn content(device: &Model) -> Vec<u8> {
    let mut bytes = vec![0; device.geometry().size as usize];
    device.read_at(0, &mut bytes).expect("a device without faults");
    bytes
}
