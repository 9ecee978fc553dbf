//! Tests of the objects that a prune deletes or keeps.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use freestone_store::format::domain::GRACE;
use freestone_store::objects::{CallLimits, Fault, Objects as _, WriteCondition};
use freestone_store::prune::{PruneReport, prune};
use freestone_store::push::{Options, Source, push};
use freestone_store::store::{Error, Store};
use freestone_testkit::objects::{Effect, Method};

use crate::kit::*;

fn pruned(store: &Store) -> PruneReport {
    prune(store, false, &|_| {}, soon()).unwrap()
}

#[test]
fn prune_deletes_old_unreferenced_objects() {
    let (memory, store) = store();
    let device = mixed(3000, 1);
    let first = push_plain(&store, &device, "v1").unwrap();
    change(&device, 30, 2);
    push_plain(&store, &device, "v1").unwrap();
    let other = mixed(3000, 9);
    push_plain(&store, &other, "v2").unwrap();
    let all = memory.object_sizes("");
    // The second image still needs all objects of the first image except the manifest.
    memory.advance_clock(GRACE + Duration::from_secs(2));
    let dry = prune(&store, true, &|_| {}, soon()).unwrap();
    assert_eq!((dry.images, dry.deleted, dry.young), (2, 1, 0));
    assert_eq!(memory.object_sizes(""), all);
    assert_eq!(pruned(&store), dry);
    let mut rest = all.clone();
    rest.remove(&format!("manifests/{}", first.manifest)).unwrap();
    assert_eq!(memory.object_sizes(""), rest);
    store.remove_tag("v2", soon()).unwrap();
    let gone = pruned(&store);
    assert!(gone.deleted > 20 && gone.deleted_bytes > 1 << 20, "{gone:?}");
    assert!(content(&image(&store, None, "v1")) == content(&device));
    assert_eq!(pruned(&store).deleted, 0);
}

#[test]
fn store_without_tags_stops_prune() {
    let (memory, store) = store();
    push_plain(&store, &mixed(300, 1), "v1").unwrap();
    memory.advance_clock(GRACE * 2);
    let tag = memory.object_sizes("tags/");
    store.remove_tag("v1", soon()).unwrap();
    let all = memory.object_sizes("");
    for dry in [true, false] {
        let refused = prune(&store, dry, &|_| {}, soon()).unwrap_err();
        assert_eq!(refused, Error::NoTags("memory:".to_owned()));
        assert_eq!(memory.object_sizes(""), all);
    }
    assert_eq!(tag.len(), 1);
    // When the image store has a tag again, a prune deletes the objects of the first image.
    push_plain(&store, &mixed(300, 2), "v2").unwrap();
    assert!(pruned(&store).deleted > 3);
}

#[test]
fn tag_omitted_by_one_listing_keeps_its_image() {
    let (memory, store) = store();
    let device = mixed(300, 1);
    push_plain(&store, &device, "v1").unwrap();
    push_plain(&store, &mixed(300, 2), "v2").unwrap();
    memory.advance_clock(GRACE * 2);
    for omitted in [0, 1] {
        let listings = AtomicU64::new(0);
        memory.set_fault_rule(move |call| {
            let is_tags = call.method == Method::List && call.key == "tags/";
            if is_tags && listings.fetch_add(1, Ordering::SeqCst) == omitted {
                return Effect::Omit("tags/v1");
            }
            Effect::Pass
        });
        assert_eq!(store.tag_names(soon()).unwrap(), ["v1", "v2"]);
        assert_eq!(pruned(&store).deleted, 0);
    }
    assert!(content(&image(&store, None, "v1")) == content(&device));
}

