//! A store with a domain in it: what lies there is read and verified, or written, with another try where
//! that can help.

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

/// How long one try of a list may take: there may be many pages of it.
const LIST_MAX: Duration = Duration::from_secs(300);
/// Most listings that are joined. A prefix that changes all the time adds keys to each.
const LISTINGS_MAX: usize = 10;
/// Where manifests lie.
pub const MANIFESTS: &str = "manifests/";
/// Where maps and hashes lie.
pub const MAPS: &str = "maps/";
/// Where chunks lie, in 256 parts.
pub const CHUNKS: &str = "chunks/";
/// Where tags lie.
pub const TAGS: &str = "tags/";
/// Where what was read first lies.
pub const TRACES: &str = "traces/";
/// What is written to learn the time.
pub const CLOCKS: &str = "clocks/";

/// A store, and the keys of what lies in it.
pub struct Store {
    objects: Counted,
    domain: Domain,
    written: Written,
}

/// The key of a chunk.
pub fn chunk_key(name: &Name) -> String {
    let name = name.to_string();
    format!("{CHUNKS}{}/{name}", &name[..2])
}

/// How a store is begun where there is none.
#[derive(Debug, Clone, Copy)]
pub struct Begin {
    /// Encrypt what is in it; only with a key.
    pub encrypted: bool,
    /// How long what nobody refers to is kept.
    pub grace: Duration,
}

impl Store {
    /// Opens one that is there.
    ///
    /// # Errors
    /// [`Error::NoStore`], [`Error::Refused`], and what the store answers.
    pub fn open(objects: Arc<dyn Objects>, secret: Option<&Secret>, until: Until<'_>) -> Result<Self> {
        match Self::described(&*objects, until)? {
            Some(written) => Self::of(objects, written, secret),
            None => Err(Error::NoStore(objects.url().to_owned())),
        }
    }

    /// Opens one whose [description](Self::description) is known, without asking it for anything.
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

    /// What `freestone.json` says.
    pub fn description(&self) -> Vec<u8> {
        self.written.bytes()
    }

    /// Under what name the description of a store can be kept elsewhere.
    pub fn place(url: &str) -> Name {
        Name(*blake3::hash(&[b"freestone.json of ", url.as_bytes()].concat()).as_bytes())
    }

