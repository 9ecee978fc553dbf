//! A store and its domain: reads and verifies objects, and writes them. Requests are retried if that can
//! help.

mod again;
mod conditions;
mod error;
mod tags;
mod traces;
mod traffic;

use crate::rt::sync::Arc;
use crate::rt::time::{Duration, SystemTime};
use std::collections::BTreeMap;
use std::ops::Range;

use crate::format::chunk;
use crate::format::domain::{self, Domain, Secret, Written};
use crate::format::manifest::{self, Manifest};
use crate::format::map::{self, Hashes, Map};
use crate::format::meta;
use crate::format::name::{Kind, Name};
use crate::objects::{Fault, Head, Listed, Objects, Read, Until, Version, When};

pub use again::TRY_MAX;
use again::again;
pub use error::{Error, Result};
pub use tags::TagRead;
pub use traces::CHUNKS_MAX;
use traffic::Counted;
pub use traffic::{Requests, Traffic};

/// Timeout of one attempt to list objects. A listing may consist of many pages.
const LIST_MAX: Duration = Duration::from_secs(300);
/// Maximum number of listings that [`Store::list_all`] merges. A prefix under constant change adds keys to
/// each.
const LISTINGS_MAX: usize = 10;
/// Key prefix of manifests.
pub const MANIFESTS: &str = "manifests/";
/// Key prefix of maps and page hashes.
pub const MAPS: &str = "maps/";
/// Key prefix of chunks, which are spread over 256 subdirectories.
pub const CHUNKS: &str = "chunks/";
/// Key prefix of tags.
pub const TAGS: &str = "tags/";
/// Key prefix of traces.
pub const TRACES: &str = "traces/";
/// Key prefix of the temporary objects that read the clock of the store.
pub const CLOCKS: &str = "clocks/";

/// An open store with the keys of its domain.
pub struct Store {
    objects: Counted,
    domain: Domain,
    written: Written,
}

/// Returns the key of the object that holds a chunk.
pub fn chunk_key(name: &Name) -> String {
    let name = name.to_string();
    format!("{CHUNKS}{}/{name}", &name[..2])
}

/// Settings of a new store.
#[derive(Debug, Clone, Copy)]
pub struct Begin {
    /// Encrypt the objects. Requires a key file.
    pub encrypted: bool,
    /// Grace period: minimum age at which a prune deletes an unused object.
    pub grace: Duration,
}

impl Store {
    /// Opens an existing store.
    ///
    /// # Errors
    /// [`Error::NoStore`], [`Error::Refused`], and errors of the store.
    pub fn open(objects: Arc<dyn Objects>, secret: Option<&Secret>, until: Until<'_>) -> Result<Self> {
        match Self::described(&*objects, until)? {
            Some(written) => Self::of(objects, written, secret),
            None => Err(Error::NoStore(objects.url().to_owned())),
        }
    }

    /// Opens a store whose [description](Self::description) is known, without a request.
    ///
    /// # Errors
    /// [`Error::Refused`].
    pub fn open_known(
        objects: Arc<dyn Objects>,
        description: &[u8],
        secret: Option<&Secret>,
    ) -> Result<Self> {
        match Written::parse(description) {
            Ok(written) => Self::of(objects, written, secret),
            Err(refused) => Err(Error::Refused(objects.url().to_owned(), refused)),
        }
    }

    /// Returns the content of `freestone.json`.
    pub fn description(&self) -> Vec<u8> {
        self.written.bytes()
    }

    /// Returns the name under which a cache stores the description of the store at `url`.
    pub fn place(url: &str) -> Name {
        Name(*blake3::hash(&[b"freestone.json of ", url.as_bytes()].concat()).as_bytes())
    }

    /// Opens a store, or creates it. Returns true with the store if this call created it. A store that does
    /// not support conditional writes is not created.
    ///
    /// # Errors
    /// [`Error::Refused`], and errors of the store.
    pub fn open_or_begin(
        objects: Arc<dyn Objects>,
        secret: Option<&Secret>,
        begin: Begin,
        until: Until<'_>,
    ) -> Result<(Self, bool)> {
        let mut is_new = false;
        loop {
            if let Some(written) = Self::described(&*objects, until)? {
                let store = Self::of(objects, written, secret)?;
                if begin.encrypted && store.domain.sealing.is_none() {
                    return Err(Error::Refused(store.url().to_owned(), domain::Refused::NotEncrypted));
                }
                return Ok((store, is_new));
            }
            let (_, written) = Domain::new(secret, begin.encrypted, begin.grace);
            // A description that this program could not open must not be written.
            let opened = written.open(secret);
            opened.map_err(|refused| Error::Refused(objects.url().to_owned(), refused))?;
            conditions::check(&*objects, until)?;
            let put = || objects.put(domain::KEY, &written.bytes(), When::Absent, until.at_most(TRY_MAX));
            match again(until, put) {
                Ok(_) => is_new = true,
                // Another client created the store, or our response was lost. Then the store is treated as
                // not new.
                Err(Fault::Condition) => {}
                Err(fault) => return Err(Error::of(domain::KEY, fault)),
            }
        }
    }

