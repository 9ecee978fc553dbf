//! What is sent, and what comes back.

use std::sync::Arc;

use freestone_core::device::{Blocking as _, Flags};
use freestone_store::format::domain::{GRACE, Refused, Secret};
use freestone_store::format::tag::Tag;
use freestone_store::format::{CHUNK_PAGES, PAGE};
use freestone_store::objects::{Directory, Objects, When};
use freestone_store::push::{Layer, Source, push};
use freestone_store::store::{Begin, Error, Store};
use freestone_testkit::Model;
use freestone_testkit::objects::{Memory, Method};

use crate::kit::*;

#[test]
fn an_image_comes_back() {
    let (memory, store) = store();
    let device = mixed(1000, 1);
    let pushed = push_plain(&store, &device, "v1").unwrap();
    assert_eq!((pushed.generation, pushed.is_new), (1, true));
    let (_dir, cache) = cache();
    for cache in [None, Some(&cache)] {
        let image = image(&store, cache, "v1");
        assert!(content(&image) == content(&device));
    }
    // 1000 pages are 8 chunks.
    assert_eq!(memory.under("chunks/").len(), 8);
    assert_eq!(memory.under("tags/").len(), 1);
    assert!(memory.under("clocks/").is_empty());
}

#[test]
fn a_tag_that_cannot_be_counted_further_is_not_set() {
    let (memory, store) = store();
    let device = mixed(100, 1);
    let manifest = push_plain(&store, &device, "v1").unwrap().manifest;
    let last = Tag::new(store.domain(), "v1", manifest, u64::MAX, 0).bytes();
    memory.put("tags/v1", &last, When::Always, soon()).unwrap();
    change(&device, 10, 2);
    let before = memory.count(Method::Put);
    let error = push_plain(&store, &device, "v1").unwrap_err();
    assert!(matches!(error, Error::Damaged(..)), "{error}");
    // The clock alone was asked.
    assert_eq!(memory.count(Method::Put), before + 1);
    store.remove_tag("v1", soon()).unwrap();
    assert_eq!(push_plain(&store, &device, "v1").unwrap().generation, 1);
}

#[test]
fn the_same_again_sends_nothing_and_sets_no_tag() {
    let (memory, store) = store();
    let device = mixed(1000, 1);
    let first = push_plain(&store, &device, "v1").unwrap();
    let before = memory.under("");
    let again = push_plain(&store, &device, "v1").unwrap();
    assert_eq!((again.manifest, again.generation, again.is_new), (first.manifest, 1, false));
    assert_eq!((again.sent, again.changed_pages), ((0, 0), 0));
    assert_eq!(memory.under(""), before);
    // Under another tag all is found.
    let other = push_plain(&store, &device, "v2").unwrap();
    assert_eq!((other.sent.0, other.reused), (0, 8));
}

#[test]
fn what_changed_is_packed() {
    let (memory, store) = store();
    let device = mixed(8000, 1);
    push_plain(&store, &device, "v1").unwrap();
    let whole: u64 = memory.under("chunks/").values().sum();
    let changed = change(&device, 80, 2);
    let pushed = push_plain(&store, &device, "v1").unwrap();
    assert_eq!((pushed.generation, pushed.changed_pages), (2, changed as u64));
    // Noise does not compress: 80 pages in one chunk, and little else.
    let bytes = (changed * PAGE) as u64;
    assert_eq!(pushed.sent.0, 1);
    assert!(pushed.sent.1 < bytes * 101 / 100, "{:?}", pushed.sent);
    assert_eq!(memory.under("chunks/").values().sum::<u64>(), whole + pushed.sent.1);
    let (_dir, cache) = cache();
    assert!(content(&image(&store, Some(&cache), "v1")) == content(&device));
}

#[test]
fn a_chain_is_made_one_before_it_is_too_long() {
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
    // The first is full; seven deltas; then one delta of all.
    assert_eq!(depths[..10], [2, 3, 4, 5, 6, 7, 8, 2, 3, 4]);
    // Where most changed it is stored anew, and what did not is not sent.
    change(&device, 2500, 7);
    let pushed = push_plain(&store, &device, "v1").unwrap();
    assert_eq!(image(&store, Some(&cache), "v1").manifest().depth(), 1);
    assert!(pushed.changed_pages > 2500);
    assert!(content(&image(&store, Some(&cache), "v1")) == content(&device));
}

