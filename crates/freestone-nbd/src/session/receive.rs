//! Receiving: waits for data or completions, detects idle clients, and notices the end of a client.
//!
//! With TLS, [`tls_receive`](super::tls_receive) takes the place of the plain receive.

use std::time::Duration;

use freestone_core::stack;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::RecvFlags;
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::operations::Operations;
use super::requests::partial_request::PartialRequest;
use super::{ClientState, ConnectionLost, Session};
use crate::stream::input::ReceiveResult;

/// Longest time for which the thread waits in a receive call, from which only data wakes it. Then it polls
/// the completion queue too. A poll before each receive would delay every request.
const RECEIVE_TIME: Duration = Duration::from_millis(20);
/// A client that sends nothing for this long, after [`RECEIVE_TIME`], counts as idle.
const IDLE_TIME: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Why a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wakeup {
    /// The time was over, or a signal arrived.
    Timeout,
    /// The completion queue was woken.
    Queue,
    /// An event occurred at the socket.
    Socket,
}

impl Session<'_> {
    /// Returns the number of bytes still to receive if the server ends the connection, else None. The first
    /// call after [`Link::drain`] sets this limit to the bytes in the socket's buffer.
    #[inline]
    pub(super) fn begin_drain(&mut self) -> Option<u64> {
        if self.drain.is_none() && self.link.is_ending() { self.begin_end() } else { self.drain }
    }

    /// Receives nothing more: the connection ends, or stops for a successor.
    #[cold]
    pub(super) fn stop_receiving(&mut self) {
        if self.client_state != ClientState::Passing {
            self.client_state = ClientState::Ended;
        }
    }

    /// Receives once, so that the input can hold `need` bytes. Sets [`ClientState::Ended`] if nothing more
    /// will arrive.
    pub(super) fn receive(&mut self, need: usize) -> Result<(), ConnectionLost> {
        if self.input.is_secure() {
            return self.receive_sealed(need);
        }
        let limit = self.begin_drain().unwrap_or(u64::MAX);
        if limit == 0 {
            self.stop_receiving();
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
                if let Some(left) = &mut self.drain {
                    *left = left.saturating_sub(n as u64);
                }
            }
            ReceiveResult::WouldBlock if self.drain.is_some() => self.client_state = ClientState::Ended,
            // The receive timeout RECEIVE_TIME has expired.
            ReceiveResult::WouldBlock if flags.is_empty() => self.wait_idle()?,
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

    /// Waits for data or a wakeup, and frees memory if the client is idle.
    #[cold]
    fn wait_idle(&mut self) -> Result<(), ConnectionLost> {
        let wakeup = self.wait_at_most(PollFlags::IN, Some(&IDLE_TIME)).ok_or(ConnectionLost)?;
        if wakeup == Wakeup::Timeout {
            self.free_idle_memory();
            self.wait(PollFlags::IN).ok_or(ConnectionLost)?;
        }
        Ok(())
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
        stack::release_unused_stack();
    }

    /// Limits the time of each blocking receive.
    pub(super) fn limit_receives(&self) {
        // On failure an idle connection keeps its memory, and cannot be passed to a successor.
        let _ = set_socket_timeout(self.link.socket(), Timeout::Recv, Some(RECEIVE_TIME));
    }

    /// Waits for a completion, a wakeup, or one of `events` at the socket. Returns true if one of `events`
    /// occurred, and None if the connection was cut.
    #[inline]
    pub(super) fn wait(&mut self, events: PollFlags) -> Option<bool> {
        self.wait_at_most(events, None).map(|wakeup| wakeup == Wakeup::Socket)
    }

    /// Waits like [`wait`](Self::wait), at most for `time`.
    #[inline]
    fn wait_at_most(&mut self, events: PollFlags, time: Option<&Timespec>) -> Option<Wakeup> {
        let queue = self.link.queue();
        // A cut after this check wakes the poll. The wakeup of an earlier cut may have been consumed already.
        if queue.is_shut_down() {
            return None;
        }
        let wake = PollFd::new(queue.wake_fd(), PollFlags::IN);
        let mut fds = [wake, PollFd::from_borrowed_fd(self.link.socket(), events)];
        // A signal may end the wait early; every caller checks its condition again.
        let _ = poll(&mut fds[..if events.is_empty() { 1 } else { 2 }], time);
        let mut wakeup = Wakeup::Timeout;
        if !fds[0].revents().is_empty() {
            queue.rearm();
            wakeup = Wakeup::Queue;
        }
        if !fds[1].revents().is_empty() {
            wakeup = Wakeup::Socket;
        }
        (!queue.is_shut_down()).then_some(wakeup)
    }
}
