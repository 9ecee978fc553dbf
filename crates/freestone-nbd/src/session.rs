//! The transmission phase of one connection: the loop of its thread.
//!
//! Each turn takes what the device has finished, works through what was received, and sends all
//! replies that are ready in one call. With nothing submitted a turn is two system calls (receive,
//! send) and takes no lock.

use std::sync::Arc;
use std::time::Duration;

use freestone_core::budget::{Granted, Share};
use freestone_core::bytes::Bytes;
use freestone_core::device::{Completion, Device, Error, Geometry, IoBuf, Request};
use freestone_core::plug::Plug;
use freestone_core::stack;
use freestone_core::workers::{Costs, Workers};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::RecvFlags;
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use crate::buffers::MAX_SPARE_BYTES;
use crate::contexts::Contexts;
use crate::errno::{Action, Failure};
use crate::export::Export;
use crate::flight::{Finished, MAX_IN_FLIGHT, MAX_IN_FLIGHT_BYTES, Operations};
use crate::headers::Headers;
use crate::input::{Input, RECEIVE_BUFFER_BYTES, Received};
use crate::link::Link;
use crate::replies::{REPLY_BUFFER_BYTES, Replies};
use crate::shared::ServerShared;
use crate::stats::Tally;
use crate::stream::Stream;
use crate::sweeps::{MAX_SWEEPS, Sweeps};
use crate::tls::opener::SEALED_BUFFER_BYTES;
use crate::tls::sealer::BATCH_BYTES;

/// Bound of the memory that one connection holds, its thread's stack and small bookkeeping apart,
/// in bytes.
pub const CONNECTION_MEMORY_BYTES: usize = RECEIVE_BUFFER_BYTES
    + REPLY_BUFFER_BYTES
    + MAX_SPARE_BYTES
    + MAX_IN_FLIGHT_BYTES
    + PARTS_BYTES
    + TLS_BYTES;
/// Beyond the bound of what is in flight the last request and each sweep may have so much for parts
/// of blocks.
const PARTS_BYTES: usize = (1 + MAX_SWEEPS) * (12 << 10);

/// What is received and sealed, and a batch of sealed replies.
const TLS_BYTES: usize = SEALED_BUFFER_BYTES + BATCH_BYTES;

/// A client that has sent nothing for so long is idle.
const REST: Duration = Duration::from_secs(1);

/// What was negotiated in the handshake.
pub struct Negotiated {
    /// The export.
    pub export: Arc<Export>,
    /// Its device; where the export is a template, the one that was made for this connection.
    pub device: Arc<dyn Device>,
    /// How requests and replies look.
    pub headers: Headers,
    /// What block status tells of; none where replies have no chunks.
    pub contexts: Contexts,
}

/// The socket takes no more replies.
#[derive(Debug)]
pub struct Lost;

impl From<rustix::io::Errno> for Lost {
    fn from(_: rustix::io::Errno) -> Self {
        Self
    }
}

/// How far a request, or the work at hand, came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Nothing holds it up: the loop goes on at once, with the request at hand or else with the
    /// next one.
    Done,
    /// One piece is done, or many replies are ready: replies are sent, and what the device finished
    /// is taken, before the next piece.
    Turn,
    /// It goes on when so many bytes have been received and not consumed.
    Input(usize),
    /// It goes on when less is in flight.
    Stalled,
    /// The client wants no more, or broke the protocol.
    End,
}

/// What comes from the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Client {
    /// Requests, or it may.
    Sends,
    /// Nothing for a while: memory was given back.
    Rests,
    /// Nothing more: what it has sent ends with a request to disconnect.
    Leaves,
    /// Nothing more is taken from the socket.
    Ended,
}

/// A connection in its transmission phase.
pub struct Session<'a> {
    pub(crate) link: &'a Link,
    pub(crate) export: Arc<Export>,
    pub(crate) device: Bytes,
    pub(crate) read_only: bool,
    pub(crate) headers: Headers,
    /// Of a request, and of what stands before data in a reply.
    pub(crate) header_bytes: usize,
    pub(crate) data_head_bytes: usize,
    pub(crate) contexts: Contexts,
    /// As last asked of the device, which may have grown: [`Session::vet`] asks again before it
    /// refuses a request.
    pub(crate) geometry: Geometry,
    pub(crate) input: Input,
    pub(crate) replies: Replies,
    pub(crate) operations: Operations,
    /// Of the server's bytes: what is charged, what replies own, and spare buffers.
    pub(crate) share: Share,
    /// The request that has started but is not wholly tried or submitted; later ones wait for it.
    pub(crate) stream: Option<Stream>,
    /// What was read for [`Stream::Windows`].
    pub(crate) window: Option<Result<IoBuf, Failure>>,
    pub(crate) sweeps: Sweeps,
    pub(crate) workers: Workers,
    /// What large requests cost.
    pub(crate) costs: Arc<Costs>,
    /// When the last write was taken from the input, more requests were there.
    pub(crate) followed: bool,
    pub(crate) tally: Tally,
    finished: Vec<Finished>,
    pub(crate) client: Client,
    /// Bytes that are still taken from the socket, once the server wants the connection to end.
    drain: Option<u64>,
}

