//! Tests of the objects that a push sends, and of reads of the pushed image.

use std::sync::Arc;
use std::time::Duration;

use freestone_core::device::{Blocking as _, Flags};
use freestone_store::format::domain::{DomainError, GRACE, Secret};
use freestone_store::format::tag::Tag;
use freestone_store::format::{CHUNK_PAGES, PAGE};
use freestone_store::objects::{Directory, Objects, WriteCondition};
use freestone_store::push::{Layer, Source, push};
use freestone_store::store::{CreateOptions, Error, Store};
use freestone_testkit::Model;
use freestone_testkit::objects::{MemoryStore, Method};

use crate::kit::*;

#[test]
fn pushed_image_reads_back() {
    let (memory, store) = store();
    let device = mixed(1000, 1);
    let pushed = push_plain(&store, &device, "v1").unwrap();
    assert_eq!((pushed.generation, pushed.is_new), (1, true));
    let (_dir, cache) = cache();
    for cache in [None, Some(&cache)] {
        let image = image(&store, cache, "v1");
        assert!(content(&image) == content(&device));
    }
    // The 1000 pages are stored in 8 chunks.
    assert_eq!(memory.object_sizes("chunks/").len(), 8);
    assert_eq!(memory.object_sizes("tags/").len(), 1);
    assert!(memory.object_sizes("clocks/").is_empty());
}

#[test]
fn tag_with_largest_generation_is_not_set() {
    let (memory, store) = store();
    let device = mixed(100, 1);
    let manifest = push_plain(&store, &device, "v1").unwrap().manifest;
    let last = Tag::new(store.domain(), "v1", manifest, u64::MAX, 0).bytes();
    memory.put("tags/v1", &last, WriteCondition::Always, soon()).unwrap();
    change(&device, 10, 2);
    let before = memory.count(Method::Put);
    let error = push_plain(&store, &device, "v1").unwrap_err();
    assert!(matches!(error, Error::Damaged(..)), "{error}");
    // The failed push wrote only a clock object.
    assert_eq!(memory.count(Method::Put), before + 1);
    store.remove_tag("v1", soon()).unwrap();
    assert_eq!(push_plain(&store, &device, "v1").unwrap().generation, 1);
}

#[test]
fn push_of_same_content_changes_nothing() {
    let (memory, store) = store();
    let device = mixed(1000, 1);
    let first = push_plain(&store, &device, "v1").unwrap();
    let before = memory.object_sizes("");
    let again = push_plain(&store, &device, "v1").unwrap();
    assert_eq!((again.manifest, again.generation, again.is_new), (first.manifest, 1, false));
    assert_eq!((again.sent, again.changed_pages), ((0, 0), 0));
    assert_eq!(memory.object_sizes(""), before);
    // A push to another tag reuses all chunks.
    let other = push_plain(&store, &device, "v2").unwrap();
    assert_eq!((other.sent.0, other.reused), (0, 8));
}

#[test]
fn changed_pages_are_packed() {
    let (memory, store) = store();
    let device = mixed(8000, 1);
    push_plain(&store, &device, "v1").unwrap();
    let whole: u64 = memory.object_sizes("chunks/").values().sum();
    let changed = change(&device, 80, 2);
    let pushed = push_plain(&store, &device, "v1").unwrap();
    assert_eq!((pushed.generation, pushed.changed_pages), (2, changed as u64));
    // Noise does not compress: the push sends 80 pages in one chunk, and little else.
    let bytes = (changed * PAGE) as u64;
    assert_eq!(pushed.sent.0, 1);
    assert!(pushed.sent.1 < bytes * 101 / 100, "{:?}", pushed.sent);
    assert_eq!(memory.object_sizes("chunks/").values().sum::<u64>(), whole + pushed.sent.1);
    let (_dir, cache) = cache();
    assert!(content(&image(&store, Some(&cache), "v1")) == content(&device));
}

