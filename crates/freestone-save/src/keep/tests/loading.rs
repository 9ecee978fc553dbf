//! Kept devices that are in use while their pages are loaded.

use super::*;
use freestone_core::device::{Extent, ExtentKind};
use freestone_ram::codec::Algorithm;
use freestone_ram::ram::{Backing, Contents, ForkConfig};
use std::sync::atomic::{AtomicBool, Ordering};

/// Creates a directory with a saved disk named "a", whose pages depend on their page numbers.
fn numbered(path: &Path, pages: u64, algorithm: Algorithm) -> Ram {
    let config = Config { comp_algorithm: algorithm, ..Config::default() };
    let ram = Family::new(config).unwrap().ram(pages * PAGE).unwrap();
    for page in 0..pages {
        ram.write_at(page * PAGE, &number_page(page, 0), Flags::empty()).unwrap();
    }
    let mut keep = Keep::open(path).unwrap();
    save(&mut keep, &[("a", &ram)]);
    ram
}

/// Returns a page whose first half is random, so that only the other half compresses.
fn number_page(page: u64, version: u64) -> Vec<u8> {
    let mut random = Random(page << 8 | version << 1 | 1);
    let mut bytes = vec![version as u8; PAGE_BYTES];
    for eight in bytes[..2048].chunks_mut(8) {
        eight.copy_from_slice(&random.below(u64::MAX).to_ne_bytes());
    }
    bytes
}

/// The caller can move these types to its threads.
#[test]
fn keep_and_loading_are_send() {
    fn assert_send<T: Send>() {}
    assert_send::<Keep>();
    assert_send::<BackgroundLoad>();
}

/// Writes, discards and snapshots run concurrently with the loader. Completed writes must never be
/// lost.
#[test]
fn writes_during_loading_win() {
    const PAGES: u64 = 4096;
    let dir = tempfile::tempdir().unwrap();
    numbered(dir.path(), PAGES, Algorithm::Lz4);
    for round in 0..effort(2, 6) {
        let (mut keep, devices, mut loading) = restored(dir.path(), &family(), &[]);
        let ram = named(&devices, "a");
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..3)
                .map(|writer: u64| {
                    let stop = &stop;
                    scope.spawn(move || {
                        let mut random = Random(round * 10 + writer + 1);
                        let mut last = BTreeMap::new();
                        while !stop.load(Ordering::SeqCst) {
                            // Each writer has its own pages.
                            let page = random.below(PAGES / 3) * 3 + writer;
                            let version = last.get(&page).copied().unwrap_or(0);
                            let mut bytes = vec![0; PAGE_BYTES];
                            ram.read_at(page * PAGE, &mut bytes).unwrap();
                            let expected = if version == u64::MAX {
                                vec![0; PAGE_BYTES]
                            } else {
                                number_page(page, version)
                            };
                            assert!(bytes == expected, "page {page} of version {version}");
                            let version = if random.below(4) == 0 {
                                ram.discard(page * PAGE, PAGE).unwrap();
                                u64::MAX
                            } else {
                                let version = 1 + random.below(100);
                                ram.write_at(page * PAGE, &number_page(page, version), Flags::empty())
                                    .unwrap();
                                version
                            };
                            last.insert(page, version);
                        }
                        last
                    })
                })
                .collect();
            let snapshots = scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    let snapshot = ram.snapshot().unwrap();
                    assert!(content(&snapshot) == content(&snapshot), "it does not change");
                }
            });
            load(&mut loading);
            std::thread::sleep(std::time::Duration::from_millis(20));
            stop.store(true, Ordering::SeqCst);
            let all: BTreeMap<u64, u64> =
                writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect();
            snapshots.join().unwrap();
            let shown = content(ram);
            for page in 0..PAGES {
                let expected = match all.get(&page) {
                    Some(&u64::MAX) => vec![0; PAGE_BYTES],
                    version => number_page(page, version.copied().unwrap_or(0)),
                };
                assert!(shown[(page * PAGE) as usize..][..PAGE_BYTES] == expected, "page {page}");
            }
        });
        // A save at this point contains the same content. The next round begins with new files.
        let _ = save(&mut keep, &borrowed(&devices));
        let now = content(ram);
        drop((keep, loading));
        let (keep, again, loading) = restored(dir.path(), &family(), &[]);
        assert!(content(named(&again, "a")) == now);
        drop((keep, again, loading));
        fs::remove_dir_all(dir.path()).unwrap();
        numbered(dir.path(), PAGES, Algorithm::Lz4);
    }
}

