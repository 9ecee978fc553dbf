//! Tests of the kernel's recompression rules, and of recompression with concurrent requests.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::codec::{Algorithm, Page, Params, Scratch};
use crate::effort::effort;
use crate::pool::class::class_of;
use crate::ram::geometry::PAGE;
use crate::ram::tests::{MIB, change, config, content, word};
use crate::ram::{Config, Ram, RecompressKind, Secondary};
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Blocking, Flags};
use freestone_core::slot::Kind;

const LZ4: Algorithm = Algorithm::Lz4;
const ZSTD: Algorithm = Algorithm::Zstd;

/// Creates a disk of `pages` pages that compresses new pages with lz4 and has these secondary
/// algorithms.
fn disk(pages: u64, secondary: [Option<Algorithm>; 3]) -> Ram {
    let recomp_algorithms =
        secondary.map(|s| s.map(|algorithm| Secondary { algorithm, params: Params::default() }));
    Ram::new(Config { recomp_algorithms, ..config(pages * PAGE) }).unwrap()
}

/// Returns a page that compresses better with zstd than with lz4. `words` of its 8-byte words are
/// from a small vocabulary of letters; the others are noise.
fn page(seed: u64, words: usize) -> Page {
    let letters = content(3, 7, 512);
    let noise = content(5, seed, PAGE_BYTES);
    std::array::from_fn(|i| {
        if i / 8 < words { letters[usize::from(noise[i / 8]) % 64 * 8 + i % 8] } else { noise[i] }
    })
}

fn write(ram: &Ram, slot: u64, page: &[u8]) {
    ram.write_at(slot * PAGE, page, Flags::empty()).unwrap();
}

fn read(ram: &Ram, slot: u64) -> Page {
    let mut page = [0; PAGE_BYTES];
    ram.read_at(slot * PAGE, &mut page).unwrap();
    page
}

fn all() -> RecompressOptions {
    RecompressOptions::default()
}

/// Checks the statistics and the pool's use against the slots, and that no slot is picked.
fn check_books(ram: &Ram) {
    let (mut stored, mut huge) = (0, 0);
    ram.0.layer().for_each_candidate(&[0..=ram.0.slots() - 1], &|_| true, |slot, word| {
        assert!(!word.is_picked(), "slot {slot} was left picked");
        stored += word.stored_bytes() as u64;
        huge += u64::from(word.kind() == Kind::Huge);
        true
    });
    let stat = ram.mm_stat();
    assert_eq!((stat.compr_data_size, stat.huge_pages), (stored, huge));
    ram.compact();
    let used = ram.mm_stat().mem_used_total;
    assert!(
        used >= stored && used < stored * 11 / 10 + 256 * 2 * PAGE,
        "{used} bytes for {stored}: places leak"
    );
}

#[test]
fn recompress_shrinks_pages_and_keeps_content() {
    let ram = disk(600, [Some(ZSTD), None, None]);
    let data: Vec<Vec<u8>> = (0..600_u64)
        .map(|n| if n % 4 == 0 { page(n, 400).to_vec() } else { content(n as u8, n, PAGE_BYTES) })
        .collect();
    for (slot, data) in data.iter().enumerate() {
        write(&ram, slot as u64, data);
    }
    let words: Vec<Word> = (0..600).map(|slot| word(&ram, slot)).collect();
    let before = ram.mm_stat();
    let done = ram.recompress(&all()).unwrap();
    let objects = words.iter().filter(|w| matches!(w.kind(), Kind::Compressed | Kind::Huge)).count() as u64;
    assert_eq!(done.tried, objects);
    assert_eq!(done.tried, done.shrunk + done.incompressible);
    assert!(done.shrunk >= 200 && done.incompressible >= 80, "{done:?}");
    let after = ram.mm_stat();
    assert_eq!(after.compr_data_size, before.compr_data_size - done.saved_bytes);
    assert_eq!((after.orig_data_size, after.same_pages), (before.orig_data_size, before.same_pages));
    assert!(after.huge_pages < before.huge_pages && after.huge_pages > 0);
    assert_eq!(after.huge_pages_since, before.huge_pages_since);
    for (slot, data) in data.iter().enumerate() {
        let (old, new) = (words[slot], word(&ram, slot as u64));
        match new.algorithm() {
            1 => assert!(class_of(new.stored_bytes()) < class_of(old.stored_bytes()), "{old:?} {new:?}"),
            _ => assert_eq!((new.kind(), new.location()), (old.kind(), old.location())),
        }
        assert!(read(&ram, slot as u64) == data[..], "slot {slot}");
    }
    check_books(&ram);
    // A second run finds no page to recompress.
    assert_eq!(ram.recompress(&all()).unwrap(), RecompressReport::default());
}

