//! Kind `rbd`: devices over images in Ceph's RBD, through librbd.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use freestone::device::Device;
use freestone_rbd::{Config, DEFAULT_TIMEOUT, ImageName, MAX_TIMEOUT, MIN_TIMEOUT, Rbd, SetupError};
use serde_json::{Value, json};

use crate::entries::SpecError;
use crate::family::FamilySpec;
use crate::keys::{Keys, parse_bool, parse_length, parse_path};
use crate::kinds::check_size::check_size;
use crate::kinds::parallel_open::{Opener, opener};
use crate::kinds::registry::Registry;
use crate::kinds::{DataDevice, Entry, KindConfig, KindInstance, Spec};
use crate::refusal::{Errno, Refusal};
use crate::times;

pub(in crate::kinds) const NAME: &str = "rbd";

/// Specification of a device of kind `rbd`.
#[derive(Debug, Clone, PartialEq)]
pub struct RbdSpec {
    /// Name of the image, with its pool and namespace.
    pub image: ImageName,
    /// Path of the Ceph configuration file, or `None` for Ceph's default files.
    pub conf: Option<PathBuf>,
    /// Name of the Ceph user, or `None` for the default of the configuration.
    pub id: Option<String>,
    /// Name of the snapshot of the image to open, or `None` for the image itself.
    pub snap: Option<String>,
    /// Maximum time that requests wait for the cluster.
    pub timeout: Duration,
    /// True if the device is read-only.
    pub readonly: bool,
    /// Expected size in bytes, or `None` to accept any size.
    pub size: Option<u64>,
    /// Specification of the family (memory pool) of the device's forks.
    pub family: FamilySpec,
}

impl RbdSpec {
    pub(in crate::kinds) fn take(keys: &Keys) -> Result<Self, SpecError> {
        let image = keys
            .need("image", "image=rbd/vm", |text| text.parse().map_err(|why: &'static str| why.to_owned()))?;
        let snap = keys.take("snap", parse_word)?;
        let readonly = keys.take("readonly", parse_bool)?.unwrap_or(snap.is_some());
        if snap.is_some() && !readonly {
            return Err(keys.refuse("readonly", "a snapshot of an image is only read"));
        }
        keys.check_base(readonly, "readonly=yes or snap", "image")?;
        Ok(Self {
            image,
            conf: keys.take("conf", parse_path)?,
            id: keys.take("id", parse_word)?,
            snap,
            timeout: keys.take("timeout", parse_timeout)?.unwrap_or(DEFAULT_TIMEOUT),
            readonly,
            size: keys.take("size", parse_length)?,
            family: FamilySpec::take(keys)?,
        })
    }
}

fn parse_word(text: &str) -> Result<String, String> {
    if text.is_empty() || text.contains('\0') { Err("must be a name".into()) } else { Ok(text.to_owned()) }
}

fn parse_timeout(text: &str) -> Result<Duration, String> {
    times::parse_in_range(text, (MIN_TIMEOUT, MAX_TIMEOUT))
}

impl RbdSpec {
    fn open(&self, name: &str) -> impl FnOnce() -> Result<Arc<Rbd>, Refusal> + use<> {
        let config = Config {
            name: name.to_owned(),
            conf: self.conf.clone(),
            user: self.id.clone(),
            snap: self.snap.clone(),
            timeout: self.timeout,
            read_only: self.readonly,
            ..Config::new(self.image.clone())
        };
        move || Rbd::open(&config).map(Arc::new).map_err(|error| setup_refusal(&error))
    }
}

impl KindConfig for RbdSpec {
    fn build(&self, spec: &Spec, registry: &Registry) -> Result<DataDevice, Refusal> {
        let backing = registry.backing(&self.family)?;
        let device = registry.parallel_open.open(&spec.name, self.open(&spec.name))?;
        check_size(self.size, &device.geometry(), "image")?;
        Ok(DataDevice { backing, ..DataDevice::standalone(Image(Arc::clone(&device)), device) })
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
}

fn setup_refusal(error: &SetupError) -> Refusal {
    let errno = match error {
        SetupError::Thread(_) => Errno::ENOMEM,
        SetupError::NoLibrary { .. }
        | SetupError::OldLibrary { .. }
        | SetupError::Conf { .. }
        | SetupError::Setting { .. } => Errno::EINVAL,
        SetupError::Connect { .. }
        | SetupError::Pool { .. }
        | SetupError::Image { .. }
        | SetupError::Unsupported { .. }
        | SetupError::Timeout { .. } => Errno::EIO,
    };
    Refusal::failed(errno, error)
}

struct Image(Arc<Rbd>);

impl KindInstance for Image {
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
            "image" => json!(self.0.image().to_string()),
            "snap" => json!(self.0.snap()),
            "last_error" => json!(self.0.last_error()),
            "readonly" => json!(entry.is_read_only()),
            "size" => json!(entry.size()),
            _ => return None,
        })
    }
}

const NAMES: [&str; 5] = ["image", "snap", "last_error", "readonly", "size"];
