use std::time::{Duration, SystemTime};

use super::entry::ReadOutcome;
use super::*;
use crate::format::PAGE;

fn soon() -> CallLimits<'static> {
    CallLimits::within(Duration::from_secs(20))
}

fn name(number: u32) -> Name {
    Name(std::array::from_fn(|at| if at < 4 { number.to_le_bytes()[at] } else { 9 }))
}

fn cache() -> (tempfile::TempDir, Arc<Cache>) {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path().join("cache"), BYTES_MIN).unwrap();
    (dir, cache)
}

fn pages(count: usize, seed: usize) -> Vec<u8> {
    (0..count * PAGE).map(|at| (at / 7 + at / PAGE * 31 + seed) as u8).collect()
}

#[test]
fn cached_pages_are_read_independently() {
    let (_dir, cache) = cache();
    let pages = pages(20, 1);
    assert!(cache.find(&name(1)).is_none());
    cache.insert(&name(1), &pages, soon()).unwrap();
    let entry = cache.find(&name(1)).unwrap();
    assert_eq!(entry.pages(), 20);
    let mut out = vec![1; 3 * PAGE];
    assert_eq!(entry.read(4, &mut out, true), ReadOutcome::Done);
    assert_eq!(out, pages[4 * PAGE..7 * PAGE]);
    // The two stored pages are in the kernel's page cache now, so no wait is needed. The page after the end
    // is zeroes.
    assert_eq!(entry.read(18, &mut out, false), ReadOutcome::Done);
    assert_eq!((&out[..2 * PAGE], &out[2 * PAGE..]), (&pages[18 * PAGE..], &[0; PAGE][..]));
    assert_eq!(entry.read(100, &mut out, false), ReadOutcome::Done);
    assert!(out.iter().all(|byte| *byte == 0));
    assert!(entry.was_used() && !entry.was_used());
    // A file under the name of another chunk is refused and deleted.
    fs::create_dir_all(cache.path(CHUNKS, &name(2)).parent().unwrap()).unwrap();
    fs::rename(cache.path(CHUNKS, &name(1)), cache.path(CHUNKS, &name(2))).unwrap();
    assert!(cache.find(&name(2)).is_none() && !cache.path(CHUNKS, &name(2)).exists());
    cache.insert_meta(&name(3), b"map", soon()).unwrap();
    assert_eq!(cache.get_meta(&name(3)).unwrap(), b"map");
}

#[test]
fn damaged_cache_file_is_not_served() {
    let (_dir, cache) = cache();
    let pages = pages(128, 3);
    let entry = cache.insert(&name(1), &pages, soon()).unwrap();
    let path = cache.path(CHUNKS, &name(1));
    let file = File::options().write(true).open(&path).unwrap();
    let mut out = vec![0; PAGE];
    std::os::unix::fs::FileExt::write_all_at(&file, b"x", (5 * PAGE + 5) as u64).unwrap();
    assert_eq!(entry.read(5, &mut out, true), ReadOutcome::Damaged);
    assert_eq!(entry.read(6, &mut out, true), ReadOutcome::Done);
    file.set_len((100 * PAGE) as u64).unwrap();
    assert_eq!(entry.read(110, &mut out, true), ReadOutcome::Damaged);
    // Damage the checksums in the trailer.
    file.set_len((129 * PAGE) as u64).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"x", (128 * PAGE + 60) as u64).unwrap();
    assert!(cache.find(&name(1)).is_none() && !path.exists());
    file.set_len(0).unwrap();
    assert_eq!(entry.read(0, &mut out, true), ReadOutcome::Damaged);
}

#[test]
fn eviction_removes_least_recently_used_files() {
    let (_dir, cache) = cache();
    let pages = pages(128, 3);
    let bytes = || {
        let mut sum = 0;
        for dir in fs::read_dir(cache.dir.join(CHUNKS)).unwrap() {
            for file in fs::read_dir(dir.unwrap().path()).unwrap() {
                sum += file.unwrap().metadata().unwrap().len();
            }
        }
        sum
    };
    let per_file = (pages.len() + PAGE) as u64;
    let fits = (BYTES_MIN / per_file) as u32;
    for number in 0..3 * fits {
        let entry = cache.insert(&name(number), &pages, soon()).unwrap();
        // Each file is younger than the files before, except for file 0, which is always in use.
        let age = if number == 0 { 0 } else { 100_000 - number };
        let at = SystemTime::now() - Duration::from_secs(age.into());
        let file = File::options().write(true).open(cache.path(CHUNKS, &name(number))).unwrap();
        file.set_modified(at).unwrap();
        drop(entry);
        assert!(bytes() <= BYTES_MIN, "{number}");
    }
    assert!(cache.find(&name(0)).is_some());
    assert!(cache.find(&name(1)).is_none());
    assert!(cache.find(&name(3 * fits - 1)).is_some());
    assert!(bytes() > BYTES_MIN / 2);
}

#[test]
fn concurrent_adds_stay_within_limit() {
    let (dir, first) = cache();
    let second = Cache::open(dir.path().join("cache"), BYTES_MIN).unwrap();
    let pages = pages(128, 3);
    std::thread::scope(|scope| {
        for thread in 0..4_u32 {
            let (cache, pages) = (if thread % 2 == 0 { &first } else { &second }, &pages);
            scope.spawn(move || {
                for number in 0..60 {
                    cache.insert(&name(thread * 100 + number), pages, soon()).unwrap();
                }
            });
        }
    });
    let usage: u64 = fs::read_to_string(first.dir.join("usage")).unwrap().trim().parse().unwrap();
    assert!(usage <= BYTES_MIN && usage > BYTES_MIN / 2, "{usage}");
    assert_eq!(fs::read_dir(first.dir.join(NEW)).unwrap().count(), 0);
    // A wrong value in the `usage` file is corrected when the files are counted again.
    for wrong in ["x", "18446744073709551615", ""] {
        fs::write(first.dir.join("usage"), wrong).unwrap();
        first.insert(&name(1000), &pages, soon()).unwrap();
        let again: u64 = fs::read_to_string(first.dir.join("usage")).unwrap().trim().parse().unwrap();
        assert!(again <= BYTES_MIN, "{wrong}");
    }
}

#[test]
fn fetch_lock_is_exclusive_on_host() {
    let (dir, first) = cache();
    let second = Cache::open(dir.path().join("cache"), BYTES_MIN).unwrap();
    let held = first.lock_fetch(&name(1), soon());
    assert!(held.is_some());
    // The lock on one object does not lock other objects.
    assert!(second.lock_fetch(&name(2), soon()).is_some());
    assert!(second.lock_fetch(&name(1), CallLimits::within(Duration::from_millis(60))).is_none());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| second.lock_fetch(&name(1), soon()));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!other.is_finished());
        drop(held);
        assert!(other.join().unwrap().is_some());
    });
}

#[test]
fn invalid_cache_settings_are_refused() {
    let (dir, _cache) = cache();
    assert!(Cache::open(dir.path().join("cache"), BYTES_MIN - 1).is_err());
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(Cache::open(file.join("cache"), BYTES_MIN).is_err());
}
