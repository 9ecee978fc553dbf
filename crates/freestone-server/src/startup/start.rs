//! Creates and publishes the first devices of a server: those of the command line and file, or those of the
//! state directory.

use std::collections::{HashMap, HashSet};
use std::mem;
use std::sync::Arc;

use freestone::mutants::{self, Mutant};
use freestone_control::protocol::RpcError;
use freestone_nbd::{Address, AllowList};
use freestone_spec::kinds::{DataLossPolicy, Entry, Spec};
use freestone_spec::refusal::Errno;
use freestone_state::{Device, State, Topology};
use tracing::{error, info, warn};

use crate::changes::apply::{self, ApplyOptions};
use crate::changes::export_retry;
use crate::changes::recording::{self, Recording};
use crate::declared::{self, DeclaredDevice};
use crate::devices::claims::Claim;
use crate::exports::UnparsedExport;
use crate::exports::export_spec::{ExportAddress, ExportSet, ExportSpec};
use crate::persistence::records;
use crate::persistence::state_args::StateSettings;
use crate::service::Service;
use crate::startup::recreate::{RestartContext, is_missing, recreate};

/// A registered device that is not published yet.
pub struct NewDevice {
    entry: Arc<Entry>,
    /// Exports to publish. Empty if the device is withheld.
    export_set: ExportSet,
}

impl NewDevice {
    /// Returns true if the exports to publish contain a ublk block device.
    pub fn is_block_device(&self) -> bool {
        self.export_set.exports.iter().any(|(wanted, _)| matches!(wanted.address, ExportAddress::Ublk(_)))
    }
}

/// Opens the state directory, in which the server then records changes. Returns the recorded devices.
///
/// # Errors
/// Fails if the state directory cannot be opened. Fails if the state differs from the command line and file,
/// and `--apply` is not given.
pub fn open(
    service: &Service,
    asked: &StateSettings,
    devices: &[DeclaredDevice],
) -> Result<Topology, RpcError> {
    let failed = |why: String| RpcError::failed(Errno::EINVAL, why);
    let (state, unfinished) = State::open(&asked.dir).map_err(|why| failed(why.to_string()))?;
    for one in unfinished {
        warn!(
            "{}: {} was interrupted by the end of the server, and has not been done",
            one.names.join(", "),
            one.verb
        );
    }
    let topology = state.topology();
    let is_new = topology.devices().next().is_none();
    let differs =
        if is_new || asked.apply { Vec::new() } else { differences(&topology, devices, asked.has_file) };
    if differs.is_empty() {
        service.saves.begin(state.dir(), asked.saves);
        service.records.set_state(state);
        return Ok(topology);
    }
    let differs = differs.join("; ");
    let hint = "--apply makes these changes; without devices and --config the server restores the state";
    let dir = asked.dir.display();
    Err(failed(format!("{dir}: the state differs from the command line and file: {differs}; {hint}")))
}

/// Returns the changes, as text, that would make the devices of the state match the specified devices.
fn differences(topology: &Topology, asked: &[DeclaredDevice], has_file: bool) -> Vec<String> {
    let mut differs = Vec::new();
    let taken = declared::taken(asked);
    let names: HashSet<&str> = asked.iter().map(|device| device.spec.name.as_str()).collect();
    let gone = |device: &&Device| has_file && device.declared && !names.contains(device.name.as_str());
    differs.extend(topology.devices().filter(gone).map(|device| format!("remove {}", device.name)));
    for DeclaredDevice { spec, exports, .. } in asked {
        let name = &spec.name;
        let Some(device) = topology.find(name) else {
            differs.push(format!("create {}", spec.words));
            continue;
        };
        if !device.words.parse::<Spec>().is_ok_and(|is| is.is_same(spec)) {
            differs.push(format!("change {name}: {} to {}", device.words, spec.words));
        }
        let home = spec.publish.unwrap_or_else(|| !taken.contains(name.as_str()));
        if home != device.home {
            differs.push(format!("{} {name}", if home { "publish" } else { "unpublish" }));
        }
        let places = places(device).0.exports;
        let is = |wanted: &ExportSpec, known: &ExportSpec| {
            let same_port =
                known.address.is_same(&wanted.address) || known.address.has_chosen_port_of(&wanted.address);
            same_port
                && known.read_only == wanted.read_only
                && known.allow == wanted.allow
                && known.limits == wanted.limits
        };
        for wanted in exports {
            if !places.iter().any(|(known, _)| is(wanted, known)) {
                differs.push(format!("publish {name} at {}", wanted.address));
            }
        }
        let gone = |(known, declared): &&(ExportSpec, bool)| {
            *declared && !exports.iter().any(|wanted| is(wanted, known))
        };
        for (known, _) in places.iter().filter(gone) {
            differs.push(format!("unpublish {name} from {}", known.address));
        }
    }
    differs
}

