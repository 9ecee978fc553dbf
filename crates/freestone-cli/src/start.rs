//! What a server begins with: the devices of its command line and file, or those of its state.

use std::collections::{HashMap, HashSet};
use std::io;
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use freestone::mutants::{self, Mutant};
use freestone_nbd::{Address, AllowList};
use freestone_spec::entries::Entries;
use freestone_spec::kinds::{self, Entry, Identity, OnLost, RESTORED, Spec};
use freestone_spec::refusal::Errno;
use freestone_state::{Device, State, Topology};
use tracing::{error, info, warn};
use uuid::Uuid;

use crate::again;
use crate::apply::{self, Extent};
use crate::claims::Claim;
use crate::control::protocol::Fault;
use crate::declared::{self, Declared};
use crate::exports::Unread;
use crate::paths::parse_address;
use crate::places::{Place, Seen, Wanted};
use crate::recording::{self, Recording};
use crate::records;
use crate::saves::start::Restores;
use crate::service::Service;
use crate::state_args::Asked;

/// A device that is there, and is not seen by anybody yet.
pub struct Begun {
    entry: Arc<Entry>,
    /// Where it is to be seen.
    seen: Seen,
}

impl Begun {
    /// Whether it is to be a block device.
    pub fn is_block_device(&self) -> bool {
        self.seen.exports.iter().any(|(wanted, _)| matches!(wanted.place, Place::Ublk(_)))
    }
}

/// Opens a state, and keeps it from now on. What other words say than it does is refused, unless they
/// are to be brought in.
pub fn open(service: &Service, asked: &Asked, devices: &[Declared]) -> Result<Topology, Fault> {
    let failed = |why: String| Fault::failed(Errno::EINVAL, why);
    let (state, unfinished) = State::open(&asked.dir).map_err(|why| failed(why.to_string()))?;
    for one in unfinished {
        warn!("{}: {} had begun when the server ended, and is not done", one.names.join(", "), one.verb);
    }
    let topology = state.topology();
    let is_new = topology.devices().next().is_none();
    let differs =
        if is_new || asked.apply { Vec::new() } else { differences(&topology, devices, asked.has_file) };
    if differs.is_empty() {
        service.saves.begin(state.dir(), asked.saves);
        service.records.keep(state);
        return Ok(topology);
    }
    let differs = differs.join("; ");
    let hint = "--apply does that; without devices and --config all is as the state has it";
    Err(failed(format!("{}: is otherwise than what is asked for: {differs}; {hint}", asked.dir.display())))
}

/// What would have to change so that the devices of a state are as they are asked for.
fn differences(topology: &Topology, asked: &[Declared], has_file: bool) -> Vec<String> {
    let mut differs = Vec::new();
    let taken = declared::taken(asked);
    let names: HashSet<&str> = asked.iter().map(|device| device.spec.name.as_str()).collect();
    let gone = |device: &&Device| has_file && device.declared && !names.contains(device.name.as_str());
    differs.extend(topology.devices().filter(gone).map(|device| format!("remove {}", device.name)));
    for Declared { spec, exports, .. } in asked {
        let name = &spec.name;
        let Some(device) = topology.find(name) else {
            differs.push(format!("create {}", spec.words));
            continue;
        };
        if !device.words.parse::<Spec>().is_ok_and(|is| is.is_same(spec)) {
            differs.push(format!("{name}: {} is to be {}", device.words, spec.words));
        }
        let home = spec.publish.unwrap_or_else(|| !taken.contains(name.as_str()));
        if home != device.home {
            differs.push(format!("{} {name}", if home { "publish" } else { "unpublish" }));
        }
        let places = places(device).0.exports;
        let is = |wanted: &Wanted, known: &Wanted| {
            let same_port = known.place.is(&wanted.place) || known.place.has_chosen_port_of(&wanted.place);
            same_port
                && known.read_only == wanted.read_only
                && known.allow == wanted.allow
                && known.limits == wanted.limits
        };
        for wanted in exports {
            if !places.iter().any(|(known, _)| is(wanted, known)) {
                differs.push(format!("publish {name} at {}", wanted.place));
            }
        }
        let gone = |(known, declared): &&(Wanted, bool)| {
            *declared && !exports.iter().any(|wanted| is(wanted, known))
        };
        for (known, _) in places.iter().filter(gone) {
            differs.push(format!("unpublish {name} from {}", known.place));
        }
    }
    differs
}

