//! Tests of retention rules: the tags that they remove, and concurrent pushes.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use freestone_store::format::domain::GRACE;
use freestone_store::format::tag::Tag;
use freestone_store::objects::Fault;
use freestone_store::prune::{check_roots, preview, prune};
use freestone_store::retention::{Plan, Retention};
use freestone_store::store::{Error, Store};
use freestone_testkit::objects::{Effect, MemoryStore, Method};

use crate::kit::*;

const LAST: Retention = Retention { keep_last: Some(1), keep_within: None };

/// Sets an existing tag as a push at the time `pushed` (seconds since 1970) would.
fn set(store: &Store, name: &str, pushed: u64) -> Result<(), Error> {
    let before = store.tag(name, soon()).unwrap();
    let manifest = before.as_ref().unwrap().tag.manifest;
    let tag = Tag::new(store.domain(), name, manifest, 7, pushed);
    store.set_tag(name, before.as_ref(), &tag, soon())
}

/// Creates an image store with two nightly tags and an older tag `golden`. If `is_plain`, the object store
/// has no conditional deletes.
fn nightlies(is_plain: bool) -> (Arc<MemoryStore>, Arc<Store>) {
    let (memory, store) = store();
    if is_plain {
        memory.disable_conditional_delete();
    }
    for (seed, tag) in [(1, "golden"), (2, "nightly-1"), (3, "nightly-2")] {
        push_plain(&store, &mixed(300, seed), tag).unwrap();
        set(&store, tag, seed * 1000).unwrap();
    }
    (memory, store)
}

fn plan(store: &Store, retention: Retention) -> Plan {
    retention.plan(store, |name| name.starts_with("nightly-"), soon()).unwrap()
}

fn names(plan: &Plan) -> BTreeSet<String> {
    plan.removed.iter().map(|tag| tag.name.clone()).collect()
}

#[test]
fn rules_leave_other_tags_alone() {
    for is_plain in [false, true] {
        let (memory, store) = nightlies(is_plain);
        let plan = plan(&store, LAST);
        let removed = names(&plan);
        assert_eq!(removed, ["nightly-1".to_owned()].into());
        memory.advance_clock(GRACE * 2);
        let all = memory.object_sizes("");
        let expected = preview(&store, &removed, &|_| {}, soon()).unwrap();
        assert!((expected.images, expected.young) == (2, 0) && expected.deleted > 3, "{expected:?}");
        check_roots(&store, &removed, soon()).unwrap();
        assert_eq!(memory.object_sizes(""), all);
        let tag = &plan.removed[0];
        assert_eq!(store.remove_tag_unchanged(&tag.name, &tag.read, soon()), Ok(true));
        // If another prune has removed the tag, the removal succeeds as well.
        assert_eq!(store.remove_tag_unchanged(&tag.name, &tag.read, soon()), Ok(true));
        assert_eq!(prune(&store, false, &|_| {}, soon()).unwrap(), expected);
        assert_eq!(store.tag_names(soon()).unwrap(), ["golden", "nightly-2"]);
        assert!(content(&image(&store, None, "golden")) == content(&mixed(300, 1)));
    }
}

#[test]
fn rules_that_keep_no_tag_are_refused() {
    let (_, store) = nightlies(false);
    // By the clock of the object store, all pushes are older than one day, so the rule would keep no tag.
    let within = Retention { keep_last: None, keep_within: Some(Duration::from_secs(86_400)) };
    assert_eq!(within.plan(&store, |_| true, soon()), Err(Error::KeepsNone("memory:".to_owned(), 3)));
    assert_eq!(within.plan(&store, |name| name == "other", soon()), Ok(Plan::default()));
    let both = Retention { keep_last: Some(1), ..within };
    assert_eq!(names(&plan(&store, both)).len(), 1);
}

#[test]
fn unreadable_kept_image_fails_check() {
    let (memory, store) = nightlies(false);
    let removed = names(&plan(&store, LAST));
    let kept = store.tag("nightly-2", soon()).unwrap().unwrap().tag.manifest;
    memory.tamper(&format!("manifests/{kept}"), |_| false);
    assert!(check_roots(&store, &removed, soon()).unwrap_err().is_missing());
    assert_eq!(store.tag_names(soon()).unwrap().len(), 3);
}

