//! Tests of allow lists, and of the grace time of pending handshakes.

use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use freestone_nbd::{Access, Address, AllowEntry, AllowList, ExportOptions, Limits, Server};
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};

use crate::common::prelude::*;

fn networks(all: &[&str]) -> AllowList {
    AllowList::new(all.iter().map(|text| AllowEntry::parse_network(text).unwrap()))
}

/// Connects from this source address to a TCP port of the local host.
fn from(source: Ipv4Addr, port: u16) -> Client {
    let stream = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&stream, &SocketAddrV4::new(source, 0)).unwrap();
    connect(&stream, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, port)).unwrap();
    let stream = TcpStream::from(stream);
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    Client::over(stream)
}

#[test]
fn denied_peer_is_closed_and_uses_no_connection() {
    let me = rustix::process::geteuid().as_raw();
    // With limits of one connection, denied peers that counted as connections would be refused.
    let fixture =
        Fixture::with(Limits { max_connections: 1, max_pending_handshakes: 1, ..Limits::default() });
    fixture.publish("disk", &MemDevice::new(1 << 20));
    let server = &fixture.server;
    assert_eq!(server.allow_list(&fixture.address), None);
    let mut before = fixture.enter(true);
    let others = AllowList::new([AllowEntry::User(me + 1), AllowEntry::Group(u32::MAX - 1)]);
    assert!(server.set_allow_list(&fixture.address, Some(others.clone())));
    assert_eq!(server.allow_list(&fixture.address), Some(others));
    for _ in 0..100 {
        fixture.connect().assert_closed();
    }
    let stats = server.stats();
    assert_eq!((stats.denied, stats.refused, stats.connections), (100, 0, 1));
    assert_eq!(server.denials().count(), 100);
    // A connection made before the list was set stays open. A peer that is allowed again can connect.
    before.read(0, 512).unwrap();
    before.disconnect();
    fixture.assert_no_connections();
    fixture.connect().assert_closed();
    server.set_allow_list(&fixture.address, Some(AllowList::new([AllowEntry::User(me)])));
    fixture.assert_sound();
    server.set_allow_list(&fixture.address, None);
    fixture.assert_sound();
    assert!(!server.set_allow_list(&Address::Unix("/nowhere".into()), None));
}

/// An allowed client is served after 500 denied ones that keep their sockets open.
#[test]
fn denied_peers_do_not_block_allowed_ones() {
    let fixture = Fixture::serving(&MemDevice::new(1 << 20));
    let Address::Unix(path) = &fixture.address else { panic!("a Unix address") };
    let me = rustix::process::geteuid().as_raw();
    fixture.server.set_allow_list(&fixture.address, Some(AllowList::new([AllowEntry::User(me + 1)])));
    let strangers: Vec<_> = (0..500).map(|_| UnixStream::connect(path).unwrap()).collect();
    eventually(|| fixture.server.stats().denied == 500);
    fixture.server.set_allow_list(&fixture.address, Some(AllowList::new([AllowEntry::User(me)])));
    fixture.assert_sound();
    drop(strangers);
}

#[test]
fn allow_list_networks_match_source_address() {
    let server = Server::new(Limits::default());
    let any = Address::Tcp { host: "127.0.0.1".into(), port: 0 };
    let at = server.listen_with_access(&any, &Access::default(), Some(networks(&["127.0.0.1"]))).unwrap();
    // Listening again at the same address does not change the allow list.
    assert_eq!(server.listen_with_access(&at, &Access::default(), None).unwrap(), at);
    let device = MemDevice::new(1 << 20);
    server.publish(&at, "disk", device, ExportOptions::default()).unwrap();
    let Address::Tcp { port, .. } = at else { panic!("a TCP address") };
    let mut client = from(Ipv4Addr::LOCALHOST, port);
    client.greet(3);
    client.go("disk");
    client.read(0, 512).unwrap();
    from(Ipv4Addr::new(127, 0, 0, 2), port).assert_closed();
    assert_eq!(server.stats().denied, 1);
    server.set_allow_list(&at, Some(networks(&["127.0.0.0/8"])));
    let mut other = from(Ipv4Addr::new(127, 0, 0, 2), port);
    other.greet(3);
    other.go("disk");
    server.set_allow_list(&at, Some(networks(&["::/0", "10.0.0.0/8"])));
    from(Ipv4Addr::LOCALHOST, port).assert_closed();
    client.read(0, 512).unwrap();
}

/// A socket that listens for both IPv6 and IPv4 reports IPv4 peers with IPv4-mapped addresses.
#[test]
fn allow_list_treats_mapped_address_as_ipv4() {
    let server = Server::new(Limits::default());
    let both = Address::Tcp { host: "::".into(), port: 0 };
    let at = server.listen_with_access(&both, &Access::default(), Some(networks(&["127.0.0.0/8"]))).unwrap();
    server.publish(&at, "disk", MemDevice::new(1 << 20), ExportOptions::default()).unwrap();
    let Address::Tcp { port, .. } = at else { panic!("a TCP address") };
    let mut client = from(Ipv4Addr::LOCALHOST, port);
    client.greet(3);
    client.go("disk");
    let six = TcpStream::connect(("::1", port)).unwrap();
    Client::over(six).assert_closed();
}

#[test]
fn pending_handshake_is_closed_after_its_grace() {
    // The grace time is shorter than the default, but long enough for a handshake on a busy machine.
    let handshake_grace = Duration::from_secs(1);
    let fixture = Fixture::with(Limits { max_pending_handshakes: 1, handshake_grace, ..Limits::default() });
    fixture.publish("disk", &MemDevice::new(1 << 20));
    // Repeats the test until it passes, as other load on the machine may delay a handshake.
    eventually(|| {
        let mut silent = fixture.connect();
        silent.greet(3);
        let started = Instant::now();
        fixture.enter(false).disconnect();
        silent.assert_closed();
        started.elapsed() < Duration::from_millis(2500)
    });
    fixture.assert_sound();
}
