//! Configuration of an RBD device.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Default time limit for a request to the cluster. Ceph needs up to a minute to detect a lost OSD
/// and to continue without it.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(120);
/// Smallest effective [`Config::timeout`]; smaller values are raised to it.
pub const MIN_TIMEOUT: Duration = Duration::from_secs(1);
/// Largest effective [`Config::timeout`]; larger values are lowered to it.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Name of an image: `POOL/NAME`, or `POOL/NAMESPACE/NAME`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageName {
    /// Name of the pool.
    pub pool: String,
    /// Namespace in the pool; empty for the default namespace.
    pub namespace: String,
    /// Name of the image.
    pub name: String,
}

impl FromStr for ImageName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.contains('@') {
            return Err("a snapshot is named with snap=NAME");
        }
        if text.contains('\0') {
            return Err("a name must not contain a NUL");
        }
        let parts: Vec<&str> = text.split('/').collect();
        let (pool, namespace, name) = match parts[..] {
            [pool, name] => (pool, "", name),
            [pool, namespace, name] if !namespace.is_empty() => (pool, namespace, name),
            _ => return Err("must be POOL/NAME or POOL/NAMESPACE/NAME"),
        };
        if pool.is_empty() || name.is_empty() {
            return Err("must be POOL/NAME or POOL/NAMESPACE/NAME");
        }
        Ok(Self { pool: pool.into(), namespace: namespace.into(), name: name.into() })
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pool, namespace, name } = self;
        if namespace.is_empty() { write!(f, "{pool}/{name}") } else { write!(f, "{pool}/{namespace}/{name}") }
    }
}

/// Options for opening an [`Rbd`](crate::Rbd) device.
#[derive(Debug, Clone)]
pub struct Config {
    /// Name of the image.
    pub image: ImageName,
    /// Name of the device in log lines.
    pub name: String,
    /// Ceph configuration file; `None` uses Ceph's search path (`$CEPH_CONF`,
    /// `/etc/ceph/ceph.conf`).
    pub conf: Option<PathBuf>,
    /// Ceph user, without the prefix `client.`; `None` uses the default of librados, normally
    /// `admin`.
    pub user: Option<String>,
    /// Snapshot to open instead of the image. A snapshot is always read-only.
    pub snap: Option<String>,
    /// Time limit for a request to the cluster, and for opening the image.
    pub timeout: Duration,
    /// Opens the image read-only, so that only reads are served.
    pub read_only: bool,
    /// Directory of `librbd.so.1` and `librados.so.2`; `None` uses the search path of the dynamic
    /// loader.
    pub libraries: Option<PathBuf>,
}

impl Config {
    /// Returns default options for `image`; the device is named like the image.
    pub fn new(image: ImageName) -> Self {
        Self {
            name: image.to_string(),
            image,
            conf: None,
            user: None,
            snap: None,
            timeout: DEFAULT_TIMEOUT,
            read_only: false,
            libraries: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_names_are_validated() {
        let parse = |text: &str| text.parse::<ImageName>().map(|name| name.to_string());
        for good in ["rbd/vm", "rbd/tenant/vm", "a b/c"] {
            assert_eq!(parse(good).as_deref(), Ok(good));
        }
        for bad in ["", "vm", "/vm", "rbd/", "rbd//vm", "a/b/c/d", "rbd/vm@monday", "rbd/v\0m"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
