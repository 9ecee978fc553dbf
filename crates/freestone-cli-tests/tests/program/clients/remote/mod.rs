//! Devices on other servers: NBD exports and RBD images, as data, backing devices and COW devices.

mod nbd;
mod nbd_backing;
mod rbd;

use crate::harness::prelude::*;

/// Ends a server by `freestone shutdown`. Returns its directory.
fn shut_down(server: Serve) -> TempDir {
    server.text(&["shutdown"]);
    server.wait().1
}

/// Checks the first bytes of an export.
#[track_caller]
fn assert_content(serve: &Serve, name: &str, data: &[u8]) {
    assert!(content(serve, name)[..data.len()] == *data, "{name} holds something else");
}
