//! Tests of reads: the objects that they fetch, and the use of the cache.

use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_core::device::{
    Blocking as _, Buffer, Device, Error, ExtentKind, IoBuf, Op, Request, TryResult,
};
use freestone_store::cache::{BYTES_MIN, Cache};
use freestone_store::format::{CHUNK_BYTES, PAGE};
use freestone_store::image::Image;
use freestone_testkit::objects::{Effect, Method};
use freestone_testkit::{DeferPolicy, DeferringDevice, Rng, conformance};

use crate::kit::*;

#[test]
fn image_passes_device_conformance() {
    let (_memory, store) = store();
    let (_dir, cache) = cache();
    let device = mixed(1500, 1);
    push_plain(&store, &device, "v1").unwrap();
    change(&device, 100, 2);
    push_plain(&store, &device, "v1").unwrap();
    for cache in [None, Some(&cache)] {
        let options = conformance::Options { rounds: 60, thread_rounds: 60, ..Default::default() };
        let make = || Arc::new(image(&store, cache, "v1")) as Arc<dyn Device>;
        conformance::check("image", &make, options);
        let make =
            || Arc::new(DeferringDevice::new(make(), DeferPolicy::Sometimes(50), 3)) as Arc<dyn Device>;
        conformance::check("image, deferred", &make, options);
    }
}

#[test]
fn chunk_is_fetched_once_per_host() {
    let (memory, store) = store();
    let (dir, cache) = cache();
    let device = mixed(2000, 1);
    push_plain(&store, &device, "v1").unwrap();
    let want = content(&device);
    memory.set_fault_rule(|call| match call.method {
        Method::Get => Effect::Delay(Duration::from_millis(3)),
        _ => Effect::Pass,
    });
    // Several servers on one host share a cache, and each has several readers.
    let images: Vec<Image> = (0..4)
        .map(|_| {
            let cache = Cache::open(dir.path().join("cache"), cache.limit()).unwrap();
            image(&open(&memory), Some(&cache), "v1")
        })
        .collect();
    std::thread::scope(|scope| {
        for (seed, image) in (0..16).zip(images.iter().cycle()) {
            let want = &want;
            scope.spawn(move || {
                let mut rng = Rng::new(seed);
                for _ in 0..300 {
                    let len = 512 * (1 + rng.below(40)) as usize;
                    let at = 512 * rng.below(((want.len() - len) / 512) as u64) as usize;
                    let mut out = vec![0; len];
                    image.read_at(at as u64, &mut out).unwrap();
                    assert!(out == want[at..at + len]);
                }
            });
        }
    });
    let gets = memory.gets();
    let chunks: Vec<_> = gets.iter().filter(|(key, _)| key.starts_with("chunks/")).collect();
    assert!(chunks.len() >= 15 && chunks.iter().all(|(_, count)| **count == 1), "{chunks:?}");
}

#[test]
fn manifest_and_maps_are_fetched_once_per_host() {
    let (memory, store) = store();
    let (dir, cache) = cache();
    let device = mixed(300, 1);
    push_plain(&store, &device, "v1").unwrap();
    change(&device, 20, 2);
    let name = push_plain(&store, &device, "v1").unwrap().manifest;
    memory.set_fault_rule(|call| match call.method {
        Method::Get => Effect::Delay(Duration::from_millis(30)),
        _ => Effect::Pass,
    });
    let before = memory.gets();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let cache = Cache::open(dir.path().join("cache"), cache.limit()).unwrap();
                let image = Image::open(Arc::clone(&store), Some(cache), name, CONFIG, soon()).unwrap();
                assert!(content(&image) == content(&device));
            });
        }
    });
    let more = |(key, count): (&String, &u64)| count - before.get(key).copied().unwrap_or(0);
    let gets = memory.gets();
    let of =
        |dir: &str| -> Vec<u64> { gets.iter().filter(|(key, _)| key.starts_with(dir)).map(more).collect() };
    assert_eq!(of("manifests/").iter().sum::<u64>(), 1, "{gets:?}");
    // The readers fetch one page map of the first image, and one page map of the changes.
    assert_eq!(of("maps/").iter().filter(|count| **count > 0).collect::<Vec<_>>(), [&1, &1], "{gets:?}");
}

