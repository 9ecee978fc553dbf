//! What requests are answered: that they are done, why not, or with data.

use freestone_core::device::IoBuf;

use crate::errno::{Cause, Failure};
use crate::headers::{Headers, Tag, simple};
use crate::proto::{ErrorPayload, SimpleReply, chunk};
use crate::replies::Replies;
use crate::session::{Lost, Session};

impl Session<'_> {
    /// Answers the operation at `slot` if it has ended.
    pub(crate) fn finish(&mut self, slot: usize) -> Result<(), Lost> {
        match self.operations.take_ended(slot) {
            None => Ok(()),
            Some(operation) => match operation.failure {
                Some(failure) => self.reply_failure(operation.tag, &failure),
                // Only reads with chunks have parts, so only they come here.
                None if operation.is_read => self.reply_end(operation.tag),
                None => self.reply_done(operation.tag),
            },
        }
    }

    /// "It is done", for requests without data in the reply. With compact headers a simple reply is
    /// allowed for these, whatever others look like.
    pub(crate) fn reply_done(&mut self, tag: Tag) -> Result<(), Lost> {
        if self.headers == Headers::Extended {
            return self.reply_end(tag);
        }
        self.replies.reserve(self.link.socket(), size_of::<SimpleReply>())?;
        self.replies.put(&simple(tag.cookie, 0));
        self.tally.replies += 1;
        Ok(())
    }

    /// A chunk of nothing that ends a reply.
    #[inline(never)]
    fn reply_end(&mut self, tag: Tag) -> Result<(), Lost> {
        self.replies.reserve(self.link.socket(), self.headers.chunk_bytes())?;
        self.headers.put_chunk(&mut self.replies, tag, chunk::NONE, true, 0);
        self.tally.replies += 1;
        Ok(())
    }

    /// The request failed.
    pub(crate) fn reply_failure(&mut self, tag: Tag, failure: &Failure) -> Result<(), Lost> {
        self.tally.replies += 1;
        self.tally.errors += 1;
        if let Some(cause) = &failure.cause {
            self.tell_failure(cause);
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

    /// Counts what a device answered for who looks after it, and logs it, though seldom.
    #[cold]
    pub(crate) fn tell_failure(&self, cause: &Cause) {
        let (name, peer) = (&self.export.name, self.link.peer());
        if let Some(held_back) = self.export.failures.count(cause.failed, cause.error) {
            tracing::warn!(peer, "{name}: {cause}{held_back}");
        } else {
            tracing::debug!(peer, "{name}: {cause}");
        }
    }

    /// Data of a read, from an owned buffer.
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

    /// Data of a read without structured replies; behind a header, unless that is out already.
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
