//! The server as an object that verbs operate on: devices, exports, state and jobs, and operations that need several of
//! these parts.

use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use freestone::mutants::{self, Mutant};
use freestone::ram::{Family, Ram};
use freestone_control::protocol::RpcError;
use freestone_nbd::Limits;
use freestone_spec::attrs;
use freestone_spec::entries::{nearest, with_article};
use freestone_spec::kinds::registry::Registry;
use freestone_spec::kinds::{self, Entry, Identity, KindSpec, RESTART_KEYS, Spec, build};
use freestone_spec::refusal::Errno;
use serde_json::{Map, Value};

use crate::devices::claims::{Claim, Claims};
use crate::devices::rates::Rates;
use crate::devices::shutdown::PendingRemovals;
use crate::exports::export_spec::{ExportAddress, ExportSet, ExportSpec};
use crate::exports::{Exports, check_not_connection_fork};
use crate::jobs::Jobs;
use crate::persistence::records::{self, Records};
use crate::persistence::saves::Saves;
use crate::recovery::RemoteFamilies;
use crate::settings::access::ServerAccess;
use crate::settings::tls::Tls;
use crate::upgrade::Upgrades;

/// The state of a running server, shared by all verbs.
///
/// Lock order: the claims of devices, all at once; the claim of an address; the family of a base (the base and its
/// forks, which share one pool); then the table of exports, the registry and the jobs, which are locked only to read or
/// change them, never during a wait. A verb holds its claims while it waits for disks or for clients to be disconnected. So it
/// blocks other verbs on the same devices. The NBD server, connections to templates, readers of statistics and
/// `release` claim nothing.
pub struct Service {
    /// Registered devices, by name.
    pub registry: Arc<Registry>,
    /// Exports of the devices.
    pub exports: Exports,
    /// Long-running jobs with progress.
    pub jobs: Jobs,
    /// Devices whose removal has not ended.
    pub pending_removals: PendingRemovals,
    /// State directory, which records devices and exports for the next start.
    pub records: Records,
    /// Holder of the memory of devices, if they are recoverable.
    pub recovery: OnceLock<Arc<RemoteFamilies>>,
    /// Saves of devices with `keep=yes`, restored by the next start.
    pub saves: Saves,
    /// Limits of NBD connections.
    pub limits: Limits,
    /// Permissions of the sockets.
    pub access: ServerAccess,
    /// Path of the control socket, once known.
    pub control: OnceLock<PathBuf>,
    /// Path of the read-only control socket, if there is one.
    pub control_read_only: OnceLock<PathBuf>,
    /// URL of the metrics, once known.
    pub metrics_url: OnceLock<String>,
    /// URL of the web page, once known.
    pub http_url: OnceLock<String>,
    /// Time when the server was started.
    pub started_at: Instant,
    /// Rates of requests and bytes, for metrics and the web page.
    pub rates: Rates,
    /// Upgrades of the server to another program.
    pub upgrades: Upgrades,
    /// Function that requests the shutdown of the server, once `serve` has set it.
    pub end: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// True with `--ublk`: published devices of a configuration file that is applied also get a ublk export.
    pub as_block_devices: AtomicBool,
    claims: Claims,
    this: Weak<Self>,
}

