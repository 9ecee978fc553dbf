//! Connections in handshake: they have not chosen an export yet.
//!
//! [`PendingHandshakes`] bounds them, since an unauthenticated client can open any number. It belongs to the tables
//! of the server and is used under their lock.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::link::Link;

/// Largest grace time used, so that the sum with the clock cannot overflow.
const GRACE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// The connections in handshake of a server.
#[derive(Debug, Default)]
pub struct PendingHandshakes {
    /// By connection number, oldest first.
    links: BTreeMap<u64, (Instant, Arc<Link>)>,
    /// The acceptor waits for a handshake to end.
    is_waited_for: bool,
}

/// Whether the acceptor may accept one more connection.
#[derive(Debug)]
pub enum Admission {
    Now,
    /// Now, after closing this connection, which is older than the grace time.
    Instead(Arc<Link>),
    /// At this time, or earlier if a handshake ends.
    At(Instant),
}

impl PendingHandshakes {
    pub fn add(&mut self, link: &Arc<Link>) {
        self.links.insert(link.id, (Instant::now(), Arc::clone(link)));
    }

    /// Removes a connection that chose an export or was closed. Returns true if the acceptor waits for that.
    pub fn remove(&mut self, id: u64) -> bool {
        self.links.remove(&id).is_some() && std::mem::take(&mut self.is_waited_for)
    }

    /// Decides whether one more connection can be accepted with at most `max` in handshake. A connection of at
    /// least the age `grace` is removed to make room.
    pub fn admit(&mut self, max: usize, grace: Duration, now: Instant) -> Admission {
        if self.links.len() < max.max(1) {
            return Admission::Now;
        }
        let Some(oldest) = self.links.first_entry() else { return Admission::Now };
        let due = oldest.get().0 + grace.min(GRACE_MAX);
        if due <= now {
            return Admission::Instead(oldest.remove().1);
        }
        self.is_waited_for = true;
        Admission::At(due)
    }
}
