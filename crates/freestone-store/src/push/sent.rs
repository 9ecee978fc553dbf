//! The chunks of a push: each is sent once, or found.

use crate::rt::sync::atomic::{AtomicU64, Ordering};
use crate::rt::sync::{Mutex, PoisonError};
use crate::rt::thread;
use crate::rt::time::{Duration, Instant, SystemTime};
use std::collections::HashMap;

use crate::format::chunk::{Plain, STORED_BYTES_MAX};
use crate::format::map::ChunkRef;
use crate::format::name::{Kind, Name};
use crate::objects::Until;
use crate::parallel;
use crate::store::{Error, MAPS, Result, Store, chunk_key};

/// A prune looks at an object once more just before it deletes it, and the deletion is done, or given
/// up, so long after that at most. The same time is taken off the age of what counts as old, for clocks
/// that tell whole seconds.
pub const LOOK_TO_DELETE: Duration = Duration::from_secs(30);
/// A push waits this much longer than that.
const WAIT_MORE: Duration = Duration::from_secs(5);
/// How often it is asked meanwhile whether anybody still wants it.
const STEP: Duration = Duration::from_millis(50);

/// What was sent, and what was found.
pub struct Sent {
    /// Nothing was there before.
    is_new: bool,
    begun: Instant,
    /// What the clock of the store said then.
    store_began: SystemTime,
    stored: Mutex<HashMap<Name, u32>>,
    /// Written again though they were so old that a prune may have been about to delete them.
    renewed: Mutex<Vec<(String, Instant)>>,
    chunks: AtomicU64,
    bytes: AtomicU64,
    reused: AtomicU64,
}

impl Sent {
    pub fn new(is_new: bool, begun: Instant, store_began: SystemTime) -> Self {
        Self {
            is_new,
            begun,
            store_began,
            stored: Mutex::default(),
            renewed: Mutex::default(),
            chunks: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            reused: AtomicU64::new(0),
        }
    }

    /// Chunks, and their bytes.
    pub fn sent(&self) -> (u64, u64) {
        (self.chunks.load(Ordering::SeqCst), self.bytes.load(Ordering::SeqCst))
    }

    pub fn reused(&self) -> u64 {
        self.reused.load(Ordering::SeqCst)
    }

    /// How old something is by the clock of the store.
    fn age(&self, modified: SystemTime) -> Duration {
        (self.store_began + self.begun.elapsed()).duration_since(modified).unwrap_or_default()
    }

    /// Sees to it that pages are in the store as a chunk. `known` are chunks that are there for sure.
    pub fn send(
        &self,
        store: &Store,
        pages: &[u8],
        known: &HashMap<Name, u32>,
        until: Until<'_>,
    ) -> Result<ChunkRef> {
        let plain = Plain::new(store.domain(), pages);
        let name = plain.name();
        let before = self.stored.lock().unwrap_or_else(PoisonError::into_inner).get(&name).copied();
        let found = match before.or_else(|| known.get(&name).copied()) {
            Some(stored) => Some(stored),
            None if self.is_new => None,
            None => {
                let found = self.find(store, &chunk_key(&name), until)?;
                found.filter(|bytes| *bytes <= STORED_BYTES_MAX as u64).map(|bytes| bytes as u32)
            }
        };
        let stored = if let Some(stored) = found {
            self.reused.fetch_add(1, Ordering::SeqCst);
            stored
        } else {
            let object =
                plain.stored(store.domain()).ok_or(Error::Device(freestone_core::device::Error::NoMemory))?;
            store.write(&chunk_key(&name), &object, until)?;
            self.chunks.fetch_add(1, Ordering::SeqCst);
            self.bytes.fetch_add(object.len() as u64, Ordering::SeqCst);
            object.len() as u32
        };
        self.stored.lock().unwrap_or_else(PoisonError::into_inner).insert(name, stored);
        Ok(ChunkRef { name, stored })
    }

    /// The length of an object that is there and young enough to stay.
    fn find(&self, store: &Store, key: &str, until: Until<'_>) -> Result<Option<u64>> {
        let Some(head) = store.head(key, until)? else { return Ok(None) };
        let (age, grace) = (self.age(head.modified), store.domain().grace);
        if age + LOOK_TO_DELETE >= grace {
            let mut renewed = self.renewed.lock().unwrap_or_else(PoisonError::into_inner);
            renewed.push((key.to_owned(), Instant::now()));
        }
        Ok((age <= grace / 2).then_some(head.bytes))
    }

    /// Sees to it that what describes a part of the image is in the store.
    pub fn send_meta(&self, store: &Store, kind: Kind, content: &[u8], until: Until<'_>) -> Result<Name> {
        let (name, object) = store.meta(kind, content)?;
        let key = format!("{MAPS}{name}");
        if self.is_new || self.find(store, &key, until)?.is_none() {
            store.write(&key, &object, until)?;
        }
        Ok(name)
    }

    /// Looks whether what was written again is there when nobody can be about to delete it any more.
    pub fn check_renewed(&self, store: &Store, threads: usize, until: Until<'_>) -> Result<()> {
        let renewed = std::mem::take(&mut *self.renewed.lock().unwrap_or_else(PoisonError::into_inner));
        let Some((_, youngest)) = renewed.iter().max_by_key(|(_, at)| *at) else { return Ok(()) };
        // They were written after that.
        while youngest.elapsed() < LOOK_TO_DELETE + WAIT_MORE {
            until.check().map_err(|fault| Error::of(MAPS, fault))?;
            thread::sleep(STEP);
        }
        parallel::for_each(threads, renewed.len(), |at| {
            let key = &renewed[at].0;
            let is_there = store.head(key, until)?.is_some();
            if is_there { Ok(()) } else { Err(Error::Pruned(key.clone())) }
        })
    }
}