#[test]
fn long_map_chain_is_merged() {
    let (_memory, store) = store();
    let (_dir, cache) = cache();
    let device = mixed(4000, 1);
    push_plain(&store, &device, "v1").unwrap();
    let mut depths = Vec::new();
    for round in 0..20 {
        change(&device, 20, 100 + round);
        let zeroes = 4096 * round;
        device.write_zeroes(zeroes * 3, 8192, Flags::empty()).unwrap();
        let pushed = push_plain(&store, &device, "v1").unwrap();
        assert!(pushed.changed_pages <= 22);
        let image = image(&store, Some(&cache), "v1");
        depths.push(image.manifest().depth());
        assert!(content(&image) == content(&device), "{round}");
    }
    // A full page map is followed by seven deltas, then by one merged delta.
    assert_eq!(depths[..10], [2, 3, 4, 5, 6, 7, 8, 2, 3, 4]);
    // If most pages changed, the push stores the whole segment again, but sends no unchanged chunks.
    change(&device, 2500, 7);
    let pushed = push_plain(&store, &device, "v1").unwrap();
    assert_eq!(image(&store, Some(&cache), "v1").manifest().depth(), 1);
    assert!(pushed.changed_pages > 2500);
    assert!(content(&image(&store, Some(&cache), "v1")) == content(&device));
}

#[test]
fn image_size_may_change_to_any_sectors() {
    let (_memory, store) = store();
    let (_dir, cache) = cache();
    for (round, sectors) in [8000, 8007, 1, 4000, 8 * 128, 8 * 128 + 1, 20_000].into_iter().enumerate() {
        let device = Model::new(sectors * 512, 512);
        let mut rng = freestone_testkit::Rng::new(9);
        let mut sector = [0; 512];
        for number in 0..sectors {
            rng.fill(&mut sector);
            device.write_at((number * 512) as u64, &sector, Flags::empty()).unwrap();
        }
        push_plain(&store, &device, "v1").unwrap();
        let image = image(&store, Some(&cache), "v1");
        assert_eq!(image.manifest().size, (sectors * 512) as u64, "{round}");
        assert!(content(&image) == content(&device), "{round}");
    }
}

#[test]
fn image_of_zeroes_has_no_chunks() {
    let (memory, store) = store();
    let device = Model::new(3 << 20, 4096);
    let pushed = push_plain(&store, &device, "v1").unwrap();
    assert_eq!((pushed.sent, pushed.changed_pages), ((0, 0), 0));
    assert!(memory.object_sizes("chunks/").is_empty() && memory.object_sizes("maps/").is_empty());
    assert!(content(&image(&store, None, "v1")).iter().all(|byte| *byte == 0));
    // Pages that become zeroes need no chunk.
    let device = mixed(2000, 3);
    push_plain(&store, &device, "v2").unwrap();
    let chunks = memory.object_sizes("chunks/");
    device.write_zeroes(0, 400 << 12, Flags::empty()).unwrap();
    push_plain(&store, &device, "v2").unwrap();
    assert_eq!(memory.object_sizes("chunks/"), chunks);
    assert!(content(&image(&store, None, "v2")) == content(&device));
}

#[test]
fn push_of_fork_reads_only_its_own_pages() {
    let (memory, store) = store();
    let (_dir, cache) = cache();
    let golden = mixed(6000, 1);
    push_plain(&store, &golden, "golden").unwrap();
    let fork = Overlay::new(image(&store, Some(&cache), "golden"));
    change(&fork, 30, 5);
    change(&golden, 30, 5);
    let before: u64 = memory.object_sizes("chunks/").values().sum();
    let over = |fork: &Overlay, tag: &str| {
        let layers = [Layer::of(fork).unwrap()];
        let source =
            Source { device: fork, label: "fork", base_image: Some(fork.over(&layers, Some("golden"))) };
        push(&store, source, options(tag), &|_, _| {}, soon()).unwrap()
    };
    let pushed = over(&fork, "fork");
    assert_eq!((pushed.changed_pages, pushed.sent.0), (30, 1));
    assert_eq!(fork.read.load(std::sync::atomic::Ordering::SeqCst), 0);
    let after: u64 = memory.object_sizes("chunks/").values().sum();
    assert!(after - before < 31 * PAGE as u64);
    assert!(content(&image(&store, Some(&cache), "fork")) == content(&golden));
    // The next push to the same tag sends only later changes.
    change(&fork, 7, 6);
    change(&golden, 7, 6);
    fork.write_zeroes(0, 4096, Flags::empty()).unwrap();
    golden.write_zeroes(0, 4096, Flags::empty()).unwrap();
    let pushed = over(&fork, "fork");
    assert!((7..=8).contains(&pushed.changed_pages), "{pushed:?}");
    assert_eq!(fork.read.load(std::sync::atomic::Ordering::SeqCst), 0);
    assert!(content(&image(&store, Some(&cache), "fork")) == content(&golden));
    // Pushes the same fork to another tag: at most 30 + 7 pages differ from the golden image.
    let pushed = over(&fork, "golden");
    assert!(pushed.changed_pages <= 38);
    assert!(content(&image(&store, Some(&cache), "golden")) == content(&golden));
}

