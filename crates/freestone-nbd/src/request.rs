//! Parses requests, executes them inline or submits them, and replies. Every request starts here.

use freestone_core::client_log;
use freestone_core::device::{Buffer, Error, Flags, IoBuf, Op, Request, Tried};
use freestone_core::workers::MIN_BYTES;
use zerocopy::FromBytes;

use crate::errno::{Action, Errno, Failure};
use crate::flight::MAX_IN_FLIGHT_BYTES;
use crate::handshake::max_payload;
use crate::headers::{Headers, Tag, simple};
use crate::input::RECEIVE_BUFFER_BYTES;
use crate::proto::{
    CommandFlags, EXTENDED_REQUEST_MAGIC, ExtendedRequest, MAX_PAYLOAD_BYTES, REQUEST_MAGIC, RequestHeader,
    command,
};
use crate::replies::MAX_INLINE_BYTES;
use crate::session::{Lost, Session, Step, no_memory};
use crate::stream::{Gather, Incoming, Skip, Stream, Whole, Windows, Write, advance};

impl Session<'_> {
    /// Handles the next request in the input.
    pub(crate) fn next_request(&mut self) -> Result<Step, Lost> {
        let (command, incoming) = if self.headers == Headers::Extended {
            match self.next_extended()? {
                Ok(request) => request,
                Err(step) => return Ok(step),
            }
        } else {
            let Ok((header, _)) = RequestHeader::ref_from_prefix(self.input.data()) else {
                return Ok(Step::Input(size_of::<RequestHeader>()));
            };
            if header.magic.get() != REQUEST_MAGIC {
                return Ok(self.no_request(header.magic.get()));
            }
            let tag = Tag { cookie: header.cookie.get(), offset: header.offset.get() };
            (header.command.get(), Incoming { flags: header.flags.get(), tag, len: header.len.get().into() })
        };
        match command {
            command::READ => self.read(incoming),
            command::WRITE => self.write(incoming),
            command::DISC => Ok(Step::End),
            command::FLUSH => self.plain(incoming, Op::Flush, CommandFlags::empty()),
            command::TRIM => self.plain(incoming, Op::Discard, CommandFlags::empty()),
            command::WRITE_ZEROES => {
                self.plain(incoming, Op::WriteZeroes, CommandFlags::NO_HOLE | CommandFlags::FAST_ZERO)
            }
            command::CACHE => self.cache(incoming),
            command::BLOCK_STATUS => self.block_status(incoming),
            other => {
                self.accept();
                tracing::debug!(peer = %self.link.peer(), command = other, "unknown command");
                self.refuse(incoming, Errno::Inval, "unknown command")
            }
        }
    }

    /// Parses a request with extended headers. Returns its command and fields, or the next step if it is
    /// incomplete or already handled.
    #[inline(never)]
    fn next_extended(&mut self) -> Result<Result<(u16, Incoming), Step>, Lost> {
        let Ok((header, _)) = ExtendedRequest::ref_from_prefix(self.input.data()) else {
            return Ok(Err(Step::Input(size_of::<ExtendedRequest>())));
        };
        if header.magic.get() != EXTENDED_REQUEST_MAGIC {
            return Ok(Err(self.no_request(header.magic.get())));
        }
        let command = header.command.get();
        let mut incoming = Incoming {
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
            return Ok(Err(Step::End));
        }
        match command {
            command::WRITE => {
                incoming.flags &= !payload;
                Ok(Ok((command, incoming)))
            }
            command::BLOCK_STATUS => self.block_status_of(incoming).map(Err),
            command::DISC => Ok(Err(Step::End)),
            _ => Ok(Err(self.skip(incoming, Failure::new(Errno::Inval, "this command has no payload")))),
        }
    }

    /// Ends the connection because a request header has the wrong magic number.
    #[cold]
    fn no_request(&self, magic: u32) -> Step {
        client_log!(warn,
            peer = %self.link.peer(),
            export = %self.export.name,
            magic = format_args!("{magic:#010x}"),
            "the client sent an invalid request magic"
        );
        Step::End
    }

    /// Consumes the header and counts the request. A reply must follow.
    pub(crate) fn accept(&mut self) {
        self.input.consume(self.header_bytes);
        self.tally.requests += 1;
    }

    /// Refuses a request with a payload, which is discarded.
    #[cold]
    pub(crate) fn skip(&mut self, incoming: Incoming, failure: Failure) -> Step {
        self.accept();
        self.stream = Some(Stream::Skip(Skip { tag: incoming.tag, left: incoming.len, failure }));
        Step::Done
    }

    pub(crate) fn refuse(
        &mut self,
        incoming: Incoming,
        errno: Errno,
        text: &'static str,
    ) -> Result<Step, Lost> {
        self.reply_failure(incoming.tag, &Failure::new(errno, text))?;
        Ok(Step::Done)
    }

    /// Validates a request before it has any effect. FUA is allowed with each command, as the protocol
    /// requires, unless the export does not offer it. FUA reaches the device only for commands that write.
    pub(crate) fn vet(
        &mut self,
        incoming: Incoming,
        op: Op,
        allowed: CommandFlags,
        action: Action,
    ) -> Result<(Request, CommandFlags), Failure> {
        let fua = if self.export.without_fua { CommandFlags::empty() } else { CommandFlags::FUA };
        let flags = CommandFlags::from_bits(incoming.flags)
            .filter(|flags| (allowed | fua).contains(*flags))
            .ok_or(Failure::new(Errno::Inval, "invalid flag for this command"))?;
        let writes = matches!(op, Op::Write | Op::Discard | Op::WriteZeroes);
        let mut request = Request::new(op, incoming.tag.offset, incoming.len);
        if writes && self.read_only {
            return Err(Failure::of(Error::ReadOnly, action, &request));
        }
        if writes && flags.contains(CommandFlags::FUA) {
            request.flags |= Flags::FUA;
        }
        let mut checked = request.check(&self.geometry);
        if checked == Err(Error::OutOfRange) {
            // The device may have grown.
            self.geometry = self.device.geometry();
            checked = request.check(&self.geometry);
        }
        checked.map_err(|error| Failure::of(error, action, &request))?;
        Ok((request, flags))
    }

    fn read(&mut self, incoming: Incoming) -> Result<Step, Lost> {
        let allowed = if self.headers.have_chunks() { CommandFlags::DF } else { CommandFlags::empty() };
        let vetted = self.vet(incoming, Op::Read, allowed, Action::Plain);
        let len = incoming.len as usize;
        let (request, flags) = match vetted {
            Ok((_, _)) if incoming.len > MAX_PAYLOAD_BYTES.into() => {
                self.accept();
                return self.refuse(incoming, Errno::Overflow, "more than 64 MiB in one read");
            }
            Ok((_, flags)) if flags.contains(CommandFlags::DF) && len > MAX_IN_FLIGHT_BYTES => {
                self.accept();
                return self.refuse(incoming, Errno::Overflow, "more than 32 MiB in one chunk");
            }
            Ok(vetted) => vetted,
            Err(failure) => {
                self.accept();
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
                self.accept();
            }
            return Ok(step);
        }
        if self.headers.have_chunks() && !flags.contains(CommandFlags::DF) {
            self.accept();
            let slot = self.operations.open(incoming.tag, Action::Plain, true);
            self.stream = Some(Stream::Read { slot, request });
            return Ok(Step::Done);
        }
        if len > MAX_IN_FLIGHT_BYTES {
            self.accept();
            let windows = Windows { tag: incoming.tag, rest: request, has_header: false, reading: None };
            self.stream = Some(Stream::Windows(windows));
            return Ok(Step::Done);
        }
        // The reply must be one piece. The data is read into a separate buffer, so that an error reply is
        // possible and other replies are not delayed.
        if !self.admits(len) {
            return Ok(Step::Stalled);
        }
        self.accept();
        let Ok(buffer) = IoBuf::zeroed(len) else {
            self.reply_failure(incoming.tag, &no_memory(Action::Plain, &request))?;
            return Ok(Step::Done);
        };
        self.operations.charged += len;
        self.stream = Some(Stream::Whole(Whole { tag: incoming.tag, request, buffer, filled: 0 }));
        Ok(Step::Done)
    }

    /// Reads at most [`MAX_INLINE_BYTES`]. Data read inline goes straight into the reply buffer, and its
    /// header is written afterwards. Else the read is submitted. `part` is the operation's index, if the
    /// request is a piece of it, and true for its last piece.
    pub(crate) fn read_piece(
        &mut self,
        tag: Tag,
        request: Request,
        part: Option<(usize, bool)>,
    ) -> Result<Step, Lost> {
        let len = request.len as usize;
        let head = self.data_head_bytes;
        self.replies.reserve(self.link.socket(), head + len)?;
        let mut rest = request;
        loop {
            let start = self.replies.position();
            let at = start + head + (len - rest.len as usize);
            let space = self.replies.space(at, rest.len as usize);
            match self.device.try_io(&rest, Buffer::Read(space)) {
                Ok(Tried::Done) => {
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
                Ok(Tried::Partly(n)) => {
                    rest = advance(rest, n);
                    // Pending replies are sent and do not wait for the rest.
                    self.replies.send_around(self.link.socket(), head + len)?;
                }
                Ok(Tried::WouldBlock) => {
                    if !self.admits(len) {
                        return Ok(Step::Stalled);
                    }
                    let slot = match part {
                        Some((slot, _)) => slot,
                        None => self.operations.open(tag, Action::Plain, true),
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
                            self.reply_failure(tag, &Failure::of(error, Action::Plain, &request))?;
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
    pub(crate) fn fail_part(&mut self, slot: usize, error: Error, part: &Request) -> Result<Step, Lost> {
        let operation = self.operations.get(slot);
        let action = operation.action;
        operation.failure.get_or_insert_with(|| Failure::of(error, action, part));
        self.finish(slot)?;
        Ok(Step::Done)
    }

    fn write(&mut self, incoming: Incoming) -> Result<Step, Lost> {
        let vetted = self.vet(incoming, Op::Write, CommandFlags::empty(), Action::Store);
        let request = match vetted {
            Ok((request, _)) if incoming.len <= max_payload(&self.geometry).into() => request,
            other => {
                let failure = other.err();
                let failure = failure.unwrap_or(Failure::new(Errno::Inval, "too much in one write"));
                return Ok(self.skip(incoming, failure));
            }
        };
        let tag = incoming.tag;
        let is_large = request.len >= MIN_BYTES;
        if is_large && let Some(step) = self.write_apart(tag, request) {
            return Ok(step);
        }
        let all = self.header_bytes + request.len as usize;
        if self.input.data().len() < all {
            return Ok(Step::Input(all));
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
    fn write_apart(&mut self, tag: Tag, request: Request) -> Option<Step> {
        let len = request.len as usize;
        let uses_worker = len <= MAX_INLINE_BYTES && self.should_use_worker(&request, false);
        if !uses_worker && self.header_bytes + len <= RECEIVE_BUFFER_BYTES {
            return None;
        }
        if self.geometry.zones.is_none() && !uses_worker {
            self.accept();
            let slot = self.operations.open(tag, Action::Store, false);
            self.stream = Some(Stream::Write(Write { slot, rest: request }));
            return Some(Step::Done);
        }
        // A write to a zone is executed as a whole.
        if !self.admits(len) {
            return Some(Step::Stalled);
        }
        self.accept();
        if let Ok(buffer) = self.replies.buffers.take(len) {
            self.operations.charged += len;
            let gather = Gather { tag, rest: request, buffer, filled: 0, uses_worker };
            self.stream = Some(Stream::Gather(gather));
        } else {
            let failure = no_memory(Action::Store, &request);
            self.stream = Some(Stream::Skip(Skip { tag, left: request.len, failure }));
        }
        Some(Step::Done)
    }

    /// Executes a write whose payload is completely in the input.
    fn write_received(&mut self, tag: Tag, request: Request) -> Result<Step, Lost> {
        let (header, len) = (self.header_bytes, request.len as usize);
        let mut rest = request;
        let result = loop {
            let payload = &self.input.data()[header + len - rest.len as usize..header + len];
            match self.device.try_io(&rest, Buffer::Write(payload)) {
                Ok(Tried::Done) => break Ok(()),
                Ok(Tried::Partly(n)) => {
                    rest = advance(rest, n);
                    self.replies.send_around(self.link.socket(), 0)?;
                }
                Ok(Tried::WouldBlock) => {
                    let left = rest.len as usize;
                    if !self.admits(left) {
                        if left == len {
                            return Ok(Step::Stalled);
                        }
                        // The device has written the first part. The rest follows when less is in flight.
                        self.accept();
                        self.input.consume(len - left);
                        let slot = self.operations.open(tag, Action::Store, false);
                        self.stream = Some(Stream::Write(Write { slot, rest }));
                        return Ok(Step::Done);
                    }
                    let payload = &self.input.data()[header + len - left..header + len];
                    match self.replies.buffers.copy_of(payload) {
                        Ok(buffer) => {
                            let slot = self.operations.open(tag, Action::Store, false);
                            self.operations.get(slot).open = false;
                            self.submit(slot, rest, buffer, false);
                            self.accept();
                            self.input.consume(len);
                            return Ok(Step::Done);
                        }
                        Err(error) => break Err(error),
                    }
                }
                Err(error) => break Err(error),
            }
        };
        self.accept();
        self.input.consume(len);
        match result {
            Ok(()) => self.reply_done(tag)?,
            Err(error) => self.reply_failure(tag, &Failure::of(error, Action::Store, &request))?,
        }
        Ok(Step::Done)
    }

    /// Handles flush, trim and write zeroes, which have no payload in either direction.
    fn plain(&mut self, incoming: Incoming, op: Op, allowed: CommandFlags) -> Result<Step, Lost> {
        self.accept();
        let action = match op {
            Op::Flush => Action::Flush,
            Op::Discard => Action::Trim,
            _ if incoming.flags & CommandFlags::FAST_ZERO.bits() != 0 => Action::StoreFast,
            _ => Action::Store,
        };
        let (mut request, flags) = match self.vet(incoming, op, allowed, action) {
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
            // `fast_zeroes` covers only zeroes that may become a hole.
            Op::WriteZeroes
                if action == Action::StoreFast
                    && (!self.geometry.fast_zeroes || flags.contains(CommandFlags::NO_HOLE)) =>
            {
                return self.refuse(incoming, Errno::NotSup, "the device has no fast zeroes");
            }
            Op::WriteZeroes if !flags.contains(CommandFlags::NO_HOLE) => request.flags |= Flags::MAY_FREE,
            _ => {}
        }
        self.stream = Some(Stream::Plain { tag: incoming.tag, request, action });
        Ok(Step::Done)
    }

    fn cache(&mut self, incoming: Incoming) -> Result<Step, Lost> {
        self.accept();
        // Validated like a read, to check the range.
        match self.vet(incoming, Op::Read, CommandFlags::empty(), Action::Plain) {
            Ok((request, _)) => {
                self.device.prefetch(request.offset, request.len);
                self.reply_done(incoming.tag)?;
            }
            Err(failure) => self.reply_failure(incoming.tag, &failure)?,
        }
        Ok(Step::Done)
    }
}