#[test]
fn prune_after_sleep_looks_again_before_deletion() {
    for is_plain in [false, true] {
        let (memory, store) = store();
        if is_plain {
            memory.disable_conditional_delete();
        }
        push_plain(&store, &mixed(1000, 1), "v1").unwrap();
        push_plain(&store, &mixed(300, 2), "v2").unwrap();
        store.remove_tag("v1", soon()).unwrap();
        memory.advance_clock(GRACE * 2);
        // The host of the prune sleeps after the first check of each chunk, long enough for a push to rewrite
        // the chunk.
        let (asleep, slept) = (memory.new_client(), std::sync::Mutex::new(BTreeSet::new()));
        let looks = Arc::new(AtomicU64::new(0));
        let (deleted, looked) = (Arc::new(AtomicU64::new(0)), Arc::clone(&looks));
        let deletions = Arc::clone(&deleted);
        memory.set_fault_rule(move |call| {
            if call.key.starts_with("chunks/") {
                match call.method {
                    Method::Head if slept.lock().unwrap().insert(call.key.to_owned()) => {
                        asleep.advance_clock(Duration::from_secs(3600));
                    }
                    Method::Head => drop(looked.fetch_add(1, Ordering::SeqCst)),
                    Method::Delete => drop(deletions.fetch_add(1, Ordering::SeqCst)),
                    _ => {}
                }
            }
            Effect::Pass
        });
        assert!(pruned(&store).deleted > 8);
        assert_eq!(looks.load(Ordering::SeqCst), deleted.load(Ordering::SeqCst));
    }
}

#[test]
fn sleep_during_deletion_is_reported() {
    let (memory, store) = store();
    push_plain(&store, &mixed(1000, 1), "v1").unwrap();
    push_plain(&store, &mixed(300, 2), "v2").unwrap();
    store.remove_tag("v1", soon()).unwrap();
    memory.advance_clock(GRACE * 2);
    memory.disable_conditional_delete();
    let asleep = memory.new_client();
    memory.set_fault_rule(move |call| {
        if call.method == Method::Delete && call.key.starts_with("chunks/") {
            asleep.advance_clock(Duration::from_secs(60));
        }
        Effect::Pass
    });
    let failed = prune(&store, false, &|_| {}, soon()).unwrap_err();
    assert!(matches!(failed, Error::DeletedLate(_)), "{failed}");
}

#[test]
fn deletion_keeps_object_rewritten_since_check() {
    let (memory, store) = store();
    push_plain(&store, &mixed(1000, 1), "v1").unwrap();
    push_plain(&store, &mixed(300, 2), "v2").unwrap();
    store.remove_tag("v1", soon()).unwrap();
    memory.advance_clock(GRACE * 2);
    let chunks = memory.object_sizes("chunks/");
    // Another client rewrites each chunk with the same content between the prune's last check and its
    // deletion.
    let other = memory.new_client();
    memory.set_fault_rule(move |call| {
        if call.method == Method::Delete && call.key.starts_with("chunks/") {
            let bytes = other.get(call.key, None, 1 << 20, soon()).unwrap().bytes;
            other.put(call.key, &bytes, WriteCondition::Always, soon()).unwrap();
        }
        Effect::Pass
    });
    pruned(&store);
    assert_eq!(memory.object_sizes("chunks/"), chunks);
}

#[test]
fn prune_keeps_young_images_and_their_objects() {
    let (memory, store) = store();
    let device = mixed(2000, 1);
    push_plain(&store, &device, "v1").unwrap();
    push_plain(&store, &mixed(300, 2), "v2").unwrap();
    memory.advance_clock(GRACE * 2);
    change(&device, 20, 2);
    push_plain(&store, &device, "v1").unwrap();
    store.remove_tag("v1", soon()).unwrap();
    let all = memory.object_sizes("");
    let report = pruned(&store);
    // The prune deletes the old manifest of the first image. The second image needs all other objects of the
    // first image.
    assert_eq!((report.images, report.deleted), (2, 1));
    assert_eq!(memory.object_sizes("").len(), all.len() - 1);
}

