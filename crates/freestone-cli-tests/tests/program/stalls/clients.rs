//! Clients that do not read their replies or do not complete their requests, beside other clients.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::harness::prelude::*;
use crate::stalls::Control;

const MIB: u32 = 1 << 20;

/// Connects a client that requests more data than socket buffers hold, and does not read any
/// replies.
fn connect_and_never_read(serve: &Serve, name: &str) -> Raw {
    let mut client = Raw::connect(serve, name);
    for _ in 0..64 {
        client.send(0, 0, 0, MIB, &[]);
    }
    Control::of(serve).until("its reads are under way", name, |stat| stat["ops"]["reads"] != 0);
    client
}

#[test]
fn remove_with_unreading_client_delays_no_other_verb() {
    let serve = Serve::start(&[
        "bad=ram,disksize=2M,faults=none",
        "other=ram,disksize=2M,faults=none",
        "r=ram,disksize=1M",
    ]);
    let control = Control::of(&serve);
    let ends_without_others = |name: &str, verb: &str| {
        let _client = connect_and_never_read(&serve, name);
        thread::scope(|scope| {
            let ends = scope.spawn(|| control.ok(verb, &json!({ "name": name, "force": true })));
            // The verb has removed the exports of the device, and waits for the end of the
            // connection.
            control.until(verb, name, |stat| stat["exports"] == json!([]));
            control.ok("create", &json!({ "device": format!("new-{name}=null,size=1M,publish=yes") }));
            control.ok("snapshot", &json!({ "snapshots": [{ "origin": "r", "name": format!("s-{name}") }] }));
            control.ok("set", &json!({ "name": "r", "attrs": { "mem_limit": "1G" } }));
            control.ok("remove", &json!({ "name": format!("s-{name}") }));
            control.check_responsive();
            assert!(!ends.is_finished(), "{verb}: the others waited for it");
            // Verbs for the same device name run one after the other.
            let again = control.ask("remove", &json!({ "name": name }));
            assert_eq!(ends.join().unwrap()["connections_ended"], 1);
            assert_eq!(again.is_ok(), verb == "unpublish", "{again:?}");
        });
    };
    // Both verbs wait for the grace period of a connection, so they run in parallel to save time.
    thread::scope(|scope| {
        scope.spawn(|| ends_without_others("bad", "remove"));
        scope.spawn(|| ends_without_others("other", "unpublish"));
    });
}

#[test]
fn thousand_verbs_complete_beside_bad_clients() {
    const VERBS: usize = 1000;
    // Each connection of the test needs a file descriptor.
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("base");
    std::fs::write(&image, vec![7; 1 << 20]).unwrap();
    let base = format!("base=file,path={},readonly=yes,publish=no", text(&image));
    let serve = Serve::start(&["bad=ram,disksize=2M,faults=none", "r=ram,disksize=1M", &base]);
    let control = Control::of(&serve);
    let _deaf = connect_and_never_read(&serve, "bad");
    // The bad clients are silent, send half a request, or do not read replies.
    let open = || UnixStream::connect(&control.0).unwrap();
    let silent: Vec<_> = (0..200).map(|_| open()).collect();
    for mut stream in &silent[..50] {
        stream.write_all(b"{\"jsonrpc\":").unwrap();
    }
    let listing = format!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"{}\"}}\n", "x".repeat(1 << 18));
    let unread: Vec<_> = (0..20).map(|_| open()).collect();
    for mut stream in &unread {
        stream.set_nonblocking(true).unwrap();
        while stream.write(listing.as_bytes()).is_ok() {}
    }
    thread::scope(|scope| {
        let removed = scope.spawn(|| control.ok("remove", &json!({ "name": "bad", "force": true })));
        let threads: Vec<_> = (0..VERBS)
            .map(|n| {
                let control = &control;
                let one = move || match n % 5 {
                    0 => {
                        control.ask("create", &json!({ "device": format!("n-{n}=null,size=1M,publish=yes") }))
                    }
                    1 | 2 => control.ask("fork", &json!({ "base": "base", "name": format!("f-{n}") })),
                    3 => control.ask(
                        "snapshot",
                        &json!({ "snapshots": [{ "origin": "r", "name": format!("s-{n}") }] }),
                    ),
                    _ => control.ask("set", &json!({ "name": "r", "attrs": { "mem_limit": "1G" } })),
                };
                thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, one).unwrap()
            })
            .collect();
        let failed: Vec<_> = threads
            .into_iter()
            .filter_map(|thread| thread.join().map_or(Some(json!("no answer")), Result::err))
            .collect();
        assert!(failed.is_empty(), "{} of {VERBS} failed, the first with {}", failed.len(), failed[0]);
        removed.join().unwrap();
    });
    let devices = control.ok("list", &json!({}))["devices"].as_array().unwrap().len();
    assert_eq!(devices, 2 + VERBS / 5 * 4);
}

#[test]
fn short_verbs_complete_beside_long_verbs() {
    const LONG: usize = 100;
    let serve = Serve::start(&[
        "z=null,size=16M,zoned=1,zone_size=1M,faults=reset hang",
        "p=null,size=1M,memory_backed=1,power_cut=yes",
    ]);
    let control = Control::of(&serve);
    thread::scope(|scope| {
        for _ in 0..LONG {
            scope.spawn(|| {
                let params = json!({ "name": "z", "action": "reset", "offset": 0, "count": 1 });
                control.ok("zones", &params);
            });
        }
        control.until("all of them hang", "z", |stat| stat["faults"]["hanging"] == LONG);
        control.check_responsive();
        control.ok("get", &json!({ "name": "z" }));
        control.ok("power-cut", &json!({ "name": "p" }));
        assert_eq!(control.ok("release", &json!({ "name": "z" }))["released"], LONG);
    });
}