    fn described(objects: &dyn Objects, until: Until<'_>) -> Result<Option<Written>> {
        let get = || objects.get(domain::KEY, None, domain::BYTES_MAX, until.at_most(TRY_MAX));
        match again(until, get) {
            Ok(read) => match Written::parse(&read.bytes) {
                Ok(written) => Ok(Some(written)),
                Err(refused) => Err(Error::Refused(objects.url().to_owned(), refused)),
            },
            Err(Fault::NotFound) => Ok(None),
            Err(fault) => Err(Error::of(domain::KEY, fault)),
        }
    }

    fn of(objects: Arc<dyn Objects>, written: Written, secret: Option<&Secret>) -> Result<Self> {
        match written.open(secret) {
            Ok(domain) => {
                Ok(Self { objects: Counted { inner: objects, traffic: Traffic::default() }, domain, written })
            }
            Err(refused) => Err(Error::Refused(objects.url().to_owned(), refused)),
        }
    }

    /// Returns the URL of the store, without credentials.
    pub fn url(&self) -> &str {
        self.objects.url()
    }

    /// Returns the domain with its keys.
    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    /// Returns the object storage below this store.
    pub fn objects(&self) -> &dyn Objects {
        &self.objects
    }

    /// Returns the request counters since the store was opened.
    pub fn requests(&self) -> Requests {
        self.objects.traffic.requests()
    }

