//! Image stores (object storage with images): access to a store by its URL, and the local page
//! cache.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{env, io};

use freestone::store::cache::{BYTES_DEFAULT, BYTES_MIN, Cache};
use freestone::store::format::domain::{GRACE, GRACE_RANGE, Secret};
use freestone::store::objects::{Directory, Objects};

use crate::entries::{Entries, SpecError};
use crate::keys::{Keys, parse_bool, parse_path};
use crate::path_text;
use crate::refusal::{Errno, Refusal};
use crate::size;
use crate::times;

/// Keys that are allowed only for a store over the network.
const NETWORK_KEYS: [&str; 5] = ["endpoint", "region", "credentials", "anonymous", "hedge"];
/// Prefix of the URL of a store in a local directory.
const FILE: &str = "file://";
/// Maximum number of bytes read from a key file. The rest of a larger file is ignored.
const KEY_FILE_BYTES_MAX: u64 = 4096;
/// Smallest and largest value of `timeout`, the timeout of a fetch.
const TIMEOUT_RANGE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(3600));

/// Access to an image store, and the page cache for it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StoreSpec {
    /// Path of the file with the secret key for object names, or `None` for a store without a key.
    pub key: Option<PathBuf>,
    /// Location of the page cache, or `None` for the default directory.
    pub cache: Option<CachePlace>,
    /// Maximum size of the page cache in bytes, or `None` for the default.
    pub cache_size: Option<u64>,
    /// Timeout of a fetch from the store, or `None` for the default.
    pub timeout: Option<Duration>,
    /// URL of the object storage server, or `None` for the default.
    pub endpoint: Option<String>,
    /// Region of the bucket, or `None` for the default.
    pub region: Option<String>,
    /// Path of the file with credentials, or `None` for the default credentials.
    pub credentials: Option<PathBuf>,
    /// True if requests are not signed.
    pub anonymous: bool,
    /// Time after which a read without a reply is sent a second time, or `None` to never do so.
    pub hedge: Option<Duration>,
}

/// Location of the page cache of an image store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CachePlace {
    /// No page cache is used.
    None,
    /// The cache is in this directory.
    Dir(PathBuf),
}

/// Access to an image store for a push, and the settings of the store if the push creates it.
#[derive(Debug, Clone, PartialEq)]
pub struct PushSpec {
    /// Access to the image store.
    pub store: StoreSpec,
    /// True if a store that the push creates is encrypted.
    pub encrypt: bool,
    /// Time for which a store that the push creates retains unreferenced objects.
    pub grace: Duration,
}

impl PushSpec {
    /// Parses the keys of a `push` command for the store at `url`.
    pub fn from_entries(entries: Entries, url: &str) -> Result<Self, SpecError> {
        let keys = Keys(entries);
        keys.check_names()?;
        let encrypt = keys.take("encrypt", parse_bool)?.unwrap_or(false);
        let store = StoreSpec::take(&keys, url)?;
        if encrypt && store.key.is_none() {
            return Err(keys.refuse("encrypt", "only with key=FILE"));
        }
        Ok(Self { store, encrypt, grace: keys.take("grace", parse_grace)?.unwrap_or(GRACE) })
    }
}

impl StoreSpec {
    /// Parses the keys of the store at `url`.
    pub(crate) fn take(keys: &Keys, url: &str) -> Result<Self, SpecError> {
        if url.starts_with(FILE)
            && let Some(key) = NETWORK_KEYS.iter().find(|key| keys.typed(key).is_some())
        {
            return Err(keys.refuse(key, "a directory is not reached over the network"));
        }
        let spec = Self {
            key: keys.take("key", parse_path)?,
            cache: keys.take("cache", |text| match text {
                "none" => Ok(CachePlace::None),
                text => parse_path(text).map(CachePlace::Dir),
            })?,
            cache_size: keys.take("cache_size", parse_cache_size)?,
            timeout: keys.take("timeout", parse_timeout)?,
            endpoint: keys.take("endpoint", parse_endpoint)?,
            region: keys.take("region", parse_word)?,
            credentials: keys.take("credentials", parse_path)?,
            anonymous: keys.take("anonymous", parse_bool)?.unwrap_or(false),
            hedge: keys.take("hedge", parse_hedge)?,
        };
        if spec.cache == Some(CachePlace::None) && spec.cache_size.is_some() {
            return Err(keys.refuse("cache_size", "not with cache=none"));
        }
        Ok(spec)
    }

    /// Parses the keys of a command that accesses the store at `url`.
    pub fn from_entries(entries: Entries, url: &str) -> Result<Self, SpecError> {
        let keys = Keys(entries);
        keys.check_names()?;
        Self::take(&keys, url)
    }

    /// Returns the timeout of a fetch from the store.
    pub fn timeout(&self) -> Duration {
        self.timeout.unwrap_or(freestone::store::image::TIMEOUT)
    }