#[test]
fn recompress_failure_marks_page_incompressible() {
    let ram = disk(4, [Some(ZSTD), Some(LZ4), None]);
    let noise = content(5, 1, PAGE_BYTES);
    write(&ram, 0, &noise);
    let failed = RecompressReport { tried: 1, ..RecompressReport::default() };
    // A failure at priority 1 marks nothing, as the algorithm at priority 2 may still succeed.
    assert_eq!(ram.recompress(&all()).unwrap(), failed);
    assert_eq!(ram.recompress(&all()).unwrap(), failed);
    let second = RecompressOptions { priority: Some(2), ..all() };
    assert_eq!(ram.recompress(&second).unwrap(), RecompressReport { incompressible: 1, ..failed });
    assert!(word(&ram, 0).is_incompressible());
    assert_eq!(ram.recompress(&second).unwrap().tried, 0);
    assert_eq!(ram.recompress(&all()).unwrap().tried, 0);
    assert!(read(&ram, 0) == noise[..]);
    assert_eq!(ram.recompress(&second).unwrap().tried, 0, "a read changes nothing about that");
    write(&ram, 0, &page(1, 400));
    assert_eq!(ram.recompress(&all()).unwrap().shrunk, 1);
}

#[test]
fn auto_mode_counts_as_highest_priority() {
    let ram = Ram::new(Config {
        auto_recompress: Some(std::time::Duration::from_secs(3600)),
        ..disk(4, [Some(ZSTD), None, None]).config()
    })
    .unwrap();
    write(&ram, 0, &content(5, 1, PAGE_BYTES));
    assert_eq!(ram.recompress(&all()).unwrap().incompressible, 0);
}

#[test]
fn recompress_needs_smaller_class() {
    // The secondary algorithm is the same as the primary, so objects cannot shrink.
    let ram = disk(100, [Some(LZ4), None, None]);
    for slot in 0..100 {
        write(&ram, slot, &page(slot, 400));
    }
    let done = ram.recompress(&all()).unwrap();
    assert_eq!((done.tried, done.shrunk, done.incompressible), (100, 0, 100));
}

#[test]
fn recompress_selects_page_kinds() {
    let kinds = |kind| RecompressOptions { kind: Some(kind), ..all() };
    let make = || {
        let ram = disk(8, [Some(ZSTD), None, None]);
        for slot in 0..4 {
            // Two pages that lz4 compresses, and two that only zstd does.
            if slot < 2 {
                write(&ram, slot, &page(slot, 400));
            } else {
                write(&ram, slot, &content(3, slot, PAGE_BYTES));
            }
        }
        let words = [0, 1, 2, 3].map(|slot| word(&ram, slot).kind());
        assert_eq!(words, [Kind::Compressed, Kind::Compressed, Kind::Huge, Kind::Huge]);
        for slot in [0, 2] {
            change(&ram, slot, |word| word.with_idle(true));
        }
        ram
    };
    let shrunk = |what: &RecompressOptions| {
        let ram = make();
        ram.recompress(what).unwrap();
        (0..4).filter(|&slot| word(&ram, slot).algorithm() == 1).collect::<Vec<_>>()
    };
    assert_eq!(shrunk(&kinds(RecompressKind::Idle)), [0, 2]);
    assert_eq!(shrunk(&kinds(RecompressKind::Huge)), [2, 3]);
    assert_eq!(shrunk(&kinds(RecompressKind::HugeIdle)), [2]);
    assert_eq!(shrunk(&all()), [0, 1, 2, 3]);
}

