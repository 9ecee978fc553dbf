//! State shared by the threads of a server: the tables under one lock, admission of connections, and their
//! end.
//!
//! [`ServerShared`] owns the [`tables`] of listeners, exports and connections, and states the lock order. The
//! public server, handshakes, sessions and the accepting thread use it.

pub mod export;
pub mod passed;
pub mod tables;
pub mod template;

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use freestone_core::allow::Denials;
use freestone_core::budget::Budget;
use freestone_core::client_log;
use freestone_core::sync::{Condvar, Mutex};
use freestone_core::workers::Workers;

use self::tables::Tables;
use self::tables::connections::DeadlineAction;
use crate::accept::acceptor::{Acceptor, AcceptorAction};
use crate::accept::idle_threads::IdleThreads;
use crate::accept::pending_handshakes::Admission;
use crate::limits::Limits;
use crate::link::Link;
use crate::shared::export::{Export, JoinError};
use crate::shared::passed::PassedConnection;
use crate::stream::tls::settings::Policy;

/// Longest wait for cut connections to end. Only a blocked device call takes longer.
const CUT_WAIT: Duration = Duration::from_secs(1);
/// Poll interval of a client that waits for a held export or for a place in a client limit, to notice
/// unpublishing and shutdown.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// State that a server shares with its accepting thread and its connections.
///
/// Lock order: 1. `binding`, held while a socket is created and while the accepting thread is started; 2.
/// `tables`, held for lookups and changes, never across a call of a device or template, a wait, or I/O; 3.
/// the acceptor's lock. The lock of the accepting thread's handle is described in [`Server`](crate::Server).
#[derive(Debug)]
pub struct ServerShared {
    pub limits: Limits,
    pub budget: Arc<Budget>,
    pub workers: Workers,
    pub denials: Arc<Denials>,
    pub idle_threads: IdleThreads,
    /// The TLS settings, if any; set before the server listens.
    pub tls: OnceLock<Policy>,
    /// Serializes the calls that start to listen.
    pub binding: Mutex<()>,
    pub tables: Mutex<Tables>,
    /// Notified when a connection has ended, or an export is released.
    ended: Condvar,
    /// The acceptor, created with the first address.
    acceptor: OnceLock<Acceptor>,
}

impl ServerShared {
    /// Creates the state of a server without addresses.
    pub fn new(limits: Limits, workers: Workers) -> Self {
        Self {
            workers,
            denials: Arc::default(),
            idle_threads: IdleThreads::default(),
            budget: Budget::new(limits.max_memory_in_flight),
            limits,
            tls: OnceLock::new(),
            binding: Mutex::default(),
            tables: Mutex::default(),
            ended: Condvar::default(),
            acceptor: OnceLock::new(),
        }
    }

    /// Returns the acceptor, or None if the server never listened.
    pub fn acceptor(&self) -> Option<&Acceptor> {
        self.acceptor.get()
    }

    /// Creates the acceptor if necessary. Called with `binding` locked.
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn make_acceptor(&self) -> std::io::Result<()> {
        if self.acceptor.get().is_none() {
            let acceptor = Acceptor::new()?;
            self.acceptor.get_or_init(|| acceptor);
        }
        Ok(())
    }

    /// Checks the allow list and the connection limit, and adds the connection. Returns None if the
    /// connection is refused or its address was closed.
    pub fn add_connection(&self, listener: u64, socket: OwnedFd, peer: String) -> Option<Arc<Link>> {
        let listed = {
            let mut tables = self.tables.lock();
            tables.accepted += 1;
            tables.connect_rate.record_accept(self.limits.max_connect_rate, Instant::now());
            let listener = tables.listeners.get(&listener);
            listener.and_then(|at| Some((at.allow.clone()?, at.address.clone())))
        };
        // The lock is not held for `allows`, which makes system calls.
        if let Some((allow, address)) = listed
            && !allow.allows(socket.as_fd())
        {
            self.denials.add(&address, &peer);
            return None;
        }
        let mut tables = self.tables.lock();
        if tables.connections.len() >= self.limits.max_connections {
            tables.refused += 1;
            drop(tables);
            client_log!(
                warn,
                peer,
                max_connections = self.limits.max_connections,
                "too many connections: a new one is closed"
            );
            return None;
        }
        // `connect` returns None if the address was closed meanwhile.
        match tables.connect(listener, |id, address| Link::new(id, address.clone(), peer, socket))? {
            Ok(link) => Some(link),
            Err(error) => {
                tables.refused += 1;
                drop(tables);
                client_log!(warn, %error, "no resources for a connection");
                None
            }
        }
    }
}

