//! Restoring of kept content at the start of a server.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;
use std::{io, thread};

use freestone::keep::{BackgroundLoad, Keep, KeepError, LoadOutcome};
use freestone::ram::{Family, Ram};
use freestone_control::protocol::RpcError;
use freestone_spec::kinds::{KindSpec, Spec};
use freestone_spec::refusal::Refusal;
use freestone_spec::times;
use freestone_state::Device;
use tracing::{error, info, warn};

use super::{Group, Saves, forget, stamp, unused};
use crate::persistence::recorded::{RecordedDevice, RecordedDevices};
use crate::persistence::restoring::{CREATE_BASE, as_base, find_base};
use crate::service::Service;

/// Directories with saved content, needed until all devices of the state are created.
pub struct SavedContents {
    dirs: Vec<Dir>,
    /// Index in `dirs` of the directory with a device's content, by UUID of the device.
    by_uuid: HashMap<String, usize>,
    /// Error of a directory that cannot be opened. A device that is in no other directory may be in the damaged one.
    damaged: Option<String>,
}

/// A directory with saved content.
struct Dir {
    path: PathBuf,
    state: Content,
    /// Time of the save.
    when: SystemTime,
    /// UUIDs of the devices in the directory that are also in the state.
    members: HashSet<String>,
}

/// Restore state of a directory with saved content.
enum Content {
    /// The content is not restored yet.
    Closed(Box<Keep>),
    /// Restored devices that [`SavedContents::take`] has not returned yet, by UUID.
    Open(HashMap<String, Ram>),
    /// Restoring failed with this error.
    Failed(RpcError),
}

impl Saves {
    /// Finds the saved content of the devices in `recorded`. Removes directories without a save, and expired
    /// directories of other devices.
    pub fn find(&self, recorded: &RecordedDevices) -> Result<SavedContents, RpcError> {
        let mut restores = SavedContents { dirs: Vec::new(), by_uuid: HashMap::new(), damaged: None };
        let Some((content, _)) = self.at.get() else { return Ok(restores) };
        let failed = |why: io::Error| rpc_error!(EIO, "{}: {why}", content.display());
        let uuids: HashSet<&str> = recorded.all().iter().map(|device| device.record.uuid.as_str()).collect();
        for path in unused::directories(content).map_err(failed)? {
            let mut keep = match Keep::open(&path) {
                Ok(keep) => keep,
                Err(why) => {
                    error!("{}: {why}", path.display());
                    restores.damaged = Some(why.to_string());
                    continue;
                }
            };
            let Some(kept) = keep.contents() else {
                info!("{}: removed, because it has no save", path.display());
                unused::unmark(&path);
                forget(&mut keep, &path);
                continue;
            };
            let (names, when) = (kept.contents.devices.iter().map(|device| &device.name), kept.saved_at);
            let members: HashSet<String> =
                names.filter(|uuid| uuids.contains(uuid.as_str())).cloned().collect();
            if !members.is_empty() {
                unused::unmark(&path);
                restores.add(Dir { path, state: Content::Closed(Box::new(keep)), when, members });
            } else if unused::has_expired(&path, when) {
                warn!("{}: removed, because it has belonged to no device for a week", path.display());
                unused::unmark(&path);
                forget(&mut keep, &path);
            } else {
                let saved = times::format_utc(when);
                warn!(
                    "{}: content saved at {saved} belongs to no device; it is kept for a week",
                    path.display()
                );
            }
        }
        Ok(restores)
    }
}

/// Restored content of a device.
pub struct SavedContent {
    /// The content, as a RAM disk, fork or snapshot.
    pub ram: Ram,
    /// Time of the save.
    pub when: SystemTime,
    /// True if the content is what the device had when the previous server ended.
    pub is_exact: bool,
}

impl SavedContents {
    /// Adds a directory. If two directories contain the same device, the newer directory is used, and the other is left
    /// unchanged.
    fn add(&mut self, dir: Dir) {
        for uuid in &dir.members {
            let Some(other) = self.by_uuid.get(uuid).map(|number| &self.dirs[*number]) else {
                self.by_uuid.insert(uuid.clone(), self.dirs.len());
                continue;
            };
            let is_newer = dir.when > other.when;
            let (used, unused) = if is_newer { (&dir, other) } else { (other, &dir) };
            let (used, unused) = (used.path.display(), unused.path.display());
            warn!("{unused}: ignored, because {used} has newer content of the device {uuid}");
            if is_newer {
                self.by_uuid.insert(uuid.clone(), self.dirs.len());
            }
        }
        self.dirs.push(dir);
    }

    /// Has the next saves of the family of `ram`, the adopted content of a device, replace the saved content.
    pub fn supersede(&mut self, service: &Service, device: &Device, ram: &Ram) {
        let Some(dir) = self.by_uuid.get(&device.uuid).map(|number| &mut self.dirs[*number]) else { return };
        if let Content::Closed(_) = dir.state
            && let Content::Closed(keep) = std::mem::replace(&mut dir.state, Content::Open(HashMap::new()))
        {
            service.saves.add(ram.family(), dir.path.clone(), *keep);
        }
    }

