//! What describes an image: its manifest and maps. Like chunks they are kept in the cache, and fetched once on
//! a host.

use crate::cache::Cache;
use crate::format::name::{Kind, Name};
use crate::objects::Until;
use crate::rt::time::Duration;
use crate::store::{Result, Store};

/// How long another server of the host is waited for that fetches the same.
pub const LOCK_WAIT: Duration = Duration::from_secs(10);

/// An object that is wanted.
pub struct Described<'a> {
    pub store: &'a Store,
    pub cache: Option<&'a Cache>,
    pub kind: Kind,
    pub name: &'a Name,
    pub until: Until<'a>,
}

impl Described<'_> {
    /// From the cache, where it is there and is what its name says; else it is fetched, and `keep` gives it to
    /// the cache.
    pub fn read<T>(
        &self,
        parse: impl Fn(&[u8]) -> Option<T>,
        fetch: impl FnOnce() -> Result<T>,
        keep: impl FnOnce(&Cache, &T),
    ) -> Result<T> {
        let Some(cache) = self.cache else { return fetch() };
        let find = || {
            let is_it = |bytes: &Vec<u8>| self.store.domain().naming.name(self.kind, &[bytes]) == *self.name;
            cache.find_meta(self.name).filter(is_it).and_then(|bytes| parse(&bytes))
        };
        if let Some(found) = find() {
            return Ok(found);
        }
        // Held until the cache has it.
        let _lock = cache.lock_fetch(self.name, self.until.at_most(LOCK_WAIT));
        if let Some(found) = find() {
            return Ok(found);
        }
        let fetched = fetch()?;
        keep(cache, &fetched);
        Ok(fetched)
    }
}
