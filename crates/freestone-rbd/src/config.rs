//! What is to be opened, and how.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// How long a request waits for the cluster, unless that is said. Ceph needs up to a minute to notice
/// that an OSD is gone and to go on without it, or with it again.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(120);
/// Shortest and longest of these times.
pub const MIN_TIMEOUT: Duration = Duration::from_secs(1);
/// See [`MIN_TIMEOUT`].
pub const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Which image: `POOL/NAME`, or `POOL/NAMESPACE/NAME`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageName {
    /// The pool.
    pub pool: String,
    /// The namespace in it; empty is the usual one.
    pub namespace: String,
    /// The image.
    pub name: String,
}

impl FromStr for ImageName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.contains('@') {
            return Err("a snapshot is named with snap=NAME");
        }
        if text.contains('\0') {
            return Err("a name has no NUL");
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

/// What is to be opened, and how.
#[derive(Debug, Clone)]
pub struct Config {
    /// The image.
    pub image: ImageName,
    /// What the log calls the device.
    pub name: String,
    /// Ceph's configuration; none: where Ceph looks for it (`$CEPH_CONF`, `/etc/ceph/ceph.conf`).
    pub conf: Option<PathBuf>,
    /// The user without `client.`; none: as the configuration says, or `admin`.
    pub user: Option<String>,
    /// A snapshot of the image, which is only read.
    pub snap: Option<String>,
    /// How long a request waits for the cluster.
    pub timeout: Duration,
    /// Serve reads only.
    pub read_only: bool,
    /// Where `librbd.so.1` and `librados.so.2` are; none: where the system's loader looks for them.
    pub libraries: Option<PathBuf>,
}

impl Config {
    /// All by default.
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
    fn names_of_images() {
        let parse = |text: &str| text.parse::<ImageName>().map(|name| name.to_string());
        for good in ["rbd/vm", "rbd/tenant/vm", "a b/c"] {
            assert_eq!(parse(good).as_deref(), Ok(good));
        }
        for bad in ["", "vm", "/vm", "rbd/", "rbd//vm", "a/b/c/d", "rbd/vm@monday", "rbd/v\0m"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
