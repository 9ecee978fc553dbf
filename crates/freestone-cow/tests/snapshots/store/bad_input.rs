//! Exception stores with corrupt, truncated, foreign or newer metadata are refused with a clear
//! error, and nothing is written to the COW device.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use freestone_core::device::{Blocking, Device, Error, Flags, Geometry, Op};
use freestone_cow::cow::store::Store;
use freestone_cow::cow::{SetupError, StoreKind};
use freestone_drive::view::ReadOnly;
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Model, Rng, scaled};

use super::disk::Disk;
use super::metadata::{HEADER, PREFIX, check, input};
use super::{CHUNK, open, origin, preserve_all};

const MUTATED: usize = 6000;

/// Returns a valid input (see `metadata.rs`) in which `word` replaces the 32-bit word at byte `at`
/// of the header.
fn with_word(at: usize, word: u32) -> Vec<u8> {
    let mut input = input(64, 100, 8, &[(5, 2), (6, 3)]);
    input[PREFIX + at..PREFIX + at + 4].copy_from_slice(&word.to_le_bytes());
    input
}

#[track_caller]
fn refused(input: &[u8], sentence: &str) {
    assert_eq!(check(input), Some(Err(sentence.to_owned())));
}

#[test]
fn foreign_newer_and_invalid_headers_are_refused() {
    assert_eq!(check(&with_word(4, 1)), Some(Ok(2)));
    refused(
        &with_word(0, 0x0000_53ef),
        "the COW device holds something that is not an exception store (it begins with 0x000053ef); zero its first 4096 bytes \
         to use it",
    );
    refused(&with_word(8, 2), "the exception store has version 2; only version 1 is understood");
    refused(&with_word(8, 0), "the exception store has version 0; only version 1 is understood");
    refused(&with_word(4, 7), "the exception store's header has the valid flag 7; it must be 0 or 1");
    for sectors in [0, 1, 4, 7, 9, 24, 4 << 20, u32::MAX] {
        let words = "it must be a power of two from 8 to 2097152";
        refused(
            &with_word(12, sectors),
            &format!("the exception store's header has the chunk size {sectors} sectors; {words}"),
        );
    }
    refused(
        &with_word(12, 2048),
        "the COW device has 262144 bytes; with chunks of 1048576 bytes it must have 2097152 at least",
    );
    // An invalid store opens without exceptions. `check` verifies this.
    assert_eq!(check(&with_word(4, 0)), Some(Ok(0)));
}

#[test]
fn damaged_lists_are_refused() {
    let damaged = |entries: &[(u64, u64)], words: &str| {
        refused(&input(300, 100, 8, entries), &format!("the exception store is damaged: {words}"));
    };
    damaged(&[(5, 2), (100, 3)], "entry 1 preserves chunk 100 of an origin of 100 chunks");
    damaged(&[(u64::MAX, 3)], "entry 0 preserves chunk 18446744073709551615 of an origin of 100 chunks");
    damaged(&[(5, 300)], "entry 0 leads to chunk 300 of a COW device of 300 chunks");
    damaged(&[(5, u64::MAX)], "entry 0 leads to chunk 18446744073709551615 of a COW device of 300 chunks");
    damaged(&[(5, 1)], "entry 0 leads to chunk 1 of the COW device, which holds metadata");
    damaged(&[(5, 2), (6, 258)], "entry 1 leads to chunk 258 of the COW device, which holds metadata");
    damaged(&[(5, 2), (6, 3), (5, 4)], "chunk 5 of the origin is preserved twice");
    damaged(&[(5, 2), (6, 3), (7, 2)], "chunk 2 of the COW device is used twice");
    damaged(&[(5, 2), (0, 0), (6, 3)], "entry 1 is missing, but later ones in the same sector are there");
    damaged(&[(5, 2), (6, 0)], "entry 1 is missing, but later ones in the same sector are there");
    // The list of exceptions fills its last area at the end of the device.
    let full: Vec<_> = (0..256).map(|at| (at, at + 2)).collect();
    refused(
        &input(258, 300, 8, &full),
        "the exception store is damaged: the list of exceptions does not end on the COW device",
    );
    assert_eq!(check(&input(259, 300, 8, &full)), Some(Ok(256)));
}

