//! State shared by the threads of a server: the tables under one lock, admission of connections, and their
//! end.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use freestone_core::allow::Denials;
use freestone_core::budget::Budget;
use freestone_core::client_log;
use freestone_core::workers::Workers;

use crate::acceptor::{Acceptor, Next};
use crate::export::{EnterError, Export};
use crate::idle_threads::IdleThreads;
use crate::limits::Limits;
use crate::link::Link;
use crate::pending::Admission;
use crate::tables::{DeadlineAction, Tables};
use crate::tls::settings::Policy;

/// Time that a cut connection may take to notice. Only a blocked device call takes longer.
const CUT_WAIT: Duration = Duration::from_secs(1);
/// Poll interval of a client that waits for a held export or for a place, to notice unpublishing and
/// shutdown.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// State of a server that its connections need.
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
    tables: Mutex<Tables>,
    /// Notified when a connection has ended, or an export is released.
    ended: Condvar,
    /// Created with the first address.
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

    pub fn lock(&self) -> MutexGuard<'_, Tables> {
        // A panic cannot leave the tables inconsistent, so poisoning is ignored.
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the acceptor, or None if the server never listened.
    pub fn acceptor(&self) -> Option<&Acceptor> {
        self.acceptor.get()
    }

    /// Creates the acceptor if necessary. Called under `binding`.
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

    /// Checks the allow list and the connection limit, and adds the connection. Returns None if it is
    /// refused.
    pub fn admit(&self, listener: u64, socket: OwnedFd, peer: String) -> Option<Arc<Link>> {
        let listed = {
            let mut tables = self.lock();
            tables.accepted += 1;
            tables.pace.accepted(self.limits.max_connect_rate, Instant::now());
            let listener = tables.listeners.get(&listener);
            listener.and_then(|at| Some((at.allow.clone()?, at.address.clone())))
        };
        // Not under the lock: it takes system calls.
        if let Some((allow, address)) = listed
            && !allow.lets_in(socket.as_fd())
        {
            self.denials.add(&address, &peer);
            return None;
        }
        let mut tables = self.lock();
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
        // None: the address was closed meanwhile.
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
    pub fn find(&self, link: &Link, name: &str) -> Result<Arc<Export>, EnterError> {
        let export = self.lock().find(&link.address, name)?;
        export.admit(link).map(|()| export)
    }

    /// Finds an export like [`find`](Self::find), and counts the connection as its user. Waits while the
    /// export is held. Waits until `until` for a place in its limits.
    pub fn enter(&self, link: &Link, name: &str, until: Instant) -> Result<Arc<Export>, EnterError> {
        let deadline = Instant::now() + self.limits.handshake_total;
        let mut tables = self.lock();
        tables.find(&link.address, name)?.admit(link)?;
        if tables.pending_handshakes.remove(link.id) {
            self.wake();
        }
        loop {
            if tables.is_held(&link.address, name)? {
                if deadline <= Instant::now() {
                    return Err(EnterError::Failed("the device did not return in time".to_owned()));
                }
            } else {
                tables.find(&link.address, name)?.admit(link)?;
                match tables.enter(link, name) {
                    Err(EnterError::Full(_)) if Instant::now() < until => {}
                    entered => return entered,
                }
                // Not under the lock. The next poll finds a place that becomes free meanwhile.
                drop(tables);
                if link.has_left() {
                    return Err(EnterError::Failed("the client has left".to_owned()));
                }
                tables = self.lock();
            }
            // The next poll notices unpublishing and shutdown.
            let interval = match until.saturating_duration_since(Instant::now()) {
                Duration::ZERO => POLL_INTERVAL,
                left => POLL_INTERVAL.min(left),
            };
            let waited = self.ended.wait_timeout(tables, interval);
            tables = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends a [`Tables::hold`].
    pub fn release(&self, name: &str) {
        self.lock().release(name);
        self.ended.notify_all();
    }

    /// Returns a connection to the handshake, because no device could be created for it.
    pub fn withdraw(&self, link: &Link) {
        let export = {
            let mut tables = self.lock();
            if let Some(link) = tables.links([&link.id]).first() {
                tables.pending_handshakes.add(link);
            }
            tables.withdraw(link)
        };
        // Dropping the last reference to the export may wait for a disk. This must not happen under the lock.
        drop(export);
    }

    pub fn visible_exports(&self, link: &Link) -> Vec<Arc<Export>> {
        let tables = self.lock();
        let all = tables.listener(&link.address).into_iter().flat_map(|listener| listener.exports.values());
        all.filter(|export| export.admit(link).is_ok()).cloned().collect()
    }

    /// Ends the connection after `ttl`.
    pub fn expire_after(&self, link: &Link, ttl: Duration) {
        // A time beyond the range of the clock means never.
        let Some(moment) = Instant::now().checked_add(ttl) else { return };
        let nearest = self.lock().expire_at(link, moment);
        if nearest {
            self.wake();
        }
    }

    /// Makes the accepting thread check its deadlines. Does not block, so it may be called under the lock of the
    /// tables.
    fn wake(&self) {
        if let Some(acceptor) = self.acceptor.get() {
            acceptor.wake();
        }
    }

    /// Removes a connection whose thread is about to end.
    pub fn leave(&self, link: &Link, panicked: bool) {
        let mut tables = self.lock();
        let gone = tables.leave(link);
        tables.panics += u64::from(panicked);
        if tables.pending_handshakes.remove(link.id) {
            self.wake();
        }
        self.ended.notify_all();
        drop(tables);
        // Dropping the last reference to the device may wait for a disk. This must not happen under the lock.
        drop(gone);
    }
}

impl ServerShared {
    /// Ends the connections whose deadline has passed, and decides what the accepting thread does next.
    pub fn expire(&self) -> Next {
        let now = Instant::now();
        let (expired, until, admission) = {
            let mut tables = self.lock();
            if tables.shutting_down {
                return Next::Stop;
            }
            let (expired, until) = tables.expired(now);
            let Limits { max_pending_handshakes, handshake_grace, max_connect_rate, .. } = self.limits;
            let admission = match tables.pace.due(max_connect_rate, now) {
                Some(due) => Admission::At(due),
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
            Admission::Now => Next::Accept(until),
            Admission::Instead(link) => {
                client_log!(warn,
                    peer = %link.peer(),
                    max_pending_handshakes = self.limits.max_pending_handshakes,
                    "too many pending handshakes: the oldest is closed"
                );
                link.cut();
                Next::Accept(until)
            }
            Admission::At(moment) => Next::Wait(until.map_or(moment, |until| until.min(moment))),
        }
    }

    /// Ends connections after replies to the requests they received. Cuts those that take longer than
    /// `grace`.
    pub fn end(&self, mut links: Vec<Arc<Link>>, grace: Duration) {
        for link in &links {
            link.drain();
        }
        self.wait_for_end(&mut links, grace);
        for link in &links {
            client_log!(warn, peer = %link.peer(), "the connection did not end in time and is cut");
            link.cut();
        }
        self.wait_for_end(&mut links, CUT_WAIT);
    }

    pub fn cut(&self, mut links: Vec<Arc<Link>>) {
        for link in &links {
            link.cut();
        }
        self.wait_for_end(&mut links, CUT_WAIT);
    }

    /// Waits until all these connections have ended, and removes those that have.
    fn wait_for_end(&self, links: &mut Vec<Arc<Link>>, time: Duration) {
        let deadline = Instant::now().checked_add(time);
        let mut tables = self.lock();
        // Waits for one link at a time, so each wakeup checks one link, however many connections end.
        while let Some(link) = links.last() {
            if !tables.connections.contains_key(&link.id) {
                links.pop();
                continue;
            }
            let left = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                links.retain(|link| tables.connections.contains_key(&link.id));
                return;
            }
            tables = self.ended.wait_timeout(tables, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