#[test]
fn cached_image_needs_no_store() {
    let (memory, store) = store();
    let (_dir, cache) = cache();
    let device = mixed(2000, 1);
    let name = push_plain(&store, &device, "v1").unwrap().manifest;
    image(&store, Some(&cache), "v1").pull(&|_, _| {}, soon()).unwrap();
    memory.set_fault_rule(|_| Effect::Hang);
    let image = Image::open(Arc::clone(&store), Some(Arc::clone(&cache)), name, CONFIG, soon()).unwrap();
    assert!(content(&image) == content(&device));
    assert_eq!(image.stat().fetched, 0);
    // Cached chunks whose data is in the kernel's page cache are read inline.
    let mut out = vec![0; 64 << 10];
    let request = Request::read(1 << 20, out.len() as u64);
    assert_eq!(image.try_io(&request, Buffer::Read(&mut out)), Ok(TryResult::Done));
    assert!(out == content(&device)[1 << 20..(1 << 20) + (64 << 10)]);
}

#[test]
fn cached_data_is_served_while_store_hangs() {
    let (memory, store) = store();
    let (_dir, cache) = cache();
    let device = mixed(40 * 128, 1);
    push_plain(&store, &device, "v1").unwrap();
    let image = image(&store, Some(&cache), "v1");
    let mut out = vec![0; PAGE];
    image.read_at(0, &mut out).unwrap();
    memory.set_fault_rule(|_| Effect::Hang);
    let (tx, rx) = std::sync::mpsc::channel();
    let wait = || {
        for chunk in 1..40_u64 {
            let done = tx.clone();
            let done = freestone_core::device::Completion::new(move |outcome, _| done.send(outcome).unwrap());
            let request = Request::read(chunk * CHUNK_BYTES as u64, PAGE as u64);
            image.submit(request, IoBuf::zeroed(PAGE).unwrap(), done);
        }
    };
    wait();
    std::thread::sleep(Duration::from_millis(50));
    let since = Instant::now();
    for _ in 0..100 {
        image.read_at(8192, &mut out).unwrap();
    }
    assert!(since.elapsed() < Duration::from_secs(5));
    // Waiting requests fail when the image is dropped. Reads of zeroes succeed without the object store.
    drop(image);
    drop(tx);
    let outcomes: Vec<_> = rx.iter().collect();
    assert_eq!(outcomes.len(), 39);
    assert!(outcomes.contains(&Err(Error::Gone)), "{outcomes:?}");
}

#[test]
fn read_without_cache_fetches_one_unit() {
    let (memory, store) = store();
    let device = mixed(2000, 1);
    push_plain(&store, &device, "v1").unwrap();
    let image = image(&store, None, "v1");
    let mut out = vec![0; PAGE];
    image.read_at(5 * PAGE as u64, &mut out).unwrap();
    let before = store.requests();
    image.read_at(5 * PAGE as u64, &mut out).unwrap();
    let after = store.requests();
    assert_eq!(after.gets - before.gets, 2);
    assert!(after.read_bytes - before.read_bytes <= 66 << 10, "{before:?} {after:?}");
    assert_eq!(image.stat().fetched_bytes, 2 * (64 << 10));
    let _ = memory;
}

