//! The size of a Unix socket's send buffer.
//!
//! The kernel's default holds fewer than two replies of 128 KiB, so the connection's thread sleeps in most
//! sends of large replies. A larger buffer lets it execute the next requests instead. If workers execute
//! requests of the connection, it gains nothing: the workers have work while the thread sleeps. The buffer
//! of a TCP socket is left to the kernel, which adapts it.

use rustix::net::sockopt::{set_socket_send_buffer_size, socket_send_buffer_size};

use crate::address::Address;
use crate::link::Link;

/// Requested size of a large send buffer in bytes. The kernel doubles it for its own overhead, and limits it
/// to `net.core.wmem_max`.
const LARGE_BYTES: usize = 256 << 10;
/// Factor by which the size that the kernel reports exceeds the one that was requested.
const REPORTED_FACTOR: usize = 2;

/// The send buffer of a connection's socket.
#[derive(Debug, Default)]
pub struct SendBuffer {
    /// Size before the buffer was enlarged, as it was reported; `None` while the buffer is not enlarged.
    former_bytes: Option<usize>,
}

impl SendBuffer {
    /// Enlarges the buffer, or restores its former size if `has_workers` is true.
    #[inline]
    pub fn fit(&mut self, link: &Link, has_workers: bool) {
        if self.former_bytes.is_some() == has_workers {
            self.change(link, has_workers);
        }
    }

    #[cold]
    fn change(&mut self, link: &Link, has_workers: bool) {
        if !matches!(link.address, Address::Unix(_)) {
            return;
        }
        // A failure only costs speed.
        if has_workers {
            if let Some(former) = self.former_bytes.take() {
                let _ = set_socket_send_buffer_size(link.socket(), former / REPORTED_FACTOR);
            }
        } else if let Ok(former) = socket_send_buffer_size(link.socket()) {
            if former < LARGE_BYTES * REPORTED_FACTOR {
                let _ = set_socket_send_buffer_size(link.socket(), LARGE_BYTES);
            }
            self.former_bytes = Some(former);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn link(address: Address) -> (Link, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Link::new(1, address, "a test".into(), ours.into()).unwrap(), theirs)
    }

    #[test]
    fn buffer_is_large_only_without_workers() {
        let (link, _peer) = link(Address::Unix("/nowhere".into()));
        let bytes = || socket_send_buffer_size(link.socket()).unwrap();
        // A system with larger buffers needs no change.
        let _ = set_socket_send_buffer_size(link.socket(), 64 << 10);
        let former = bytes();
        let mut buffer = SendBuffer::default();
        buffer.fit(&link, true);
        assert_eq!(bytes(), former);
        for _ in 0..2 {
            buffer.fit(&link, false);
            assert!(bytes() > former && bytes() <= LARGE_BYTES * REPORTED_FACTOR, "{former} {}", bytes());
        }
        buffer.fit(&link, true);
        assert_eq!(bytes(), former);
    }

    #[test]
    fn tcp_buffer_stays_as_it_is() {
        let (link, _peer) = link(Address::Tcp { host: "localhost".into(), port: 1 });
        let former = socket_send_buffer_size(link.socket()).unwrap();
        SendBuffer::default().fit(&link, false);
        assert_eq!(socket_send_buffer_size(link.socket()).unwrap(), former);
    }
}