impl<'a> Session<'a> {
    /// A session with what the handshake left unread.
    pub fn new(
        shared: &ServerShared,
        link: &'a Link,
        negotiated: Negotiated,
        input: Input,
        replies: Replies,
    ) -> Self {
        let device = Bytes::new(negotiated.device);
        let geometry = device.geometry();
        let granted = Arc::clone(link.queue()) as Arc<dyn Granted>;
        let share = shared.budget.share(&negotiated.export.failures, granted);
        Self {
            link,
            read_only: negotiated.export.read_only || geometry.read_only,
            export: negotiated.export,
            device,
            headers: negotiated.headers,
            header_bytes: negotiated.headers.request_bytes(),
            data_head_bytes: negotiated.headers.data_head_bytes(),
            contexts: negotiated.contexts,
            geometry,
            input,
            replies,
            operations: Operations::default(),
            workers: shared.workers.clone(),
            share,
            stream: None,
            window: None,
            sweeps: Sweeps::default(),
            costs: Arc::default(),
            followed: false,
            tally: Tally::default(),
            finished: Vec::new(),
            client: Client::Sends,
            drain: None,
        }
    }

    /// Serves until the client leaves, breaks the protocol, or the server ends the connection. What
    /// the device holds is waited for in every case but [`Link::cut`], so that the bounds of memory
    /// hold.
    pub fn run(mut self) {
        self.notice_rest(true);
        // The handshake's sends are not counted here.
        self.replies.sends = 0;
        self.replies.sent_bytes = 0;
        if matches!(self.serve(), Err(Lost)) {
            self.replies.plug = None;
            self.stop_waiting();
            while self.operations.in_flight > 0 && self.wait(PollFlags::empty()).is_some() {
                self.discard_finished();
            }
        } else {
            self.replies.say_goodbye(self.link.socket());
        }
        self.show_tally();
    }

    fn serve(&mut self) -> Result<(), Lost> {
        loop {
            self.harvest()?;
            if self.sweeps.are_ready() {
                self.sweep()?;
            }
            let step = if self.client == Client::Ended { Step::End } else { self.work()? };
            if self.replies.is_empty() {
                self.replies.plug = None;
            } else {
                self.replies.send(self.link.socket())?;
            }
            self.show_tally();
            if self.share.is_used() && step != Step::Stalled {
                self.give_back();
            }
            match step {
                Step::Done | Step::Turn => {}
                Step::Input(need) => self.receive(need)?,
                Step::Stalled if self.sweeps.are_ready() => {}
                Step::Stalled if self.operations.in_flight == 0 && !self.share.waits() => {}
                Step::Stalled => self.wait_stalled()?,
                Step::End => {
                    self.client = Client::Ended;
                    if self.sweeps.are_ready() {
                        continue;
                    }
                    if self.operations.in_flight == 0 {
                        return Ok(());
                    }
                    self.wait(PollFlags::empty()).ok_or(Lost)?;
                }
            }
        }
    }

    /// Works through what was received, until input or room is used up.
    fn work(&mut self) -> Result<Step, Lost> {
        loop {
            if self.replies.is_due() {
                return Ok(Step::Turn);
            }
            let step = match self.stream.take() {
                Some(stream) => self.go_on(stream)?,
                None => self.next_request()?,
            };
            if step != Step::Done {
                return Ok(step);
            }
        }
    }

    /// Bytes that are still taken from the socket, from when the server wants the connection to end.
    #[inline]
    pub(crate) fn begin_drain(&mut self) -> Option<u64> {
        if self.drain.is_none() && self.link.is_draining() {
            self.drain = Some(rustix::io::ioctl_fionread(self.link.socket()).unwrap_or(0));
        }
        self.drain
    }

