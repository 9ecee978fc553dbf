//! The thread of one connection, from its first byte to its last.

use freestone_core::client_log;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, Shutdown, shutdown};

use crate::handshake::{End, Handshake};
use crate::link::Link;
use crate::receive::{Timeouts, receive_into};
use crate::session::Session;
use crate::shared::ServerShared;
use crate::template::OnEnd;

/// Longest time during which the client's last bytes are discarded, so that it can read the last replies
/// before the socket closes.
const LINGER: Duration = Duration::from_millis(250);

/// Serves one client. A panic in a device ends only this connection.
pub fn run(shared: &ServerShared, link: &Link) {
    // Declared outside `serve`, so that it is called after everything that holds the device was dropped, even
    // by a panic.
    let mut on_end = OnEnd::default();
    let mut panicked = catch_unwind(AssertUnwindSafe(|| serve(shared, link, &mut on_end))).is_err();
    if panicked {
        client_log!(error, peer = %link.peer(), "the device panicked: its connection is closed");
    }
    // The client sees the end before the server counts it. The socket itself may outlive this thread briefly.
    let _ = shutdown(link.socket(), Shutdown::Both);
    // Before `leave`, so that the device has also ended when a waiter sees the connection's end.
    panicked |= on_end.run();
    shared.leave(link, panicked);
}

fn serve(shared: &ServerShared, link: &Link, on_end: &mut OnEnd) {
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
        Err(End::Left) => tracing::debug!(peer = %link.peer(), "left during the handshake"),
        Err(End::TimedOut) => {
            client_log!(warn, peer = %link.peer(), "the handshake took too long");
            return;
        }
        Err(End::Violation(what)) => {
            client_log!(warn, peer = %link.peer(), what, "the client broke the protocol in the handshake");
        }
        Err(End::Tls(why)) => {
            client_log!(warn, peer = %link.peer(), why, "TLS handshake failed");
        }
        Err(End::NoDevice(text)) => {
            client_log!(warn, peer = %link.peer(), text, "no device for a client, and no error reply is possible");
        }
    }
    linger(link);
}

/// Discards input until the client closes or a timeout. Closing a socket with unread input sends an error to
/// the peer, which may then lose the last replies. Not inlined, to keep its buffer off the stack while a
/// connection is served.
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
