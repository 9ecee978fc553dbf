//! Connections that cannot be passed or adopted, and handshakes during a pass.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Instant;

use super::{LONG, SHORT, pass_during, succeed, through_text};
use crate::common::prelude::*;
use crate::common::secure::Secure;
use freestone_core::concurrency_limit::ConcurrencyLimit;
use freestone_core::device::Device;
use freestone_nbd::{
    Address, ConnectionDevice, ConnectionState, ExportOptions, Limits, Passed, PassedConnection,
    RECEIVE_BUFFER_BYTES, Server, TemplateOptions, TlsMode, Visibility,
};

/// Passes one connection in the transmission phase of "disk". Also returns the client.
fn pass_one(headers: Headers) -> (Fixture, Client, Passed) {
    let fixture = Fixture::serving(&MemDevice::new(1 << 20));
    let client = fixture.enter(headers);
    let passed = fixture.server.pass_on(LONG);
    assert_eq!(passed.connections.len(), 1);
    (fixture, client, passed)
}

/// Returns the message of a refused connection, whose socket must be closed.
fn refusal(server: &Server, connection: PassedConnection, mut client: Client) -> String {
    let before = server.stats();
    let error = server.adopt_connection(connection).unwrap_err();
    client.assert_closed();
    let after = server.stats();
    assert_eq!((after.refused, after.connections), (before.refused + 1, before.connections));
    error.to_string()
}

/// A server that exports "disk" with these options.
fn successor(passed: &mut Passed, address: &Address, limits: Limits, options: ExportOptions) -> Server {
    let server = Server::new(limits);
    server.inherit_listeners(std::mem::take(&mut passed.listeners));
    server.listen(address).unwrap();
    server.publish(address, "disk", MemDevice::new(1 << 20), options).unwrap();
    server
}

#[test]
fn invalid_state_is_refused() {
    type Change = fn(&mut ConnectionState);
    let changes: [(Change, &str); 8] = [
        (|state| state.address = "stdin".to_owned(), "`stdin` is no address"),
        (|state| state.address = "tcp:localhost:x".to_owned(), "`x` is no port"),
        (|state| state.address = "unix:/nowhere".to_owned(), "the server does not listen there"),
        (|state| state.export = "other".to_owned(), "no such export here"),
        (|state| state.export.clear(), "no such export here"),
        (|state| state.headers = "compact".to_owned(), "unknown headers `compact`"),
        (|state| state.contexts.push("x:y".to_owned()), "unknown metadata context `x:y`"),
        (|state| state.unread = vec![0; RECEIVE_BUFFER_BYTES + 1], "unread bytes, at most"),
    ];
    for (change, text) in changes {
        let (fixture, client, mut passed) = pass_one(Headers::Structured);
        let options = ExportOptions { default: true, ..ExportOptions::default() };
        let server = successor(&mut passed, &fixture.address, Limits::default(), options);
        let mut connection = passed.connections.pop().unwrap();
        change(&mut connection.state);
        let message = refusal(&server, connection, client);
        assert!(message.contains(text), "{message}");
        assert_eq!(server.connections("disk"), 0);
    }
    let (fixture, client, mut passed) = pass_one(Headers::Simple);
    let server = successor(&mut passed, &fixture.address, Limits::default(), ExportOptions::default());
    let mut connection = passed.connections.pop().unwrap();
    connection.state.contexts.push("base:allocation".to_owned());
    let message = refusal(&server, connection, client);
    assert!(message.ends_with("metadata contexts need structured replies"), "{message}");
}

#[test]
fn full_receive_buffer_is_adopted() {
    let (fixture, mut client, mut passed) = pass_one(Headers::Simple);
    let server = successor(&mut passed, &fixture.address, Limits::default(), ExportOptions::default());
    let mut connection = passed.connections.pop().unwrap();
    // Garbage, which ends the connection.
    connection.state.unread = vec![7; RECEIVE_BUFFER_BYTES];
    server.adopt_connection(connection).unwrap();
    client.assert_closed();
    eventually(|| server.stats().connections == 0);
}

