//! What the verbs work on: the devices, the NBD server, and who listens where.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use freestone::ram::{NoWaiting, Ram};
use freestone_nbd::{Address, ExportInfo, ExportOptions, PublishError, Server, TemplateOptions};
use freestone_spec::entries::nearest;
use freestone_spec::kinds::registry::Registry;
use freestone_spec::kinds::{self, Entry, KindSpec, Spec, build};
use freestone_spec::refusal::Errno;
use tracing::warn;

use crate::claims::{Claim, Claims};
use crate::control::protocol::Fault;
use crate::ending::Leaving;
use crate::exposure;
use crate::job::Jobs;
use crate::template;

/// How long it may take until the server sees that a client has left, and how often it is looked.
const LEFT_MAX: Duration = Duration::from_millis(200);
const LEFT_PAUSE: Duration = Duration::from_millis(2);

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
    /// Who serves them.
    pub nbd: Arc<Server>,
    /// What takes long and tells how far it is.
    pub jobs: Jobs,
    /// Devices that are just being removed.
    pub leaving: Leaving,
    claims: Claims,
    addresses: Mutex<Addresses>,
    this: Weak<Self>,
}

/// Where the server listens.
#[derive(Default)]
struct Addresses {
    /// The addresses of the command line: there as long as the server.
    home: Vec<Address>,
    /// Addresses that `publish` opened, with the number of their exports; closed when the last one
    /// goes.
    opened: HashMap<Address, usize>,
}

impl Service {
    /// A service without devices.
    pub fn new(nbd: Arc<Server>) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            registry: Arc::default(),
            nbd,
            jobs: Jobs::default(),
            leaving: Leaving::default(),
            claims: Claims::default(),
            addresses: Mutex::default(),
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

