//! Creates and publishes the first devices of a server: those of the command line and file, or those of the
//! state directory.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use freestone_control::protocol::RpcError;
use freestone_nbd::{Address, AllowList};
use freestone_spec::kinds::Entry;
use freestone_state::{Device, State};
use tracing::{error, info, warn};

use crate::changes::apply::{self, ApplyOptions};
use crate::changes::export_retry;
use crate::changes::recording::{self, Recording};
use crate::declared::{self, DeclaredDevice};
use crate::devices::claims::Claim;
use crate::exports::export_spec::{ExportAddress, ExportSet, ExportSpec};
use crate::exports::{DeviceExports, Withheld};
use crate::persistence::recorded::{RecordedDevice, RecordedDevices};
use crate::persistence::state_args::StateSettings;
use crate::service::Service;
use crate::startup::recreate::{NOT_YET, RestartContext, is_missing, recreate};

/// Returns true if the exports to publish contain a ublk block device.
pub fn has_block_device(service: &Service, entry: &Entry) -> bool {
    service.exports.read(entry.name(), DeviceExports::to_publish).has_block_device()
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
) -> Result<RecordedDevices, RpcError> {
    let failed = |why: String| rpc_error!(EINVAL, "{why}");
    let (state, unfinished) = State::open(&asked.dir).map_err(|why| failed(why.to_string()))?;
    for one in unfinished {
        warn!(
            "{}: {} was interrupted by the end of the server, and has not been done",
            one.names.join(", "),
            one.verb
        );
    }
    let recorded = RecordedDevices::parse(&state.topology());
    let is_new = recorded.all().is_empty();
    let differs =
        if is_new || asked.apply { Vec::new() } else { differences(&recorded, devices, asked.has_file) };
    if differs.is_empty() {
        service.saves.begin(state.dir(), asked.saves);
        service.records.set_state(state);
        return Ok(recorded);
    }
    let differs = differs.join("; ");
    let hint = "--apply makes these changes; without devices and --config the server restores the state";
    let dir = asked.dir.display();
    Err(failed(format!("{dir}: the state differs from the command line and file: {differs}; {hint}")))
}

/// Returns the changes, as text, that would make the devices of the state match the specified devices.
fn differences(recorded: &RecordedDevices, asked: &[DeclaredDevice], has_file: bool) -> Vec<String> {
    let mut differs = Vec::new();
    let taken = declared::taken(asked);
    let names: HashSet<&str> = asked.iter().map(|device| device.spec.name.as_str()).collect();
    let gone = |device: &&Device| has_file && device.declared && !names.contains(device.name.as_str());
    differs.extend(
        recorded
            .all()
            .iter()
            .map(|device| &device.record)
            .filter(gone)
            .map(|device| format!("remove {}", device.name)),
    );
    for DeclaredDevice { spec, exports, .. } in asked {
        let name = &spec.name;
        let Some(RecordedDevice { record, spec: known, export_set, .. }) = recorded.find(name) else {
            differs.push(format!("create {}", spec.words));
            continue;
        };
        if !known.as_ref().is_ok_and(|is| is.is_same(spec)) {
            differs.push(format!("change {name}: {} to {}", record.words, spec.words));
        }
        let home = spec.publish.unwrap_or_else(|| !taken.contains(name.as_str()));
        if home != record.home {
            differs.push(format!("{} {name}", if home { "publish" } else { "unpublish" }));
        }
        let is = |wanted: &ExportSpec, known: &ExportSpec| {
            let same_port =
                known.address.is_same(&wanted.address) || known.address.has_chosen_port_of(&wanted.address);
            same_port
                && known.read_only == wanted.read_only
                && known.allow == wanted.allow
                && known.limits == wanted.limits
        };
        for wanted in exports {
            if !export_set.exports.iter().any(|known| is(wanted, known)) {
                differs.push(format!("publish {name} at {}", wanted.address));
            }
        }
        let gone = |known: &&ExportSpec| known.declared && !exports.iter().any(|wanted| is(wanted, known));
        for known in export_set.exports.iter().filter(gone) {
            differs.push(format!("unpublish {name} from {}", known.address));
        }
    }
    differs
}

/// Creates the devices of the command line and file, with their exports in the table, but not published.
pub fn set_up_declared(service: &Service, devices: Vec<DeclaredDevice>) -> Result<Vec<Arc<Entry>>, RpcError> {
    let _opening = service.registry.parallel_open.begin(devices.iter().map(|device| &device.spec));
    let mut created = Vec::with_capacity(devices.len());
    for device in devices {
        let declared = device.is_of_file();
        let DeclaredDevice { spec, exports, .. } = device;
        let publish = spec.publish;
        let claim = service.claim_new("serve", [&spec])?;
        created.push((service.create(&claim, spec, false)?, publish, declared, exports));
    }
    // The exports are determined after all devices exist. A device that another one uses exclusively is not
    // published by default, and fails with `publish=yes`.
    let set_exports = |(entry, publish, declared, exports): (Arc<Entry>, _, bool, _)| {
        let at_server_addresses = service.is_for_server_addresses(publish, &entry);
        service.exports.change(entry.name(), |device| {
            device.set_unpublished(ExportSet { at_server_addresses, exports }, NOT_YET);
            device.is_declared |= declared;
        });
        entry
    };
    Ok(created.into_iter().map(set_exports).collect())
}

