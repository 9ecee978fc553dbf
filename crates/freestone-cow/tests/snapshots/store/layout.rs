//! The bytes of an exception store on disk, compared with dm-snapshot's format.

use std::sync::Arc;

use freestone_core::device::Device;
use freestone_cow::cow::StoreKind;
use freestone_cow::cow::store::{AllocateError, Store};

use super::disk::Disk;
use super::{CHUNK, open, origin, preserve, preserve_all};

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn entry(bytes: &[u8], at: usize) -> (u64, u64) {
    let half = |at| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    (half(at), half(at + 8))
}

fn make(disk: &Arc<Disk>, chunk: Option<u64>) -> Arc<Store> {
    Store::open(Arc::clone(disk) as Arc<dyn Device>, StoreKind::Persistent, chunk, &origin()).unwrap().0
}

#[test]
fn new_store_is_a_header_and_an_empty_area() {
    for sectors in [8u64, 16, 32, 64, 2048] {
        let chunk = sectors * 512;
        // Content of a used device, of which only the first four bytes are zero, as a new store
        // requires.
        let mut bytes = vec![0xa5; 4 * chunk as usize];
        bytes[..4].fill(0);
        let disk = Disk::new(bytes);
        let store = make(&disk, Some(chunk));
        assert_eq!(store.chunk_bytes(), chunk);
        let bytes = disk.bytes();
        assert_eq!(&bytes[..4], b"SnAp");
        assert_eq!((word(&bytes, 0), word(&bytes, 4), word(&bytes, 8)), (0x7041_6e53, 1, 1));
        assert_eq!(u64::from(word(&bytes, 12)), sectors);
        assert!(bytes[16..2 * chunk as usize].iter().all(|&byte| byte == 0));
        assert!(bytes[2 * chunk as usize..].iter().all(|&byte| byte == 0xa5));
        // The usage that dm-snapshot's documentation shows for an empty store with chunks of 16
        // sectors: 32 sectors, all of them metadata.
        assert_eq!(store.usage().to_string(), format!("{}/{} {}", 2 * sectors, 4 * sectors, 2 * sectors));
    }
}

#[test]
fn header_is_written_last() {
    let disk = Disk::new(vec![0; 64 * CHUNK as usize]);
    let _store = open(Arc::clone(&disk) as Arc<dyn Device>);
    assert_eq!(disk.history(), ["0+8192 zero", "flush", "0+4096 fua"]);
}

#[test]
fn default_chunk_is_16k_and_old_store_keeps_its_own() {
    let disk = Disk::new(vec![0; 1 << 20]);
    assert_eq!(make(&disk, None).chunk_bytes(), 16 << 10);
    assert_eq!(make(&disk, Some(64 << 10)).chunk_bytes(), 16 << 10);
    let disk = Disk::new(vec![0; 1 << 20]);
    assert_eq!(make(&disk, Some(64 << 10)).chunk_bytes(), 64 << 10);
    assert_eq!(make(&disk, None).chunk_bytes(), 64 << 10);
}