impl ServerShared {
    /// Finds an export that the client may see.
    pub fn find(&self, link: &Link, name: &str) -> Result<Arc<Export>, JoinError> {
        let export = self.tables.lock().find(&link.address, name)?;
        export.check_visible(link).map(|()| export)
    }

    /// Finds an export like [`find`](Self::find), and counts the connection as its user. Waits while the
    /// export is held. If a client limit of the export is full, waits for a place until `until`.
    pub fn join_export(&self, link: &Link, name: &str, until: Instant) -> Result<Arc<Export>, JoinError> {
        let deadline = Instant::now() + self.limits.handshake_timeout;
        let mut tables = self.tables.lock();
        tables.find(&link.address, name)?.check_visible(link)?;
        if tables.pending_handshakes.remove(link.id) {
            self.wake();
        }
        loop {
            if tables.is_held(&link.address, name)? {
                if deadline <= Instant::now() {
                    return Err(JoinError::Failed("the device did not return in time".to_owned()));
                }
            } else {
                tables.find(&link.address, name)?.check_visible(link)?;
                match tables.join_export(link, name) {
                    Err(JoinError::ClientLimit(_)) if Instant::now() < until => {}
                    entered => return entered,
                }
                // The lock is not held for `has_left`, a system call. The next poll finds a place that
                // becomes free meanwhile.
                drop(tables);
                if link.has_left() {
                    return Err(JoinError::Failed("the client has left".to_owned()));
                }
                tables = self.tables.lock();
            }
            // The next poll notices unpublishing and shutdown.
            let interval = match until.saturating_duration_since(Instant::now()) {
                Duration::ZERO => POLL_INTERVAL,
                left => POLL_INTERVAL.min(left),
            };
            tables = self.ended.wait_timeout(tables, interval).0;
        }
    }

    /// Ends one [`Tables::hold`], and wakes the clients that wait for the export.
    pub fn release(&self, name: &str) {
        self.tables.lock().release(name);
        self.ended.notify_all();
    }

    /// Moves a connection back to the pending handshakes, because no device could be created for it.
    pub fn leave_export(&self, link: &Link) {
        let export = {
            let mut tables = self.tables.lock();
            if let Some(link) = tables.links([&link.id]).first() {
                tables.pending_handshakes.add(link);
            }
            tables.leave_export(link)
        };
        // Dropping the last reference to the export may wait for a disk, so the lock is released before.
        drop(export);
    }

    pub fn visible_exports(&self, link: &Link) -> Vec<Arc<Export>> {
        let tables = self.tables.lock();
        let all = tables.listener(&link.address).into_iter().flat_map(|listener| listener.exports.values());
        all.filter(|export| export.check_visible(link).is_ok()).cloned().collect()
    }

    /// Sets the deadline of a connection, which ends after `ttl`.
    pub fn expire_after(&self, link: &Link, ttl: Duration) {
        // If the time is beyond the range of the clock, the connection has no deadline.
        let Some(moment) = Instant::now().checked_add(ttl) else { return };
        let nearest = self.tables.lock().expire_at(link, moment);
        if nearest {
            self.wake();
        }
    }

    /// Makes the accepting thread check its deadlines. Does not block, so it may be called with the tables
    /// locked.
    pub fn wake(&self) {
        if let Some(acceptor) = self.acceptor.get() {
            acceptor.wake();
        }
    }

    /// Removes a connection that has ended. `panicked` is true if a device or its end callback panicked.
    pub fn remove_connection(&self, link: &Link, panicked: bool) {
        let mut tables = self.tables.lock();
        let gone = tables.remove_connection(link);
        tables.panics += u64::from(panicked);
        if tables.pending_handshakes.remove(link.id) {
            self.wake();
        }
        self.ended.notify_all();
        drop(tables);
        // Dropping the last reference to the device may wait for a disk, so the lock is released before.
        drop(gone);
    }
}