    /// Returns the saved content of a device, or `None` if it was not saved. The first call for a directory restores
    /// all devices in that directory.
    pub fn take(
        &mut self,
        service: &Service,
        recorded: &RecordedDevices,
        device: &Device,
        spec: &Spec,
    ) -> Result<Option<SavedContent>, RpcError> {
        let Some(number) = self.by_uuid.get(&device.uuid).copied() else {
            return match &self.damaged {
                // The content may be in the damaged directory. An empty device must not replace it.
                Some(why) => Err(rpc_error!(EIO, "{}: content is damaged: {why}", device.name)),
                None => Ok(None),
            };
        };
        let dir = &mut self.dirs[number];
        if let Content::Closed(_) = dir.state {
            let closed = std::mem::replace(&mut dir.state, Content::Open(HashMap::new()));
            let Content::Closed(keep) = closed else { unreachable!("matched above") };
            dir.state = match restore(service, recorded, dir, *keep, spec) {
                Ok(devices) => Content::Open(devices),
                Err(fault) => Content::Failed(fault),
            };
        }
        let when = dir.when;
        match &mut dir.state {
            Content::Failed(fault) => Err(fault.clone()),
            Content::Open(devices) => Ok(devices.remove(&device.uuid).map(|ram| {
                let is_exact = device.saved == Some(stamp(when));
                SavedContent { ram, when, is_exact }
            })),
            Content::Closed(_) => unreachable!("opened above"),
        }
    }
}

/// Creates the devices of a directory, and begins to load their content.
fn restore(
    service: &Service,
    recorded: &RecordedDevices,
    dir: &Dir,
    mut keep: Keep,
    first: &Spec,
) -> Result<HashMap<String, Ram>, RpcError> {
    let name = &first.name;
    let failed = |why: &KeepError| rpc_error!(EIO, "{name}: cannot restore its content: {why}");
    let Some(contents) = keep.contents().map(|kept| kept.contents.clone()) else {
        return Err(RpcError::internal(format!("{name}: its content is gone")));
    };
    let find = || find_base(&service.registry, &contents, CREATE_BASE, &|| false);
    let base = match (contents.bases.is_empty(), base_name(recorded, &dir.members)) {
        // Several bases may have the same content; this base has the recorded name. restore() verifies its content.
        (false, Some(base)) => Some(service.find(&base)?),
        _ => find().map_err(|refusal| RpcError::from(refusal.of(name)))?,
    };
    let (family, bases) = match base {
        Some(base) => (base.ensure_family(&service.registry)?, vec![as_base(&base)]),
        None => (own_family(service, recorded, &dir.members, first)?, Vec::new()),
    };
    let restored = keep.restore(&family, &bases, &|| false).map_err(|why| failed(&why));
    let (devices, loading) = restored?;
    let group = service.saves.add(family, dir.path.clone(), keep);
    load(service, &group, loading, name);
    Ok(devices.into_iter().collect())
}

/// Returns the name of the base of the member forks, or `None` if the base is a member itself.
fn base_name(recorded: &RecordedDevices, members: &HashSet<String>) -> Option<String> {
    let mut bases = specs_of(recorded, members).filter_map(|spec| match &spec.kind {
        KindSpec::Fork(fork) => Some(&fork.base),
        _ => None,
    });
    let is_member = |device: &RecordedDevice| members.contains(&device.record.uuid);
    bases.find(|base| !recorded.find(base).is_some_and(is_member)).cloned()
}

/// Returns the specifications of the member devices.
fn specs_of<'a>(recorded: &'a RecordedDevices, members: &HashSet<String>) -> impl Iterator<Item = &'a Spec> {
    let own = recorded.all().iter().filter(|device| members.contains(&device.record.uuid));
    own.filter_map(|device| device.spec.as_ref().ok())
}

/// Returns a new family for the RAM disk in `members`, with its snapshots and forks.
fn own_family(
    service: &Service,
    recorded: &RecordedDevices,
    members: &HashSet<String>,
    first: &Spec,
) -> Result<Family, RpcError> {
    let disk = specs_of(recorded, members).find(|spec| matches!(spec.kind, KindSpec::Ram(_)));
    let spec = disk.unwrap_or(first);
    let Some(family) = spec.kind.family() else {
        return Err(rpc_error!(EINVAL, "{}: its base does not exist", first.name));
    };
    let of = |refusal: Refusal| refusal.of(&spec.name);
    let backing = service.registry.backing(family).map_err(of)?;
    let size = spec.kind.size().unwrap_or_default();
    Ok(service.registry.new_family(&spec.name, family, size, backing.as_ref(), true).map_err(of)?)
}

/// Loads restored content into memory in the background. Pages that are not loaded yet are read from the files.
fn load(service: &Service, group: &Arc<Group>, mut loading: BackgroundLoad, name: &str) {
    let (group, name) = (Arc::clone(group), name.to_owned());
    group.status.lock().loading = Some(loading.progress());
    let weak = service.weak();
    let work = move || {
        let stops = || weak.upgrade().is_none_or(|service| service.saves.stops());
        let loaded = loading.run(&stops, &mut |done, all| group.status.lock().loading = Some((done, all)));
        match loaded {
            LoadOutcome::Complete => {
                // Before the end of loading is visible, and after it for devices that were added meanwhile.
                let record_keys = || {
                    if let Some(service) = weak.upgrade() {
                        service.record_keys(&group.family);
                    }
                };
                record_keys();
                group.status.lock().loading = None;
                record_keys();
                info!("{name}: all saved content is in memory");
            }
            LoadOutcome::Incomplete(pages) => {
                error!(
                    "{name}: {pages} saved pages are unreadable; reads of them fail until they are overwritten"
                );
                group.status.lock().lost_pages = pages;
            }
            LoadOutcome::Cancelled => {}
        }
    };
    match thread::Builder::new().name("load".into()).spawn(work) {
        Ok(thread) => service.saves.adopt(thread),
        Err(why) => {
            warn!("cannot start a thread that loads saved content: {why}; reads from its files are slow");
        }
    }
}
