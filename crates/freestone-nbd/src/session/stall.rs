//! The wait of a connection whose next request exceeds a limit on requests in flight or on memory.
//!
//! Such a connection does not receive. While it waits for the server's memory budget, which other connections
//! may use for any time, it polls for the end of the client's stream. If the client has gone, the request is
//! dropped and the connection ends. A client that shuts down only its sending side counts as gone, as TCP
//! does not distinguish this from a close.

use rustix::event::PollFlags;
use rustix::net::RecvFlags;

use crate::proto::command;
use crate::session::{ClientState, ConnectionLost, Session};
use crate::stream::receive::receive_into;

/// Byte range of the command in a request header, compact or extended.
const COMMAND: std::ops::Range<usize> = 6..8;

impl Session<'_> {
    /// Waits until the device completes a part, the budget grants bytes, or the client leaves.
    pub(super) fn wait_stalled(&mut self) -> Result<(), ConnectionLost> {
        // The socket of a draining connection always polls as closed, so the poll would not show that the
        // client left.
        let looks = self.share.is_waiting()
            && self.client_state != ClientState::Disconnecting
            && !self.link.is_draining();
        let events = if looks { PollFlags::RDHUP } else { PollFlags::empty() };
        if !self.wait(events).ok_or(ConnectionLost)? || !self.has_client_gone() {
            return Ok(());
        }
        if self.is_disconnecting() {
            self.client_state = ClientState::Disconnecting;
            return Ok(());
        }
        self.handle_client_end()
    }

    /// Returns true if the client's last data may be a disconnect request, before which earlier requests are
    /// completed. Encrypted data always counts as one, as it cannot be inspected.
    fn is_disconnecting(&self) -> bool {
        if self.input.is_secure() {
            return true;
        }
        let mut sent = self.input.data().to_vec();
        let known = sent.len();
        let unread = rustix::io::ioctl_fionread(self.link.socket()).unwrap_or(0);
        sent.resize(known + unread as usize, 0);
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let peeked = receive_into(self.link.socket(), flags, &mut sent[known..]).unwrap_or(0);
        sent.truncate(known + peeked);
        let last = sent.len().checked_sub(self.header_bytes).map(|at| &sent[at..]);
        last.is_some_and(|last| last[COMMAND] == command::DISC.to_be_bytes())
    }
}