/// Entries beyond the end of the list are not damage if a whole sector before them is missing. A
/// torn write leaves such entries.
#[test]
fn torn_write_is_cleaned_up() {
    let mut entries: Vec<_> = (0..100).map(|at| (at, at + 2)).collect();
    entries[10..64].fill((0, 0));
    assert_eq!(check(&input(300, 100, 8, &entries)), Some(Ok(10)));
}

/// A torn write leaves a gap larger than a block, with entries beyond it. New exceptions that fill
/// the gap must not bring these entries back.
#[test]
fn torn_entries_do_not_reappear() {
    let chunk = 16 << 10;
    let disk = Disk::new(vec![0; 700 * chunk]);
    let open = |disk: &Arc<Disk>| {
        let cow = Arc::clone(disk) as Arc<dyn Device>;
        Store::open(cow, StoreKind::Persistent, Some(chunk as u64), &origin()).unwrap()
    };
    drop(open(&disk));
    // Writes ten entries, and from the second block on a part of a group whose first block was not
    // written.
    for at in (0..10u64).chain(256..600) {
        let entry: Vec<u8> = [at.to_le_bytes(), (at + 2).to_le_bytes()].concat();
        let sector = chunk as u64 + at / 32 * 512;
        let mut bytes = disk.bytes()[sector as usize..][..512].to_vec();
        bytes[(at % 32) as usize * 16..][..16].copy_from_slice(&entry);
        disk.write_at(sector, &bytes, Flags::empty()).unwrap();
    }
    let (store, found) = open(&disk);
    assert_eq!(found, (0..10).map(|at| (at, at + 2)).collect::<Vec<_>>());
    preserve_all(&store, 1000..1246);
    drop(store);
    let (_, found) = open(&disk);
    assert_eq!(found, (0..10).chain(1000..1246).zip(2..).collect::<Vec<_>>());
}

#[test]
fn small_or_read_only_device_is_refused() {
    let setup = |cow: Arc<dyn Device>, kind, chunk| {
        Store::open(cow, kind, chunk, &origin()).map(drop).map_err(|error| error.to_string())
    };
    let disk = |bytes: u64| Disk::new(vec![0; bytes as usize]) as Arc<dyn Device>;
    for (bytes, chunk) in [(512, CHUNK), (CHUNK, CHUNK), (4 * CHUNK, 4 * CHUNK)] {
        let error = setup(disk(bytes), StoreKind::Persistent, Some(chunk)).unwrap_err();
        assert_eq!(
            error,
            format!(
                "the COW device has {bytes} bytes; with chunks of {chunk} bytes it must have {} at least",
                2 * chunk
            )
        );
    }
    for chunk in [0, 1, 512, 2048, CHUNK + 512, 3 * CHUNK, 2 << 30, u64::MAX] {
        for kind in [StoreKind::Persistent, StoreKind::PersistentOverflow, StoreKind::Transient] {
            assert_eq!(
                setup(disk(1 << 20), kind, Some(chunk)).unwrap_err(),
                format!(
                    "chunk size is {chunk} bytes; it must be a power of two from 4096 (4K) to 1073741824 (1G)"
                )
            );
        }
    }
    let disk = Disk::new(vec![0; 1 << 20]);
    let cow = Arc::new(ReadOnly(Arc::clone(&disk) as _));
    assert_eq!(setup(cow, StoreKind::Persistent, None).unwrap_err(), "the COW device is read-only");
    assert_eq!(disk.history(), [] as [&str; 0]);
}

