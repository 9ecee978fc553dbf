//! Receiving with TLS: decrypts buffered data before it receives from the socket.

use rustix::event::PollFlags;
use rustix::net::RecvFlags;

use crate::input::ReceiveResult;
use crate::session::{Client, Lost, Session};
use crate::stream::Stream;
use crate::tls::opener::Closed;

impl Session<'_> {
    /// Receives or decrypts data, like [`receive`](Self::receive). When the server ends the connection, data
    /// that was already received is still served. The limit on further bytes applies to the socket only.
    #[inline(never)]
    pub(crate) fn receive_sealed(&mut self, need: usize) -> Result<(), Lost> {
        if !self.input.has_sealed() && !self.fetch()? {
            return Ok(());
        }
        let opened = match &mut self.stream {
            Some(Stream::Gather(gather)) => match self.input.open_into(gather.space()) {
                Ok(n) => {
                    gather.fill(n);
                    // Whether more requests follow decides who executes the next one.
                    if gather.space().is_empty() { self.input.open_next_header() } else { Ok(()) }
                }
                Err(Closed) => Err(Closed),
            },
            _ => self.input.open(need),
        };
        opened.or_else(|Closed| self.handle_client_end())
    }

    /// Receives once. Returns false if no data arrived.
    fn fetch(&mut self) -> Result<bool, Lost> {
        let limit = self.begin_drain().unwrap_or(u64::MAX);
        if limit == 0 {
            self.client = Client::Ended;
            return Ok(false);
        }
        let mut flags = RecvFlags::empty();
        if limit < u64::MAX || self.sweeps.has_ready() {
            flags = RecvFlags::DONTWAIT;
        } else if self.operations.in_flight > 0 {
            flags = RecvFlags::DONTWAIT;
            if !self.wait(PollFlags::IN).ok_or(Lost)? {
                return Ok(false);
            }
        }
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let (received, n) = self.input.receive_sealed(self.link.socket(), flags, limit);
        self.handle_received(received, n, flags)?;
        Ok(received == ReceiveResult::Data)
    }
}
