//! The end of a session for a successor of the server, which continues with the same client.
//!
//! The session stops at the boundary of a request: it finishes the current request and the operations in
//! flight, sends their replies, and passes a copy of the socket with the received bytes of later requests.
//! Sessions that cannot be passed end like in a shutdown.

use freestone_core::client_log;

use super::{ClientState, ConnectionLost, Session, Step};
use crate::address::Address;
use crate::shared::passed::{ConnectionState, PassedConnection};

impl Session<'_> {
    /// Reacts to the end of serving, which the server or the thread itself has begun. Returns the number of
    /// bytes still to receive, or None if there is no limit.
    #[cold]
    pub(super) fn begin_end(&mut self) -> Option<u64> {
        if self.link.is_passing() {
            if self.can_pass() {
                return match self.client_state {
                    // The payload of the current request is still awaited.
                    ClientState::Active | ClientState::Passing => {
                        self.client_state = ClientState::Passing;
                        self.current.is_none().then_some(0)
                    }
                    // The client has left, so the connection ends in any case.
                    ClientState::Disconnecting | ClientState::Ended => None,
                };
            }
            self.link.drain();
        }
        if self.client_state == ClientState::Passing {
            self.client_state = ClientState::Active;
        }
        self.drain = Some(rustix::io::ioctl_fionread(self.link.socket()).unwrap_or(0));
        self.drain
    }

    /// Stops before the next request if the connection will be passed. Called where a session that has much
    /// input does not receive for a long time. Returns true if it stops.
    #[inline]
    pub(super) fn stop_for_successor(&mut self) -> bool {
        self.link.is_ending() && self.begin_stop()
    }

    #[cold]
    fn begin_stop(&mut self) -> bool {
        let stops = self.link.is_passing() && self.client_state == ClientState::Active && self.can_pass();
        if stops {
            self.client_state = ClientState::Passing;
            if self.current.is_none() {
                self.stop_waiting();
            }
        }
        stops
    }

    /// Returns true if a successor can continue the session. The state of TLS cannot be passed, and neither
    /// can the device of a template.
    fn can_pass(&self) -> bool {
        let address = &self.link.address;
        !self.input.is_secure()
            && self.export.template().is_none()
            && address.to_string().parse::<Address>().as_ref() == Ok(address)
    }

    /// Finishes the current request, and starts no other.
    #[cold]
    pub(super) fn finish_current(&mut self) -> Result<Step, ConnectionLost> {
        while !self.replies.is_due() {
            let Some(current) = self.current.take() else { return Ok(Step::Boundary) };
            let step = self.continue_request(current)?;
            if step != Step::Done {
                return Ok(step);
            }
        }
        Ok(Step::Yield)
    }

    /// Passes the connection, which has neither requests in flight nor replies to send. Returns false if the
    /// session must end otherwise, because it was drained or cut, or no file descriptor is left.
    #[cold]
    pub(super) fn pass(&mut self) -> bool {
        // A successor measures anew whether a large send buffer is useful.
        self.send_buffer.fit(self.link, true);
        let state = ConnectionState {
            address: self.link.address.to_string(),
            export: self.export.name.clone(),
            headers: self.headers.name().to_owned(),
            contexts: self.contexts.names_and_ids().map(|(name, _)| name.to_owned()).collect(),
            unread: self.input.data().to_vec(),
        };
        match rustix::io::fcntl_dupfd_cloexec(self.link.socket(), 0) {
            Ok(socket) => {
                if self.shared.pass(self.link, PassedConnection { socket, state }) {
                    return true;
                }
            }
            Err(error) => {
                client_log!(warn, peer = %self.link.peer(), %error, "a connection cannot be passed: it ends");
                self.link.drain();
            }
        }
        self.client_state = ClientState::Active;
        false
    }
}
