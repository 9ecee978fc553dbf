//! An image store and its domain. Reads and verifies objects, and writes them. Requests are retried if the
//! failure may be temporary.

mod conditions;
mod error;
mod retry;
mod tags;
mod traces;
mod traffic;

use crate::rt::sync::Arc;
use crate::rt::time::{Duration, SystemTime};
use std::collections::BTreeMap;
use std::ops::Range;

use crate::format::chunk;
use crate::format::domain::{self, Domain, DomainDescription, Secret};
use crate::format::manifest::{self, Manifest};
use crate::format::map::{self, Hashes, Map};
use crate::format::meta;
use crate::format::name::{Kind, Name};
use crate::objects::{CallLimits, Fault, Head, ListEntry, Objects, Read, Version, WriteCondition};

pub use error::{Error, Result};
pub use retry::TRY_MAX;
use retry::retry;
pub use tags::TagRead;
pub use traces::CHUNKS_MAX;
use traffic::CountedObjects;
pub use traffic::{Requests, Traffic};

/// Timeout of one attempt to list objects. The timeout is long because a listing may need many requests.
const LIST_MAX: Duration = Duration::from_secs(300);
/// Maximum number of listings that [`Store::list_all`] merges, in case constant writes add keys to each
/// listing.
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
/// Key prefix of temporary objects, which are written to read the clock of the object store.
pub const CLOCKS: &str = "clocks/";

/// An open image store with the keys of its domain.
pub struct Store {
    objects: CountedObjects,
    domain: Domain,
    written: DomainDescription,
}

/// Returns the key of the object that holds a chunk.
pub fn chunk_key(name: &Name) -> String {
    let name = name.to_string();
    format!("{CHUNKS}{}/{name}", &name[..2])
}

/// Settings of a new image store.
#[derive(Debug, Clone, Copy)]
pub struct CreateOptions {
    /// Whether to encrypt the objects, which requires a key file.
    pub encrypted: bool,
    /// Grace period: minimum age at which a prune deletes an unused object.
    pub grace: Duration,
}

impl Store {
    /// Opens an existing image store.
    ///
    /// # Errors
    /// [`Error::NoStore`], [`Error::Refused`], and errors of requests to the object store.
    pub fn open(objects: Arc<dyn Objects>, secret: Option<&Secret>, limits: CallLimits<'_>) -> Result<Self> {
        match Self::read_description(&*objects, limits)? {
            Some(written) => Self::of(objects, written, secret),
            None => Err(Error::NoStore(objects.url().to_owned())),
        }
    }

    /// Opens a store whose [description](Self::description) is known, without a request.
    ///
    /// # Errors
    /// [`Error::Refused`] if the description is invalid or does not match the key file.
    pub fn open_known(
        objects: Arc<dyn Objects>,
        description: &[u8],
        secret: Option<&Secret>,
    ) -> Result<Self> {
        match DomainDescription::parse(description) {
            Ok(written) => Self::of(objects, written, secret),
            Err(refused) => Err(Error::Refused(objects.url().to_owned(), refused)),
        }
    }

    /// Returns the content of `freestone.json`.
    pub fn description(&self) -> Vec<u8> {
        self.written.bytes()
    }

    /// Returns the name under which a local cache stores the description of the store at `url`.
    pub fn description_name(url: &str) -> Name {
        Name(*blake3::hash(&[b"freestone.json of ", url.as_bytes()].concat()).as_bytes())
    }

    /// Opens an image store, or creates it. Returns the store, and true if this call created it. Creation
    /// fails if the object store does not support conditional writes.
    ///
    /// # Errors
    /// [`Error::Refused`], and errors of requests to the object store.
    pub fn open_or_create(
        objects: Arc<dyn Objects>,
        secret: Option<&Secret>,
        options: CreateOptions,
        limits: CallLimits<'_>,
    ) -> Result<(Self, bool)> {
        let mut is_new = false;
        loop {
            if let Some(written) = Self::read_description(&*objects, limits)? {
                let store = Self::of(objects, written, secret)?;
                if options.encrypted && store.domain.sealing.is_none() {
                    return Err(Error::Refused(store.url().to_owned(), domain::DomainError::NotEncrypted));
                }
                return Ok((store, is_new));
            }
            let (_, written) = Domain::new(secret, options.encrypted, options.grace);
            // A description that this program could not open, for example with an invalid grace period, must
            // not be written.
            let opened = written.open(secret);
            opened.map_err(|refused| Error::Refused(objects.url().to_owned(), refused))?;
            conditions::check(&*objects, limits)?;
            let put = || {
                objects.put(domain::KEY, &written.bytes(), WriteCondition::Absent, limits.at_most(TRY_MAX))
            };
            match retry(limits, put) {
                Ok(_) => is_new = true,
                // Another client created the store, or the response to our write was lost. In both cases the
                // store is treated as not new.
                Err(Fault::Condition) => {}
                Err(fault) => return Err(Error::of(domain::KEY, fault)),
            }
        }
    }

