//! The thread of one connection, from its first byte to its last.

use freestone_core::client_log;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, Shutdown, shutdown};

use crate::handshake::{Handshake, HandshakeError};
use crate::link::Link;
use crate::session::Session;
use crate::shared::ServerShared;
use crate::shared::template::EndCallback;
use crate::stream::receive::{Timeouts, receive_into};

/// Longest time for which input is discarded before the socket closes, so that the client can read the last
/// replies.
const LINGER: Duration = Duration::from_millis(250);

/// Serves one client until its connection ends. A panic in a device ends only this connection.
pub fn run(shared: &ServerShared, link: &Link) {
    // Declared outside `serve`, so that the callback runs after all references to the device were dropped,
    // even by a panic.
    let mut on_end = EndCallback::default();
    let mut panicked = catch_unwind(AssertUnwindSafe(|| serve(shared, link, &mut on_end))).is_err();
    if panicked {
        client_log!(error, peer = %link.peer(), "the device panicked: its connection is closed");
    }
    // The client sees the end before the server stops counting the connection. Other threads may hold the
    // socket a little longer.
    let _ = shutdown(link.socket(), Shutdown::Both);
    // Runs before `remove_connection`, so that a thread that waits for the end of the connection finds the
    // device ended too.
    panicked |= on_end.run();
    shared.remove_connection(link, panicked);
}

fn serve(shared: &ServerShared, link: &Link, on_end: &mut EndCallback) {
    let handshake = match Handshake::new(shared, link, on_end) {
        Ok(handshake) => handshake,
        Err(error) => {
            client_log!(warn, peer = %link.peer(), %error, "no memory for a connection");
            return;
        }
    };
    match handshake.run() {
        Ok((negotiated, input, replies)) => {
            let name = negotiated.export.name.clone();
            tracing::info!(peer = %link.peer(), export = %name, address = %link.address, "connected");
            Session::new(shared, link, negotiated, input, replies).run();
            tracing::info!(peer = %link.peer(), export = %name, address = %link.address, "disconnected");
        }
        Err(HandshakeError::Disconnected) => {
            tracing::debug!(peer = %link.peer(), "left during the handshake");
        }
        Err(HandshakeError::TimedOut) => {
            client_log!(warn, peer = %link.peer(), "the handshake took too long");
            return;
        }
        Err(HandshakeError::Violation(what)) => {
            client_log!(warn, peer = %link.peer(), what, "the client broke the protocol in the handshake");
        }
        Err(HandshakeError::Tls(why)) => {
            client_log!(warn, peer = %link.peer(), why, "TLS handshake failed");
        }
        Err(HandshakeError::NoDevice(text)) => {
            client_log!(warn, peer = %link.peer(), text, "no device for a client, and no error reply is possible");
        }
    }
    linger(link);
}

/// Discards input until the client closes the connection, or [`LINGER`] has passed. Closing a socket with
/// unread input resets the connection, and the peer may lose the last replies. Not inlined, so that the 16
/// KiB buffer is not on the stack while a connection is served.
#[inline(never)]
fn linger(link: &Link) {
    let _ = shutdown(link.socket(), Shutdown::Write);
    let timeouts = Timeouts { idle: LINGER, deadline: Instant::now() + LINGER };
    let mut waste = [0_u8; 16 << 10];
    loop {
        match receive_into(link.socket(), RecvFlags::DONTWAIT, &mut waste) {
            Err(rustix::io::Errno::WOULDBLOCK) => {}
            Ok(0) | Err(_) => return,
            Ok(_) => {
                if Instant::now() >= timeouts.deadline {
                    return;
                }
                continue;
            }
        }
        if timeouts.wait(link.socket()).is_err() {
            return;
        }
    }
}
