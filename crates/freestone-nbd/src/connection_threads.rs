//! New connections: starts the accepting thread, and gives each connection an idle or a new thread.

use freestone_core::client_log;
use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use rustix::net::getpeername;
use rustix::thread::set_name;

use crate::accept::acceptor::describe_peer;
use crate::address::Address;
use crate::connection::{self, AdoptedSession, Start};
use crate::link::Link;
use crate::shared::ServerShared;

/// Starts the accepting thread, which runs until the server shuts down. Called once, with
/// `ServerShared::binding` locked.
///
/// # Errors
/// No file descriptors are left, or the thread cannot be created.
pub fn start(shared: &Arc<ServerShared>) -> io::Result<JoinHandle<()>> {
    shared.make_acceptor()?;
    let shared = Arc::clone(shared);
    thread::Builder::new().name("nbd-accept".to_owned()).spawn(move || {
        let Some(acceptor) = shared.acceptor() else { return };
        acceptor.run(
            || shared.run_deadlines(),
            |listener, socket, peer| connect(&shared, listener, socket, peer),
            |listener, errno| {
                client_log!(warn, listener, error = %errno, "a connection could not be accepted");
                shared.tables.lock().refused += 1;
            },
        );
    })
}

/// Gives an accepted connection to an idle or a new thread, unless the server refuses it.
fn connect(shared: &Arc<ServerShared>, listener: u64, socket: OwnedFd, peer: String) {
    let Some(link) = shared.add_connection(listener, socket, peer) else { return };
    let Err(link) = shared.idle_threads.assign(link) else { return };
    if let Err(error) = spawn(shared, &link, Start::Handshake) {
        client_log!(warn, address = %link.address, %error, "no thread for a connection");
        shared.tables.lock().refused += 1;
    }
}

/// Continues a connection of the server's predecessor on a new thread.
///
/// # Errors
/// The thread cannot be created. The connection is removed from the server.
pub fn resume(shared: &Arc<ServerShared>, link: &Arc<Link>, session: AdoptedSession) -> io::Result<()> {
    spawn(shared, link, Start::Adopted(Box::new(session)))
}

/// Serves a connection on a new thread. Removes the connection if the thread cannot be created.
fn spawn(shared: &Arc<ServerShared>, link: &Arc<Link>, start: Start) -> io::Result<()> {
    let spawned = {
        let (shared, link) = (Arc::clone(shared), Arc::clone(link));
        thread::Builder::new().name("nbd".to_owned()).spawn(move || serve_many(&shared, link, start))
    };
    if spawned.is_err() {
        shared.remove_connection(link, false);
    }
    spawned.map(drop)
}

/// Serves connections on this thread, one after the other, until no further one arrives in time. `start`
/// belongs to the first one; the others are new.
fn serve_many(shared: &ServerShared, first: Arc<Link>, mut start: Start) {
    let mut next = Some(first);
    while let Some(link) = next {
        if let Ok(name) = CString::new(format!("nbd-{}", link.id)) {
            // The name is for ps and debuggers. On failure the thread keeps the name nbd.
            let _ = set_name(&name);
        }
        connection::run(shared, &link, std::mem::replace(&mut start, Start::Handshake));
        // Closes the socket, unless another thread still holds the link.
        drop(link);
        next = shared.idle_threads.next_connection();
    }
}

/// Serves one connection on the calling thread until the connection ends.
pub fn serve_socket(shared: &ServerShared, address: &Address, socket: OwnedFd) {
    let listener = shared.tables.lock().listener_id(address);
    let peer = describe_peer(&socket, getpeername(&socket).ok().flatten());
    let link = listener.and_then(|listener| shared.add_connection(listener, socket, peer));
    if let Some(link) = link {
        connection::run(shared, &link, Start::Handshake);
    }
}
