//! Tests of read-only objects: files of a web server.

use std::time::Duration;

use freestone_objects::{OpenError, Options, open};
use freestone_store::objects::{CallLimits, Fault, WriteCondition};
use freestone_testkit::s3::{Server, ServerFault};

use crate::soon;

#[test]
fn web_files_are_read_only() {
    let server = Server::start(&["www"]);
    server.set_object("www", "a/x y", b"0123456789");
    let objects = open(&format!("{}/www/", server.endpoint()), &Options::default()).unwrap();
    assert_eq!(objects.url(), format!("{}/www", server.endpoint()));
    assert_eq!(objects.get("a/x y", None, 10, soon()).unwrap().bytes, b"0123456789");
    assert_eq!(objects.get("a/x y", Some(3..5), 10, soon()).unwrap().bytes, b"34");
    assert_eq!(objects.get("a/x y", Some(10..11), 10, soon()).unwrap().bytes, b"");
    assert_eq!(objects.get("a/x y", None, 9, soon()), Err(Fault::TooLong(9)));
    assert_eq!(objects.get("a/y", None, 10, soon()), Err(Fault::NotFound));
    let head = objects.head("a/x y", soon()).unwrap();
    assert_eq!(head.bytes, 10);
    assert_eq!(objects.get("a/x y", None, 10, soon()).unwrap().version, head.version);
    assert_eq!(objects.head("a/y", soon()), Err(Fault::NotFound));
    server.reset_traffic();
    let refused = [
        objects.put("a/y", b"", WriteCondition::Always, soon()).err(),
        objects.delete("a/x y", soon()).err(),
        objects.list("", &mut |_| true, soon()).err(),
    ];
    for refused in refused {
        assert!(matches!(refused, Some(Fault::Unsupported(_))), "{refused:?}");
    }
    assert_eq!(server.traffic().requests.len(), 0);
}

#[test]
fn web_server_without_ranges_is_read_from_start() {
    let server = Server::start(&["www"]);
    server.set_object("www", "x", b"0123456789");
    server.add_fault(|asked| asked.method == "GET", ServerFault::NoRange);
    let objects = open(&format!("{}/www", server.endpoint()), &Options::default()).unwrap();
    assert_eq!(objects.get("x", Some(3..5), 2, soon()).unwrap().bytes, b"34");
    assert_eq!(objects.get("x", Some(12..15), 10, soon()).unwrap().bytes, b"");
}

#[test]
fn web_server_with_minimal_headers_is_enough() {
    let server = Server::start(&["www"]);
    let bare = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 3\r\n\r\nabc".to_vec();
    server.add_fault(|_| true, ServerFault::Raw(bare));
    let objects = open(&format!("{}/www", server.endpoint()), &Options::default()).unwrap();
    let read = objects.get("x", None, 3, soon()).unwrap();
    assert_eq!((&read.bytes[..], read.version), (&b"abc"[..], None));
    assert_eq!(objects.head("x", soon()).unwrap().version, None);
}

/// Starts a server that redirects all requests to `target`.
fn leads_to(target: &str) -> Server {
    let server = Server::start(&[]);
    let answer =
        format!("HTTP/1.1 302 Found\r\nConnection: close\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n");
    server.add_fault(|_| true, ServerFault::Raw(answer.into_bytes()));
    server
}

#[test]
fn web_redirects_are_followed_up_to_limit() {
    let server = Server::start(&["www"]);
    server.set_object("www", "x", b"0123456789");
    let there = leads_to(&format!("{}/www/x", server.endpoint()));
    let objects = open(&there.endpoint(), &Options::default()).unwrap();
    assert_eq!(objects.get("x", Some(3..5), 2, soon()).unwrap().bytes, b"34");
    let circle = leads_to("/again");
    let objects = open(&circle.endpoint(), &Options::default()).unwrap();
    let fault = objects.get("x", None, 1, CallLimits::within(Duration::from_secs(10))).unwrap_err();
    assert!(matches!(fault, Fault::Other(_)), "{fault:?}");
}

#[test]
fn web_store_refuses_other_options() {
    let with = |change: fn(&mut Options)| {
        let mut options = Options::default();
        change(&mut options);
        open("https://host/path", &options).err().expect("it is opened")
    };
    let option = |option| OpenError::Option { scheme: "https", option };
    assert_eq!(with(|options| options.endpoint = Some("http://host".to_owned())), option("endpoint"));
    assert_eq!(with(|options| options.region = Some("here".to_owned())), option("region"));
    assert_eq!(with(|options| options.credentials = Some("/file".into())), option("credentials"));
}
