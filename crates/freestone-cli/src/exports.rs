//! Where devices are to be seen: at NBD addresses, each with any number of devices, and as exports of
//! one device alone.

mod absent;
mod limits;
mod lists;
mod refused;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use freestone::device::{Counting, Device};
use freestone_nbd::{
    Access, Address, AllowList, ExportInfo, ExportOptions, Limits, ListenError, PublishError, Server,
    TemplateOptions,
};
use freestone_spec::kinds::registry::Registry;
use freestone_spec::kinds::{Entry, KindSpec, Spec};
use freestone_spec::limits::LimitSpec;
use freestone_spec::refusal::Errno;
use freestone_ublk as ublk;
use freestone_vhost_user as vhost_user;
use tracing::warn;

use self::absent::AllAbsent;
pub use self::absent::{Absent, Unread};
use self::limits::AllLimited;
use crate::alone::{Alone, Shown, end_all};
use crate::claims::{Claim, Claims};
use crate::control::protocol::Fault;
use crate::defaults::Defaults;
pub use crate::export::Export;
use crate::limited::Limited;
use crate::loops;
use crate::places::{Place, Wanted};
use crate::template;
use crate::tls::{self, Tls};
pub use refused::check_own;
use refused::{errno_of, in_use};

/// How long the end of an export waits for what is in flight.
const END_GRACE: Duration = Duration::from_secs(5);
/// How long a restart waits for a call of a device, as the NBD server does.
const CUT_GRACE: Duration = Duration::from_secs(1);

/// The exports of all devices.
///
/// Addresses are claimed with devices claimed already, and devices are never claimed by who has an
/// address. `addresses` and `alone` are locked for a look or a change.
pub struct Exports {
    registry: Arc<Registry>,
    /// The NBD server.
    pub nbd: Server,
    /// Whose the empty name is.
    pub defaults: Defaults,
    /// How clients come to it.
    pub tls: Tls,
    /// Who may connect to the sockets that are made here.
    access: Access,
    claims: Claims,
    addresses: Mutex<Addresses>,
    /// By device.
    alone: Mutex<HashMap<String, Vec<Arc<Alone>>>>,
    /// What they let through.
    limited: AllLimited,
    /// Those of the state that cannot be shown now.
    pub absent: AllAbsent,
}

/// Where the NBD server listens.
#[derive(Default)]
struct Addresses {
    /// The addresses of the command line: there as long as the server.
    home: Vec<Address>,
    /// Who may connect to these; `None`: whoever can.
    allow: Option<AllowList>,
    /// The command line says so, and no file changes that.
    allow_is_fixed: bool,
    /// Those of them at which it does not listen yet.
    planned: Vec<Address>,
    /// Addresses that `publish` opened, with the number of their exports; closed when the last one
    /// goes.
    opened: HashMap<Address, usize>,
}

impl Exports {
    /// None, of devices that will be in `registry`.
    pub fn new(limits: Limits, access: Access, tls: Tls, registry: Arc<Registry>) -> Self {
        Self {
            registry,
            nbd: Server::new(limits),
            defaults: Defaults::default(),
            tls,
            access,
            claims: Claims::default(),
            addresses: Mutex::default(),
            alone: Mutex::default(),
            limited: AllLimited::default(),
            absent: AllAbsent::default(),
        }
    }

    fn addresses(&self) -> MutexGuard<'_, Addresses> {
        // Nothing in here can be half done.
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn alone(&self) -> MutexGuard<'_, HashMap<String, Vec<Arc<Alone>>>> {
        // Nothing in here can be half done.
        self.alone.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn alone_of(&self, name: &str) -> Vec<Arc<Alone>> {
        self.alone().get(name).cloned().unwrap_or_default()
    }

    /// Where a device is published.
    pub fn of(&self, name: &str) -> Vec<Export> {
        let nbd = self.nbd.exports_named(name).into_iter().map(|export| {
            let allow = self.nbd.allow_at(&export.address);
            Export::of_nbd(&export, allow.as_ref())
        });
        let mut all: Vec<_> =
            nbd.chain(self.alone_of(name).iter().map(|export| Export::from(&**export))).collect();
        for export in &mut all {
            export.limits = self.limited.limits(name, &export.address).stat();
        }
        all
    }

