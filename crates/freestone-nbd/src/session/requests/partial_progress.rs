//! Requests that take more than one turn: large requests, and requests that a device completes part by part.
//!
//! The connection works on one such request at a time. Later requests wait until all of its parts were tried
//! inline or submitted, so requests start in the order of arrival.

use freestone_core::client_log;
use freestone_core::device::{Buffer, Flags, IoBuf, Request, TryResult};

use super::partial_request::{
    GatheredWrite, PartialRequest, PieceWrite, SkippedPayload, WholeRead, WindowedRead, advance,
};
use super::sweeps::is_sweep;
use crate::limits::MAX_IN_FLIGHT_BYTES;
use crate::session::in_flight::memory_failure;
use crate::session::{ConnectionLost, Session, Step};
use crate::stream::replies::MAX_INLINE_BYTES;
use crate::wire::errno::{CommandGroup, Failure};
use crate::wire::headers::Tag;

/// Alignment in bytes of the ends of pieces. No device has larger blocks.
const PIECE_ALIGN_BYTES: u64 = 4096;

impl Session<'_> {
    /// Continues the current request by at most one piece.
    pub(in crate::session) fn continue_request(
        &mut self,
        partial: PartialRequest,
    ) -> Result<Step, ConnectionLost> {
        match partial {
            PartialRequest::Read { slot, request } => self.continue_read(slot, request),
            PartialRequest::WholeRead(whole) => self.continue_whole(whole),
            PartialRequest::WindowedRead(windows) => self.continue_windows(windows),
            PartialRequest::PieceWrite(write) => self.continue_write(write),
            PartialRequest::GatheredWrite(gather) => self.continue_gather(gather),
            PartialRequest::SkippedPayload(skip) => self.continue_skip(skip),
            PartialRequest::Plain { tag, request, group } => self.continue_plain(tag, request, group),
        }
    }

    /// Keeps an unfinished request for the next turn.
    fn keep_partial(&mut self, partial: PartialRequest, step: Step) -> Step {
        self.current = Some(partial);
        step
    }

    fn continue_read(&mut self, slot: usize, request: Request) -> Result<Step, ConnectionLost> {
        let operation = self.operations.get(slot);
        if operation.failure.is_some() {
            operation.open = false;
            self.finish(slot)?;
            return Ok(Step::Done);
        }
        let tag = operation.tag;
        let len = piece(&request);
        let last = len == request.len;
        let step = self.read_large_piece(tag, Request::read(request.offset, len), Some((slot, last)))?;
        match step {
            Step::Done if last => Ok(Step::Done),
            Step::Done => {
                Ok(self.keep_partial(PartialRequest::Read { slot, request: request.rest(len) }, Step::Yield))
            }
            step => Ok(self.keep_partial(PartialRequest::Read { slot, request }, step)),
        }
    }

    fn continue_whole(&mut self, mut whole: WholeRead) -> Result<Step, ConnectionLost> {
        let rest = whole.request.rest(whole.filled as u64);
        match self.device.try_io(&rest, Buffer::Read(&mut whole.buffer[whole.filled..])) {
            Ok(TryResult::Done) => {
                self.operations.charged -= whole.buffer.len();
                self.reply_data(whole.tag, whole.request.offset, whole.buffer, true)?;
                Ok(Step::Done)
            }
            Ok(TryResult::Partly(n)) => {
                whole.filled += (rest.len - advance(rest, n).len) as usize;
                Ok(self.keep_partial(PartialRequest::WholeRead(whole), Step::Yield))
            }
            Ok(TryResult::WouldBlock) => {
                let slot = self.operations.open(whole.tag, CommandGroup::Plain, true);
                self.operations.get(slot).open = false;
                // The device reads the whole range again, as the data must lie in one buffer. The buffer was
                // admitted when it was charged. This part may exceed MAX_IN_FLIGHT by one.
                self.submit(slot, whole.request, whole.buffer, true);
                Ok(Step::Done)
            }
            Err(error) => {
                self.operations.charged -= whole.buffer.len();
                self.reply_failure(whole.tag, &Failure::of(error, CommandGroup::Plain, &whole.request))?;
                Ok(Step::Done)
            }
        }
    }

    fn continue_windows(&mut self, mut windows: WindowedRead) -> Result<Step, ConnectionLost> {
        if self.operations.in_flight > 0 {
            return Ok(self.keep_partial(PartialRequest::WindowedRead(windows), Step::Stalled));
        }
        if let Some(window) = self.window.take() {
            return self.reply_window(windows, window);
        }
        let len = windows.rest.len.min(MAX_IN_FLIGHT_BYTES as u64) as usize;
        let Some((mut buffer, filled)) = windows.reading.take() else {
            // Waits for memory: replies not sent yet count as in flight, and other connections may hold the
            // whole memory budget of the server.
            if !self.try_admit(len) {
                return Ok(self.keep_partial(PartialRequest::WindowedRead(windows), Step::Stalled));
            }
            let Ok(buffer) = IoBuf::zeroed(len) else {
                let failure = memory_failure(CommandGroup::Plain, &windows.rest);
                return self.reply_window(windows, Err(failure));
            };
            self.operations.charged += len;
            windows.reading = Some((buffer, 0));
            return Ok(self.keep_partial(PartialRequest::WindowedRead(windows), Step::Yield));
        };
        let request = Request { len: len as u64, ..windows.rest };
        let rest = request.rest(filled as u64);
        match self.device.try_io(&rest, Buffer::Read(&mut buffer[filled..])) {
            Ok(TryResult::Partly(n)) => {
                windows.reading = Some((buffer, filled + (rest.len - advance(rest, n).len) as usize));
                Ok(self.keep_partial(PartialRequest::WindowedRead(windows), Step::Yield))
            }
            Ok(TryResult::WouldBlock) => {
                let slot = self.operations.open(windows.tag, CommandGroup::Plain, true);
                let operation = self.operations.get(slot);
                (operation.open, operation.window) = (false, true);
                self.submit(slot, request, buffer, true);
                Ok(self.keep_partial(PartialRequest::WindowedRead(windows), Step::Stalled))
            }
            Ok(TryResult::Done) => {
                self.operations.charged -= len;
                self.reply_window(windows, Ok(buffer))
            }
            Err(error) => {
                self.operations.charged -= len;
                self.reply_window(windows, Err(Failure::of(error, CommandGroup::Plain, &request)))
            }
        }
    }

    fn reply_window(
        &mut self,
        mut windows: WindowedRead,
        window: Result<IoBuf, Failure>,
    ) -> Result<Step, ConnectionLost> {
        match window {
            Ok(data) => {
                self.reply_simple_data((!windows.has_header).then_some(windows.tag), data)?;
                windows.has_header = true;
            }
            Err(failure) if windows.has_header => {
                if let Some(cause) = &failure.cause {
                    self.report_failure(cause);
                }
                // The header with the success code was already sent, so only closing the connection can
                // report the error.
                client_log!(warn,
                    peer = %self.link.peer(), export = %self.export.name, error = %failure.message,
                    "a read without structured replies failed after its first 32 MiB: the connection ends"
                );
                return Err(ConnectionLost);
            }
            Err(failure) => {
                self.reply_failure(windows.tag, &failure)?;
                return Ok(Step::Done);
            }
        }
        windows.rest = windows.rest.rest(windows.rest.len.min(MAX_IN_FLIGHT_BYTES as u64));
        if windows.rest.len > 0 {
            return Ok(self.keep_partial(PartialRequest::WindowedRead(windows), Step::Yield));
        }
        self.tally.replies += 1;
        Ok(Step::Done)
    }

    fn continue_write(&mut self, PieceWrite { slot, rest }: PieceWrite) -> Result<Step, ConnectionLost> {
        let received = self.input.data().len();
        if self.operations.get(slot).failure.is_some() {
            // A part failed: no further part starts, and the rest of the payload is discarded.
            let n = received.min(rest.len as usize);
            self.input.consume(n);
            let rest = rest.rest(n as u64);
            if rest.len > 0 {
                return Ok(self.keep_partial(
                    PartialRequest::PieceWrite(PieceWrite { slot, rest }),
                    Step::NeedInput(1),
                ));
            }
            self.operations.get(slot).open = false;
            self.finish(slot)?;
            return Ok(Step::Done);
        }
        let len = piece(&rest);
        let n = len as usize;
        if received < n {
            return Ok(
                self.keep_partial(PartialRequest::PieceWrite(PieceWrite { slot, rest }), Step::NeedInput(n))
            );
        }
        let request = Request { len, ..rest };
        if self.should_use_worker(&request, len < rest.len) {
            match self.replies.buffers.copy_of(&self.input.data()[..n]) {
                Ok(buffer) => self.send_to_worker(slot, request, buffer, false),
                Err(error) => {
                    self.fail_part(slot, error, &request)?;
                }
            }
            return self.advance_write(slot, rest, len);
        }
        let mut done = len;
        let large = self.begin_large();
        let tried = self.device.try_io(&request, Buffer::Write(&self.input.data()[..n]));
        let step = if tried == Ok(TryResult::Done) { Step::Done } else { Step::Yield };
        self.end_large(&request, large, step);
        match tried {
            Ok(TryResult::Done) => {}
            Ok(TryResult::Partly(n)) => done = len - advance(request, n).len,
            Ok(TryResult::WouldBlock) => {
                if !self.try_admit(n) {
                    return Ok(self
                        .keep_partial(PartialRequest::PieceWrite(PieceWrite { slot, rest }), Step::Stalled));
                }
                match self.replies.buffers.copy_of(&self.input.data()[..n]) {
                    Ok(buffer) => self.submit(slot, request, buffer, false),
                    Err(error) => {
                        self.fail_part(slot, error, &request)?;
                    }
                }
            }
            Err(error) => {
                self.fail_part(slot, error, &request)?;
            }
        }
        self.advance_write(slot, rest, done)
    }

    /// Advances a write after its first `done` received bytes were written or submitted.
    fn advance_write(&mut self, slot: usize, rest: Request, done: u64) -> Result<Step, ConnectionLost> {
        self.input.consume(done as usize);
        let rest = rest.rest(done);
        if rest.len > 0 {
            return Ok(self.keep_partial(PartialRequest::PieceWrite(PieceWrite { slot, rest }), Step::Yield));
        }
        self.operations.get(slot).open = false;
        self.finish(slot)?;
        Ok(Step::Done)
    }

    fn continue_gather(&mut self, mut gather: GatheredWrite) -> Result<Step, ConnectionLost> {
        let data = self.input.data();
        let n = data.len().min(gather.space().len());
        gather.space()[..n].copy_from_slice(&data[..n]);
        gather.fill(n);
        self.input.consume(n);
        if !gather.space().is_empty() {
            return Ok(self.keep_partial(PartialRequest::GatheredWrite(gather), Step::NeedInput(1)));
        }
        self.more_follows = !self.input.data().is_empty();
        if gather.uses_worker {
            let slot = self.operations.open(gather.tag, CommandGroup::Store, false);
            self.operations.get(slot).open = false;
            self.send_to_worker(slot, gather.rest, gather.buffer, true);
            return Ok(Step::Done);
        }
        let len = gather.buffer.len();
        let at = len - gather.rest.len as usize;
        let result = match self.device.try_io(&gather.rest, Buffer::Write(&gather.buffer[at..])) {
            Ok(TryResult::Done) => Ok(()),
            Ok(TryResult::Partly(n)) => {
                gather.rest = advance(gather.rest, n);
                return Ok(self.keep_partial(PartialRequest::GatheredWrite(gather), Step::Yield));
            }
            Ok(TryResult::WouldBlock) => {
                let buffer = if at == 0 {
                    Ok(gather.buffer)
                } else {
                    self.operations.charged -= at;
                    IoBuf::copy_of(&gather.buffer[at..])
                };
                match buffer {
                    Ok(buffer) => {
                        let slot = self.operations.open(gather.tag, CommandGroup::Store, false);
                        self.operations.get(slot).open = false;
                        self.submit(slot, gather.rest, buffer, true);
                        return Ok(Step::Done);
                    }
                    Err(error) => {
                        self.operations.charged += at;
                        Err(error)
                    }
                }
            }
            Err(error) => Err(error),
        };
        self.operations.charged -= len;
        match result {
            Ok(()) => self.reply_done(gather.tag)?,
            Err(error) => {
                self.reply_failure(gather.tag, &Failure::of(error, CommandGroup::Store, &gather.rest))?;
            }
        }
        Ok(Step::Done)
    }

    fn continue_skip(&mut self, mut skip: SkippedPayload) -> Result<Step, ConnectionLost> {
        let n = self.input.data().len().min(usize::try_from(skip.left).unwrap_or(usize::MAX));
        self.input.consume(n);
        skip.left -= n as u64;
        if skip.left > 0 {
            return Ok(self.keep_partial(PartialRequest::SkippedPayload(skip), Step::NeedInput(1)));
        }
        self.reply_failure(skip.tag, &skip.failure)?;
        Ok(Step::Done)
    }

    fn continue_plain(
        &mut self,
        tag: Tag,
        request: Request,
        group: CommandGroup,
    ) -> Result<Step, ConnectionLost> {
        if is_sweep(&request, self.geometry.zones.is_some()) {
            if !self.sweeps.is_full() {
                self.begin_sweep(tag, request, group);
                return Ok(Step::Done);
            }
            let step = if self.sweeps.has_ready() { Step::Yield } else { Step::Stalled };
            return Ok(self.keep_partial(PartialRequest::Plain { tag, request, group }, step));
        }
        match self.device.try_io(&request, Buffer::None) {
            Ok(TryResult::Done) => self.reply_done(tag)?,
            Ok(TryResult::Partly(n)) => {
                let request = advance(request, n);
                return Ok(self.keep_partial(PartialRequest::Plain { tag, request, group }, Step::Yield));
            }
            Ok(TryResult::WouldBlock) => {
                if !self.try_admit(0) {
                    return Ok(
                        self.keep_partial(PartialRequest::Plain { tag, request, group }, Step::Stalled)
                    );
                }
                let slot = self.operations.open(tag, group, false);
                self.operations.get(slot).open = false;
                self.submit(slot, request, IoBuf::empty(), false);
            }
            Err(error) => self.reply_failure(tag, &Failure::of(error, group, &request))?,
        }
        Ok(Step::Done)
    }
}

