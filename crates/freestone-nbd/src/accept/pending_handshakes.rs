//! Connections in handshake: they have not chosen an export yet.
//!
//! [`PendingHandshakes`] limits their number, since an unauthenticated client can open any number of
//! connections. The tables of the server contain it, and their lock guards it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::link::Link;

/// Longest grace time used, so that adding it to the current time cannot overflow.
const GRACE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// The connections of a server that are in handshake.
#[derive(Debug, Default)]
pub struct PendingHandshakes {
    /// Start time and link of each connection by identifier, oldest first.
    links: BTreeMap<u64, (Instant, Arc<Link>)>,
    /// Set while the acceptor waits for a handshake to end.
    is_waited_for: bool,
}

/// Whether the acceptor may accept one more connection.
#[derive(Debug)]
pub enum Admission {
    Accept,
    /// Accept, after closing this connection, which is older than the grace time.
    Replace(Arc<Link>),
    /// Ask again at this time, or earlier if a handshake ends.
    Wait(Instant),
}

impl PendingHandshakes {
    pub fn add(&mut self, link: &Arc<Link>) {
        self.links.insert(link.id, (Instant::now(), Arc::clone(link)));
    }

    /// Removes a connection that chose an export or was closed. Returns true if the acceptor waits for a
    /// handshake to end.
    pub fn remove(&mut self, id: u64) -> bool {
        self.links.remove(&id).is_some() && std::mem::take(&mut self.is_waited_for)
    }

    /// Decides whether one more connection can be accepted if at most `max` may be in handshake. At the
    /// limit, the oldest connection is removed to make room if its age is at least `grace`.
    pub fn admit(&mut self, max: usize, grace: Duration, now: Instant) -> Admission {
        if self.links.len() < max.max(1) {
            return Admission::Accept;
        }
        let Some(oldest) = self.links.first_entry() else { return Admission::Accept };
        let due = oldest.get().0 + grace.min(GRACE_MAX);
        if due <= now {
            return Admission::Replace(oldest.remove().1);
        }
        self.is_waited_for = true;
        Admission::Wait(due)
    }
}
