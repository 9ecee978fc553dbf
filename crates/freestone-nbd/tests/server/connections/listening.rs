//! Tests of listening addresses, and of errors from listening and publishing.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use crate::common::prelude::*;
use freestone_nbd::{
    Address, ExportOptions, Limits, ListenError, MAX_SOCKET_PATH_BYTES, MAX_STRING_BYTES, PublishError,
    Server,
};

fn unix(path: impl Into<PathBuf>) -> Address {
    Address::Unix(path.into())
}

fn tcp(host: &str, port: u16) -> Address {
    Address::Tcp { host: host.to_owned(), port }
}

fn listen(address: &Address) -> Result<Address, ListenError> {
    Server::new(Limits::default()).listen(address)
}

fn path_of(address: &Address) -> &Path {
    let Address::Unix(path) = address else { panic!("a Unix address") };
    path
}

#[test]
fn unix_socket_is_private_and_removed_at_end() {
    let directory = tempfile::tempdir().unwrap();
    let address = unix(directory.path().join("nbd.sock"));
    let server = Server::new(Limits::default());
    assert_eq!(server.listen(&address).unwrap(), address);
    let metadata = fs::symlink_metadata(path_of(&address)).unwrap();
    assert!(metadata.file_type().is_socket());
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    // Listening again at the same address has no effect.
    assert_eq!(server.listen(&address).unwrap(), address);
    assert_eq!(server.addresses(), std::slice::from_ref(&address));
    drop(server);
    assert!(!path_of(&address).exists());
}

#[test]
fn listen_replaces_stale_socket() {
    let directory = tempfile::tempdir().unwrap();
    let address = unix(directory.path().join("nbd.sock"));
    drop(UnixListener::bind(path_of(&address)).unwrap());
    assert!(path_of(&address).exists());
    let server = Server::new(Limits::default());
    server.listen(&address).unwrap();
    server.publish(&address, "disk", MemDevice::new(4096), ExportOptions::default()).unwrap();
    let mut client = connect(&address);
    client.greet(3);
    assert_eq!(client.go("disk").0, 4096);
}

#[test]
fn clients_of_paused_server_wait_for_exports() {
    let directory = tempfile::tempdir().unwrap();
    let address = unix(directory.path().join("nbd.sock"));
    let server = Server::new(Limits::default());
    server.pause();
    server.listen(&address).unwrap();
    let mut clients = [connect(&address), connect(&address)];
    assert_eq!(server.stats().accepted, 0);
    server.publish(&address, "disk", MemDevice::new(4096), ExportOptions::default()).unwrap();
    server.resume();
    for client in &mut clients {
        client.greet(3);
        assert_eq!(client.go("disk").0, 4096);
    }
    // The end of a server does not wait for the end of a pause.
    server.pause();
    drop(server);
}

#[test]
fn listen_at_live_socket_fails() {
    let directory = tempfile::tempdir().unwrap();
    let address = unix(directory.path().join("nbd.sock"));
    let first = Server::new(Limits::default());
    first.listen(&address).unwrap();
    let error = listen(&address).unwrap_err();
    assert!(matches!(&error, ListenError::SocketInUse(at, _) if *at == address), "{error}");
    let listener = format!("nbd.sock: another server listens there (pid {})", std::process::id());
    assert!(error.to_string().contains(&listener), "{error}");
    first.publish(&address, "disk", MemDevice::new(4096), ExportOptions::default()).unwrap();
    connect(&address).greet(3);
    // A socket whose listener never accepts is also in use.
    let address = unix(directory.path().join("busy.sock"));
    let _listener = UnixListener::bind(path_of(&address)).unwrap();
    assert!(matches!(listen(&address), Err(ListenError::SocketInUse(..))));
}

#[test]
fn listen_at_other_file_fails_and_keeps_it() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "precious").unwrap();
    assert!(matches!(listen(&unix(&file)), Err(ListenError::NotASocket(_))));
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
    let link = directory.path().join("link");
    std::os::unix::fs::symlink("nowhere", &link).unwrap();
    assert!(matches!(listen(&unix(&link)), Err(ListenError::NotASocket(_))));
    assert!(matches!(listen(&unix(directory.path())), Err(ListenError::NotASocket(_))));
    assert!(link.symlink_metadata().is_ok());
}