    /// Where a device is to be seen beside the addresses of the command line.
    pub fn wanted(&self, name: &str) -> Vec<Wanted> {
        let home = self.home();
        let nbd = self.nbd.exports_named(name).into_iter().filter(|export| !home.contains(&export.address));
        let nbd = nbd.map(|export| {
            let allow = self.nbd.allow_at(&export.address);
            let limits = self.limited.limits(name, &export.address.to_string());
            Wanted { place: Place::Nbd(export.address), read_only: export.read_only, allow, limits }
        });
        let alone = self.alone_of(name);
        let limits = |export: &Alone| self.limited.limits(name, &export.address());
        let alone = alone.iter().map(|export| Wanted { limits: limits(export), ..export.wanted() });
        nbd.chain(alone).collect()
    }

    /// The addresses of the command line.
    pub fn home(&self) -> Vec<Address> {
        self.addresses().home.clone()
    }

    /// Whether a device is published at all of those.
    pub fn is_at_home(&self, name: &str) -> bool {
        let there = self.nbd.exports_named(name);
        self.home().iter().all(|address| there.iter().any(|export| export.address == *address))
    }

    /// Whether a device is published at an NBD address.
    pub fn is_at(&self, name: &str, address: &Address) -> bool {
        self.nbd.exports_named(name).iter().any(|export| export.address == *address)
    }

    /// With what a client reaches a device at an NBD address.
    pub fn uri_at(&self, name: &str, address: &Address) -> Option<String> {
        self.nbd.exports_named(name).iter().find(|export| export.address == *address).map(ExportInfo::uri)
    }

    /// Connections to a device, as far as they are counted without a question to the kernel.
    fn connections(&self, name: &str) -> usize {
        let alone: usize = self.alone_of(name).iter().map(|export| export.connections()).sum();
        self.nbd.connections(name) + alone
    }

    /// How many use a device.
    fn users(&self, name: &str) -> usize {
        // To ask may take a moment: not under the lock.
        let alone = self.alone_of(name).iter().filter(|export| export.is_used()).count();
        self.nbd.connections(name) + alone
    }

    /// The addresses at which the server will listen.
    pub fn plan_home(&self, addresses: &[Address]) {
        self.addresses().planned = addresses.to_vec();
    }

    /// Refuses a device that is an export of this server.
    pub fn check_leads_away(&self, spec: &Spec) -> Result<(), Fault> {
        if spec.kind.uri().is_none() {
            return Ok(());
        }
        let mut all = self.addresses().planned.clone();
        // Also what is listened at only just now.
        all.extend(self.nbd.addresses());
        loops::check_device(spec, &all)
    }

    // ---- coming and going -----------------------------------------------------------------------

    /// Listens for NBD clients at an address of the command line. Returns it with the port that it
    /// got.
    pub fn listen_home(&self, address: &Address) -> Result<Address, Fault> {
        self.tls.check_address(address).map_err(Fault::invalid)?;
        self.at_home(self.nbd.listen_as(address, &self.access, self.home_allow()))
    }

    /// The same with a socket that listens already.
    pub fn adopt_home(&self, socket: OwnedFd) -> Result<Address, Fault> {
        let allow = self.home_allow();
        let at = self.at_home(self.nbd.adopt(socket, allow.clone()))?;
        lists::check(allow.as_ref(), &at)?;
        self.tls.check_address(&at).map(|()| at).map_err(Fault::invalid)
    }

    fn at_home(&self, listens: Result<Address, ListenError>) -> Result<Address, Fault> {
        let at = listens.map_err(|e| Fault::failed(Errno::EADDRNOTAVAIL, e.to_string()))?;
        loops::check_address(&self.registry, &at)?;
        self.addresses().home.push(at.clone());
        Ok(at)
    }

    /// Publishes a device at the addresses of the command line.
    pub fn publish_home(&self, claim: &Claim<'_>, entry: &Arc<Entry>) -> Result<(), Fault> {
        for address in self.home() {
            if !self.is_at(entry.name(), &address) {
                self.publish(claim, entry, &address, false, None, LimitSpec::default())?;
            }
        }
        self.absent.remove(entry.name(), None);
        Ok(())
    }

