//! A connection's thread: it connects, asks, hears, and connects again.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use freestone_core::device::Error;
use freestone_core::log_limit::LogLimit;
use freestone_core::sync::Instant;
use freestone_core::unique;
use freestone_nbd_proto::errno;
use rustix::event::PollFlags;

use crate::config::Config;
use crate::error::LinkError;
use crate::facts::Facts;
use crate::handshake::shake_hands;
use crate::job::{Job, Piece, error_of};
use crate::link::Link;
use crate::outgoing::Outgoing;
use crate::receive::Receiver;
use crate::shared::{Exchange, Joined, Over, Shared};
use crate::table::Table;
use crate::tls::TlsSettings;
use crate::wake::{Patience, Wake};

/// How long it may take to connect and to choose the export.
pub const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// The first pause before it is connected again, and the longest one.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// The longest pause where other connections are open.
const PAUSE_MAX_BESIDE: Duration = Duration::from_secs(30);
/// A connection that has lasted for so long is a good one.
const STABLE: Duration = Duration::from_secs(1);
/// Longest time without a look at the clock.
const LOOK: Duration = Duration::from_secs(3600);

/// What all connections of a device are made with.
pub struct Remote {
    /// Of the device.
    pub config: Config,
    /// For `nbds`.
    pub tls: Option<TlsSettings>,
    /// Of what happens again and again.
    pub log: LogLimit<Line>,
}

/// Kinds of lines in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Line {
    /// A connection was lost.
    Lost,
    /// One could not be made.
    NotMade,
    /// The server answered what it should not have to.
    Errno,
}

impl Remote {
    /// Connects, and chooses the export.
    ///
    /// # Errors
    /// See [`LinkError`].
    pub fn connect(&self, wake: &Wake) -> Result<(Link, Facts), LinkError> {
        let patience = Patience::new(wake, HANDSHAKE_MAX);
        let link = Link::connect(&self.config.uri.place, patience)?;
        shake_hands(link, &self.config.uri.export, self.tls.as_ref(), patience)
    }

    fn line(&self, line: Line, what: &str, error: &LinkError) {
        let (name, uri) = (&self.config.name, &self.config.uri);
        if let Some(held_back) = self.log.line(line) {
            tracing::warn!("{name}: {what} {uri}: {error}{held_back}");
        } else {
            tracing::debug!("{name}: {what} {uri}: {error}");
        }
    }
}

/// A connection.
pub struct Lane {
    number: usize,
    shared: Arc<Shared>,
    remote: Arc<Remote>,
    /// Pauses without success so far.
    failures: u32,
}

impl Lane {
    /// Not connected yet.
    pub fn new(number: usize, shared: Arc<Shared>, remote: Arc<Remote>) -> Self {
        Self { number, shared, remote, failures: 0 }
    }

    fn wake(&self) -> &Wake {
        &self.shared.wakes[self.number]
    }

    /// Until the device ends. The first connection may be there already.
    pub fn run(mut self, mut first: Option<(Link, Facts)>) {
        while !self.wake().is_stopped() {
            let connected = match first.take() {
                Some(connected) => Ok(connected),
                None => self.remote.connect(self.wake()),
            };
            match connected.and_then(|(link, facts)| self.join(link, facts)) {
                Ok(lasted) if lasted > STABLE => self.failures = 0,
                // A server that always hangs up is left alone for longer and longer, too.
                Ok(_) => self.failures += 1,
                Err(LinkError::Ending) => break,
                Err(error) => {
                    self.failures += 1;
                    let beside = self.shared.members() > 0;
                    if beside {
                        tracing::debug!("{}: one more connection: {error}", self.remote.config.name);
                    } else {
                        self.shared.note(error.to_string());
                        self.remote.line(Line::NotMade, "cannot connect again to", &error);
                    }
                }
            }
            self.shared.expire();
            self.pause();
        }
    }

    /// Longer each time, and never the same for two: clients of one server do not all come at once.
    /// Where the others are lost meanwhile, a long pause is cut short.
    fn pause(&mut self) {
        let beside = self.shared.members() > 0;
        let most = if beside { PAUSE_MAX_BESIDE } else { PAUSE_MAX };
        let pause = PAUSE_MIN.saturating_mul(1 << self.failures.min(10)).min(most);
        let random = unique::number() % 512;
        let end = Instant::now() + pause.mul_f64(0.75 + random as f64 / 1024.0);
        let short = Instant::now() + PAUSE_MIN;
        while !self.wake().is_stopped() {
            let now = Instant::now();
            let is_first = beside && self.shared.members() == 0;
            let end = if is_first { end.min(short) } else { end };
            if end <= now {
                break;
            }
            if self.wake().wait(None, end - now).is_err() {
                std::thread::sleep(PAUSE_MIN);
            }
        }
    }

