//! What a server finds that another one has saved.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::SystemTime;

use freestone::keep::{Keep, KeepError, Loaded, Loading};
use freestone::ram::{Family, Ram};
use freestone_spec::kinds::{KindSpec, Spec};
use freestone_spec::refusal::{Errno, Refusal};
use freestone_spec::times;
use freestone_state::{Device, Topology};
use tracing::{error, info, warn};

use super::{Group, Saves, forget, stamp, unused};
use crate::control::protocol::Fault;
use crate::restoring::{CREATE_BASE, as_base, find_base};
use crate::service::Service;

/// Directories with content, until all devices are there.
pub struct Restores {
    dirs: Vec<Dir>,
    /// By UUID, the directory.
    by_uuid: HashMap<String, usize>,
    /// A directory cannot be used: who is missing may be in there.
    damaged: Option<String>,
}

struct Dir {
    path: PathBuf,
    state: Content,
    when: SystemTime,
    /// All devices of the state that are in it.
    members: HashSet<String>,
}

enum Content {
    /// Nobody has asked for it yet.
    Closed(Box<Keep>),
    /// By UUID, what nobody has taken yet.
    Open(HashMap<String, Ram>),
    Failed(Fault),
}

impl Saves {
    /// Looks at what was saved of the devices of a state. What has belonged to none of them for long goes.
    pub fn find(&self, topology: &Topology) -> Result<Restores, Fault> {
        let mut restores = Restores { dirs: Vec::new(), by_uuid: HashMap::new(), damaged: None };
        let Some((content, _)) = self.at.get() else { return Ok(restores) };
        let failed = |why: io::Error| Fault::failed(Errno::EIO, format!("{}: {why}", content.display()));
        let uuids: HashSet<&str> = topology.devices().map(|device| device.uuid.as_str()).collect();
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
                info!("{}: has no save, and is removed", path.display());
                unused::unmark(&path);
                forget(&mut keep, &path);
                continue;
            };
            let (names, when) = (kept.contents.devices.iter().map(|device| &device.name), kept.when);
            let members: HashSet<String> =
                names.filter(|uuid| uuids.contains(uuid.as_str())).cloned().collect();
            if !members.is_empty() {
                unused::unmark(&path);
                restores.add(Dir { path, state: Content::Closed(Box::new(keep)), when, members });
            } else if unused::has_expired(&path, when) {
                warn!("{}: has belonged to no device for long, and is removed", path.display());
                unused::unmark(&path);
                forget(&mut keep, &path);
            } else {
                let saved = times::shown(when);
                warn!(
                    "{}: holds content of {saved} that belongs to no device; stays for a week",
                    path.display()
                );
            }
        }
        Ok(restores)
    }
}

/// Content of a device as of a save.
pub struct Restored {
    /// The content.
    pub ram: Ram,
    /// Of when it is.
    pub when: SystemTime,
    /// It is what the device had when the server before ended.
    pub is_exact: bool,
}

impl Restores {
    /// Of two directories with the same device the newer one has it; the other one is left as it is.
    fn add(&mut self, dir: Dir) {
        for uuid in &dir.members {
            let Some(other) = self.by_uuid.get(uuid).map(|number| &self.dirs[*number]) else {
                self.by_uuid.insert(uuid.clone(), self.dirs.len());
                continue;
            };
            let is_newer = dir.when > other.when;
            let (used, left) = if is_newer { (&dir, other) } else { (other, &dir) };
            let (used, left) = (used.path.display(), left.path.display());
            warn!("{left}: holds an older content of the device {uuid} than {used}, and is left alone");
            if is_newer {
                self.by_uuid.insert(uuid.clone(), self.dirs.len());
            }
        }
        self.dirs.push(dir);
    }

    /// The content of a device; nothing where none was saved.
    pub fn take(
        &mut self,
        service: &Service,
        topology: &Topology,
        device: &Device,
        spec: &Spec,
    ) -> Result<Option<Restored>, Fault> {
        let Some(number) = self.by_uuid.get(&device.uuid).copied() else {
            return match &self.damaged {
                // It may be there, and a save would go over it.
                Some(why) => {
                    Err(Fault::failed(Errno::EIO, format!("{}: content is damaged: {why}", device.name)))
                }
                None => Ok(None),
            };
        };
        let dir = &mut self.dirs[number];
        if let Content::Closed(_) = dir.state {
            let open = std::mem::replace(&mut dir.state, Content::Open(HashMap::new()));
            let Content::Closed(keep) = open else { unreachable!("looked at above") };
            dir.state = match restore(service, topology, dir, *keep, spec) {
                Ok(devices) => Content::Open(devices),
                Err(fault) => Content::Failed(fault),
            };
        }
        let when = dir.when;
        match &mut dir.state {
            Content::Failed(fault) => Err(fault.clone()),
            Content::Open(devices) => Ok(devices.remove(&device.uuid).map(|ram| {
                let is_exact = device.saved == Some(stamp(when));
                Restored { ram, when, is_exact }
            })),
            Content::Closed(_) => unreachable!("opened above"),
        }
    }
}