#[test]
fn recompress_clears_idle_and_keeps_age() {
    let ram = disk(4, [Some(ZSTD), None, None]);
    write(&ram, 0, &page(1, 400));
    write(&ram, 1, &content(5, 1, PAGE_BYTES));
    for slot in 0..2 {
        change(&ram, slot, |word| word.with_idle(true).with_age(33));
    }
    let done = ram.recompress(&RecompressOptions { kind: Some(RecompressKind::Idle), ..all() }).unwrap();
    assert_eq!((done.tried, done.shrunk), (2, 1));
    for slot in 0..2 {
        assert!(!word(&ram, slot).is_idle());
        assert_eq!(word(&ram, slot).age(), 33);
    }
}

#[test]
fn recompress_threshold_bounds_both_objects() {
    let ram = disk(8, [Some(ZSTD), None, None]);
    for slot in 0..4 {
        write(&ram, slot, &page(slot, 450 - 60 * slot as usize));
    }
    let sizes = [0, 1, 2, 3].map(|slot| word(&ram, slot).stored_bytes());
    assert!(sizes.is_sorted(), "{sizes:?}");
    // Only the two largest objects reach the threshold.
    let threshold = sizes[2] as u32;
    let done = ram.recompress(&RecompressOptions { threshold, ..all() }).unwrap();
    assert_eq!(done.tried, 2);
    for slot in 0..2 {
        assert_eq!(
            (word(&ram, slot).algorithm(), word(&ram, slot).stored_bytes()),
            (0, sizes[slot as usize])
        );
    }
    for slot in 2..4 {
        let word = word(&ram, slot);
        // A page is recompressed if its new object is below the threshold, and is marked
        // incompressible otherwise.
        assert_eq!(word.algorithm() == 1, word.stored_bytes() < threshold as usize, "{word:?}");
        assert_eq!(word.algorithm() == 0, word.is_incompressible());
    }
    // An object that shrinks, but not to below the threshold, counts as a failure.
    let ram = disk(8, [Some(ZSTD), None, None]);
    write(&ram, 0, &content(3, 1, PAGE_BYTES));
    let done = ram.recompress(&RecompressOptions { threshold: 1000, ..all() }).unwrap();
    assert_eq!((done.tried, done.shrunk, done.incompressible), (1, 0, 1));
    let line = Scratch::BYTES as u32;
    assert_eq!(
        ram.recompress(&RecompressOptions { threshold: line, ..all() }),
        Err((RecompressReport::default(), RecompressError::Threshold(line)))
    );
    assert!(ram.recompress(&RecompressOptions { threshold: line - 1, ..all() }).is_ok());
}

#[test]
fn recompress_tries_largest_objects_first() {
    // Write more pages than the list of slots holds in tests, in several sizes.
    let ram = disk(700, [Some(ZSTD), None, None]);
    for slot in 0..700 {
        match slot % 7 {
            0 => write(&ram, slot, &content(5, slot, PAGE_BYTES)),
            n => write(&ram, slot, &page(slot, n as usize * 70)),
        }
    }
    let sizes: Vec<usize> = (0..700).map(|slot| word(&ram, slot).stored_bytes()).collect();
    assert_eq!(ram.recompress(&RecompressOptions { max_pages: Some(0), ..all() }).unwrap().tried, 0);
    let done = ram.recompress(&RecompressOptions { max_pages: Some(250), ..all() }).unwrap();
    assert_eq!(done.tried, 250);
    // The largest objects are tried first: a hundred pages of noise, which fail.
    assert!(done.incompressible >= 100 && done.shrunk > 0, "{done:?}");
    assert_eq!(done.shrunk + done.incompressible, 250);
    let tried = |slot: u64| word(&ram, slot).algorithm() == 1 || word(&ram, slot).is_incompressible();
    let least = (0..700).filter(|&slot| tried(slot)).map(|slot| sizes[slot as usize] / 64).min().unwrap();
    for slot in 0..700 {
        assert!(tried(slot) || sizes[slot as usize] / 64 <= least, "slot {slot} of {}", sizes[slot as usize]);
    }
    assert_eq!(ram.recompress(&all()).unwrap().tried, 450);
}