#[test]
fn listen_at_invalid_path_fails() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("no").join("nbd.sock");
    assert!(matches!(listen(&unix(missing)), Err(ListenError::NoDirectory(_))));
    let long = Path::new("/tmp").join("x".repeat(MAX_SOCKET_PATH_BYTES - 4));
    match listen(&unix(long)) {
        Err(ListenError::PathTooLong { len, .. }) => assert_eq!(len, MAX_SOCKET_PATH_BYTES + 1),
        other => panic!("{other:?}"),
    }
    // Even root cannot create sockets in `/sys`.
    let error = listen(&unix("/sys/freestone.sock")).unwrap_err();
    assert!(matches!(error, ListenError::Permission(_)), "{error}");
}

#[test]
fn close_keeps_socket_file_of_another_server() {
    let fixture = Fixture::new();
    let path = path_of(&fixture.address);
    fs::remove_file(path).unwrap();
    let _other = UnixListener::bind(path).unwrap();
    fixture.server.close(&fixture.address);
    assert!(path.exists());
}

#[test]
fn listen_at_tcp_port_returns_chosen_port() {
    let server = Server::new(Limits::default());
    let address = server.listen(&tcp("127.0.0.1", 0)).unwrap();
    let Address::Tcp { host, port } = &address else { panic!("a TCP address") };
    assert_eq!(host, "127.0.0.1");
    assert_ne!(*port, 0);
    assert_eq!(server.listen(&address).unwrap(), address);
    let error = listen(&address).unwrap_err();
    assert!(matches!(error, ListenError::PortInUse(_)), "{error}");
    server.publish(&address, "disk", MemDevice::new(4096), ExportOptions::default()).unwrap();
    let mut client = connect(&address);
    client.greet(3);
    client.go("disk");
    assert!(client.read(0, 512).is_ok());
    // The port can be used again at once, although old connections are in TIME_WAIT.
    server.shutdown(std::time::Duration::from_secs(30));
    client.assert_closed();
    listen(&address).unwrap();
}

#[test]
fn listen_at_tcp_host_uses_all_its_addresses() {
    // 192.0.2.1 is reserved for documentation, so the test machine does not have this address.
    assert!(matches!(listen(&tcp("192.0.2.1", 0)), Err(ListenError::NotLocal(_))));
    assert!(matches!(listen(&tcp("no such host", 0)), Err(ListenError::Host { .. })));
    // For a host name, the server listens at all addresses of the host with the same port.
    let server = Server::new(Limits::default());
    let address = server.listen(&tcp("localhost", 0)).unwrap();
    let Address::Tcp { port, .. } = address else { panic!("a TCP address") };
    connect(&tcp("127.0.0.1", port)).greet(3);
}

#[test]
fn closed_address_can_be_listened_at_again() {
    let fixture = Fixture::serving(&MemDevice::new(4096));
    let second = fixture.server.listen(&unix(fixture.directory.path().join("2.sock"))).unwrap();
    fixture.server.publish(&second, "disk", MemDevice::new(8192), ExportOptions::default()).unwrap();
    let mut ends = fixture.enter(true);
    let mut handshake = fixture.connect();
    handshake.greet(3);
    let mut stays = connect(&second);
    stays.greet(3);
    stays.go("disk");
    fixture.server.close(&fixture.address);
    ends.assert_closed();
    handshake.assert_closed();
    assert!(!path_of(&fixture.address).exists());
    assert_eq!(fixture.server.addresses(), [second]);
    assert!(stays.read(0, 512).is_ok());
    fixture.server.close(&fixture.address);
    fixture.server.listen(&fixture.address).unwrap();
    let mut client = fixture.connect();
    client.greet(3);
    // Closing the address removed its exports.
    assert_ne!(client.outcome(GO, &info_data("disk", &[])), 1);
}

