//! Tests of the fault that each kind of failure causes.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use freestone_store::objects::{CallLimits, Fault, ListEntry, WriteCondition};
use freestone_testkit::s3::{Server, ServerFault};

use crate::{Store, soon};

/// Creates an object store whose server applies `trouble` to all requests for keys that end with `bad`.
fn with(trouble: ServerFault) -> Store {
    let store = Store::new();
    store.server.set_object("disks", "a/b/bad", &[b'x'; 1000]);
    store.server.add_fault(|asked| asked.key.ends_with("bad"), trouble);
    store
}

fn get(store: &Store) -> Result<Vec<u8>, Fault> {
    store.objects.get("bad", None, 1001, soon()).map(|read| read.bytes)
}

fn part(store: &Store) -> Result<Vec<u8>, Fault> {
    store.objects.get("bad", Some(100..200), 1000, soon()).map(|read| read.bytes)
}

fn is_transient<T>(result: &Result<T, Fault>) -> bool {
    matches!(result, Err(Fault::Transient(_)))
}

#[test]
fn busy_store_is_transient_fault() {
    for (status, code) in [(503, "SlowDown"), (500, "InternalError"), (429, "TooManyRequests"), (507, "Full")]
    {
        let store = with(ServerFault::Status(status, code));
        let busy = Fault::Transient(format!("{} answers {status} {code}", store.server.address()));
        assert_eq!(get(&store), Err(busy.clone()));
        assert_eq!(store.objects.put("bad", b"", WriteCondition::Absent, soon()), Err(busy.clone()));
        assert_eq!(store.objects.delete("bad", soon()), Err(busy));
        assert!(is_transient(&store.objects.head("bad", soon())));
        // The object store does not retry a failed request. Only callers retry.
        assert_eq!((store.requests("GET", "bad"), store.requests("PUT", "bad")), (1, 1));
    }
}

#[test]
fn truncated_response_is_transient_fault() {
    for trouble in [ServerFault::Cut(0), ServerFault::Cut(999), ServerFault::Cut(50), ServerFault::Length(1)]
    {
        let store = with(trouble.clone());
        assert!(is_transient(&get(&store)), "{trouble:?}: {:?}", get(&store));
    }
    for trouble in
        [ServerFault::Cut(0), ServerFault::Cut(99), ServerFault::Length(1), ServerFault::Length(-1)]
    {
        let store = with(trouble.clone());
        assert!(is_transient(&part(&store)), "{trouble:?}: {:?}", part(&store));
    }
    // If the server announces too few bytes of a whole object, the client cannot detect the error.
    assert_eq!(get(&with(ServerFault::Length(-1))).map(|bytes| bytes.len()), Ok(999));
}

#[test]
fn corrupt_bytes_are_passed_to_caller() {
    let read = get(&with(ServerFault::Flip(7))).unwrap();
    assert_eq!((read[6], read[7], read.len()), (b'x', b'y', 1000));
}

#[test]
fn store_without_ranges_is_read_from_start() {
    let store = with(ServerFault::NoRange);
    store.server.set_object("disks", "a/b/bad", b"0123456789");
    let get = |part, most| store.objects.get("bad", Some(part), most, soon()).map(|read| read.bytes);
    assert_eq!(get(2..5, 3).unwrap(), b"234");
    assert_eq!(get(0..20, 10).unwrap(), b"0123456789");
    assert_eq!(get(8..20, 10).unwrap(), b"89");
    assert_eq!(get(10..20, 10).unwrap(), b"");
    assert_eq!(get(2..5, 2), Err(Fault::TooLong(2)));
    store.server.set_object("disks", "a/b/bad", &vec![1; 17 << 20]);
    assert_eq!(get(16 << 20..(16 << 20) + 2, 2).unwrap(), [1, 1]);
    let refused = get((16 << 20) + 1..(16 << 20) + 2, 2);
    assert!(matches!(refused, Err(Fault::Unsupported(_))), "{refused:?}");
}

#[test]
fn response_with_other_range_is_transient_fault() {
    assert!(is_transient(&part(&with(ServerFault::OtherPart(1)))));
}

#[test]
fn broken_connection_is_transient_fault() {
    for (trouble, is_written) in [
        (ServerFault::ResetBefore, false),
        (ServerFault::ResetAfter, true),
        (ServerFault::StatusAfter(500, "InternalError"), true),
    ] {
        let store = with(trouble.clone());
        let put = store.objects.put("new-bad", b"1", WriteCondition::Absent, soon());
        assert!(is_transient(&put), "{trouble:?}: {put:?}");
        assert_eq!(store.server.object("disks", "a/b/new-bad").is_some(), is_written, "{trouble:?}");
        assert!(is_transient(&get(&store)));
        assert_eq!(store.requests("PUT", "new-bad"), 1);
    }
    let store = Store::new();
    store.objects.put("x", b"1", WriteCondition::Always, soon()).unwrap();
    // A connection that was closed while idle does not fail the next request.
    store.server.cut_connections();
    std::thread::sleep(Duration::from_millis(50));
    store.objects.put("x", b"2", WriteCondition::Always, soon()).unwrap();
}

