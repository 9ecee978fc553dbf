//! Connections that have not chosen an export: nobody knows yet who is at the other end, so they are
//! few, and nobody keeps others out for long.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::link::Link;

/// Longest time that one is left alone; a sum with the clock never overflows.
const GRACE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Those connections.
#[derive(Debug, Default)]
pub struct Newcomers {
    /// By identifier, so in the order in which they came.
    all: BTreeMap<u64, (Instant, Arc<Link>)>,
    /// Somebody waits until there is room.
    is_waited_for: bool,
}

/// Whether one more may come.
#[derive(Debug)]
pub enum Room {
    /// It may.
    Free,
    /// It may, in the place of this one, which was here for longer than anybody needs.
    For(Arc<Link>),
    /// Not before this moment, or before one has gone.
    From(Instant),
}

impl Newcomers {
    /// One has come.
    pub fn add(&mut self, link: &Arc<Link>) {
        self.all.insert(link.id, (Instant::now(), Arc::clone(link)));
    }

    /// One has chosen an export, or has left. True: somebody waits for its place and is to be told.
    pub fn remove(&mut self, id: u64) -> bool {
        self.all.remove(&id).is_some() && std::mem::take(&mut self.is_waited_for)
    }

    /// Whether there is room for one more of at most `max`, of which each is left alone for `grace`.
    pub fn room(&mut self, max: usize, grace: Duration, now: Instant) -> Room {
        if self.all.len() < max.max(1) {
            return Room::Free;
        }
        let Some(oldest) = self.all.first_entry() else { return Room::Free };
        let due = oldest.get().0 + grace.min(GRACE_MAX);
        if due <= now {
            return Room::For(oldest.remove().1);
        }
        self.is_waited_for = true;
        Room::From(due)
    }
}