/// Returns the length in bytes of the next piece of a large request. With [`Flags::FUA`] each piece is
/// durable when it completes, and so is the whole request.
fn piece(rest: &Request) -> u64 {
    debug_assert!(rest.flags.is_empty() || rest.flags == Flags::FUA, "a write has no other flags");
    if rest.len <= MAX_INLINE_BYTES as u64 {
        return rest.len;
    }
    // Cannot overflow: `rest` is longer than `MAX_INLINE_BYTES` and ends inside the device.
    let end = (rest.offset + MAX_INLINE_BYTES as u64) & !(PIECE_ALIGN_BYTES - 1);
    end - rest.offset
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_end_at_block_boundaries() {
        let all = |mut rest: Request| {
            let mut ends = Vec::new();
            while rest.len > 0 {
                let len = piece(&rest);
                assert!(len > 0 && len <= MAX_INLINE_BYTES as u64);
                rest = rest.rest(len);
                ends.push(rest.offset);
            }
            ends
        };
        assert_eq!(all(Request::write(512, 600 << 10)), [256 << 10, 512 << 10, (600 << 10) + 512]);
        assert_eq!(all(Request::write(0, 512 << 10)), [256 << 10, 512 << 10]);
        assert_eq!(all(Request::write(u64::MAX - 8191, 4096)), [u64::MAX - 4095]);
    }
}
