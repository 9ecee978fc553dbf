//! How many may be connected: one more waits for a place in the handshake.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::client::{ACK, ERR_POLICY, info_data, option};
use crate::common::{Client, Fixture, MemDevice, eventually};
use freestone_core::device::Device;
use freestone_core::places::Places;
use freestone_nbd::{Address, ExportOptions, Limits};

const GO: u32 = 7;
const EXPORT_NAME: u32 = 1;
const SHORT: Duration = Duration::from_millis(300);

/// "disk" at one address with so many places, and at another one, with so many over both.
fn serving(limits: Limits, here: u64, both: u64) -> (Fixture, Address, [Arc<Places>; 2]) {
    let fixture = Fixture::with(limits);
    let other = fixture.server.listen(&Address::Unix(fixture.directory.path().join("other.sock"))).unwrap();
    let (own, all) = (Arc::new(Places::default()), Arc::new(Places::default()));
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

/// A client that has chosen the export and has no answer yet.
fn begin(address: &Address) -> Client {
    let mut client = Client::connect(address);
    client.greet(3);
    client.send(&option(GO, &info_data("disk", &[])));
    client
}

#[test]
fn one_more_waits_for_a_place_and_gets_it() {
    let (fixture, other, [own, all]) = serving(Limits::default(), 2, 3);
    let first = enter(&fixture.address);
    let mut second = enter(&fixture.address);
    let mut third = begin(&fixture.address);
    // The other export has a place left, the device no more after that.
    let mut there = enter(&other);
    let mut fifth = begin(&other);
    assert_eq!((own.taken(), all.taken()), (2, 3));
    std::thread::sleep(SHORT);
    assert_eq!((own.taken(), all.taken()), (2, 3), "nobody got in");
    first.disconnect();
    // Either of the two that wait.
    eventually(|| all.taken() == 3 && fixture.server.connections("disk") == 3);
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
    assert_eq!((own.taken(), all.taken()), (0, 0), "all were given back");
}

#[test]
fn who_waits_too_long_is_told_why_and_can_ask_again() {
    let limits = Limits { handshake_total: SHORT, ..Limits::default() };
    let (fixture, _, [own, _]) = serving(limits, 1, 0);
    let first = enter(&fixture.address);
    let begun = Instant::now();
    let mut late = begin(&fixture.address);
    let reply = late.option_replies(GO).pop().unwrap();
    assert_eq!(reply.kind, ERR_POLICY);
    let text = String::from_utf8(reply.data).unwrap();
    assert_eq!(text, "as many clients are connected as may be, 1 (max_clients)");
    assert!(begun.elapsed() >= SHORT / 2);
    // The oldest way to choose has no error.
    let mut old = Client::connect(&fixture.address);
    old.greet(3);
    old.send(&option(EXPORT_NAME, b"disk"));
    old.assert_closed();
    assert_eq!(own.taken(), 1);
    first.disconnect();
    drop(late);
    fixture.assert_no_connections();
    enter(&fixture.address).disconnect();
}

#[test]
fn who_leaves_while_it_waits_takes_no_place() {
    let (fixture, _, [own, _]) = serving(Limits::default(), 1, 0);
    let first = enter(&fixture.address);
    let waiting: Vec<_> = (0..20).map(|_| begin(&fixture.address)).collect();
    eventually(|| fixture.server.stats().connections == 21);
    drop(waiting);
    eventually(|| fixture.server.stats().connections == 1);
    assert_eq!(own.taken(), 1);
    first.disconnect();
    fixture.assert_no_connections();
}