    /// Receives once; sets `ended` where nothing more will come.
    fn receive(&mut self, need: usize) -> Result<(), Lost> {
        if self.input.is_secure() {
            return self.receive_sealed(need);
        }
        let limit = self.begin_drain().unwrap_or(u64::MAX);
        if limit == 0 {
            self.client = Client::Ended;
            return Ok(());
        }
        let mut flags = RecvFlags::empty();
        if self.drain.is_some() || self.sweeps.are_ready() {
            flags = RecvFlags::DONTWAIT;
        } else if self.operations.in_flight > 0 {
            flags = RecvFlags::DONTWAIT;
            if !self.wait(PollFlags::IN).ok_or(Lost)? {
                return Ok(());
            }
        }
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let (received, n) = if let Some(Stream::Gather(gather)) = &mut self.stream {
            let space = gather.space();
            let len = space.len().min(limit);
            let (received, n) =
                self.input.receive_behind(self.link.socket(), flags, &mut space[..len], limit - len);
            gather.fill(n.min(len));
            (received, n)
        } else {
            self.input.receive(self.link.socket(), flags, need, limit)
        };
        self.received(received, n, flags)
    }

    /// Takes note of what a receive brought.
    #[inline]
    pub(crate) fn received(&mut self, received: Received, n: usize, flags: RecvFlags) -> Result<(), Lost> {
        match received {
            Received::Data => {
                self.tally.receives += 1;
                if self.client == Client::Rests {
                    self.notice_rest(true);
                }
                if let Some(left) = &mut self.drain {
                    *left = left.saturating_sub(n as u64);
                }
            }
            Received::WouldBlock if self.drain.is_some() => self.client = Client::Ended,
            // It has waited for REST.
            Received::WouldBlock if flags.is_empty() => self.rest(),
            Received::WouldBlock => {}
            Received::End => self.client_ends()?,
        }
        Ok(())
    }

    /// The client sends no more.
    #[cold]
    pub(crate) fn client_ends(&mut self) -> Result<(), Lost> {
        self.client = Client::Ended;
        self.stop_waiting();
        // Where it is the server that wants an end, what it was asked for is done.
        if self.sweeps.is_empty() || self.link.is_draining() { Ok(()) } else { self.end_sweeps() }
    }

    /// Whether the client will send no more, also where the requests that it has sent are not yet
    /// received. Not one that has said that it leaves: what it asked for before is done.
    pub(crate) fn has_gone(&self) -> bool {
        if matches!(self.client, Client::Ended | Client::Leaves) || self.link.is_draining() {
            return false;
        }
        self.link.has_left()
    }

    /// The client has sent nothing for a while: memory that was touched for earlier requests goes
    /// back to the kernel.
    #[cold]
    fn rest(&mut self) {
        if self.stream.is_some() {
            return;
        }
        self.input.rest();
        self.replies.rest();
        self.operations = Operations::default();
        self.finished = Vec::new();
        self.share.leave();
        self.notice_rest(false);
        stack::give_back_unused();
    }

    /// Whether it is to be noticed that the client sends nothing.
    fn notice_rest(&mut self, notice: bool) {
        // Without it, the connection keeps its memory.
        let _ = set_socket_timeout(self.link.socket(), Timeout::Recv, notice.then_some(REST));
        self.client = if notice { Client::Sends } else { Client::Rests };
    }

    /// Waits until something has finished, or one of `events` is at the socket, where there are any;
    /// returns whether it is. `None`: the connection was cut.
    #[inline]
    pub(crate) fn wait(&mut self, events: PollFlags) -> Option<bool> {
        let queue = self.link.queue();
        // Whoever cuts after this look wakes the poll; an earlier wake may have been taken already.
        if queue.is_ended() {
            return None;
        }
        let wake = PollFd::new(queue.wake_fd(), PollFlags::IN);
        let mut fds = [wake, PollFd::from_borrowed_fd(self.link.socket(), events)];
        // A signal may end the wait early: every caller checks again what it waits for.
        let _ = poll(&mut fds[..if events.is_empty() { 1 } else { 2 }], None);
        if !fds[0].revents().is_empty() {
            queue.rearm();
        }
        (!queue.is_ended()).then(|| !fds[1].revents().is_empty())
    }

    /// Turns what the device has finished into replies.
    fn harvest(&mut self) -> Result<(), Lost> {
        if self.operations.in_flight == 0 {
            return Ok(());
        }
        let mut finished = std::mem::take(&mut self.finished);
        self.link.queue().take(&mut finished);
        let mut result = Ok(());
        for part in finished.drain(..) {
            self.account(&part);
            if result.is_ok() {
                result = self.answer_part(part);
            }
        }
        self.finished = finished;
        result
    }

