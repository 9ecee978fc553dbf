//! Changes of the attributes of layers: parsed, checked, and then applied together.

use freestone::device;

use super::{Layers, bad_blocks, faults, zones};
use crate::refusal::Refusal;

/// Checked changes of layer attributes by a `set` command.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    faults: Option<String>,
    seed: Option<u64>,
    badblocks: Vec<String>,
    /// Attribute name and offset in bytes of each zone whose condition changes.
    conditions: Vec<(String, u64)>,
}

impl Changes {
    /// Parses the new value of an attribute of the device `name`. Returns false if the attribute is
    /// not a settable attribute of a layer.
    pub(crate) fn take(
        &mut self,
        layers: &Layers,
        name: &str,
        readonly: bool,
        attr: &str,
        text: &str,
    ) -> Result<bool, Refusal> {
        let invalid = |why: String| refusal!(invalid, "{name}: {attr}={text}: {why}");
        match attr {
            "faults" | "seed" if layers.faults.is_none() => {
                // If the kind does not support layers, the attribute is reported as unknown
                // instead.
                if layers.quiesce.is_none() && readonly {
                    return Ok(false);
                }
                let why = "the device was created without faults";
                refuse!(EINVAL, "{name}: {attr}={text}: {why}; create it with faults=none to set them later");
            }
            "faults" => self.faults = Some(faults::parse_faults(text).map_err(invalid)?),
            "seed" => self.seed = Some(faults::parse_seed(text).map_err(invalid)?),
            "badblocks" if layers.bad.is_some() => {
                self.badblocks = bad_blocks::parse_badblocks(text).map_err(invalid)?;
            }
            "zone_readonly" | "zone_offline" => {
                let Some(zones) = &layers.zones else { return Ok(false) };
                let offsets = zones::parse_zone_offsets(zones, text).map_err(invalid)?;
                self.conditions.extend(offsets.into_iter().map(|offset| (attr.to_owned(), offset)));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Fails if the layers would refuse these changes in [`apply`](Self::apply).
    pub(crate) fn check(&self, layers: &Layers, name: &str, readonly: bool) -> Result<(), Refusal> {
        if let Some(bad) = &layers.bad {
            let checked = bad.check_all(&self.badblocks);
            checked.map_err(|e| refusal!(EINVAL, "{name}: {e}"))?;
        }
        match self.conditions.first() {
            Some((attr, offset)) if readonly => {
                Err(zones::not_changed(name, attr, *offset, &device::Error::ReadOnly.to_string()))
            }
            _ => Ok(()),
        }
    }

    /// Applies the changes to the layers.
    pub(crate) fn apply(self, layers: &Layers, name: &str) -> Result<(), Refusal> {
        if let Some(bad) = &layers.bad {
            let changed = bad.change_all(&self.badblocks);
            changed.map_err(|e| refusal!(EINVAL, "{name}: {e}"))?;
        }
        if let Some(zones) = &layers.zones {
            for (attr, offset) in &self.conditions {
                zones::set(zones, name, attr, *offset)?;
            }
        }
        if let Some(layer) = &layers.faults {
            match (self.faults, self.seed) {
                (None, None) => {}
                (Some(rules), seed) => layer.set(faults::rules_of(&rules), seed),
                (None, seed) => layer.set(layer.rules(), seed),
            }
        }
        Ok(())
    }
}
