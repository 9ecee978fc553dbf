//! Listening sockets that are passed to a successor.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use super::{LONG, SHORT, succeed};
use crate::common::prelude::*;
use freestone_core::allow::AllowList;
use freestone_nbd::{Access, Address, ExportOptions, Limits, ListenError, Server};

fn path_of(address: &Address) -> &Path {
    let Address::Unix(path) = address else { panic!("a Unix address") };
    path
}

fn mode(address: &Address) -> u32 {
    std::fs::metadata(path_of(address)).unwrap().permissions().mode() & 0o777
}

#[test]
fn client_between_servers_is_served() {
    let device = MemDevice::new(1 << 20);
    let fixture = Fixture::serving(&device);
    let tcp = fixture.server.listen(&Address::Tcp { host: "localhost".to_owned(), port: 0 }).unwrap();
    let passed = fixture.server.pass_on(LONG);
    let addresses: Vec<_> = passed.listeners.iter().map(|(address, _)| address.clone()).collect();
    assert_eq!(addresses, [fixture.address.clone(), tcp.clone()]);
    assert!(matches!(fixture.server.listen(&fixture.address), Err(ListenError::ShuttingDown)));
    drop(fixture.server);
    let mut clients = [connect(&fixture.address), connect(&tcp)];
    let server = Server::new(Limits::default());
    server.inherit_listeners(passed.listeners);
    for address in [&fixture.address, &tcp] {
        assert_eq!(&server.listen(address).unwrap(), address);
        server.publish(address, "disk", device.clone(), ExportOptions::default()).unwrap();
    }
    server.close_unused_listeners();
    for client in &mut clients {
        client.greet(3);
        client.go("disk");
        assert_eq!(client.read(0, 512).unwrap().len(), 512);
    }
    // The successor owns the file of the Unix socket.
    drop(server);
    assert!(!path_of(&fixture.address).exists());
}

#[test]
fn access_and_allow_list_apply_to_inherited_socket() {
    let fixture = Fixture::new();
    let inherit = |server: &Server, mode: u32, allow| {
        let next = Server::new(Limits::default());
        next.inherit_listeners(server.pass_on(LONG).listeners);
        let access = Access { mode, ..Access::default() };
        next.listen_with_access(&fixture.address, &access, allow).unwrap();
        next
    };
    let second = inherit(&fixture.server, 0o666, None);
    assert_eq!(mode(&fixture.address), 0o666);
    let third = inherit(&second, 0o600, Some(AllowList::new([])));
    assert_eq!(mode(&fixture.address), 0o600);
    connect(&fixture.address).assert_closed();
    assert_eq!(third.stats().denied, 1);
}

#[test]
fn unused_sockets_are_closed_with_their_files() {
    for calls in [false, true] {
        let fixture = Fixture::new();
        let passed = fixture.server.pass_on(LONG);
        let mut waiting = fixture.connect();
        let server = Server::new(Limits::default());
        server.inherit_listeners(passed.listeners);
        assert!(path_of(&fixture.address).exists());
        if calls {
            server.close_unused_listeners();
        } else {
            drop(server);
        }
        assert!(!path_of(&fixture.address).exists());
        waiting.assert_closed();
    }
}

#[test]
fn unused_sockets_are_passed_again() {
    let device = MemDevice::new(1 << 20);
    let fixture = Fixture::serving(&device);
    let middle = Server::new(Limits::default());
    middle.inherit_listeners(fixture.server.pass_on(LONG).listeners);
    let mut client = fixture.connect();
    let passed = middle.pass_on(LONG);
    assert_eq!(passed.listeners.len(), 1);
    drop(middle);
    let _third = succeed(passed, &fixture.address, &device);
    client.greet(3);
    client.go("disk");
}

#[test]
fn inherited_socket_without_file_is_replaced() {
    let device = MemDevice::new(1 << 20);
    let fixture = Fixture::serving(&device);
    let passed = fixture.server.pass_on(LONG);
    std::fs::remove_file(path_of(&fixture.address)).unwrap();
    let _second = succeed(passed, &fixture.address, &device);
    let mut client = fixture.connect();
    client.greet(3);
    client.go("disk");
}

#[test]
fn inherited_socket_must_listen() {
    let directory = tempfile::tempdir().unwrap();
    let address = Address::Unix(directory.path().join("nbd.sock"));
    let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
    let server = Server::new(Limits::default());
    server.inherit_listeners(vec![(address.clone(), vec![socket.into()])]);
    for _ in 0..2 {
        let error = server.listen(&address).unwrap_err();
        assert!(error.to_string().ends_with("the socket of the predecessor does not listen"), "{error}");
    }
    server.close_unused_listeners();
    server.listen(&address).unwrap();
}

#[test]
fn second_pass_returns_nothing() {
    let fixture = Fixture::serving(&MemDevice::new(4096));
    let mut client = fixture.enter(true);
    let passed = fixture.server.pass_on(LONG);
    assert_eq!((passed.listeners.len(), passed.connections.len()), (1, 1));
    let again = fixture.server.pass_on(LONG);
    assert_eq!((again.listeners.len(), again.connections.len()), (0, 0));
    // Passed connections and sockets that are dropped are closed.
    drop(passed);
    client.assert_closed();

    let fixture = Fixture::new();
    fixture.server.shutdown(SHORT);
    assert!(fixture.server.pass_on(LONG).listeners.is_empty());
}
