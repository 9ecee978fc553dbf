//! Parses requests, executes them inline or submits them, and replies. Every request starts here.
//!
//! A request that takes more than one turn becomes the session's [`PartialRequest`], or a
//! [`Sweep`](sweeps::Sweep). Only the session's loop calls this module.

mod partial_progress;
pub mod partial_request;
mod read;
pub mod status;
mod sweep;
pub mod sweeps;
mod worker_offload;
mod write;

use freestone_core::client_log;
use freestone_core::device::{Error, Flags, Op, Request};
use zerocopy::FromBytes;

use self::partial_request::{ParsedHeader, PartialRequest, SkippedPayload};
use crate::proto::{
    CommandFlags, EXTENDED_REQUEST_MAGIC, ExtendedRequest, MAX_PAYLOAD_BYTES, REQUEST_MAGIC, RequestHeader,
    command,
};
use crate::session::{ConnectionLost, Session, Step};
use crate::wire::errno::{CommandGroup, Errno, Failure};
use crate::wire::headers::{Headers, Tag};

impl Session<'_> {
    /// Handles the next request in the input.
    pub(in crate::session) fn next_request(&mut self) -> Result<Step, ConnectionLost> {
        freestone_core::trail::step!();
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
    pub(in crate::session) fn accept_request(&mut self) {
        self.input.consume(self.header_bytes);
        self.tally.requests += 1;
    }

    /// Refuses a request with `failure` once its payload was received and discarded.
    #[cold]
    pub(in crate::session) fn skip_payload(&mut self, incoming: ParsedHeader, failure: Failure) -> Step {
        self.accept_request();
        self.current = Some(PartialRequest::SkippedPayload(SkippedPayload {
            tag: incoming.tag,
            left: incoming.len,
            failure,
        }));
        Step::Done
    }

    pub(in crate::session) fn refuse(
        &mut self,
        incoming: ParsedHeader,
        errno: Errno,
        text: &'static str,
    ) -> Result<Step, ConnectionLost> {
        self.reply_failure(incoming.tag, &Failure::new(errno, text))?;
        Ok(Step::Done)
    }

    /// Records that a part of the operation at `slot` failed before it was submitted.
    pub(in crate::session) fn fail_part(
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

    /// Validates a request before it has any effect. The protocol requires that FUA is accepted with each
    /// command. It is refused if the export does not offer it, and reaches the device only for commands that
    /// write.
    pub(in crate::session) fn validate(
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
