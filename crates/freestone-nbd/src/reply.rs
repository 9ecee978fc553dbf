//! Replies to requests: success, an error, or data.

use freestone_core::device::IoBuf;

use crate::errno::{Cause, Failure};
use crate::headers::{Headers, Tag, simple};
use crate::proto::{ErrorPayload, SimpleReply, chunk};
use crate::replies::Replies;
use crate::session::{Lost, Session};

impl Session<'_> {
    /// Sends the reply of the operation at `slot` if it has ended.
    pub(crate) fn finish(&mut self, slot: usize) -> Result<(), Lost> {
        match self.operations.take_ended(slot) {
            None => Ok(()),
            Some(operation) => match operation.failure {
                Some(failure) => self.reply_failure(operation.tag, &failure),
                // Only reads with chunks have parts, so a simple read never gets here.
                None if operation.is_read => self.reply_end(operation.tag),
                None => self.reply_done(operation.tag),
            },
        }
    }

    /// Replies with success to a request without data in its reply. With compact headers a simple reply is
    /// allowed here even if structured replies were negotiated.
    pub(crate) fn reply_done(&mut self, tag: Tag) -> Result<(), Lost> {
        if self.headers == Headers::Extended {
            return self.reply_end(tag);
        }
        self.replies.reserve(self.link.socket(), size_of::<SimpleReply>())?;
        self.replies.put(&simple(tag.cookie, 0));
        self.tally.replies += 1;
        Ok(())
    }

    /// Sends an empty chunk that ends a reply.
    #[inline(never)]
    fn reply_end(&mut self, tag: Tag) -> Result<(), Lost> {
        self.replies.reserve(self.link.socket(), self.headers.chunk_bytes())?;
        self.headers.put_chunk(&mut self.replies, tag, chunk::NONE, true, 0);
        self.tally.replies += 1;
        Ok(())
    }

    pub(crate) fn reply_failure(&mut self, tag: Tag, failure: &Failure) -> Result<(), Lost> {
        self.tally.replies += 1;
        self.tally.errors += 1;
        if let Some(cause) = &failure.cause {
            self.report_failure(cause);
        }
        let error = failure.errno as u32;
        if self.headers.have_chunks() {
            let text = failure.text.as_bytes();
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

    /// Counts an error of the device for its operator, and logs it, rate limited.
    #[cold]
    pub(crate) fn report_failure(&self, cause: &Cause) {
        let (name, peer) = (&self.export.name, self.link.peer());
        if let Some(held_back) = self.export.failures.count(cause.failed, cause.error) {
            tracing::warn!(peer, "{name}: {cause}{held_back}");
        } else {
            tracing::debug!(peer, "{name}: {cause}");
        }
    }

    /// Replies to a read with data from an owned buffer.
    pub(crate) fn reply_data(&mut self, tag: Tag, offset: u64, data: IoBuf, done: bool) -> Result<(), Lost> {
        if self.headers.is_hole(&data) {
            self.replies.reserve(self.link.socket(), self.headers.hole_bytes())?;
            self.headers.put_hole(&mut self.replies, tag, offset, data.len() as u32, done);
            self.replies.buffers.give(data);
        } else {
            let room = self.data_head_bytes + Replies::room_for_owned(data.len());
            self.replies.reserve(self.link.socket(), room)?;
            self.headers.put_data_head(&mut self.replies, tag, offset, data.len() as u32, done);
            self.replies.put_owned(data);
        }
        self.tally.replies += u64::from(done);
        Ok(())
    }

    /// Replies to a read without structured replies. `header` is None if the header was already sent.
    pub(crate) fn reply_simple_data(&mut self, header: Option<Tag>, data: IoBuf) -> Result<(), Lost> {
        let room = size_of::<SimpleReply>() + Replies::room_for_owned(data.len());
        self.replies.reserve(self.link.socket(), room)?;
        if let Some(tag) = header {
            self.replies.put(&simple(tag.cookie, 0));
        }
        self.replies.put_owned(data);
        Ok(())
    }
}
