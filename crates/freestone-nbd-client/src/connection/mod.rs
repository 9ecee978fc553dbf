//! The thread of a connection: connects, sends requests, receives replies, and reconnects.
//!
//! A [`Connection`] owns its link, its commands in flight, the send queue ([`outgoing`]) and the parser for
//! replies ([`receive`]). Only the device starts connections.

mod outgoing;
mod receive;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use freestone_core::device::Error;
use freestone_core::log_limit::LogLimit;
use freestone_core::sync::Instant;
use freestone_core::unique;
use freestone_nbd_proto::errno;
use rustix::event::PollFlags;

use self::outgoing::Outgoing;
use self::receive::Receiver;
use crate::config::Config;
use crate::error::LinkError;
use crate::link::Link;
use crate::link::export_info::ExportInfo;
use crate::link::handshake::negotiate;
use crate::link::tls::TlsSettings;
use crate::link::wake::{Deadline, Waker};
use crate::requests::job::{Job, Piece, error_of};
use crate::requests::table::CommandTable;
use crate::shared::{Exchange, JoinResult, LeaveReason, Shared};

/// Timeout for connecting and negotiating the export.
pub const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// Shortest and longest pause before reconnecting.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// Longest pause before reconnecting if other connections of the device are open.
const PAUSE_MAX_WITH_OTHERS: Duration = Duration::from_secs(30);
/// Lifetime after which a connection counts as stable, so that the pause starts short again.
const STABLE_LIFETIME: Duration = Duration::from_secs(1);
/// Longest wait for an event if no command is in flight.
const MAX_WAIT: Duration = Duration::from_secs(3600);

/// Everything needed to open a connection; shared by all connections of a device.
pub struct Connector {
    /// Options of the device.
    pub config: Config,
    /// TLS settings; `None` without `nbds`.
    pub tls: Option<TlsSettings>,
    /// Rate limits for log lines.
    pub log: LogLimit<LogEvent>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogEvent {
    Lost,
    /// A connection could not be opened.
    ConnectFailed,
    /// The server returned an unexpected errno.
    Errno,
}

impl Connector {
    /// Connects and negotiates the export.
    pub fn connect(&self, wake: &Waker) -> Result<(Link, ExportInfo), LinkError> {
        let deadline = Deadline::new(wake, HANDSHAKE_MAX);
        let link = Link::connect(&self.config.uri.address, deadline)?;
        negotiate(link, &self.config.uri.export, self.tls.as_ref(), deadline)
    }

    fn log_event(&self, event: LogEvent, what: &str, error: &LinkError) {
        let (name, uri) = (&self.config.name, &self.config.uri);
        if let Some(suppressed) = self.log.admit(event) {
            tracing::warn!("{name}: {what} {uri}: {error}{suppressed}");
        } else {
            tracing::debug!("{name}: {what} {uri}: {error}");
        }
    }
}

pub struct Connection {
    number: usize,
    shared: Arc<Shared>,
    connector: Arc<Connector>,
    /// Number of failures in a row, which determines the pause before reconnecting.
    failures: u32,
}

impl Connection {
    pub fn new(number: usize, shared: Arc<Shared>, connector: Arc<Connector>) -> Self {
        Self { number, shared, connector, failures: 0 }
    }

    fn waker(&self) -> &Waker {
        &self.shared.wakers[self.number]
    }

    /// Runs until the device is dropped. `first` is a connection that is already open.
    pub fn run(mut self, mut first: Option<(Link, ExportInfo)>) {
        while !self.waker().is_stopped() {
            let connected = match first.take() {
                Some(connected) => Ok(connected),
                None => self.connector.connect(self.waker()),
            };
            match connected.and_then(|(link, export_info)| self.join(link, export_info)) {
                Ok(lasted) if lasted > STABLE_LIFETIME => self.failures = 0,
                // The pause also grows if the server accepts connections and soon closes them.
                Ok(_) => self.failures += 1,
                Err(LinkError::Stopped) => break,
                Err(error) => {
                    self.failures += 1;
                    let has_others = self.shared.members() > 0;
                    if has_others {
                        tracing::debug!(
                            "{}: cannot open a further connection: {error}",
                            self.connector.config.name
                        );
                    } else {
                        self.shared.record_error(error.to_string());
                        self.connector.log_event(LogEvent::ConnectFailed, "cannot reconnect to", &error);
                    }
                }
            }
            self.shared.expire();
            self.pause();
        }
    }

    /// Pauses before reconnecting. The pause grows with each failure and is randomized, so that the
    /// clients of one server do not reconnect at once. If all other connections are lost meanwhile,
    /// a long pause is cut short.
    fn pause(&mut self) {
        let has_others = self.shared.members() > 0;
        let most = if has_others { PAUSE_MAX_WITH_OTHERS } else { PAUSE_MAX };
        let pause = PAUSE_MIN.saturating_mul(1 << self.failures.min(10)).min(most);
        let random = unique::random_id() % 512;
        let end = Instant::now() + pause.mul_f64(0.75 + random as f64 / 1024.0);
        let short = Instant::now() + PAUSE_MIN;
        while !self.waker().is_stopped() {
            let now = Instant::now();
            let is_first = has_others && self.shared.members() == 0;
            let end = if is_first { end.min(short) } else { end };
            if end <= now {
                break;
            }
            if self.waker().wait(None, end - now).is_err() {
                std::thread::sleep(PAUSE_MIN);
            }
        }
    }