#[test]
fn damaged_cache_is_refilled() {
    let (_memory, store) = store();
    let (dir, cache) = cache();
    let device = mixed(1000, 1);
    push_plain(&store, &device, "v1").unwrap();
    let image = image(&store, Some(&cache), "v1");
    let want = content(&device);
    assert!(content(&image) == want);
    let chunks = dir.path().join("cache/chunks");
    let files = || -> Vec<_> {
        let dirs = std::fs::read_dir(&chunks).unwrap().map(|dir| dir.unwrap().path());
        dirs.flat_map(|dir| std::fs::read_dir(dir).unwrap().map(|file| file.unwrap().path())).collect()
    };
    assert_eq!(files().len(), 8);
    // Damages one page of each cache file.
    for (number, path) in files().into_iter().enumerate() {
        let file = std::fs::File::options().write(true).open(path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"damage", ((1 + number) * PAGE) as u64).unwrap();
    }
    assert!(content(&image) == want);
    for path in files() {
        std::fs::File::options().write(true).open(path).unwrap().set_len(5000).unwrap();
    }
    assert!(content(&image) == want);
    for path in files() {
        std::fs::remove_file(path).unwrap();
    }
    // Removed cache files that the image holds open still work.
    assert!(content(&image) == want);
    let before = store.requests().gets;
    assert!(content(&self::image(&store, Some(&cache), "v1")) == want);
    assert!(store.requests().gets > before);
}

#[test]
fn failing_cache_is_bypassed() {
    let (_memory, store) = store();
    let (dir, cache) = cache();
    let device = mixed(1000, 1);
    push_plain(&store, &device, "v1").unwrap();
    let image = image(&store, Some(&cache), "v1");
    let new = dir.path().join("cache/new");
    std::fs::remove_dir_all(&new).unwrap();
    assert!(content(&image) == content(&device));
    let pulled = image.pull(&|_, _| {}, soon()).unwrap_err();
    assert!(pulled.to_string().contains("No such file or directory"), "{pulled}");
    // As soon as the directory `new` of the cache exists again, a pull succeeds.
    std::fs::create_dir(&new).unwrap();
    image.pull(&|_, _| {}, soon()).unwrap();
}

#[test]
fn small_cache_serves_larger_image() {
    let (_memory, store) = store();
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path(), BYTES_MIN).unwrap();
    let device = mixed(200 * 128, 1);
    push_plain(&store, &device, "v1").unwrap();
    let image = image(&store, Some(&cache), "v1");
    let want = content(&device);
    for _ in 0..2 {
        assert!(content(&image) == want);
    }
    let usage: u64 = std::fs::read_to_string(dir.path().join("usage")).unwrap().trim().parse().unwrap();
    assert!(usage <= BYTES_MIN);
    assert!(image.pull(&|_, _| {}, soon()).unwrap_err().to_string().contains("at most"));
}

#[test]
fn sequential_reads_are_prefetched() {
    let (memory, store) = store();
    let (_dir, cache) = cache();
    let device = mixed(60 * 128, 1);
    push_plain(&store, &device, "v1").unwrap();
    memory.set_fault_rule(|call| match call.method {
        Method::Get => Effect::Delay(Duration::from_millis(10)),
        _ => Effect::Pass,
    });
    let image = image(&store, Some(&cache), "v1");
    assert!(content(&image) == content(&device));
    let stat = image.stat();
    assert!(stat.prefetched > 20 && stat.failed == 0, "{stat:?}");
    // Random reads are not prefetched, nor are two adjacent ones.
    let (_dir, cache) = self::cache();
    let image = self::image(&store, Some(&cache), "v1");
    let mut out = vec![0; PAGE];
    let mut read = |chunk: u64| image.read_at(chunk * CHUNK_BYTES as u64, &mut out).unwrap();
    [30, 4, 5, 50, 12, 31, 41, 9].into_iter().for_each(&mut read);
    std::thread::sleep(Duration::from_millis(30));
    let stat = image.stat();
    assert!(stat.fetched <= 8 && stat.prefetched == 0, "{stat:?}");
    // The third sequential read prefetches one chunk. The read of that chunk hits the cache, so nothing more
    // is prefetched.
    read(6);
    let since = Instant::now();
    while image.stat().prefetched == 0 && since.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(1));
    }
    read(7);
    assert_eq!(image.stat().prefetched, 1);
}

