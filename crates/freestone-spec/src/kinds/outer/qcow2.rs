//! Kind `qcow2`: read-only devices over qcow2 images.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use freestone::device::Device;
use freestone::file::FileChange;
use freestone::qcow2::Format;
use freestone::qcow2::{self, Image};
use serde_json::{Value, json};

use crate::entries::SpecError;
use crate::family::FamilySpec;
use crate::files::errno_of;
use crate::keys::{Keys, parse_bool, parse_path};
use crate::kinds::registry::Registry;
use crate::kinds::{DataDevice, Entry, KindConfig, KindInstance, KindSpec, Spec};
use crate::path_text;
use crate::refusal::{Errno, Refusal};

pub(in crate::kinds) const NAME: &str = "qcow2";
const NAMES: [&str; 3] = ["path", "standalone", "size"];

/// Specification of a device of kind `qcow2`.
#[derive(Debug, Clone, PartialEq)]
pub struct Qcow2Spec {
    /// Path of the qcow2 image.
    pub path: PathBuf,
    /// True to refuse an image that refers to other files.
    pub standalone: bool,
    /// Specification of the family (memory pool) of the image's forks.
    pub family: FamilySpec,
}

impl Qcow2Spec {
    pub(in crate::kinds) fn take(keys: &Keys) -> Result<Self, SpecError> {
        Ok(Self {
            path: keys.need("path", "path=disk.qcow2", parse_path)?,
            standalone: keys.take("standalone", parse_bool)?.unwrap_or(false),
            family: FamilySpec::take(keys)?,
        })
    }
}

impl KindConfig for Qcow2Spec {
    fn build(&self, _: &Spec, registry: &Registry) -> Result<DataDevice, Refusal> {
        let backing = registry.backing(&self.family)?;
        let config = qcow2::Config { path: self.path.clone(), standalone: self.standalone };
        let image = Arc::new(Image::open(&config).map_err(|e| image_refusal(&e))?);
        Ok(DataDevice { backing, ..DataDevice::standalone(Qcow2(Arc::clone(&image)), image) })
    }

    fn family(&self) -> Option<&FamilySpec> {
        Some(&self.family)
    }

    fn image(&self) -> Option<(&Path, Format)> {
        Some((&self.path, Format::Qcow2))
    }
}

fn image_refusal(error: &qcow2::SetupError) -> Refusal {
    let errno = match error {
        qcow2::SetupError::File(e) => errno_of(e),
        _ => Errno::EIO,
    };
    let hint = match error {
        qcow2::SetupError::Image { fault: qcow2::Fault::NotQcow2, .. } => "; a raw image is of kind file",
        _ => "",
    };
    Refusal::failed(errno, format!("{error}{hint}"))
}

struct Qcow2(Arc<Image>);

impl KindInstance for Qcow2 {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outside(&self) -> Option<&dyn Device> {
        Some(&*self.0)
    }

    fn changed(&self) -> Option<(PathBuf, FileChange)> {
        self.0.change()
    }

    fn file_identities(&self) -> Vec<(PathBuf, String)> {
        self.0.identities()
    }

    fn attrs(&self) -> &'static [&'static str] {
        &NAMES
    }

    fn value(&self, entry: &Entry, attr: &str) -> Option<Value> {
        let KindSpec::Qcow2(spec) = &entry.spec.kind else { return None };
        Some(match attr {
            "path" => json!(path_text::text(&spec.path)),
            "standalone" => json!(spec.standalone),
            "size" => json!(entry.size()),
            _ => return None,
        })
    }
}
