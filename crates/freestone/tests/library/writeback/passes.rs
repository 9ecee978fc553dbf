//! Passes over all pages (recompression, writeback, compaction) end, whatever requests run
//! meanwhile, and do not lose content.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use freestone::codec::{Algorithm, Params};
use freestone::device::{Blocking, Op};
use freestone::ram::{Config, Ram, RecompressOptions, Secondary, Writeback, WritebackError};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Manner, TestDevice};

use crate::writeback::disk::{Disk, MIB, NONE, PAGE, content, eventually, noise};

/// How long the load runs, so that the test ends even if the pass does not.
const LOAD: Duration = Duration::from_secs(15);

/// Returns a page that begins with `words` units of text from a small vocabulary. The rest is
/// noise. lz4 compresses the page, and zstd compresses it much better.
fn text(seed: u64, words: usize) -> Vec<u8> {
    let (letters, noise) = (content(3, 7, 512), content(5, seed, PAGE as usize));
    let byte =
        |i: usize| if i / 8 < words { letters[usize::from(noise[i / 8]) % 64 * 8 + i % 8] } else { noise[i] };
    (0..PAGE as usize).map(byte).collect()
}

/// At the memory limit, pages find no memory to be recompressed, and writers replace recompressed
/// pages by larger ones. Still, the pass tries each page only once.
#[test]
fn recompression_at_the_limit_tries_each_page_once() {
    let zstd = Secondary { algorithm: Algorithm::Zstd, params: Params::default() };
    let config = Config {
        disksize: 8 * MIB,
        mem_limit: 2 * MIB,
        recomp_algorithms: [Some(zstd), None, None],
        ..Config::default()
    };
    let ram = Ram::new(config).unwrap();
    let data: Vec<_> = (0..500).map(|seed| text(seed, 200 + (seed * 37 % 300) as usize)).collect();
    let put = |page: u64, n: u64| ram.write_at(page * PAGE, &data[n as usize % 500], NONE).is_ok();
    let there = (0..2048).take_while(|&page| put(page, page)).count() as u64;
    // Discards every tenth page, so that the pass has some memory to begin with.
    for page in 0..there / 10 {
        ram.discard(page * 7 % there * PAGE, PAGE).unwrap();
    }
    let stop = AtomicBool::new(false);
    let start = Instant::now();
    let (done, took) = thread::scope(|scope| {
        for writer in 0..2 {
            let (stop, put) = (&stop, &put);
            scope.spawn(move || {
                let mut n = writer;
                while !stop.load(SeqCst) && start.elapsed() < LOAD {
                    n += 1;
                    put(n * 7 % there, n * 13);
                }
            });
        }
        let done = ram.recompress(&RecompressOptions::default());
        let took = start.elapsed();
        stop.store(true, SeqCst);
        (done, took)
    });
    let done = done.unwrap_or_else(|(done, _)| done);
    assert!(took < LOAD, "it went on as long as pages were written: {done:?}");
    assert!(done.tried <= there, "{done:?} of {there} pages");
}

/// The backing device becomes full. Meanwhile requests overwrite pages, which frees their blocks
/// and makes them eligible again. The pass still writes each page at most once.
#[test]
fn writeback_to_a_full_device_ends() {
    const PAGES: u64 = 1000;
    // A hook that runs before each write to the backing device.
    let change = Arc::new(Mutex::new(None::<Box<dyn FnMut() + Send>>));
    let hook = Arc::clone(&change);
    let backing = TestDevice::over(Arc::new(FaultyDisk::new(300 << 12, 4096))).with_manner(Manner::Submitted);
    let backing = Arc::new(backing.on_request(move |_| {
        if let Some(change) = &mut *hook.lock().unwrap() {
            change();
        }
    }));
    let config = Config { disksize: 8 * MIB, ..Config::default() };
    let ram = Ram::new(config.backed_by(backing, true)).unwrap();
    for page in 0..PAGES {
        ram.write_at(page * PAGE, &noise(page, 1), NONE).unwrap();
    }
    let (mut at, mut left) = (0, 20_000);
    let load = ram.clone();
    *change.lock().unwrap() = Some(Box::new(move || {
        for _ in 0..40.min(left) {
            at = (at + 7) % PAGES;
            left -= 1;
            load.write_at(at * PAGE, &noise(at, 1), NONE).unwrap();
        }
    }));
    let (written, error) = ram.writeback(&Writeback::Huge).unwrap_err();
    *change.lock().unwrap() = None;
    assert_eq!(error, WritebackError::NoSpace);
    assert!(written.pages <= PAGES, "{written:?}");
    for page in 0..PAGES {
        let mut back = vec![0; PAGE as usize];
        ram.read_at(page * PAGE, &mut back).unwrap();
        assert!(back == noise(page, 1), "page {page}");
    }
}

/// A page that is read while compaction moves it stays in its old block. A later compaction can
/// move the page.
#[test]
fn page_read_during_a_move_is_moved_later() {
    const PAGES: u64 = 96;
    let disk =
        Disk::new(Config { disksize: 8 * MIB, ..Config::default() }, FaultyDisk::new(3000 << 12, 4096), true);
    let data = |page: u64| content(4, page, PAGE as usize);
    for page in 0..PAGES {
        disk.write(page, &data(page));
    }
    disk.ram.writeback(&Writeback::Pages(vec![0..=PAGES - 1])).unwrap();
    let full = disk.ram.bd_stat().bd_count;
    // Two of three pages are discarded, so every block has unused space.
    let kept = (0..PAGES).step_by(3);
    for page in (0..PAGES).filter(|page| page % 3 != 0) {
        disk.ram.discard(page * PAGE, PAGE).unwrap();
    }
    let sparse = disk.ram.bd_stat().bd_count;
    assert!(full <= 60 && sparse > full / 2, "{sparse} of {full} blocks");

    // The compaction hangs while it writes the pages to their new blocks ...
    disk.backing.fault(Some(Op::Write), FaultSchedule::At(disk.backing.counts().writes), FaultEffect::Hang);
    let ram = disk.ram.clone();
    let compact = thread::spawn(move || ram.compact());
    disk.backing.wait_held(1);
    // ... a read of all pages hangs too ...
    disk.backing.fault(Some(Op::Read), FaultSchedule::From(disk.backing.counts().reads), FaultEffect::Hang);
    let ram = disk.ram.clone();
    let reader = thread::spawn(move || {
        let mut back = vec![0; (PAGES * PAGE) as usize];
        ram.read_at(0, &mut back)
    });
    disk.backing.wait_held(2);
    // ... the writes of the compaction complete ...
    disk.backing.release(Op::Write);
    compact.join().unwrap();
    // ... and then the read fails. The pages must still be in their old blocks.
    disk.backing.truncate_at(0);
    disk.backing.release(Op::Read);
    eventually("those that are read again by themselves hang, or all have failed", || {
        disk.backing.release(Op::Read);
        reader.is_finished()
    });
    assert!(reader.join().unwrap().is_err());
    disk.backing.heal();

    disk.ram.compact();
    let tight = disk.ram.bd_stat().bd_count;
    assert!(tight <= full / 3 + 3, "{tight} blocks for a third of what {full} held");
    for page in kept {
        assert!(disk.read(page, 1).unwrap() == data(page), "page {page}");
    }
    disk.check_clean_end();
}