#[test]
fn missing_bucket_is_not_missing_object() {
    let store = Store::new();
    store.server.remove_bucket("disks");
    let missing = Fault::Other("the bucket disks is not there".to_owned());
    assert_eq!(store.objects.get("x", None, 1, soon()), Err(missing.clone()));
    assert_eq!(store.objects.put("x", b"", WriteCondition::Always, soon()), Err(missing.clone()));
    assert_eq!(store.objects.put("x", b"", WriteCondition::Absent, soon()), Err(missing.clone()));
    assert_eq!(store.objects.delete("x", soon()), Err(missing.clone()));
    assert_eq!(store.objects.list("", &mut |_| true, soon()), Err(missing));
    assert_eq!(store.objects.head("x", soon()), Err(Fault::NotFound));
    store.server.create_bucket("disks");
    assert_eq!(store.objects.get("x", None, 1, soon()), Err(Fault::NotFound));
}

#[test]
fn full_bucket_denies_writes() {
    let store = Store::new();
    store.server.set_quota(Some(10));
    store.objects.put("x", b"0123456789", WriteCondition::Always, soon()).unwrap();
    let full = Fault::Denied(format!("{} answers 403 QuotaExceeded", store.server.address()));
    assert_eq!(store.objects.put("y", b"1", WriteCondition::Always, soon()), Err(full));
    store.objects.put("x", b"1", WriteCondition::Always, soon()).unwrap();
}

#[test]
fn endless_response_is_limited() {
    let endless = |head| {
        let store = with(ServerFault::Endless(head));
        store.server.add_fault(|asked| asked.key.is_empty(), ServerFault::Endless(head));
        store
    };
    let store = endless(
        "HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\nLast-Modified: Thu, 01 Jan 1970 00:00:00 GMT\r\n\r\n",
    );
    assert_eq!(get(&store), Err(Fault::TooLong(1001)));
    assert_eq!(part(&store), Ok(vec![0; 100]));
    let list = store.objects.list("", &mut |_| true, soon());
    assert!(is_transient(&list), "{list:?}");
    let store = endless("HTTP/1.1 403 No\r\nContent-Length: 99999999999\r\n\r\n");
    assert!(matches!(get(&store), Err(Fault::Denied(_))));
    assert!(matches!(store.objects.put("bad", b"", WriteCondition::Always, soon()), Err(Fault::Denied(_))));
    let store = endless("HTTP/1.1 200 OK\r\nX: ");
    assert!(is_transient(&get(&store)));
    let store = endless("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
    get(&store).unwrap_err();
}

#[test]
fn invalid_http_response_is_fault() {
    for (bytes, status) in [
        (&b""[..], None),
        (b"\0\xff\x1b[2J", None),
        (b"HTTP/1.1 999 \x1b[2J\r\nContent-Length: 0\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", None),
        (b"HTTP/1.1 301 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", Some(301)),
        (b"HTTP/1.1 418 No\r\nContent-Length: 30\r\n\r\n<Code>\x1b[2J</Code>012345678901", Some(418)),
    ] {
        let store = with(ServerFault::Raw(bytes.to_vec()));
        for fault in [get(&store).unwrap_err(), store.objects.delete("bad", soon()).unwrap_err()] {
            let said = fault.to_string();
            assert!(!said.contains('\x1b') && said.chars().count() <= 300, "{said:?}");
            let is_status = status.is_some_and(|status| said.contains(&format!("answers {status}")));
            assert!(is_status || matches!(fault, Fault::Transient(_) | Fault::Other(_)), "{fault:?}");
        }
    }
}

#[test]
fn write_without_etag_reads_version_back() {
    let store = Store::new();
    let answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
    store.server.add_fault(|asked| asked.method == "PUT", ServerFault::Raw(answer.to_vec()));
    let version = store.objects.put("bad", b"1", WriteCondition::Always, soon()).unwrap();
    assert_eq!(version, store.objects.head("bad", soon()).unwrap().version);
    assert_eq!(store.server.object("disks", "a/b/bad").as_deref(), Some(&b"1"[..]));
}

#[test]
fn invalid_listings_are_faults() {
    for body in
        ["", "<", "<ListBucketResult><Contents><Key>a/b/x</Key></Contents></ListBucketResult>", "\x1b[2J"]
    {
        let store = Store::new();
        let answer =
            format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        store.server.add_fault(|asked| asked.key.is_empty(), ServerFault::Raw(answer.into_bytes()));
        let listed = store.objects.list("", &mut |_| true, soon());
        let fault = listed.unwrap_err();
        assert!(matches!(fault, Fault::Transient(_)) && !fault.to_string().contains('\x1b'), "{fault:?}");
    }
    // An invalid key in a listing fails the listing with a permanent fault.
    let store = Store::new();
    store.server.set_object("disks", "a/b/x//y", b"");
    let listed = store.objects.list("", &mut |_| true, soon()).unwrap_err();
    assert!(matches!(&listed, Fault::Other(said) if said.contains("x//y")), "{listed:?}");
}

#[test]
fn refused_connection_is_transient_fault() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let store = Store::with(|options| options.endpoint = Some(format!("http://{address}")));
    let fault = store.objects.get("x", None, 1, soon()).unwrap_err();
    assert!(matches!(&fault, Fault::Transient(said) if said.contains("refused")), "{fault:?}");
}

