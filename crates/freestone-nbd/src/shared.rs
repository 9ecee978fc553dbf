//! What the threads of a server share: its tables under one lock, how connections are admitted and
//! how they are ended.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use freestone_core::allow::Denials;
use freestone_core::budget::Budget;
use freestone_core::client_log;
use freestone_core::workers::Workers;

use crate::acceptor::{Acceptor, Next};
use crate::export::{EnterError, Export};
use crate::limits::Limits;
use crate::link::Link;
use crate::newcomers::Room;
use crate::spares::Spares;
use crate::tables::{Due, Tables};
use crate::tls::settings::Policy;

/// How long a connection that was cut may take to notice; only a device call that hangs takes
/// longer.
const CUT_WAIT: Duration = Duration::from_secs(1);
/// How often one that waits for an export, or for a place there, looks whether there is still something to wait for.
const HELD_LOOK: Duration = Duration::from_millis(100);

/// What connections need of their server.
///
/// Lock order: 1. `binding`, held while a socket is made and while the accepting thread is
/// started; 2. `tables`, held for lookups and changes, never across a call of a device or of a
/// template, a wait, or I/O; 3. the acceptor's. The lock of the accepting thread's handle is
/// declared in [`Server`](crate::Server).
#[derive(Debug)]
pub struct ServerShared {
    /// What clients may use up.
    pub limits: Limits,
    /// Bytes that connections hold for requests.
    pub budget: Arc<Budget>,
    /// Who does large requests beside the connections' threads.
    pub workers: Workers,
    /// Who was not let in.
    pub denials: Arc<Denials>,
    /// Threads without a connection.
    pub spares: Spares,
    /// How TLS is done, where it is; set before anything is listened on.
    pub tls: OnceLock<Policy>,
    /// Lets one call at a time start to listen.
    pub binding: Mutex<()>,
    tables: Mutex<Tables>,
    /// A connection has ended, or an export is not held any more.
    ended: Condvar,
    /// From the first address on.
    acceptor: OnceLock<Acceptor>,
}

impl ServerShared {
    /// For a server without addresses.
    pub fn new(limits: Limits, workers: Workers) -> Self {
        Self {
            workers,
            denials: Arc::default(),
            spares: Spares::default(),
            budget: Budget::new(limits.max_memory_in_flight),
            limits,
            tls: OnceLock::new(),
            binding: Mutex::default(),
            tables: Mutex::default(),
            ended: Condvar::default(),
            acceptor: OnceLock::new(),
        }
    }

    /// The tables.
    pub fn lock(&self) -> MutexGuard<'_, Tables> {
        // Nothing under this lock leaves the tables half changed.
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The acceptor, where something was ever listened on.
    pub fn acceptor(&self) -> Option<&Acceptor> {
        self.acceptor.get()
    }

    /// Makes the acceptor, unless it is there. Called under `binding`.
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