#[test]
fn push_of_fork_fails_if_base_may_be_deleted() {
    let (memory, store) = store();
    push_plain(&store, &mixed(1000, 1), "golden").unwrap();
    let fork = Overlay::new(image(&store, None, "golden"));
    change(&fork, 5, 5);
    push_plain(&store, &mixed(1000, 2), "golden").unwrap();
    let push_fork = |tag, full| {
        let layers = [Layer::of(&fork).unwrap()];
        let source =
            Source { device: &fork, label: "fork", base_image: Some(fork.over(&layers, Some("golden"))) };
        let options = freestone_store::push::Options { full, ..options(tag) };
        push(&store, source, options, &|_, _| {}, soon())
    };
    // The manifest of the base image is young enough, so the push does not rewrite the manifest.
    push_fork("a", false).unwrap();
    memory.advance_clock(GRACE * 2 / 3);
    // The next push rewrites the manifest of the base image, which is older than half of the grace period.
    let manifest = format!("manifests/{}", fork.base.name());
    let age = |key: &str| {
        store.now(soon()).unwrap().duration_since(store.head(key, soon()).unwrap().unwrap().modified)
    };
    assert!(age(&manifest).unwrap() > GRACE / 2);
    push_fork("b", false).unwrap();
    // A full push has no parent image, and sends chunks older than half of the grace period again.
    let full = push_fork("c", true).unwrap();
    assert!(full.sent.0 >= 7 && full.reused <= 1, "{full:?}");
    assert!(content(&image(&store, None, "c")) == content(&fork));
    assert!(age(&manifest).unwrap() < GRACE / 100);
    memory.advance_clock(GRACE);
    // A repeated push of the fork fails, too.
    for _ in 0..2 {
        assert!(matches!(push_fork("d", false), Err(Error::ParentExpiring(_))));
    }
}

/// Another push sets the tag of the parent image while a fork of that image is pushed.
#[test]
fn young_parent_image_needs_no_tag() {
    let (memory, store) = store();
    let push_fork = |seed| {
        push_plain(&store, &mixed(1000, seed), "golden").unwrap();
        let fork = Overlay::new(image(&store, None, "golden"));
        change(&fork, 5, 5);
        memory.advance_clock(if seed == 1 { Duration::ZERO } else { GRACE * 2 / 3 });
        let layers = [Layer::of(&fork).unwrap()];
        let source =
            Source { device: &fork, label: "fork", base_image: Some(fork.over(&layers, Some("golden"))) };
        let moved = std::sync::Once::new();
        let note = |_, _| {
            moved.call_once(|| {
                push_plain(&store, &mixed(1000, seed + 10), "golden").unwrap();
            });
        };
        let pushed = push(&store, source, options(&format!("fork-{seed}")), &note, soon());
        assert!(moved.is_completed());
        if pushed.is_ok() {
            assert!(content(&image(&store, None, &format!("fork-{seed}"))) == content(&fork));
        }
        pushed
    };
    push_fork(1).unwrap();
    let refused = push_fork(2);
    assert!(matches!(refused, Err(Error::ParentExpiring(_))), "{refused:?}");
}