/// Without memory the loader waits and continues later; missing pages are read from the files
/// meanwhile.
#[test]
fn loading_without_memory_waits() {
    let dir = tempfile::tempdir().unwrap();
    let ram = numbered(dir.path(), 1024, Algorithm::Lz4);
    let before = content(&ram);
    let family = Family::new(Config { mem_limit: MIB, ..Config::default() }).unwrap();
    let (mut keep, devices, mut loading) = restored(dir.path(), &family, &[]);
    let ram = named(&devices, "a");
    let asked = Cell::new(0);
    let loaded = loading.run(&|| asked.replace(asked.get() + 1) > 20, &mut |_, _| {});
    assert_eq!(loaded, LoadOutcome::Cancelled);
    assert!(family.stat().mem_used_total <= MIB);
    assert!(content(ram) == before, "what is not in memory is in the files");
    // A save does not need memory for pages that are still in the files.
    let (path, devices) = (dir.path(), borrowed(&devices));
    let other = tempfile::tempdir().unwrap();
    crate::save::save(&devices, &other.path().join("f"), BaseCheck::default(), &mut |_, _| {}).unwrap();
    let saved = crate::save::restore(&other.path().join("f"), &self::family(), &[], &mut |_, _| {}).unwrap();
    assert!(content(&saved[0].1) == before);
    // Writes are subject to the memory limit as usual.
    let failed =
        (0..1024).any(|page| ram.write_at(page * PAGE, &number_page(page, 1), Flags::empty()).is_err());
    assert!(failed);
    let now = content(ram);
    assert_eq!(keep.save(&devices, &never, &mut |_, _| {}).unwrap().kind, SaveKind::Increment);
    family.set_mem_limit(0);
    load(&mut loading);
    assert!(content(ram) == now);
    assert!(files(path).len() == 2);
}

/// A device at its memory limit must not delay the loading of other devices.
#[test]
fn loading_skips_device_at_cap() {
    let dir = tempfile::tempdir().unwrap();
    let family = family();
    let (a, b) = (family.ram(2 * MIB).unwrap(), family.ram(2 * MIB).unwrap());
    for page in 0..512 {
        a.write_at(page * PAGE, &number_page(page, 0), Flags::empty()).unwrap();
        b.write_at(page * PAGE, &number_page(page, 1), Flags::empty()).unwrap();
    }
    let mut keep = Keep::open(dir.path()).unwrap();
    save(&mut keep, &[("a", &a), ("b", &b)]);
    drop(keep);
    let (_keep, devices, mut loading) = restored(dir.path(), &self::family(), &[]);
    let (first, second) = (named(&devices, "a"), named(&devices, "b"));
    first.set_own_limits(256 << 10, 0).unwrap();
    let tried = |ram: &Ram| {
        let (request, mut page) = (freestone_core::device::Request::read(0, PAGE), [0; PAGE_BYTES]);
        ram.try_io(&request, freestone_core::device::Buffer::Read(&mut page)).unwrap()
    };
    let is_there = || tried(second) == freestone_core::device::TryResult::Done;
    assert!(!is_there());
    assert_eq!(loading.run(&is_there, &mut |_, _| {}), LoadOutcome::Cancelled);
    assert!(content(first) == content(&a) && content(second) == content(&b));
    first.set_own_limits(0, 0).unwrap();
    load(&mut loading);
    assert!(content(first) == content(&a));
}

#[test]
fn loading_with_backing_device_stays_within_limit() {
    let dir = tempfile::tempdir().unwrap();
    let before = content(&numbered(dir.path(), 1024, Algorithm::Lz4));
    let backing = family().ram(16 * MIB).unwrap();
    let backing = Backing::new(Arc::new(backing), true);
    let family = Family::new(Config { mem_limit: MIB, backing: Some(backing), ..Config::default() }).unwrap();
    let (_keep, devices, mut loading) = restored(dir.path(), &family, &[]);
    load(&mut loading);
    assert!(family.stat().mem_used_total <= MIB);
    assert!(content(named(&devices, "a")) == before);
}