#[test]
fn entries_are_in_order_of_their_places() {
    let disk = Disk::new(vec![0; 64 * CHUNK as usize]);
    let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
    assert_eq!(preserve(&store, 0x0123_4567), 2);
    assert_eq!(preserve_all(&store, [9, 7, 8]), [(9, 3), (7, 4), (8, 5)]);
    let bytes = disk.bytes();
    let found: Vec<_> = (0..6).map(|at| entry(&bytes, CHUNK as usize + at * 16)).collect();
    assert_eq!(found, [(0x0123_4567, 2), (9, 3), (7, 4), (8, 5), (0, 0), (0, 0)]);
    assert_eq!(bytes[CHUNK as usize..][..16], [0x67, 0x45, 0x23, 1, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    drop(store);
    let (store, exceptions) = open(disk as Arc<dyn Device>);
    assert_eq!(exceptions, [(7, 4), (8, 5), (9, 3), (0x0123_4567, 2)]);
    assert_eq!(store.allocate().unwrap().chunk(), 6);
}

/// With E entries in an area, areas are at chunk 1 + k * (E + 1): chunks 1, 514 and 1027 for chunks
/// of 16 sectors.
#[test]
fn areas_are_at_the_chunks_of_the_format() {
    let chunk = 16 * 512;
    let disk = Disk::new(vec![0x5a; 0]);
    drop(disk);
    let mut bytes = vec![0x5a; 1100 * chunk];
    bytes[..4].fill(0);
    let disk = Disk::new(bytes);
    let store = make(&disk, Some(chunk as u64));
    let places = preserve_all(&store, 1000..2030);
    // Allocated places skip the chunks of the header and of the areas.
    let expected: Vec<u64> = (2..).filter(|chunk| ![514, 1027].contains(chunk)).take(1030).collect();
    assert_eq!(places.iter().map(|&(_, new)| new).collect::<Vec<_>>(), expected);
    let bytes = disk.bytes();
    for (at, place) in places.iter().enumerate() {
        let area = [1, 514, 1027][at / 512];
        assert_eq!(entry(&bytes, area * chunk + at % 512 * 16), *place);
    }
    assert!(bytes[1027 * chunk + 6 * 16..1028 * chunk].iter().all(|&byte| byte == 0));
    // The store does not write the copies themselves; the caller does.
    assert!(bytes[1028 * chunk..].iter().all(|&byte| byte == 0x5a));
    let sectors = 16;
    assert_eq!(store.usage().metadata, (2 + 2) * sectors);
    assert_eq!(store.usage().allocated, (2 + 1030 + 2) * sectors);
    drop(store);
    let store = make(&disk, None);
    assert_eq!(store.usage().metadata, (2 + 2) * sectors);
    assert_eq!(store.usage().allocated, (2 + 1030 + 2) * sectors);
}

#[test]
fn commit_flushes_then_writes_area_then_completes() {
    use super::disk::Note;
    let disk = Disk::new(vec![0; 64 * CHUNK as usize]);
    let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
    disk.start();
    let place = store.allocate().unwrap();
    let (tx, rx) = std::sync::mpsc::channel();
    let noting = Arc::clone(&disk);
    store.commit(place, 5, Ok(()), move |outcome| {
        noting.note(Note::Durable(5));
        tx.send(outcome).unwrap();
    });
    assert_eq!(rx.recv(), Ok(Ok(())));
    assert_eq!(disk.history(), ["flush", "4096+4096 fua", "Durable(5)"]);
}

/// The next area is zeroed before the flush. So the zeroes are durable before the current area
/// counts as full.
#[test]
fn full_area_is_written_after_the_next_is_zeroed() {
    let mut bytes = vec![0x77; 600 * CHUNK as usize];
    bytes[..4].fill(0);
    let disk = Disk::new(bytes);
    let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
    preserve_all(&store, 0..255);
    disk.start();
    assert_eq!(preserve(&store, 255), 257);
    assert_eq!(disk.history(), [&format!("{}+4096 zero", 258 * CHUNK), "flush", "4096+4096 fua"]);
    assert_eq!(store.usage().metadata, 3 * 8);
    drop(store);
    // The list of a reopened store ends exactly at the end of the full area.
    let (store, exceptions) = open(Arc::clone(&disk) as Arc<dyn Device>);
    assert_eq!(exceptions, (0..256).map(|old| (old, old + 2)).collect::<Vec<_>>());
    assert_eq!(preserve(&store, 256), 259);
    drop(store);
    assert_eq!(open(disk as Arc<dyn Device>).1.len(), 257);
}

/// If the device has space for all places of an area but not for the next area, the last place
/// stays unused. The list must end on the device.
#[test]
fn device_without_space_for_next_area_is_full_early() {
    let disk = Disk::new(vec![0; 258 * CHUNK as usize]);
    let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
    preserve_all(&store, 0..255);
    assert_eq!(store.allocate().map(|place| place.chunk()), Err(AllocateError::Full));
    assert!(store.is_valid());
    drop(store);
    let (store, exceptions) = open(disk as Arc<dyn Device>);
    assert_eq!(exceptions.len(), 255);
    assert_eq!(store.allocate().map(|place| place.chunk()), Err(AllocateError::Full));
    // With one more chunk, the next area fits, so the area can become full.
    let disk = Disk::new(vec![0; 259 * CHUNK as usize]);
    let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
    preserve_all(&store, 0..256);
    assert_eq!(store.allocate().map(|place| place.chunk()), Err(AllocateError::Full));
    drop(store);
    assert_eq!(open(disk as Arc<dyn Device>).1.len(), 256);
}

/// The store writes only changed blocks of a large area. The result equals that of writing whole
/// areas.
#[test]
fn large_area_is_written_block_by_block() {
    let chunk = 64 << 10;
    let disk = Disk::new(vec![0; 800 * chunk]);
    let store = make(&disk, Some(chunk as u64));
    preserve_all(&store, 0..300);
    disk.start();
    preserve(&store, 300);
    assert_eq!(disk.history(), ["flush", &format!("{}+4096 fua", chunk + 4096)]);
    preserve_all(&store, 301..700);
    let bytes = disk.bytes();
    let found: Vec<_> = (0..4096).map(|at| entry(&bytes, chunk + at * 16)).collect();
    let expected: Vec<_> =
        (0..700u64).map(|old| (old, old + 2)).chain(std::iter::repeat_n((0, 0), 3396)).collect();
    assert_eq!(found, expected);
}
