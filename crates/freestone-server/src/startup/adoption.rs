//! Families that the holder has from a server that was killed, at the start of the next one.

use std::collections::{HashMap, HashSet};
use std::mem;
use std::path::Path;
use std::sync::Arc;

use freestone::ram::{FamilyMemory, Ram};
use freestone_control::protocol::RpcError;
use freestone_spec::family::FamilySpec;
use freestone_spec::kinds::{Entry, KindSpec, Spec};
use tracing::{error, info, warn};
use uuid::Uuid;

use crate::exports::BlockRecovery;
use crate::persistence::recorded::RecordedDevices;
use crate::recovery::{HolderChoice, RemoteFamilies, pid_of_holder};
use crate::service::Service;

/// Has the families of a server held. Called once, before devices exist.
///
/// # Errors
/// Fails if no holder can be started. Without `holder`, fails if there is one: a killed server has left devices in
/// memory, which this server would not adopt.
pub fn begin_holding(service: &Service, state: &Path, holder: Option<HolderChoice>) -> Result<(), RpcError> {
    let at = state.display();
    let Some(holder) = holder else {
        if let Some(pid) = pid_of_holder(state) {
            let found = format!("{at}: a killed server has left devices in memory, held by process {pid}");
            return Err(rpc_error!(
                EBUSY,
                "{found}; --recoverable adopts them, the end of that process frees them"
            ));
        }
        return Ok(());
    };
    let holder = RemoteFamilies::start(state, holder);
    let holder =
        holder.map_err(|why| rpc_error!(EIO, "{at}: recoverable: cannot start the holder: {why}"))?;
    let _ = service.registry.holder.set(Arc::clone(&holder) as _);
    let _ = service.recovery.set(holder);
    Ok(())
}

/// Finds the block devices that a killed server has left for its successor. A server that is not recoverable removes
/// them.
///
/// # Errors
/// Fails if a recoverable server cannot list them.
pub fn find_block_devices(
    service: &Service,
    state: &Path,
    recorded: &RecordedDevices,
) -> Result<(), RpcError> {
    let found = BlockRecovery::find(state);
    if service.recovery.get().is_some() {
        let _ = service.exports.block_recovery.set(found?);
        return Ok(());
    }
    let warn = |fault: RpcError| warn!("{}", fault.message);
    let found = found.map_err(warn);
    for device in recorded.all() {
        if let (Ok(blocks), Some(identity)) = (&found, device.identity()) {
            let _ = blocks.remove(&device.record.name, identity, false).map_err(warn);
        }
    }
    Ok(())
}

/// Held families, needed until all devices of the state are created.
#[derive(Default)]
pub struct HeldFamilies {
    families: Vec<HeldFamily>,
    /// Index in `families`, by the key of a device in the state.
    by_key: HashMap<u64, usize>,
    /// Keys of devices whose content this start has lost.
    lost: HashSet<u64>,
    /// Error of a family that cannot be opened. A device that is in no other family may be in that one.
    damaged: Option<String>,
}

struct HeldFamily {
    id: Uuid,
    state: Adoption,
}

/// State of the adoption of a family.
enum Adoption {
    /// The family is not adopted yet.
    Held(Box<FamilyMemory>),
    /// Devices that are not created yet, by key.
    Adopted(HashMap<u64, Ram>),
    /// The adoption failed with this error.
    Failed(RpcError),
}

impl HeldFamilies {
    /// Opens the families that the holder has. Families without a device of the state are released.
    pub fn open(service: &Service, recorded: &RecordedDevices) -> Self {
        let mut all = Self::default();
        let Some(holder) = service.recovery.get() else { return all };
        for (id, files) in holder.take_found() {
            let memory = match FamilyMemory::open(files) {
                Ok(memory) => memory,
                Err(why) => {
                    let why = format!("the memory of its family cannot be adopted: {why}");
                    error!("a killed server has left devices in memory: {why}");
                    all.damaged = Some(why);
                    continue;
                }
            };
            // The conditions of zones are not in the memory of the family.
            let is_known = |key: &u64| {
                let spec = recorded.find_by_key(*key).and_then(|device| device.spec.as_ref().ok());
                spec.is_some_and(|spec| spec.layers.zones.is_none())
            };
            let keys: Vec<_> = memory.keys().filter(is_known).collect();
            if keys.is_empty() {
                holder.release(id);
                continue;
            }
            all.by_key.extend(keys.iter().map(|key| (*key, all.families.len())));
            all.families.push(HeldFamily { id, state: Adoption::Held(Box::new(memory)) });
        }
        all
    }

