//! Large requests that workers of the process do, so that one connection uses several CPUs.
//!
//! The connection's thread keeps what is cheap, what comes alone, and what the workers have no room
//! for; writes to zones, too, which begin in the order in which they came.

use freestone_core::device::{IoBuf, Op, Request};
use freestone_core::workers::Began;
use zerocopy::FromBytes;

use crate::errno::Action;
use crate::headers::{Headers, Tag};
use crate::proto::{ExtendedRequest, RequestHeader, command};
use crate::session::{Lost, Session, Step};

/// A large request that the connection's thread does itself.
#[derive(Debug, Clone, Copy)]
pub struct Large {
    began: Option<Began>,
    /// As it was before: one that was submitted is not done.
    submitted: u64,
}

impl Session<'_> {
    /// Whether a worker should do this request, whose header is the first of the input, or this
    /// part of the operation at hand.
    pub(crate) fn hands_on(&mut self, request: &Request, is_part: bool) -> bool {
        let is_write = request.op == Op::Write;
        if !self.workers.has_room() || (is_write && self.geometry.zones.is_some()) {
            return false;
        }
        // What comes alone has nothing to gain: the client waits for it. Of a write the payload is
        // not here yet, so the one before it says whether there are more.
        let behind = match (is_part, is_write) {
            (true, _) => 1,
            (false, true) => u64::from(self.followed),
            (false, false) => self.reads_behind(),
        };
        // Payload comes slowly: of writes it is not known when the next can begin.
        let together = if is_write { 1 } else { 1 + behind };
        (behind > 0 || self.operations.in_flight > 0)
            && self.costs.are_worth_it(request, together, self.workers.are_awake())
            && self.admits(request.len as usize)
    }

    /// Requests behind the read whose header is the first of the input, if reads follow.
    fn reads_behind(&self) -> u64 {
        let header = self.header_bytes;
        let behind = self.input.data().get(header..).unwrap_or_default();
        let next = if self.headers == Headers::Extended {
            ExtendedRequest::ref_from_prefix(behind).ok().map(|(next, _)| next.command.get())
        } else {
            RequestHeader::ref_from_prefix(behind).ok().map(|(next, _)| next.command.get())
        };
        if next == Some(command::READ) { (behind.len() / header) as u64 } else { 0 }
    }

    /// A read, or a part of one, that is large enough to be measured. Apart, as small ones are to be
    /// short.
    #[inline(never)]
    pub(crate) fn read_large_piece(
        &mut self,
        tag: Tag,
        request: Request,
        part: Option<(usize, bool)>,
    ) -> Result<Step, Lost> {
        if self.hands_on(&request, part.is_some()) {
            return self.hand_on_read(tag, request, part);
        }
        let large = self.begin_large();
        let step = self.read_piece(tag, request, part)?;
        self.end_large(&request, large, step);
        Ok(step)
    }

    /// A read, or a part of one, is a worker's.
    fn hand_on_read(
        &mut self,
        tag: Tag,
        request: Request,
        part: Option<(usize, bool)>,
    ) -> Result<Step, Lost> {
        let slot = match part {
            Some((slot, _)) => slot,
            None => self.operations.open(tag, Action::Plain, true),
        };
        self.operations.get(slot).open = part.is_some_and(|(_, last)| !last);
        match self.replies.buffers.take(request.len as usize) {
            Ok(buffer) => {
                self.hand_on(slot, request, buffer, false);
                Ok(Step::Done)
            }
            Err(error) => self.fail_part(slot, error, &request),
        }
    }

    /// This thread is about to do a large request. It takes time, and what was submitted before it
    /// does not wait for that.
    pub(crate) fn begin_large(&mut self) -> Large {
        self.replies.plug = None;
        self.replies.at_work = Some(self.workers.work_beside());
        Large { began: self.costs.begin(), submitted: self.tally.submitted }
    }

    /// This thread has done what it could of a large request.
    pub(crate) fn end_large(&mut self, request: &Request, large: Large, step: Step) {
        self.replies.at_work = None;
        let is_done = step == Step::Done && self.tally.submitted == large.submitted;
        self.costs.learn(request, large.began.filter(|_| is_done));
    }

    /// Hands a part of the operation at `slot` to a worker; as [`submit`](Self::submit).
    pub(crate) fn hand_on(&mut self, slot: usize, request: Request, buffer: IoBuf, charged: bool) {
        let done = self.begin_part(slot, request, &buffer, charged);
        self.device.hand_on(&self.workers, &self.costs, request, buffer, done);
    }
}
