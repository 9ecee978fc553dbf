//! What the verbs work on: the devices, and where they are to be seen.

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
use freestone_spec::kinds::{self, Entry, Identity, KindSpec, Spec, build};
use freestone_spec::refusal::Errno;
use serde_json::{Map, Value};

use crate::access::AccessOf;
use crate::claims::{Claim, Claims};
use crate::control::protocol::Fault;
use crate::declarations::Declarations;
use crate::ending::Leaving;
use crate::exports::{Absent, Exports, check_own};
use crate::job::Jobs;
use crate::metrics::rates::Rates;
use crate::places::{Place, Seen, Wanted};
use crate::records::{self, Records};
use crate::saves::{self, Saves};
use crate::tls::Tls;
use crate::withheld::Withheld;

/// The state behind the control socket.
///
/// Lock order: claims of devices, all that a verb needs at once; the claim of an address; a base's
/// family; then, for a look or a change and never during a wait, the addresses, the registry, what
/// runs. Claims are held while a verb waits for disks and for clients that are cut off, and hold up
/// who wants the same device. The NBD server, connections to templates, readers of statistics and
/// `release` claim nothing.
pub struct Service {
    /// The devices.
    pub registry: Arc<Registry>,
    /// Where they are published.
    pub exports: Exports,
    /// What takes long and tells how far it is.
    pub jobs: Jobs,
    /// Devices that are just being removed.
    pub leaving: Leaving,
    /// What files have declared.
    pub declarations: Declarations,
    /// What is there after the next start.
    pub records: Records,
    /// What has lost its content, and is not seen.
    pub withheld: Withheld,
    /// Content that is there after the next start.
    pub saves: Saves,
    /// Of the server.
    pub limits: Limits,
    /// Who may connect to its sockets.
    pub access: AccessOf,
    /// Its own socket, once that is known.
    pub control: OnceLock<PathBuf>,
    /// The socket that changes nothing, where there is one.
    pub control_read_only: OnceLock<PathBuf>,
    /// Where metrics are, once that is known.
    pub metrics_url: OnceLock<String>,
    /// Where the page is, once that is known.
    pub http_url: OnceLock<String>,
    /// When the server began.
    pub began: Instant,
    /// How busy devices are, for who watches.
    pub rates: Rates,
    /// Has the server end.
    pub end: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// The command line has all that is published shown as block devices, too.
    pub as_block_devices: AtomicBool,
    claims: Claims,
    this: Weak<Self>,
}

