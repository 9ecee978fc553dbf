//! Receiving with TLS: decrypts buffered data before it receives from the socket.

use rustix::event::PollFlags;
use rustix::net::RecvFlags;

use super::requests::partial_request::PartialRequest;
use crate::session::{ConnectionLost, Session};
use crate::stream::input::ReceiveResult;
use crate::stream::tls::opener::TlsClosed;

impl Session<'_> {
    /// Receives or decrypts data, like [`receive`](Self::receive). When the server ends the connection, data
    /// that was already received is still decrypted and served. The limit on further bytes applies to the
    /// socket only.
    #[inline(never)]
    pub(super) fn receive_sealed(&mut self, need: usize) -> Result<(), ConnectionLost> {
        if !self.input.has_sealed() && !self.fetch()? {
            return Ok(());
        }
        let opened = match &mut self.current {
            Some(PartialRequest::GatheredWrite(gather)) => match self.input.open_into(gather.space()) {
                Ok(n) => {
                    gather.fill(n);
                    // Decrypts the next header too: whether more requests follow decides if a worker executes
                    // the next write.
                    if gather.space().is_empty() { self.input.open_next_header() } else { Ok(()) }
                }
                Err(TlsClosed) => Err(TlsClosed),
            },
            _ => self.input.open(need),
        };
        opened.or_else(|TlsClosed| self.handle_client_end())
    }

    /// Receives encrypted data once. Returns false if no data arrived.
    fn fetch(&mut self) -> Result<bool, ConnectionLost> {
        let limit = self.begin_drain().unwrap_or(u64::MAX);
        if limit == 0 {
            self.stop_receiving();
            return Ok(false);
        }
        let mut flags = RecvFlags::empty();
        if limit < u64::MAX || self.sweeps.has_ready() {
            flags = RecvFlags::DONTWAIT;
        } else if self.operations.in_flight > 0 {
            flags = RecvFlags::DONTWAIT;
            if !self.wait(PollFlags::IN).ok_or(ConnectionLost)? {
                return Ok(false);
            }
        }
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let (received, n) = self.input.receive_sealed(self.link.socket(), flags, limit);
        self.handle_received(received, n, flags)?;
        Ok(received == ReceiveResult::Data)
    }
}