    fn addresses(&self) -> MutexGuard<'_, Addresses> {
        // Nothing in here can be half done.
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner)
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
        self.check_new(&spec)?;
        let entry = Arc::new(build(spec, &self.registry)?);
        self.add(&entry)?;
        if publish && let Err(fault) = self.publish_home(claim, &entry) {
            // All or nothing.
            self.undo(claim, &entry);
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
        let same = found.spec.kind == spec.kind && found.spec.layers == spec.layers;
        if same && found.template.is_none() {
            return Ok((found, false));
        }
        let (name, kind) = (found.name(), found.kind.name());
        let other = format!("{name}: a {kind} device of that name exists, and was made with other settings");
        Err(Fault::failed(Errno::EEXIST, other))
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
        if let Some(cow) = spec.kind.copies_to()
            && !self.nbd.exports_named(cow).is_empty()
        {
            let why = format!("{name}: cow={cow}: is published; copies need it for themselves");
            return Err(Fault::failed(Errno::EBUSY, why));
        }
        // Its users would see another content from one moment to the next.
        if let KindSpec::Snapshot(snapshot) = &spec.kind
            && snapshot.cow.as_ref().is_some_and(|cow| cow.merge)
            && let Some(origin) = self.registry.find(&snapshot.origin)
        {
            self.check_idle(&origin)?;
        }
        Ok(())
    }

    /// Adds a device that is ready.
    pub fn add(&self, entry: &Arc<Entry>) -> Result<(), Fault> {
        Ok(self.registry.add(entry).map_err(|why| why.of(entry.name()))?)
    }

    /// Takes back what this verb made.
    pub fn undo(&self, claim: &Claim<'_>, entry: &Arc<Entry>) {
        // That it was published nowhere yet is no error here; nobody can stand on it yet.
        let _ = self.unpublish(claim, entry, true);
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
        Self::check_own(entry)?;
        self.registry.check_unused(entry, "removed")?;
        let exports = self.exports_of(name);
        if force && let Some(faults) = &entry.layers.faults {
            // Connections wait for their answers, and so may verbs; what comes later is not to wait
            // again.
            faults.close();
        }
        let ended = if exports.is_empty() { 0 } else { self.unpublish(claim, entry, force)? };
        // Connections to a template may have made forks of a base until now, but not of what has no
        // users.
        let removed = self.registry.remove(entry);
        removed.map_err(|users| {
            Fault::failed(Errno::EBUSY, format!("{name}: cannot be removed: {users} stand on it"))
        })?;
        if let Some(faults) = &entry.layers.faults {
            // A verb that hangs could not be let go any more: the name is gone.
            faults.close();
        }
        Ok(ended)
    }

    // ---- exports --------------------------------------------------------------------------------

    /// Listens at an address of the command line. Returns it with the port that it got.
    pub fn listen_home(&self, address: &Address) -> Result<Address, Fault> {
        let listen = self.nbd.listen(address);
        let at = listen.map_err(|e| Fault::failed(Errno::EADDRNOTAVAIL, e.to_string()))?;
        warn_of_exposure(&at);
        self.addresses().home.push(at.clone());
        Ok(at)
    }

    /// Publishes a device at the addresses of the command line.
    pub fn publish_home(&self, claim: &Claim<'_>, entry: &Arc<Entry>) -> Result<(), Fault> {
        let home = self.addresses().home.clone();
        for address in home {
            self.publish(claim, entry, &address, false)?;
        }
        Ok(())
    }

    /// Publishes a device at an address, and listens there if nobody does. The first export of an
    /// address is also its default one. Returns the address with the port that it got.
    pub fn publish(
        &self,
        _: &Claim<'_>,
        entry: &Arc<Entry>,
        address: &Address,
        read_only: bool,
    ) -> Result<Address, Fault> {
        let name = entry.name();
        Self::check_own(entry)?;
        entry.check_whole()?;
        if let Some(snapshot) = self.registry.copies_for(entry) {
            let why = format!("{name}: holds the copies of {snapshot}, and is not published beside");
            return Err(Fault::failed(Errno::EBUSY, why));
        }
        // Nobody closes it between here and there.
        let _address = self.claims.address("publish", address)?;
        let (at, opened) = if self.nbd.listens_at(address) {
            (address.clone(), false)
        } else {
            let listen = self.nbd.listen(address);
            (listen.map_err(|e| Fault::failed(Errno::EADDRNOTAVAIL, format!("{name}: {e}")))?, true)
        };
        let shown = match self.show(entry, &at, read_only, true) {
            Err(PublishError::DefaultTaken { .. }) => self.show(entry, &at, read_only, false),
            shown => shown,
        };
        match shown {
            Ok(()) => {
                if opened {
                    warn_of_exposure(&at);
                }
                let mut addresses = self.addresses();
                if opened {
                    addresses.opened.insert(at.clone(), 0);
                }
                if let Some(exports) = addresses.opened.get_mut(&at) {
                    *exports += 1;
                }
                Ok(at)
            }
            Err(PublishError::Duplicate { .. }) => {
                Err(Fault::failed(Errno::EEXIST, format!("{name}: already published at {at}")))
            }
            Err(e) => {
                if opened {
                    self.nbd.close(&at);
                }
                Err(Fault::failed(Errno::EIO, format!("{name}: cannot be published at {at}: {e}")))
            }
        }
    }

    fn show(
        &self,
        entry: &Arc<Entry>,
        at: &Address,
        read_only: bool,
        default: bool,
    ) -> Result<(), PublishError> {
        let description = description(entry);
        let without_fua = matches!(&entry.spec.kind, KindSpec::Null(null) if !null.fua);
        let read_only = read_only || entry.is_read_only();
        let failures = Arc::clone(&entry.failures);
        let export = ExportOptions { read_only, default, without_fua, description, failures };
        match (entry.device(), &entry.spec.kind) {
            (Some(device), _) => self.nbd.publish(at, entry.name(), Arc::clone(device), export),
            (None, KindSpec::Template(spec)) => {
                let options = TemplateOptions { export, ttl: spec.ttl };
                self.nbd.publish_template(at, entry.name(), options, template::make(&self.registry, entry))
            }
            (None, _) => unreachable!("only a template is without a device"),
        }
    }

    /// Takes a device off all addresses. Returns how many connections that ended.
    pub fn unpublish(&self, _: &Claim<'_>, entry: &Entry, force: bool) -> Result<usize, Fault> {
        let name = entry.name();
        if !force {
            self.check_idle(entry)?;
        }
        let exports = self.exports_of(name);
        let connections = self.nbd.connections(name);
        // Connections wait for their answers.
        let _now = force.then(|| self.no_waiting(entry));
        // Between the check and here somebody may have connected.
        let done = self.nbd.unpublish(name, force);
        done.map_err(|e| Fault::failed(Errno::EBUSY, format!("{name}: cannot be unpublished: {e}")))?;
        for export in exports {
            self.leave(&export.address);
        }
        Ok(connections)
    }

    /// Has no connection to a device, or to a template, wait for room.
    fn no_waiting(&self, entry: &Entry) -> Vec<NoWaiting> {
        if entry.device().is_some() {
            return entry.no_waiting().into_iter().collect();
        }
        let of_template = |fork: &&Arc<Entry>| fork.template.as_deref() == Some(entry.name());
        self.registry.all().iter().filter(of_template).filter_map(|fork| fork.no_waiting()).collect()
    }

    /// An address has one export less. Closes it where that was the last one.
    fn leave(&self, address: &Address) {
        {
            let mut addresses = self.addresses();
            let Some(left) = addresses.opened.get_mut(address) else { return };
            *left -= 1;
            if *left > 0 {
                return;
            }
        }
        let Ok(_address) = self.claims.address("unpublish", address) else {
            // Somebody opens it, and hangs: it is closed with the next export that goes.
            return warn!("{address}: stays open, another verb works on it");
        };
        {
            let mut addresses = self.addresses();
            // Another export came while we waited.
            if addresses.opened.get(address).is_none_or(|left| *left > 0) {
                return;
            }
            addresses.opened.remove(address);
        }
        self.nbd.close(address);
    }

    /// Where a device is published.
    pub fn exports_of(&self, name: &str) -> Vec<ExportInfo> {
        self.nbd.exports_named(name)
    }

    // ---- what is refused ------------------------------------------------------------------------

    /// Refuses where clients are connected. Those that have just left are waited for: the server
    /// sees that a moment later.
    pub fn check_idle(&self, entry: &Entry) -> Result<(), Fault> {
        let name = entry.name();
        let of_template = usize::from(entry.template.is_some());
        let end = Instant::now() + LEFT_MAX;
        while self.nbd.connections(name) > 0 && Instant::now() < end {
            thread::sleep(LEFT_PAUSE);
        }
        match self.nbd.connections(name) + of_template {
            0 => Ok(()),
            1 => {
                Err(Fault::failed(Errno::EBUSY, format!("{name}: a client is connected; --force goes ahead")))
            }
            n => Err(Fault::failed(
                Errno::EBUSY,
                format!("{name}: {n} clients are connected; --force goes ahead"),
            )),
        }
    }

    /// Refuses to take the content away under clients: unless it is forced, and never where they
    /// count on what goes (write pointers, unflushed writes).
    pub fn check_wipe(&self, entry: &Entry, force: bool) -> Result<(), Fault> {
        if !force {
            return self.check_idle(entry);
        }
        let name = entry.name();
        let layered = entry.layers.power.is_some() || entry.layers.zones.is_some();
        if !layered || self.nbd.connections(name) == 0 {
            return Ok(());
        }
        let why = "clients are connected, which cannot be told; `freestone unpublish` first";
        let what =
            if entry.layers.zones.is_some() { "it is zoned" } else { "it keeps unflushed writes apart" };
        Err(Fault::failed(Errno::EBUSY, format!("{name}: {what}, and {why}")))
    }

    /// Refuses what was made for one connection.
    pub fn check_own(entry: &Entry) -> Result<(), Fault> {
        let Some(template) = &entry.template else { return Ok(()) };
        let why =
            format!("{}: belongs to a connection to the template {template}, and goes with it", entry.name());
        Err(Fault::failed(Errno::EBUSY, why))
    }
}

/// What clients are told that an export is.
pub fn description(entry: &Entry) -> String {
    format!("freestone {} device", entry.kind.name())
}

fn warn_of_exposure(address: &Address) {
    if let Some(warning) = exposure::warning(address) {
        warn!("{warning}");
    }
}
