//! Kind `nbd`: devices over exports of other NBD servers.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use freestone::device::Device;
use freestone_nbd_client::{
    Config, DEFAULT_CONNECTIONS, DEFAULT_TIMEOUT, MAX_CONNECTIONS, MAX_TIMEOUT, MIN_TIMEOUT, Nbd, SetupError,
    TlsFiles, Uri,
};
use serde_json::{Value, json};

use crate::entries::SpecError;
use crate::family::FamilySpec;
use crate::keys::{Keys, parse_bool, parse_length, parse_path};
use crate::kinds::check_size::check_size;
use crate::kinds::parallel_open::{Opener, opener};
use crate::kinds::registry::Registry;
use crate::kinds::{DataDevice, Entry, KindConfig, KindInstance, Spec};
use crate::refusal::{Errno, Refusal};
use crate::{schema, times};

pub(in crate::kinds) const NAME: &str = "nbd";
/// Text that replaces a URI in an error message if the URI may contain a password.
const NOT_SHOWN: &str = "(not shown)";

/// Specification of a device of kind `nbd`.
#[derive(Debug, Clone, PartialEq)]
pub struct NbdSpec {
    /// URI of the NBD export.
    pub uri: Uri,
    /// Maximum number of connections to the NBD server.
    pub connections: usize,
    /// Maximum time that requests wait for a server that is not reachable.
    pub timeout: Duration,
    /// True if the device is read-only.
    pub readonly: bool,
    /// Expected size in bytes, or `None` to accept any size.
    pub size: Option<u64>,
    /// Files for TLS, used with `nbds` URIs.
    pub tls: TlsFiles,
    /// Specification of the family (memory pool) of the device's forks.
    pub family: FamilySpec,
}

impl NbdSpec {
    pub(in crate::kinds) fn take(keys: &Keys) -> Result<Self, SpecError> {
        let uri = keys.need("uri", "uri=nbd://host/export", parse_uri);
        let uri = uri.map_err(|error| match error {
            SpecError::Value { name, key, value, why } if value.contains('@') => {
                SpecError::Value { name, key, value: NOT_SHOWN.into(), why }
            }
            error => error,
        })?;
        let readonly = keys.take("readonly", parse_bool)?.unwrap_or(false);
        keys.check_base(readonly, "readonly=yes", "export")?;
        if let (false, Some(key)) = (uri.tls, keys.first_of(schema::NBD_TLS)) {
            return Err(keys.refuse(key, "only where the uri is nbds:// or nbds+unix://"));
        }
        for (key, other) in [("tls_cert", "tls_key"), ("tls_key", "tls_cert")] {
            if keys.typed(key).is_some() && keys.typed(other).is_none() {
                return Err(keys.refuse(key, format!("only with {other}=FILE")));
            }
        }
        let path = |key: &str| -> Result<Option<PathBuf>, SpecError> { keys.take(key, parse_path) };
        Ok(Self {
            uri,
            connections: keys.take("connections", parse_connections)?.unwrap_or(DEFAULT_CONNECTIONS),
            timeout: keys.take("timeout", parse_timeout)?.unwrap_or(DEFAULT_TIMEOUT),
            readonly,
            size: keys.take("size", parse_length)?,
            tls: TlsFiles {
                ca: path("tls_ca")?,
                cert: path("tls_cert")?,
                key: path("tls_key")?,
                hostname: keys.take("tls_hostname", |text| Ok(text.to_owned()))?,
            },
            family: FamilySpec::take(keys)?,
        })
    }
}

fn parse_uri(text: &str) -> Result<Uri, String> {
    text.parse().map_err(|why: freestone_nbd_client::UriError| why.to_string())
}

fn parse_connections(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| (1..=MAX_CONNECTIONS).contains(count));
    count.ok_or_else(|| format!("must be 1 to {MAX_CONNECTIONS}"))
}

fn parse_timeout(text: &str) -> Result<Duration, String> {
    times::parse_in_range(text, (MIN_TIMEOUT, MAX_TIMEOUT))
}

impl NbdSpec {
    fn open(&self, name: &str) -> impl FnOnce() -> Result<Arc<Nbd>, Refusal> + use<> {
        let config = Config {
            uri: self.uri.clone(),
            name: name.to_owned(),
            connections: self.connections,
            timeout: self.timeout,
            read_only: self.readonly,
            tls: self.tls.clone(),
        };
        move || Nbd::open(&config).map(Arc::new).map_err(|error| setup_refusal(&error))
    }
}

impl KindConfig for NbdSpec {
    fn build(&self, spec: &Spec, registry: &Registry) -> Result<DataDevice, Refusal> {
        let backing = registry.backing(&self.family)?;
        let device = registry.parallel_open.open(&spec.name, self.open(&spec.name))?;
        check_size(self.size, &device.geometry(), "export")?;
        Ok(DataDevice { backing, ..DataDevice::standalone(Remote(Arc::clone(&device)), device) })
    }

    fn opener(&self, spec: &Spec) -> Option<Opener> {
        Some(opener(self.open(&spec.name)))
    }

    fn family(&self) -> Option<&FamilySpec> {
        Some(&self.family)
    }

    fn size(&self) -> Option<u64> {
        self.size
    }

    fn is_read_only(&self) -> bool {
        self.readonly
    }

    fn uri(&self) -> Option<&Uri> {
        Some(&self.uri)
    }
}

fn setup_refusal(error: &SetupError) -> Refusal {
    let errno = match error {
        SetupError::Link { .. } => Errno::EIO,
        SetupError::Certificate { .. } | SetupError::Tls(_) => Errno::EINVAL,
        SetupError::Thread(_) => Errno::ENOMEM,
    };
    Refusal::failed(errno, error)
}

/// Open export of another NBD server.
struct Remote(Arc<Nbd>);

impl KindInstance for Remote {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outside(&self) -> Option<&dyn Device> {
        Some(&*self.0)
    }

    fn attrs(&self) -> &'static [&'static str] {
        &NAMES
    }

    fn value(&self, entry: &Entry, attr: &str) -> Option<Value> {
        Some(match attr {
            "uri" => json!(self.0.uri().to_string()),
            "connections" => json!(self.0.connections()),
            "reconnects" => json!(self.0.reconnects()),
            "last_error" => json!(self.0.last_error()),
            "readonly" => json!(entry.is_read_only()),
            "size" => json!(entry.size()),
            _ => return None,
        })
    }
}

const NAMES: [&str; 6] = ["uri", "connections", "reconnects", "last_error", "readonly", "size"];
