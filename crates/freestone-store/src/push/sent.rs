//! Uploads of a push: each object is sent once, or an existing object is reused.

use crate::rt::sync::atomic::{AtomicU64, Ordering};
use crate::rt::sync::{Mutex, PoisonError};
use crate::rt::thread;
use crate::rt::time::{Duration, SystemTime};
use std::collections::HashMap;

use crate::clock::Clock;
use crate::format::chunk::{Plain, STORED_BYTES_MAX};
use crate::format::map::ChunkRef;
use crate::format::name::{Kind, Name};
use crate::objects::Until;
use crate::parallel;
use crate::store::{Error, MAPS, Result, Store, chunk_key};
use crate::timing::{DELETE_SETTLES, LOOK_TO_DELETE, is_reusable, may_be_in_deletion};

/// Interval between checks for cancellation.
const STEP: Duration = Duration::from_millis(50);

/// Objects that a push sent or reused.
pub struct Uploads<'a> {
    /// The store was empty before this push.
    is_new: bool,
    clock: &'a Clock<'a>,
    stored: Mutex<HashMap<Name, u32>>,
    /// Rewritten objects that a prune may have been about to delete, with the time of the write (host clock).
    renewed: Mutex<Vec<(String, Duration)>>,
    chunks: AtomicU64,
    bytes: AtomicU64,
    reused: AtomicU64,
}

/// Existing object in the store.
#[derive(Clone, Copy)]
struct ExistingObject {
    bytes: u64,
    modified: SystemTime,
}

impl<'a> Uploads<'a> {
    pub fn new(is_new: bool, clock: &'a Clock<'a>) -> Self {
        Self {
            is_new,
            clock,
            stored: Mutex::default(),
            renewed: Mutex::default(),
            chunks: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            reused: AtomicU64::new(0),
        }
    }

    /// Returns the number of chunks sent, and their size in bytes.
    pub fn sent(&self) -> (u64, u64) {
        (self.chunks.load(Ordering::SeqCst), self.bytes.load(Ordering::SeqCst))
    }

    pub fn reused(&self) -> u64 {
        self.reused.load(Ordering::SeqCst)
    }

    /// Stores pages as a chunk unless the store has it. `known` are chunks of the parent image.
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
        let mut found = None;
        let mut reusable = before.or_else(|| known.get(&name).copied());
        if reusable.is_none() {
            found = self.find(store, &chunk_key(&name), until)?;
            reusable = found
                .filter(|found| found.bytes <= STORED_BYTES_MAX as u64 && self.is_reusable(store, *found))
                .map(|found| found.bytes as u32);
        }
        let stored = if let Some(stored) = reusable {
            self.reused.fetch_add(1, Ordering::SeqCst);
            stored
        } else {
            let object =
                plain.stored(store.domain()).ok_or(Error::Device(freestone_core::device::Error::NoMemory))?;
            self.write(store, chunk_key(&name), &object, found, until)?;
            self.chunks.fetch_add(1, Ordering::SeqCst);
            self.bytes.fetch_add(object.len() as u64, Ordering::SeqCst);
            object.len() as u32
        };
        self.stored.lock().unwrap_or_else(PoisonError::into_inner).insert(name, stored);
        Ok(ChunkRef { name, stored })
    }

    fn find(&self, store: &Store, key: &str, until: Until<'_>) -> Result<Option<ExistingObject>> {
        if self.is_new {
            return Ok(None);
        }
        let head = store.head(key, until)?;
        Ok(head.map(|head| ExistingObject { bytes: head.bytes, modified: head.modified }))
    }

    /// Returns true if an object is young enough not to be deleted during this push.
    fn is_reusable(&self, store: &Store, found: ExistingObject) -> bool {
        is_reusable(self.clock.age_at_most(found.modified), store.domain().grace)
    }

    /// Writes an object that is missing, or too old to be reused.
    fn write(
        &self,
        store: &Store,
        key: String,
        object: &[u8],
        found: Option<ExistingObject>,
        until: Until<'_>,
    ) -> Result<()> {
        store.write(&key, object, until)?;
        // The age is taken after the write, as the old object existed until then.
        let age = found.map(|found| self.clock.age_at_most(found.modified));
        if age.is_some_and(|age| may_be_in_deletion(age, store.domain().grace)) {
            let mut renewed = self.renewed.lock().unwrap_or_else(PoisonError::into_inner);
            renewed.push((key, store.uptime()));
        }
        Ok(())
    }

    /// Stores a map or page hashes unless the store has them.
    pub fn send_meta(&self, store: &Store, kind: Kind, content: &[u8], until: Until<'_>) -> Result<Name> {
        let (name, object) = store.meta(kind, content)?;
        let key = format!("{MAPS}{name}");
        let found = self.find(store, &key, until)?;
        if !found.is_some_and(|found| self.is_reusable(store, found)) {
            self.write(store, key, &object, found, until)?;
        }
        Ok(name)
    }

    /// Waits until no prune can still delete the rewritten objects, and checks that they exist.
    pub fn check_renewed(&self, store: &Store, threads: usize, until: Until<'_>) -> Result<()> {
        let renewed = std::mem::take(&mut *self.renewed.lock().unwrap_or_else(PoisonError::into_inner));
        let Some((_, youngest)) = renewed.iter().max_by_key(|(_, at)| *at) else { return Ok(()) };
        while store.uptime().saturating_sub(*youngest) < LOOK_TO_DELETE + DELETE_SETTLES {
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
