//! Tests of object store calls without failures.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::{Duration, SystemTime};

use freestone_objects::{Options, open};
use freestone_store::objects::{Fault, Objects, Version, WriteCondition};
use freestone_testkit::Rng;

use crate::{Store, soon};

fn keys(store: &dyn Objects, prefix: &str) -> Vec<String> {
    let mut keys = Vec::new();
    let mut each = |listed: freestone_store::objects::ListEntry| {
        keys.push(listed.key);
        true
    };
    store.list(prefix, &mut each, soon()).unwrap();
    keys.sort();
    keys
}

#[test]
fn objects_are_written_read_listed_and_deleted() {
    let Store { server, objects, _dir } = &Store::new();
    assert_eq!(objects.url(), "s3://disks/a/b");
    assert_eq!(objects.get("x", None, 10, soon()), Err(Fault::NotFound));
    assert_eq!(objects.head("x", soon()), Err(Fault::NotFound));
    objects.delete("x", soon()).unwrap();
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    server.set_time(Some(time));
    let version = objects.put("x/y z+%&", b"0123456789", WriteCondition::Always, soon()).unwrap();
    assert!(version.as_ref().is_some_and(|version| !version.0.contains('"')), "{version:?}");
    assert_eq!(server.object("disks", "a/b/x/y z+%&").as_deref(), Some(&b"0123456789"[..]));
    let get = |part, most| objects.get("x/y z+%&", part, most, soon());
    let read = get(None, 10).unwrap();
    assert_eq!((&read.bytes[..], &read.version), (&b"0123456789"[..], &version));
    assert_eq!(get(None, 9), Err(Fault::TooLong(9)));
    let read = get(Some(2..4), 2).unwrap();
    assert_eq!((&read.bytes[..], &read.version), (&b"23"[..], &version));
    assert_eq!(get(Some(8..20), 12).unwrap().bytes, b"89");
    assert_eq!(get(Some(8..20), 2).unwrap().bytes, b"89");
    assert_eq!(get(Some(2..5), 2), Err(Fault::TooLong(2)));
    assert_eq!(get(Some(10..11), 12).unwrap().bytes, b"");
    assert_eq!(get(Some(20..21), 12).unwrap().bytes, b"");
    let head = objects.head("x/y z+%&", soon()).unwrap();
    assert_eq!((head.bytes, head.modified, head.version), (10, time, version));
    objects.put("empty", b"", WriteCondition::Always, soon()).unwrap();
    assert_eq!(objects.get("empty", None, 0, soon()).unwrap().bytes, b"");
    assert_eq!(objects.get("empty", Some(0..5), 5, soon()).unwrap().bytes, b"");
    objects.delete("x/y z+%&", soon()).unwrap();
    assert_eq!(server.keys("disks"), ["a/b/empty"]);
}

#[test]
fn listing_reads_all_pages() {
    let Store { server, objects, _dir } = &Store::new();
    server.set_page(3);
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_234_567_890);
    server.set_time(Some(time));
    for key in ["a/b", "a/b/", "a/bb/0", "a/b/0", "a/b/1/x", "a/b/1/y", "a/b/10", "a/b/<&>", "c/a/b/0"] {
        server.set_object("disks", key, key.as_bytes());
    }
    assert_eq!(keys(&**objects, ""), ["0", "1/x", "1/y", "10", "<&>"]);
    assert_eq!(keys(&**objects, "1/"), ["1/x", "1/y"]);
    assert_eq!(keys(&**objects, "2/"), [""; 0]);
    assert_eq!(server.traffic().requests[&("GET".to_owned(), "disks/".to_owned())], 4);
    let mut all = Vec::new();
    objects
        .list(
            "1/",
            &mut |listed| {
                all.push(listed);
                false
            },
            soon(),
        )
        .unwrap();
    assert_eq!((all.len(), all[0].bytes, all[0].modified), (1, 7, time));
    for n in 0..1000 {
        server.set_object("disks", &format!("a/b/many/{n:04}"), b"");
    }
    server.set_page(300);
    assert_eq!(keys(&**objects, "many/").len(), 1000);
}