impl Service {
    /// A service without devices.
    pub fn new(limits: Limits, access: AccessOf, tls: Tls) -> Arc<Self> {
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
            exports: Exports::new(limits, access.sockets.is, tls, Arc::clone(&registry)),
            access,
            registry,
            jobs: Jobs::default(),
            leaving: Leaving::default(),
            claims: Claims::default(),
        })
    }

    /// Itself, for what goes on when a verb has ended.
    pub fn weak(&self) -> Weak<Self> {
        Weak::clone(&self.this)
    }

    /// Waits for the right to change a device, or the name of one.
    pub fn claim(&self, verb: &'static str, name: &str) -> Result<Claim<'_>, Fault> {
        self.claims.devices(verb, &[name], &[])
    }

    /// The same for several at once.
    pub fn claim_all(&self, verb: &'static str, names: &[&str]) -> Result<Claim<'_>, Fault> {
        self.claims.devices(verb, names, &[])
    }

    /// Waits for the right to change a device, while another one stays as it is.
    pub fn claim_over(&self, verb: &'static str, name: &str, below: &str) -> Result<Claim<'_>, Fault> {
        self.claims.devices(verb, &[name], &[below])
    }

    /// Waits for the right to make these devices of what they are to stand on.
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

    /// Waits for the right to change devices, while others stay as they are.
    pub fn claim_over_all(
        &self,
        verb: &'static str,
        names: &[&str],
        below: &[&str],
    ) -> Result<Claim<'_>, Fault> {
        self.claims.devices(verb, names, below)
    }

    /// The device of that name.
    pub fn find(&self, name: &str) -> Result<Arc<Entry>, Fault> {
        self.registry.find(name).ok_or_else(|| {
            let entries = self.registry.all();
            let names: Vec<&str> = entries.iter().map(|e| e.name()).collect();
            let hint = nearest(name, &names).map(|h| format!("; {h}?")).unwrap_or_default();
            Fault::failed(Errno::ENODEV, format!("{name}: no such device{hint}"))
        })
    }

    /// The RAM disk, fork or snapshot in memory of that name; `can` is what only such a device can.
    pub fn find_ram(&self, name: &str, can: &str) -> Result<Arc<Ram>, Fault> {
        let entry = self.find(name)?;
        let only = || Fault::failed(Errno::EOPNOTSUPP, format!("{name}: only a ram device {can}"));
        entry.kind.ram().cloned().ok_or_else(only)
    }

    // ---- coming and going -----------------------------------------------------------------------

    /// Sets a device up and publishes it at home, where that is asked.
    pub fn create(&self, claim: &Claim<'_>, spec: Spec, publish: bool) -> Result<Arc<Entry>, Fault> {
        if self.records.is_pending(&spec.name) {
            let why = "is of the state, and its server has not answered yet; wait for it or remove it";
            return Err(Fault::failed(Errno::EBUSY, format!("{}: {why}", spec.name)));
        }
        let entry = self.make(spec, None)?;
        if publish && let Err(fault) = self.exports.publish_home(claim, &entry) {
            // All or nothing.
            self.undo(claim, &entry);
            return Err(fault);
        }
        Ok(entry)
    }

    /// Sets a device up, one that was there before if it has an identity.
    pub fn make(&self, spec: Spec, identity: Option<Identity>) -> Result<Arc<Entry>, Fault> {
        self.check_new(&spec)?;
        let mut entry = build(spec, &self.registry)?;
        if let Some(identity) = identity {
            entry.identity = identity;
        }
        saves::check(&self.registry, &entry)?;
        let entry = Arc::new(entry);
        self.add(&entry)?;
        // An address may have been opened meanwhile, which saw no such device.
        if let Err(fault) = self.exports.check_leads_away(&entry.spec) {
            let _ = self.registry.remove(&entry);
            return Err(fault);
        }
        Ok(entry)
    }

    /// The device of that name, if it was asked for with the same words; else as
    /// [`create`](Self::create). True: it was made.
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

    /// Shows a device wherever it is to be seen.
    pub fn show(&self, claim: &Claim<'_>, entry: &Arc<Entry>, seen: &Seen) -> Result<(), Fault> {
        if seen.home {
            self.exports.publish_home(claim, entry)?;
        }
        seen.exports.iter().try_for_each(|export| self.show_one(claim, entry, export))
    }

    /// Shows a device wherever that is possible. Returns the exports that are not there.
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
            // It is an address of the server now, or was published meanwhile.
            self.exports.absent.remove(entry.name(), Some(&wanted.place));
            return Ok(());
        }
        let shown = self.exports.show_at(claim, entry, wanted)?;
        if *declared {
            self.declarations.declare_export(entry.name(), wanted, &shown);
        }
        Ok(())
    }

    /// Whether a device is to be seen at home: as was said, else unless another has it to itself.
    pub fn belongs_at_home(&self, said: Option<bool>, entry: &Arc<Entry>) -> bool {
        said.unwrap_or_else(|| self.registry.taken_by(entry).is_none())
    }

    /// Sets attributes, all of them or none; who has claimed the device.
    pub fn set(&self, entry: &Arc<Entry>, wanted: &Map<String, Value>) -> Result<(), Fault> {
        let size = entry.size();
        attrs::set(&self.registry, entry, wanted)?;
        if entry.size() != size {
            self.exports.resized(entry.name());
        }
        Ok(())
    }

    /// Snapshots of several devices at one moment.
    pub fn snapshot(&self, _: &Claim<'_>, specs: Vec<Spec>) -> Result<Vec<Arc<Entry>>, Fault> {
        let mut names = HashSet::new();
        for spec in &specs {
            if !names.insert(spec.name.clone()) {
                return Err(Fault::invalid(format!("{}: two snapshots of that name", spec.name)));
            }
            self.check_new(spec)?;
        }
        let made = kinds::snapshots(specs, &self.registry)?;
        made.iter().try_for_each(|entry| saves::check(&self.registry, entry))?;
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

    /// What would be refused anyhow is refused before anything is opened.
    fn check_new(&self, spec: &Spec) -> Result<(), Fault> {
        let name = &spec.name;
        self.registry.check_free(name).map_err(|why| why.of(name))?;
        self.exports.check_leads_away(spec)?;
        self.exports.tls.check_device(spec)?;
        if let Some(key) = spec.key_of_state().filter(|_| self.records.state().is_none()) {
            return Err(Fault::invalid(format!("{name}: {key}: {}", records::NEEDS_STATE)));
        }
        self.check_unseen(spec)?;
        // Its users would see another content from one moment to the next.
        if let KindSpec::Snapshot(snapshot) = &spec.kind
            && snapshot.cow.as_ref().is_some_and(|cow| cow.merge)
            && let Some(origin) = self.registry.find(&snapshot.origin)
        {
            self.exports.check_idle(&origin)?;
        }
        Ok(())
    }

    /// Refuses to take a device that is published.
    pub fn check_unseen(&self, spec: &Spec) -> Result<(), Fault> {
        let takes = spec.kind.takes();
        let Some(seen) = takes.iter().find(|takes| !self.exports.of(takes.name).is_empty()) else {
            return Ok(());
        };
        let why = format!("is published; {} need it for themselves", seen.what);
        Err(Fault::from(seen.refuse(Errno::EBUSY, &why).of(&spec.name)))
    }

    /// Adds a device that is ready.
    pub fn add(&self, entry: &Arc<Entry>) -> Result<(), Fault> {
        Ok(self.registry.add(entry).map_err(|why| why.of(entry.name()))?)
    }

    /// Takes back what this verb made.
    pub fn undo(&self, claim: &Claim<'_>, entry: &Arc<Entry>) {
        // That it was published nowhere yet is no error here; nobody can stand on it yet.
        let _ = self.exports.unpublish(claim, entry, true);
        let _ = self.registry.remove(entry);
        // A template records nothing itself.
        if let (Some(log), Some(_)) = (&entry.spec.layers.record, &entry.layers.power) {
            // It was made with the device.
            let _ = fs::remove_file(log);
        }
    }

    /// Unpublishes a device and forgets it. Returns how many connections that ended.
    pub fn remove(&self, claim: &Claim<'_>, entry: &Arc<Entry>, force: bool) -> Result<usize, Fault> {
        let name = entry.name();
        check_own(entry)?;
        self.registry.check_unused(entry, "removed")?;
        if force && let Some(faults) = &entry.layers.faults {
            // Connections wait for their answers, and so may verbs; what comes later is not to wait
            // again.
            faults.close();
        }
        // Who waits for its turn does not get it any more.
        let _gone = force.then(|| self.exports.end_waiting(entry));
        let ended = self.exports.unpublish(claim, entry, force)?;
        // Connections to a template may have made forks of a base until now, but not of what has no
        // users.
        let removed = self.registry.remove(entry);
        removed.map_err(|users| {
            Fault::failed(Errno::EBUSY, format!("{name}: cannot be removed: {users} stand on it"))
        })?;
        // One that gets the name later is not the file's.
        self.declarations.forget(name);
        let _ = self.withheld.take(name);
        self.exports.defaults.release(name);
        self.saves.forget_behind(name);
        if let Some(faults) = &entry.layers.faults {
            // A verb that hangs could not be let go any more: the name is gone.
            faults.close();
        }
        Ok(ended)
    }
}
