//! Tests with object stores that fail, return wrong data, or hang.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use freestone_core::device::{Blocking as _, Error as DeviceError};
use freestone_store::format::PAGE;
use freestone_store::image::{Config, Image};
use freestone_store::objects::{CallLimits, Fault};
use freestone_store::push::{Source, push};
use freestone_store::store::{Error, Store};
use freestone_testkit::objects::{Effect, MemoryStore, Method};

use crate::kit::*;

fn busy() -> Fault {
    Fault::Transient("503: slow down".into())
}

#[test]
fn transient_faults_are_retried() {
    let (memory, store) = store();
    let device = mixed(400, 1);
    memory.set_fault_rule(|call| match call.number % 4 {
        1 => Effect::Fail(busy()),
        2 => Effect::FailAfter(busy()),
        _ => Effect::Pass,
    });
    push_plain(&store, &device, "v1").unwrap();
    change(&device, 20, 2);
    let pushed = push_plain(&store, &device, "v1").unwrap();
    assert_eq!((pushed.generation, pushed.changed_pages), (2, 20));
    // Objects that arrive corrupted once are read again, too.
    memory.set_fault_rule(|call| match call.number % 12 {
        1 => Effect::Flip(call.number as usize * 7919),
        5 => Effect::Truncate(call.number as usize * 13 % 3000),
        9 => Effect::Fail(busy()),
        _ => Effect::Pass,
    });
    let (_dir, cache) = cache();
    let name = pushed.manifest;
    for cache in [None, Some(cache)] {
        let image = Image::open(Arc::clone(&store), cache, name, CONFIG, soon()).unwrap();
        assert!(content(&image) == content(&device));
        assert_eq!(image.stat().failed, 0);
    }
}

#[test]
fn damaged_object_is_an_error() {
    let (memory, store) = store();
    let device = mixed(300, 1);
    let name = push_plain(&store, &device, "v1").unwrap().manifest;
    let want = content(&device);
    let config = Config { timeout: Duration::from_millis(150), ..CONFIG };
    let keys: Vec<String> =
        memory.object_sizes("chunks/").into_keys().chain(memory.object_sizes("maps/").into_keys()).collect();
    for key in keys {
        for change in [
            (|bytes: &mut Vec<u8>| bytes[40] ^= 1) as fn(&mut Vec<u8>),
            |bytes| *bytes.last_mut().unwrap() ^= 1,
            |bytes| bytes.truncate(100),
            |bytes| bytes.clear(),
            |bytes| bytes.extend([0; 100]),
            |bytes| *bytes = vec![0xff; 3 << 20],
        ] {
            let mut was = Vec::new();
            memory.tamper(&key, |bytes| {
                was.clone_from(bytes);
                change(bytes);
                true
            });
            let image = Image::open(Arc::clone(&store), None, name, config, soon()).unwrap();
            let mut failed = 0;
            for (number, want) in want.chunks(512 << 10).enumerate() {
                let mut out = vec![0; want.len()];
                match image.read_at((number * (512 << 10)) as u64, &mut out) {
                    Ok(()) => assert!(out == want),
                    Err(error) => {
                        assert_eq!(error, DeviceError::Media);
                        failed += 1;
                    }
                }
            }
            // A damaged chunk must fail one read. Damage to page hashes goes unnoticed, as these reads do not
            // use them.
            if key.starts_with("chunks/") {
                assert_eq!(failed, 1, "{key}");
                let why = image.stat().last_error.unwrap();
                assert!(why.starts_with(&key), "{why}");
            }
            memory.tamper(&key, |bytes| {
                *bytes = was;
                true
            });
        }
    }
    // Damage to a manifest, a tag, or the description of the image store is detected, too.
    for key in [format!("manifests/{name}"), "tags/v1".into(), "freestone.json".into()] {
        memory.tamper(&key, |bytes| {
            bytes[7] ^= 0x20;
            true
        });
    }
    let soon = || CallLimits::within(Duration::from_millis(300));
    assert!(Image::open(Arc::clone(&store), None, name, config, soon()).is_err());
    assert!(matches!(store.tag("v1", soon()), Err(Error::Damaged(..))));
    let objects = Arc::clone(&memory) as Arc<dyn freestone_store::objects::Objects>;
    assert!(Store::open(objects, None, soon()).is_err());
}

#[test]
fn hanging_store_fails_reads_at_timeout() {
    let (memory, store) = store();
    let device = mixed(64 * 128, 1);
    let name = push_plain(&store, &device, "v1").unwrap().manifest;
    let config = Config { timeout: Duration::from_millis(300), ..CONFIG };
    let image = Arc::new(Image::open(Arc::clone(&store), None, name, config, soon()).unwrap());
    let mut out = vec![0; PAGE];
    image.read_at(0, &mut out).unwrap();
    memory.set_fault_rule(|_| Effect::Hang);
    let since = Instant::now();
    std::thread::scope(|scope| {
        for number in 0..200_u64 {
            let image = &image;
            scope.spawn(move || {
                let mut out = vec![0; PAGE];
                let page = number * 40 + 20;
                assert_eq!(image.read_at(page * PAGE as u64, &mut out), Err(DeviceError::Media), "{page}");
            });
        }
    });
    assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
    assert!(image.stat().last_error.unwrap().contains("no answer in time"));
    // The image recovers when the object store responds again.
    memory.heal();
    assert!(content(&*image) == content(&device));
}