    fn discard_finished(&mut self) {
        let mut finished = std::mem::take(&mut self.finished);
        self.link.queue().take(&mut finished);
        for part in finished.drain(..) {
            self.account(&part);
        }
        self.finished = finished;
    }

    fn account(&mut self, part: &Finished) {
        self.operations.in_flight -= 1;
        self.operations.charged -= part.charge;
        self.operations.get(part.slot).parts -= 1;
    }

    fn answer_part(&mut self, part: Finished) -> Result<(), Lost> {
        let operation = self.operations.get(part.slot);
        let action = operation.action;
        if operation.window {
            let whole = part.buffer.len() == part.len;
            let outcome = part.outcome.and(if whole { Ok(part.buffer) } else { Err(Error::Media) });
            self.window = Some(outcome.map_err(|error| Failure::of(error, action, &part.request)));
            self.operations.take_ended(part.slot);
            return Ok(());
        }
        match part.outcome {
            Err(error) => {
                operation.failure.get_or_insert_with(|| Failure::of(error, action, &part.request));
            }
            Ok(()) if operation.is_read && part.buffer.len() != part.len => {
                // A device that hands back another buffer has no data for the client.
                operation.failure.get_or_insert_with(|| Failure::of(Error::Media, action, &part.request));
            }
            Ok(()) if operation.is_read => {
                let done = !operation.open && operation.parts == 0 && operation.failure.is_none();
                let tag = operation.tag;
                self.reply_data(tag, part.request.offset, part.buffer, done)?;
                if done {
                    self.operations.take_ended(part.slot);
                    return Ok(());
                }
            }
            Ok(()) => self.replies.buffers.give(part.buffer),
        }
        if self.sweep_on(part.slot)? {
            return Ok(());
        }
        self.finish(part.slot)
    }

    fn show_tally(&self) {
        let Replies { sends, sent_bytes, .. } = self.replies;
        self.link.counters().show(&Tally { sends, sent_bytes, ..self.tally });
    }
}

/// Submitting.
impl Session<'_> {
    /// Whether another part with a buffer of `bytes` may be in flight. Where the server has no
    /// bytes for it, this connection waits for them from now on.
    pub(crate) fn admits(&mut self, bytes: usize) -> bool {
        let charged = self.operations.charged + self.replies.owned_bytes();
        if self.operations.in_flight >= MAX_IN_FLIGHT
            || (charged > 0 && charged + bytes > MAX_IN_FLIGHT_BYTES)
        {
            return false;
        }
        if self.share.reach((self.held_bytes() + bytes) as u64) {
            return true;
        }
        // Better for a request than spare.
        self.replies.buffers.clear();
        self.share.wait_for(charged as u64, bytes as u64);
        false
    }

    fn held_bytes(&self) -> usize {
        self.operations.charged + self.replies.owned_bytes() + self.replies.buffers.bytes()
    }

    /// The request that waits for bytes is not begun any more.
    fn stop_waiting(&mut self) {
        let held = self.held_bytes() as u64;
        self.share.stop_waiting(held);
    }

    /// Gives back what this connection does not hold any more.
    fn give_back(&mut self) {
        match self.held_bytes() {
            0 => self.share.leave(),
            held => self.share.keep(held as u64),
        }
    }

    /// Hands a part of the operation at `slot` to the device. Its buffer is charged here, unless
    /// `charged`.
    pub(crate) fn submit(&mut self, slot: usize, request: Request, buffer: IoBuf, charged: bool) {
        let done = self.begin_part(slot, request, &buffer, charged);
        self.replies.plug.get_or_insert_with(Plug::start);
        self.device.submit(request, buffer, done);
    }

    /// Accounts for a part that is going to be another's, and says how its outcome comes back.
    pub(crate) fn begin_part(
        &mut self,
        slot: usize,
        request: Request,
        buffer: &IoBuf,
        charged: bool,
    ) -> Completion {
        let len = buffer.len();
        let beside = self.device.beside(&request);
        let charge = len + beside;
        self.operations.charged += if charged { beside } else { charge };
        self.operations.in_flight += 1;
        self.operations.get(slot).parts += 1;
        self.tally.submitted += 1;
        let queue = Arc::clone(self.link.queue());
        Completion::new(move |outcome, buffer| {
            queue.push(Finished { slot, request, len, charge, outcome, buffer });
        })
    }
}

/// A failure of memory for a buffer.
pub fn no_memory(action: Action, request: &Request) -> Failure {
    Failure::of(Error::NoMemory, action, request)
}