/// Longest wait of the accepting thread while the server is paused, until it is woken.
const PAUSE_MAX: Duration = Duration::from_secs(60);

impl ServerShared {
    /// Ends the connections whose deadline has passed, and decides what the accepting thread does next.
    pub fn run_deadlines(&self) -> AcceptorAction {
        let now = Instant::now();
        let (expired, until, admission) = {
            let mut tables = self.tables.lock();
            if tables.is_ending() {
                return AcceptorAction::Stop;
            }
            let (expired, until) = tables.take_expired(now);
            let Limits { max_pending_handshakes, handshake_grace, max_connect_rate, .. } = self.limits;
            let admission = match tables.connect_rate.next_accept(max_connect_rate, now) {
                _ if tables.is_paused => Admission::Wait(now + PAUSE_MAX),
                Some(due) => Admission::Wait(due),
                None => tables.pending_handshakes.admit(max_pending_handshakes, handshake_grace, now),
            };
            (expired, until, admission)
        };
        for (link, due) in expired {
            tracing::info!(peer = %link.peer(), ?due, "connection deadline reached");
            match due {
                DeadlineAction::Drain => link.drain(),
                DeadlineAction::Cut => link.cut(),
            }
        }
        match admission {
            Admission::Accept => AcceptorAction::Accept(until),
            Admission::Replace(link) => {
                client_log!(warn,
                    peer = %link.peer(),
                    max_pending_handshakes = self.limits.max_pending_handshakes,
                    "too many pending handshakes: the oldest is closed"
                );
                link.cut();
                AcceptorAction::Accept(until)
            }
            Admission::Wait(moment) => AcceptorAction::Wait(until.map_or(moment, |until| until.min(moment))),
        }
    }

    /// Ends connections after replies to the requests they have received. Cuts those that take longer than
    /// `grace`.
    pub fn end_connections(&self, links: Vec<Arc<Link>>, grace: Duration) {
        let mut left = ids(&links);
        for link in links {
            link.drain();
        }
        self.wait_for_end(&mut left, grace);
        self.cut_late(&left);
    }

    /// Cuts connections that did not end in time, and waits until they have ended.
    pub fn cut_late(&self, late: &[u64]) {
        let links = self.tables.lock().links(late);
        for link in &links {
            client_log!(warn, peer = %link.peer(), "the connection did not end in time and is cut");
        }
        self.cut_connections(links);
    }

    pub fn cut_connections(&self, links: Vec<Arc<Link>>) {
        let mut left = ids(&links);
        for link in links {
            link.cut();
        }
        self.wait_for_end(&mut left, CUT_WAIT);
    }

    /// Waits at most `time` for these connections to end. Removes those that have ended from `left`.
    pub fn wait_for_end(&self, left: &mut Vec<u64>, time: Duration) {
        let deadline = Instant::now().checked_add(time);
        let mut tables = self.tables.lock();
        // Waits for one connection at a time, so each wakeup checks one, however many connections end.
        while let Some(id) = left.last() {
            if !tables.connections.contains_key(id) {
                left.pop();
                continue;
            }
            let time = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
            if time.is_zero() {
                left.retain(|id| tables.connections.contains_key(id));
                return;
            }
            tables = self.ended.wait_timeout(tables, time).0;
        }
    }

    /// Gives a connection to the successor. Returns false if the connection was drained or cut before.
    pub fn pass(&self, link: &Link, connection: PassedConnection) -> bool {
        // Under one lock, so that a connection that cannot be cut any more is in the list.
        let mut tables = self.tables.lock();
        let is_passed = link.complete_pass();
        if is_passed {
            tables.passed.push(connection);
        }
        is_passed
    }
}

/// Returns the identifiers of connections. Waits use them instead of links, so that the descriptors of a
/// connection that has ended are closed during the wait.
pub fn ids(links: &[Arc<Link>]) -> Vec<u64> {
    links.iter().map(|link| link.id).collect()
}