#[test]
fn untagged_image_is_counted_until_its_grace_ends() {
    let (memory, store) = store();
    push_plain(&store, &mixed(1000, 1), "v1").unwrap();
    push_plain(&store, &mixed(300, 2), "v2").unwrap();
    assert_eq!((pruned(&store).young, pruned(&store).next_expiry), (0, None));
    let manifest = store.tag("v1", soon()).unwrap().unwrap().tag.manifest;
    let pushed = store.head(&format!("manifests/{manifest}"), soon()).unwrap().unwrap().modified;
    store.remove_tag("v1", soon()).unwrap();
    let kept = pruned(&store);
    assert_eq!((kept.images, kept.untagged_images, kept.deleted), (2, 1, 0));
    assert!(kept.young > 8 && kept.young_bytes > 1 << 20, "{kept:?}");
    let expiry = pushed.duration_since(std::time::UNIX_EPOCH).unwrap() + GRACE + Duration::from_secs(1);
    assert_eq!(kept.next_expiry, Some(expiry.as_secs()));
    memory.advance_clock(GRACE + Duration::from_secs(2));
    let gone = pruned(&store);
    assert_eq!((gone.images, gone.untagged_images, gone.young), (1, 0, 0));
    assert_eq!((gone.deleted, gone.deleted_bytes), (kept.young, kept.young_bytes));
}

#[test]
fn push_during_prunes_keeps_its_objects() {
    let (memory, store) = store();
    let device = mixed(3000, 1);
    push_plain(&store, &device, "v1").unwrap();
    push_plain(&store, &mixed(300, 2), "v2").unwrap();
    store.remove_tag("v1", soon()).unwrap();
    // The chunks are old enough for a push to rewrite them, but too young for a prune to delete them.
    memory.advance_clock(GRACE * 2 / 3);
    let stop = AtomicBool::new(false);
    let other = open(&memory);
    std::thread::scope(|scope| {
        let pruner = scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                pruned(&other);
            }
        });
        let pushed = push_plain(&store, &device, "v1").unwrap();
        assert!(pushed.sent.0 > 15 && pushed.reused == 0, "{pushed:?}");
        // Half a grace period after the push, all its objects still exist.
        memory.advance_clock(GRACE / 2);
        std::thread::sleep(Duration::from_millis(200));
        stop.store(true, Ordering::SeqCst);
        pruner.join().unwrap();
    });
    assert!(content(&image(&store, None, "v1")) == content(&device));
}

#[test]
fn object_rewritten_before_deletion_is_kept() {
    let (memory, store) = store();
    let device = mixed(1000, 1);
    push_plain(&store, &device, "v1").unwrap();
    let kept = memory.object_sizes("chunks/");
    push_plain(&store, &mixed(300, 2), "v2").unwrap();
    store.remove_tag("v1", soon()).unwrap();
    memory.advance_clock(GRACE * 2);
    // A push rewrites the chunks after the prune has listed them.
    let again = Arc::new(AtomicBool::new(false));
    let (other, flag) = (memory.new_client(), Arc::clone(&again));
    let keys = kept.clone();
    let bytes: Vec<(String, Vec<u8>)> = keys
        .into_keys()
        .map(|key| {
            let mut bytes = Vec::new();
            memory.tamper(&key, |now| {
                bytes.clone_from(now);
                true
            });
            (key, bytes)
        })
        .collect();
    memory.set_fault_rule(move |call| {
        if call.method == Method::Head
            && call.key.starts_with("chunks/")
            && !flag.swap(true, Ordering::SeqCst)
        {
            for (key, bytes) in &bytes {
                other.put(key, bytes, WriteCondition::Always, soon()).unwrap();
            }
        }
        Effect::Pass
    });
    let report = pruned(&store);
    assert!(again.load(Ordering::SeqCst));
    let left = memory.object_sizes("chunks/");
    assert!(kept.keys().all(|key| left.contains_key(key)));
    assert!(report.deleted > 0 && memory.object_sizes("manifests/").len() == 1);
}