/// Creates the devices of the command line and file.
pub fn set_up_declared(service: &Service, devices: Vec<DeclaredDevice>) -> Result<Vec<NewDevice>, RpcError> {
    let _opening = service.registry.parallel_open.begin(devices.iter().map(|device| &device.spec));
    let mut created = Vec::with_capacity(devices.len());
    for device in devices {
        let declared = device.is_of_file();
        let DeclaredDevice { spec, exports, .. } = device;
        let publish = spec.publish;
        let claim = service.claim_new("serve", [&spec])?;
        let entry = service.create(&claim, spec, false)?;
        if declared {
            service.declarations.declare(entry.name());
        }
        let exports = exports.into_iter().map(|wanted| (wanted, declared)).collect();
        created.push((entry, publish, exports));
    }
    // The exports are determined after all devices exist. A device that another one uses exclusively is not
    // published by default, and fails with `publish=yes`.
    let export_set = |(entry, publish, exports): (Arc<Entry>, Option<bool>, _)| {
        let home = service.is_for_server_addresses(publish, &entry);
        NewDevice { entry, export_set: ExportSet { at_server_addresses: home, exports } }
    };
    Ok(created.into_iter().map(export_set).collect())
}

/// Creates a device of the state again, without publishing it. If that fails, logs the error, keeps the
/// device in the state, and returns `None`.
pub fn set_up(service: &Service, device: &Device, context: &mut RestartContext) -> Option<NewDevice> {
    match recreate(service, device, context) {
        Ok((entry, is_lost)) => {
            if is_lost {
                context.lost.insert(device.name.clone());
            }
            let (mut export_set, unparsed) = places(device);
            for export in &unparsed {
                error!("{}: not published at {}: {}", device.name, export.address(), export.why);
            }
            service.exports.unpublished.put_unparsed(&device.name, unparsed);
            let withholds = entry.restart_policy().on_data_loss.unwrap_or_default()
                == DataLossPolicy::Withhold
                && !mutants::on(Mutant::LostIsShown);
            if device.withheld || (is_lost && withholds) {
                service.withheld.put(&device.name, mem::take(&mut export_set));
            }
            if device.declared {
                service.declarations.declare(&device.name);
            }
            Some(NewDevice { entry, export_set })
        }
        Err(_) if context.is_late && !is_missing(service, device) => None,
        Err(fault) => {
            error!(device = %device.name, "cannot be set up again: {}", fault.message);
            service.records.add_missing(&device.name, &fault.message);
            context.lost.insert(device.name.clone());
            None
        }
    }
}

/// Returns true if a device is still registered: a verb may have removed it.
fn is_there(service: &Service, entry: &Arc<Entry>) -> bool {
    service.registry.find(entry.name()).is_some_and(|found| Arc::ptr_eq(&found, entry))
}

/// Creates and publishes a group of dependent devices while the server is running. Skips devices that a verb
/// has removed or replaced meanwhile.
pub fn publish_late(
    service: &Arc<Service>,
    devices: &[Device],
    context: &mut RestartContext,
) -> Result<(), RpcError> {
    context.is_late = true;
    let missing: Vec<_> = devices.iter().filter(|device| is_missing(service, device)).collect();
    let mut created: Vec<_> =
        missing.into_iter().filter_map(|device| set_up(service, device, context)).collect();
    created.retain(|device| is_there(service, &device.entry));
    if service.records.is_closed() {
        // The records of the devices remain valid, because no client has used the devices.
        return Ok(());
    }
    record_devices(service, &mut created);
    begin_merges(service, &mut created);
    for NewDevice { entry, export_set } in &created {
        // Without these entries, a verb that runs before the exports exist would remove them from the state.
        service.exports.unpublished.put_all(entry.name(), export_set, "the device has just been created");
        service.records.remove_missing(entry.name());
    }
    publish(service, &created)
}

/// Returns the exports of a device of the state, and the records of exports that cannot be parsed.
fn places(device: &Device) -> (ExportSet, Vec<UnparsedExport>) {
    let mut export_set = ExportSet { at_server_addresses: device.home, exports: Vec::new() };
    let mut unparsed = Vec::new();
    for export in &device.exports {
        match records::parse_export(export) {
            Ok(wanted) => export_set.exports.push((wanted, export.declared)),
            Err(why) => unparsed.push(UnparsedExport { record: export.clone(), why }),
        }
    }
    (export_set, unparsed)
}

/// Starts or continues the merges of the state. If a merge fails, the server withholds its origin and
/// snapshot, and the next start tries again.
pub fn begin_merges(service: &Service, created: &mut [NewDevice]) {
    let mut withheld = HashSet::new();
    for NewDevice { entry, .. } in &*created {
        if let Err(refusal) = entry.kind.begin_merge(entry, &service.registry) {
            error!("{}; it and its origin are withheld", refusal.sentence);
            withheld.insert(entry.name().to_owned());
            withheld.extend(entry.spec.kind.parent_name().map(str::to_owned));
        }
    }
    withhold(service, created, "its merge cannot continue", |name| withheld.contains(name));
}

/// Withholds devices that have not lost content, so that clients cannot use them.
fn withhold(service: &Service, created: &mut [NewDevice], why: &'static str, is_one: impl Fn(&str) -> bool) {
    for NewDevice { entry, export_set } in created {
        let name = entry.name();
        if is_one(name) && !service.withheld.has(name) {
            service.withheld.put_without_loss(name, mem::take(export_set), why);
        }
    }
}