#[test]
fn emptied_bucket_fails_reads() {
    let (memory, store) = store();
    let (_dir, cache) = cache();
    let device = mixed(1000, 1);
    push_plain(&store, &device, "v1").unwrap();
    let image = image(&store, Some(&cache), "v1");
    let mut out = vec![0; PAGE];
    image.read_at(0, &mut out).unwrap();
    memory.remove_all();
    image.read_at(4096, &mut out).unwrap();
    assert_eq!(image.read_at(300 * PAGE as u64, &mut out), Err(DeviceError::Media));
    assert!(image.stat().last_error.unwrap().contains("no such object"));
    assert!(matches!(store.tag("v1", soon()), Ok(None)));
    // Opening the emptied bucket creates a new image store, and a push makes the image complete again.
    let again = open(&memory);
    push_plain(&again, &device, "v1").unwrap();
    assert!(content(&self::image(&again, Some(&cache), "v1")) == content(&device));
}

#[test]
fn failed_push_leaves_tag_unchanged() {
    let (memory, store) = store();
    let device = mixed(1000, 1);
    push_plain(&store, &device, "v1").unwrap();
    let tag = store.tag("v1", soon()).unwrap();
    change(&device, 400, 2);
    for fault in [Fault::Denied("QuotaExceeded".into()), Fault::Other("507".into())] {
        let said = fault.to_string();
        memory.set_fault_rule(move |call| match call.method {
            Method::Put if call.key.starts_with("chunks/") => Effect::Fail(fault.clone()),
            _ => Effect::Pass,
        });
        let error = push_plain(&store, &device, "v1").unwrap_err();
        assert!(error.to_string().contains(&said), "{error}");
        memory.heal();
        assert_eq!(store.tag("v1", soon()).unwrap(), tag);
    }
    push_plain(&store, &device, "v1").unwrap();
    assert!(content(&image(&store, None, "v1")) == content(&device));
}

/// A push that is killed at any request leaves the tag at the old or the new image. The next push completes
/// the new image and sends only missing chunks.
#[test]
fn interrupted_push_shows_old_or_new_image() {
    let old = mixed(1000, 1);
    let new = mixed(1000, 1);
    change(&new, 300, 2);
    let whole = {
        let (memory, store) = store();
        push_plain(&store, &old, "v1").unwrap();
        push_plain(&store, &new, "v1").unwrap();
        memory.object_sizes("chunks/").len()
    };
    let mut at = 0;
    loop {
        let (memory, store) = store();
        push_plain(&store, &old, "v1").unwrap();
        let first = memory.calls();
        let ended = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&ended);
        memory.set_fault_rule(move |call| {
            if call.number < first + at {
                return Effect::Pass;
            }
            // The object store may have executed the first request that was killed.
            if count.fetch_add(1, Ordering::SeqCst) == 0 && at % 2 == 0 {
                Effect::FailAfter(Fault::Other("killed".into()))
            } else {
                Effect::Fail(Fault::Other("killed".into()))
            }
        });
        let outcome = push_plain(&store, &new, "v1");
        memory.heal();
        let shown = content(&image(&store, None, "v1"));
        let is_new = shown == content(&new);
        assert!(is_new || shown == content(&old), "{at}");
        if ended.load(Ordering::SeqCst) == 0 {
            outcome.unwrap();
            assert!(is_new && at > 10, "{at}");
            break;
        }
        if outcome.is_ok() {
            assert!(is_new, "{at}");
        }
        let there = memory.object_sizes("chunks/").len();
        let again = push_plain(&store, &new, "v1").unwrap();
        assert!(content(&image(&store, None, "v1")) == content(&new), "{at}");
        assert_eq!(memory.object_sizes("chunks/").len(), whole);
        assert_eq!(again.sent.0, (whole - there) as u64, "{at}: {again:?}");
        at += 1;
    }
}

#[test]
fn cancelled_push_ends_promptly() {
    let (memory, store) = store();
    let device = mixed(3000, 1);
    memory.set_fault_rule(|call| if call.key.starts_with("chunks/") { Effect::Hang } else { Effect::Pass });
    let began = Instant::now();
    let is_cancelled = || began.elapsed() > Duration::from_millis(100);
    let limits = CallLimits { is_cancelled: &is_cancelled, ..soon() };
    let source = Source { device: &device, label: "test", base_image: None };
    let outcome = push(&store, source, options("v1"), &|_, _| {}, limits);
    assert_eq!(outcome, Err(Error::Cancelled));
    assert!(began.elapsed() < Duration::from_secs(5));
    assert_eq!(store.tag("v1", soon()), Ok(None));
}

#[test]
fn lost_response_to_tag_write_is_resolved() {
    for effect in [Effect::FailAfter(busy()), Effect::Fail(busy()), Effect::FailAfter(Fault::TimedOut)] {
        let (memory, store) = store();
        let tries = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&tries);
        memory.set_fault_rule(move |call| {
            if call.method == Method::Put
                && call.key == "tags/v1"
                && counted.fetch_add(1, Ordering::SeqCst) < 2
            {
                effect.clone()
            } else {
                Effect::Pass
            }
        });
        let pushed = push_plain(&store, &mixed(300, 1), "v1").unwrap();
        assert_eq!(store.tag("v1", soon()).unwrap().unwrap().tag.manifest, pushed.manifest);
        assert_eq!(store.tag("v1", soon()).unwrap().unwrap().tag.generation, 1);
    }
}

#[test]
fn concurrent_creation_makes_one_store() {
    for _ in 0..10 {
        let memory = Arc::new(MemoryStore::default());
        let stores: Vec<Arc<Store>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| open(&memory))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(stores.iter().all(|store| store.domain().id == stores[0].domain().id));
    }
}
