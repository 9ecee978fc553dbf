//! Limits on the number of log lines that clients can cause.

use super::{end, start_logged};
use crate::harness::prelude::*;

/// Number of clients of each kind. The rate limiter logs one line for all clients of a kind.
const CLIENTS: usize = 40;

/// Source directories of the code that logs because of clients: exports and acceptors.
const SOURCES: [&str; 4] = [
    "../freestone-nbd/src",
    "../freestone-vhost-user/src",
    "../freestone-ublk/src",
    "../freestone-control/src",
];
/// Log calls that need no rate limiter: a part of the text of each call, and the reason.
const OTHERS: [(&str, &str); 11] = [
    ("{name}: {cause}{held_back}", "limited by the failures of the export"),
    ("ublk: io_uring failed", "a queue ends"),
    ("lack CAP_SYS_RESOURCE", "once for each device"),
    ("even if that is killed", "once for each device"),
    ("of the former server is removed", "once for each device"),
    ("keeps its old size: ublk", "once for each device"),
    ("shared.name());", "the end of a device"),
    ("ublk: requests are still in flight", "the end of an export"),
    ("vhost-user: requests are still in flight", "the end of an export"),
    ("cannot handle SIGBUS", "once for the process"),
    ("every client that reaches the port can read it", "at the start"),
];

fn sources(dir: &Path, each: &mut dyn FnMut(&Path, &str)) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, each);
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            each(&path, &fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn log_call_sites_of_exports_use_the_limiter() {
    let mut sites = 0;
    for dir in SOURCES {
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join(dir), &mut |path, text| {
            for (at, _) in text.match_indices("warn!(").chain(text.match_indices("error!(")) {
                let call = text[at..].split_inclusive(");\n").next().unwrap();
                sites += 1;
                let is_other = OTHERS.iter().any(|(part, _)| call.contains(part));
                assert!(
                    is_other,
                    "{}: a client may repeat this line: use client_log!\n{call}",
                    path.display()
                );
            }
        });
    }
    assert!(sites >= 5, "the search finds no call sites");
}

#[test]
fn hostile_clients_cause_one_log_line_of_a_kind() {
    let serve = start_logged(&["n=null,size=1M"]);
    serve.text(&["publish", "n", "--vhost-user", &format!("unix:{}", text(&serve.path("vhost")))]);
    for socket in ["nbd", "vhost"] {
        for _ in 0..CLIENTS {
            let mut stream = UnixStream::connect(serve.path(socket)).unwrap();
            // The client sends bytes that are invalid in every protocol, then closes its sending
            // side.
            let _ = stream.write_all(&[b'x'; 64]);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        }
    }
    let dir = end(serve);
    let log = fs::read_to_string(dir.path().join("log")).unwrap();
    assert_eq!(log.lines().count(), 2, "{log}");
}