/// Files with each algorithm are loaded into families with other algorithms.
#[test]
fn all_algorithms_load_into_any_family() {
    for algorithm in [Algorithm::Lz4, Algorithm::Lz4hc, Algorithm::Zstd, Algorithm::Lzo, Algorithm::Store] {
        let dir = tempfile::tempdir().unwrap();
        let before = content(&numbered(dir.path(), 300, algorithm));
        for other in [Algorithm::Lz4, Algorithm::Zstd, Algorithm::Store] {
            let family = Family::new(Config { comp_algorithm: other, ..Config::default() }).unwrap();
            let (_keep, devices, mut loading) = restored(dir.path(), &family, &[]);
            assert!(content(named(&devices, "a")) == before, "{algorithm} by {other}");
            load(&mut loading);
            assert!(content(named(&devices, "a")) == before, "{algorithm} by {other}");
        }
    }
}

#[test]
fn unloaded_pages_count_as_own_changes() {
    let dir = tempfile::tempdir().unwrap();
    let base = family().ram(MIB).unwrap();
    base.write_at(0, &[5; 8192], Flags::empty()).unwrap();
    let base = Base::Snapshot(base.snapshot().unwrap());
    let Base::Snapshot(below) = &base else { return };
    let fork = family().fork(Arc::new(below.clone()), &ForkConfig::default()).unwrap();
    fork.write_at(10 * PAGE, &number_page(1, 0), Flags::empty()).unwrap();
    let mut keep = Keep::open(dir.path()).unwrap();
    save(&mut keep, &[("f", &fork)]);
    drop(keep);
    let (mut keep, devices, mut loading) = restored(dir.path(), &family(), std::slice::from_ref(&base));
    let ram = named(&devices, "f");
    assert_eq!(save(&mut keep, &borrowed(&devices)).kind, SaveKind::Unchanged, "the base is the same one");
    let look = || {
        let (mut extents, mut changes) = (Vec::new(), Vec::new());
        let mut row = |extent: Extent| {
            extents.push((extent.offset / PAGE, extent.len / PAGE, extent.kind == ExtentKind::Hole));
            true
        };
        ram.extents(0, MIB, &mut row).unwrap();
        let mut row = |change: freestone_core::device::Change| {
            changes.push((change.offset / PAGE, change.len / PAGE, change.own));
            true
        };
        ram.changes().unwrap().changes(0, MIB, &mut row).unwrap();
        (extents.into_iter().filter(|(_, _, hole)| !hole).collect::<Vec<_>>(), changes)
    };
    let (extents, changes) = look();
    assert_eq!(extents.iter().map(|(_, pages, _)| pages).sum::<u64>(), 3, "{extents:?}");
    assert!(changes.contains(&(10, 1, true)), "{changes:?}");
    let contents = || {
        let (mut contents, mut at) = (Contents::default(), 0);
        while at < MIB / PAGE {
            at = ram.contents(at, MIB / PAGE, &mut contents);
        }
        contents
    };
    assert_eq!(contents(), Contents { unloaded: 1, below: 255, ..Contents::default() });
    assert!(!ram.is_unmodified());
    load(&mut loading);
    assert_eq!(look().1, changes);
    assert_eq!(contents(), Contents { compressed: 1, below: 255, ..Contents::default() });
    // A fork of a snapshot of the restored device reads the same content.
    let above = ram.snapshot().unwrap().fork(&ForkConfig::default()).unwrap();
    assert!(content(&above) == content(&fork));
}

/// After loading, reads complete from memory without waiting, and the files are closed.
#[test]
fn files_are_closed_after_loading() {
    let dir = tempfile::tempdir().unwrap();
    numbered(dir.path(), 500, Algorithm::Lz4);
    let open = || {
        let links =
            fs::read_dir("/proc/self/fd").unwrap().filter_map(|row| fs::read_link(row.unwrap().path()).ok());
        links.filter(|to| to.starts_with(dir.path()) && to.extension().is_some()).count()
    };
    let (_keep, devices, mut loading) = restored(dir.path(), &family(), &[]);
    assert_eq!(open(), 1);
    load(&mut loading);
    assert_eq!((open(), loading.progress().0 > 0), (0, true));
    load(&mut loading);
    let ram = named(&devices, "a");
    let request = freestone_core::device::Request::read(0, 4096);
    let mut page = [0; PAGE_BYTES];
    let tried = ram.try_io(&request, freestone_core::device::Buffer::Read(&mut page));
    assert_eq!(tried, Ok(freestone_core::device::TryResult::Done));
    ram.discard(0, PAGE).unwrap();
    assert_eq!(ram.mm_stat().orig_data_size, 499 * PAGE, "what is discarded is empty again");
}

