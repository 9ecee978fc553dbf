//! The transmission phase of one connection: the loop of its thread.
//!
//! Each turn handles the device's completions, executes the requests that were received, and sends all
//! pending replies in one call. With no request in flight a turn is two system calls (receive, send) and
//! takes no lock.

use std::sync::Arc;
use std::time::Duration;

use freestone_core::budget::{GrantReceiver, Share};
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
use crate::errno::{CommandGroup, Failure};
use crate::export::Export;
use crate::flight::{CompletedPart, MAX_IN_FLIGHT, MAX_IN_FLIGHT_BYTES, Operations};
use crate::headers::Headers;
use crate::input::{Input, RECEIVE_BUFFER_BYTES, ReceiveResult};
use crate::link::Link;
use crate::partial_request::PartialRequest;
use crate::replies::{REPLY_BUFFER_BYTES, Replies};
use crate::shared::ServerShared;
use crate::stats::Tally;
use crate::sweeps::{MAX_SWEEPS, Sweeps};
use crate::tls::opener::SEALED_BUFFER_BYTES;
use crate::tls::sealer::BATCH_BYTES;

/// Largest memory of one connection in bytes, without the stack of its thread and small bookkeeping.
pub const CONNECTION_MEMORY_BYTES: usize = RECEIVE_BUFFER_BYTES
    + REPLY_BUFFER_BYTES
    + MAX_SPARE_BYTES
    + MAX_IN_FLIGHT_BYTES
    + PARTS_BYTES
    + TLS_BYTES;
/// Extra memory in bytes beyond [`MAX_IN_FLIGHT_BYTES`], for unaligned blocks of the last request and of each
/// sweep.
const PARTS_BYTES: usize = (1 + MAX_SWEEPS) * (12 << 10);

/// Size in bytes of the buffer for encrypted received data, and of a batch of encrypted replies.
const TLS_BYTES: usize = SEALED_BUFFER_BYTES + BATCH_BYTES;

/// A client that sends nothing for this long counts as idle.
const IDLE_TIME: Duration = Duration::from_secs(1);

pub struct Negotiation {
    pub export: Arc<Export>,
    /// The export's device. For a template, the device created for this connection.
    pub device: Arc<dyn Device>,
    pub headers: Headers,
    /// The metadata contexts that block status reports; empty if replies have no chunks.
    pub contexts: Contexts,
}

/// The connection cannot continue: it was cut, a send failed, or a reply cannot be completed.
#[derive(Debug)]
pub struct ConnectionLost;

impl From<rustix::io::Errno> for ConnectionLost {
    fn from(_: rustix::io::Errno) -> Self {
        Self
    }
}

/// The state of a request, or of the loop, after some work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The loop continues at once, with the current request or else the next one.
    Done,
    /// A piece is done, or many replies are pending. The loop sends replies and handles completions before it
    /// continues with the request.
    Yield,
    /// The request continues when the input has this many unconsumed bytes.
    NeedInput(usize),
    /// The request continues when less is in flight, or the server's memory budget has room.
    Stalled,
    /// The client disconnects, or violated the protocol.
    Close,
}

/// The state of the receiving side of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClientState {
    /// The client may send requests.
    Active,
    /// The client is idle, and the connection has freed its memory.
    Idle,
    /// The client will send nothing more: its last request is a disconnect.
    Disconnecting,
    /// The connection receives nothing more.
    Ended,
}

/// A connection in its transmission phase.
pub struct Session<'a> {
    pub(crate) link: &'a Link,
    pub(crate) export: Arc<Export>,
    pub(crate) device: Bytes,
    pub(crate) read_only: bool,
    pub(crate) headers: Headers,
    /// Length of a request header in bytes.
    pub(crate) header_bytes: usize,
    pub(crate) data_head_bytes: usize,
    pub(crate) contexts: Contexts,
    /// The last known geometry. The device may grow, so [`Session::validate`] refreshes it before it refuses a
    /// request.
    pub(crate) geometry: Geometry,
    pub(crate) input: Input,
    pub(crate) replies: Replies,
    pub(crate) operations: Operations,
    /// The connection's share of the server's memory budget: charged bytes, data owned by replies, and spare
    /// buffers.
    pub(crate) share: Share,
    /// The current request, some parts of which were neither tried nor submitted. Later requests wait for it.
    pub(crate) current: Option<PartialRequest>,
    /// The result of the window submitted for a [`PartialRequest::WindowedRead`], until the read takes it.
    pub(crate) window: Option<Result<IoBuf, Failure>>,
    pub(crate) sweeps: Sweeps,
    pub(crate) workers: Workers,
    /// Measured costs of large requests, by which they are handed to workers or executed inline.
    pub(crate) costs: Arc<Costs>,
    /// Set if the input held more data behind the last large write, which predicts that more requests follow.
    pub(crate) more_follows: bool,
    pub(crate) tally: Tally,
    finished: Vec<CompletedPart>,
    pub(crate) client_state: ClientState,
    /// Number of bytes still to receive from the socket, once the server ends the connection.
    drain: Option<u64>,
}

