//! Where devices are to be seen: at NBD addresses, each with any number of devices, and at sockets
//! for virtual machines, each with one.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use freestone::ram::NoWaiting;
use freestone_nbd::{Address, ExportInfo, ExportOptions, Limits, PublishError, Server, TemplateOptions};
use freestone_spec::kinds::registry::Registry;
use freestone_spec::kinds::{Entry, KindSpec};
use freestone_spec::path_text;
use freestone_spec::refusal::Errno;
use freestone_vhost_user as vhost_user;
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::claims::{Claim, Claims};
use crate::control::protocol::Fault;
use crate::exposure;
use crate::template;

/// How long it may take until the server sees that a client has left, and how often it is looked.
const LEFT_MAX: Duration = Duration::from_millis(200);
const LEFT_PAUSE: Duration = Duration::from_millis(2);
/// How long a restart waits for a call of a device, as the NBD server does.
const CUT_GRACE: Duration = Duration::from_secs(1);

/// The exports of all devices.
///
/// Addresses are claimed with devices claimed already, and devices are never claimed by who has an
/// address. `addresses` and `vhost_user` are locked for a look or a change.
pub struct Exports {
    registry: Arc<Registry>,
    /// The NBD server.
    pub nbd: Server,
    claims: Claims,
    addresses: Mutex<Addresses>,
    /// By device.
    vhost_user: Mutex<HashMap<String, Vec<Arc<vhost_user::Export>>>>,
}

/// Where the NBD server listens.
#[derive(Default)]
struct Addresses {
    /// The addresses of the command line: there as long as the server.
    home: Vec<Address>,
    /// Addresses that `publish` opened, with the number of their exports; closed when the last one
    /// goes.
    opened: HashMap<Address, usize>,
}

/// Where a device is published.
#[derive(Debug, Serialize, Deserialize)]
pub struct Export {
    /// `unix:PATH`, `tcp:HOST:PORT` or `vhost-user:PATH`.
    pub address: String,
    /// What an NBD client is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uri: Option<String>,
    /// Clients cannot write there.
    pub read_only: bool,
    /// Also found under the empty name.
    pub default: bool,
    /// Every connection gets a fork of its own.
    pub template: bool,
    /// Open connections.
    pub connections: usize,
}

impl Export {
    /// What a client is given.
    pub fn place(&self) -> &str {
        self.uri.as_ref().unwrap_or(&self.address)
    }
}

impl From<ExportInfo> for Export {
    fn from(info: ExportInfo) -> Self {
        Self {
            address: info.address.to_string(),
            uri: Some(info.address.uri(&info.name)),
            read_only: info.read_only,
            default: info.default,
            template: info.template,
            connections: info.connections,
        }
    }
}

impl From<&vhost_user::Export> for Export {
    fn from(export: &vhost_user::Export) -> Self {
        Self {
            address: vhost_user_address(export.path()),
            uri: None,
            read_only: export.is_read_only(),
            default: false,
            template: false,
            connections: export.is_connected().into(),
        }
    }
}

/// How the socket of a virtual machine is written.
pub fn vhost_user_address(path: &Path) -> String {
    format!("vhost-user:{}", path_text::text(path))
}

impl Exports {
    /// None, of devices that will be in `registry`.
    pub fn new(limits: Limits, registry: Arc<Registry>) -> Self {
        Self {
            registry,
            nbd: Server::new(limits),
            claims: Claims::default(),
            addresses: Mutex::default(),
            vhost_user: Mutex::default(),
        }
    }

    fn addresses(&self) -> MutexGuard<'_, Addresses> {
        // Nothing in here can be half done.
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn vhost_user(&self) -> MutexGuard<'_, HashMap<String, Vec<Arc<vhost_user::Export>>>> {
        // Nothing in here can be half done.
        self.vhost_user.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn vhost_user_of(&self, name: &str) -> Vec<Arc<vhost_user::Export>> {
        self.vhost_user().get(name).cloned().unwrap_or_default()
    }

    /// Where a device is published.
    pub fn of(&self, name: &str) -> Vec<Export> {
        let nbd = self.nbd.exports_named(name).into_iter().map(Export::from);
        nbd.chain(self.vhost_user_of(name).iter().map(|export| Export::from(&**export))).collect()
    }

