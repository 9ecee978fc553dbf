//! Properties of the exception store that hold for any bytes on the COW device. The fuzz target
//! `cow_metadata` shares this code and describes the oracle.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use freestone_core::device::{Device, Geometry};
use freestone_cow::cow::StoreKind;
use freestone_cow::cow::store::{Exceptions, Store};
use freestone_testkit::Model;

use super::disk::Disk;

/// Bytes of a block of the disk, which is also the smallest chunk.
const BLOCK: usize = 4096;
/// Maximum number of blocks of the disk: enough for the first area with chunks of 4 KiB to 256 KiB.
const BLOCKS_MAX: usize = 300;
/// Bytes of an input before the metadata: the number of blocks of the disk and of chunks of the
/// origin, 16 bits each.
pub const PREFIX: usize = 4;
/// Bytes of the store's header that an input contains.
pub const HEADER: usize = 32;
const SOON: Duration = Duration::from_secs(20);

/// Builds a disk from an input: sizes, header, then each area until the input ends. Returns the
/// disk and the origin's size in bytes. Returns None if the input is shorter than the sizes.
fn build(input: &[u8]) -> Option<(Vec<u8>, u64)> {
    let (prefix, metadata) = input.split_at_checked(PREFIX)?;
    let blocks = 1 + usize::from(u16::from_le_bytes([prefix[0], prefix[1]])) % BLOCKS_MAX;
    let origin_chunks = 1 + u64::from(u16::from_le_bytes([prefix[2], prefix[3]]));
    // Chunks for copies have a content that is not valid metadata.
    let mut bytes = vec![0xd7; blocks * BLOCK];
    let (header, mut rest) = metadata.split_at(HEADER.min(metadata.len()));
    bytes[..BLOCK].fill(0);
    bytes[..header.len()].copy_from_slice(header);
    let sectors = u32::from_le_bytes(bytes[12..16].try_into().unwrap());
    let chunk = (sectors as usize).saturating_mul(512).clamp(BLOCK, BLOCKS_MAX * BLOCK);
    let mut area = chunk;
    while area + chunk <= bytes.len() {
        bytes[area..area + chunk].fill(0);
        let (part, more) = rest.split_at(chunk.min(rest.len()));
        bytes[area..area + part.len()].copy_from_slice(part);
        rest = more;
        area += chunk * (chunk / 16 + 1);
    }
    Some((bytes, origin_chunks * chunk as u64))
}

/// Reads the list of exceptions in the simplest way, as pairs of origin chunk and chunk of the COW
/// device, sorted.
fn plain_list(bytes: &[u8], chunk: usize) -> Vec<(u64, u64)> {
    let entries = chunk / 16;
    let mut list = Vec::new();
    for number in 0.. {
        let at = (1 + number / entries * (entries + 1)) * chunk + number % entries * 16;
        let half = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        if half(at + 8) == 0 {
            break;
        }
        list.push((half(at), half(at + 8)));
    }
    list.sort_unstable();
    list
}

/// Returns true if byte `at` of the disk belongs to the header's chunk or to an area.
fn is_metadata(at: usize, chunk: usize) -> bool {
    at / chunk == 0 || at / chunk % (chunk / 16 + 1) == 1
}

fn open(disk: &Arc<Disk>, origin: &Geometry) -> Result<(Arc<Store>, Exceptions), String> {
    let cow = Arc::clone(disk) as Arc<dyn Device>;
    Store::open(cow, StoreKind::Persistent, None, origin).map_err(|error| error.to_string())
}

