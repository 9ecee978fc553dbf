//! Kind `file`: devices over raw image files and block devices.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use freestone::cow;
use freestone::device::{Device, DropObserver};
use freestone::file::{self, Direct, File, FileChange};
use freestone::qcow2::Format;
use serde_json::{Value, json};

use crate::entries::SpecError;
use crate::family::FamilySpec;
use crate::files::open;
use crate::keys::{Keys, parse_bool, parse_length, parse_path};
use crate::kinds::registry::Registry;
use crate::kinds::{DataDevice, Entry, KindConfig, KindInstance, Spec};
use crate::layers::{DataInfo, check_unzoned};
use crate::notes::FileNotes;
use crate::path_text;
use crate::refusal::Refusal;

pub(in crate::kinds) const NAME: &str = "file";

/// Specification of a device of kind `file`.
#[derive(Debug, Clone, PartialEq)]
pub struct FileSpec {
    /// Path of the image file or block device.
    pub path: PathBuf,
    /// True if the device is read-only.
    pub readonly: bool,
    /// Use of `O_DIRECT`: always, never, or only for block devices.
    pub direct: Direct,
    /// Expected or initial size in bytes, or `None` for the size of the file.
    pub size: Option<u64>,
    /// Specification of the family (memory pool) of the device's forks.
    pub family: FamilySpec,
}

impl FileSpec {
    pub(in crate::kinds) fn take(keys: &Keys) -> Result<Self, SpecError> {
        let path = keys.need("path", "path=disk.img", parse_path)?;
        let readonly = keys.take("readonly", parse_bool)?.unwrap_or(false);
        keys.check_base(readonly, "readonly=yes", "file")?;
        Ok(Self {
            path,
            readonly,
            direct: keys.take("direct", parse_direct)?.unwrap_or(Direct::Auto),
            size: keys.take("size", parse_length)?,
            family: FamilySpec::take(keys)?,
        })
    }
}

fn parse_direct(text: &str) -> Result<Direct, String> {
    match text {
        "auto" => Ok(Direct::Auto),
        "on" => Ok(Direct::On),
        "off" => Ok(Direct::Off),
        _ => Err("must be auto, on or off".into()),
    }
}

impl KindConfig for FileSpec {
    fn build(&self, spec: &Spec, registry: &Registry) -> Result<DataDevice, Refusal> {
        let backing = registry.backing(&self.family)?;
        let mut config = file::Config::new(&self.path);
        (config.read_only, config.direct, config.size) = (self.readonly, self.direct, self.size);
        let zoned = spec.layers.zones.is_some();
        if !self.readonly && !zoned {
            check_unzoned(&self.path)?;
        }
        config.padded = true;
        let file = Arc::new(open(&config, "size")?);
        let notes = FileNotes::read(Arc::clone(&file)).map_err(|why| refusal!(EIO, "{why}"))?;
        if (zoned || file.geometry().read_only)
            && let Some(why) = notes.half_merged_message(&spec.name)
        {
            let key = if zoned { "zoned=1" } else { "readonly=yes" };
            refuse!(EBUSY, "{why}, and without {key}");
        }
        let disk = FileDisk { file: Arc::clone(&file), notes };
        Ok(DataDevice { backing, ..DataDevice::standalone(disk, file) })
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

    fn image(&self) -> Option<(&Path, Format)> {
        Some((&self.path, Format::Raw))
    }

    fn data_info(&self) -> DataInfo<'_> {
        DataInfo { file: Some(&self.path), drive: None }
    }
}

/// Open raw image file or block device.
struct FileDisk {
    file: Arc<File>,
    notes: FileNotes,
}

impl KindInstance for FileDisk {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outside(&self) -> Option<&dyn Device> {
        Some(&*self.file)
    }

    fn notes(&self) -> Box<dyn cow::Notes> {
        Box::new(self.notes.clone())
    }

    fn changed(&self) -> Option<(PathBuf, FileChange)> {
        Some((self.file.path().to_owned(), self.file.change()?))
    }

    fn file_identities(&self) -> Vec<(PathBuf, String)> {
        let identity = self.file.identity().map(|identity| (self.file.path().to_owned(), identity));
        identity.into_iter().collect()
    }

    fn half_merged_message(&self, name: &str) -> String {
        self.notes.half_merged_message(name).unwrap_or_else(|| {
            format!("{}: an unfinished merge left it half old, half new", self.file.path().display())
        })
    }

    fn drop_observer(&self) -> Option<DropObserver> {
        (!self.file.geometry().read_only).then(|| self.file.drop_observer())
    }

    fn attrs(&self) -> &'static [&'static str] {
        &NAMES
    }

    fn value(&self, entry: &Entry, attr: &str) -> Option<Value> {
        Some(match attr {
            "path" => json!(path_text::text(self.file.path())),
            "direct" => json!(if self.file.is_direct() { "on" } else { "off" }),
            "readonly" => json!(entry.is_read_only()),
            "size" => json!(entry.size()),
            _ => return None,
        })
    }
}

const NAMES: [&str; 4] = ["path", "readonly", "direct", "size"];
