//! Replies to requests: success, an error, or data.

use freestone_core::device::IoBuf;

use crate::proto::{ErrorPayload, SimpleReply, chunk};
use crate::session::{ConnectionLost, Session};
use crate::stream::replies::Replies;
use crate::wire::errno::{Cause, Failure};
use crate::wire::headers::{Headers, Tag, simple};

impl Session<'_> {
    /// Adds the reply of the operation at `slot` to the pending replies, if the operation has ended.
    pub(super) fn finish(&mut self, slot: usize) -> Result<(), ConnectionLost> {
        match self.operations.take_ended(slot) {
            None => Ok(()),
            Some(operation) => match operation.failure {
                Some(failure) => self.reply_failure(operation.tag, &failure),
                // The read has chunks: the only part of a simple read also ends its reply.
                None if operation.is_read => self.reply_end(operation.tag),
                None => self.reply_done(operation.tag),
            },
        }
    }

    /// Replies with success to a request whose reply has no data. With compact headers the protocol allows a
    /// simple reply for it, even if structured replies were negotiated.
    pub(super) fn reply_done(&mut self, tag: Tag) -> Result<(), ConnectionLost> {
        freestone_core::trail::step!();
        if self.headers == Headers::Extended {
            return self.reply_end(tag);
        }
        self.replies.reserve(self.link.socket(), size_of::<SimpleReply>())?;
        self.replies.put(&simple(tag.cookie, 0));
        self.tally.replies += 1;
        Ok(())
    }

    /// Appends an empty chunk that ends a reply.
    #[inline(never)]
    fn reply_end(&mut self, tag: Tag) -> Result<(), ConnectionLost> {
        self.replies.reserve(self.link.socket(), self.headers.chunk_bytes())?;
        self.headers.put_chunk(&mut self.replies, tag, chunk::NONE, true, 0);
        self.tally.replies += 1;
        Ok(())
    }

    pub(super) fn reply_failure(&mut self, tag: Tag, failure: &Failure) -> Result<(), ConnectionLost> {
        self.tally.replies += 1;
        self.tally.errors += 1;
        if let Some(cause) = &failure.cause {
            self.report_failure(cause);
        }
        let error = failure.errno as u32;
        if self.headers.have_chunks() {
            let text = failure.message.as_bytes();
            let len = size_of::<ErrorPayload>() + text.len();
            self.replies.reserve(self.link.socket(), self.headers.chunk_bytes() + len)?;
            self.headers.put_chunk(&mut self.replies, tag, chunk::ERROR, true, len as u32);
            self.replies.put(&ErrorPayload { error: error.into(), message_len: (text.len() as u16).into() });
            self.replies.put(text);
        } else {
            self.replies.reserve(self.link.socket(), size_of::<SimpleReply>())?;
            self.replies.put(&simple(tag.cookie, error));
        }
        Ok(())
    }

    /// Counts a device error in the failure counters of the export, and logs it, rate limited.
    #[cold]
    pub(super) fn report_failure(&self, cause: &Cause) {
        let (name, peer) = (&self.export.name, self.link.peer());
        if let Some(held_back) = self.export.failures.count(cause.failed, cause.error) {
            tracing::warn!(peer, "{name}: {cause}{held_back}");
        } else {
            tracing::debug!(peer, "{name}: {cause}");
        }
    }

    /// Appends the data of a read, from an owned buffer. `done` is true if the data ends the reply.
    pub(super) fn reply_data(
        &mut self,
        tag: Tag,
        offset: u64,
        data: IoBuf,
        done: bool,
    ) -> Result<(), ConnectionLost> {
        freestone_core::trail::step!();
        if self.headers.is_hole(&data) {
            self.replies.reserve(self.link.socket(), self.headers.hole_bytes())?;
            self.headers.put_hole(&mut self.replies, tag, offset, data.len() as u32, done);
            self.replies.buffers.put_back(data);
        } else {
            let room = self.data_head_bytes + Replies::space_for_owned(data.len());
            self.replies.reserve(self.link.socket(), room)?;
            self.headers.put_data_head(&mut self.replies, tag, offset, data.len() as u32, done);
            self.replies.put_owned(data);
        }
        self.tally.replies += u64::from(done);
        Ok(())
    }

    /// Appends the data of a simple reply to a read. `header` is None if the header was already sent.
    pub(super) fn reply_simple_data(
        &mut self,
        header: Option<Tag>,
        data: IoBuf,
    ) -> Result<(), ConnectionLost> {
        freestone_core::trail::step!();
        let room = size_of::<SimpleReply>() + Replies::space_for_owned(data.len());
        self.replies.reserve(self.link.socket(), room)?;
        if let Some(tag) = header {
            self.replies.put(&simple(tag.cookie, 0));
        }
        self.replies.put_owned(data);
        Ok(())
    }
}
