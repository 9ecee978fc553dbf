//! The transmission phase of one connection: the loop of its thread.
//!
//! A [`Session`] owns the input, the pending replies, the operations in flight, and the connection's share of
//! the memory budget. Only the connection's thread uses the session. [`receive`] fills the input, [`requests`]
//! executes requests, [`in_flight`] submits parts and takes their completions, and [`reply`] appends replies.
//!
//! Each turn handles the device's completions, executes the requests that were received, and sends all
//! pending replies in one call. With no request in flight a turn is two system calls (receive, send) and
//! takes no lock.

mod in_flight;
mod operations;
mod pass;
mod receive;
mod reply;
pub mod requests;
mod send_buffer;
mod stall;
mod tls_receive;

use std::sync::Arc;

use freestone_core::budget::{GrantReceiver, Share};
use freestone_core::bytes::Bytes;
use freestone_core::device::{Geometry, IoBuf};
use freestone_core::workers::{Costs, Workers};
use rustix::event::PollFlags;

use self::operations::Operations;
use self::requests::partial_request::PartialRequest;
use self::requests::sweeps::{MAX_SWEEPS, Sweeps};
use self::send_buffer::SendBuffer;
use crate::handshake::Negotiation;
use crate::limits::MAX_IN_FLIGHT_BYTES;
use crate::link::{CompletedPart, Link};
use crate::shared::ServerShared;
use crate::shared::export::Export;
use crate::stats::Tally;
use crate::stream::buffers::MAX_SPARE_BYTES;
use crate::stream::input::{Input, RECEIVE_BUFFER_BYTES};
use crate::stream::replies::{REPLY_BUFFER_BYTES, Replies};
use crate::stream::tls::opener::SEALED_BUFFER_BYTES;
use crate::stream::tls::sealer::BATCH_BYTES;
use crate::wire::contexts::Contexts;
use crate::wire::errno::Failure;
use crate::wire::headers::Headers;

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

/// The connection cannot continue: it was cut, a send failed, or a reply cannot be completed.
#[derive(Debug)]
struct ConnectionLost;

impl From<rustix::io::Errno> for ConnectionLost {
    fn from(_: rustix::io::Errno) -> Self {
        Self
    }
}

/// The state of a request, or of the loop, after some work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
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
    /// The current request is finished, and no other begins: the connection is passed to a successor.
    Boundary,
}

/// The state of the receiving side of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClientState {
    /// The client may send requests.
    Active,
    /// The client will send nothing more: its last request is a disconnect.
    Disconnecting,
    /// The client may send requests, but none begins: the connection is passed to a successor.
    Passing,
    /// The connection receives nothing more.
    Ended,
}

/// A connection in its transmission phase.
pub struct Session<'a> {
    shared: &'a ServerShared,
    link: &'a Link,
    export: Arc<Export>,
    device: Bytes,
    read_only: bool,
    headers: Headers,
    /// Length of a request header in bytes.
    header_bytes: usize,
    data_head_bytes: usize,
    contexts: Contexts,
    /// The last known geometry. The device may grow, so [`Session::validate`] refreshes it before it refuses a
    /// request.
    geometry: Geometry,
    input: Input,
    replies: Replies,
    operations: Operations,
    /// The connection's share of the server's memory budget: charged bytes, data owned by replies, and spare
    /// buffers.
    share: Share,
    /// The current request, some parts of which were neither tried nor submitted. Later requests wait for it.
    current: Option<PartialRequest>,
    /// The result of the window submitted for a [`PartialRequest::WindowedRead`], until the read takes it.
    window: Option<Result<IoBuf, Failure>>,
    sweeps: Sweeps,
    workers: Workers,
    /// Measured costs of large requests, by which they are handed to workers or executed inline.
    costs: Arc<Costs>,
    send_buffer: SendBuffer,
    /// Set if the input held more data behind the last large write, which predicts that more requests follow.
    more_follows: bool,
    tally: Tally,
    finished: Vec<CompletedPart>,
    client_state: ClientState,
    /// Number of bytes still to receive from the socket, once the server ends the connection.
    drain: Option<u64>,
}

impl<'a> Session<'a> {
    /// Creates a session. `input` may hold data that the handshake, or a predecessor, did not consume.
    pub fn new(
        shared: &'a ServerShared,
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
            shared,
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
            send_buffer: SendBuffer::default(),
            more_follows: false,
            tally: Tally::default(),
            finished: Vec::new(),
            client_state: ClientState::Active,
            drain: None,
        }
    }

    /// Serves the client until it leaves or violates the protocol, or the server ends or passes the connection.
    /// Waits for parts in flight in every case except [`Link::cut`], so that the memory limits hold.
    pub fn run(mut self) {
        self.limit_receives();
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
            let step = match self.client_state {
                ClientState::Active | ClientState::Disconnecting => self.work()?,
                ClientState::Passing => self.finish_current()?,
                ClientState::Ended => Step::Close,
            };
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
                Step::Yield | Step::Stalled if self.stop_for_successor() => {}
                Step::Done | Step::Yield => {}
                Step::NeedInput(need) => self.receive(need)?,
                Step::Stalled if self.sweeps.has_ready() => {}
                Step::Stalled if self.operations.in_flight == 0 && !self.share.is_waiting() => {}
                Step::Stalled => self.wait_stalled()?,
                Step::Close | Step::Boundary => {
                    if step == Step::Close {
                        self.client_state = ClientState::Ended;
                    }
                    if self.sweeps.has_ready() {
                        continue;
                    }
                    if self.operations.in_flight == 0 {
                        if step == Step::Close || self.pass() {
                            return Ok(());
                        }
                        continue;
                    }
                    self.wait(PollFlags::empty()).ok_or(ConnectionLost)?;
                }
            }
        }
    }

    /// Executes received requests until one needs more input or memory, or many replies are pending.
    fn work(&mut self) -> Result<Step, ConnectionLost> {
        freestone_core::trail::step!();
        loop {
            if self.replies.is_due() {
                if self.current.is_none() {
                    self.send_next_reads_to_workers()?;
                }
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

    fn publish_tally(&self) {
        let Replies { sends, sent_bytes, .. } = self.replies;
        self.link.counters().publish(&Tally { sends, sent_bytes, ..self.tally });
    }
}
