//! Tests of the memory budget that all connections share.

use std::collections::HashMap;
use std::net::Shutdown;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::waiting::{LONG, MIB, connect, split};
use crate::common::prelude::*;
use freestone_nbd::Limits;
use freestone_testkit::effort;

/// Client connections, each with the thread that sends its requests.
type Connections = Vec<(Client, JoinHandle<()>)>;

/// Creates a server with the smallest memory budget, and a hung device. Connections to the device have used
/// up the device's share of the budget.
fn with_hung_device() -> (Fixture, Arc<MemDevice>, Connections) {
    let device = MemDevice::new(64 * MIB);
    let fixture = Fixture::with(Limits { max_memory_in_flight: 64 * MIB, ..Limits::default() });
    fixture.publish("disk", &device);
    device.set(Manner::Held);
    // Each of the three connections would use half of the budget.
    let large = (0..3).map(|_| split(&fixture.address, WRITE, 256 << 10, 128)).collect();
    eventually(|| held(&device) >= 8 * MIB);
    std::thread::sleep(Duration::from_millis(20));
    (fixture, device, large)
}

/// Returns the total length in bytes of the requests that the device holds.
fn held(device: &MemDevice) -> u64 {
    device.held().iter().map(|request| request.len).sum()
}

#[test]
fn hung_device_leaves_budget_to_others() {
    let (fixture, device, large) = with_hung_device();
    assert!(held(&device) <= 16 * MIB, "{}", held(&device));
    // The client requests a reply that is larger than the limit on bytes in flight.
    let mut simple = fixture.enter(false);
    let cookie = simple.ask(0, READ, 0, 40 << 20);
    // A small request is served although the device's share is used up.
    let mut small = fixture.enter(true);
    let asked = small.ask(0, READ, 0, 4096);
    let at = || device.held().iter().position(|request| request.len == 4096);
    eventually(|| at().is_some());
    if let Some(at) = at() {
        device.release(at);
    }
    let mut wanted = HashMap::from([(asked, (0, 4096))]);
    assert!(small.read_replies(&mut wanted)[&asked].is_ok());
    // Requests to another device are served, as each device has its own share.
    let other = MemDevice::new(64 * MIB);
    other.set(Manner::Thread);
    fixture.publish("other", &other);
    let mut neighbour = fixture.connect();
    neighbour.greet(3);
    neighbour.agree(Headers::Structured);
    neighbour.go("other");
    let mut wanted = HashMap::new();
    for len in [1 << 20, 4 << 20, 8 << 20, 1 << 20] {
        let cookie = neighbour.ask(0, READ, 0, len);
        wanted.insert(cookie, (0, len));
    }
    assert!(neighbour.read_replies(&mut wanted).values().all(Result::is_ok));
    // When the device continues, all other requests complete.
    device.set(Manner::Inline);
    device.release_all_backwards();
    for (mut reader, writer) in large {
        for _ in 0..128 {
            reader.chunk();
        }
        writer.join().unwrap();
    }
    let mut wanted = HashMap::from([(cookie, (0, 40 << 20))]);
    assert!(simple.read_replies(&mut wanted)[&cookie].is_ok());
    for client in [simple, small, neighbour] {
        client.disconnect();
    }
    fixture.assert_sound();
}

#[test]
fn stalled_connection_ends_when_client_leaves() {
    let (fixture, device, large) = with_hung_device();
    let stalled: Vec<_> = (0..6)
        .map(|_| {
            let (mut client, _) = connect(&fixture.address);
            client.ask(DF, READ, 0, 16 << 20);
            client
        })
        .collect();
    std::thread::sleep(Duration::from_millis(50));
    let connections = || fixture.server.stats().connections;
    assert_eq!(connections(), 9);
    drop(stalled);
    // The count may include one stalled connection, because the device may hold one of its requests.
    eventually(|| connections() <= 4);
    device.set(Manner::Inline);
    device.release_all_backwards();
    for (reader, writer) in large {
        drop(reader);
        let _ = writer.join();
    }
    fixture.assert_sound();
}

/// The protocol requires that the server completes requests sent before a disconnect.
#[test]
fn stalled_requests_before_disconnect_are_done() {
    let (fixture, device, large) = with_hung_device();
    let leaving: Vec<_> = (0..3)
        .map(|_| {
            let (mut client, stream) = connect(&fixture.address);
            let cookie = client.ask(0, READ, 0, 16 << 20);
            client.ask(0, DISC, 0, 0);
            stream.shutdown(Shutdown::Write).unwrap();
            (client, HashMap::from([(cookie, (0, 16 << 20))]))
        })
        .collect();
    std::thread::sleep(Duration::from_millis(50));
    device.set(Manner::Inline);
    device.release_all_backwards();
    for (mut reader, writer) in large {
        (0..128).for_each(|_| drop(reader.chunk()));
        writer.join().unwrap();
    }
    for (mut client, mut wanted) in leaving {
        assert!(client.read_replies(&mut wanted).values().all(Result::is_ok));
    }
    fixture.assert_sound();
}

#[test]
fn connection_waiting_for_budget_can_be_cut() {
    let device = MemDevice::new(64 * MIB);
    let limits = Limits { max_memory_in_flight: 64 * MIB, ..Limits::default() };
    let fixture = Fixture::with(limits);
    fixture.publish("disk", &device);
    device.set(Manner::Held);
    let held = || device.held().len();
    let two: Vec<_> = (0..2).map(|_| split(&fixture.address, READ, 256 << 10, 128)).collect();
    // The reads use the device's whole share, except the reserve for small requests.
    eventually(|| held() >= 32);
    let waits = split(&fixture.address, READ, 1 << 20, 1);
    std::thread::sleep(Duration::from_millis(20));
    // A connection that waits for budget can be ended.
    let begun = Instant::now();
    // `shutdown` and `unpublish` end the connections after a grace time. The grace time of `unpublish` is
    // fixed and long, so only the slow lane tests `unpublish`.
    if effort(true, false) {
        fixture.server.shutdown(Duration::from_millis(200));
    } else {
        fixture.server.unpublish("disk", true).unwrap();
    }
    assert!(begun.elapsed() < LONG);
    device.release_all_backwards();
    for (reader, writer) in two.into_iter().chain([waits]) {
        drop(reader);
        writer.join().unwrap();
    }
    fixture.assert_no_connections();
}