#[test]
fn state_text_ignores_unknown_fields() {
    let (fixture, mut client, mut passed) = pass_one(Headers::Extended);
    let state = passed.connections[0].state.clone();
    assert_eq!(state.address, fixture.address.to_string());
    assert_eq!((&state.export[..], &state.headers[..]), ("disk", "extended"));
    assert_eq!(state.contexts, ["base:allocation"]);
    let mut value = serde_json::to_value(&state).unwrap();
    value["new"] = 1.into();
    assert_eq!(serde_json::from_value::<ConnectionState>(value.clone()).unwrap(), state);
    for field in ["address", "export", "headers", "contexts", "unread"] {
        let mut less = value.clone();
        less.as_object_mut().unwrap().remove(field);
        let error = serde_json::from_value::<ConnectionState>(less).unwrap_err();
        assert!(error.to_string().contains(field), "{error}");
    }
    let server = successor(&mut passed, &fixture.address, Limits::default(), ExportOptions::default());
    server.adopt_connection(through_text(passed.connections.pop().unwrap())).unwrap();
    assert_eq!(client.status(0, 0, 4096).unwrap(), [(4096, 3)]);
}

#[test]
fn adopted_connections_count_in_limits() {
    let place = Arc::new(ConcurrencyLimit::default());
    place.set(1);
    let fixture = Fixture::serving(&MemDevice::new(1 << 20));
    let [simple, mut structured, extended] = Headers::ALL.map(|headers| fixture.enter(headers));
    let mut passed = fixture.server.pass_on(LONG);
    let mut take = |headers: &str| {
        let at = passed.connections.iter().position(|connection| connection.state.headers == headers);
        passed.connections.remove(at.unwrap())
    };
    let connections = ["simple", "structured", "extended"].map(&mut take);
    let limits = Limits { max_connections: 2, ..Limits::default() };
    let options = ExportOptions { places: vec![Arc::clone(&place)], ..ExportOptions::default() };
    let server = successor(&mut passed, &fixture.address, limits, options);
    let [first, second, third] = connections;
    server.adopt_connection(second).unwrap();
    assert_eq!((place.in_use(), server.connections("disk"), server.stats().accepted), (1, 1, 1));
    let message = refusal(&server, first, simple);
    assert!(message.ends_with("is refused: client limit reached: 1 (max_clients)"), "{message}");
    place.set(0);
    let _handshake = fixture.connect();
    eventually(|| server.stats().connections == 2);
    let message = refusal(&server, third, extended);
    assert!(message.ends_with("is refused: too many connections: at most 2"), "{message}");
    assert_eq!(structured.read(0, 512).unwrap().len(), 512);
    structured.disconnect();
    eventually(|| place.in_use() == 0);
}

#[test]
fn changed_export_refuses_connection() {
    let options = [
        ExportOptions { visible_to: Visibility::Tls, ..ExportOptions::default() },
        ExportOptions {
            visible_to: Visibility::Certificates(vec!["alice".to_owned()].into()),
            ..ExportOptions::default()
        },
    ];
    for options in options {
        let (fixture, client, mut passed) = pass_one(Headers::Structured);
        let server = successor(&mut passed, &fixture.address, Limits::default(), options);
        let message = refusal(&server, passed.connections.pop().unwrap(), client);
        assert!(message.ends_with("this export requires TLS (nbds://)"), "{message}");
    }
    let secure = Secure::new(TlsMode::Required);
    let (_fixture, client, mut passed) = pass_one(Headers::Structured);
    let mut connection = passed.connections.pop().unwrap();
    connection.state.address = secure.address.to_string();
    secure.publish("disk", &MemDevice::new(1 << 20), Visibility::All);
    let message = refusal(&secure.server, connection, client);
    assert!(message.ends_with("this export requires TLS (nbds://)"), "{message}");

    let (fixture, client, mut passed) = pass_one(Headers::Structured);
    let server = Server::new(Limits::default());
    server.inherit_listeners(passed.listeners);
    server.listen(&fixture.address).unwrap();
    let factory = Arc::new(|| Err("not called".to_owned()));
    server.publish_template(&fixture.address, "disk", TemplateOptions::default(), factory).unwrap();
    let message = refusal(&server, passed.connections.pop().unwrap(), client);
    assert!(message.ends_with("the export creates a device for each connection"), "{message}");

    let (_fixture, client, mut passed) = pass_one(Headers::Structured);
    server.shutdown(LONG);
    let message = refusal(&server, passed.connections.pop().unwrap(), client);
    assert!(message.ends_with("the server does not listen there"), "{message}");
}