/// Records the created devices of the state with their exports, directly before clients can use them.
///
/// If that fails, withholds the devices whose content equals a save of a clean shutdown: after a crash the
/// state would still report it as equal, although clients had changed it.
pub fn record_devices(service: &Service, created: &mut [NewDevice]) {
    let export_set = |device: &NewDevice| {
        service.withheld.of(device.entry.name()).unwrap_or_else(|| device.export_set.clone())
    };
    let kept =
        recording::record_devices(service, created.iter().map(|device| (&*device.entry, export_set(device))));
    if let Err(fault) = kept {
        error!("{}; devices with the content of a clean shutdown are withheld", fault.message);
        let is_exact = |device: Device| device.saved.is_some();
        withhold(service, created, "the state cannot record that it is in use", |name| {
            service.records.state().and_then(|state| state.find(name)).is_some_and(is_exact)
        });
    }
}

/// Records the devices of the command line and file in the state, and publishes them.
///
/// # Errors
/// Fails if a device cannot be recorded or published. Then the state contains none of these devices.
pub fn publish_new(service: &Service, created: &[NewDevice]) -> Result<(), RpcError> {
    for NewDevice { entry, .. } in created {
        entry.kind.begin_merge(entry, &service.registry)?;
    }
    // Recorded before a client can write to a device.
    recording::record_devices(
        service,
        created.iter().map(|device| (&*device.entry, device.export_set.clone())),
    )?;
    let published = publish_with(service, created, |claim, entry, export_set| {
        service.publish_exports(claim, entry, export_set)
    });
    published.inspect_err(|_| {
        let names: Vec<&str> = created.iter().map(|device| device.entry.name()).collect();
        if let Err(fault) = service.records.forget_all(&names) {
            error!("{}", fault.message);
        }
    })?;
    // Recorded again, because ports have now been chosen for addresses with port 0.
    let export_set = |device: &NewDevice| recording::current_exports(service, device.entry.name());
    recording::record_devices(service, created.iter().map(|device| (&*device.entry, export_set(device))))
}

/// Publishes the devices of the state. Exports that cannot be published now are retried later.
pub fn publish(service: &Arc<Service>, created: &[NewDevice]) -> Result<(), RpcError> {
    publish_with(service, created, |claim, entry, export_set| {
        export_retry::publish_or_retry(service, claim, entry, export_set);
        Ok(())
    })?;
    export_retry::start(service);
    // Recorded again, because ports have now been chosen for addresses with port 0.
    let chosen = created.iter().filter(|device| recording::has_changed(service, &device.entry));
    let chosen: Vec<_> = chosen.map(|device| device.entry.name()).collect();
    if !chosen.is_empty() {
        let claim = service.claim_all("serve", &chosen)?;
        let committed = Recording::begin(service, &claim, "serve", &chosen).and_then(Recording::commit);
        if let Err(fault) = committed {
            error!(
                "the next start will choose new ports, because the current ones cannot be recorded: {}",
                fault.message
            );
        }
    }
    Ok(())
}

fn publish_with(
    service: &Service,
    created: &[NewDevice],
    publish: impl Fn(&Claim<'_>, &Arc<Entry>, &ExportSet) -> Result<(), RpcError>,
) -> Result<(), RpcError> {
    let home = service.exports.server_addresses();
    // An allow list belongs to an address. If the records disagree about the list of an address, the first
    // list is used; addresses of the server keep the list of the server. Neither is an error.
    let mut lists: HashMap<Address, AllowList> = HashMap::new();
    for (wanted, _) in created.iter().flat_map(|device| &device.export_set.exports) {
        if let (ExportAddress::Nbd(at), Some(list)) = (&wanted.address, &wanted.allow)
            && wanted.address.has_fixed_port()
        {
            lists.entry(at.clone()).or_insert_with(|| list.clone());
        }
    }
    for NewDevice { entry, export_set } in created {
        let claim = match service.claim("serve", entry.name()) {
            Ok(claim) => claim,
            Err(fault) => {
                // A verb has claimed the device. The missing exports are retried later.
                error!("{}", fault.message);
                continue;
            }
        };
        if !is_there(service, entry) {
            continue;
        }
        let mut export_set = export_set.clone();
        for (wanted, _) in &mut export_set.exports {
            if let ExportAddress::Nbd(at) = &wanted.address
                && wanted.address.has_fixed_port()
            {
                wanted.allow = lists.get(at).filter(|_| !home.contains(at)).cloned();
            }
        }
        publish(&claim, entry, &export_set)?;
    }
    Ok(())
}

/// Applies the command line and file to the devices of the state, for `--apply`.
pub fn apply_declared(service: &Service, devices: &[DeclaredDevice], has_file: bool) -> Result<(), RpcError> {
    let options = ApplyOptions { prune: false, force: false, check: false, adds: !has_file };
    for change in apply::apply_devices(service, devices, options)? {
        info!("{change}");
    }
    Ok(())
}