#[test]
fn unreadable_root_stops_prune() {
    let (memory, store) = store();
    push_plain(&store, &mixed(1000, 1), "v1").unwrap();
    push_plain(&store, &mixed(1000, 2), "v2").unwrap();
    store.remove_tag("v1", soon()).unwrap();
    memory.advance_clock(GRACE * 2);
    let all = memory.object_sizes("");
    for part in ["tags/", "manifests/", "maps/"] {
        memory.set_fault_rule(move |call| {
            if call.method == Method::Get && call.key.starts_with(part) {
                Effect::Fail(Fault::Denied("no".into()))
            } else {
                Effect::Pass
            }
        });
        assert!(prune(&store, false, &|_| {}, soon()).is_err(), "{part}");
        memory.heal();
        assert_eq!(memory.object_sizes(""), all);
    }
    // A prune retries a listing that was cut off.
    let cut = AtomicBool::new(false);
    memory.set_fault_rule(move |call| {
        let is_first =
            call.method == Method::List && call.key == "manifests/" && !cut.swap(true, Ordering::SeqCst);
        if is_first { Effect::Truncate(0) } else { Effect::Pass }
    });
    assert!(pruned(&store).deleted > 8);
}

#[test]
fn push_fails_after_half_of_grace() {
    let memory = Arc::new(freestone_testkit::objects::MemoryStore::default());
    let (store, _) = Store::open_or_create(Arc::clone(&memory) as _, None, BEGIN, soon()).unwrap();
    let slow = memory.new_client();
    memory.set_fault_rule(move |call| {
        if call.method == Method::Put && call.key.starts_with("chunks/") {
            slow.advance_clock(GRACE / 16);
        }
        Effect::Pass
    });
    let device = mixed(3000, 1);
    let source = Source { device: &device, label: "test", base_image: None };
    let outcome = push(&store, source, Options { threads: 1, ..options("v1") }, &|_, _| {}, soon());
    assert_eq!(outcome, Err(Error::TooSlow(GRACE)));
    assert_eq!(store.tag("v1", soon()), Ok(None));
}

#[test]
fn chunk_too_old_during_its_write_is_checked() {
    let (memory, store) = store();
    let device = mixed(100, 1);
    push_plain(&store, &device, "v1").unwrap();
    store.remove_tag("v1", soon()).unwrap();
    memory.advance_clock(GRACE / 288 * 287);
    // The chunk exceeds the grace period while the push writes it, as each write takes 10 minutes.
    let slow = memory.new_client();
    memory.set_fault_rule(move |call| {
        if call.method == Method::Put && call.key.starts_with("chunks/") {
            slow.advance_clock(Duration::from_secs(600));
        }
        // A concurrent deletion removes the chunks before the push writes the manifest.
        if call.method == Method::Put && call.key.starts_with("manifests/") {
            slow.object_sizes("chunks/").keys().for_each(|key| slow.tamper(key, |_| false));
        }
        Effect::Pass
    });
    let is_cancelled = || {
        memory.advance_clock(Duration::from_secs(1));
        false
    };
    let source = Source { device: &device, label: "test", base_image: None };
    let outcome =
        push(&store, source, options("v1"), &|_, _| {}, CallLimits { is_cancelled: &is_cancelled, ..soon() });
    assert!(matches!(outcome, Err(Error::ObjectPruned(_))), "{outcome:?}");
}

#[test]
fn tag_set_after_sleep_is_reported() {
    let (memory, store) = store();
    let asleep = memory.new_client();
    memory.set_fault_rule(move |call| {
        if call.method == Method::Put && call.key.starts_with("tags/") {
            asleep.advance_clock(GRACE);
        }
        Effect::Pass
    });
    let outcome = push_plain(&store, &mixed(100, 1), "v1");
    assert_eq!(outcome, Err(Error::SetLate("v1".to_owned())));
}
