//! Tests of a server that passes its sockets and connections to a successor.

mod adoption;
mod listeners;
mod requests;

use std::sync::Arc;
use std::time::Duration;

use freestone_core::device::Device;
use freestone_nbd::{Address, ConnectionState, ExportOptions, Limits, Passed, PassedConnection, Server};

use crate::common::prelude::*;

/// Grace for servers whose connections can all be passed.
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);

/// Runs `during` while `first` passes its connections, a short time after the start.
fn pass_during(first: &Server, grace: Duration, during: impl FnOnce()) -> Passed {
    std::thread::scope(|scope| {
        let passed = scope.spawn(|| first.pass_on(grace));
        // The server refuses to listen once it has begun, and has no addresses later.
        eventually(|| first.addresses().first().is_none_or(|address| first.listen(address).is_err()));
        std::thread::sleep(SHORT / 3);
        during();
        passed.join().unwrap()
    })
}

/// Starts a server that takes over the sockets and connections, and exports `device` as "disk".
fn succeed(passed: Passed, address: &Address, device: &Arc<impl Device + 'static>) -> Server {
    let server = Server::new(Limits::default());
    server.inherit_listeners(passed.listeners);
    server.listen(address).unwrap();
    let device: Arc<dyn Device> = device.clone();
    server.publish(address, "disk", device, ExportOptions::default()).unwrap();
    server.close_unused_listeners();
    for connection in passed.connections {
        server.adopt_connection(through_text(connection)).unwrap();
    }
    server
}

/// Encodes and decodes the state of a connection, as a program does that starts its successor.
fn through_text(PassedConnection { socket, state }: PassedConnection) -> PassedConnection {
    let text = serde_json::to_string(&state).unwrap();
    let read: ConnectionState = serde_json::from_str(&text).unwrap();
    assert_eq!(read, state);
    PassedConnection { socket, state: read }
}

/// Returns the bytes of a write request with its payload, and its cookie.
fn write_request(client: &mut Client, offset: u64, data: &[u8]) -> (u64, Vec<u8>) {
    let cookie = client.cookie();
    let flags = if client.headers == Headers::Extended { PAYLOAD_LEN } else { 0 };
    let mut bytes = client.header(flags, WRITE, cookie, offset, data.len() as u64);
    bytes.extend(data);
    (cookie, bytes)
}