    fn read_description(objects: &dyn Objects, limits: CallLimits<'_>) -> Result<Option<DomainDescription>> {
        let get = || objects.get(domain::KEY, None, domain::BYTES_MAX, limits.at_most(TRY_MAX));
        match retry(limits, get) {
            Ok(read) => match DomainDescription::parse(&read.bytes) {
                Ok(written) => Ok(Some(written)),
                Err(refused) => Err(Error::Refused(objects.url().to_owned(), refused)),
            },
            Err(Fault::NotFound) => Ok(None),
            Err(fault) => Err(Error::of(domain::KEY, fault)),
        }
    }

    fn of(objects: Arc<dyn Objects>, written: DomainDescription, secret: Option<&Secret>) -> Result<Self> {
        match written.open(secret) {
            Ok(domain) => Ok(Self {
                objects: CountedObjects { inner: objects, traffic: Traffic::default() },
                domain,
                written,
            }),
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

    /// Returns the object storage that contains this image store.
    pub fn objects(&self) -> &dyn Objects {
        &self.objects
    }

    /// Returns the counters of the requests since the store was opened.
    pub fn requests(&self) -> Requests {
        self.objects.traffic.requests()
    }

    /// Reads an object of at most `most` bytes, with retries.
    pub fn read(&self, key: &str, most: u64, limits: CallLimits<'_>) -> Result<Read> {
        let read = retry(limits, || self.objects.get(key, None, most, limits.at_most(TRY_MAX)));
        read.map_err(|fault| Error::of(key, fault))
    }

    /// Writes an object whose key depends on its content, with retries. If the object exists, the write only
    /// renews its age.
    pub fn write(&self, key: &str, bytes: &[u8], limits: CallLimits<'_>) -> Result<()> {
        let put = || self.objects.put(key, bytes, WriteCondition::Always, limits.at_most(TRY_MAX));
        retry(limits, put).map(drop).map_err(|fault| Error::of(key, fault))
    }

    /// Returns the metadata of an object, or `None` if the object does not exist.
    pub fn head(&self, key: &str, limits: CallLimits<'_>) -> Result<Option<Head>> {
        match retry(limits, || self.objects.head(key, limits.at_most(TRY_MAX))) {
            Ok(head) => Ok(Some(head)),
            Err(Fault::NotFound) => Ok(None),
            Err(fault) => Err(Error::of(key, fault)),
        }
    }

    /// Deletes an object, with retries.
    pub fn delete(&self, key: &str, limits: CallLimits<'_>) -> Result<()> {
        let delete = || self.objects.delete(key, limits.at_most(TRY_MAX));
        retry(limits, delete).map_err(|fault| Error::of(key, fault))
    }

    /// Deletes an object with a single attempt. If the store responds in time, no deletion is pending after
    /// the return. Returns true if the store checked `version`, false if it cannot.
    pub fn delete_once(
        &self,
        key: &str,
        version: Option<&Version>,
        limits: CallLimits<'_>,
    ) -> crate::objects::Result<bool> {
        if let Some(version) = version {
            match self.objects.delete_unchanged(key, version, limits) {
                Err(Fault::Unsupported(_)) => {}
                deleted => return deleted.map(|()| true),
            }
        }
        self.objects.delete(key, limits).map(|()| false)
    }

    /// Lists objects. `each` receives `(false, Some(object))` for each object, and `(true, None)` at the
    /// start of every attempt: objects of earlier attempts must then be dropped. `each` returns false to end
    /// the listing.
    pub fn list(
        &self,
        prefix: &str,
        limits: CallLimits<'_>,
        each: &mut dyn FnMut(bool, Option<ListEntry>) -> bool,
    ) -> Result<()> {
        let listed = retry(limits, || {
            each(true, None);
            self.objects.list(prefix, &mut |listed| each(false, Some(listed)), limits.at_most(LIST_MAX))
        });
        listed.map_err(|fault| Error::of(prefix, fault))
    }

    /// Lists objects for decisions about deletion. Returns the keys and modification times of the objects. A
    /// listing may omit an object that is replaced meanwhile, so listings are merged until one adds no key.
    /// Each listing ends after `most` objects.
    pub fn list_all(
        &self,
        prefix: &str,
        most: usize,
        limits: CallLimits<'_>,
    ) -> Result<BTreeMap<String, SystemTime>> {
        let mut all = BTreeMap::new();
        for _ in 0..LISTINGS_MAX {
            let mut now = BTreeMap::new();
            self.list(prefix, limits, &mut |is_again, listed| {
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

    /// Reads the host clock that measures times between requests. The clock also counts while the host is
    /// suspended.
    pub fn uptime(&self) -> Duration {
        self.objects.uptime()
    }

    /// Reads the clock of the object store, which sets modification times, by writing a temporary object.
    pub fn now(&self, limits: CallLimits<'_>) -> Result<SystemTime> {
        let key = format!("{CLOCKS}{}", crate::rt::unique_id());
        self.write(&key, b"", limits)?;
        let head = self.head(&key, limits)?;
        self.delete(&key, limits)?;
        head.map(|head| head.modified).ok_or_else(|| Error::of(&key, Fault::NotFound))
    }

    // ---- objects named by their content ---------------------------------------------------------

    fn read_meta(
        &self,
        dir: &str,
        kind: Kind,
        name: &Name,
        most: usize,
        limits: CallLimits<'_>,
    ) -> Result<Vec<u8>> {
        self.verified(&format!("{dir}{name}"), None, meta::STORED_BYTES_MAX, limits, |object| {
            meta::content(&self.domain, kind, name, object, most)
        })
    }

    /// Reads an object or a byte range of it, and verifies the data with `verify`. A mismatch is retried, as
    /// a proxy or a disk of the store may have corrupted the data.
    fn verified<T>(
        &self,
        key: &str,
        part: Option<&Range<u64>>,
        most: u64,
        limits: CallLimits<'_>,
        verify: impl Fn(&[u8]) -> std::result::Result<T, chunk::PartError>,
    ) -> Result<T> {
        freestone_core::trail::step!();
        let mut damaged = None;
        let read = retry(limits, || {
            damaged = None;
            let read = self.objects.get(key, part.cloned(), most, limits.at_most(TRY_MAX))?;
            verify(&read.bytes).map_err(|error| {
                damaged = Some(error);
                Fault::Transient(error.to_string())
            })
        });
        read.map_err(|fault| match (damaged, fault) {
            (Some(error), Fault::Transient(_) | Fault::TimedOut) => {
                Error::Damaged(key.to_owned(), error.to_string())
            }
            (_, fault) => Error::of(key, fault),
        })
    }

    /// Writes a description of an image under its name (content hash), and returns the name.
    ///
    /// # Errors
    /// [`Error::TooLarge`], and errors of requests to the object store.
    pub fn write_meta(&self, dir: &str, kind: Kind, content: &[u8], limits: CallLimits<'_>) -> Result<Name> {
        let (name, object) = self.meta(kind, content)?;
        self.write(&format!("{dir}{name}"), &object, limits)?;
        Ok(name)
    }

    /// Returns the name and the content of the stored object of an image description.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the description is too large or encryption fails.
    pub fn meta(&self, kind: Kind, content: &[u8]) -> Result<(Name, Vec<u8>)> {
        meta::stored(&self.domain, kind, content).ok_or(Error::TooLarge)
    }

    /// Reads and verifies the manifest of an image.
    ///
    /// # Errors
    /// Errors of requests to the object store; [`Error::Damaged`].
    pub fn manifest(&self, name: &Name, limits: CallLimits<'_>) -> Result<Manifest> {
        let bytes = self.read_meta(MANIFESTS, Kind::Manifest, name, manifest::BYTES_MAX, limits)?;
        Manifest::parse(&bytes).map_err(|why| Error::Damaged(format!("{MANIFESTS}{name}"), why))
    }

    /// Reads and verifies a map of a segment.
    ///
    /// # Errors
    /// Errors of requests to the object store; [`Error::Damaged`].
    pub fn map(&self, name: &Name, limits: CallLimits<'_>) -> Result<Map> {
        let bytes = self.read_meta(MAPS, Kind::Map, name, map::BYTES_MAX, limits)?;
        Map::parse(&bytes).ok_or_else(|| Error::Damaged(format!("{MAPS}{name}"), "not a valid map".into()))
    }

    /// Reads and verifies the page hashes of a map.
    ///
    /// # Errors
    /// Errors of requests to the object store; [`Error::Damaged`].
    pub fn hashes(&self, name: &Name, map: &Map, limits: CallLimits<'_>) -> Result<Hashes> {
        let bytes = self.read_meta(MAPS, Kind::Hashes, name, map::HASHES_BYTES_MAX, limits)?;
        let damaged = || Error::Damaged(format!("{MAPS}{name}"), "page hashes do not match the map".into());
        Hashes::parse(&bytes, map).ok_or_else(damaged)
    }

    /// Reads and verifies all pages of a chunk.
    ///
    /// # Errors
    /// Errors of requests to the object store; [`Error::Damaged`].
    pub fn chunk(&self, name: &Name, limits: CallLimits<'_>) -> Result<Vec<u8>> {
        let most = chunk::STORED_BYTES_MAX as u64;
        self.verified(&chunk_key(name), None, most, limits, |object| chunk::pages(&self.domain, name, object))
    }

    /// Reads and verifies the pages of one unit of a chunk without the other units. Returns no pages if the
    /// chunk has no such unit.
    ///
    /// # Errors
    /// Errors of requests to the object store; [`Error::Damaged`].
    pub fn unit(&self, name: &Name, unit: usize, limits: CallLimits<'_>) -> Result<Vec<u8>> {
        let (key, domain) = (chunk_key(name), &self.domain);
        let first = 0..chunk::HEAD_BYTES_MAX as u64;
        let head = self.verified(&key, Some(&first), chunk::HEAD_BYTES_MAX as u64, limits, |part| {
            chunk::Head::parse(domain, name, part)
        })?;
        match head.place(unit) {
            Some(place) => {
                let most = place.end - place.start;
                self.verified(&key, Some(&place), most, limits, |part| head.unit(domain, unit, part))
            }
            None => Ok(Vec::new()),
        }
    }
}
