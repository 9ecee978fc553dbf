//! Tests of client limits: a client above the limit waits in the handshake.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::prelude::*;
use freestone_core::concurrency_limit::ConcurrencyLimit;
use freestone_core::device::Device;
use freestone_nbd::{Address, ExportOptions, Limits};

const SHORT: Duration = Duration::from_millis(300);

/// Publishes "disk" at two addresses. `here` limits the clients of the first address, and `both` those of
/// both addresses together; 0 means unlimited.
fn serving(limits: Limits, here: u64, both: u64) -> (Fixture, Address, [Arc<ConcurrencyLimit>; 2]) {
    let fixture = Fixture::with(limits);
    let other = fixture.server.listen(&Address::Unix(fixture.directory.path().join("other.sock"))).unwrap();
    let (own, all) = (Arc::new(ConcurrencyLimit::default()), Arc::new(ConcurrencyLimit::default()));
    own.set(here);
    all.set(both);
    let device: Arc<dyn Device> = MemDevice::new(1 << 20);
    for (at, places) in
        [(&fixture.address, vec![Arc::clone(&own), Arc::clone(&all)]), (&other, vec![Arc::clone(&all)])]
    {
        let options = ExportOptions { places, ..ExportOptions::default() };
        fixture.server.publish(at, "disk", Arc::clone(&device), options).unwrap();
    }
    (fixture, other, [own, all])
}

fn enter(address: &Address) -> Client {
    let mut client = begin(address);
    assert_eq!(client.option_replies(GO).last().unwrap().kind, ACK);
    client
}

/// Returns a client that has sent `GO` for the export and waits for the reply.
fn begin(address: &Address) -> Client {
    let mut client = connect(address);
    client.greet(3);
    client.send(&option(GO, &info_data("disk", &[])));
    client
}

#[test]
fn client_above_limit_waits_and_enters() {
    let (fixture, other, [own, all]) = serving(Limits::default(), 2, 3);
    let first = enter(&fixture.address);
    let mut second = enter(&fixture.address);
    let mut third = begin(&fixture.address);
    // The other address admits one client, which reaches the limit that both addresses share.
    let mut there = enter(&other);
    let mut fifth = begin(&other);
    assert_eq!((own.in_use(), all.in_use()), (2, 3));
    std::thread::sleep(SHORT);
    assert_eq!((own.in_use(), all.in_use()), (2, 3), "no client may enter");
    first.disconnect();
    // Either of the two waiting clients enters.
    eventually(|| all.in_use() == 3 && fixture.server.connections("disk") == 3);
    there.read(0, 512).unwrap();
    second.read(0, 512).unwrap();
    all.set(0);
    assert_eq!(third.option_replies(GO).last().unwrap().kind, ACK);
    assert_eq!(fifth.option_replies(GO).last().unwrap().kind, ACK);
    third.read(0, 512).unwrap();
    for client in [second, third, there, fifth] {
        client.disconnect();
    }
    fixture.assert_no_connections();
    assert_eq!((own.in_use(), all.in_use()), (0, 0), "all places must be released");
}

#[test]
fn client_limit_timeout_returns_error_and_can_retry() {
    let limits = Limits { handshake_timeout: SHORT, ..Limits::default() };
    let (fixture, _, [own, _]) = serving(limits, 1, 0);
    let first = enter(&fixture.address);
    let begun = Instant::now();
    let mut late = begin(&fixture.address);
    let reply = late.option_replies(GO).pop().unwrap();
    assert_eq!(reply.kind, ERR_POLICY);
    let text = String::from_utf8(reply.data).unwrap();
    assert_eq!(text, "client limit reached: 1 (max_clients)");
    assert!(begun.elapsed() >= SHORT / 2);
    // OPT_EXPORT_NAME has no error reply, so the server closes the connection.
    let mut old = connect(&fixture.address);
    old.greet(3);
    old.send(&option(EXPORT_NAME, b"disk"));
    old.assert_closed();
    assert_eq!(own.in_use(), 1);
    first.disconnect();
    drop(late);
    fixture.assert_no_connections();
    enter(&fixture.address).disconnect();
}

#[test]
fn client_leaving_while_waiting_takes_no_place() {
    let (fixture, _, [own, _]) = serving(Limits::default(), 1, 0);
    let first = enter(&fixture.address);
    let waiting: Vec<_> = (0..20).map(|_| begin(&fixture.address)).collect();
    eventually(|| fixture.server.stats().connections == 21);
    drop(waiting);
    eventually(|| fixture.server.stats().connections == 1);
    assert_eq!(own.in_use(), 1);
    first.disconnect();
    fixture.assert_no_connections();
}
