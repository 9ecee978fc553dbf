//! Reads descriptions of an image (manifest and maps) through the cache. Like a chunk, each description is
//! fetched once per host.

use crate::cache::Cache;
use crate::format::name::{Kind, Name};
use crate::objects::CallLimits;
use crate::rt::time::Duration;
use crate::store::{Result, Store};

/// Longest wait for another server of this host that fetches the same object.
pub const LOCK_WAIT: Duration = Duration::from_secs(10);

/// Image description to read, and where to read it.
pub struct Description<'a> {
    pub store: &'a Store,
    pub cache: Option<&'a Cache>,
    pub kind: Kind,
    pub name: &'a Name,
    pub limits: CallLimits<'a>,
}

impl Description<'_> {
    /// Returns the cached description if its hash is right. Otherwise fetches the description, and passes it
    /// to `keep`, which adds it to the cache.
    pub fn read<T>(
        &self,
        parse: impl Fn(&[u8]) -> Option<T>,
        fetch: impl FnOnce() -> Result<T>,
        keep: impl FnOnce(&Cache, &T),
    ) -> Result<T> {
        freestone_core::trail::step!();
        let Some(cache) = self.cache else { return fetch() };
        let find = || {
            let is_it = |bytes: &Vec<u8>| self.store.domain().naming.name(self.kind, &[bytes]) == *self.name;
            cache.get_meta(self.name).filter(is_it).and_then(|bytes| parse(&bytes))
        };
        if let Some(found) = find() {
            return Ok(found);
        }
        // The lock is released when the description is in the cache.
        let _lock = cache.lock_fetch(self.name, self.limits.at_most(LOCK_WAIT));
        if let Some(found) = find() {
            return Ok(found);
        }
        let fetched = fetch()?;
        keep(cache, &fetched);
        Ok(fetched)
    }
}