    /// Reads an object of at most `most` bytes, with retries.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn read(&self, key: &str, most: u64, until: Until<'_>) -> Result<Read> {
        let read = again(until, || self.objects.get(key, None, most, until.at_most(TRY_MAX)));
        read.map_err(|fault| Error::of(key, fault))
    }

    /// Writes an object whose key depends on its content. Another write of the object only renews its age.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn write(&self, key: &str, bytes: &[u8], until: Until<'_>) -> Result<()> {
        let put = || self.objects.put(key, bytes, When::Always, until.at_most(TRY_MAX));
        again(until, put).map(drop).map_err(|fault| Error::of(key, fault))
    }

    /// Returns the metadata of an object, or `None` if the object does not exist.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn head(&self, key: &str, until: Until<'_>) -> Result<Option<Head>> {
        match again(until, || self.objects.head(key, until.at_most(TRY_MAX))) {
            Ok(head) => Ok(Some(head)),
            Err(Fault::NotFound) => Ok(None),
            Err(fault) => Err(Error::of(key, fault)),
        }
    }

    /// Deletes an object.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn delete(&self, key: &str, until: Until<'_>) -> Result<()> {
        let delete = || self.objects.delete(key, until.at_most(TRY_MAX));
        again(until, delete).map_err(|fault| Error::of(key, fault))
    }

    /// Deletes an object with a single attempt, so no deletion is pending after the return if the store
    /// responds in time. Returns true if the store checked `version`, false if it cannot.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn delete_once(
        &self,
        key: &str,
        version: Option<&Version>,
        until: Until<'_>,
    ) -> crate::objects::Result<bool> {
        if let Some(version) = version {
            match self.objects.delete_unchanged(key, version, until) {
                Err(Fault::Unsupported(_)) => {}
                deleted => return deleted.map(|()| true),
            }
        }
        self.objects.delete(key, until).map(|()| false)
    }

    /// Lists objects. `each` receives `(false, Some(object))` for each object, and `(true, None)` at the
    /// start of every attempt: objects of earlier attempts must then be dropped. `each` returns false to end
    /// the listing.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn list(
        &self,
        prefix: &str,
        until: Until<'_>,
        each: &mut dyn FnMut(bool, Option<Listed>) -> bool,
    ) -> Result<()> {
        let listed = again(until, || {
            each(true, None);
            self.objects.list(prefix, &mut |listed| each(false, Some(listed)), until.at_most(LIST_MAX))
        });
        listed.map_err(|fault| Error::of(prefix, fault))
    }

    /// Lists objects for decisions about deletion. Returns their keys and modification times. A listing may
    /// omit an object that is replaced meanwhile, so listings are merged until one adds no key. Each listing
    /// ends after `most` objects.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn list_all(
        &self,
        prefix: &str,
        most: usize,
        until: Until<'_>,
    ) -> Result<BTreeMap<String, SystemTime>> {
        let mut all = BTreeMap::new();
        for _ in 0..LISTINGS_MAX {
            let mut now = BTreeMap::new();
            self.list(prefix, until, &mut |is_again, listed| {
                if is_again {
                    now.clear();
                }
                now.extend(listed.map(|listed| (listed.key, listed.modified)));
                now.len() < most
            })?;
            let before = all.len();
            all.extend(now);
            if all.len() == before {
                break;
            }
        }
        Ok(all)
    }

    /// Reads the clock that measures times between requests, which also counts while this host sleeps.
    pub fn uptime(&self) -> Duration {
        self.objects.uptime()
    }

    /// Reads the clock that stamps objects, by writing a temporary object.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn now(&self, until: Until<'_>) -> Result<SystemTime> {
        let key = format!("{CLOCKS}{}", crate::rt::unique_id());
        self.write(&key, b"", until)?;
        let head = self.head(&key, until)?;
        self.delete(&key, until)?;
        head.map(|head| head.modified).ok_or_else(|| Error::of(&key, Fault::NotFound))
    }

    // ---- objects named by their content ---------------------------------------------------------

    fn read_meta(
        &self,
        dir: &str,
        kind: Kind,
        name: &Name,
        most: usize,
        until: Until<'_>,
    ) -> Result<Vec<u8>> {
        self.verified(&format!("{dir}{name}"), None, meta::STORED_BYTES_MAX, until, |object| {
            meta::content(&self.domain, kind, name, object, most)
        })
    }

    /// Reads and verifies an object. A mismatch is retried, as a proxy or a disk of the store may have
    /// corrupted the data.
    fn verified<T>(
        &self,
        key: &str,
        part: Option<&Range<u64>>,
        most: u64,
        until: Until<'_>,
        verify: impl Fn(&[u8]) -> std::result::Result<T, chunk::Damaged>,
    ) -> Result<T> {
        let mut damaged = None;
        let read = again(until, || {
            damaged = None;
            let read = self.objects.get(key, part.cloned(), most, until.at_most(TRY_MAX))?;
            verify(&read.bytes).map_err(|error| {
                damaged = Some(error);
                Fault::Transient(error.to_string())
            })
        });
        read.map_err(|fault| match (damaged, fault) {
            (Some(error), Fault::Transient(_) | Fault::Late) => {
                Error::Damaged(key.to_owned(), error.to_string())
            }
            (_, fault) => Error::of(key, fault),
        })
    }

    /// Writes a description of an image under its hash, and returns the hash.
    ///
    /// # Errors
    /// [`Error::TooLarge`], and errors of the store.
    pub fn write_meta(&self, dir: &str, kind: Kind, content: &[u8], until: Until<'_>) -> Result<Name> {
        let (name, object) = self.meta(kind, content)?;
        self.write(&format!("{dir}{name}"), &object, until)?;
        Ok(name)
    }

    /// Returns the name and the object of a description of an image.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn meta(&self, kind: Kind, content: &[u8]) -> Result<(Name, Vec<u8>)> {
        meta::stored(&self.domain, kind, content).ok_or(Error::TooLarge)
    }

    /// Reads the manifest of an image.
    ///
    /// # Errors
    /// Errors of the store; [`Error::Damaged`].
    pub fn manifest(&self, name: &Name, until: Until<'_>) -> Result<Manifest> {
        let bytes = self.read_meta(MANIFESTS, Kind::Manifest, name, manifest::BYTES_MAX, until)?;
        Manifest::parse(&bytes).map_err(|why| Error::Damaged(format!("{MANIFESTS}{name}"), why))
    }

    /// Reads a map.
    ///
    /// # Errors
    /// Errors of the store; [`Error::Damaged`].
    pub fn map(&self, name: &Name, until: Until<'_>) -> Result<Map> {
        let bytes = self.read_meta(MAPS, Kind::Map, name, map::BYTES_MAX, until)?;
        Map::parse(&bytes).ok_or_else(|| Error::Damaged(format!("{MAPS}{name}"), "not a valid map".into()))
    }

    /// Reads the page hashes of a map.
    ///
    /// # Errors
    /// Errors of the store; [`Error::Damaged`].
    pub fn hashes(&self, name: &Name, map: &Map, until: Until<'_>) -> Result<Hashes> {
        let bytes = self.read_meta(MAPS, Kind::Hashes, name, map::HASHES_BYTES_MAX, until)?;
        let damaged = || Error::Damaged(format!("{MAPS}{name}"), "page hashes do not match the map".into());
        Hashes::parse(&bytes, map).ok_or_else(damaged)
    }

    /// Reads the pages of a chunk.
    ///
    /// # Errors
    /// Errors of the store; [`Error::Damaged`].
    pub fn chunk(&self, name: &Name, until: Until<'_>) -> Result<Vec<u8>> {
        let most = chunk::STORED_BYTES_MAX as u64;
        self.verified(&chunk_key(name), None, most, until, |object| chunk::pages(&self.domain, name, object))
    }

    /// Reads the pages of one unit of a chunk without the other units. Empty after the end of the chunk.
    ///
    /// # Errors
    /// Errors of the store; [`Error::Damaged`].
    pub fn unit(&self, name: &Name, unit: usize, until: Until<'_>) -> Result<Vec<u8>> {
        let (key, domain) = (chunk_key(name), &self.domain);
        let first = 0..chunk::HEAD_BYTES_MAX as u64;
        let head = self.verified(&key, Some(&first), chunk::HEAD_BYTES_MAX as u64, until, |part| {
            chunk::Head::parse(domain, name, part)
        })?;
        match head.place(unit) {
            Some(place) => {
                let most = place.end - place.start;
                self.verified(&key, Some(&place), most, until, |part| head.unit(domain, unit, part))
            }
            None => Ok(Vec::new()),
        }
    }
}
