//! Tests of objects in a directory.

use crate::rt::sync::atomic::AtomicUsize;
use crate::rt::time::Instant;

use super::*;

fn soon() -> CallLimits<'static> {
    CallLimits::within(Duration::from_secs(10))
}

fn store() -> (tempfile::TempDir, Directory) {
    let dir = tempfile::tempdir().unwrap();
    let store = Directory::new(dir.path().join("some/where"));
    (dir, store)
}

#[test]
fn objects_are_written_read_listed_and_deleted() {
    let (_dir, store) = store();
    assert_eq!(store.get("a", None, 10, soon()), Err(Fault::NotFound));
    store.list("", &mut |_| panic!("there is nothing"), soon()).unwrap();
    store.delete("a/b", soon()).unwrap();
    let version = store.put("a/b", b"0123456789", WriteCondition::Always, soon()).unwrap();
    let read = store.get("a/b", None, 10, soon()).unwrap();
    assert_eq!((&read.bytes[..], &read.version), (&b"0123456789"[..], &version));
    assert_eq!(store.get("a/b", None, 9, soon()), Err(Fault::TooLong(9)));
    assert_eq!(store.get("a/b", Some(8..20), 12, soon()).unwrap().bytes, b"89");
    assert_eq!(store.get("a/b", Some(20..21), 12, soon()).unwrap().bytes, b"");
    assert_eq!(store.get("a", None, 10, soon()).unwrap_err(), Fault::NotFound);
    let head = store.head("a/b", soon()).unwrap();
    assert_eq!((head.bytes, head.version), (10, version));
    assert_eq!(store.head("a", soon()), Err(Fault::NotFound));
    store.put("a/c/d", b"", WriteCondition::Always, soon()).unwrap();
    store.put("e", b"", WriteCondition::Always, soon()).unwrap();
    let listed = |prefix| {
        let mut keys = Vec::new();
        store
            .list(
                prefix,
                &mut |listed| {
                    keys.push(listed.key);
                    true
                },
                soon(),
            )
            .unwrap();
        keys.sort();
        keys
    };
    assert_eq!(listed(""), ["a/b", "a/c/d", "e"]);
    assert_eq!(listed("a/"), ["a/b", "a/c/d"]);
    assert_eq!(listed("nothing/"), [""; 0]);
    store.delete("a/b", soon()).unwrap();
    assert_eq!(listed("a/"), ["a/c/d"]);
    assert_eq!(fs::read_dir(store.root.join(UNFINISHED)).unwrap().count(), 0);
}

#[test]
fn conditional_write_fails_if_object_changed() {
    let (_dir, store) = store();
    let first = store.put("t", b"1", WriteCondition::Absent, soon()).unwrap().unwrap();
    assert_eq!(store.put("t", b"2", WriteCondition::Absent, soon()), Err(Fault::Condition));
    let second = store.put("t", b"2", WriteCondition::Unchanged(&first), soon()).unwrap().unwrap();
    assert_eq!(store.put("t", b"3", WriteCondition::Unchanged(&first), soon()), Err(Fault::Condition));
    assert_eq!(store.get("t", None, 1, soon()).unwrap().bytes, b"2");
    store.delete("t", soon()).unwrap();
    assert_eq!(store.put("t", b"3", WriteCondition::Unchanged(&second), soon()), Err(Fault::Condition));
    store.put("t", b"4", WriteCondition::Absent, soon()).unwrap();
}

#[test]
fn one_of_concurrent_conditional_writes_wins() {
    let (_dir, store) = store();
    let mut before = store.put("t", b"", WriteCondition::Absent, soon()).unwrap().unwrap();
    for round in 0..20_u8 {
        let won = AtomicUsize::new(0);
        thread::scope(|scope| {
            for writer in 0..4_u8 {
                let (store, won, before) = (&store, &won, &before);
                scope.spawn(move || {
                    match store.put("t", &[round, writer], WriteCondition::Unchanged(before), soon()) {
                        Ok(_) => won.fetch_add(1, Ordering::SeqCst),
                        Err(fault) => {
                            assert_eq!(fault, Fault::Condition);
                            0
                        }
                    }
                });
            }
        });
        assert_eq!(won.into_inner(), 1);
        before = store.head("t", soon()).unwrap().version.unwrap();
    }
}

