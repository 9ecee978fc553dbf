//! An NBD client that sends given bytes and collects everything that the server sends.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{
    set_socket_send_buffer_size, set_socket_send_buffer_size_force, socket_send_buffer_size,
};

use super::device::Memory;

/// Timeout after which a check fails, far above the time that any check needs.
pub const WAIT: Duration = Duration::from_secs(60);

/// Behaviour of the client during an [`exchange`].
pub struct ClientBehaviour<'a> {
    /// Device whose held requests the client completes while the connection is idle, if any.
    pub device: Option<&'a Memory>,
    /// True if the client disconnects after sending everything, without receiving the rest of the replies.
    pub leaves: bool,
}

/// Number of bytes that the overhead of a message can occupy in a socket buffer.
const MESSAGE_BYTES: usize = 2048;

/// Sends `bytes`, runs the server on this thread, and returns everything that the server sent. `serve`
/// receives the other socket. `most` has the maximum number of bytes and of messages from the server. Returns
/// None if the socket buffers cannot hold these.
pub fn exchange_inline(bytes: &[u8], most: (usize, usize), serve: impl FnOnce(OwnedFd)) -> Option<Vec<u8>> {
    let (ours, theirs) = UnixStream::pair().expect("a descriptor is left");
    for (socket, bytes, messages) in [(&ours, bytes.len(), 1), (&theirs, most.0, most.1)] {
        // The kernel also counts its overhead as content of the buffer, so request twice the bytes.
        let wanted = bytes * 2 + messages * MESSAGE_BYTES;
        if socket_send_buffer_size(socket).is_ok_and(|size| size < wanted)
            && set_socket_send_buffer_size_force(socket, wanted).is_err()
        {
            // Without the privilege to force a size, the kernel doubles the requested size up to its limit.
            let _ = set_socket_send_buffer_size(socket, wanted);
            if socket_send_buffer_size(socket).unwrap_or(0) < wanted {
                return None;
            }
        }
    }
    (&ours).write_all(bytes).expect("there is room for it");
    ours.shutdown(Shutdown::Write).expect("a socket");
    serve(theirs.into());
    let mut received = Vec::new();
    (&ours).read_to_end(&mut received).expect("the server has ended it in order");
    Some(received)
}

/// Sends `bytes`, and returns everything that the server sends until the connection ends.
pub fn exchange(stream: &UnixStream, bytes: &[u8], behaviour: &ClientBehaviour<'_>) -> Vec<u8> {
    stream.set_nonblocking(true).expect("a socket");
    let start = Instant::now();
    let (mut sent, mut received) = (0, Vec::new());
    let mut open = true;
    let mut space = vec![0; 64 << 10];
    loop {
        if sent == bytes.len() && open {
            if behaviour.leaves {
                return received;
            }
            // The shutdown fails if the server has already ended the connection.
            let _ = stream.shutdown(Shutdown::Write);
            open = false;
        }
        let mut flags = PollFlags::IN;
        flags.set(PollFlags::OUT, open);
        let mut fds = vec![PollFd::from_borrowed_fd(stream.as_fd(), flags)];
        if let Some(device) = behaviour.device {
            fds.push(PollFd::from_borrowed_fd(device.submitted(), PollFlags::IN));
        }
        // Held requests are completed only while nothing can be sent or received.
        let mut ready = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap_or(0);
        if fds[0].revents().is_empty() {
            if behaviour.device.is_some_and(Memory::release) {
                continue;
            }
            let left = WAIT.checked_sub(start.elapsed()).expect("the connection ends");
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
            ready = poll(&mut fds, Some(&left)).unwrap_or(0);
        }
        if ready == 0 || fds[0].revents().is_empty() {
            continue;
        }
        if open && fds[0].revents().contains(PollFlags::OUT) {
            match (&mut &*stream).write(&bytes[sent..]) {
                Ok(n) => sent += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // The server has ended the connection, but the last replies can still be received.
                Err(_) => sent = bytes.len(),
            }
        }
        match (&mut &*stream).read(&mut space) {
            Ok(0) => return received,
            Ok(n) => received.extend_from_slice(&space[..n]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => return received,
        }
    }
}