    /// Joins the session and serves requests until the connection is lost. Returns the time it
    /// served them.
    fn join(&mut self, link: Link, export_info: ExportInfo) -> Result<Duration, LinkError> {
        let first = loop {
            match self.shared.join(self.number, export_info)? {
                JoinResult::Joined(first) => break first,
                // Connections of the previous session wake this thread when they have left.
                JoinResult::PreviousEnding => {
                    self.waker().wait(None, PAUSE_MIN)?;
                }
            }
        };
        if first && self.shared.reconnects() > 0 {
            tracing::info!("{}: reconnected to {}", self.connector.config.name, self.connector.config.uri);
        }
        let begun = Instant::now();
        let mut talk = Transmission::new(link, export_info);
        let error = match talk.serve(self) {
            Ok(LeaveReason::Stop) => {
                Outgoing::send_disconnect(&mut talk.link);
                Some(LinkError::Stopped)
            }
            Ok(LeaveReason::SessionLost) => None,
            Err(error) => Some(error),
        };
        // Replies received before the loss are valid, so their requests are finished.
        let _ = self.shared.exchange(self.number, &mut talk.exchange);
        // Closes the connection before other connections send its requests again.
        let jobs = talk.end();
        let lost = self.shared.leave(self.number, jobs);
        let name = &self.connector.config.name;
        if let Some(writes) = lost {
            tracing::warn!(
                "{name}: all connections to {} were lost after {writes} completed writes without a flush; \
                 the server may have lost them, and the next flush fails",
                self.connector.config.uri
            );
        }
        match error {
            Some(LinkError::Stopped) => return Err(LinkError::Stopped),
            Some(error) => {
                self.shared.record_error(error.to_string());
                self.connector.log_event(LogEvent::Lost, "lost a connection to", &error);
            }
            None => {}
        }
        Ok(begun.elapsed())
    }
}

/// An open connection in the transmission phase.
struct Transmission {
    link: Link,
    export_info: ExportInfo,
    table: CommandTable,
    outgoing: Outgoing,
    receiver: Receiver,
    exchange: Exchange,
    /// Commands to send next.
    next: VecDeque<(Box<Job>, Piece)>,
}

impl Transmission {
    fn new(link: Link, export_info: ExportInfo) -> Self {
        Self {
            link,
            export_info,
            table: CommandTable::default(),
            outgoing: Outgoing::default(),
            receiver: Receiver::new(export_info.structured, export_info.context),
            exchange: Exchange::default(),
            next: VecDeque::new(),
        }
    }

    /// Serves requests until the connection fails, or the session or device ends.
    fn serve(&mut self, connection: &Connection) -> Result<LeaveReason, LinkError> {
        let timeout = connection.shared.timeout;
        let (mut moved, mut more) = (Instant::now(), false);
        loop {
            if let Err(over) = connection.shared.exchange(connection.number, &mut self.exchange) {
                return Ok(over);
            }
            while let Some(job) = self.exchange.new.pop_front() {
                self.step(job);
            }
            while self.outgoing.has_room()
                && let Some((job, piece)) = self.next.pop_front()
            {
                self.outgoing.add(&mut self.table, job, piece);
            }
            if self.outgoing.send(&mut self.link, &mut self.table)? {
                moved = Instant::now();
            }
            let is_sending = !self.outgoing.is_empty() || self.link.has_unsent();
            if !self.exchange.done.is_empty() || (!is_sending && !self.next.is_empty()) {
                continue;
            }
            let mut wait = if more { Duration::ZERO } else { MAX_WAIT };
            if self.table.len() > 0 || is_sending {
                let since = if is_sending { moved } else { self.table.oldest().unwrap_or(moved) };
                let left = (since + timeout).saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(LinkError::Timeout(timeout));
                }
                wait = wait.min(left);
            }
            let flags = if is_sending { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            let ready = connection.waker().wait(Some((self.link.socket(), flags)), wait)?;
            if ready.readable || more {
                let received = self.receiver.receive(&mut self.link, &mut self.table);
                self.process_replies(connection);
                more = received?;
            }
        }
    }

    /// Continues a request with its next command, or finishes it.
    fn step(&mut self, mut job: Box<Job>) {
        match job.next_piece(&self.export_info) {
            Ok(Some(piece)) => self.next.push_back((job, piece)),
            Ok(None) => self.exchange.done.push((job, Ok(()))),
            Err(error) => self.exchange.done.push((job, Err(error))),
        }
    }

    fn process_replies(&mut self, connection: &Connection) {
        let mut all = std::mem::take(&mut self.receiver.replies);
        for reply in all.drain(..) {
            let (mut job, piece) = (reply.sent.job, reply.sent.piece);
            match reply.errno {
                0 => {
                    self.exchange.unflushed += u64::from(piece.leaves_unflushed());
                    job.advance(&piece);
                    self.step(job);
                }
                // The server is shutting down. The command is sent again, through another
                // connection or later.
                errno::SHUTDOWN => self.next.push_front((job, piece)),
                number => {
                    let error = error_of(number, job.request.op);
                    if error == Error::Media && number != errno::IO {
                        Self::log_unexpected_errno(connection, number, &job);
                    }
                    self.exchange.done.push((job, Err(error)));
                }
            }
        }
        // Keeps the allocation for later replies.
        self.receiver.replies = all;
    }

    fn log_unexpected_errno(connection: &Connection, number: u32, job: &Job) {
        let name = &connection.connector.config.name;
        if let Some(suppressed) = connection.connector.log.admit(LogEvent::Errno) {
            tracing::warn!(
                request = ?job.request,
                "{name}: the server returned unexpected error {number}{suppressed}"
            );
        }
    }

    /// Closes the connection and returns the requests without a reply.
    fn end(mut self) -> VecDeque<Box<Job>> {
        let mut jobs: VecDeque<_> = self.table.drain().collect();
        jobs.extend(self.next.drain(..).map(|(job, _)| job));
        jobs.append(&mut self.exchange.new);
        jobs
    }
}