/// Sets up the devices that were asked for.
pub fn of_words(service: &Service, devices: Vec<Declared>) -> Result<Vec<Begun>, Fault> {
    let _ahead = service.registry.ahead.begin(devices.iter().map(|device| &device.spec));
    let mut begun = Vec::with_capacity(devices.len());
    for device in devices {
        let declared = device.is_of_file();
        let Declared { spec, exports, .. } = device;
        let publish = spec.publish;
        let claim = service.claim_new("serve", [&spec])?;
        let entry = service.create(&claim, spec, false)?;
        if declared {
            service.declarations.declare(entry.name());
        }
        let exports = exports.into_iter().map(|wanted| (wanted, declared)).collect();
        begun.push((entry, publish, exports));
    }
    // What another has to itself is nobody's to see, unless that was said; then it is refused.
    let seen = |(entry, publish, exports): (Arc<Entry>, Option<bool>, _)| {
        let home = service.belongs_at_home(publish, &entry);
        Begun { entry, seen: Seen { home, exports } }
    };
    Ok(begun.into_iter().map(seen).collect())
}

/// What devices of a state are made again with.
pub struct Again {
    topology: Topology,
    saved: Restores,
    /// Devices that are not there, or not as they were.
    lost: HashSet<String>,
    /// Control sockets are served: a verb may remove a device, or make another one in its place.
    is_late: bool,
}

impl Again {
    /// Looks for the content of devices, and reserves their addresses.
    pub fn new(service: &Service, topology: Topology) -> Result<Self, Fault> {
        let saved = service.saves.find(&topology)?;
        for device in topology.devices() {
            for address in device.default_at.iter().filter_map(|text| parse_address(text, None).ok()) {
                service.exports.defaults.reserve(address, &device.name);
            }
        }
        Ok(Self { topology, saved, lost: HashSet::new(), is_late: false })
    }
}

/// Makes a device of a state again, which nobody sees yet. One that cannot be made holds up no other: it
/// is logged, and stays in the state.
pub fn begin(service: &Service, device: &Device, all: &mut Again) -> Option<Begun> {
    match again(service, device, all) {
        Ok((entry, is_lost)) => {
            if is_lost {
                all.lost.insert(device.name.clone());
            }
            let (mut seen, unread) = places(device);
            for export in &unread {
                error!("{}: not published at {}: {}", device.name, export.place(), export.why);
            }
            service.exports.absent.keep_unread(&device.name, unread);
            let withholds = entry.spec.on_lost.unwrap_or_default() == OnLost::Withhold
                && !mutants::on(Mutant::LostIsShown);
            if device.withheld || (is_lost && withholds) {
                service.withheld.put(&device.name, mem::take(&mut seen));
            }
            if device.declared {
                service.declarations.declare(&device.name);
            }
            Some(Begun { entry, seen })
        }
        Err(_) if all.is_late && !is_missing(service, device) => None,
        Err(fault) => {
            error!(device = %device.name, "cannot be set up again: {}", fault.message);
            service.records.miss(&device.name, &fault.message);
            all.lost.insert(device.name.clone());
            None
        }
    }
}

/// Returns true if a device of the state is not there, and no verb has removed or replaced it.
fn is_missing(service: &Service, device: &Device) -> bool {
    service.records.why_missing(&device.name).is_some()
}

/// Returns true if a device is still there: a verb may have removed it.
fn is_there(service: &Service, entry: &Arc<Entry>) -> bool {
    service.registry.find(entry.name()).is_some_and(|found| Arc::ptr_eq(&found, entry))
}

/// Makes devices that stand on one another, and shows them, while others are served. Those that were
/// removed or made anew meanwhile stay so.
pub fn show_late(service: &Arc<Service>, devices: &[Device], all: &mut Again) -> Result<(), Fault> {
    all.is_late = true;
    let missing: Vec<_> = devices.iter().filter(|device| is_missing(service, device)).collect();
    let mut begun: Vec<_> = missing.into_iter().filter_map(|device| begin(service, device, all)).collect();
    begun.retain(|device| is_there(service, &device.entry));
    if service.records.is_over() {
        // What the state says of them stays: nobody has seen them.
        return Ok(());
    }
    keep(service, &mut begun);
    merge(service, &mut begun);
    for Begun { entry, seen } in &begun {
        // So that a verb that comes before the exports does not take them out of the state.
        service.exports.absent.put_all(entry.name(), seen, "the device has just been set up");
        service.records.found(entry.name());
    }
    show(service, &begun)
}

