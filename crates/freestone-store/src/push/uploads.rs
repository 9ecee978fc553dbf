//! Uploads of a push: each chunk or map is sent once, or an existing object of the store is reused.

use crate::rt::sync::atomic::{AtomicU64, Ordering};
use crate::rt::thread;
use crate::rt::time::{Duration, SystemTime};
use freestone_core::sync::Mutex;
use std::collections::HashMap;

use crate::clock::Clock;
use crate::format::chunk::{Plain, STORED_BYTES_MAX};
use crate::format::map::ChunkRef;
use crate::format::name::{Kind, Name};
use crate::objects::CallLimits;
use crate::parallel;
use crate::store::{Error, MAPS, Result, Store, chunk_key};
use crate::timing::{DELETION_SETTLE_TIME, DELETION_TIME_MAX, is_reusable, may_be_in_deletion};

/// Interval between checks for cancellation while waiting for concurrent prunes.
const STEP: Duration = Duration::from_millis(50);

/// Record of the objects that a push sent or reused.
pub struct Uploads<'a> {
    /// True if the store was empty before this push, so no object has to be looked up.
    is_new: bool,
    clock: &'a Clock<'a>,
    stored: Mutex<HashMap<Name, u32>>,
    /// Keys of rewritten objects that a prune may have been about to delete, with the host clock after the
    /// write.
    renewed: Mutex<Vec<(String, Duration)>>,
    chunks: AtomicU64,
    bytes: AtomicU64,
    reused: AtomicU64,
}

/// Object that already exists in the object store.
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

    /// Returns the number of chunks sent, and their total stored size in bytes.
    pub fn sent(&self) -> (u64, u64) {
        (self.chunks.load(Ordering::SeqCst), self.bytes.load(Ordering::SeqCst))
    }

    pub fn reused(&self) -> u64 {
        self.reused.load(Ordering::SeqCst)
    }

    /// Stores pages as a chunk, unless the store already has a reusable chunk with this content. `known` are
    /// the chunks of the parent image and their stored sizes in bytes.
    pub fn send(
        &self,
        store: &Store,
        pages: &[u8],
        known: &HashMap<Name, u32>,
        limits: CallLimits<'_>,
    ) -> Result<ChunkRef> {
        let plain = Plain::new(store.domain(), pages);
        let name = plain.name();
        let before = self.stored.lock().get(&name).copied();
        let mut found = None;
        let mut reusable = before.or_else(|| known.get(&name).copied());
        if reusable.is_none() {
            found = self.find(store, &chunk_key(&name), limits)?;
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
            self.write(store, chunk_key(&name), &object, found, limits)?;
            self.chunks.fetch_add(1, Ordering::SeqCst);
            self.bytes.fetch_add(object.len() as u64, Ordering::SeqCst);
            object.len() as u32
        };
        self.stored.lock().insert(name, stored);
        Ok(ChunkRef { name, stored })
    }

    fn find(&self, store: &Store, key: &str, limits: CallLimits<'_>) -> Result<Option<ExistingObject>> {
        if self.is_new {
            return Ok(None);
        }
        let head = store.head(key, limits)?;
        Ok(head.map(|head| ExistingObject { bytes: head.bytes, modified: head.modified }))
    }

    /// Returns true if an existing object is so young that no prune deletes it during this push.
    fn is_reusable(&self, store: &Store, found: ExistingObject) -> bool {
        is_reusable(self.clock.max_age(found.modified), store.domain().grace)
    }

    /// Writes an object that is missing in the store, or is too old to be reused.
    fn write(
        &self,
        store: &Store,
        key: String,
        object: &[u8],
        found: Option<ExistingObject>,
        limits: CallLimits<'_>,
    ) -> Result<()> {
        store.write(&key, object, limits)?;
        // The age is computed after the write, as the old object could be deleted until then.
        let age = found.map(|found| self.clock.max_age(found.modified));
        if age.is_some_and(|age| may_be_in_deletion(age, store.domain().grace)) {
            let mut renewed = self.renewed.lock();
            renewed.push((key, store.uptime()));
        }
        Ok(())
    }

    /// Stores a map or page hashes, unless the store already has a reusable object with this content. Returns
    /// its name.
    pub fn send_meta(
        &self,
        store: &Store,
        kind: Kind,
        content: &[u8],
        limits: CallLimits<'_>,
    ) -> Result<Name> {
        let (name, object) = store.meta(kind, content)?;
        let key = format!("{MAPS}{name}");
        let found = self.find(store, &key, limits)?;
        if !found.is_some_and(|found| self.is_reusable(store, found)) {
            self.write(store, key, &object, found, limits)?;
        }
        Ok(name)
    }

    /// Waits until no prune can still delete the rewritten objects, then checks that all of them exist.
    pub fn check_renewed(&self, store: &Store, threads: usize, limits: CallLimits<'_>) -> Result<()> {
        let renewed = std::mem::take(&mut *self.renewed.lock());
        let Some((_, youngest)) = renewed.iter().max_by_key(|(_, at)| *at) else { return Ok(()) };
        while store.uptime().saturating_sub(*youngest) < DELETION_TIME_MAX + DELETION_SETTLE_TIME {
            limits.check().map_err(|fault| Error::of(MAPS, fault))?;
            thread::sleep(STEP);
        }
        parallel::for_each(threads, renewed.len(), |at| {
            let key = &renewed[at].0;
            let is_there = store.head(key, limits)?.is_some();
            if is_there { Ok(()) } else { Err(Error::ObjectPruned(key.clone())) }
        })
    }
}