    /// Whether a device is published at an NBD address.
    pub fn is_at(&self, name: &str, address: &Address) -> bool {
        self.nbd.exports_named(name).iter().any(|export| export.address == *address)
    }

    /// Connections that use a device.
    fn connections(&self, name: &str) -> usize {
        let machines = self
            .vhost_user()
            .get(name)
            .map_or(0, |exports| exports.iter().filter(|export| export.is_connected()).count());
        self.nbd.connections(name) + machines
    }

    // ---- coming and going -----------------------------------------------------------------------

    /// Listens for NBD clients at an address of the command line. Returns it with the port that it
    /// got.
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

    /// Refuses what is not to be seen by clients.
    fn check_publish(&self, entry: &Arc<Entry>) -> Result<(), Fault> {
        check_own(entry)?;
        entry.check_whole()?;
        let Some(snapshot) = self.registry.copies_for(entry) else { return Ok(()) };
        let why = format!("{}: holds the copies of {snapshot}, and is not published beside", entry.name());
        Err(Fault::failed(Errno::EBUSY, why))
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
        self.check_publish(entry)?;
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

    /// Publishes a device at a socket for a virtual machine.
    pub fn publish_vhost_user(
        &self,
        _: &Claim<'_>,
        entry: &Arc<Entry>,
        path: &Path,
        read_only: bool,
    ) -> Result<Arc<vhost_user::Export>, Fault> {
        let name = entry.name();
        self.check_publish(entry)?;
        let Some(device) = entry.device() else {
            let why = "a template is published over NBD; a virtual machine gets a fork by `freestone fork`";
            return Err(Fault::failed(Errno::EOPNOTSUPP, format!("{name}: {why}")));
        };
        let options = vhost_user::Options {
            read_only: read_only || entry.is_read_only(),
            failures: Arc::clone(&entry.failures),
            ..vhost_user::Options::new(Arc::clone(self.nbd.budget()))
        };
        let export = vhost_user::Export::new(path, name, Arc::clone(device), options);
        let export = export.map_err(|error| {
            let why = format!("{name}: cannot listen at {}: {}", vhost_user_address(path), error.source);
            Fault::failed(Errno::EADDRNOTAVAIL, why)
        })?;
        let export = Arc::new(export);
        self.vhost_user().entry(name.to_owned()).or_default().push(Arc::clone(&export));
        Ok(export)
    }

    /// Takes one of these away again.
    pub fn withdraw(&self, _: &Claim<'_>, export: &Arc<vhost_user::Export>) {
        let mut all = self.vhost_user();
        if let Some(exports) = all.get_mut(export.name()) {
            exports.retain(|other| !Arc::ptr_eq(other, export));
            if exports.is_empty() {
                all.remove(export.name());
            }
        }
        drop(all);
        end_all(std::slice::from_ref(export), vhost_user::END_GRACE);
    }

    /// Takes a device off all addresses. Returns how many connections that ended.
    pub fn unpublish(&self, _: &Claim<'_>, entry: &Entry, force: bool) -> Result<usize, Fault> {
        let name = entry.name();
        if !force {
            self.check_idle(entry)?;
        }
        let (at, machines) = (self.nbd.exports_named(name), self.vhost_user_of(name));
        // Between the check and here somebody may have connected, and nobody does from here on.
        let held: Vec<_> = machines.iter().map(|export| export.hold()).collect();
        let connected = held.iter().filter(|held| held.is_connected()).count();
        if connected > 0 && !force {
            return Err(in_use(name, connected));
        }
        let connections = self.nbd.connections(name) + connected;
        // Connections wait for their answers.
        let _now = force.then(|| self.no_waiting(entry));
        if !at.is_empty() {
            let done = self.nbd.unpublish(name, force);
            done.map_err(|e| Fault::failed(Errno::EBUSY, format!("{name}: cannot be unpublished: {e}")))?;
        }
        for export in at {
            self.leave(&export.address);
        }
        self.vhost_user().remove(name);
        end_all(&machines, vhost_user::END_GRACE);
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

    // ---- what happens to a device that is published ---------------------------------------------

    /// What a device's loss of power looks like from outside: cuts the connections that use it, with
    /// no answer to what they had in flight, runs `action`, and serves it again. Who connects
    /// meanwhile waits for that. Returns how many connections ended. A thread that a device holds up
    /// for more than a second may still be in a call of the device when `action` runs.
    pub fn restart<T>(&self, name: &str, action: impl FnOnce() -> T) -> (usize, T) {
        let machines = self.vhost_user_of(name);
        let held: Vec<_> = machines.iter().map(|export| export.hold()).collect();
        let cut = held.iter().filter(|held| held.cut()).count();
        let end = Instant::now() + CUT_GRACE;
        if !held.iter().all(|held| held.wait_gone(end)) {
            warn!("{name}: a request of a virtual machine is still with the device");
        }
        let (ended, done) = self.nbd.restart(name, action);
        (ended + cut, done)
    }

    /// Shows a device in the place of the one of that name, wherever it is published. Who uses that
    /// goes on with it, and is best sent away before, by a [`restart`](Self::restart).
    pub fn replace(&self, new: &Entry) {
        let Some(device) = new.device() else { return };
        self.nbd.replace(new.name(), device, &description(new), &new.failures);
        for export in self.vhost_user_of(new.name()) {
            export.replace(Arc::clone(device), Arc::clone(&new.failures));
        }
    }

    /// A device has another size: tells who can be told. NBD clients see it when they connect again.
    pub fn resized(&self, name: &str) {
        for export in self.vhost_user_of(name) {
            export.resized();
        }
    }

    /// Stops listening everywhere, finishes what is in flight, and closes all connections; those
    /// that are not done after `grace` are cut.
    pub fn shutdown(&self, grace: Duration) {
        let machines: Vec<_> = self.vhost_user().drain().flat_map(|(_, exports)| exports).collect();
        // With the others, not after them.
        for export in &machines {
            export.begin_to_end();
        }
        let end = Instant::now() + grace;
        self.nbd.shutdown(grace);
        end_all(&machines, end.saturating_duration_since(Instant::now()));
    }

    // ---- what is refused ------------------------------------------------------------------------

    /// Refuses where clients are connected. Those that have just left are waited for: the server
    /// sees that a moment later.
    pub fn check_idle(&self, entry: &Entry) -> Result<(), Fault> {
        let name = entry.name();
        let of_template = usize::from(entry.template.is_some());
        let end = Instant::now() + LEFT_MAX;
        while self.connections(name) > 0 && Instant::now() < end {
            thread::sleep(LEFT_PAUSE);
        }
        match self.connections(name) + of_template {
            0 => Ok(()),
            connections => Err(in_use(name, connections)),
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
        if !layered || self.connections(name) == 0 {
            return Ok(());
        }
        let why = "clients are connected, which cannot be told; `freestone unpublish` first";
        let what =
            if entry.layers.zones.is_some() { "it is zoned" } else { "it keeps unflushed writes apart" };
        Err(Fault::failed(Errno::EBUSY, format!("{name}: {what}, and {why}")))
    }
}

/// Why a device is left alone.
fn in_use(name: &str, connections: usize) -> Fault {
    let who = if connections == 1 { "a client is".to_owned() } else { format!("{connections} clients are") };
    Fault::failed(Errno::EBUSY, format!("{name}: {who} connected; --force goes ahead"))
}

/// Ends them at the same time; who is not done after `grace` lets go of its device later.
fn end_all(exports: &[Arc<vhost_user::Export>], grace: Duration) {
    for export in exports {
        export.begin_to_end();
    }
    let end = Instant::now() + grace;
    for export in exports {
        if !export.end(end.saturating_duration_since(Instant::now())) {
            warn!("{}: requests of a virtual machine are still in flight", export.name());
        }
    }
}

/// Refuses what was made for one connection.
pub fn check_own(entry: &Entry) -> Result<(), Fault> {
    let Some(template) = &entry.template else { return Ok(()) };
    let why =
        format!("{}: belongs to a connection to the template {template}, and goes with it", entry.name());
    Err(Fault::failed(Errno::EBUSY, why))
}

/// What clients are told that an export is.
fn description(entry: &Entry) -> String {
    format!("freestone {} device", entry.kind.name())
}

fn warn_of_exposure(address: &Address) {
    if let Some(warning) = exposure::warning(address) {
        warn!("{warning}");
    }
}