/// Makes a device again. True: what it holds or shows is not what it was when the server before ended.
fn again(service: &Service, device: &Device, all: &mut Again) -> Result<(Arc<Entry>, bool), Fault> {
    let Again { topology, saved, lost, is_late } = all;
    let invalid = |why: String| Fault::failed(Errno::EINVAL, why);
    let words = Entries::parse(&device.words).map_err(|why| invalid(why.to_string()))?;
    if words.kind == RESTORED {
        return Err(invalid("it came out of a file, which has to be restored again".to_owned()));
    }
    let mut spec = Spec::from_entries(words.clone()).map_err(|why| invalid(why.to_string()))?;
    if let Some(log) = &spec.layers.record
        && lies_there(log)
            .map_err(|why| invalid(format!("record={}: cannot be examined: {why}", log.display())))?
    {
        warn!("{}: {}: the recording has ended with the server before", device.name, log.display());
        let mut words = words;
        words.pairs.retain(|(key, _)| key != "record");
        spec = Spec::from_entries(words).map_err(|why| invalid(why.to_string()))?;
    }
    let uuid = Uuid::parse_str(&device.uuid).map_err(|why| invalid(format!("its UUID is none: {why}")))?;
    // Before anything is opened: nobody could reach it.
    service.exports.tls.check_device(&spec)?;
    let content = if spec.keep { saved.take(service, topology, device, &spec)? } else { None };
    let changed = content.as_ref().and_then(|_| changed_base(service, device, &spec));
    if let Some(file) = &changed {
        warn!(device = %device.name, file = %file.display(), "its base changed while no server ran");
        service.saves.put_changed_base(&device.name, file.clone());
    }
    let is_behind = content.as_ref().is_some_and(|content| !content.is_exact);
    let is_seen_otherwise = changed.is_some() && !device.withheld;
    let is_own = is_behind || is_seen_otherwise || (content.is_none() && spec.is_lost());
    let gone = |name: Option<&str>| name.is_some_and(|name| lost.contains(name));
    let is_lost = is_own || gone(spec.kind.below()) || gone(spec.kind.copies_to());
    if gone(spec.kind.copies_to()) {
        // There is nothing in the new one that could be overwritten; that it ends with the server was
        // agreed to when the snapshot was made.
        let mut words = spec.words;
        words.put("force", "yes");
        spec = Spec::from_entries(words).map_err(|why| invalid(why.to_string()))?;
    }
    let identity = Identity { uuid, generation: device.generation + u64::from(is_lost) };
    let _claim = service.claim_new("serve", [&spec])?;
    if *is_late && !is_missing(service, device) {
        return Err(invalid("was removed or replaced meanwhile".to_owned()));
    }
    let Some(content) = content else { return Ok((service.make(spec, Some(identity))?, is_lost)) };
    if is_behind {
        service.saves.put_behind(&device.name, content.when);
    }
    let mut entry = kinds::kept(spec, content.ram, &service.registry)?;
    entry.identity = identity;
    let entry = Arc::new(entry);
    service.add(&entry)?;
    Ok((entry, is_lost))
}

/// Returns the file of a device's base that is another one than when the device was kept, by size,
/// time of modification or inode.
fn changed_base(service: &Service, device: &Device, spec: &Spec) -> Option<PathBuf> {
    let now = recording::base_identities(service, spec);
    // Kept by a server that did not note them, or over a disk.
    if device.base.is_empty() {
        return None;
    }
    let same = |number: usize, identity: &String| device.base.get(number) == Some(identity);
    let changed = now.iter().enumerate().find(|(number, (_, identity))| !same(*number, identity));
    let shorter = || now.first().filter(|_| now.len() < device.base.len());
    changed.map(|(_, file)| file).or_else(shorter).map(|(file, _)| file.clone())
}