    /// Opens one, or begins it; and whether it was begun. A store that does not keep to conditions of writes
    /// is not begun.
    ///
    /// # Errors
    /// [`Error::Refused`], and what the store answers.
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
            // A description that could not be opened is not written.
            let opened = written.open(secret);
            opened.map_err(|refused| Error::Refused(objects.url().to_owned(), refused))?;
            conditions::check(&*objects, until)?;
            let put = || objects.put(domain::KEY, &written.bytes(), When::Absent, until.at_most(TRY_MAX));
            match again(until, put) {
                Ok(_) => is_new = true,
                // Somebody else did, or we did and the answer was lost: then nobody has used it yet.
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

    /// What people know it by.
    pub fn url(&self) -> &str {
        self.objects.url()
    }

    /// Its keys.
    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    /// Where its objects lie.
    pub fn objects(&self) -> &dyn Objects {
        &self.objects
    }

    /// What it was asked since it was opened.
    pub fn requests(&self) -> Requests {
        self.objects.traffic.requests()
    }

    /// An object, with other tries.
    ///
    /// # Errors
    /// What the store answers.
    pub fn read(&self, key: &str, most: u64, until: Until<'_>) -> Result<Read> {
        let read = again(until, || self.objects.get(key, None, most, until.at_most(TRY_MAX)));
        read.map_err(|fault| Error::of(key, fault))
    }

    /// Writes an object whose content follows from its name: written again it is the same, and younger.
    ///
    /// # Errors
    /// What the store answers.
    pub fn write(&self, key: &str, bytes: &[u8], until: Until<'_>) -> Result<()> {
        let put = || self.objects.put(key, bytes, When::Always, until.at_most(TRY_MAX));
        again(until, put).map(drop).map_err(|fault| Error::of(key, fault))
    }

    /// What the store says of an object; `None` where it is not there.
    ///
    /// # Errors
    /// What the store answers.
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
    /// What the store answers.
    pub fn delete(&self, key: &str, until: Until<'_>) -> Result<()> {
        let delete = || self.objects.delete(key, until.at_most(TRY_MAX));
        again(until, delete).map_err(|fault| Error::of(key, fault))
    }

    /// Deletes an object, with one try: nothing is under way any more when this has returned, as far as
    /// the store keeps to its time. Returns true if the store has checked that the object still was what
    /// `version` says, false if it cannot.
    ///
    /// # Errors
    /// What the store answers.
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

    /// Lists objects. `each` is told each, or with true and none that a try failed and it begins again; it
    /// answers false where it wants no more.
    ///
    /// # Errors
    /// What the store answers.
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

    /// Lists objects for decisions about deletion: their keys, and when each was written. A listing may omit
    /// an object that is replaced meanwhile, so listings are joined until one adds no key. Each ends after
    /// `most` objects.
    ///
    /// # Errors
    /// What the store answers.
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

    /// What time it is by the clock that stamps the objects.
    ///
    /// # Errors
    /// What the store answers.
    pub fn now(&self, until: Until<'_>) -> Result<SystemTime> {
        let key = format!("{CLOCKS}{}", crate::rt::unique_id());
        self.write(&key, b"", until)?;
        let head = self.head(&key, until)?;
        self.delete(&key, until)?;
        head.map(|head| head.modified).ok_or_else(|| Error::of(&key, Fault::NotFound))
    }

    // ---- what has a name of its content ---------------------------------------------------------

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

    /// Reads and verifies; what does not fit its name is read again: a proxy or a disk of the store may
    /// have spoilt it on the way.
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

    /// Writes what describes images, and returns its name.
    ///
    /// # Errors
    /// What the store answers.
    pub fn write_meta(&self, dir: &str, kind: Kind, content: &[u8], until: Until<'_>) -> Result<Name> {
        let (name, object) = self.meta(kind, content)?;
        self.write(&format!("{dir}{name}"), &object, until)?;
        Ok(name)
    }

    /// The name and the object of what describes images.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn meta(&self, kind: Kind, content: &[u8]) -> Result<(Name, Vec<u8>)> {
        meta::stored(&self.domain, kind, content).ok_or(Error::TooLarge)
    }

    /// An image.
    ///
    /// # Errors
    /// What the store answers; [`Error::Damaged`].
    pub fn manifest(&self, name: &Name, until: Until<'_>) -> Result<Manifest> {
        let bytes = self.read_meta(MANIFESTS, Kind::Manifest, name, manifest::BYTES_MAX, until)?;
        Manifest::parse(&bytes).map_err(|why| Error::Damaged(format!("{MANIFESTS}{name}"), why))
    }

    /// A map.
    ///
    /// # Errors
    /// What the store answers; [`Error::Damaged`].
    pub fn map(&self, name: &Name, until: Until<'_>) -> Result<Map> {
        let bytes = self.read_meta(MAPS, Kind::Map, name, map::BYTES_MAX, until)?;
        Map::parse(&bytes).ok_or_else(|| Error::Damaged(format!("{MAPS}{name}"), "it is no map".into()))
    }

    /// The hashes of the pages of a map.
    ///
    /// # Errors
    /// What the store answers; [`Error::Damaged`].
    pub fn hashes(&self, name: &Name, map: &Map, until: Until<'_>) -> Result<Hashes> {
        let bytes = self.read_meta(MAPS, Kind::Hashes, name, map::HASHES_BYTES_MAX, until)?;
        let damaged = || Error::Damaged(format!("{MAPS}{name}"), "it does not fit its map".into());
        Hashes::parse(&bytes, map).ok_or_else(damaged)
    }

    /// The pages of a chunk.
    ///
    /// # Errors
    /// What the store answers; [`Error::Damaged`].
    pub fn chunk(&self, name: &Name, until: Until<'_>) -> Result<Vec<u8>> {
        let most = chunk::STORED_BYTES_MAX as u64;
        self.verified(&chunk_key(name), None, most, until, |object| chunk::pages(&self.domain, name, object))
    }

    /// The pages of a unit of a chunk, and of nothing else of it; none behind its end.
    ///
    /// # Errors
    /// What the store answers; [`Error::Damaged`].
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