#[test]
fn recompress_finds_algorithm_by_name_or_priority() {
    let hc = Algorithm::Lz4hc;
    let ram = disk(4, [None, Some(ZSTD), Some(ZSTD)]);
    let run = |ram: &Ram, algo, priority| {
        ram.recompress(&RecompressOptions { algo, priority, ..all() }).map_err(|(_, error)| error)
    };
    assert_eq!(run(&ram, None, None), Err(RecompressError::NotConfigured(1)), "the default is 1");
    assert_eq!(run(&ram, None, Some(0)), Err(RecompressError::NoPriority(0)));
    assert_eq!(run(&ram, None, Some(4)), Err(RecompressError::NoPriority(4)));
    assert_eq!(run(&ram, Some(hc), None), Err(RecompressError::NoAlgorithm(hc)));
    let mismatch = RecompressError::Mismatch { algo: hc, priority: 3, configured: ZSTD };
    assert_eq!(run(&ram, Some(hc), Some(3)), Err(mismatch));
    assert_eq!(mismatch.errno(), libc::EINVAL);
    assert_eq!(mismatch.to_string(), "algo=lz4hc does not match priority=3, which is zstd");
    write(&ram, 0, &page(1, 400));
    assert_eq!(run(&ram, Some(ZSTD), None).unwrap().shrunk, 1);
    assert_eq!(word(&ram, 0).algorithm(), 2, "the first that has it");
    // The page was already recompressed with this or a higher priority.
    assert_eq!(run(&ram, None, Some(2)).unwrap().tried, 0);
    write(&ram, 1, &page(2, 400));
    assert_eq!(run(&ram, Some(ZSTD), Some(3)).unwrap().tried, 2);
    assert_eq!(word(&ram, 1).algorithm(), 3);
    assert_eq!(run(&ram, None, Some(2)).unwrap().tried, 0);
}

#[test]
fn recompress_damaged_object_ends_run() {
    let ram = disk(4, [None, Some(ZSTD), None]);
    write(&ram, 0, &page(1, 400));
    // Damage the page: its word names an algorithm that is not configured.
    change(&ram, 0, |word| Word::compressed(word.location(), word.stored_bytes() as u32, 1));
    let before = word(&ram, 0);
    let (done, error) = ram.recompress(&RecompressOptions { priority: Some(2), ..all() }).unwrap_err();
    assert_eq!(done.shrunk, 0);
    assert_eq!((error, error.errno()), (RecompressError::Media, libc::EIO));
    assert_eq!(word(&ram, 0), before);
}

#[test]
fn recompress_of_full_disk_stays_within_limit() {
    let ram = disk(8192, [Some(ZSTD), None, None]);
    let data = |slot: u64| page(slot, 200 + (slot * 37 % 300) as usize);
    let fill = |from: u64| {
        let full = |slot: &u64| ram.write_at(slot * PAGE, &data(*slot), Flags::empty()).is_err();
        (from..8192).find(full).unwrap()
    };
    let limit = 8 * MIB;
    ram.set_mem_limit(limit);
    let end = fill(0);
    ram.reset_mem_used_max();
    let done = ram.recompress(&all()).unwrap();
    assert_eq!(done.tried, end);
    assert!(done.shrunk > end * 9 / 10, "{done:?} of {end}");
    assert!(ram.mm_stat().mem_used_total <= limit);
    check_books(&ram);
    assert!(ram.mm_stat().mem_used_total < limit * 9 / 10);
    let new_end = fill(end);
    assert!(new_end > end + 200, "{end} {new_end}");
    for slot in 0..new_end {
        assert!(read(&ram, slot) == data(slot), "slot {slot}");
    }
}