    /// Reads the secret key for object names from the key file. Returns `None` if no key file is
    /// set.
    pub fn secret(&self) -> Result<Option<Secret>, Refusal> {
        let Some(path) = &self.key else { return Ok(None) };
        let refused = |why: String| {
            let path = path.display();
            refusal!(EINVAL, "key={path}: {why}")
        };
        let mut text = String::new();
        let file = File::open(path).map_err(|e| refused(e.to_string()))?;
        let read = file.take(KEY_FILE_BYTES_MAX).read_to_string(&mut text);
        let secret = read.ok().and_then(|_| Secret::parse(&text));
        let hint = "must hold 64 hexadecimal digits; `openssl rand -hex 32` makes some";
        secret.map(Some).ok_or_else(|| refused(hint.into()))
    }

    /// Returns the object storage at `url`. No request is sent yet.
    pub fn objects(&self, url: &str) -> Result<Arc<dyn Objects>, Refusal> {
        if let Some(path) = url.strip_prefix(FILE) {
            return Ok(Arc::new(Directory::new(path_text::path(path))));
        }
        self.over_network(url)
    }

    #[cfg(feature = "object-storage")]
    fn over_network(&self, url: &str) -> Result<Arc<dyn Objects>, Refusal> {
        let options = freestone_objects::Options {
            endpoint: self.endpoint.clone(),
            region: self.region.clone(),
            credentials: self.credentials.clone(),
            anonymous: self.anonymous,
            hedge: self.hedge,
        };
        freestone_objects::open(url, &options).map_err(|e| refusal!(EINVAL, "{e}"))
    }

    #[cfg(not(feature = "object-storage"))]
    #[expect(clippy::unused_self, reason = "as with the feature")]
    fn over_network(&self, url: &str) -> Result<Arc<dyn Objects>, Refusal> {
        let build = "build it with `--features full`, as the packages are, or use a directory: file:///DIR";
        refuse!(EOPNOTSUPP, "{url}: this program was built without stores over the network; {build}")
    }

    /// Opens the page cache. Returns `None` for `cache=none`.
    pub fn open_cache(&self) -> Result<Option<Arc<Cache>>, Refusal> {
        let dir = match &self.cache {
            Some(CachePlace::None) => return Ok(None),
            Some(CachePlace::Dir(dir)) => dir.clone(),
            None => default_dir()?,
        };
        let opened = Cache::open(&dir, self.cache_size.unwrap_or(BYTES_DEFAULT));
        let refused = |e: io::Error| Refusal::failed(errno_of(&e), format!("cache={}: {e}", dir.display()));
        opened.map(Some).map_err(refused)
    }
}

fn errno_of(error: &io::Error) -> Errno {
    match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem => Errno::EROFS,
        _ => Errno::of_file(error),
    }
}

/// Returns the default directory of the page cache: `$FREESTONE_CACHE`, else the cache directory of
/// the systemd service or of the user.
fn default_dir() -> Result<PathBuf, Refusal> {
    let of = |variable| env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    let refused = |why: &str| refusal!(EINVAL, "cache: {why}");
    if let Some(dir) = of("FREESTONE_CACHE") {
        let why = "FREESTONE_CACHE must be an absolute path";
        return if dir.is_absolute() { Ok(dir) } else { Err(refused(why)) };
    }
    // systemd sets `CACHE_DIRECTORY`. The first of several directories is used.
    let service_dirs = env::var("CACHE_DIRECTORY").ok();
    if let Some(dir) = service_dirs.as_deref().and_then(|dirs| dirs.split(':').next()).map(PathBuf::from)
        && dir.is_absolute()
    {
        return Ok(dir);
    }
    // The XDG specification requires that relative paths are ignored.
    if let Some(dir) = of("XDG_CACHE_HOME").filter(|dir| dir.is_absolute()) {
        return Ok(dir.join("freestone"));
    }
    if rustix::process::geteuid().is_root() {
        return Ok(Path::new("/var/cache/freestone").to_owned());
    }
    let home = of("HOME").filter(|dir| dir.is_absolute());
    let none = || refused("HOME is not set to an absolute path; give cache=DIR or cache=none");
    home.map(|home| home.join(".cache/freestone")).ok_or_else(none)
}

fn parse_cache_size(text: &str) -> Result<u64, String> {
    let bytes = crate::keys::parse_length(text)?;
    if bytes < BYTES_MIN { Err(format!("must be at least {}", size::exact(BYTES_MIN))) } else { Ok(bytes) }
}

fn parse_timeout(text: &str) -> Result<Duration, String> {
    times::parse_in_range(text, TIMEOUT_RANGE)
}

fn parse_hedge(text: &str) -> Result<Duration, String> {
    let time = times::parse(text)?;
    if time.is_zero() { Err("must be more than 0".into()) } else { Ok(time) }
}

fn parse_grace(text: &str) -> Result<Duration, String> {
    times::parse_in_range(text, GRACE_RANGE)
}

fn parse_endpoint(text: &str) -> Result<String, String> {
    let rest = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
    match rest {
        Some(rest) if !rest.is_empty() && !rest.contains(['@', '?', '#', ' ']) => Ok(text.to_owned()),
        _ => Err("must be a URL without user and password, for example https://s3.example.net".into()),
    }
}

fn parse_word(text: &str) -> Result<String, String> {
    let is_in = |c: char| c.is_ascii_alphanumeric() || c == '-';
    if (1..=64).contains(&text.len()) && text.chars().all(is_in) {
        Ok(text.to_owned())
    } else {
        Err("must be a word".into())
    }
}
