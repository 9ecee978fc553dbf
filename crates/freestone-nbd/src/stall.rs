//! Waits of a connection that has no room for its next request.
//!
//! Such a connection does not receive. One that waits for the budget of the server, which others hold
//! for as long as they like, polls for the end of the client's stream: a request that nobody reads the
//! answer of is not begun, and the connection ends. A client that shuts down only its side of the
//! connection counts as gone, as TCP does not tell the two apart.

use rustix::event::PollFlags;
use rustix::net::RecvFlags;

use crate::proto::command;
use crate::receive::receive_into;
use crate::session::{Client, Lost, Session};

/// Where a header of a request, extended or not, has its command.
const COMMAND: std::ops::Range<usize> = 6..8;

impl Session<'_> {
    /// Waits until the device has finished something, bytes were granted, or the client has left.
    pub(crate) fn wait_stalled(&mut self) -> Result<(), Lost> {
        // The socket of a connection that drains looks as if the client had left.
        let looks = self.share.waits() && self.client != Client::Leaves && !self.link.is_draining();
        let events = if looks { PollFlags::RDHUP } else { PollFlags::empty() };
        if !self.wait(events).ok_or(Lost)? || !self.has_gone() {
            return Ok(());
        }
        if self.says_goodbye() {
            self.client = Client::Leaves;
            return Ok(());
        }
        self.client_ends()
    }

    /// Returns true if the last thing that the client has sent may be a request to disconnect: what it
    /// asked for before is done. Data of TLS does not tell.
    fn says_goodbye(&self) -> bool {
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