    /// Refuses what is not to be seen by clients.
    fn check_publish(&self, entry: &Arc<Entry>) -> Result<(), Fault> {
        check_own(entry)?;
        entry.check_whole()?;
        let Some(taken) = self.registry.taken_by(entry) else { return Ok(()) };
        let why = format!("{}: {taken}, and is not published beside", entry.name());
        Err(Fault::failed(Errno::EBUSY, why))
    }

    /// Publishes a device at an address, and listens there if nobody does, for those whom `allow` lets
    /// in. Where somebody does, a list has to be the one that is there. The first export of an
    /// address is also its default one. Returns the address with the port that it got.
    pub fn publish(
        &self,
        _: &Claim<'_>,
        entry: &Arc<Entry>,
        address: &Address,
        read_only: bool,
        allow: Option<&AllowList>,
        limits: LimitSpec,
    ) -> Result<Address, Fault> {
        let name = entry.name();
        self.check_publish(entry)?;
        let limited = Arc::new(Limited::new(limits));
        // Nobody closes it between here and there.
        let _address = self.claims.address("publish", address)?;
        let (at, opened) = if self.nbd.listens_at(address) {
            self.check_same(name, address, allow)?;
            (address.clone(), false)
        } else {
            self.tls.check_address(address).map_err(|why| Fault::invalid(format!("{name}: {why}")))?;
            let listen = self.nbd.listen_as(address, &self.access, allow.cloned());
            (listen.map_err(|e| Fault::failed(Errno::EADDRNOTAVAIL, format!("{name}: {e}")))?, true)
        };
        // Whoever makes a device looks where is listened when that is among the devices.
        if opened && let Err(fault) = loops::check_address(&self.registry, &at) {
            self.nbd.close(&at);
            return Err(fault);
        }
        let may_be_default = self.defaults.is_free_for(&at, name);
        let shown = match self.show(entry, &at, read_only, may_be_default, &limited) {
            Err(PublishError::DefaultTaken { .. }) => self.show(entry, &at, read_only, false, &limited),
            shown => shown,
        };
        match shown {
            Ok(()) => {
                self.defaults.settle(&at, name);
                self.limited.put(name, at.absolute().to_string(), limited);
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
        limited: &Arc<Limited>,
    ) -> Result<(), PublishError> {
        let description = description(entry);
        let without_fua = matches!(&entry.spec.kind, KindSpec::Null(null) if !null.fua);
        let read_only = read_only || entry.is_read_only();
        let failures = Arc::clone(&entry.failures);
        let clients = tls::clients_of(&entry.spec);
        let places = vec![Arc::clone(&limited.places), Arc::clone(&entry.clients)];
        let export =
            ExportOptions { read_only, default, without_fua, clients, description, failures, places };
        match (way_at(entry, at, Some(limited)), &entry.spec.kind) {
            (Some(device), _) => self.nbd.publish(at, entry.name(), device, export),
            (None, KindSpec::Template(spec)) => {
                let options = TemplateOptions { export, ttl: spec.ttl };
                self.nbd.publish_template(
                    at,
                    entry.name(),
                    options,
                    template::make(&self.registry, entry, limited),
                )
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
        allow: Option<&AllowList>,
        limits: LimitSpec,
    ) -> Result<Arc<Alone>, Fault> {
        let name = entry.name();
        let device = self.check_alone(entry)?;
        let options = vhost_user::Options {
            read_only: read_only || entry.is_read_only(),
            failures: Arc::clone(&entry.failures),
            access: self.access,
            allow: allow.cloned(),
            denials: Arc::clone(self.nbd.denials()),
            places: vec![Arc::clone(&entry.clients)],
            ..vhost_user::Options::new(Arc::clone(self.nbd.budget()))
        };
        let export = vhost_user::Export::new(path, name, Arc::clone(&device) as _, options);
        let export = export.map_err(|error| {
            let why = format!("{name}: cannot listen at vhost-user:{error}");
            Fault::failed(Errno::EADDRNOTAVAIL, why)
        })?;
        self.show_alone(name, Alone::VhostUser(export), &device, limits)
    }

    /// Publishes a device as a block device of this machine, with so many queues; 0: as many as it
    /// has CPUs, up to 4.
    pub fn publish_ublk(
        &self,
        _: &Claim<'_>,
        entry: &Arc<Entry>,
        queues: u16,
        read_only: bool,
        limits: LimitSpec,
    ) -> Result<Arc<Alone>, Fault> {
        let name = entry.name();
        let device = self.check_alone(entry)?;
        let options = ublk::Options {
            read_only: read_only || entry.is_read_only(),
            failures: Arc::clone(&entry.failures),
            queues,
            ..ublk::Options::new(Arc::clone(self.nbd.budget()))
        };
        let export = ublk::Export::new(name, Arc::clone(&device) as _, options);
        let export = export.map_err(|error| Fault::failed(errno_of(&error), format!("{name}: {error}")))?;
        self.show_alone(name, Alone::Ublk(export), &device, limits)
    }

    /// A way into what may be seen alone.
    fn check_alone(&self, entry: &Arc<Entry>) -> Result<Arc<Counting>, Fault> {
        self.check_publish(entry)?;
        entry.way().ok_or_else(|| {
            let why = "a template is published over NBD; a fork of it by `freestone fork` is shown alone";
            Fault::failed(Errno::EOPNOTSUPP, format!("{}: {why}", entry.name()))
        })
    }

    fn show_alone(
        &self,
        name: &str,
        export: Alone,
        way: &Arc<Counting>,
        limits: LimitSpec,
    ) -> Result<Arc<Alone>, Fault> {
        let address = export.address();
        way.tally().set_place(&address);
        let limited = Arc::new(Limited::new(limits));
        limited.join(way).map_err(|e| Fault::failed(Errno::ENOMEM, format!("{name}: {e}")))?;
        let export = Arc::new(export);
        self.alone().entry(name.to_owned()).or_default().push(Arc::clone(&export));
        self.limited.put(name, address, limited);
        Ok(export)
    }

    /// Shows a device at a place.
    pub fn show_at(&self, claim: &Claim<'_>, entry: &Arc<Entry>, wanted: &Wanted) -> Result<Shown, Fault> {
        let Wanted { place, read_only, allow, limits } = wanted;
        let (read_only, allow, limits) = (*read_only, allow.as_ref(), *limits);
        let checked = place.check_limits(&limits);
        checked.map_err(|why| Fault::invalid(format!("{}: publish: {why}", entry.name())))?;
        let shown = match place {
            Place::Nbd(at) => Shown::Nbd(self.publish(claim, entry, at, read_only, allow, limits)?),
            Place::VhostUser(path) => {
                Shown::Alone(self.publish_vhost_user(claim, entry, path, read_only, allow, limits)?)
            }
            Place::Ublk(queues) => Shown::Alone(self.publish_ublk(claim, entry, *queues, read_only, limits)?),
        };
        self.absent.remove(entry.name(), Some(place));
        Ok(shown)
    }

    /// Takes one of these away.
    fn withdraw(&self, entry: &Entry, export: &Arc<Alone>) {
        let mut all = self.alone();
        if let Some(exports) = all.get_mut(entry.name()) {
            exports.retain(|other| !Arc::ptr_eq(other, export));
            if exports.is_empty() {
                all.remove(entry.name());
            }
        }
        drop(all);
        end_all(std::slice::from_ref(export), END_GRACE);
        self.limited.forget(entry.name(), &export.address());
    }

    /// Takes a device off one place.
    pub fn hide_at(&self, _: &Claim<'_>, entry: &Entry, place: &Place, force: bool) -> Result<(), Fault> {
        let name = entry.name();
        if self.absent.remove(name, Some(place)) {
            return Ok(());
        }
        // Connections wait for their answers.
        let _now = force.then(|| self.no_waiting(entry));
        if let Place::Nbd(address) = place {
            let done = self.nbd.unpublish_at(name, address, force);
            done.map_err(|e| Fault::failed(Errno::EBUSY, format!("{name}: cannot be unpublished: {e}")))?;
            self.limited.forget(name, &address.absolute().to_string());
            self.leave(address);
            return Ok(());
        }
        let all = self.alone_of(name);
        let Some(export) = all.iter().find(|export| export.wanted().place.is(place)) else { return Ok(()) };
        let held = export.hold();
        if export.is_used() && !force {
            return Err(in_use(name, 1));
        }
        export.begin_to_end();
        drop(held);
        self.withdraw(entry, export);
        Ok(())
    }

    /// Takes a device off all addresses. Returns how many connections that ended.
    pub fn unpublish(&self, _: &Claim<'_>, entry: &Entry, force: bool) -> Result<usize, Fault> {
        let name = entry.name();
        if !force {
            self.check_idle(entry)?;
        }
        let (at, alone) = (self.nbd.exports_named(name), self.alone_of(name));
        // Between the check and here somebody may have connected, and nobody does from here on.
        let held: Vec<_> = alone.iter().map(|export| export.hold()).collect();
        let used = alone.iter().filter(|export| export.is_used()).count();
        if used > 0 && !force {
            return Err(in_use(name, used));
        }
        let connections = self.nbd.connections(name) + used;
        // Connections wait for their answers.
        let _now = force.then(|| self.no_waiting(entry));
        if !at.is_empty() {
            let done = self.nbd.unpublish(name, force);
            done.map_err(|e| Fault::failed(Errno::EBUSY, format!("{name}: cannot be unpublished: {e}")))?;
        }
        for export in at {
            self.leave(&export.address);
        }
        self.alone().remove(name);
        for export in &alone {
            export.begin_to_end();
        }
        // A block device that ends still writes what was cached of it.
        drop(held);
        end_all(&alone, END_GRACE);
        self.limited.forget_all(name);
        self.absent.forget(name);
        Ok(connections)
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
        let alone = self.alone_of(name);
        let held: Vec<_> = alone.iter().map(|export| export.hold()).collect();
        let cut = held.iter().filter(|held| held.cut()).count();
        let end = Instant::now() + CUT_GRACE;
        if !held.iter().all(|held| held.wait_gone(end)) {
            warn!("{name}: a request is still with the device");
        }
        let (ended, done) = self.nbd.restart(name, action);
        (ended + cut, done)
    }

    /// Shows a device in the place of the one of that name, wherever it is published. Who uses that
    /// goes on with it, and is best sent away before, by a [`restart`](Self::restart).
    pub fn replace(&self, new: &Entry) {
        if new.device().is_none() {
            return;
        }
        let limited = |address: &str| self.limited.of(new.name(), address);
        let way = |at: &Address| {
            let limited = limited(&at.absolute().to_string());
            way_at(new, at, limited.as_ref()).expect("it is a device")
        };
        self.nbd.replace(new.name(), &way, &description(new), &new.failures);
        for export in self.alone_of(new.name()) {
            export.replace(new, limited(&export.address()).as_deref());
        }
    }

    /// A device has another size: tells who can be told. NBD clients see it when they connect again.
    pub fn resized(&self, name: &str) {
        for export in self.alone_of(name) {
            export.resized();
        }
    }

    /// Stops listening everywhere, finishes what is in flight, and closes all connections; those
    /// that are not done after `grace` are cut.
    pub fn shutdown(&self, grace: Duration) {
        let alone: Vec<_> = self.alone().drain().flat_map(|(_, exports)| exports).collect();
        // With the others, not after them.
        for export in &alone {
            export.begin_to_end();
        }
        let end = Instant::now() + grace;
        self.nbd.shutdown(grace);
        end_all(&alone, end.saturating_duration_since(Instant::now()));
    }
}

/// A way into a device for clients at an address.
fn way_at(entry: &Entry, at: &Address, limited: Option<&Arc<Limited>>) -> Option<Arc<dyn Device>> {
    let way = entry.way()?;
    way.tally().set_place(&at.absolute().to_string());
    if let Some(Err(error)) = limited.map(|limited| limited.join(&way)) {
        warn!("{}: {at}: its limits are not kept, as a thread cannot be started: {error}", entry.name());
    }
    Some(way)
}

/// What clients are told that an export is.
fn description(entry: &Entry) -> String {
    format!("freestone {} device", entry.kind.name())
}
