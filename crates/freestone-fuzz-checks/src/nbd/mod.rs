//! What NBD clients send: to a server in this process, through a real socket.

mod client;
mod device;
mod handshake;
mod replies;
mod requests;
mod transmission;

use freestone_nbd::{Address, Limits, Server, Workers};
use tempfile::TempDir;

pub use client::WAIT;

/// A server with one address, for any number of checks one after the other.
pub struct Nbd {
    server: Server,
    address: Address,
    /// Of the socket.
    _directory: TempDir,
}

impl Nbd {
    /// A server that shows nothing yet.
    ///
    /// # Panics
    /// There is no place for its socket.
    #[allow(clippy::new_without_default, reason = "it takes a socket and a thread")]
    pub fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory for the socket");
        // What is checked follows the requests in order.
        let server = Server::with_workers(Limits::default(), &Workers::new(1));
        let address = Address::Unix(directory.path().join("nbd"));
        let address = server.listen(&address).expect("the server listens");
        Self { server, address, _directory: directory }
    }

    /// Nothing panicked so far, and nobody was turned away.
    fn assert_sound(&self) {
        let stats = self.server.stats();
        assert_eq!((stats.panics, stats.refused), (0, 0));
    }
}