#[test]
fn tls_and_template_connections_end_in_order() {
    let secure = Secure::new(TlsMode::Optional);
    let device = MemDevice::new(1 << 20);
    secure.publish("disk", &device, Visibility::All);
    let ended = Arc::new(AtomicUsize::new(0));
    let factory = {
        let (ended, device) = (Arc::clone(&ended), device.clone());
        Arc::new(move || {
            let (ended, device) = (Arc::clone(&ended), device.clone() as Arc<dyn Device>);
            let on_end = Box::new(move || {
                ended.fetch_add(1, SeqCst);
            });
            Ok(ConnectionDevice { device, on_end })
        })
    };
    secure.server.publish_template(&secure.address, "each", TemplateOptions::default(), factory).unwrap();
    let mut clear = secure.clear();
    clear.go("disk");
    let mut own = secure.clear();
    own.go("each");
    let mut sealed = secure.client();
    sealed.agree(Headers::Structured);
    sealed.go("disk");
    device.set(Manner::Held);
    let read = sealed.ask(0, READ, 0, 512);
    let (flush, own_flush) = (sealed.ask(0, FLUSH, 0, 0), own.ask(0, FLUSH, 0, 0));
    eventually(|| device.held().len() == 3);
    let passed = pass_during(&secure.server, LONG, || {
        for _ in 0..3 {
            device.release(0);
        }
    });
    device.set(Manner::Inline);
    assert_eq!(passed.connections.len(), 1);
    assert_eq!(ended.load(SeqCst), 1);
    // Requests in flight were answered before the end.
    assert_eq!(own.plain_reply(own_flush), 0);
    own.assert_closed();
    let mut replies = [sealed.chunk().cookie(), sealed.chunk().cookie()];
    replies.sort_unstable();
    assert_eq!(replies, [read, flush]);
    sealed.assert_closed();
    let _second = succeed(passed, &secure.address, &device);
    assert_eq!(clear.read(0, 512).unwrap().len(), 512);
}

#[test]
fn handshake_completes_during_pass_or_is_cut() {
    let device = MemDevice::new(1 << 20);
    let fixture = Fixture::serving(&device);
    let (mut quick, mut slow) = (fixture.connect(), fixture.connect());
    for client in [&mut quick, &mut slow] {
        client.greet(3);
    }
    let begun = Instant::now();
    let passed = pass_during(&fixture.server, LONG, || {
        quick.agree(Headers::Extended);
        quick.go("disk");
    });
    assert!(begun.elapsed() < LONG / 2);
    slow.assert_closed();
    assert_eq!(passed.connections.len(), 1);
    let _second = succeed(passed, &fixture.address, &device);
    assert_eq!(quick.read(0, 512).unwrap().len(), 512);

    // A grace of less than a second is the limit for handshakes too.
    let fixture = Fixture::serving(&device);
    let mut slow = fixture.connect();
    slow.greet(3);
    assert!(fixture.server.pass_on(SHORT).connections.is_empty());
    slow.assert_closed();
}

#[test]
fn client_that_left_ends_at_successor() {
    let (fixture, client, passed) = pass_one(Headers::Structured);
    drop(client);
    let server = succeed(passed, &fixture.address, &MemDevice::new(1 << 20));
    eventually(|| server.stats().connections == 0);
    assert_eq!(server.stats().accepted, 1);
}

#[test]
fn held_export_refuses_connection() {
    let (fixture, client, mut passed) = pass_one(Headers::Structured);
    let server = successor(&mut passed, &fixture.address, Limits::default(), ExportOptions::default());
    let connection = passed.connections.pop().unwrap();
    let (_, message) = server.cut_connections_during("disk", || refusal(&server, connection, client));
    assert!(message.ends_with("the device is being replaced"), "{message}");
}