fn files_of(dir: &Path) -> Vec<std::path::PathBuf> {
    fs::read_dir(dir).unwrap().map(|row| row.unwrap().path()).collect()
}

/// Returns the CPU time of this thread, on which other programs have little influence.
fn cpu() -> std::time::Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    std::time::Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

/// Prints measurements if run with `--nocapture`. The disk has 64 MiB or `KEEP_MIB` MiB, and the
/// files are in the directory `KEEP_DIR`.
#[test]
fn restore_is_immediate_and_increment_small() {
    use std::time::Instant;
    let dir = match std::env::var_os("KEEP_DIR") {
        Some(dir) => tempfile::tempdir_in(dir).unwrap(),
        None => tempfile::tempdir().unwrap(),
    };
    let mib = std::env::var("KEEP_MIB").ok().and_then(|mib| mib.parse().ok()).unwrap_or(64);
    let pages = mib * MIB / PAGE;
    let ram = numbered(dir.path(), pages, Algorithm::Lz4);
    let mut keep = Keep::open(dir.path()).unwrap();
    let file = keep.contents().unwrap().file_bytes;
    let mut random = Random(1);
    let began = Instant::now();
    let whole = save(&mut keep, &[("a", &ram)]);
    println!("whole save: {} MiB, {:?}", whole.file_bytes >> 20, began.elapsed());
    for _ in 0..pages / 100 {
        let page = random.below(pages);
        ram.write_at(page * PAGE, &number_page(page, 1), Flags::empty()).unwrap();
    }
    let (changed, average) = (ram.unsaved_bytes().unwrap() / PAGE, ram.mm_stat().compr_data_size / pages);
    let began = Instant::now();
    let now = save(&mut keep, &[("a", &ram)]);
    let ratio = now.file_bytes as f64 / (changed * average) as f64;
    println!(
        "increment of {changed} pages: {} KiB, {ratio:.3} of their bytes, {:?}",
        now.file_bytes >> 10,
        began.elapsed()
    );
    assert!(ratio <= 1.3, "{ratio}");
    let before = number_page(pages / 2, 0);
    drop((keep, ram));
    // Measure with the files on the disk (cold), and with the files in the page cache.
    for cold in [true, false, true, false] {
        let drop_cache = || {
            for name in files_of(dir.path()).into_iter().filter(|_| cold) {
                let file = fs::File::open(name).unwrap();
                rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            }
        };
        drop_cache();
        let began = Instant::now();
        let (mut buffer, mut read) = (vec![0; MIB as usize], 0);
        for name in files_of(dir.path()) {
            let mut opened = fs::File::open(name).unwrap();
            while let n @ 1.. = std::io::Read::read(&mut opened, &mut buffer).unwrap() {
                read += n;
            }
        }
        let reading = began.elapsed();
        drop_cache();
        let (began, on_cpu) = (Instant::now(), cpu());
        let (keep, devices, mut loading) = restored(dir.path(), &family(), &[]);
        let opened = began.elapsed();
        let mut page = vec![0; PAGE_BYTES];
        named(&devices, "a").read_at(pages / 2 * PAGE, &mut page).unwrap();
        assert!(page[..] == before[..] || page[..] == number_page(pages / 2, 1)[..]);
        let (first, first_on_cpu) = (began.elapsed(), cpu().saturating_sub(on_cpu));
        assert!(first_on_cpu.as_secs() < 1, "{first_on_cpu:?}: only the index is read before that");
        let (began, on_cpu) = (Instant::now(), cpu());
        load(&mut loading);
        println!(
            "cold {cold}: open {opened:?}, first read {first:?} (CPU {first_on_cpu:?}), load {:?} (CPU {:?}), \
             reading {} MiB {reading:?}",
            began.elapsed(),
            cpu().saturating_sub(on_cpu),
            read >> 20
        );
        drop((keep, devices, loading));
    }
    assert!(file > 0);
}