    /// A place for a connection that may come, if there is one.
    pub fn admit(&self, listener: u64, socket: OwnedFd, peer: String) -> Option<Arc<Link>> {
        let asked = {
            let mut tables = self.lock();
            tables.accepted += 1;
            tables.pace.accepted(self.limits.connects_per_second, Instant::now());
            let listener = tables.listeners.get(&listener);
            listener.and_then(|at| Some((at.allow.clone()?, at.address.clone())))
        };
        // Not under the lock: it takes system calls.
        if let Some((allow, address)) = asked
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

/// What the thread of a connection asks for.
impl ServerShared {
    /// The export of this name, where the client sees it.
    pub fn find(&self, link: &Link, name: &str) -> Result<Arc<Export>, EnterError> {
        let export = self.lock().find(&link.address, name)?;
        export.admit(link).map(|()| export)
    }

    /// As [`find`](Self::find), and from now on the connection counts as a user of the export.
    /// Waits while the export is held, and until `until` while it has no place.
    pub fn enter(&self, link: &Link, name: &str, until: Instant) -> Result<Arc<Export>, EnterError> {
        let deadline = Instant::now() + self.limits.handshake_total;
        let mut tables = self.lock();
        tables.find(&link.address, name)?.admit(link)?;
        if tables.newcomers.remove(link.id) {
            self.wake();
        }
        loop {
            if tables.is_held(&link.address, name)? {
                if deadline <= Instant::now() {
                    return Err(EnterError::Failed("the device does not come back".to_owned()));
                }
            } else {
                tables.find(&link.address, name)?.admit(link)?;
                match tables.enter(link, name) {
                    Err(EnterError::Full(_)) if Instant::now() < until => {}
                    entered => return entered,
                }
                // Not under the lock. A place that comes free meanwhile is found at the next look.
                drop(tables);
                if link.has_left() {
                    return Err(EnterError::Failed("the client has left".to_owned()));
                }
                tables = self.lock();
            }
            // What was unpublished meanwhile, or a server that goes away, is noticed at the next
            // look.
            let look = match until.saturating_duration_since(Instant::now()) {
                Duration::ZERO => HELD_LOOK,
                left => HELD_LOOK.min(left),
            };
            let waited = self.ended.wait_timeout(tables, look);
            tables = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends what [`Tables::hold`] began.
    pub fn release(&self, name: &str) {
        self.lock().release(name);
        self.ended.notify_all();
    }

    /// The connection does not use its export after all.
    pub fn withdraw(&self, link: &Link) {
        let export = {
            let mut tables = self.lock();
            if let Some(link) = tables.links([&link.id]).first() {
                tables.newcomers.add(link);
            }
            tables.withdraw(link)
        };
        // What was published may go with its last user, which may wait for a disk: not under the
        // lock.
        drop(export);
    }

    /// What a client sees.
    pub fn seen_by(&self, link: &Link) -> Vec<Arc<Export>> {
        let tables = self.lock();
        let all = tables.listener(&link.address).into_iter().flat_map(|listener| listener.exports.values());
        all.filter(|export| export.admit(link).is_ok()).cloned().collect()
    }

    /// The connection is to end after that time.
    pub fn expire_after(&self, link: &Link, ttl: Duration) {
        // Beyond what the clock can tell is never.
        let Some(moment) = Instant::now().checked_add(ttl) else { return };
        let nearest = self.lock().expire_at(link, moment);
        if nearest {
            self.wake();
        }
    }

    /// Makes the accepting thread look again, which takes no lock but for calls that do not block.
    fn wake(&self) {
        if let Some(acceptor) = self.acceptor.get() {
            acceptor.wake();
        }
    }

    /// The connection's thread is about to end.
    pub fn leave(&self, link: &Link, panicked: bool) {
        let mut tables = self.lock();
        let gone = tables.leave(link);
        tables.panics += u64::from(panicked);
        if tables.newcomers.remove(link.id) {
            self.wake();
        }
        self.ended.notify_all();
        drop(tables);
        // The device may go with its last user, which may wait for a disk: not under the lock.
        drop(gone);
    }
}

/// Ending connections.
impl ServerShared {
    /// Ends the connections whose time is up, and says when to look again.
    pub fn expire(&self) -> Next {
        let now = Instant::now();
        let (expired, until, room) = {
            let mut tables = self.lock();
            if tables.shutting_down {
                return Next::Stop;
            }
            let (expired, until) = tables.expired(now);
            let Limits { max_newcomers, newcomer_grace, connects_per_second, .. } = self.limits;
            let room = match tables.pace.due(connects_per_second, now) {
                Some(due) => Room::From(due),
                None => tables.newcomers.room(max_newcomers, newcomer_grace, now),
            };
            (expired, until, room)
        };
        for (link, due) in expired {
            tracing::info!(peer = %link.peer(), ?due, "the connection's time is up");
            match due {
                Due::Drain => link.drain(),
                Due::Cut => link.cut(),
            }
        }
        match room {
            Room::Free => Next::Accept(until),
            Room::For(link) => {
                client_log!(warn,
                    peer = %link.peer(),
                    max_newcomers = self.limits.max_newcomers,
                    "too many connections that choose no export: the oldest is closed"
                );
                link.cut();
                Next::Accept(until)
            }
            Room::From(moment) => Next::Wait(until.map_or(moment, |until| until.min(moment))),
        }
    }

    /// Ends connections: what they received is answered, what takes longer than `grace` is cut.
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

    /// Ends connections at once.
    pub fn cut(&self, mut links: Vec<Arc<Link>>) {
        for link in &links {
            link.cut();
        }
        self.wait_for_end(&mut links, CUT_WAIT);
    }

    /// Waits until all of them have ended, takes out those that have.
    fn wait_for_end(&self, links: &mut Vec<Arc<Link>>, time: Duration) {
        let deadline = Instant::now().checked_add(time);
        let mut tables = self.lock();
        // One after the other: each look is at one that has not ended, however often others end.
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