    /// Records that the content of a device is lost, and so is that of all devices that read from it.
    pub fn lose(&mut self, key: u64) {
        self.lost.insert(key);
    }

    /// Returns the adopted content of a device, or `None` if no family has it. The first call for a family adopts
    /// all its devices.
    ///
    /// # Errors
    /// Fails if the family cannot be adopted.
    pub fn find(
        &mut self,
        service: &Service,
        recorded: &RecordedDevices,
        spec: &Spec,
        key: u64,
    ) -> Result<Option<Ram>, RpcError> {
        let is_held = matches!(spec.kind, KindSpec::Ram(_) | KindSpec::Fork(_) | KindSpec::Snapshot(_));
        if !is_held {
            return Ok(None);
        }
        let Some(index) = self.by_key.get(&key) else {
            return match &self.damaged {
                // The content may be in the damaged family. An empty device must not replace it.
                Some(why) => Err(rpc_error!(EIO, "{}: {why}", spec.name)),
                None => Ok(None),
            };
        };
        let HeldFamily { id, state } = &mut self.families[*index];
        if let Adoption::Held(_) = state {
            let Adoption::Held(memory) = mem::replace(state, Adoption::Adopted(HashMap::new())) else {
                unreachable!("matched above");
            };
            if memory.base_keys().any(|base| self.lost.contains(&base)) {
                if let Some(holder) = service.recovery.get() {
                    holder.release(*id);
                }
            } else {
                *state = match adopt(service, recorded, spec, *id, *memory) {
                    Ok(devices) => Adoption::Adopted(devices),
                    Err(why) => Adoption::Failed(why),
                };
            }
        }
        match state {
            Adoption::Adopted(devices) => Ok(devices.get(&key).cloned()),
            Adoption::Failed(why) => Err(why.clone()),
            Adoption::Held(_) => unreachable!("adopted above"),
        }
    }

    /// Records that a device with adopted content exists now.
    pub fn remove(&mut self, key: u64) {
        if let Some(index) = self.by_key.get(&key)
            && let Adoption::Adopted(devices) = &mut self.families[*index].state
        {
            devices.remove(&key);
        }
    }
}

impl Drop for HeldFamilies {
    /// Removes devices that are not in the state. The content of devices in the state that could not be created
    /// stays for the next start.
    fn drop(&mut self) {
        for family in &mut self.families {
            let Adoption::Adopted(devices) = &mut family.state else { continue };
            for (_, ram) in devices.drain().filter(|(key, _)| self.by_key.contains_key(key)) {
                mem::forget(ram);
            }
        }
    }
}

/// Adopts a family for its first device, `first`. Returns its devices by key.
fn adopt(
    service: &Service,
    recorded: &RecordedDevices,
    first: &Spec,
    id: Uuid,
    memory: FamilyMemory,
) -> Result<HashMap<u64, Ram>, RpcError> {
    let invalid = |why: String| rpc_error!(EIO, "{}: {why}", first.name);
    let owner = family_owner(recorded, first);
    let spec = FamilySpec::of_note(memory.note(), owner.and_then(|spec| spec.kind.family()));
    let spec = spec.map_err(invalid)?;
    let name = owner.map_or(&first.name, |owner| &owner.name);
    let adopted = service.registry.adopt_family(name, &spec, memory);
    let (family, devices) = adopted.map_err(|refusal| refusal.of(&first.name))?;
    if let Some(holder) = service.recovery.get() {
        holder.adopt(id, &family);
    }
    if let Some(owner) = service.registry.find(name) {
        owner.adopt_family(&family);
    }
    info!("{name}: adopted {} devices in memory", devices.len());
    Ok(devices)
}

/// Returns the specification of the device with the settings of the family of `first`: the RAM disk, or the base
/// of the forks. `None` if it was removed.
fn family_owner<'a>(recorded: &'a RecordedDevices, first: &'a Spec) -> Option<&'a Spec> {
    let mut spec = first;
    // The number of steps is limited, because the state could be damaged.
    for _ in recorded.all() {
        match spec.kind {
            KindSpec::Fork(_) | KindSpec::Snapshot(_) => {
                spec = recorded.find(spec.kind.parent_name()?)?.spec.as_ref().ok()?;
            }
            _ => return Some(spec),
        }
    }
    None
}

/// Lets the content of all devices of a start that has failed stay in memory for the next start.
pub fn leave(entries: &[Arc<Entry>]) {
    for ram in entries.iter().filter_map(|entry| entry.kind.ram()) {
        mem::forget(Arc::clone(ram));
    }
}
