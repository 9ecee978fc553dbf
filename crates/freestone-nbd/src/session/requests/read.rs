//! Reads: executed inline into the reply buffer, submitted, or begun as a request of several turns.

use freestone_core::device::{Buffer, IoBuf, Op, Request, TryResult};
use freestone_core::workers::MIN_BYTES;

use super::partial_request::{ParsedHeader, PartialRequest, WholeRead, WindowedRead, advance};
use crate::limits::MAX_IN_FLIGHT_BYTES;
use crate::proto::{CommandFlags, MAX_PAYLOAD_BYTES};
use crate::session::in_flight::memory_failure;
use crate::session::{ConnectionLost, Session, Step};
use crate::stream::replies::MAX_INLINE_BYTES;
use crate::wire::errno::{CommandGroup, Errno, Failure};
use crate::wire::headers::{Tag, simple};

impl Session<'_> {
    pub(super) fn handle_read(&mut self, incoming: ParsedHeader) -> Result<Step, ConnectionLost> {
        freestone_core::trail::step!();
        let vetted = self.validate_read(incoming);
        let len = incoming.len as usize;
        let (request, flags) = match vetted {
            Ok((_, _)) if incoming.len > MAX_PAYLOAD_BYTES.into() => {
                self.accept_request();
                return self.refuse(incoming, Errno::Overflow, "more than 64 MiB in one read");
            }
            Ok((_, flags)) if flags.contains(CommandFlags::DF) && len > MAX_IN_FLIGHT_BYTES => {
                self.accept_request();
                return self.refuse(incoming, Errno::Overflow, "more than 32 MiB in one chunk");
            }
            Ok(vetted) => vetted,
            Err(failure) => {
                self.accept_request();
                self.reply_failure(incoming.tag, &failure)?;
                return Ok(Step::Done);
            }
        };
        if len <= MAX_INLINE_BYTES {
            let step = if request.len >= MIN_BYTES {
                self.read_large_piece(incoming.tag, request, None)?
            } else {
                self.read_piece(incoming.tag, request, None)?
            };
            if step == Step::Done {
                self.accept_request();
            }
            return Ok(step);
        }
        if self.headers.have_chunks() && !flags.contains(CommandFlags::DF) {
            self.accept_request();
            let slot = self.operations.open(incoming.tag, CommandGroup::Plain, true);
            self.current = Some(PartialRequest::Read { slot, request });
            return Ok(Step::Done);
        }
        if len > MAX_IN_FLIGHT_BYTES {
            self.accept_request();
            let windows = WindowedRead { tag: incoming.tag, rest: request, has_header: false, reading: None };
            self.current = Some(PartialRequest::WindowedRead(windows));
            return Ok(Step::Done);
        }
        // The reply must be one piece. The data is read into a separate buffer, so that an error reply is
        // possible and other replies are not delayed.
        if !self.try_admit(len) {
            return Ok(Step::Stalled);
        }
        self.accept_request();
        let Ok(buffer) = IoBuf::zeroed(len) else {
            self.reply_failure(incoming.tag, &memory_failure(CommandGroup::Plain, &request))?;
            return Ok(Step::Done);
        };
        self.operations.charged += len;
        self.current =
            Some(PartialRequest::WholeRead(WholeRead { tag: incoming.tag, request, buffer, filled: 0 }));
        Ok(Step::Done)
    }

    pub(super) fn validate_read(
        &mut self,
        incoming: ParsedHeader,
    ) -> Result<(Request, CommandFlags), Failure> {
        let allowed = if self.headers.have_chunks() { CommandFlags::DF } else { CommandFlags::empty() };
        self.validate(incoming, Op::Read, allowed, CommandGroup::Plain)
    }

    /// Reads at most [`MAX_INLINE_BYTES`]. The device reads inline, directly into the reply buffer, and the
    /// header is written afterwards. If that would block, the read is submitted. For a piece of a larger
    /// read, `part` is the index of the operation, and true for the last piece.
    pub(in crate::session) fn read_piece(
        &mut self,
        tag: Tag,
        request: Request,
        part: Option<(usize, bool)>,
    ) -> Result<Step, ConnectionLost> {
        let len = request.len as usize;
        let head = self.data_head_bytes;
        self.replies.reserve(self.link.socket(), head + len)?;
        let mut rest = request;
        loop {
            let start = self.replies.position();
            let at = start + head + (len - rest.len as usize);
            let space = self.replies.space(at, rest.len as usize);
            match self.device.try_io(&rest, Buffer::Read(space)) {
                Ok(TryResult::Done) => {
                    let done = match part {
                        None => true,
                        Some((slot, last)) => {
                            let operation = self.operations.get(slot);
                            operation.open = !last;
                            last && operation.parts == 0 && operation.failure.is_none()
                        }
                    };
                    if self.headers.have_chunks() {
                        self.headers.put_chunk_of_data(&mut self.replies, tag, request.offset, len, done);
                    } else {
                        self.replies.put(&simple(tag.cookie, 0));
                        self.replies.commit(start + head + len);
                    }
                    self.tally.replies += u64::from(done);
                    if let Some((slot, _)) = part {
                        if done {
                            self.operations.take_ended(slot);
                        } else {
                            self.finish(slot)?;
                        }
                    }
                    return Ok(Step::Done);
                }
                Ok(TryResult::Partly(n)) => {
                    rest = advance(rest, n);
                    // Sends the pending replies, so that they do not wait for the rest of this read.
                    self.replies.send_around(self.link.socket(), head + len)?;
                }
                Ok(TryResult::WouldBlock) => {
                    if !self.try_admit(len) {
                        return Ok(Step::Stalled);
                    }
                    let slot = match part {
                        Some((slot, _)) => slot,
                        None => self.operations.open(tag, CommandGroup::Plain, true),
                    };
                    self.operations.get(slot).open = part.is_some_and(|(_, last)| !last);
                    return match self.replies.buffers.take(len) {
                        // The whole piece is read again, as its data must lie in one buffer.
                        Ok(buffer) => {
                            self.submit(slot, request, buffer, false);
                            Ok(Step::Done)
                        }
                        Err(error) => self.fail_part(slot, error, &request),
                    };
                }
                Err(error) => {
                    return match part {
                        None => {
                            self.reply_failure(tag, &Failure::of(error, CommandGroup::Plain, &request))?;
                            Ok(Step::Done)
                        }
                        Some((slot, last)) => {
                            self.operations.get(slot).open = !last;
                            self.fail_part(slot, error, &request)
                        }
                    };
                }
            }
        }
    }
}