#[test]
fn device_error_names_the_operation() {
    let make = || Arc::new(FaultyDisk::new(1 << 20, 512));
    let disk = make();
    disk.fault(Some(Op::Read), FaultSchedule::Always, FaultEffect::Fail(Error::Media));
    let setup = |disk: &Arc<FaultyDisk>| {
        Store::open(Arc::clone(disk) as Arc<dyn Device>, StoreKind::Persistent, Some(CHUNK), &origin())
            .map(drop)
            .unwrap_err()
    };
    assert_eq!(setup(&disk).to_string(), "reading the exception store failed: I/O error");
    for (op, when) in [(Op::WriteZeroes, 0), (Op::Flush, 0), (Op::Write, 0)] {
        let disk = make();
        disk.fault(Some(op), FaultSchedule::At(when), FaultEffect::Fail(Error::NoSpace));
        let error = setup(&disk);
        assert!(matches!(error, SetupError::Device { what: "writing", source: Error::NoSpace }), "{error}");
        // The next attempt succeeds, although the first one failed in the middle of the setup.
        disk.heal();
        assert_eq!(open(disk).1, []);
    }
    // The area of an existing store cannot be read.
    let disk = make();
    drop(open(Arc::clone(&disk) as Arc<dyn Device>));
    disk.fault(Some(Op::Read), FaultSchedule::At(2), FaultEffect::Fail(Error::Media));
    assert_eq!(setup(&disk).to_string(), "reading the exception store failed: I/O error");
}

/// A list with more entries than the device has chunks is refused before its entries fill memory.
#[test]
fn list_longer_than_device_is_refused() {
    let blocks = 2000usize;
    let mut bytes = vec![0; blocks * 4096];
    bytes[..4].copy_from_slice(b"SnAp");
    for (at, word) in [(4, 1u32), (8, 1), (12, 8)] {
        bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
    }
    let mut number = 0u64;
    for area in (1..blocks).step_by(257) {
        for at in 0..256 {
            let entry = &mut bytes[area * 4096 + at * 16..][..16];
            entry[..8].copy_from_slice(&number.to_le_bytes());
            entry[8..].copy_from_slice(&2u64.to_le_bytes());
            number += 1;
        }
    }
    let error = Store::open(Disk::new(bytes), StoreKind::Persistent, None, &origin()).map(drop).unwrap_err();
    assert_eq!(error.to_string(), "the exception store is damaged: chunk 2 of the COW device is used twice");
}

#[test]
fn origin_blocks_must_divide_the_chunk() {
    let origin = Geometry { logical_block: 4096, ..Model::new(1 << 20, 4096).geometry() };
    let open = |chunk| {
        Store::open(Disk::new(vec![0; 1 << 20]), StoreKind::Persistent, Some(chunk), &origin)
            .map(|(store, _)| store)
    };
    // The largest block of a device, 4096 bytes, divides all valid chunk sizes. A chunk of 2048
    // bytes is refused.
    assert!(open(4096).is_ok());
    assert!(matches!(open(2048), Err(SetupError::Chunk(2048))));
}

// ---- mutated inputs -----------------------------------------------------------------------------

fn good_inputs() -> Vec<Vec<u8>> {
    let run = |count: u64| (0..count).map(|at| (at, at + 2)).collect::<Vec<_>>();
    let mut rng = Rng::new(7);
    let mut olds: Vec<u64> = (0..200).collect();
    for at in (1..olds.len()).rev() {
        olds.swap(at, rng.below(at as u64 + 1) as usize);
    }
    let shuffled: Vec<_> = olds.into_iter().zip(2..).collect();
    let mut blank = input(64, 64, 8, &[]);
    blank[PREFIX..].fill(0);
    vec![
        blank,
        input(64, 64, 8, &[]),
        input(64, 64, 8, &[(5, 2), (6, 3), (9, 4)]),
        input(300, 300, 8, &run(255)),
        input(300, 300, 8, &run(256)),
        input(
            300,
            300,
            8,
            &run(290).into_iter().map(|(old, new)| (old, new + u64::from(new > 257))).collect::<Vec<_>>(),
        ),
        input(300, 300, 8, &shuffled),
        input(300, 70, 32, &run(60)),
        input(300, 70, 512, &[(1, 2)]),
    ]
}