/// Checks one input. Returns the store's error or the number of exceptions. Returns None if the
/// input is too short.
pub fn check(input: &[u8]) -> Option<Result<usize, String>> {
    let (before, origin_size) = build(input)?;
    let origin = Geometry { size: origin_size, ..Model::new(BLOCK, 512).geometry() };
    let disk = Disk::new(before.clone());
    let (store, found) = match open(&disk, &origin) {
        Ok(opened) => opened,
        Err(error) => {
            assert!(disk.history().is_empty(), "{error}, and yet it wrote {:?}", disk.history());
            assert_eq!(disk.bytes(), before);
            return Some(Err(error));
        }
    };
    let chunk = store.chunk_bytes() as usize;
    let after = disk.bytes();
    if before[..4] == [0; 4] {
        // A new store was created. The disk after its metadata is unchanged.
        assert!(store.is_valid() && found.is_empty());
        assert!(after[2 * chunk..] == before[2 * chunk..]);
    } else {
        assert_eq!(&before[..4], b"SnAp");
        assert!(after[..BLOCK] == before[..BLOCK]);
        if !store.is_valid() {
            assert!(before[4..8] == [0; 4] && found.is_empty() && after == before);
            assert!(store.allocate().is_err());
            return Some(Ok(0));
        }
        assert_eq!(before[4..8], [1, 0, 0, 0]);
        // The loaded list equals the entries on disk, which opening the store has not changed.
        assert_eq!(found, plain_list(&before, chunk));
        assert_eq!(found, plain_list(&after, chunk));
        let entries = chunk / 16;
        let end = (1 + found.len() / entries * (entries + 1)) * chunk;
        let behind = &after[end + found.len() % entries * 16..end + chunk];
        assert!(behind.iter().all(|&byte| byte == 0), "something is left behind the end");
        for at in (0..after.len()).step_by(512) {
            let sector = at..at + 512;
            let cleaned = is_metadata(at, chunk) && after[sector.clone()].iter().all(|&byte| byte == 0);
            assert!(cleaned || after[sector.clone()] == before[sector], "{at} was written");
        }
    }
    // No chunk is used twice, and all chunk numbers are in range.
    let news: BTreeMap<u64, u64> = found.iter().map(|&(old, new)| (new, old)).collect();
    assert_eq!(news.len(), found.len(), "a place is used twice");
    assert!(found.windows(2).all(|pair| pair[0].0 < pair[1].0), "a chunk is preserved twice");
    for &(old, new) in &found {
        assert!(old * (chunk as u64) < origin_size, "chunk {old} is not in the origin");
        let at = new as usize * chunk;
        assert!(at + chunk <= before.len() && !is_metadata(at, chunk), "no place is {new}");
    }
    go_on(&disk, &origin, store, found.clone());
    Some(Ok(found.len()))
}

/// Adds an exception if there is space, reopens the store, and merges all exceptions.
fn go_on(disk: &Arc<Disk>, origin: &Geometry, store: Arc<Store>, mut expected: Vec<(u64, u64)>) {
    let chunk = store.chunk_bytes();
    let unused = (0..origin.size.div_ceil(chunk)).find(|old| expected.iter().all(|(other, _)| other != old));
    if let (Some(old), Ok(place)) = (unused, store.allocate()) {
        let new = place.chunk();
        assert!(expected.iter().all(|&(_, other)| other < new), "place {new} is not behind the others");
        assert!(!is_metadata(new as usize * chunk as usize, chunk as usize));
        let (tx, rx) = mpsc::channel();
        store.commit(place, old, Ok(()), move |outcome| tx.send(outcome).unwrap());
        assert_eq!(rx.recv_timeout(SOON), Ok(Ok(())));
        expected.push((old, new));
        expected.sort_unstable();
    }
    drop(store);
    let (store, found) = open(disk, origin).expect("what it wrote itself opens");
    assert_eq!(found, expected);
    let mut merged = Vec::new();
    while let Some(run) = store.last_run().expect("what was loaded is there") {
        merged.extend((0..run.count).map(|at| (run.old + at, run.new + at)));
        store.commit_merge(&run, run.count).expect("a disk without faults");
    }
    merged.sort_unstable();
    assert_eq!(merged, expected);
    drop(store);
    assert_eq!(open(disk, origin).expect("a store that was merged opens").1, []);
}

// ---- inputs -------------------------------------------------------------------------------------

/// Returns an input that builds a valid store with these exceptions.
pub fn input(blocks: u16, origin_chunks: u16, chunk_sectors: u32, entries: &[(u64, u64)]) -> Vec<u8> {
    let mut input = Vec::new();
    input.extend((blocks - 1).to_le_bytes());
    input.extend((origin_chunks - 1).to_le_bytes());
    input.extend(b"SnAp");
    for word in [1u32, 1, chunk_sectors] {
        input.extend(word.to_le_bytes());
    }
    input.resize(PREFIX + HEADER, 0);
    for &(old, new) in entries {
        input.extend(old.to_le_bytes());
        input.extend(new.to_le_bytes());
    }
    input
}