impl Service {
    /// Returns a server without devices.
    pub fn new(limits: Limits, access: ServerAccess, tls: Tls) -> Arc<Self> {
        let registry = Arc::<Registry>::default();
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            records: Records::default(),
            recovery: OnceLock::new(),
            saves: Saves::default(),
            limits: limits.clone(),
            control: OnceLock::new(),
            control_read_only: OnceLock::new(),
            metrics_url: OnceLock::new(),
            http_url: OnceLock::new(),
            started_at: Instant::now(),
            rates: Rates::default(),
            upgrades: Upgrades::default(),
            end: OnceLock::new(),
            as_block_devices: AtomicBool::new(false),
            exports: Exports::new(limits, access.sockets.resolved, tls, Arc::clone(&registry)),
            access,
            registry,
            jobs: Jobs::default(),
            pending_removals: PendingRemovals::default(),
            claims: Claims::default(),
        })
    }

    /// Returns a weak reference to the server, for threads that outlive a verb.
    pub fn weak(&self) -> Weak<Self> {
        Weak::clone(&self.this)
    }

    /// Claims a device, or the name of a device to be created.
    pub fn claim(&self, verb: &'static str, name: &str) -> Result<Claim<'_>, RpcError> {
        self.claims.devices(verb, &[name], &[])
    }

    /// Claims several devices at once.
    pub fn claim_all(&self, verb: &'static str, names: &[&str]) -> Result<Claim<'_>, RpcError> {
        self.claims.devices(verb, names, &[])
    }

    /// Claims a device exclusively, and the device `below`, on which it depends, as shared.
    pub fn claim_over(&self, verb: &'static str, name: &str, below: &str) -> Result<Claim<'_>, RpcError> {
        self.claims.devices(verb, &[name], &[below])
    }

    /// Claims the names of new devices, the origins of snapshots and the devices in exclusive use. Claims the bases of
    /// forks as shared.
    pub fn claim_new<'a>(
        &self,
        verb: &'static str,
        specs: impl IntoIterator<Item = &'a Spec>,
    ) -> Result<Claim<'_>, RpcError> {
        freestone_core::trail::step!();
        let (mut own, mut shared) = (Vec::new(), Vec::new());
        for spec in specs {
            own.push(spec.name.as_str());
            own.extend(spec.kind.claimed_devices());
            shared.extend(spec.kind.fork().map(|fork| fork.base.as_str()));
        }
        self.claims.devices(verb, &own, &shared)
    }

    /// Claims devices exclusively, and the devices `below`, on which they depend, as shared.
    pub fn claim_over_all(
        &self,
        verb: &'static str,
        names: &[&str],
        below: &[&str],
    ) -> Result<Claim<'_>, RpcError> {
        self.claims.devices(verb, names, below)
    }

    /// Returns the device with this name, or ENODEV with a similar name as a hint.
    pub fn find(&self, name: &str) -> Result<Arc<Entry>, RpcError> {
        self.registry.find(name).ok_or_else(|| {
            let entries = self.registry.all();
            let names: Vec<&str> = entries.iter().map(|e| e.name()).collect();
            let hint = nearest(name, &names).map(|h| format!("; {h}?")).unwrap_or_default();
            rpc_error!(ENODEV, "{name}: no such device{hint}")
        })
    }

    /// Returns the RAM disk, fork or memory snapshot with this name. `can` ends the error for devices of another kind:
    /// "only a ram device CAN".
    pub fn find_ram(&self, name: &str, can: &str) -> Result<Arc<Ram>, RpcError> {
        let entry = self.find(name)?;
        let only = || rpc_error!(EOPNOTSUPP, "{name}: only a ram device {can}");
        entry.kind.ram().cloned().ok_or_else(only)
    }

    // ---- creating and removing ------------------------------------------------------------------

    /// Creates a device, and publishes it at the addresses of the server if `publish` is set.
    pub fn create(&self, claim: &Claim<'_>, spec: Spec, publish: bool) -> Result<Arc<Entry>, RpcError> {
        if self.records.is_pending(&spec.name) {
            refuse!(
                EBUSY,
                "{}: exists in the state, but its server has not answered yet; wait for it or remove it",
                spec.name
            );
        }
        let entry = self.build_entry(spec, None)?;
        if publish && let Err(fault) = self.exports.publish_at_server_addresses(claim, &entry) {
            // The verb fails, so the new device must not remain.
            self.undo_create(claim, &entry);
            return Err(fault);
        }
        Ok(entry)
    }

    /// Creates and registers a device. `identity` is that of a device in the state, or `None` for a new device.
    pub fn build_entry(&self, spec: Spec, identity: Option<Identity>) -> Result<Arc<Entry>, RpcError> {
        self.check_new(&spec)?;
        let mut entry = build(spec, &self.registry)?;
        if let Some(identity) = identity {
            entry.identity = identity;
        }
        self.check_keep(&entry)?;
        let entry = Arc::new(entry);
        self.add(&entry)?;
        // Checked again: another verb may have opened an address before the device was registered.
        if let Err(fault) = self.exports.check_no_loop(&entry.spec) {
            let _ = self.registry.remove(&entry);
            return Err(fault);
        }
        Ok(entry)
    }

    /// Returns the existing device if its specification is the same, or else [creates](Self::create) it. The
    /// boolean is true if the device was created.
    pub fn create_if_absent(
        &self,
        claim: &Claim<'_>,
        spec: Spec,
        publish: bool,
    ) -> Result<(Arc<Entry>, bool), RpcError> {
        let Some(found) = self.registry.find(&spec.name) else {
            return Ok((self.create(claim, spec, publish)?, true));
        };
        let same = found.spec.is_same(&spec);
        if same && found.template.is_none() {
            return Ok((found, false));
        }
        let (name, kind) = (found.name(), with_article(found.kind.name()));
        refuse!(EEXIST, "{name}: {kind} device of that name exists, and was made with other settings")
    }

    /// Publishes all exports in `export_set`, until the first error.
    pub fn publish_exports(
        &self,
        claim: &Claim<'_>,
        entry: &Arc<Entry>,
        export_set: &ExportSet,
    ) -> Result<(), RpcError> {
        if export_set.at_server_addresses {
            self.exports.publish_at_server_addresses(claim, entry)?;
        }
        export_set.exports.iter().try_for_each(|export| self.publish_one(claim, entry, export))
    }

    /// Publishes an export, unless the device is published at its address.
    pub fn publish_one(
        &self,
        claim: &Claim<'_>,
        entry: &Arc<Entry>,
        wanted: &ExportSpec,
    ) -> Result<(), RpcError> {
        if let ExportAddress::Nbd(at) = &wanted.address
            && self.exports.is_at(entry.name(), at)
        {
            // The address is now one of the server's own, or a verb has published the device there.
            self.exports.change(entry.name(), |device| device.remove_absent(&wanted.address));
            return Ok(());
        }
        self.exports.publish_at(claim, entry, wanted).map(drop)
    }

    /// Returns true if a device belongs at the addresses of the server: as its key `publish` (`said`) specifies, or by
    /// default unless another device uses it exclusively.
    pub fn is_for_server_addresses(&self, said: Option<bool>, entry: &Arc<Entry>) -> bool {
        said.unwrap_or_else(|| self.registry.exclusive_user(entry).is_none())
    }

    /// Sets all attributes in `wanted`, or none. The caller has claimed the device.
    pub fn set(&self, entry: &Arc<Entry>, wanted: &Map<String, Value>) -> Result<(), RpcError> {
        let key = RESTART_KEYS.into_iter().find(|key| wanted.contains_key(*key));
        self.check_has_state(entry.name(), key)?;
        let size = entry.size();
        attrs::set(&self.registry, entry, wanted)?;
        if entry.size() != size {
            self.exports.announce_size(entry.name());
        }
        Ok(())
    }

    /// Takes snapshots of several devices at the same moment.
    pub fn snapshot(&self, _: &Claim<'_>, specs: Vec<Spec>) -> Result<Vec<Arc<Entry>>, RpcError> {
        let mut names = HashSet::new();
        for spec in &specs {
            if !names.insert(spec.name.clone()) {
                refuse!(invalid, "{}: two snapshots of that name", spec.name);
            }
            self.check_new(spec)?;
        }
        let made = kinds::snapshots(specs, &self.registry)?;
        made.iter().try_for_each(|entry| self.check_keep(entry))?;
        let made: Vec<_> = made.into_iter().map(Arc::new).collect();
        for (index, entry) in made.iter().enumerate() {
            if let Err(fault) = self.add(entry) {
                for before in &made[..index] {
                    let _ = self.registry.remove(before);
                }
                return Err(fault);
            }
        }
        Ok(made)
    }

    /// Checks a new device before anything is opened.
    fn check_new(&self, spec: &Spec) -> Result<(), RpcError> {
        let name = &spec.name;
        self.registry.check_free(name).map_err(|why| why.of(name))?;
        self.exports.check_no_loop(spec)?;
        self.exports.tls.check_device(spec)?;
        self.check_has_state(name, spec.key_of_state())?;
        self.check_unpublished(spec)?;
        // A merge that continues at creation changes the content of the origin, so the origin must have no clients.
        if let KindSpec::Snapshot(snapshot) = &spec.kind
            && snapshot.cow.as_ref().is_some_and(|cow| cow.merge)
            && let Some(origin) = self.registry.find(&snapshot.origin)
        {
            self.exports.check_idle(&origin)?;
        }
        Ok(())
    }

    /// Fails for a device with `keep=yes` whose content cannot be saved.
    pub fn check_keep(&self, entry: &Entry) -> Result<(), RpcError> {
        if entry.is_kept() { Ok(entry.check_keep(&self.registry, true)?) } else { Ok(()) }
    }

    /// Fails for a key that only affects the next start, if the server has no state directory.
    pub fn check_has_state(&self, name: &str, key: Option<&str>) -> Result<(), RpcError> {
        match key {
            Some(key) if self.records.state().is_none() => {
                Err(rpc_error!(invalid, "{name}: {key}: {}", records::NEEDS_STATE))
            }
            _ => Ok(()),
        }
    }

    /// Fails if a device that the new device uses exclusively is published.
    pub fn check_unpublished(&self, spec: &Spec) -> Result<(), RpcError> {
        let takes = spec.kind.exclusive_uses();
        let Some(published) =
            takes.iter().find(|takes| self.exports.read(takes.name, |device| device.live().next().is_some()))
        else {
            return Ok(());
        };
        let why = format!("is published; {} need it for themselves", published.what);
        Err(RpcError::from(published.refuse(Errno::EBUSY, &why).of(&spec.name)))
    }

    /// Adds a device to the registry. Fails, for example, if the name is in use.
    pub fn add(&self, entry: &Arc<Entry>) -> Result<(), RpcError> {
        self.registry.add(entry).map_err(|why| why.of(entry.name()))?;
        // Recorded before the device is in the state, and before clients can use it.
        if let Some(ram) = entry.kind.ram().filter(|_| self.recovery.get().is_some())
            && !self.saves.is_loading(&ram.family())
            && !(mutants::on(Mutant::KeysForgotten) && entry.kind.fork().is_some())
        {
            entry.record_key(&self.registry);
        }
        Ok(())
    }

    /// Records the keys of a family's devices, which [`add`](Self::add) has left out: until all their content is in
    /// memory, the saved content is the one to restore after a kill.
    pub fn record_keys(&self, family: &Family) {
        for entry in self.registry.all() {
            if entry.kind.ram().is_some_and(|ram| ram.family().is_same(family)) {
                entry.record_key(&self.registry);
            }
        }
    }

    /// Removes a device that the same verb has created.
    pub fn undo_create(&self, claim: &Claim<'_>, entry: &Arc<Entry>) {
        // Errors are ignored: the device may not be published yet, and no other device can depend on it yet.
        let _ = self.exports.unpublish(claim, entry, true);
        let _ = self.registry.remove(entry);
        // A template has the key `record`, but no write log of its own.
        if let (Some(log), Some(_)) = (&entry.spec.layers.record, &entry.layers.power) {
            // The write log was created with the device.
            let _ = fs::remove_file(log);
        }
    }

    /// Unpublishes and removes a device. Returns the number of closed connections.
    pub fn remove(&self, claim: &Claim<'_>, entry: &Arc<Entry>, force: bool) -> Result<usize, RpcError> {
        let name = entry.name();
        check_not_connection_fork(entry)?;
        self.registry.check_unused(entry, "removed")?;
        if force && let Some(faults) = &entry.layers.faults {
            // Fails requests held by a fault rule, which connections and verbs wait for. Later requests are not
            // held.
            faults.close();
        }
        // While the guard exists, requests that wait because of limits fail.
        let _gone = force.then(|| self.exports.fail_waiting(entry));
        let ended = self.exports.unpublish(claim, entry, force)?;
        // Checked again, because connections to a template may have made forks of this device meanwhile.
        let removed = self.registry.remove(entry);
        removed.map_err(|users| rpc_error!(EBUSY, "{name}: cannot be removed: {users} stand on it"))?;
        self.exports.forget(name);
        self.saves.clear_notes(name);
        if let Some(faults) = &entry.layers.faults {
            // Fails the held requests of verbs: `release` cannot find the device by name any more.
            faults.close();
        }
        Ok(ended)
    }
}
