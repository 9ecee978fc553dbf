//! Receiving: waits for data or completions, detects idle clients, and notices the end of a client.
//!
//! With TLS, [`tls_receive`](super::tls_receive) takes the place of the plain receive.

use std::time::Duration;

use freestone_core::stack;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::RecvFlags;
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::operations::Operations;
use super::requests::partial_request::PartialRequest;
use super::{ClientState, ConnectionLost, Session};
use crate::stream::input::ReceiveResult;

/// A client that sends nothing for this long counts as idle.
const IDLE_TIME: Duration = Duration::from_secs(1);

impl Session<'_> {
    /// Returns the number of bytes still to receive if the server ends the connection, else None. The first
    /// call after [`Link::drain`] sets this limit to the bytes in the socket's buffer.
    #[inline]
    pub(super) fn begin_drain(&mut self) -> Option<u64> {
        if self.drain.is_none() && self.link.is_draining() {
            self.drain = Some(rustix::io::ioctl_fionread(self.link.socket()).unwrap_or(0));
        }
        self.drain
    }

    /// Receives once, so that the input can hold `need` bytes. Sets [`ClientState::Ended`] if nothing more
    /// will arrive.
    pub(super) fn receive(&mut self, need: usize) -> Result<(), ConnectionLost> {
        if self.input.is_secure() {
            return self.receive_sealed(need);
        }
        let limit = self.begin_drain().unwrap_or(u64::MAX);
        if limit == 0 {
            self.client_state = ClientState::Ended;
            return Ok(());
        }
        let mut flags = RecvFlags::empty();
        if self.drain.is_some() || self.sweeps.has_ready() {
            flags = RecvFlags::DONTWAIT;
        } else if self.operations.in_flight > 0 {
            flags = RecvFlags::DONTWAIT;
            if !self.wait(PollFlags::IN).ok_or(ConnectionLost)? {
                return Ok(());
            }
        }
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let (received, n) = if let Some(PartialRequest::GatheredWrite(gather)) = &mut self.current {
            let space = gather.space();
            let len = space.len().min(limit);
            let (received, n) =
                self.input.receive_behind(self.link.socket(), flags, &mut space[..len], limit - len);
            gather.fill(n.min(len));
            (received, n)
        } else {
            self.input.receive(self.link.socket(), flags, need, limit)
        };
        self.handle_received(received, n, flags)
    }

    #[inline]
    pub(super) fn handle_received(
        &mut self,
        received: ReceiveResult,
        n: usize,
        flags: RecvFlags,
    ) -> Result<(), ConnectionLost> {
        match received {
            ReceiveResult::Data => {
                freestone_core::trail::arrive!();
                self.tally.receives += 1;
                if self.client_state == ClientState::Idle {
                    self.set_idle_timeout(true);
                }
                if let Some(left) = &mut self.drain {
                    *left = left.saturating_sub(n as u64);
                }
            }
            ReceiveResult::WouldBlock if self.drain.is_some() => self.client_state = ClientState::Ended,
            // The receive timeout IDLE_TIME has expired.
            ReceiveResult::WouldBlock if flags.is_empty() => self.free_idle_memory(),
            ReceiveResult::WouldBlock => {}
            ReceiveResult::Ended => self.handle_client_end()?,
        }
        Ok(())
    }

    #[cold]
    pub(super) fn handle_client_end(&mut self) -> Result<(), ConnectionLost> {
        self.client_state = ClientState::Ended;
        self.stop_waiting();
        // If the server ends the connection, received sweeps are completed like other requests.
        if self.sweeps.is_empty() || self.link.is_draining() { Ok(()) } else { self.stop_sweeps() }
    }

    /// Returns true if the client will send no more, even if data is still unread. Returns false if the
    /// connection ends in order, by a disconnect or a drain, as earlier requests are then completed.
    pub(super) fn has_client_gone(&self) -> bool {
        if matches!(self.client_state, ClientState::Ended | ClientState::Disconnecting)
            || self.link.is_draining()
        {
            return false;
        }
        self.link.has_left()
    }

    /// Returns memory used by earlier requests to the kernel, because the client is idle.
    #[cold]
    fn free_idle_memory(&mut self) {
        if self.current.is_some() {
            return;
        }
        self.input.free_memory();
        self.replies.free_memory();
        self.operations = Operations::default();
        self.finished = Vec::new();
        self.share.release_all();
        self.set_idle_timeout(false);
        stack::release_unused_stack();
    }

    /// Enables or disables the receive timeout that detects an idle client.
    pub(super) fn set_idle_timeout(&mut self, enabled: bool) {
        // On failure an idle connection only keeps its memory.
        let _ = set_socket_timeout(self.link.socket(), Timeout::Recv, enabled.then_some(IDLE_TIME));
        self.client_state = if enabled { ClientState::Active } else { ClientState::Idle };
    }

    /// Waits for a completion, a wakeup, or one of `events` at the socket. Returns true if one of `events`
    /// occurred, and None if the connection was cut.
    #[inline]
    pub(super) fn wait(&mut self, events: PollFlags) -> Option<bool> {
        let queue = self.link.queue();
        // A cut after this check wakes the poll. The wakeup of an earlier cut may have been consumed already.
        if queue.is_shut_down() {
            return None;
        }
        let wake = PollFd::new(queue.wake_fd(), PollFlags::IN);
        let mut fds = [wake, PollFd::from_borrowed_fd(self.link.socket(), events)];
        // A signal may end the wait early; every caller checks its condition again.
        let _ = poll(&mut fds[..if events.is_empty() { 1 } else { 2 }], None);
        if !fds[0].revents().is_empty() {
            queue.rearm();
        }
        (!queue.is_shut_down()).then(|| !fds[1].revents().is_empty())
    }
}
