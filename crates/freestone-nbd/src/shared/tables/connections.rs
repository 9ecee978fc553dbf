//! The connections of a server: their exports, their places in client limits, and their deadlines.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use freestone_core::concurrency_limit::{ConcurrencyLimit, Permit};

use super::Tables;
use crate::address::Address;
use crate::limits::SHUTDOWN_GRACE;
use crate::link::Link;
use crate::shared::export::{Export, JoinError};
use crate::stats::Stats;

/// A connection, from its acceptance to its end.
#[derive(Debug)]
pub struct Connection {
    pub(super) link: Arc<Link>,
    pub(super) listener: u64,
    export: Option<Arc<Export>>,
    /// The places of the connection in the client limits of its export.
    places: Vec<Permit>,
    /// The time of the connection's entry in `Tables::deadlines`, if any.
    deadline: Option<Instant>,
}

/// The action at the deadline of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeadlineAction {
    /// End after replying to the requests received.
    Drain,
    /// End at once.
    Cut,
}

impl Tables {
    /// Adds a connection. Returns None if its listener was removed.
    pub fn connect<E>(
        &mut self,
        listener: u64,
        link: impl FnOnce(u64, &Address) -> Result<Link, E>,
    ) -> Option<Result<Arc<Link>, E>> {
        let id = self.new_id();
        let at = self.listeners.get_mut(&listener)?;
        Some(link(id, &at.address).map(|link| {
            let link = Arc::new(link);
            at.connections.insert(id);
            let connection = Connection {
                link: Arc::clone(&link),
                listener,
                export: None,
                places: Vec::new(),
                deadline: None,
            };
            self.connections.insert(id, connection);
            self.pending_handshakes.add(&link);
            link
        }))
    }

    /// Returns the links of connections that have not chosen an export.
    pub fn links_in_handshake(&self) -> Vec<Arc<Link>> {
        let connections = self.connections.values().filter(|connection| connection.export.is_none());
        connections.map(|connection| Arc::clone(&connection.link)).collect()
    }

    /// Finds an export like [`find`](Self::find), and counts the connection as its user. Fails if a client
    /// limit is full.
    pub fn join_export(&mut self, link: &Link, name: &str) -> Result<Arc<Export>, JoinError> {
        let export = self.find(&link.address, name)?;
        let connection = self.connections.get_mut(&link.id).ok_or(JoinError::ShuttingDown)?;
        debug_assert!(connection.export.is_none(), "a connection uses one export");
        let taken = ConcurrencyLimit::acquire_all(&export.places);
        connection.places = taken.map_err(|full| JoinError::ClientLimit(full.limit()))?;
        connection.export = Some(Arc::clone(&export));
        export.users.fetch_add(1, Ordering::SeqCst);
        self.names.entry(export.name.clone()).or_default().users.insert(link.id);
        Ok(export)
    }

    /// Counts a connection of a predecessor as a user of an export, which must not be a template. Unlike a
    /// client in a handshake, the connection does not wait for the export or for a place.
    pub fn adopt(&mut self, link: &Link, name: &str) -> Result<Arc<Export>, JoinError> {
        let export = self.find(&link.address, name)?;
        // The empty name selects the default export, but a session has the name of its export.
        if export.name != name {
            return Err(JoinError::Unknown);
        }
        export.check_visible(link)?;
        if export.template().is_some() {
            return Err(JoinError::Failed("the export creates a device for each connection".to_owned()));
        }
        if self.holds.contains_key(name) {
            return Err(JoinError::Failed("the device is being replaced".to_owned()));
        }
        self.join_export(link, name)
    }

    /// Holds the exports of a name: clients that choose one wait until [`release`](Self::release). Returns
    /// the links of the connections that use these exports.
    pub fn hold(&mut self, name: &str) -> Vec<Arc<Link>> {
        *self.holds.entry(name.to_owned()).or_default() += 1;
        self.links_of(name)
    }

    /// Ends one [`hold`](Self::hold).
    pub fn release(&mut self, name: &str) {
        let Some(times) = self.holds.get_mut(name) else { return };
        *times -= 1;
        if *times == 0 {
            self.holds.remove(name);
        }
    }

    /// Returns true if the export that `name` selects at an address is held.
    pub fn is_held(&self, address: &Address, name: &str) -> Result<bool, JoinError> {
        let export = self.find(address, name)?;
        Ok(self.holds.contains_key(&export.name))
    }

    /// Removes the connection from the users of its export, and releases its places in client limits. Returns
    /// the export, or None if the connection used none.
    pub fn leave_export(&mut self, link: &Link) -> Option<Arc<Export>> {
        let connection = self.connections.get_mut(&link.id)?;
        connection.places.clear();
        let export = connection.export.take()?;
        self.forget_user(&export, link.id);
        Some(export)
    }

    /// Removes and returns a connection that has ended, or returns None if it was removed before.
    pub fn remove_connection(&mut self, link: &Link) -> Option<Connection> {
        let mut connection = self.connections.remove(&link.id)?;
        // Places are released under the lock, before waiting connections check the limits again.
        connection.places.clear();
        if let Some(at) = self.listeners.get_mut(&connection.listener) {
            at.connections.remove(&link.id);
        }
        if let Some(at) = connection.deadline {
            self.deadlines.remove(&(at, link.id));
        }
        if let Some(export) = &connection.export {
            self.forget_user(export, link.id);
        }
        self.ended_totals.add(&link.counters().read());
        Some(connection)
    }

    fn forget_user(&mut self, export: &Export, id: u64) {
        export.users.fetch_sub(1, Ordering::SeqCst);
        self.change_name(&export.name, |known| known.users.remove(&id));
    }

    /// Returns the totals of current and ended connections.
    pub fn stats(&self) -> Stats {
        let mut sum = self.ended_totals;
        for connection in self.connections.values() {
            sum.add(&connection.link.counters().read());
        }
        sum.accepted = self.accepted;
        sum.refused = self.refused;
        sum.panics = self.panics;
        sum.connections = self.connections.len() as u64;
        sum
    }

    pub fn links<'a>(&self, ids: impl IntoIterator<Item = &'a u64>) -> Vec<Arc<Link>> {
        let connections = ids.into_iter().filter_map(|id| self.connections.get(id));
        connections.map(|connection| Arc::clone(&connection.link)).collect()
    }

    /// Sets the deadline of a connection. Returns true if this is the earliest of all deadlines.
    pub fn expire_at(&mut self, link: &Link, moment: Instant) -> bool {
        self.set_deadline(link.id, moment, DeadlineAction::Drain);
        self.deadlines.first_key_value().is_some_and(|(key, _)| *key == (moment, link.id))
    }

    fn set_deadline(&mut self, id: u64, moment: Instant, due: DeadlineAction) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.deadline = Some(moment);
            self.deadlines.insert((moment, id), due);
        }
    }

    /// Removes the expired deadlines, and returns their connections and actions. Also returns the next
    /// deadline.
    pub fn take_expired(&mut self, now: Instant) -> (Vec<(Arc<Link>, DeadlineAction)>, Option<Instant>) {
        let mut expired = Vec::new();
        while let Some(first) = self.deadlines.first_entry() {
            let (moment, id) = *first.key();
            if moment > now {
                return (expired, Some(moment));
            }
            let due = first.remove();
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            connection.deadline = None;
            expired.push((Arc::clone(&connection.link), due));
            if due == DeadlineAction::Drain {
                self.set_deadline(id, now + SHUTDOWN_GRACE, DeadlineAction::Cut);
            }
        }
        (expired, None)
    }
}
