//! How connections come: the accepting thread, and a thread for each connection, one that waits for it
//! or a new one.

use freestone_core::client_log;
use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use rustix::net::getpeername;
use rustix::thread::set_name;

use crate::acceptor::describe_peer;
use crate::address::Address;
use crate::connection;
use crate::link::Link;
use crate::shared::ServerShared;

/// Starts the accepting thread, which runs until the server shuts down. Called once, under
/// `binding`.
///
/// # Errors
/// No file descriptors or no thread are left.
pub fn start(shared: &Arc<ServerShared>) -> io::Result<JoinHandle<()>> {
    shared.make_acceptor()?;
    let shared = Arc::clone(shared);
    thread::Builder::new().name("nbd-accept".to_owned()).spawn(move || {
        let Some(acceptor) = shared.acceptor() else { return };
        acceptor.run(
            || shared.expire(),
            |listener, socket, peer| connect(&shared, listener, socket, peer),
            |listener, errno| {
                client_log!(warn, listener, error = %errno, "a connection could not be accepted");
                shared.lock().refused += 1;
            },
        );
    })
}

/// A client has connected.
fn connect(shared: &Arc<ServerShared>, listener: u64, socket: OwnedFd, peer: String) {
    let Some(link) = shared.admit(listener, socket, peer) else { return };
    let Err(link) = shared.spares.hand(link) else { return };
    let spawned = {
        let (shared, link) = (Arc::clone(shared), Arc::clone(&link));
        thread::Builder::new().name("nbd".to_owned()).spawn(move || serve_many(&shared, link))
    };
    if let Err(error) = spawned {
        client_log!(warn, address = %link.address, %error, "no thread for a connection");
        shared.leave(&link, false);
        shared.lock().refused += 1;
    }
}

/// A thread's connections, one after the other.
fn serve_many(shared: &ServerShared, first: Arc<Link>) {
    let mut next = Some(first);
    while let Some(link) = next {
        if let Ok(name) = CString::new(format!("nbd-{}", link.id)) {
            // For who looks at threads; without it they are called nbd.
            let _ = set_name(&name);
        }
        connection::run(shared, &link);
        // The socket closes here, at the latest.
        drop(link);
        next = shared.spares.next();
    }
}

/// Serves a connection on this thread, from its first byte to its last.
pub fn serve_here(shared: &ServerShared, address: &Address, socket: OwnedFd) {
    let listener = shared.lock().listener_id(address);
    let peer = describe_peer(&socket, getpeername(&socket).ok().flatten());
    let link = listener.and_then(|listener| shared.admit(listener, socket, peer));
    if let Some(link) = link {
        connection::run(shared, &link);
    }
}