#[test]
fn old_unfinished_files_are_removed() {
    let (_dir, store) = store();
    store.put("a", b"1", WriteCondition::Always, soon()).unwrap();
    let left = |name: &str, age| {
        let file = File::create(store.root.join(UNFINISHED).join(name)).unwrap();
        file.set_modified(std::time::SystemTime::now() - age).unwrap();
    };
    left("old", LEFT_AFTER * 2);
    left("young", LEFT_AFTER / 2);
    // A new `Directory` removes abandoned files at its first write.
    Directory::new(&store.root).put("b", b"2", WriteCondition::Always, soon()).unwrap();
    let names = fs::read_dir(store.root.join(UNFINISHED)).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(names.collect::<Vec<_>>(), ["young"]);
}

#[test]
fn listing_holds_off_writes_with_condition() {
    let (_dir, store) = store();
    let read = store.put("tags/a", b"1", WriteCondition::Absent, soon()).unwrap().unwrap();
    let mut keys = Vec::new();
    let mut each = |listed: ListEntry| {
        let soon = CallLimits::within(Duration::from_millis(30));
        let late = store.put("tags/a", b"2", WriteCondition::Unchanged(&read), soon);
        assert_eq!(late, Err(Fault::TimedOut));
        keys.push(listed.key);
        true
    };
    store.list("tags/", &mut each, soon()).unwrap();
    assert_eq!(keys, ["tags/a"]);
    store.put("tags/a", b"2", WriteCondition::Unchanged(&read), soon()).unwrap();
}

#[test]
fn deletion_with_condition_leaves_newer_object() {
    let (_dir, store) = store();
    let first = store.put("a", b"1", WriteCondition::Always, soon()).unwrap().unwrap();
    let second = store.put("a", b"1", WriteCondition::Always, soon()).unwrap().unwrap();
    assert_eq!(store.delete_unchanged("a", &first, soon()), Err(Fault::Condition));
    store.delete_unchanged("a", &second, soon()).unwrap();
    assert_eq!(store.delete_unchanged("a", &second, soon()), Err(Fault::Condition));
}

#[test]
fn shared_locks_do_not_keep_out_exclusive_one() {
    let (_dir, store) = store();
    let shared = store.lock(false, soon()).unwrap();
    thread::scope(|scope| {
        let exclusive = scope.spawn(|| store.lock(true, soon()).map(drop));
        // No other shared lock is granted once a thread waits for an exclusive one.
        let since = Instant::now();
        while store.lock(false, CallLimits::within(Duration::from_millis(30))).is_ok() {
            assert!(since.elapsed() < Duration::from_secs(5));
        }
        drop(shared);
        exclusive.join().unwrap().unwrap();
    });
    store.lock(false, soon()).unwrap();
}

#[test]
fn keys_outside_directory_are_refused() {
    let (_dir, store) = store();
    for key in ["", "/a", "a//b", "../a", "a/../b", "a/", ".lock", &"a".repeat(KEY_BYTES_MAX + 1)] {
        let refused = store.put(key, b"", WriteCondition::Always, soon());
        assert!(matches!(refused, Err(Fault::Other(_))), "{key:?}: {refused:?}");
    }
}

#[test]
fn write_waits_for_lock_until_deadline() {
    let (_dir, store) = store();
    let held = store.lock(true, soon()).unwrap();
    let since = Instant::now();
    let late = store.put("a", b"", WriteCondition::Always, CallLimits::within(Duration::from_millis(50)));
    assert_eq!(late, Err(Fault::TimedOut));
    assert!(since.elapsed() < Duration::from_secs(5));
    let over = CallLimits { is_cancelled: &|| true, ..soon() };
    assert_eq!(store.put("a", b"", WriteCondition::Always, over), Err(Fault::Cancelled));
    drop(held);
    store.put("a", b"", WriteCondition::Always, soon()).unwrap();
}