    /// Serves over a connection until it is lost. Returns how long that was.
    fn join(&mut self, link: Link, facts: Facts) -> Result<Duration, LinkError> {
        let first = loop {
            match self.shared.join(self.number, facts)? {
                Joined::Yes(first) => break first,
                // Those of the session before wake this one when they have left.
                Joined::Later => {
                    self.wake().wait(None, PAUSE_MIN)?;
                }
            }
        };
        if first && self.shared.reconnects() > 0 {
            tracing::info!("{}: connected again to {}", self.remote.config.name, self.remote.config.uri);
        }
        let begun = Instant::now();
        let mut talk = Talk::new(link, facts);
        let error = match talk.serve(self) {
            Ok(Over::Stop) => {
                Outgoing::goodbye(&mut talk.link);
                Some(LinkError::Ending)
            }
            Ok(Over::Session) => None,
            Err(error) => Some(error),
        };
        // What was answered before it was lost was answered.
        let _ = self.shared.exchange(self.number, &mut talk.exchange);
        // The server hears that it is over before anybody else asks it again.
        let jobs = talk.end();
        let lost = self.shared.leave(self.number, jobs);
        let name = &self.remote.config.name;
        if let Some(writes) = lost {
            tracing::warn!(
                "{name}: all connections to {} were lost after {writes} writes that were answered and not \
                 flushed; the server may have lost them, and the next flush fails",
                self.remote.config.uri
            );
        }
        match error {
            Some(LinkError::Ending) => return Err(LinkError::Ending),
            Some(error) => {
                self.shared.note(error.to_string());
                self.remote.line(Line::Lost, "lost a connection to", &error);
            }
            None => {}
        }
        Ok(begun.elapsed())
    }
}

/// What goes on over a connection.
struct Talk {
    link: Link,
    facts: Facts,
    table: Table,
    outgoing: Outgoing,
    receiver: Receiver,
    exchange: Exchange,
    /// What is to be asked next.
    next: VecDeque<(Box<Job>, Piece)>,
}

impl Talk {
    fn new(link: Link, facts: Facts) -> Self {
        Self {
            link,
            facts,
            table: Table::default(),
            outgoing: Outgoing::default(),
            receiver: Receiver::new(facts.structured, facts.context),
            exchange: Exchange::default(),
            next: VecDeque::new(),
        }
    }

    /// Until it ends, by itself or by others.
    fn serve(&mut self, lane: &Lane) -> Result<Over, LinkError> {
        let timeout = lane.shared.timeout;
        let (mut moved, mut more) = (Instant::now(), false);
        loop {
            if let Err(over) = lane.shared.exchange(lane.number, &mut self.exchange) {
                return Ok(over);
            }
            while let Some(job) = self.exchange.new.pop_front() {
                self.step(job);
            }
            while self.outgoing.has_room()
                && let Some((job, piece)) = self.next.pop_front()
            {
                self.outgoing.put(&mut self.table, job, piece);
            }
            if self.outgoing.send(&mut self.link, &mut self.table)? {
                moved = Instant::now();
            }
            let is_sending = !self.outgoing.is_empty() || self.link.has_unsent();
            if !self.exchange.done.is_empty() || (!is_sending && !self.next.is_empty()) {
                continue;
            }
            let mut wait = if more { Duration::ZERO } else { LOOK };
            if self.table.len() > 0 || is_sending {
                let since = if is_sending { moved } else { self.table.oldest().unwrap_or(moved) };
                let left = (since + timeout).saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(LinkError::Silent(timeout));
                }
                wait = wait.min(left);
            }
            let flags = if is_sending { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            let ready = lane.wake().wait(Some((self.link.socket(), flags)), wait)?;
            if ready.readable || more {
                let received = self.receiver.receive(&mut self.link, &mut self.table);
                self.answered(lane);
                more = received?;
            }
        }
    }

    /// Goes on with a job.
    fn step(&mut self, mut job: Box<Job>) {
        match job.next(&self.facts) {
            Ok(Some(piece)) => self.next.push_back((job, piece)),
            Ok(None) => self.exchange.done.push((job, Ok(()))),
            Err(error) => self.exchange.done.push((job, Err(error))),
        }
    }

    /// Goes on with what was answered.
    fn answered(&mut self, lane: &Lane) {
        let mut all = std::mem::take(&mut self.receiver.answered);
        for answered in all.drain(..) {
            let (mut job, piece) = (answered.sent.job, answered.sent.piece);
            match answered.errno {
                0 => {
                    self.exchange.unflushed += u64::from(piece.leaves_unflushed());
                    job.advance(&piece);
                    self.step(job);
                }
                // It is asked again, elsewhere or later.
                errno::SHUTDOWN => self.next.push_front((job, piece)),
                number => {
                    let error = error_of(number, job.request.op);
                    if error == Error::Media && number != errno::IO {
                        Self::tell(lane, number, &job);
                    }
                    self.exchange.done.push((job, Err(error)));
                }
            }
        }
        // Its memory is used again.
        self.receiver.answered = all;
    }

    fn tell(lane: &Lane, number: u32, job: &Job) {
        let name = &lane.remote.config.name;
        if let Some(held_back) = lane.remote.log.line(Line::Errno) {
            tracing::warn!(
                request = ?job.request,
                "{name}: the server answered error {number}, which it should have no reason for{held_back}"
            );
        }
    }

    /// What is not answered.
    fn end(mut self) -> VecDeque<Box<Job>> {
        let mut jobs: VecDeque<_> = self.table.drain().collect();
        jobs.extend(self.next.drain(..).map(|(job, _)| job));
        jobs.append(&mut self.exchange.new);
        jobs
    }
}