/// Creates a device of the state again, without publishing it. If that fails, logs the error, keeps the
/// device in the state, and returns `None`.
pub fn set_up(
    service: &Service,
    device: &RecordedDevice,
    context: &mut RestartContext,
) -> Option<Arc<Entry>> {
    let name = &device.record.name;
    match recreate(service, device, context) {
        Ok((entry, is_lost)) => {
            if is_lost {
                context.lost.insert(name.clone());
            }
            Some(entry)
        }
        Err(_) if context.is_late && !is_missing(service, &device.record) => None,
        Err(fault) => {
            error!(device = %name, "cannot be set up again: {}", fault.message);
            service.records.add_missing(name, &fault.message);
            context.lost.insert(name.clone());
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
    devices: &[Arc<RecordedDevice>],
    context: &mut RestartContext,
) -> Result<(), RpcError> {
    context.is_late = true;
    let missing: Vec<_> = devices.iter().filter(|device| is_missing(service, &device.record)).collect();
    let mut created: Vec<_> =
        missing.into_iter().filter_map(|device| set_up(service, device, context)).collect();
    created.retain(|entry| is_there(service, entry));
    if service.records.is_closed() {
        // The records of the devices remain valid, because no client has used the devices.
        return Ok(());
    }
    record_devices(service, &created);
    begin_merges(service, &created);
    for entry in &created {
        service.exports.change(entry.name(), |device| device.is_new = false);
        service.records.remove_missing(entry.name());
    }
    publish(service, &created)
}

/// Starts or continues the merges of the state. If a merge fails, the server withholds its origin and
/// snapshot, and the next start tries again.
pub fn begin_merges(service: &Service, created: &[Arc<Entry>]) {
    let mut withheld = HashSet::new();
    for entry in created {
        if let Err(refusal) = entry.kind.begin_merge(entry, &service.registry) {
            error!("{}; it and its origin are withheld", refusal.sentence);
            withheld.insert(entry.name().to_owned());
            withheld.extend(entry.spec.kind.parent_name().map(str::to_owned));
        }
    }
    withhold(service, created, "its merge cannot continue", |name| withheld.contains(name));
}

/// Withholds devices that have not lost content, so that clients cannot use them.
fn withhold(service: &Service, created: &[Arc<Entry>], why: &'static str, is_one: impl Fn(&str) -> bool) {
    for name in created.iter().map(|entry| entry.name()).filter(|name| is_one(name)) {
        service.exports.change(name, |device| {
            device.withheld.get_or_insert(Withheld::Other(why));
        });
    }
}

/// Records the created devices of the state with their exports, directly before clients can use them.
///
/// If that fails, withholds the devices whose content equals a save of a clean shutdown: after a crash the
/// state would still report it as equal, although clients had changed it.
pub fn record_devices(service: &Service, created: &[Arc<Entry>]) {
    if let Err(fault) = recording::record_devices(service, created) {
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
pub fn publish_new(service: &Service, created: &[Arc<Entry>]) -> Result<(), RpcError> {
    for entry in created {
        entry.kind.begin_merge(entry, &service.registry)?;
    }
    // Recorded before a client can write to a device.
    recording::record_devices(service, created)?;
    let published = publish_with(service, created, |claim, entry, export_set| {
        service.publish_exports(claim, entry, export_set)
    });
    published.inspect_err(|_| {
        // Not left for the next start, because the state will not know these devices.
        service.exports.shutdown(Duration::ZERO);
        let names: Vec<&str> = created.iter().map(|entry| entry.name()).collect();
        if let Err(fault) = service.records.forget_all(&names) {
            error!("{}", fault.message);
        }
    })?;
    // Recorded again, because ports have now been chosen for addresses with port 0.
    recording::record_devices(service, created)
}

/// Publishes the devices of the state. Exports that cannot be published now are retried later.
pub fn publish(service: &Arc<Service>, created: &[Arc<Entry>]) -> Result<(), RpcError> {
    publish_with(service, created, |claim, entry, export_set| {
        export_retry::publish_or_retry(service, claim, entry, export_set);
        Ok(())
    })?;
    export_retry::start(service);
    // Recorded again, because ports have now been chosen for addresses with port 0.
    let chosen = created.iter().filter(|entry| recording::has_changed(service, entry));
    let chosen: Vec<_> = chosen.map(|entry| entry.name()).collect();
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
    created: &[Arc<Entry>],
    publish: impl Fn(&Claim<'_>, &Arc<Entry>, &ExportSet) -> Result<(), RpcError>,
) -> Result<(), RpcError> {
    let home = service.exports.server_addresses();
    let to_publish = |entry: &Entry| service.exports.read(entry.name(), DeviceExports::to_publish);
    // An allow list belongs to an address. If the records disagree about the list of an address, the first
    // list is used; addresses of the server keep the list of the server. Neither is an error.
    let mut lists: HashMap<Address, AllowList> = HashMap::new();
    for wanted in created.iter().flat_map(|entry| to_publish(entry).exports) {
        let is_fixed = wanted.address.has_fixed_port();
        if let (ExportAddress::Nbd(at), Some(list), true) = (wanted.address, wanted.allow, is_fixed) {
            lists.entry(at).or_insert(list);
        }
    }
    for entry in created {
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
        let mut export_set = to_publish(entry);
        for wanted in &mut export_set.exports {
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
