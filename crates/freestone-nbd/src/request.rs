//! Parses requests, executes them inline or submits them, and replies. Every request starts here.

use freestone_core::client_log;
use freestone_core::device::{Buffer, Error, Flags, IoBuf, Op, Request, TryResult};
use freestone_core::workers::MIN_BYTES;
use zerocopy::FromBytes;

use crate::errno::{CommandGroup, Errno, Failure};
use crate::flight::MAX_IN_FLIGHT_BYTES;
use crate::handshake::max_payload;
use crate::headers::{Headers, Tag, simple};
use crate::input::RECEIVE_BUFFER_BYTES;
use crate::partial_request::{
    GatheredWrite, ParsedHeader, PartialRequest, PieceWrite, SkippedPayload, WholeRead, WindowedRead, advance,
};
use crate::proto::{
    CommandFlags, EXTENDED_REQUEST_MAGIC, ExtendedRequest, MAX_PAYLOAD_BYTES, REQUEST_MAGIC, RequestHeader,
    command,
};
use crate::replies::MAX_INLINE_BYTES;
use crate::session::{ConnectionLost, Session, Step, memory_failure};

impl Session<'_> {
    /// Handles the next request in the input.
    pub(crate) fn next_request(&mut self) -> Result<Step, ConnectionLost> {
        let (command, incoming) = if self.headers == Headers::Extended {
            match self.next_extended()? {
                Ok(request) => request,
                Err(step) => return Ok(step),
            }
        } else {
            let Ok((header, _)) = RequestHeader::ref_from_prefix(self.input.data()) else {
                return Ok(Step::NeedInput(size_of::<RequestHeader>()));
            };
            if header.magic.get() != REQUEST_MAGIC {
                return Ok(self.reject_magic(header.magic.get()));
            }
            let tag = Tag { cookie: header.cookie.get(), offset: header.offset.get() };
            (
                header.command.get(),
                ParsedHeader { flags: header.flags.get(), tag, len: header.len.get().into() },
            )
        };
        match command {
            command::READ => self.handle_read(incoming),
            command::WRITE => self.handle_write(incoming),
            command::DISC => Ok(Step::Close),
            command::FLUSH => self.handle_plain(incoming, Op::Flush, CommandFlags::empty()),
            command::TRIM => self.handle_plain(incoming, Op::Discard, CommandFlags::empty()),
            command::WRITE_ZEROES => {
                self.handle_plain(incoming, Op::WriteZeroes, CommandFlags::NO_HOLE | CommandFlags::FAST_ZERO)
            }
            command::CACHE => self.handle_cache(incoming),
            command::BLOCK_STATUS => self.handle_block_status(incoming),
            other => {
                self.accept_request();
                tracing::debug!(peer = %self.link.peer(), command = other, "unknown command");
                self.refuse(incoming, Errno::Inval, "unknown command")
            }
        }
    }

    /// Parses a request with extended headers. Returns its command and fields, or the next step if it is
    /// incomplete or already handled.
    #[inline(never)]
    fn next_extended(&mut self) -> Result<Result<(u16, ParsedHeader), Step>, ConnectionLost> {
        let Ok((header, _)) = ExtendedRequest::ref_from_prefix(self.input.data()) else {
            return Ok(Err(Step::NeedInput(size_of::<ExtendedRequest>())));
        };
        if header.magic.get() != EXTENDED_REQUEST_MAGIC {
            return Ok(Err(self.reject_magic(header.magic.get())));
        }
        let command = header.command.get();
        let mut incoming = ParsedHeader {
            flags: header.flags.get(),
            tag: Tag { cookie: header.cookie.get(), offset: header.offset.get() },
            len: header.len.get(),
        };
        let payload = CommandFlags::PAYLOAD_LEN.bits();
        // A write has a payload even without the flag. QEMU (up to 10 at least) does not set the flag, and
        // its own server accepts that.
        if incoming.flags & payload == 0 && command != command::WRITE {
            return Ok(Ok((command, incoming)));
        }
        if incoming.len > MAX_PAYLOAD_BYTES.into() {
            client_log!(warn,
                peer = %self.link.peer(),
                export = %self.export.name,
                len = incoming.len,
                "the client sent a payload length above 64 MiB"
            );
            return Ok(Err(Step::Close));
        }
        match command {
            command::WRITE => {
                incoming.flags &= !payload;
                Ok(Ok((command, incoming)))
            }
            command::BLOCK_STATUS => self.handle_block_status_of(incoming).map(Err),
            command::DISC => Ok(Err(Step::Close)),
            _ => Ok(Err(
                self.skip_payload(incoming, Failure::new(Errno::Inval, "this command has no payload"))
            )),
        }
    }

    /// Ends the connection because a request header has the wrong magic number.
    #[cold]
    fn reject_magic(&self, magic: u32) -> Step {
        client_log!(warn,
            peer = %self.link.peer(),
            export = %self.export.name,
            magic = format_args!("{magic:#010x}"),
            "the client sent an invalid request magic"
        );
        Step::Close
    }

    /// Consumes the header and counts the request. A reply must follow.
    pub(crate) fn accept_request(&mut self) {
        self.input.consume(self.header_bytes);
        self.tally.requests += 1;
    }

    /// Refuses a request with `failure` once its payload was received and discarded.
    #[cold]
    pub(crate) fn skip_payload(&mut self, incoming: ParsedHeader, failure: Failure) -> Step {
        self.accept_request();
        self.current = Some(PartialRequest::SkippedPayload(SkippedPayload {
            tag: incoming.tag,
            left: incoming.len,
            failure,
        }));
        Step::Done
    }

    pub(crate) fn refuse(
        &mut self,
        incoming: ParsedHeader,
        errno: Errno,
        text: &'static str,
    ) -> Result<Step, ConnectionLost> {
        self.reply_failure(incoming.tag, &Failure::new(errno, text))?;
        Ok(Step::Done)
    }

    /// Validates a request before it has any effect. The protocol requires that FUA is accepted with each
    /// command. It is refused if the export does not offer it, and reaches the device only for commands that
    /// write.
    pub(crate) fn validate(
        &mut self,
        incoming: ParsedHeader,
        op: Op,
        allowed: CommandFlags,
        group: CommandGroup,
    ) -> Result<(Request, CommandFlags), Failure> {
        let fua = if self.export.without_fua { CommandFlags::empty() } else { CommandFlags::FUA };
        let flags = CommandFlags::from_bits(incoming.flags)
            .filter(|flags| (allowed | fua).contains(*flags))
            .ok_or(Failure::new(Errno::Inval, "invalid flag for this command"))?;
        let writes = matches!(op, Op::Write | Op::Discard | Op::WriteZeroes);
        let mut request = Request::new(op, incoming.tag.offset, incoming.len);
        if writes && self.read_only {
            return Err(Failure::of(Error::ReadOnly, group, &request));
        }
        if writes && flags.contains(CommandFlags::FUA) {
            request.flags |= Flags::FUA;
        }
        let mut checked = request.check(&self.geometry);
        if checked == Err(Error::OutOfRange) {
            // The device may have grown since its geometry was read.
            self.geometry = self.device.geometry();
            checked = request.check(&self.geometry);
        }
        checked.map_err(|error| Failure::of(error, group, &request))?;
        Ok((request, flags))
    }

    fn handle_read(&mut self, incoming: ParsedHeader) -> Result<Step, ConnectionLost> {
        let allowed = if self.headers.have_chunks() { CommandFlags::DF } else { CommandFlags::empty() };
        let vetted = self.validate(incoming, Op::Read, allowed, CommandGroup::Plain);
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

    /// Reads at most [`MAX_INLINE_BYTES`]. The device reads inline, directly into the reply buffer, and the
    /// header is written afterwards. If that would block, the read is submitted. For a piece of a larger
    /// read, `part` is the index of the operation, and true for the last piece.
    pub(crate) fn read_piece(
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

    /// Records that a part of the operation at `slot` failed before it was submitted.
    pub(crate) fn fail_part(
        &mut self,
        slot: usize,
        error: Error,
        part: &Request,
    ) -> Result<Step, ConnectionLost> {
        let operation = self.operations.get(slot);
        let group = operation.group;
        operation.failure.get_or_insert_with(|| Failure::of(error, group, part));
        self.finish(slot)?;
        Ok(Step::Done)
    }

    fn handle_write(&mut self, incoming: ParsedHeader) -> Result<Step, ConnectionLost> {
        let vetted = self.validate(incoming, Op::Write, CommandFlags::empty(), CommandGroup::Store);
        let request = match vetted {
            Ok((request, _)) if incoming.len <= max_payload(&self.geometry).into() => request,
            other => {
                let failure = other.err();
                let failure = failure.unwrap_or(Failure::new(Errno::Inval, "too much in one write"));
                return Ok(self.skip_payload(incoming, failure));
            }
        };
        let tag = incoming.tag;
        let is_large = request.len >= MIN_BYTES;
        if is_large && let Some(step) = self.prepare_large_write(tag, request) {
            return Ok(step);
        }
        let all = self.header_bytes + request.len as usize;
        if self.input.data().len() < all {
            return Ok(Step::NeedInput(all));
        }
        let large = if is_large { Some(self.begin_large()) } else { None };
        let step = self.write_received(tag, request)?;
        if let Some(large) = large {
            self.end_large(&request, large, step);
            self.more_follows = !self.input.data().is_empty();
        }
        Ok(step)
    }

    /// Prepares a write of at least [`MIN_BYTES`] if a worker executes it or it does not fit in the receive
    /// buffer. Returns None for other writes.
    fn prepare_large_write(&mut self, tag: Tag, request: Request) -> Option<Step> {
        let len = request.len as usize;
        let uses_worker = len <= MAX_INLINE_BYTES && self.should_use_worker(&request, false);
        if !uses_worker && self.header_bytes + len <= RECEIVE_BUFFER_BYTES {
            return None;
        }
        if self.geometry.zones.is_none() && !uses_worker {
            self.accept_request();
            let slot = self.operations.open(tag, CommandGroup::Store, false);
            self.current = Some(PartialRequest::PieceWrite(PieceWrite { slot, rest: request }));
            return Some(Step::Done);
        }
        // A write to a zoned device, and one for a worker, is executed as a whole.
        if !self.try_admit(len) {
            return Some(Step::Stalled);
        }
        self.accept_request();
        if let Ok(buffer) = self.replies.buffers.take(len) {
            self.operations.charged += len;
            let gather = GatheredWrite { tag, rest: request, buffer, filled: 0, uses_worker };
            self.current = Some(PartialRequest::GatheredWrite(gather));
        } else {
            let failure = memory_failure(CommandGroup::Store, &request);
            self.current =
                Some(PartialRequest::SkippedPayload(SkippedPayload { tag, left: request.len, failure }));
        }
        Some(Step::Done)
    }

    /// Executes a write whose payload is completely in the input.
    fn write_received(&mut self, tag: Tag, request: Request) -> Result<Step, ConnectionLost> {
        let (header, len) = (self.header_bytes, request.len as usize);
        let mut rest = request;
        let result = loop {
            let payload = &self.input.data()[header + len - rest.len as usize..header + len];
            match self.device.try_io(&rest, Buffer::Write(payload)) {
                Ok(TryResult::Done) => break Ok(()),
                Ok(TryResult::Partly(n)) => {
                    rest = advance(rest, n);
                    self.replies.send_around(self.link.socket(), 0)?;
                }
                Ok(TryResult::WouldBlock) => {
                    let left = rest.len as usize;
                    if !self.try_admit(left) {
                        if left == len {
                            return Ok(Step::Stalled);
                        }
                        // The device has written the first part. The rest is written when fewer bytes are in
                        // flight.
                        self.accept_request();
                        self.input.consume(len - left);
                        let slot = self.operations.open(tag, CommandGroup::Store, false);
                        self.current = Some(PartialRequest::PieceWrite(PieceWrite { slot, rest }));
                        return Ok(Step::Done);
                    }
                    let payload = &self.input.data()[header + len - left..header + len];
                    match self.replies.buffers.copy_of(payload) {
                        Ok(buffer) => {
                            let slot = self.operations.open(tag, CommandGroup::Store, false);
                            self.operations.get(slot).open = false;
                            self.submit(slot, rest, buffer, false);
                            self.accept_request();
                            self.input.consume(len);
                            return Ok(Step::Done);
                        }
                        Err(error) => break Err(error),
                    }
                }
                Err(error) => break Err(error),
            }
        };
        self.accept_request();
        self.input.consume(len);
        match result {
            Ok(()) => self.reply_done(tag)?,
            Err(error) => self.reply_failure(tag, &Failure::of(error, CommandGroup::Store, &request))?,
        }
        Ok(Step::Done)
    }

    /// Handles flush, trim and write zeroes, which have no payload in either direction.
    fn handle_plain(
        &mut self,
        incoming: ParsedHeader,
        op: Op,
        allowed: CommandFlags,
    ) -> Result<Step, ConnectionLost> {
        self.accept_request();
        let group = match op {
            Op::Flush => CommandGroup::Flush,
            Op::Discard => CommandGroup::Trim,
            _ if incoming.flags & CommandFlags::FAST_ZERO.bits() != 0 => CommandGroup::StoreFast,
            _ => CommandGroup::Store,
        };
        let (mut request, flags) = match self.validate(incoming, op, allowed, group) {
            Ok(vetted) => vetted,
            Err(failure) => {
                self.reply_failure(incoming.tag, &failure)?;
                return Ok(Step::Done);
            }
        };
        match op {
            Op::Discard if self.geometry.discard_granularity == 0 => {
                return self.refuse(incoming, Errno::Inval, "the device offers no discard");
            }
            // `Geometry::fast_zeroes` covers only zeroes that may become a hole.
            Op::WriteZeroes
                if group == CommandGroup::StoreFast
                    && (!self.geometry.fast_zeroes || flags.contains(CommandFlags::NO_HOLE)) =>
            {
                return self.refuse(incoming, Errno::NotSup, "the device has no fast zeroes");
            }
            Op::WriteZeroes if !flags.contains(CommandFlags::NO_HOLE) => request.flags |= Flags::MAY_FREE,
            _ => {}
        }
        self.current = Some(PartialRequest::Plain { tag: incoming.tag, request, group });
        Ok(Step::Done)
    }

    fn handle_cache(&mut self, incoming: ParsedHeader) -> Result<Step, ConnectionLost> {
        self.accept_request();
        // Validated like a read, which checks the range.
        match self.validate(incoming, Op::Read, CommandFlags::empty(), CommandGroup::Plain) {
            Ok((request, _)) => {
                self.device.prefetch(request.offset, request.len);
                self.reply_done(incoming.tag)?;
            }
            Err(failure) => self.reply_failure(incoming.tag, &failure)?,
        }
        Ok(Step::Done)
    }
}