#[test]
fn recompress_without_space_fails_and_keeps_content() {
    let ram = disk(600, [Some(ZSTD), None, None]);
    for slot in 0..600 {
        write(&ram, slot, &page(slot, 300));
    }
    let before = ram.mm_stat().compr_data_size;
    ram.set_mem_limit(PAGE);
    let (done, error) = ram.recompress(&all()).unwrap_err();
    assert_eq!(done, RecompressReport::default());
    assert_eq!((error, error.errno()), (RecompressError::NoSpace, libc::ENOSPC));
    assert_eq!(ram.mm_stat().compr_data_size, before);
    ram.set_mem_limit(0);
    check_books(&ram);
    assert_eq!(ram.recompress(&all()).unwrap().shrunk, 600);
    for slot in 0..600 {
        assert!(read(&ram, slot) == page(slot, 300));
    }
}

#[test]
fn recompress_with_writers_keeps_content() {
    const PAGES: u64 = 64;
    let ram = disk(4 * PAGES, [Some(ZSTD), Some(Algorithm::Lz4hc), None]);
    let stop = AtomicBool::new(false);
    let shrunk = std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (ram, stop) = (&ram, &stop);
            scope.spawn(move || {
                let mut model = vec![[0_u8; PAGE_BYTES]; PAGES as usize];
                let mut round = 0_u64;
                while !stop.load(Ordering::SeqCst) {
                    round += 1;
                    let n = (round * 31 % PAGES) as usize;
                    let slot = thread * PAGES + n as u64;
                    assert!(read(ram, slot) == model[n], "thread {thread}, round {round}");
                    // Mostly write pages with the same number of words, so that sizes and classes
                    // are equal and only the bytes differ.
                    match round % 8 {
                        0 => {
                            ram.discard(slot * PAGE, PAGE).unwrap();
                            model[n] = [0; PAGE_BYTES];
                        }
                        1 => {
                            ram.write_at(slot * PAGE + 512, &[round as u8; 512], Flags::empty()).unwrap();
                            model[n][512..1024].fill(round as u8);
                        }
                        kind => {
                            model[n] = page(round * 8 + thread, if kind < 6 { 300 } else { 500 });
                            write(ram, slot, &model[n]);
                        }
                    }
                }
                for (n, page) in model.iter().enumerate() {
                    assert!(
                        read(ram, thread * PAGES + n as u64) == *page,
                        "at the end: thread {thread}, page {n}"
                    );
                }
            });
        }
        let (compactor, stopped) = (&ram, &stop);
        scope.spawn(move || {
            while !stopped.load(Ordering::SeqCst) {
                compactor.compact();
            }
        });
        let mut shrunk = 0;
        let began = std::time::Instant::now();
        let mut priority = 1;
        let run_time = std::time::Duration::from_millis(effort(200, 1500));
        let patience = std::time::Duration::from_secs(60);
        while began.elapsed() < run_time || (shrunk <= 100 && began.elapsed() < patience) {
            shrunk +=
                ram.recompress(&RecompressOptions { priority: Some(priority), ..all() }).unwrap().shrunk;
            priority = 3 - priority;
        }
        stop.store(true, Ordering::SeqCst);
        shrunk
    });
    assert!(shrunk > 100, "only {shrunk} pages were recompressed meanwhile");
    check_books(&ram);
    ram.discard(0, 4 * PAGES * PAGE).unwrap();
    assert_eq!(ram.mm_stat().compr_data_size, 0);
    ram.compact();
    assert_eq!(ram.mm_stat().mem_used_total, 0, "objects were left in the pool");
}

#[test]
fn recompress_ends_on_reset() {
    let ram = disk(MIB / 1024, [Some(ZSTD), None, None]);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                ram.recompress(&all()).unwrap();
            }
        });
        for round in 0..effort(15, 50) {
            for slot in 0..200 {
                write(&ram, slot, &page(slot + round, 300));
            }
            ram.reset().unwrap();
            assert!(read(&ram, 0) == [0; PAGE_BYTES]);
        }
        stop.store(true, Ordering::SeqCst);
    });
    ram.compact();
    assert_eq!((ram.mm_stat().compr_data_size, ram.mm_stat().mem_used_total), (0, 0));
}