#[test]
fn publish_invalid_export_fails() {
    let fixture = Fixture::serving(&MemDevice::new(4096));
    let publish = |address: &Address, name: &str, default: bool, description: &str| {
        let options =
            ExportOptions { default, description: description.to_owned(), ..ExportOptions::default() };
        fixture.server.publish(address, name, MemDevice::new(4096), options)
    };
    let here = &fixture.address;
    let elsewhere = unix("/nowhere.sock");
    assert_eq!(publish(&elsewhere, "x", false, ""), Err(PublishError::NotListening(elsewhere.clone())));
    assert_eq!(publish(here, "", false, ""), Err(PublishError::NameEmpty));
    let long = "x".repeat(MAX_STRING_BYTES + 1);
    assert_eq!(publish(here, &long, false, ""), Err(PublishError::NameTooLong(4097)));
    assert_eq!(publish(here, "x", false, &long), Err(PublishError::DescriptionTooLong(4097)));
    assert_eq!(publish(here, "a\0b", false, ""), Err(PublishError::NameInvalid("a\0b".to_owned())));
    let duplicate = PublishError::Duplicate { name: "disk".to_owned(), address: here.clone() };
    assert_eq!(publish(here, "disk", false, ""), Err(duplicate));
    let taken = PublishError::DefaultTaken { name: "disk".to_owned(), address: here.clone() };
    assert_eq!(publish(here, "x", true, ""), Err(taken));
    assert_eq!(fixture.server.exports().len(), 1);
    // The longest allowed name and description are accepted.
    let longest = "x".repeat(MAX_STRING_BYTES);
    publish(here, &longest, false, &longest).unwrap();
    let mut client = fixture.connect();
    client.greet(3);
    let replies = client.option(LIST, &[]);
    assert_eq!(replies[1].data.len(), 4 + 2 * MAX_STRING_BYTES);
    assert_eq!(client.go(&longest).0, 4096);
    client.disconnect();
}

#[test]
fn stale_socket_is_replaced_by_one_server() {
    for _ in 0..20 {
        let directory = tempfile::tempdir().unwrap();
        let address = unix(directory.path().join("nbd.sock"));
        drop(UnixListener::bind(path_of(&address)).unwrap());
        let servers: Vec<_> = (0..4).map(|_| Server::new(Limits::default())).collect();
        let wins = std::thread::scope(|scope| {
            let threads: Vec<_> =
                servers.iter().map(|server| scope.spawn(|| server.listen(&address).is_ok())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).filter(|won| *won).count()
        });
        assert_eq!(wins, 1);
        connect(&address).greet(3);
    }
}

#[test]
fn uri_names_export_and_socket() {
    let fixture = Fixture::serving(&MemDevice::new(4096));
    let uri = fixture.address.uri("disk");
    assert_eq!(uri, format!("nbd+unix:///disk?socket={}", path_of(&fixture.address).display()));
    fixture.enter(false).disconnect();
    eventually(|| fixture.server.stats().accepted == 1);
}

#[test]
fn addresses_closed_concurrently_with_connects() {
    let fixture = Fixture::serving(&MemDevice::new(4096));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let fixture = &fixture;
            scope.spawn(move || {
                for round in 0..50 {
                    let address = unix(fixture.directory.path().join(format!("{thread}.sock")));
                    assert_eq!(fixture.server.listen(&address).unwrap(), address);
                    let name = format!("{thread}-{round}");
                    let device = MemDevice::new(4096);
                    fixture.server.publish(&address, &name, device, ExportOptions::default()).unwrap();
                    let infos = fixture.server.exports_named(&name);
                    assert_eq!(infos[0].address, address);
                    assert_eq!(fixture.server.exports_at(&address), infos);
                    assert!(fixture.server.is_listening_at(&address));
                    let mut client = connect(&address);
                    // Clients that are not accepted yet, just accepted, or in the handshake when the address
                    // is closed.
                    let _hasty: Vec<_> = (0..3).map(|_| connect(&address)).collect();
                    client.greet(3);
                    client.go(&name);
                    assert!(client.read(0, 512).is_ok());
                    fixture.server.close(&address);
                    client.assert_closed();
                    assert!(!path_of(&address).exists());
                    assert_eq!(fixture.server.exports_named(&name), []);
                    assert_eq!(fixture.server.exports_at(&address), []);
                    assert!(!fixture.server.is_listening_at(&address));
                    assert_eq!(fixture.server.connections(&name), 0);
                }
            });
        }
    });
    assert_eq!(fixture.server.addresses(), std::slice::from_ref(&fixture.address));
    fixture.assert_sound();
}