#[test]
fn one_of_concurrent_pushes_to_tag_wins() {
    let (_memory, store) = store();
    let devices: Vec<_> = (0..4).map(|seed| mixed(300, seed)).collect();
    for round in 0..10 {
        let begin = std::sync::Barrier::new(devices.len());
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = devices
                .iter()
                .map(|device| {
                    let (begin, store) = (&begin, &store);
                    scope.spawn(move || {
                        change(device, 3, round + 50);
                        begin.wait();
                        push_plain(store, device, "v1")
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let tag = store.tag("v1", soon()).unwrap().unwrap().tag;
        for outcome in &outcomes {
            match outcome {
                Ok(_) | Err(Error::TagMoved(_)) => {}
                Err(error) => panic!("{error}"),
            }
        }
        let winners: Vec<_> =
            outcomes.iter().flatten().filter(|pushed| pushed.generation == tag.generation).collect();
        assert_eq!(winners.len(), 1, "{outcomes:?}");
        assert_eq!(winners[0].manifest, tag.manifest);
    }
}

#[test]
fn keyed_domain_hides_content() {
    let memory = Arc::new(MemoryStore::default());
    let objects = || Arc::clone(&memory) as Arc<dyn Objects>;
    let secret = Secret::parse(&"a7".repeat(32)).unwrap();
    let begin = CreateOptions { encrypted: true, grace: GRACE };
    let (store, is_new) = Store::open_or_create(objects(), Some(&secret), begin, soon()).unwrap();
    assert!(is_new);
    let store = Arc::new(store);
    let device = Model::new(4 << 20, 512);
    let text = b"the quick brown fox jumps over the lazy dog, again and again. ".repeat(70);
    for page in 0..1024_u64 {
        device
            .write_at(page * 4096, &[&page.to_le_bytes(), &text[..4088]].concat()[..], Flags::empty())
            .unwrap();
    }
    push_plain(&store, &device, "v1").unwrap();
    assert!(content(&image(&store, None, "v1")) == content(&device));
    // The objects contain no plaintext, and the image store does not open with another key.
    for key in memory.object_sizes("").keys() {
        memory.tamper(key, |bytes| {
            let words: [&[u8]; 2] = [b"brown fox", b"segments"];
            assert!(!words.iter().any(|word| bytes.windows(word.len()).any(|part| part == *word)), "{key}");
            true
        });
    }
    let refused = |secret: Option<&Secret>| match Store::open(objects(), secret, soon()) {
        Err(Error::Refused(_, refused)) => refused,
        _ => panic!("was opened"),
    };
    assert_eq!(refused(None), DomainError::KeyNeeded);
    assert_eq!(refused(Secret::parse(&"a8".repeat(32)).as_ref()), DomainError::KeyWrong);
    // Two encryption domains have no chunk name in common.
    let other = self::store();
    push_plain(&other.1, &device, "v1").unwrap();
    let names = memory.object_sizes("chunks/");
    assert!(other.0.object_sizes("chunks/").keys().all(|key| !names.contains_key(key)));
    let refused = Store::open_or_create(Arc::clone(&other.0) as _, Some(&secret), begin, soon());
    assert!(matches!(refused, Err(Error::Refused(_, DomainError::KeyUnused))));
}

#[test]
fn directory_store_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let objects = Arc::new(Directory::new(dir.path().join("store")));
    let (store, _) = Store::open_or_create(objects, None, BEGIN, soon()).unwrap();
    let store = Arc::new(store);
    let device = mixed(600, 1);
    push_plain(&store, &device, "v1").unwrap();
    change(&device, 10, 3);
    assert_eq!(push_plain(&store, &device, "v1").unwrap().changed_pages, 10);
    assert!(content(&image(&store, None, "v1")) == content(&device));
    assert_eq!(store.tag_names(soon()).unwrap(), ["v1"]);
}

#[test]
fn push_of_few_changes_needs_few_requests() {
    let (memory, store) = store();
    let device = mixed(100 * CHUNK_PAGES, 1);
    push_plain(&store, &device, "v1").unwrap();
    let calls = memory.calls();
    change(&device, 100, 4);
    push_plain(&store, &device, "v1").unwrap();
    // The push reads the time, tag, manifest, map, page hashes and chunk, then writes these objects and the
    // tag.
    assert!(memory.calls() - calls < 20, "{}", memory.calls() - calls);
    assert_eq!(memory.count(Method::List), 0);
}