/// Returns true if anything lies at a path.
fn lies_there(path: &Path) -> io::Result<bool> {
    match path.symlink_metadata() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns where a device of a state is published, and the exports that cannot be understood.
fn places(device: &Device) -> (Seen, Vec<Unread>) {
    let mut seen = Seen { home: device.home, exports: Vec::new() };
    let mut unread = Vec::new();
    for export in &device.exports {
        match records::wanted(export) {
            Ok(wanted) => seen.exports.push((wanted, export.declared)),
            Err(why) => unread.push(Unread { record: export.clone(), why }),
        }
    }
    (seen, unread)
}

/// Begins the merges of a state, or goes on with them. If one cannot, its origin and snapshot are withheld
/// by this server; the next one tries again.
pub fn merge(service: &Service, begun: &mut [Begun]) {
    let mut withheld = HashSet::new();
    for Begun { entry, .. } in &*begun {
        if let Err(refusal) = entry.kind.begin_merge(entry, &service.registry) {
            error!("{}; it and its origin are withheld", refusal.sentence);
            withheld.insert(entry.name().to_owned());
            withheld.extend(entry.spec.kind.below().map(str::to_owned));
        }
    }
    withhold(service, begun, "its merge cannot go on", |name| withheld.contains(name));
}

/// Withholds devices that would be seen otherwise, although nothing of them is lost.
fn withhold(service: &Service, begun: &mut [Begun], why: &'static str, is_one: impl Fn(&str) -> bool) {
    for Begun { entry, seen } in begun {
        let name = entry.name();
        if is_one(name) && !service.withheld.has(name) {
            service.withheld.put_whole(name, mem::take(seen), why);
        }
    }
}

/// Commits that the devices of a state go on, and where they are to be seen, directly before clients see
/// them.
///
/// If that fails, devices are withheld whose content the state calls exact: it would do so after a crash.
pub fn keep(service: &Service, begun: &mut [Begun]) {
    let seen =
        |device: &Begun| service.withheld.of(device.entry.name()).unwrap_or_else(|| device.seen.clone());
    let kept = recording::put(service, begun.iter().map(|device| (&*device.entry, seen(device))));
    if let Err(fault) = kept {
        error!("{}; devices with the content of an orderly end are withheld", fault.message);
        let is_exact = |device: Device| device.saved.is_some();
        withhold(service, begun, "the state cannot record that it is in use", |name| {
            service.records.state().and_then(|state| state.find(name)).is_some_and(is_exact)
        });
    }
}

/// Has the state keep the devices that were asked for, and shows them. If that fails, the state has none of
/// them.
pub fn show_new(service: &Service, begun: &[Begun]) -> Result<(), Fault> {
    for Begun { entry, .. } in begun {
        entry.kind.begin_merge(entry, &service.registry)?;
    }
    // Before a client can write to one.
    recording::put(service, begun.iter().map(|device| (&*device.entry, device.seen.clone())))?;
    let shown = show_with(service, begun, |claim, entry, seen| service.show(claim, entry, seen));
    shown.inspect_err(|_| {
        let names: Vec<&str> = begun.iter().map(|device| device.entry.name()).collect();
        if let Err(fault) = service.records.forget_all(&names) {
            error!("{}", fault.message);
        }
    })?;
    // Ports that were chosen.
    let seen = |device: &Begun| recording::seen(service, device.entry.name());
    recording::put(service, begun.iter().map(|device| (&*device.entry, seen(device))))
}

/// Shows the devices of a state. Exports that cannot be shown now are tried again later.
pub fn show(service: &Arc<Service>, begun: &[Begun]) -> Result<(), Fault> {
    show_with(service, begun, |claim, entry, seen| {
        again::show(service, claim, entry, seen);
        Ok(())
    })?;
    again::begin(service);
    // Ports that were chosen.
    let chosen = begun.iter().filter(|device| recording::differs(service, &device.entry));
    let chosen: Vec<_> = chosen.map(|device| device.entry.name()).collect();
    if !chosen.is_empty() {
        let claim = service.claim_all("serve", &chosen)?;
        let committed = Recording::begin(service, &claim, "serve", &chosen).and_then(Recording::commit);
        if let Err(fault) = committed {
            error!("ports that were chosen are others at the next start: {}", fault.message);
        }
    }
    Ok(())
}

fn show_with(
    service: &Service,
    begun: &[Begun],
    show: impl Fn(&Claim<'_>, &Arc<Entry>, &Seen) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let home = service.exports.home();
    // A list is of an address: a state in which devices say otherwise of one, or of what is the server's
    // now, holds up nobody.
    let mut lists: HashMap<Address, AllowList> = HashMap::new();
    for (wanted, _) in begun.iter().flat_map(|device| &device.seen.exports) {
        if let (Place::Nbd(at), Some(list)) = (&wanted.place, &wanted.allow)
            && wanted.place.is_fixed()
        {
            lists.entry(at.clone()).or_insert_with(|| list.clone());
        }
    }
    for Begun { entry, seen } in begun {
        let claim = match service.claim("serve", entry.name()) {
            Ok(claim) => claim,
            Err(fault) => {
                // A verb has the device. What is absent of it is tried again.
                error!("{}", fault.message);
                continue;
            }
        };
        if !is_there(service, entry) {
            continue;
        }
        let mut seen = seen.clone();
        for (wanted, _) in &mut seen.exports {
            if let Place::Nbd(at) = &wanted.place
                && wanted.place.is_fixed()
            {
                wanted.allow = lists.get(at).filter(|_| !home.contains(at)).cloned();
            }
        }
        show(&claim, entry, &seen)?;
    }
    Ok(())
}

/// Brings in what the command line and file say otherwise than the state.
pub fn bring_in(service: &Service, devices: &[Declared], has_file: bool) -> Result<(), Fault> {
    let extent = Extent { prune: false, force: false, check: false, adds: !has_file };
    for change in apply::bring_in(service, devices, extent)? {
        info!("{change}");
    }
    Ok(())
}
