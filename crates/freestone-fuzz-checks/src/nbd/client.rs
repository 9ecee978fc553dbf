//! A client that says what it is told to say, and keeps what it hears.

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

/// Long enough for anything that comes at all.
pub const WAIT: Duration = Duration::from_secs(60);

/// How a talk goes on beside the bytes.
pub struct Manners<'a> {
    /// A device whose held requests are answered while nothing moves.
    pub device: Option<&'a Memory>,
    /// The client goes when it has said everything, and hears nothing.
    pub leaves: bool,
}

/// Bytes of a socket's buffer that a small message may take.
const MESSAGE_BYTES: usize = 2048;

/// Says `bytes` and hears everything, with the server on this thread: `serve` gets the other
/// socket. `most` is how much the server may say, in how many messages; `None` where sockets do not
/// hold so much.
pub fn talk_alone(bytes: &[u8], most: (usize, usize), serve: impl FnOnce(OwnedFd)) -> Option<Vec<u8>> {
    let (ours, theirs) = UnixStream::pair().expect("a descriptor is left");
    for (socket, bytes, messages) in [(&ours, bytes.len(), 1), (&theirs, most.0, most.1)] {
        // Twice as much for what the kernel counts beside the bytes.
        let wanted = bytes * 2 + messages * MESSAGE_BYTES;
        if socket_send_buffer_size(socket).is_ok_and(|size| size < wanted)
            && set_socket_send_buffer_size_force(socket, wanted).is_err()
        {
            // The kernel gives twice what it is asked for, as far as it may.
            let _ = set_socket_send_buffer_size(socket, wanted);
            if socket_send_buffer_size(socket).unwrap_or(0) < wanted {
                return None;
            }
        }
    }
    (&ours).write_all(bytes).expect("there is room for it");
    ours.shutdown(Shutdown::Write).expect("a socket");
    serve(theirs.into());
    let mut heard = Vec::new();
    (&ours).read_to_end(&mut heard).expect("the server has ended it in order");
    Some(heard)
}

/// Says `bytes`, and hears everything until the server ends the connection.
pub fn talk(stream: &UnixStream, bytes: &[u8], manners: &Manners<'_>) -> Vec<u8> {
    stream.set_nonblocking(true).expect("a socket");
    let began = Instant::now();
    let (mut said, mut heard) = (0, Vec::new());
    let mut open = true;
    let mut space = vec![0; 64 << 10];
    loop {
        if said == bytes.len() && open {
            if manners.leaves {
                return heard;
            }
            // The server may have ended it.
            let _ = stream.shutdown(Shutdown::Write);
            open = false;
        }
        let mut flags = PollFlags::IN;
        flags.set(PollFlags::OUT, open);
        let mut fds = vec![PollFd::from_borrowed_fd(stream.as_fd(), flags)];
        if let Some(device) = manners.device {
            fds.push(PollFd::from_borrowed_fd(device.submitted(), PollFlags::IN));
        }
        // While there is something to hear or to say, what is held stays held.
        let mut ready = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap_or(0);
        if fds[0].revents().is_empty() {
            if manners.device.is_some_and(Memory::release) {
                continue;
            }
            let left = WAIT.checked_sub(began.elapsed()).expect("the connection ends");
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
            ready = poll(&mut fds, Some(&left)).unwrap_or(0);
        }
        if ready == 0 || fds[0].revents().is_empty() {
            continue;
        }
        if open && fds[0].revents().contains(PollFlags::OUT) {
            match (&mut &*stream).write(&bytes[said..]) {
                Ok(n) => said += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // The server has ended it, and says why in what is still to be heard.
                Err(_) => said = bytes.len(),
            }
        }
        match (&mut &*stream).read(&mut space) {
            Ok(0) => return heard,
            Ok(n) => heard.extend_from_slice(&space[..n]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => return heard,
        }
    }
}
