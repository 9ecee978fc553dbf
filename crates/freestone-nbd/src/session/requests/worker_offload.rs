//! Hands large requests to the workers of the process, so that one connection uses several CPUs.
//!
//! The connection's thread executes requests that are cheap, that arrive alone, or for which the workers have
//! no room. It also executes writes to zoned devices, which must start in order of arrival.

use freestone_core::device::{IoBuf, Op, Request};
use freestone_core::workers::{CpuStart, MIN_BYTES};
use zerocopy::FromBytes;

use super::partial_request::ParsedHeader;
use crate::proto::{EXTENDED_REQUEST_MAGIC, ExtendedRequest, REQUEST_MAGIC, RequestHeader, command};
use crate::session::{ConnectionLost, Session, Step};
use crate::stream::replies::MAX_INLINE_BYTES;
use crate::wire::errno::CommandGroup;
use crate::wire::headers::{Headers, Tag};

/// Maximum number of reads passed to workers before due replies are sent. Passing a read takes about a
/// microsecond, by which the replies are delayed.
const MAX_READS_AHEAD: usize = 16;

/// A large request that the connection's thread executes itself.
#[derive(Debug, Clone, Copy)]
pub struct LargeRequest {
    began: Option<CpuStart>,
    /// Number of parts submitted before the request. A larger number afterwards means that the request was
    /// submitted.
    submitted: u64,
}

impl Session<'_> {
    /// Returns true if a worker should execute this request, whose header is first in the input, or this part
    /// of the current operation. `is_busy` is true if this thread has other work for the client: another part
    /// of the operation, or due replies to send.
    pub(in crate::session) fn should_use_worker(&mut self, request: &Request, is_busy: bool) -> bool {
        let is_write = request.op == Op::Write;
        if !self.workers.has_capacity() || (is_write && self.geometry.zones.is_some()) {
            return false;
        }
        // A lone request gains nothing, as the client waits for it. The payload of a write has not arrived
        // yet, so the previous write predicts if more follow.
        let behind = match (is_busy, is_write) {
            (true, _) => 1,
            (false, true) => u64::from(self.more_follows),
            (false, false) => self.reads_behind(),
        };
        // Payloads take time to arrive, so the next write may start too late to run in parallel.
        let together = if is_write { 1 } else { 1 + behind };
        (behind > 0 || self.operations.in_flight > 0)
            && self.costs.is_worker_worthwhile(request, together, self.workers.has_awake_worker())
            && self.try_admit(request.len as usize)
    }

    /// Estimates the number of requests behind the first read in the input. Returns 0 if the next request is
    /// not a read.
    fn reads_behind(&self) -> u64 {
        let header = self.header_bytes;
        let behind = self.input.data().get(header..).unwrap_or_default();
        if parse_read(self.headers, behind).is_some() { (behind.len() / header) as u64 } else { 0 }
    }

    /// Passes the large reads that are next in the input to workers. Called before due replies are sent: a
    /// send may wait for the client, and the workers would have nothing to do meanwhile.
    #[inline(never)]
    pub(in crate::session) fn send_next_reads_to_workers(&mut self) -> Result<(), ConnectionLost> {
        for _ in 0..MAX_READS_AHEAD {
            let Some(incoming) = parse_read(self.headers, self.input.data()) else { break };
            if !(MIN_BYTES..=MAX_INLINE_BYTES as u64).contains(&incoming.len) {
                break;
            }
            // The loop refuses an invalid request when its turn comes.
            let Ok((request, _)) = self.validate_read(incoming) else { break };
            if !self.should_use_worker(&request, true) {
                break;
            }
            self.send_read_to_worker(incoming.tag, request, None)?;
            self.accept_request();
        }
        Ok(())
    }

    /// Reads a piece that is large enough to measure its cost. Not inlined, to keep the path of small reads
    /// short.
    #[inline(never)]
    pub(in crate::session) fn read_large_piece(
        &mut self,
        tag: Tag,
        request: Request,
        part: Option<(usize, bool)>,
    ) -> Result<Step, ConnectionLost> {
        if self.should_use_worker(&request, part.is_some()) {
            return self.send_read_to_worker(tag, request, part);
        }
        let large = self.begin_large();
        let step = self.read_piece(tag, request, part)?;
        self.end_large(&request, large, step);
        self.send_buffer.fit(self.link, self.costs.is_worker_worthwhile(&request, 1, true));
        Ok(step)
    }

    /// Hands a read, or a part of one, to a worker.
    fn send_read_to_worker(
        &mut self,
        tag: Tag,
        request: Request,
        part: Option<(usize, bool)>,
    ) -> Result<Step, ConnectionLost> {
        let slot = match part {
            Some((slot, _)) => slot,
            None => self.operations.open(tag, CommandGroup::Plain, true),
        };
        self.operations.get(slot).open = part.is_some_and(|(_, last)| !last);
        match self.replies.buffers.take(request.len as usize) {
            Ok(buffer) => {
                self.send_to_worker(slot, request, buffer, false);
                Ok(Step::Done)
            }
            Err(error) => self.fail_part(slot, error, &request),
        }
    }

    /// Prepares a large request on this thread. Releases the plug, as parts submitted before must not wait
    /// for this request.
    pub(in crate::session) fn begin_large(&mut self) -> LargeRequest {
        self.replies.plug = None;
        self.replies.at_work = Some(self.workers.register_busy_reader());
        LargeRequest { began: self.costs.begin(), submitted: self.tally.submitted }
    }

    /// Ends the measurement of a large request, and records its cost if the request completed inline.
    pub(in crate::session) fn end_large(&mut self, request: &Request, large: LargeRequest, step: Step) {
        self.replies.at_work = None;
        let is_done = step == Step::Done && self.tally.submitted == large.submitted;
        self.costs.record(request, large.began.filter(|_| is_done));
    }

    /// Hands a part of the operation at `slot` to a worker; otherwise like [`submit`](Self::submit).
    pub(in crate::session) fn send_to_worker(
        &mut self,
        slot: usize,
        request: Request,
        buffer: IoBuf,
        charged: bool,
    ) {
        let done = self.begin_part(slot, request, &buffer, charged);
        self.device.send_to_worker(&self.workers, &self.costs, request, buffer, done);
    }
}

/// Returns the header of the read at the start of `data`. Returns None if `data` starts with another request
/// or an incomplete header.
fn parse_read(headers: Headers, data: &[u8]) -> Option<ParsedHeader> {
    let (command, incoming) = if headers == Headers::Extended {
        let (header, _) = ExtendedRequest::ref_from_prefix(data).ok()?;
        let tag = Tag { cookie: header.cookie.get(), offset: header.offset.get() };
        let incoming = ParsedHeader { flags: header.flags.get(), tag, len: header.len.get() };
        (header.command.get(), (header.magic.get() == EXTENDED_REQUEST_MAGIC).then_some(incoming)?)
    } else {
        let (header, _) = RequestHeader::ref_from_prefix(data).ok()?;
        let tag = Tag { cookie: header.cookie.get(), offset: header.offset.get() };
        let incoming = ParsedHeader { flags: header.flags.get(), tag, len: header.len.get().into() };
        (header.command.get(), (header.magic.get() == REQUEST_MAGIC).then_some(incoming)?)
    };
    (command == command::READ).then_some(incoming)
}