#[test]
fn endless_listing_ends_at_deadline() {
    let store = Store::new();
    let page = "<ListBucketResult><NextContinuationToken>x</NextContinuationToken></ListBucketResult>";
    let answer =
        format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{page}", page.len());
    store.server.add_fault(|asked| asked.key.is_empty(), ServerFault::Raw(answer.into_bytes()));
    let since = Instant::now();
    let listed = store.objects.list("", &mut |_| true, CallLimits::within(Duration::from_millis(300)));
    assert_eq!(listed, Err(Fault::TimedOut));
    // Without its deadline, the listing would never end.
    assert!(since.elapsed() < Duration::from_secs(15), "{:?}", since.elapsed());
}

#[test]
fn chunked_range_length_is_checked() {
    let answer = |pieces: &str| {
        let head = "HTTP/1.1 206 Partial Content\r\nConnection: close\r\nContent-Range: bytes 100-109/1000\r\n\
                    Last-Modified: Thu, 01 Jan 1970 00:00:00 GMT\r\nTransfer-Encoding: chunked\r\n\r\n";
        let store = with(ServerFault::Raw(format!("{head}{pieces}0\r\n\r\n").into_bytes()));
        store.objects.get("bad", Some(100..110), 10, soon()).map(|read| read.bytes)
    };
    assert_eq!(answer("7\r\n0123456\r\n3\r\n789\r\n").unwrap(), b"0123456789");
    for pieces in ["", "7\r\n0123456\r\n", "7\r\n0123456\r\n4\r\n789a\r\n"] {
        assert!(is_transient(&answer(pieces)), "{pieces:?}: {:?}", answer(pieces));
    }
}

#[test]
fn bucket_redirects_are_not_followed() {
    let elsewhere = Server::start(&["disks"]);
    let target = format!("{}/disks/a/b/bad", elsewhere.endpoint());
    for status in [301, 302, 307, 308] {
        let store = with(ServerFault::Raw(
            format!("HTTP/1.1 {status} There\r\nConnection: close\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n")
                .into_bytes(),
        ));
        assert!(matches!(get(&store), Err(Fault::Other(_))), "{:?}", get(&store));
        let put = store.objects.put("bad", b"1", WriteCondition::Always, soon());
        assert!(matches!(put, Err(Fault::Other(_))), "{put:?}");
    }
    assert_eq!(elsewhere.traffic().requests.len(), 0);
}

#[test]
fn listed_keys_outside_prefix_are_skipped() {
    let store = Store::new();
    let contents = ["a/b/x", "a/b/y/1", "other/x", "a/bx", "b/a/b/x"].map(|key| {
        let modified = "2009-10-12T17:50:30.000Z";
        format!("<Contents><Key>{key}</Key><Size>1</Size><LastModified>{modified}</LastModified></Contents>")
    });
    let contents = contents.concat();
    let body = format!("<ListBucketResult>{contents}</ListBucketResult>");
    let answer =
        format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    store.server.add_fault(|asked| asked.key.is_empty(), ServerFault::Raw(answer.into_bytes()));
    for (prefix, wanted) in [("", &["x", "y/1"][..]), ("y/", &["y/1"])] {
        let mut keys = Vec::new();
        let mut each = |listed: ListEntry| {
            keys.push(listed.key);
            true
        };
        store.objects.list(prefix, &mut each, soon()).unwrap();
        assert_eq!(keys, wanted);
    }
}