/// Makes the devices of a directory, and begins to load them.
fn restore(
    service: &Service,
    topology: &Topology,
    dir: &Dir,
    mut keep: Keep,
    first: &Spec,
) -> Result<HashMap<String, Ram>, Fault> {
    let name = &first.name;
    let failed = |why: &KeepError| Fault::failed(Errno::EIO, format!("{name}: its content: {why}"));
    let Some(contents) = keep.contents().map(|kept| kept.contents.clone()) else {
        return Err(Fault::internal(format!("{name}: its content is gone")));
    };
    let find = || find_base(&service.registry, &contents, CREATE_BASE, &|| false);
    let base = match (contents.bases.is_empty(), base_name(topology, &dir.members)) {
        // Of several that are the same it is this one; whether it is still the same is looked at below.
        (false, Some(base)) => Some(service.find(&base)?),
        _ => find().map_err(|refusal| Fault::from(refusal.of(name)))?,
    };
    let (family, bases) = match base {
        Some(base) => (base.family_of(&service.registry)?, vec![as_base(&base)]),
        None => (own_family(service, topology, &dir.members, first)?, Vec::new()),
    };
    let restored = keep.restore(&family, &bases, &|| false).map_err(|why| failed(&why));
    let (devices, loading) = restored?;
    let group = service.saves.add(family, dir.path.clone(), keep);
    load(service, &group, loading, name);
    Ok(devices.into_iter().collect())
}

/// The base of forks that are members, where it is none itself.
fn base_name(topology: &Topology, members: &HashSet<String>) -> Option<String> {
    let own = topology.devices().filter(|device| members.contains(&device.uuid));
    let bases = own.filter_map(|device| match device.words.parse::<Spec>().ok()?.kind {
        KindSpec::Fork(fork) => Some(fork.base),
        _ => None,
    });
    let is_other = |base: &String| topology.find(base).is_none_or(|device| !members.contains(&device.uuid));
    bases.into_iter().find(is_other)
}

/// The family of a RAM disk and of what came of it.
fn own_family(
    service: &Service,
    topology: &Topology,
    members: &HashSet<String>,
    first: &Spec,
) -> Result<Family, Fault> {
    let own = topology.devices().filter(|device| members.contains(&device.uuid));
    let specs = own.filter_map(|device| device.words.parse::<Spec>().ok());
    let disk = specs.into_iter().find(|spec| matches!(spec.kind, KindSpec::Ram(_)));
    let spec = disk.as_ref().unwrap_or(first);
    let Some(family) = spec.kind.family() else {
        return Err(Fault::failed(Errno::EINVAL, format!("{}: its base is not there", first.name)));
    };
    let of = |refusal: Refusal| refusal.of(&spec.name);
    let backing = service.registry.backing(family).map_err(of)?;
    let size = spec.kind.size().unwrap_or_default();
    Ok(service.registry.new_family(&spec.name, family, size, backing.as_ref()).map_err(of)?)
}

/// Loads what was restored, in the background. What was not loaded is read from the files.
fn load(service: &Service, group: &Arc<Group>, mut loading: Loading, name: &str) {
    let (group, name) = (Arc::clone(group), name.to_owned());
    group.told().loading = Some(loading.progress());
    let weak = service.weak();
    let work = move || {
        let stops = || weak.upgrade().is_none_or(|service| service.saves.stops());
        let loaded = loading.run(&stops, &mut |done, all| group.told().loading = Some((done, all)));
        match loaded {
            Loaded::All => {
                group.told().loading = None;
                info!("{name}: all that was saved is in memory");
            }
            Loaded::AllBut(pages) => {
                error!(
                    "{name}: {pages} pages of what was saved cannot be read; reads fail until they are written"
                );
                group.told().lost_pages = pages;
            }
            Loaded::Cancelled => {}
        }
    };
    match thread::Builder::new().name("load".into()).spawn(work) {
        Ok(thread) => service.saves.adopt(thread),
        Err(why) => warn!("what was saved stays in its files, which is slow: no thread to load it: {why}"),
    }
}
