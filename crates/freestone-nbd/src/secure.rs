//! How a connection by TLS receives: what is here is opened first, and then the socket is asked.

use rustix::event::PollFlags;
use rustix::net::RecvFlags;

use crate::input::Received;
use crate::session::{Client, Lost, Session};
use crate::stream::Stream;
use crate::tls::opener::Closed;

impl Session<'_> {
    /// As [`receive`](Self::receive). The bytes that are still taken once the server wants the
    /// connection to end are those of the socket; what is here already is served.
    #[inline(never)]
    pub(crate) fn receive_sealed(&mut self, need: usize) -> Result<(), Lost> {
        if !self.input.has_sealed() && !self.fetch()? {
            return Ok(());
        }
        let opened = match &mut self.stream {
            Some(Stream::Gather(gather)) => match self.input.open_into(gather.space()) {
                Ok(n) => {
                    gather.fill(n);
                    // Whether more requests follow, which says who does the next one.
                    if gather.space().is_empty() { self.input.open_begin() } else { Ok(()) }
                }
                Err(Closed) => Err(Closed),
            },
            _ => self.input.open(need),
        };
        opened.or_else(|Closed| self.client_ends())
    }

    /// Receives once. False: nothing came.
    fn fetch(&mut self) -> Result<bool, Lost> {
        let limit = self.begin_drain().unwrap_or(u64::MAX);
        if limit == 0 {
            self.client = Client::Ended;
            return Ok(false);
        }
        let mut flags = RecvFlags::empty();
        if limit < u64::MAX || self.sweeps.are_ready() {
            flags = RecvFlags::DONTWAIT;
        } else if self.operations.in_flight > 0 {
            flags = RecvFlags::DONTWAIT;
            if !self.wait(PollFlags::IN).ok_or(Lost)? {
                return Ok(false);
            }
        }
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let (received, n) = self.input.receive_sealed(self.link.socket(), flags, limit);
        self.received(received, n, flags)?;
        Ok(received == Received::Data)
    }
}
