//! The thread of one connection, from its first byte to its last.

use freestone_core::client_log;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, Shutdown, shutdown};

use crate::handshake::{Handshake, HandshakeError, Negotiation};
use crate::link::Link;
use crate::session::Session;
use crate::shared::ServerShared;
use crate::shared::template::EndCallback;
use crate::stream::input::Input;
use crate::stream::receive::{Timeouts, receive_into};
use crate::stream::replies::Replies;

/// Longest time for which input is discarded before the socket closes, so that the client can read the last
/// replies.
const LINGER: Duration = Duration::from_millis(250);

/// The start of a connection.
pub enum Start {
    /// A new connection begins with the handshake.
    Handshake,
    /// A connection of the server's predecessor continues.
    Adopted(Box<AdoptedSession>),
}

/// The session of a connection that a predecessor of the server passed.
pub struct AdoptedSession {
    pub negotiated: Negotiation,
    /// Received bytes that the predecessor did not execute.
    pub unread: Vec<u8>,
}

/// Serves one client until its connection ends. A panic in a device ends only this connection.
pub fn run(shared: &ServerShared, link: &Link, start: Start) {
    // Declared outside `serve`, so that the callback runs after all references to the device were dropped,
    // even by a panic.
    let mut on_end = EndCallback::default();
    let mut panicked = catch_unwind(AssertUnwindSafe(|| serve(shared, link, start, &mut on_end))).is_err();
    if panicked {
        client_log!(error, peer = %link.peer(), "the device panicked: its connection is closed");
    }
    // The client sees the end before the server stops counting the connection. Other threads may hold the
    // socket a little longer.
    link.close();
    // Runs before `remove_connection`, so that a thread that waits for the end of the connection finds the
    // device ended too.
    panicked |= on_end.run();
    shared.remove_connection(link, panicked);
}

fn serve(shared: &ServerShared, link: &Link, start: Start, on_end: &mut EndCallback) {
    match start {
        Start::Handshake => serve_new(shared, link, on_end),
        Start::Adopted(session) => serve_adopted(shared, link, *session),
    }
}

fn serve_adopted(shared: &ServerShared, link: &Link, AdoptedSession { negotiated, unread }: AdoptedSession) {
    let buffers = Input::new().and_then(|input| Ok((input, Replies::new()?)));
    let filled = buffers.and_then(|(mut input, replies)| {
        input.fill(&unread)?;
        Ok((input, replies))
    });
    drop(unread);
    match filled {
        Ok((input, replies)) => transmit(shared, link, negotiated, input, replies),
        Err(error) => client_log!(warn, peer = %link.peer(), %error, "no memory for a connection"),
    }
}

/// Runs the transmission phase.
fn transmit(shared: &ServerShared, link: &Link, negotiated: Negotiation, input: Input, replies: Replies) {
    let name = negotiated.export.name.clone();
    tracing::info!(peer = %link.peer(), export = %name, address = %link.address, "connected");
    Session::new(shared, link, negotiated, input, replies).run();
    if link.is_passed() {
        tracing::info!(peer = %link.peer(), export = %name, address = %link.address, "passed to the successor");
        return;
    }
    tracing::info!(peer = %link.peer(), export = %name, address = %link.address, "disconnected");
    linger(link);
}

fn serve_new(shared: &ServerShared, link: &Link, on_end: &mut EndCallback) {
    let handshake = match Handshake::new(shared, link, on_end) {
        Ok(handshake) => handshake,
        Err(error) => {
            client_log!(warn, peer = %link.peer(), %error, "no memory for a connection");
            return;
        }
    };
    match handshake.run() {
        Ok((negotiated, input, replies)) => {
            transmit(shared, link, negotiated, input, replies);
            return;
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