#[test]
fn sizes_may_change_and_need_not_be_whole_pages() {
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
fn an_image_of_zeroes_has_no_chunk() {
    let (memory, store) = store();
    let device = Model::new(3 << 20, 4096);
    let pushed = push_plain(&store, &device, "v1").unwrap();
    assert_eq!((pushed.sent, pushed.changed_pages), ((0, 0), 0));
    assert!(memory.under("chunks/").is_empty() && memory.under("maps/").is_empty());
    assert!(content(&image(&store, None, "v1")).iter().all(|byte| *byte == 0));
    // What becomes zeroes costs nothing but its bit.
    let device = mixed(2000, 3);
    push_plain(&store, &device, "v2").unwrap();
    let chunks = memory.under("chunks/");
    device.write_zeroes(0, 400 << 12, Flags::empty()).unwrap();
    push_plain(&store, &device, "v2").unwrap();
    assert_eq!(memory.under("chunks/"), chunks);
    assert!(content(&image(&store, None, "v2")) == content(&device));
}

#[test]
fn of_a_fork_only_its_own_pages_are_read() {
    let (memory, store) = store();
    let (_dir, cache) = cache();
    let golden = mixed(6000, 1);
    push_plain(&store, &golden, "golden").unwrap();
    let fork = Overlay::new(image(&store, Some(&cache), "golden"));
    change(&fork, 30, 5);
    change(&golden, 30, 5);
    let before: u64 = memory.under("chunks/").values().sum();
    let over = |fork: &Overlay, tag: &str| {
        let layers = [Layer::of(fork).unwrap()];
        let source = Source { device: fork, label: "fork", over: Some(fork.over(&layers, Some("golden"))) };
        push(&store, source, options(tag), &|_, _| {}, soon()).unwrap()
    };
    let pushed = over(&fork, "fork");
    assert_eq!((pushed.changed_pages, pushed.sent.0), (30, 1));
    assert_eq!(fork.read.load(std::sync::atomic::Ordering::SeqCst), 0);
    let after: u64 = memory.under("chunks/").values().sum();
    assert!(after - before < 31 * PAGE as u64);
    assert!(content(&image(&store, Some(&cache), "fork")) == content(&golden));
    // The next push to the tag sends what changed since.
    change(&fork, 7, 6);
    change(&golden, 7, 6);
    fork.write_zeroes(0, 4096, Flags::empty()).unwrap();
    golden.write_zeroes(0, 4096, Flags::empty()).unwrap();
    let pushed = over(&fork, "fork");
    assert!((7..=8).contains(&pushed.changed_pages), "{pushed:?}");
    assert_eq!(fork.read.load(std::sync::atomic::Ordering::SeqCst), 0);
    assert!(content(&image(&store, Some(&cache), "fork")) == content(&golden));
    // Over what has nothing to do with it, too: 30 + 7 pages differ from the golden image's, or fewer.
    let pushed = over(&fork, "golden");
    assert!(pushed.changed_pages <= 38);
    assert!(content(&image(&store, Some(&cache), "golden")) == content(&golden));
}

#[test]
fn what_a_fork_stands_on_must_stay() {
    let (memory, store) = store();
    push_plain(&store, &mixed(1000, 1), "golden").unwrap();
    let fork = Overlay::new(image(&store, None, "golden"));
    change(&fork, 5, 5);
    push_plain(&store, &mixed(1000, 2), "golden").unwrap();
    let push_fork = |tag, full| {
        let layers = [Layer::of(&fork).unwrap()];
        let source = Source { device: &fork, label: "fork", over: Some(fork.over(&layers, Some("golden"))) };
        let options = freestone_store::push::Options { full, ..options(tag) };
        push(&store, source, options, &|_, _| {}, soon())
    };
    // Young enough: nobody deletes it.
    push_fork("a", false).unwrap();
    memory.pass(GRACE * 2 / 3);
    // Its manifest is written again.
    let manifest = format!("manifests/{}", fork.base.name());
    let age = |key: &str| {
        store.now(soon()).unwrap().duration_since(store.head(key, soon()).unwrap().unwrap().modified)
    };
    assert!(age(&manifest).unwrap() > GRACE / 2);
    push_fork("b", false).unwrap();
    // All of it stands on nothing. (What is older than half of the grace is sent again.)
    let full = push_fork("c", true).unwrap();
    assert!(full.sent.0 >= 7 && full.reused <= 1, "{full:?}");
    assert!(content(&image(&store, None, "c")) == content(&fork));
    assert!(age(&manifest).unwrap() < GRACE / 100);
    memory.pass(GRACE);
    // Also if it is repeated.
    for _ in 0..2 {
        assert!(matches!(push_fork("d", false), Err(Error::ParentGoes(_))));
    }
}

#[test]
fn of_two_pushes_to_a_tag_one_wins() {
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
fn a_domain_with_a_key_file_keeps_its_secrets() {
    let memory = Arc::new(Memory::default());
    let objects = || Arc::clone(&memory) as Arc<dyn Objects>;
    let secret = Secret::parse(&"a7".repeat(32)).unwrap();
    let begin = Begin { encrypted: true, grace: GRACE };
    let (store, is_new) = Store::open_or_begin(objects(), Some(&secret), begin, soon()).unwrap();
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
    // Nothing of it is to be seen, and another key sees nothing.
    for key in memory.under("").keys() {
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
    assert_eq!(refused(None), Refused::KeyNeeded);
    assert_eq!(refused(Secret::parse(&"a8".repeat(32)).as_ref()), Refused::KeyWrong);
    // Two domains share no name.
    let other = self::store();
    push_plain(&other.1, &device, "v1").unwrap();
    let names = memory.under("chunks/");
    assert!(other.0.under("chunks/").keys().all(|key| !names.contains_key(key)));
    let refused = Store::open_or_begin(Arc::clone(&other.0) as _, Some(&secret), begin, soon());
    assert!(matches!(refused, Err(Error::Refused(_, Refused::KeyUnused))));
}

#[test]
fn a_directory_does_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let objects = Arc::new(Directory::new(dir.path().join("store")));
    let (store, _) = Store::open_or_begin(objects, None, BEGIN, soon()).unwrap();
    let store = Arc::new(store);
    let device = mixed(600, 1);
    push_plain(&store, &device, "v1").unwrap();
    change(&device, 10, 3);
    assert_eq!(push_plain(&store, &device, "v1").unwrap().changed_pages, 10);
    assert!(content(&image(&store, None, "v1")) == content(&device));
    assert_eq!(store.tag_names(soon()).unwrap(), ["v1"]);
}

#[test]
fn a_push_asks_little() {
    let (memory, store) = store();
    let device = mixed(100 * CHUNK_PAGES, 1);
    push_plain(&store, &device, "v1").unwrap();
    let calls = memory.calls();
    change(&device, 100, 4);
    push_plain(&store, &device, "v1").unwrap();
    // The time, the tag, a manifest, a map, its hashes; a chunk; the same written, and the tag.
    assert!(memory.calls() - calls < 20, "{}", memory.calls() - calls);
    assert_eq!(memory.count(Method::List), 0);
}
