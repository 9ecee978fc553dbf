//! NBD server with arbitrary bytes of clients. The server runs in this process, connected through sockets.

mod client;
mod device;
mod handshake;
mod replies;
mod requests;
mod transmission;

use freestone_nbd::{Address, Limits, Server, Workers};
use tempfile::TempDir;

pub use client::WAIT;

/// An NBD server with one address, for any number of consecutive checks.
pub struct Nbd {
    server: Server,
    address: Address,
    /// Directory of the server's socket, deleted on drop.
    _directory: TempDir,
}

impl Nbd {
    /// Creates a server without exports.
    ///
    /// # Panics
    /// Panics if the socket cannot be created.
    #[allow(clippy::new_without_default, reason = "it takes a socket and a thread")]
    pub fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory for the socket");
        // The checks need the effects of requests in order, so there is only one worker.
        let server = Server::with_workers(Limits::default(), &Workers::new(1));
        let address = Address::Unix(directory.path().join("nbd"));
        let address = server.listen(&address).expect("the server listens");
        Self { server, address, _directory: directory }
    }

    /// Asserts that the server did not panic and refused no client.
    fn assert_sound(&self) {
        let stats = self.server.stats();
        assert_eq!((stats.panics, stats.refused), (0, 0));
    }
}
