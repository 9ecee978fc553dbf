//! The devices of the state directory as a start finds them, with specifications and exports parsed once.

use std::collections::HashMap;
use std::sync::Arc;

use freestone_spec::entries::Entries;
use freestone_spec::kinds::{Identity, RESTORED, Spec};
use freestone_state::{Device, Topology};
use uuid::Uuid;

use crate::exports::UnparsedExport;
use crate::exports::export_spec::ExportSet;
use crate::persistence::records::parse_export;

/// A device of the state directory.
pub struct RecordedDevice {
    /// The state record.
    pub record: Device,
    /// Specification of the device, or the reason why it cannot be parsed.
    pub spec: Result<Spec, String>,
    /// Exports of the device.
    pub export_set: ExportSet,
    /// Exports whose records cannot be parsed.
    pub unparsed: Vec<UnparsedExport>,
}

/// All devices of the state directory, in order of creation.
#[derive(Default)]
pub struct RecordedDevices {
    all: Vec<Arc<RecordedDevice>>,
    by_name: HashMap<String, usize>,
    by_key: HashMap<u64, usize>,
}

impl RecordedDevices {
    /// Parses the devices of the state.
    pub fn parse(topology: &Topology) -> Self {
        let all: Vec<_> = topology.devices().map(|device| Arc::new(RecordedDevice::parse(device))).collect();
        let names = all.iter().map(|device| device.record.name.clone());
        let by_name = names.enumerate().map(|(index, name)| (name, index)).collect();
        let keys = all.iter().map(|device| device.identity().map(Identity::key));
        let by_key = keys.enumerate().filter_map(|(index, key)| Some((key?, index))).collect();
        Self { all, by_name, by_key }
    }

    /// Returns the devices in order of creation: a device comes after the devices it is based on.
    pub fn all(&self) -> &[Arc<RecordedDevice>] {
        &self.all
    }

    /// Returns the device with this [key](Identity::key).
    pub fn find_by_key(&self, key: u64) -> Option<&RecordedDevice> {
        self.by_key.get(&key).map(|index| &*self.all[*index])
    }

    /// Returns the device with this name.
    pub fn find(&self, name: &str) -> Option<&RecordedDevice> {
        self.by_name.get(name).map(|index| &*self.all[*index])
    }
}

impl RecordedDevice {
    /// Returns the identity of the device, or `None` if its UUID is damaged.
    pub fn identity(&self) -> Option<Identity> {
        identity(&self.record)
    }

    fn parse(record: &Device) -> Self {
        let mut export_set = ExportSet { at_server_addresses: record.home, exports: Vec::new() };
        let mut unparsed = Vec::new();
        for export in &record.exports {
            match parse_export(export) {
                Ok(wanted) => export_set.exports.push(wanted),
                Err(why) => unparsed.push(UnparsedExport { record: export.clone(), why }),
            }
        }
        Self { spec: parse_spec(&record.words), record: record.clone(), export_set, unparsed }
    }
}

/// Returns the identity in the record of a device, or `None` if its UUID is damaged.
pub fn identity(record: &Device) -> Option<Identity> {
    let uuid = Uuid::parse_str(&record.uuid).ok()?;
    Some(Identity { uuid, generation: record.generation })
}

fn parse_spec(words: &str) -> Result<Spec, String> {
    let words = Entries::parse(words).map_err(|why| why.to_string())?;
    if words.kind == RESTORED {
        return Err("it was restored from a file; restore that file again".to_owned());
    }
    Spec::from_entries(words).map_err(|why| why.to_string())
}