#[test]
fn tag_set_since_plan_is_kept() {
    for is_plain in [false, true] {
        let (_, store) = nightlies(is_plain);
        let plan = plan(&store, LAST);
        let tag = &plan.removed[0];
        let pushed = push_plain(&store, &mixed(300, 4), &tag.name).unwrap();
        assert_eq!(store.remove_tag_unchanged(&tag.name, &tag.read, soon()), Ok(false));
        assert_eq!(store.tag(&tag.name, soon()).unwrap().unwrap().tag.manifest, pushed.manifest);
    }
}

#[test]
fn tag_set_while_it_is_removed_is_kept() {
    for is_plain in [false, true] {
        let (memory, store) = nightlies(is_plain);
        let read = store.tag("nightly-1", soon()).unwrap().unwrap();
        let next = Tag::new(store.domain(), "nightly-1", read.tag.manifest, 8, 9000);
        let (other, set) = (open(&Arc::new(memory.new_client())), next.clone());
        // Another push sets the tag after `remove_tag` has read it, just before the removal.
        let is_first = AtomicBool::new(true);
        memory.set_fault_rule(move |call| {
            let is_removal = call.method == Method::Delete || call.method == Method::Put;
            if is_removal && call.key.starts_with("tags/") && is_first.swap(false, Ordering::SeqCst) {
                other.set_tag("nightly-1", Some(&read), &set, soon()).unwrap();
            }
            Effect::Pass
        });
        assert_eq!(store.remove_tag("nightly-1", soon()), Err(Error::TagSet("nightly-1".to_owned())));
        assert_eq!(store.tag("nightly-1", soon()).unwrap().unwrap().tag, next);
    }
}

#[test]
fn push_during_removal_fails() {
    let (memory, store) = nightlies(true);
    let plan = plan(&store, LAST);
    let tag = plan.removed[0].clone();
    let name = tag.name.clone();
    // Another push that has read the tag earlier sets the tag just before the deletion.
    let other = open(&Arc::new(memory.new_client()));
    let (is_refused, refused) = (Arc::new(AtomicBool::new(false)), tag.clone());
    let seen = Arc::clone(&is_refused);
    memory.set_fault_rule(move |call| {
        if call.method == Method::Delete && call.key.starts_with("tags/") {
            let next = Tag::new(other.domain(), &refused.name, refused.read.tag.manifest, 8, 9000);
            let outcome = other.set_tag(&refused.name, Some(&refused.read), &next, soon());
            seen.store(outcome == Err(Error::TagMoved(refused.name.clone())), Ordering::SeqCst);
        }
        Effect::Pass
    });
    assert_eq!(store.remove_tag_unchanged(&name, &tag.read, soon()), Ok(true));
    assert!(is_refused.load(Ordering::SeqCst));
}

#[test]
fn failed_removal_leaves_tag_as_it_was() {
    let (memory, store) = nightlies(true);
    let plan = plan(&store, LAST);
    let tag = &plan.removed[0];
    memory.set_fault_rule(|call| match call.method {
        Method::Delete => Effect::Fail(Fault::Denied("no".into())),
        _ => Effect::Pass,
    });
    let outcome = store.remove_tag_unchanged(&tag.name, &tag.read, soon());
    assert!(matches!(outcome, Err(Error::Object { fault: Fault::Denied(_), .. })), "{outcome:?}");
    memory.heal();
    let now = store.tag(&tag.name, soon()).unwrap().unwrap().tag;
    assert_eq!((now.manifest, now.pushed), (tag.read.tag.manifest, tag.read.tag.pushed));
    // The response to a deletion is lost. The retry of the deletion succeeds.
    let is_lost = AtomicBool::new(false);
    memory.set_fault_rule(move |call| match call.method {
        Method::Delete if !is_lost.swap(true, Ordering::SeqCst) => {
            Effect::FailAfter(Fault::Transient("cut".into()))
        }
        _ => Effect::Pass,
    });
    let read = store.tag(&tag.name, soon()).unwrap().unwrap();
    assert_eq!(store.remove_tag_unchanged(&tag.name, &read, soon()), Ok(true));
    assert_eq!(store.tag(&tag.name, soon()), Ok(None));
}

#[test]
fn removal_that_takes_too_long_is_reported() {
    let (memory, store) = nightlies(true);
    let plan = plan(&store, LAST);
    let tag = &plan.removed[0];
    let asleep = memory.new_client();
    memory.set_fault_rule(move |call| {
        if call.method == Method::Delete {
            asleep.advance_clock(Duration::from_secs(60));
        }
        Effect::Pass
    });
    let late = Error::DeletedLate(format!("tags/{}", tag.name));
    assert_eq!(store.remove_tag_unchanged(&tag.name, &tag.read, soon()), Err(late));
}