fn mutate(input: &mut Vec<u8>, rng: &mut Rng) {
    for _ in 0..=rng.below(4) {
        let len = input.len() as u64;
        match rng.below(7) {
            0 => input.truncate(rng.below(len + 1) as usize),
            1 => {
                let at = rng.below(len.max(1)) as usize;
                if let Some(byte) = input.get_mut(at) {
                    *byte ^= 1 << rng.below(8);
                }
            }
            // Changes an entry to a random or a boundary value.
            2..=4 if input.len() >= PREFIX + HEADER + 16 => {
                let entries = (input.len() - PREFIX - HEADER) as u64 / 16;
                let half = PREFIX + HEADER + rng.below(entries * 2) as usize * 8;
                let bounds = [0, 1, 2, 99, 255, 256, 257, 258, 259, 299, 300, 514, 1 << 32, u64::MAX];
                let value = if rng.chance(50) { bounds[rng.below(14) as usize] } else { rng.below(310) };
                input[half..half + 8].copy_from_slice(&value.to_le_bytes());
            }
            5 if input.len() >= PREFIX + HEADER => {
                let word = PREFIX + 4 * rng.below(4) as usize;
                let values = [0, 1, 2, 8, 16, 32, 2048, 0x7041_6e53, u32::MAX];
                input[word..word + 4].copy_from_slice(&values[rng.below(9) as usize].to_le_bytes());
            }
            // Clears a sector, as if its write was lost.
            _ => {
                let sector = PREFIX + HEADER + 512 * rng.below(9) as usize;
                let end = input.len().min(sector + 512);
                if sector < end {
                    input[sector..end].fill(0);
                }
            }
        }
    }
}

#[test]
fn mutated_stores_are_refused_or_valid() {
    let mut rng = Rng::new(20);
    let good = good_inputs();
    for (at, input) in good.iter().enumerate() {
        assert!(matches!(check(input), Some(Ok(_))), "good input {at}: {:?}", check(input));
    }
    let (mut opened, mut refused) = (0, 0);
    let mutated = scaled(MUTATED);
    for _ in 0..mutated {
        let mut input = good[rng.below(good.len() as u64) as usize].clone();
        mutate(&mut input, &mut rng);
        match check(&input) {
            Some(Ok(_)) => opened += 1,
            Some(Err(_)) => refused += 1,
            None => {}
        }
    }
    println!("{opened} opened, {refused} refused");
    assert!(opened > mutated / 10 && refused > mutated / 10, "{opened} opened, {refused} refused");
}

/// Checks the fuzzer's corpus and one file of each kind.
#[test]
fn fuzz_corpus_is_refused_or_valid() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/cow_metadata");
    let mut files = 0;
    for file in fs::read_dir(&corpus).expect("the corpus is in the repository") {
        let path = file.unwrap().path();
        let outcome = check(&fs::read(&path).unwrap());
        let good = path.file_stem().is_some_and(|name| name.to_string_lossy().starts_with("good"));
        assert!(!good || matches!(outcome, Some(Ok(_))), "{}: {outcome:?}", path.display());
        files += 1;
    }
    assert!(files >= 8, "{files} files");
}

/// The bytes that a store writes itself equal those that `input` builds.
#[test]
fn inputs_equal_written_stores() {
    let disk = Disk::new(vec![0; 64 * CHUNK as usize]);
    let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
    preserve_all(&store, [5, 6, 9]);
    let input = input(64, 64, 8, &[(5, 2), (6, 3), (9, 4)]);
    let bytes = disk.bytes();
    assert_eq!(bytes[..HEADER], input[PREFIX..][..HEADER]);
    assert!(bytes[CHUNK as usize..].starts_with(&input[PREFIX + HEADER..]));
}