#[test]
fn image_extents_and_refused_operations() {
    let (_memory, store) = store();
    let device = mixed(1000, 1);
    push_plain(&store, &device, "v1").unwrap();
    let image = image(&store, None, "v1");
    let mut holes = 0;
    let mut at = 0;
    while at < image.geometry().size {
        at += image
            .extents(at, image.geometry().size - at, &mut |extent| {
                if extent.kind == ExtentKind::Hole {
                    holes += extent.len;
                    let mut out = vec![1; extent.len as usize];
                    device.read_at(extent.offset, &mut out).unwrap();
                    assert!(out.iter().all(|byte| *byte == 0));
                }
                true
            })
            .unwrap();
    }
    let _ = holes;
    assert_eq!(image.extents(0, 0, &mut |_| true), Err(Error::OutOfRange));
    assert_eq!(image.extents(image.geometry().size, 512, &mut |_| true), Err(Error::OutOfRange));
    assert_eq!(image.write_at(0, &[0; 512], freestone_core::device::Flags::empty()), Err(Error::ReadOnly));
    assert_eq!(image.run(Request::new(Op::Discard, 0, 4096)), Err(Error::ReadOnly));
    assert_eq!(image.flush(), Ok(()));
}

#[test]
fn trace_is_prefetched() {
    let (memory, store) = store();
    let device = mixed(60 * 128, 1);
    let name = push_plain(&store, &device, "v1").unwrap().manifest;
    let order = [30_u64, 4, 50, 12, 41, 9, 22, 57];
    let mut out = vec![0; PAGE];
    let open = |cache: &Arc<Cache>, prefetch| {
        let config = freestone_store::image::Config { prefetch, ..CONFIG };
        Image::open(Arc::clone(&store), Some(Arc::clone(cache)), name, config, soon()).unwrap()
    };
    let (_dir, cache) = cache();
    let first = open(&cache, true);
    for chunk in order {
        first.read_at(chunk * CHUNK_BYTES as u64, &mut out).unwrap();
    }
    assert_eq!(first.stat().prefetched, 0);
    assert_eq!(first.push_trace(soon()).unwrap(), order.len());
    // With another, empty cache, the chunks of the trace are prefetched.
    let (_dir, cache) = self::cache();
    let second = open(&cache, true);
    let since = Instant::now();
    while second.stat().prefetched < order.len() as u64 {
        assert!(since.elapsed() < Duration::from_secs(20), "{:?}", second.stat());
        std::thread::sleep(Duration::from_millis(5));
    }
    memory.set_fault_rule(|call| {
        if call.method == Method::Get && call.key.starts_with("chunks/") {
            Effect::Hang
        } else {
            Effect::Pass
        }
    });
    for chunk in order {
        second.read_at(chunk * CHUNK_BYTES as u64, &mut out).unwrap();
    }
    assert_eq!(second.stat().fetched, order.len() as u64);
    // The second reader records the same trace.
    assert_eq!(second.push_trace(soon()).unwrap(), order.len());
    assert_eq!(store.trace(&name, soon()).unwrap().len(), order.len());
    // A damaged trace is ignored.
    memory.heal();
    for change in [
        (|bytes: &mut Vec<u8>| bytes[70] ^= 1) as fn(&mut Vec<u8>),
        |bytes| bytes.truncate(50),
        |bytes| bytes.clear(),
    ] {
        memory.tamper(&format!("traces/{name}"), |bytes| {
            change(bytes);
            true
        });
        assert!(store.trace(&name, soon()).is_err());
        let (_dir, cache) = self::cache();
        assert!(content(&open(&cache, true)) == content(&device));
    }
    // Another image has no trace.
    store.set_trace(&freestone_store::format::name::Name([7; 32]), &[], soon()).unwrap();
    assert_eq!(store.trace(&freestone_store::format::name::Name([8; 32]), soon()), Ok(Vec::new()));
}
