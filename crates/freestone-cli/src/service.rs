//! The server that verbs work on: devices, exports, state and jobs, and operations over several of them.

use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use freestone::ram::Ram;
use freestone_nbd::Limits;
use freestone_spec::attrs;
use freestone_spec::entries::{a_kind, nearest};
use freestone_spec::kinds::registry::Registry;
use freestone_spec::kinds::{self, Entry, Identity, KindSpec, RESTART_KEYS, Spec, build};
use freestone_spec::refusal::Errno;
use serde_json::{Map, Value};

use crate::access::ServerAccess;
use crate::claims::{Claim, Claims};
use crate::control::protocol::Fault;
use crate::declarations::Declarations;
use crate::ending::PendingRemovals;
use crate::exports::{Absent, Exports, check_own};
use crate::job::Jobs;
use crate::metrics::rates::Rates;
use crate::places::{Place, Seen, Wanted};
use crate::records::{self, Records};
use crate::saves::Saves;
use crate::tls::Tls;
use crate::withheld::Withheld;

/// The server as seen by the verbs.
///
/// Lock order: the claims of devices, all at once; the claim of an address; the family of a base; then the
/// addresses, the registry and the jobs, which are locked only to read or change them, never during a wait. A
/// verb holds its claims while it waits for disks or for clients that are cut off, and so blocks other verbs
/// on the same devices. The NBD server, connections to templates, readers of statistics and `release` claim
/// nothing.
pub struct Service {
    /// Devices.
    pub registry: Arc<Registry>,
    /// Exports of the devices.
    pub exports: Exports,
    /// Long-running jobs with progress.
    pub jobs: Jobs,
    /// Devices whose removal has not ended.
    pub leaving: PendingRemovals,
    /// Devices and exports that configuration files have declared.
    pub declarations: Declarations,
    /// State for the next start.
    pub records: Records,
    /// Devices that are withheld from clients, mostly because they have lost content.
    pub withheld: Withheld,
    /// Saved content for the next start.
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
    /// Time of the start.
    pub began: Instant,
    /// Rates of requests and bytes, for metrics and the web page.
    pub rates: Rates,
    /// Shuts the server down.
    pub end: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// Set by `--ublk`: every published device also gets a ublk export.
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
            declarations: Declarations::default(),
            records: Records::default(),
            withheld: Withheld::default(),
            saves: Saves::default(),
            limits: limits.clone(),
            control: OnceLock::new(),
            control_read_only: OnceLock::new(),
            metrics_url: OnceLock::new(),
            http_url: OnceLock::new(),
            began: Instant::now(),
            rates: Rates::default(),
            end: OnceLock::new(),
            as_block_devices: AtomicBool::new(false),
            exports: Exports::new(limits, access.sockets.resolved, tls, Arc::clone(&registry)),
            access,
            registry,
            jobs: Jobs::default(),
            leaving: PendingRemovals::default(),
            claims: Claims::default(),
        })
    }

    /// Returns a reference for threads that outlive a verb.
    pub fn weak(&self) -> Weak<Self> {
        Weak::clone(&self.this)
    }

    /// Claims a device, or a name for a new one.
    pub fn claim(&self, verb: &'static str, name: &str) -> Result<Claim<'_>, Fault> {
        self.claims.devices(verb, &[name], &[])
    }

    /// Claims several devices at once.
    pub fn claim_all(&self, verb: &'static str, names: &[&str]) -> Result<Claim<'_>, Fault> {
        self.claims.devices(verb, names, &[])
    }

    /// Claims a device exclusively, and the device below as shared.
    pub fn claim_over(&self, verb: &'static str, name: &str, below: &str) -> Result<Claim<'_>, Fault> {
        self.claims.devices(verb, &[name], &[below])
    }

    /// Claims new devices, and the devices that they need.
    pub fn claim_new<'a>(
        &self,
        verb: &'static str,
        specs: impl IntoIterator<Item = &'a Spec>,
    ) -> Result<Claim<'_>, Fault> {
        let (mut own, mut shared) = (Vec::new(), Vec::new());
        for spec in specs {
            own.push(spec.name.as_str());
            own.extend(spec.kind.changes());
            shared.extend(spec.kind.fork().map(|fork| fork.base.as_str()));
        }
        self.claims.devices(verb, &own, &shared)
    }

    /// Claims devices exclusively, and the devices below as shared.
    pub fn claim_over_all(
        &self,
        verb: &'static str,
        names: &[&str],
        below: &[&str],
    ) -> Result<Claim<'_>, Fault> {
        self.claims.devices(verb, names, below)
    }

    /// Returns the device with this name.
    pub fn find(&self, name: &str) -> Result<Arc<Entry>, Fault> {
        self.registry.find(name).ok_or_else(|| {
            let entries = self.registry.all();
            let names: Vec<&str> = entries.iter().map(|e| e.name()).collect();
            let hint = nearest(name, &names).map(|h| format!("; {h}?")).unwrap_or_default();
            Fault::failed(Errno::ENODEV, format!("{name}: no such device{hint}"))
        })
    }

    /// Returns the RAM disk, fork or memory snapshot with this name. `can` is the operation that other kinds do
    /// not support, as the end of the error.
    pub fn find_ram(&self, name: &str, can: &str) -> Result<Arc<Ram>, Fault> {
        let entry = self.find(name)?;
        let only = || Fault::failed(Errno::EOPNOTSUPP, format!("{name}: only a ram device {can}"));
        entry.kind.ram().cloned().ok_or_else(only)
    }

    // ---- creating and removing ------------------------------------------------------------------

    /// Creates a device, and publishes it at the addresses of the server if `publish` is set.
    pub fn create(&self, claim: &Claim<'_>, spec: Spec, publish: bool) -> Result<Arc<Entry>, Fault> {
        if self.records.is_pending(&spec.name) {
            let why = "exists in the state, but its server has not answered yet; wait for it or remove it";
            return Err(Fault::failed(Errno::EBUSY, format!("{}: {why}", spec.name)));
        }
        let entry = self.make(spec, None)?;
        if publish && let Err(fault) = self.exports.publish_home(claim, &entry) {
            // An unpublished device must not remain.
            self.undo(claim, &entry);
            return Err(fault);
        }
        Ok(entry)
    }

    /// Creates a device. A device of the state keeps its identity.
    pub fn make(&self, spec: Spec, identity: Option<Identity>) -> Result<Arc<Entry>, Fault> {
        self.check_new(&spec)?;
        let mut entry = build(spec, &self.registry)?;
        if let Some(identity) = identity {
            entry.identity = identity;
        }
        self.check_keep(&entry)?;
        let entry = Arc::new(entry);
        self.add(&entry)?;
        // Another verb may have opened an address before the device was registered.
        if let Err(fault) = self.exports.check_leads_away(&entry.spec) {
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
    ) -> Result<(Arc<Entry>, bool), Fault> {
        let Some(found) = self.registry.find(&spec.name) else {
            return Ok((self.create(claim, spec, publish)?, true));
        };
        let same = found.spec.is_same(&spec);
        if same && found.template.is_none() {
            return Ok((found, false));
        }
        let (name, kind) = (found.name(), a_kind(found.kind.name()));
        let other = format!("{name}: {kind} device of that name exists, and was made with other settings");
        Err(Fault::failed(Errno::EEXIST, other))
    }

    /// Publishes all exports of a device, until the first error.
    pub fn show(&self, claim: &Claim<'_>, entry: &Arc<Entry>, seen: &Seen) -> Result<(), Fault> {
        if seen.home {
            self.exports.publish_home(claim, entry)?;
        }
        seen.exports.iter().try_for_each(|export| self.show_one(claim, entry, export))
    }

    /// Publishes as many exports of a device as possible. Returns the others.
    pub fn show_each(&self, claim: &Claim<'_>, entry: &Arc<Entry>, seen: &Seen) -> Vec<Absent> {
        let home = if seen.home { self.exports.publish_home(claim, entry) } else { Ok(()) };
        let absent = |export, fault: Fault| {
            let prefix = format!("{}: ", entry.name());
            let why = fault.message.strip_prefix(&prefix).unwrap_or(&fault.message).to_owned();
            Absent { export, why }
        };
        let home = home.err().map(|fault| absent(None, fault));
        let each = seen.exports.iter().filter_map(|export| {
            let fault = self.show_one(claim, entry, export).err()?;
            Some(absent(Some(export.clone()), fault))
        });
        home.into_iter().chain(each).collect()
    }

    fn show_one(
        &self,
        claim: &Claim<'_>,
        entry: &Arc<Entry>,
        (wanted, declared): &(Wanted, bool),
    ) -> Result<(), Fault> {
        if let Place::Nbd(at) = &wanted.place
            && self.exports.is_at(entry.name(), at)
        {
            // The address now belongs to the server, or a verb has published the device there.
            self.exports.absent.remove(entry.name(), Some(&wanted.place));
            return Ok(());
        }
        let shown = self.exports.show_at(claim, entry, wanted)?;
        if *declared {
            self.declarations.declare_export(entry.name(), wanted, &shown);
        }
        Ok(())
    }

    /// Returns true if a device belongs at the addresses of the server: as specified, or by default unless
    /// another device uses it exclusively.
    pub fn belongs_at_home(&self, said: Option<bool>, entry: &Arc<Entry>) -> bool {
        said.unwrap_or_else(|| self.registry.taken_by(entry).is_none())
    }

    /// Sets all of the attributes, or none. The caller has claimed the device.
    pub fn set(&self, entry: &Arc<Entry>, wanted: &Map<String, Value>) -> Result<(), Fault> {
        let key = RESTART_KEYS.into_iter().find(|key| wanted.contains_key(*key));
        self.check_has_state(entry.name(), key)?;
        let size = entry.size();
        attrs::set(&self.registry, entry, wanted)?;
        if entry.size() != size {
            self.exports.resized(entry.name());
        }
        Ok(())
    }

    /// Takes snapshots of several devices at the same moment.
    pub fn snapshot(&self, _: &Claim<'_>, specs: Vec<Spec>) -> Result<Vec<Arc<Entry>>, Fault> {
        let mut names = HashSet::new();
        for spec in &specs {
            if !names.insert(spec.name.clone()) {
                return Err(Fault::invalid(format!("{}: two snapshots of that name", spec.name)));
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
    fn check_new(&self, spec: &Spec) -> Result<(), Fault> {
        let name = &spec.name;
        self.registry.check_free(name).map_err(|why| why.of(name))?;
        self.exports.check_leads_away(spec)?;
        self.exports.tls.check_device(spec)?;
        self.check_has_state(name, spec.key_of_state())?;
        self.check_unseen(spec)?;
        // A merge that continues at creation changes the content of the origin under its clients.
        if let KindSpec::Snapshot(snapshot) = &spec.kind
            && snapshot.cow.as_ref().is_some_and(|cow| cow.merge)
            && let Some(origin) = self.registry.find(&snapshot.origin)
        {
            self.exports.check_idle(&origin)?;
        }
        Ok(())
    }

    /// Fails for a device with `keep=yes` whose content cannot be saved.
    pub fn check_keep(&self, entry: &Entry) -> Result<(), Fault> {
        if entry.is_kept() { Ok(entry.check_keep(&self.registry, true)?) } else { Ok(()) }
    }

    /// Fails for a key that only matters at the next start, if the server has no state.
    pub fn check_has_state(&self, name: &str, key: Option<&str>) -> Result<(), Fault> {
        match key {
            Some(key) if self.records.state().is_none() => {
                Err(Fault::invalid(format!("{name}: {key}: {}", records::NEEDS_STATE)))
            }
            _ => Ok(()),
        }
    }

    /// Fails if a device that the new one uses exclusively is published.
    pub fn check_unseen(&self, spec: &Spec) -> Result<(), Fault> {
        let takes = spec.kind.takes();
        let Some(seen) = takes.iter().find(|takes| !self.exports.of(takes.name).is_empty()) else {
            return Ok(());
        };
        let why = format!("is published; {} need it for themselves", seen.what);
        Err(Fault::from(seen.refuse(Errno::EBUSY, &why).of(&spec.name)))
    }

    /// Registers a device.
    pub fn add(&self, entry: &Arc<Entry>) -> Result<(), Fault> {
        Ok(self.registry.add(entry).map_err(|why| why.of(entry.name()))?)
    }

    /// Removes a device that the same verb has created.
    pub fn undo(&self, claim: &Claim<'_>, entry: &Arc<Entry>) {
        // Errors are ignored: the device may not be published yet, and no other device can depend on it yet.
        let _ = self.exports.unpublish(claim, entry, true);
        let _ = self.registry.remove(entry);
        // A template has the key, but no log of its own.
        if let (Some(log), Some(_)) = (&entry.spec.layers.record, &entry.layers.power) {
            // The log was created with the device.
            let _ = fs::remove_file(log);
        }
    }

    /// Unpublishes and removes a device. Returns the number of closed connections.
    pub fn remove(&self, claim: &Claim<'_>, entry: &Arc<Entry>, force: bool) -> Result<usize, Fault> {
        let name = entry.name();
        check_own(entry)?;
        self.registry.check_unused(entry, "removed")?;
        if force && let Some(faults) = &entry.layers.faults {
            // Fails requests held by a fault rule, which connections and verbs wait for. Later requests are not
            // held.
            faults.close();
        }
        // Requests that wait because of limits fail.
        let _gone = force.then(|| self.exports.end_waiting(entry));
        let ended = self.exports.unpublish(claim, entry, force)?;
        // Checked again, because connections to a template may have made forks of this device meanwhile.
        let removed = self.registry.remove(entry);
        removed.map_err(|users| {
            Fault::failed(Errno::EBUSY, format!("{name}: cannot be removed: {users} stand on it"))
        })?;
        // A later device with this name is not declared by the file.
        self.declarations.forget(name);
        let _ = self.withheld.take(name);
        self.exports.defaults.release(name);
        self.saves.forget_behind(name);
        if let Some(faults) = &entry.layers.faults {
            // Fails held requests of verbs: `release` cannot find the device by name any more.
            faults.close();
        }
        Ok(ended)
    }
}