#[test]
fn conditional_write_fails_if_object_changed() {
    let objects = &Store::new().objects;
    let put = |bytes: &[u8], when| objects.put("t", bytes, when, soon());
    let first = put(b"1", WriteCondition::Absent).unwrap().unwrap();
    assert_eq!(put(b"2", WriteCondition::Absent), Err(Fault::Condition));
    let second = put(b"2", WriteCondition::Unchanged(&first)).unwrap().unwrap();
    assert_eq!(put(b"3", WriteCondition::Unchanged(&first)), Err(Fault::Condition));
    assert_eq!(objects.get("t", None, 1, soon()).unwrap().bytes, b"2");
    objects.delete("t", soon()).unwrap();
    assert_eq!(put(b"3", WriteCondition::Unchanged(&second)), Err(Fault::Condition));
    let no_version = Version("a b".to_owned());
    assert!(matches!(put(b"3", WriteCondition::Unchanged(&no_version)), Err(Fault::Other(_))));
    put(b"4", WriteCondition::Absent).unwrap();
}

#[test]
fn one_of_concurrent_conditional_writes_wins() {
    let store = Store::new();
    for round in 0..20_u8 {
        let before = store.objects.head("t", soon()).ok().and_then(|head| head.version);
        let won = AtomicUsize::new(0);
        thread::scope(|scope| {
            for writer in 0..8_u8 {
                let (store, won, before) = (&store, &won, &before);
                scope.spawn(move || {
                    let when = before.as_ref().map_or(WriteCondition::Absent, WriteCondition::Unchanged);
                    match store.objects.put("t", &[round, writer], when, soon()) {
                        Ok(_) => won.fetch_add(1, SeqCst),
                        Err(fault) => {
                            assert_eq!(fault, Fault::Condition);
                            0
                        }
                    };
                });
            }
        });
        assert_eq!(won.into_inner(), 1);
    }
}

#[test]
fn concurrent_calls_of_many_threads_succeed() {
    let store = Store::new();
    thread::scope(|scope| {
        for thread in 0..32_u64 {
            let objects = &store.objects;
            scope.spawn(move || {
                let mut rng = Rng::new(thread);
                for round in 0..8 {
                    let key = format!("{thread}/{round}");
                    let mut bytes = vec![0; rng.below(300_000) as usize];
                    rng.fill(&mut bytes);
                    objects.put(&key, &bytes, WriteCondition::Absent, soon()).unwrap();
                    let read = objects.get(&key, None, 300_000, soon()).unwrap();
                    assert!(read.bytes == bytes, "{key}");
                    let end = bytes.len() as u64;
                    if end > 1 {
                        let part = objects.get(&key, Some(end / 2..end), 300_000, soon()).unwrap();
                        assert!(part.bytes == bytes[bytes.len() / 2..], "{key}");
                    }
                    if round % 2 == 0 {
                        objects.delete(&key, soon()).unwrap();
                    }
                }
            });
        }
    });
    assert_eq!(keys(&*store.objects, "").len(), 32 * 4);
    // Each write takes one request.
    assert!(store.server.traffic().of("PUT") == 256);
}

#[test]
fn invalid_keys_are_refused() {
    let objects = &Store::new().objects;
    for key in ["", "/a", "a//b", "../a", "a/../b", "a/", &"a".repeat(1021)] {
        let refused = objects.put(key, b"", WriteCondition::Always, soon());
        assert!(matches!(refused, Err(Fault::Other(_))), "{key:?}: {refused:?}");
    }
    objects.put(&"a".repeat(1020), b"", WriteCondition::Always, soon()).unwrap();
}

#[test]
fn wrong_access_key_is_denied() {
    let store = Store::new();
    store.server.require_key(Some("ANOTHER"));
    let host = store.server.address();
    let denied = Fault::Denied(format!("{host} answers 403 InvalidAccessKeyId"));
    assert_eq!(store.objects.get("x", None, 1, soon()), Err(denied.clone()));
    assert_eq!(store.objects.put("x", b"", WriteCondition::Always, soon()), Err(denied.clone()));
    assert_eq!(store.objects.list("", &mut |_| true, soon()), Err(denied));
    // The response to HEAD has no body, so the fault contains no error code.
    let denied = Fault::Denied(format!("{host} answers 403 Forbidden"));
    assert_eq!(store.objects.head("x", soon()), Err(denied));

    let anonymous =
        Options { endpoint: Some(store.server.endpoint()), anonymous: true, ..Options::default() };
    let anonymous = open("s3://disks", &anonymous).unwrap();
    let denied = Fault::Denied(format!("{host} answers 403 AccessDenied"));
    assert_eq!(anonymous.get("x", None, 1, soon()), Err(denied));
    store.server.require_key(None);
    store.server.set_object("disks", "x", b"1");
    assert_eq!(anonymous.get("x", None, 1, soon()).unwrap().bytes, b"1");
}