impl<'a> Session<'a> {
    /// Creates a session. `input` may hold data that the handshake did not consume.
    pub fn new(
        shared: &ServerShared,
        link: &'a Link,
        negotiated: Negotiation,
        input: Input,
        replies: Replies,
    ) -> Self {
        let device = Bytes::new(negotiated.device);
        let geometry = device.geometry();
        let granted = Arc::clone(link.queue()) as Arc<dyn GrantReceiver>;
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
            current: None,
            window: None,
            sweeps: Sweeps::default(),
            costs: Arc::default(),
            more_follows: false,
            tally: Tally::default(),
            finished: Vec::new(),
            client_state: ClientState::Active,
            drain: None,
        }
    }

    /// Serves the client until it leaves or violates the protocol, or the server ends the connection. Waits
    /// for parts in flight in every case except [`Link::cut`], so that the memory limits hold.
    pub fn run(mut self) {
        self.set_idle_timeout(true);
        // Bytes sent in the handshake are not counted.
        self.replies.sends = 0;
        self.replies.sent_bytes = 0;
        if matches!(self.serve(), Err(ConnectionLost)) {
            self.replies.plug = None;
            self.stop_waiting();
            while self.operations.in_flight > 0 && self.wait(PollFlags::empty()).is_some() {
                self.discard_finished();
            }
        } else {
            self.replies.send_close(self.link.socket());
        }
        self.publish_tally();
    }

    fn serve(&mut self) -> Result<(), ConnectionLost> {
        loop {
            self.handle_completions()?;
            if self.sweeps.has_ready() {
                self.sweep()?;
            }
            let step = if self.client_state == ClientState::Ended { Step::Close } else { self.work()? };
            if self.replies.is_empty() {
                self.replies.plug = None;
            } else {
                self.replies.send(self.link.socket())?;
            }
            self.publish_tally();
            if self.share.is_used() && step != Step::Stalled {
                self.return_budget();
            }
            match step {
                Step::Done | Step::Yield => {}
                Step::NeedInput(need) => self.receive(need)?,
                Step::Stalled if self.sweeps.has_ready() => {}
                Step::Stalled if self.operations.in_flight == 0 && !self.share.is_waiting() => {}
                Step::Stalled => self.wait_stalled()?,
                Step::Close => {
                    self.client_state = ClientState::Ended;
                    if self.sweeps.has_ready() {
                        continue;
                    }
                    if self.operations.in_flight == 0 {
                        return Ok(());
                    }
                    self.wait(PollFlags::empty()).ok_or(ConnectionLost)?;
                }
            }
        }
    }

    /// Executes received requests until one needs more input or memory, or many replies are pending.
    fn work(&mut self) -> Result<Step, ConnectionLost> {
        loop {
            if self.replies.is_due() {
                return Ok(Step::Yield);
            }
            let step = match self.current.take() {
                Some(stream) => self.continue_request(stream)?,
                None => self.next_request()?,
            };
            if step != Step::Done {
                return Ok(step);
            }
        }
    }

    /// Returns the number of bytes still to receive if the server ends the connection, else None. The first
    /// call after [`Link::drain`] sets this limit to the bytes in the socket's buffer.
    #[inline]
    pub(crate) fn begin_drain(&mut self) -> Option<u64> {
        if self.drain.is_none() && self.link.is_draining() {
            self.drain = Some(rustix::io::ioctl_fionread(self.link.socket()).unwrap_or(0));
        }
        self.drain
    }

    /// Receives once, so that the input can hold `need` bytes. Sets [`ClientState::Ended`] if nothing more
    /// will arrive.
    fn receive(&mut self, need: usize) -> Result<(), ConnectionLost> {
        if self.input.is_secure() {
            return self.receive_sealed(need);
        }
        let limit = self.begin_drain().unwrap_or(u64::MAX);
        if limit == 0 {
            self.client_state = ClientState::Ended;
            return Ok(());
        }
        let mut flags = RecvFlags::empty();
        if self.drain.is_some() || self.sweeps.has_ready() {
            flags = RecvFlags::DONTWAIT;
        } else if self.operations.in_flight > 0 {
            flags = RecvFlags::DONTWAIT;
            if !self.wait(PollFlags::IN).ok_or(ConnectionLost)? {
                return Ok(());
            }
        }
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let (received, n) = if let Some(PartialRequest::GatheredWrite(gather)) = &mut self.current {
            let space = gather.space();
            let len = space.len().min(limit);
            let (received, n) =
                self.input.receive_behind(self.link.socket(), flags, &mut space[..len], limit - len);
            gather.fill(n.min(len));
            (received, n)
        } else {
            self.input.receive(self.link.socket(), flags, need, limit)
        };
        self.handle_received(received, n, flags)
    }

    #[inline]
    pub(crate) fn handle_received(
        &mut self,
        received: ReceiveResult,
        n: usize,
        flags: RecvFlags,
    ) -> Result<(), ConnectionLost> {
        match received {
            ReceiveResult::Data => {
                self.tally.receives += 1;
                if self.client_state == ClientState::Idle {
                    self.set_idle_timeout(true);
                }
                if let Some(left) = &mut self.drain {
                    *left = left.saturating_sub(n as u64);
                }
            }
            ReceiveResult::WouldBlock if self.drain.is_some() => self.client_state = ClientState::Ended,
            // The receive timeout IDLE_TIME has expired.
            ReceiveResult::WouldBlock if flags.is_empty() => self.free_idle_memory(),
            ReceiveResult::WouldBlock => {}
            ReceiveResult::Ended => self.handle_client_end()?,
        }
        Ok(())
    }

    #[cold]
    pub(crate) fn handle_client_end(&mut self) -> Result<(), ConnectionLost> {
        self.client_state = ClientState::Ended;
        self.stop_waiting();
        // If the server ends the connection, received sweeps are completed like other requests.
        if self.sweeps.is_empty() || self.link.is_draining() { Ok(()) } else { self.stop_sweeps() }
    }

    /// Returns true if the client will send no more, even if data is still unread. Returns false if the
    /// connection ends in order, by a disconnect or a drain, as earlier requests are then completed.
    pub(crate) fn has_client_gone(&self) -> bool {
        if matches!(self.client_state, ClientState::Ended | ClientState::Disconnecting)
            || self.link.is_draining()
        {
            return false;
        }
        self.link.has_left()
    }

    /// Returns memory used by earlier requests to the kernel, because the client is idle.
    #[cold]
    fn free_idle_memory(&mut self) {
        if self.current.is_some() {
            return;
        }
        self.input.free_memory();
        self.replies.free_memory();
        self.operations = Operations::default();
        self.finished = Vec::new();
        self.share.release_all();
        self.set_idle_timeout(false);
        stack::release_unused_stack();
    }

    /// Enables or disables the receive timeout that detects an idle client.
    fn set_idle_timeout(&mut self, enabled: bool) {
        // On failure an idle connection only keeps its memory.
        let _ = set_socket_timeout(self.link.socket(), Timeout::Recv, enabled.then_some(IDLE_TIME));
        self.client_state = if enabled { ClientState::Active } else { ClientState::Idle };
    }

    /// Waits for a completion, a wakeup, or one of `events` at the socket. Returns true if one of `events`
    /// occurred, and None if the connection was cut.
    #[inline]
    pub(crate) fn wait(&mut self, events: PollFlags) -> Option<bool> {
        let queue = self.link.queue();
        // A cut after this check wakes the poll. The wakeup of an earlier cut may have been consumed already.
        if queue.is_shut_down() {
            return None;
        }
        let wake = PollFd::new(queue.wake_fd(), PollFlags::IN);
        let mut fds = [wake, PollFd::from_borrowed_fd(self.link.socket(), events)];
        // A signal may end the wait early; every caller checks its condition again.
        let _ = poll(&mut fds[..if events.is_empty() { 1 } else { 2 }], None);
        if !fds[0].revents().is_empty() {
            queue.rearm();
        }
        (!queue.is_shut_down()).then(|| !fds[1].revents().is_empty())
    }

    /// Converts the device's completions into replies.
    fn handle_completions(&mut self) -> Result<(), ConnectionLost> {
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

    fn account(&mut self, part: &CompletedPart) {
        self.operations.in_flight -= 1;
        self.operations.charged -= part.charge;
        self.operations.get(part.slot).parts -= 1;
    }

    fn answer_part(&mut self, part: CompletedPart) -> Result<(), ConnectionLost> {
        let operation = self.operations.get(part.slot);
        let group = operation.group;
        if operation.window {
            let whole = part.buffer.len() == part.len;
            let outcome = part.outcome.and(if whole { Ok(part.buffer) } else { Err(Error::Media) });
            self.window = Some(outcome.map_err(|error| Failure::of(error, group, &part.request)));
            self.operations.take_ended(part.slot);
            return Ok(());
        }
        match part.outcome {
            Err(error) => {
                operation.failure.get_or_insert_with(|| Failure::of(error, group, &part.request));
            }
            Ok(()) if operation.is_read && part.buffer.len() != part.len => {
                // The device returned a buffer of another length, so there is no data for the client.
                operation.failure.get_or_insert_with(|| Failure::of(Error::Media, group, &part.request));
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
            Ok(()) => self.replies.buffers.put_back(part.buffer),
        }
        if self.resume_sweep(part.slot)? {
            return Ok(());
        }
        self.finish(part.slot)
    }

    fn publish_tally(&self) {
        let Replies { sends, sent_bytes, .. } = self.replies;
        self.link.counters().publish(&Tally { sends, sent_bytes, ..self.tally });
    }
}

/// Submission of request parts, and their share of the memory budget.
impl Session<'_> {
    /// Returns true if another part with a buffer of `bytes` may be in flight. If the server's memory budget
    /// has no room, the connection starts to wait for room in it.
    pub(crate) fn try_admit(&mut self, bytes: usize) -> bool {
        let charged = self.operations.charged + self.replies.owned_bytes();
        if self.operations.in_flight >= MAX_IN_FLIGHT
            || (charged > 0 && charged + bytes > MAX_IN_FLIGHT_BYTES)
        {
            return false;
        }
        if self.share.try_reserve((self.held_bytes() + bytes) as u64) {
            return true;
        }
        // The current request needs the budget more than spare buffers do.
        self.replies.buffers.clear();
        self.share.wait_for(charged as u64, bytes as u64);
        false
    }

    fn held_bytes(&self) -> usize {
        self.operations.charged + self.replies.owned_bytes() + self.replies.buffers.bytes()
    }

    /// Stops waiting for the server's memory budget.
    fn stop_waiting(&mut self) {
        let held = self.held_bytes() as u64;
        self.share.stop_waiting(held);
    }

    /// Returns unused bytes to the server's memory budget.
    fn return_budget(&mut self) {
        match self.held_bytes() {
            0 => self.share.release_all(),
            held => self.share.shrink_to(held as u64),
        }
    }

    /// Submits a part of the operation at `slot` to the device. Charges the buffer, unless `charged` is true,
    /// which means it was charged before.
    pub(crate) fn submit(&mut self, slot: usize, request: Request, buffer: IoBuf, charged: bool) {
        let done = self.begin_part(slot, request, &buffer, charged);
        self.replies.plug.get_or_insert_with(Plug::start);
        self.device.submit(request, buffer, done);
    }

    /// Accounts for a part before it is passed to the device or a worker. Returns the completion, which adds
    /// the result to the connection's queue.
    pub(crate) fn begin_part(
        &mut self,
        slot: usize,
        request: Request,
        buffer: &IoBuf,
        charged: bool,
    ) -> Completion {
        let len = buffer.len();
        let beside = self.device.extra_bytes(&request);
        let charge = len + beside;
        self.operations.charged += if charged { beside } else { charge };
        self.operations.in_flight += 1;
        self.operations.get(slot).parts += 1;
        self.tally.submitted += 1;
        let queue = Arc::clone(self.link.queue());
        Completion::new(move |outcome, buffer| {
            queue.push(CompletedPart { slot, request, len, charge, outcome, buffer });
        })
    }
}

pub fn memory_failure(group: CommandGroup, request: &Request) -> Failure {
    Failure::of(Error::NoMemory, group, request)
}
