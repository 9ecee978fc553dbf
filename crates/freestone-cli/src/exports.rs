//! Exports of all devices: publishes and unpublishes devices at NBD addresses, at vhost-user sockets and as ublk
//! block devices.
//!
//! [`Exports`] owns the NBD server and the local exports (vhost-user and ublk), which have one device each. Verbs
//! call it with a [`Claim`] of the device.

mod absent;
mod access_path;
mod blocks;
mod limits;
mod lists;
mod refused;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use freestone::device::Counting;
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
use self::access_path::{access_path, description};
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
pub use refused::{FORCE, check_own};
use refused::{errno_of, in_use};

/// Longest wait for requests in flight when a local export ends.
const END_GRACE: Duration = Duration::from_secs(5);
/// Longest wait for running calls of a device in a restart, the same as in the NBD server.
const CUT_GRACE: Duration = Duration::from_secs(1);

/// The exports of all devices.
///
/// Lock order: claim of a device, claim of an address, then `addresses` or `local`. The two mutexes are held only
/// while they are read or changed, and never together.
pub struct Exports {
    registry: Arc<Registry>,
    /// The NBD server.
    pub nbd: Server,
    /// Owners of the default export (the empty name), by address.
    pub defaults: Defaults,
    /// TLS settings of the NBD server.
    pub tls: Tls,
    /// Owner and mode of the Unix sockets created here.
    access: Access,
    claims: Claims,
    addresses: Mutex<Addresses>,
    /// Local exports, by device.
    local: Mutex<HashMap<String, Vec<Arc<Alone>>>>,
    /// Limits of all exports.
    limited: AllLimited,
    /// Exports of the state that cannot be published now.
    pub absent: AllAbsent,
}

/// Addresses of the NBD server.
#[derive(Default)]
struct Addresses {
    /// The server's own addresses (`--nbd`), open until the server ends.
    home: Vec<Address>,
    /// Clients allowed at the own addresses; `None`: all.
    allow: Option<AllowList>,
    /// The list comes from the command line, so a configuration file does not change it.
    allow_is_fixed: bool,
    /// Own addresses that are not open yet.
    planned: Vec<Address>,
    /// Addresses opened by `publish`, with their number of exports. An address is closed with its last export.
    opened: HashMap<Address, usize>,
}

impl Exports {
    /// Creates an empty set of exports for the devices of `registry`.
    pub fn new(limits: Limits, access: Access, tls: Tls, registry: Arc<Registry>) -> Self {
        Self {
            registry,
            nbd: Server::new(limits),
            defaults: Defaults::default(),
            tls,
            access,
            claims: Claims::default(),
            addresses: Mutex::default(),
            local: Mutex::default(),
            limited: AllLimited::default(),
            absent: AllAbsent::default(),
        }
    }

    fn addresses(&self) -> MutexGuard<'_, Addresses> {
        // A panic cannot leave the addresses inconsistent, so poisoning is ignored.
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_local(&self) -> MutexGuard<'_, HashMap<String, Vec<Arc<Alone>>>> {
        // A panic cannot leave the map inconsistent, so poisoning is ignored.
        self.local.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn local_of(&self, name: &str) -> Vec<Arc<Alone>> {
        self.lock_local().get(name).cloned().unwrap_or_default()
    }

    /// Returns the exports of a device.
    pub fn of(&self, name: &str) -> Vec<Export> {
        let nbd = self.nbd.exports_named(name).into_iter().map(|export| {
            let allow = self.nbd.allow_at(&export.address);
            Export::of_nbd(&export, allow.as_ref())
        });
        let mut all: Vec<_> =
            nbd.chain(self.local_of(name).iter().map(|export| Export::from(&**export))).collect();
        for export in &mut all {
            export.limits = self.limited.limits(name, &export.address).stat();
        }
        all
    }

    /// Returns the exports of a device, except those at the server's own addresses.
    pub fn wanted(&self, name: &str) -> Vec<Wanted> {
        let home = self.home();
        let nbd = self.nbd.exports_named(name).into_iter().filter(|export| !home.contains(&export.address));
        let nbd = nbd.map(|export| {
            let allow = self.nbd.allow_at(&export.address);
            let limits = self.limited.limits(name, &export.address.to_string());
            Wanted { place: Place::Nbd(export.address), read_only: export.read_only, allow, limits }
        });
        let local = self.local_of(name);
        let limits = |export: &Alone| self.limited.limits(name, &export.address());
        let local = local.iter().map(|export| Wanted { limits: limits(export), ..export.wanted() });
        nbd.chain(local).collect()
    }

    /// Returns the server's own addresses.
    pub fn home(&self) -> Vec<Address> {
        self.addresses().home.clone()
    }

    /// Returns true if a device is published at all own addresses of the server.
    pub fn is_at_home(&self, name: &str) -> bool {
        let exports = self.nbd.exports_named(name);
        self.home().iter().all(|address| exports.iter().any(|export| export.address == *address))
    }

    /// Returns true if a device is published at an NBD address.
    pub fn is_at(&self, name: &str, address: &Address) -> bool {
        self.nbd.exports_named(name).iter().any(|export| export.address == *address)
    }

    /// Returns the NBD URI of a device at an address, or None if the device is not published there.
    pub fn uri_at(&self, name: &str, address: &Address) -> Option<String> {
        self.nbd.exports_named(name).iter().find(|export| export.address == *address).map(ExportInfo::uri)
    }

    /// Returns the number of connections to a device. Does not ask the kernel, so users of a block device are not
    /// counted.
    fn connections(&self, name: &str) -> usize {
        let local: usize = self.local_of(name).iter().map(|export| export.connections()).sum();
        self.nbd.connections(name) + local
    }

    /// Returns the number of clients of a device. A local export in use counts as one.
    fn users(&self, name: &str) -> usize {
        // is_used() may block, so it is called without the lock.
        let local = self.local_of(name).iter().filter(|export| export.is_used()).count();
        self.nbd.connections(name) + local
    }

    /// Sets the addresses at which the server will listen.
    pub fn plan_home(&self, addresses: &[Address]) {
        self.addresses().planned = addresses.to_vec();
    }

    /// Refuses an `nbd` device that is an export of this server (loop check).
    pub fn check_leads_away(&self, spec: &Spec) -> Result<(), Fault> {
        if spec.kind.uri().is_none() {
            return Ok(());
        }
        let mut all = self.addresses().planned.clone();
        // An address may have been opened since it was planned.
        all.extend(self.nbd.addresses());
        loops::check_device(spec, &all)
    }

    // ---- publishing and unpublishing ------------------------------------------------------------

    /// Listens for NBD clients at an own address of the server. Returns the address with the port that was chosen.
    pub fn listen_home(&self, address: &Address) -> Result<Address, Fault> {
        self.tls.check_address(address).map_err(Fault::invalid)?;
        self.add_home(self.nbd.listen_as(address, &self.access, self.home_allow()))
    }

    /// Adds an own address with a socket that already listens, such as one from systemd.
    pub fn adopt_home(&self, socket: OwnedFd) -> Result<Address, Fault> {
        let allow = self.home_allow();
        let at = self.add_home(self.nbd.adopt(socket, allow.clone()))?;
        lists::check(allow.as_ref(), &at)?;
        self.tls.check_address(&at).map(|()| at).map_err(Fault::invalid)
    }

    fn add_home(&self, listens: Result<Address, ListenError>) -> Result<Address, Fault> {
        let at = listens.map_err(|e| Fault::failed(Errno::EADDRNOTAVAIL, e.to_string()))?;
        loops::check_address(&self.registry, &at)?;
        self.addresses().home.push(at.clone());
        Ok(at)
    }

    /// Publishes a device at the server's own addresses.
    pub fn publish_home(&self, claim: &Claim<'_>, entry: &Arc<Entry>) -> Result<(), Fault> {
        for address in self.home() {
            if !self.is_at(entry.name(), &address) {
                self.publish(claim, entry, &address, false, None, LimitSpec::default())?;
            }
        }
        self.absent.remove(entry.name(), None);
        Ok(())
    }

    /// Refuses to publish a fork of a template connection, a device with an interrupted merge, or a device that
    /// another device uses.
    fn check_publish(&self, entry: &Arc<Entry>) -> Result<(), Fault> {
        check_own(entry)?;
        entry.check_whole()?;
        let Some(taken) = self.registry.taken_by(entry) else { return Ok(()) };
        let why = format!("{}: {taken}, so it cannot be published", entry.name());
        Err(Fault::failed(Errno::EBUSY, why))
    }

    /// Publishes a device at an NBD address. If the address is not open yet, the server listens there for the clients
    /// of `allow`; if it is open, `allow` must be None or the list of the address. The first export of an address is
    /// also its default export. Returns the address with the port that was chosen.
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
        // No other verb closes the address before the device is published.
        let _address = self.claims.address("publish", address)?;
        let (at, opened) = if self.nbd.listens_at(address) {
            self.check_same(name, address, allow)?;
            (address.clone(), false)
        } else {
            self.tls.check_address(address).map_err(|why| Fault::invalid(format!("{name}: {why}")))?;
            let listen = self.nbd.listen_as(address, &self.access, allow.cloned());
            (listen.map_err(|e| Fault::failed(Errno::EADDRNOTAVAIL, format!("{name}: {e}")))?, true)
        };
        // A verb that creates an nbd device checks the open addresses when the device is in the registry.
        if opened && let Err(fault) = loops::check_address(&self.registry, &at) {
            self.nbd.close(&at);
            return Err(fault);
        }
        let may_be_default = self.defaults.is_free_for(&at, name);
        let published = match self.publish_nbd(entry, &at, read_only, may_be_default, &limited) {
            Err(PublishError::DefaultTaken { .. }) => {
                self.publish_nbd(entry, &at, read_only, false, &limited)
            }
            published => published,
        };
        match published {
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

    fn publish_nbd(
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
        match (access_path(entry, at, Some(limited)), &entry.spec.kind) {
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
            (None, _) => unreachable!("only a template has no device"),
        }
    }

    /// Publishes a device at a vhost-user socket for a virtual machine.
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
        let device = self.local_access_path(entry)?;
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
        self.add_local(name, Alone::VhostUser(export), &device, limits)
    }

    /// Publishes a device as a ublk block device of this machine with this number of queues; 0: one queue for each
    /// CPU, at most 4.
    pub fn publish_ublk(
        &self,
        _: &Claim<'_>,
        entry: &Arc<Entry>,
        queues: u16,
        read_only: bool,
        limits: LimitSpec,
    ) -> Result<Arc<Alone>, Fault> {
        let name = entry.name();
        let device = self.local_access_path(entry)?;
        let options = ublk::Options {
            read_only: read_only || entry.is_read_only(),
            failures: Arc::clone(&entry.failures),
            queues,
            ..ublk::Options::new(Arc::clone(self.nbd.budget()))
        };
        let export = ublk::Export::new(name, Arc::clone(&device) as _, options);
        let export = export.map_err(|error| Fault::failed(errno_of(&error), format!("{name}: {error}")))?;
        self.add_local(name, Alone::Ublk(export), &device, limits)
    }

    /// Returns a new access path for a local export, or refuses a device that cannot have one.
    fn local_access_path(&self, entry: &Arc<Entry>) -> Result<Arc<Counting>, Fault> {
        self.check_publish(entry)?;
        entry.way().ok_or_else(|| {
            let why = "a template can only be published over NBD; make a fork with `freestone fork` and publish that";
            Fault::failed(Errno::EOPNOTSUPP, format!("{}: {why}", entry.name()))
        })
    }

    fn add_local(
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
        self.lock_local().entry(name.to_owned()).or_default().push(Arc::clone(&export));
        self.limited.put(name, address, limited);
        Ok(export)
    }

    /// Publishes a device at a place.
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

    /// Removes a local export, and waits until it has ended.
    fn remove_local(&self, entry: &Entry, export: &Arc<Alone>) {
        let mut all = self.lock_local();
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

    /// Unpublishes a device at one place.
    pub fn hide_at(&self, _: &Claim<'_>, entry: &Entry, place: &Place, force: bool) -> Result<(), Fault> {
        let name = entry.name();
        if self.absent.remove(name, Some(place)) {
            return Ok(());
        }
        // Connections end when their requests complete, so requests must not wait for memory or limits.
        let _now = force.then(|| self.no_waiting(entry));
        if let Place::Nbd(address) = place {
            let done = self.nbd.unpublish_at(name, address, force);
            done.map_err(|e| Fault::failed(Errno::EBUSY, format!("{name}: cannot be unpublished: {e}")))?;
            self.limited.forget(name, &address.absolute().to_string());
            self.release_address(address);
            return Ok(());
        }
        let local = self.local_of(name);
        let Some(export) = local.iter().find(|export| export.wanted().place.is(place)) else { return Ok(()) };
        let held = export.hold();
        if export.is_used() && !force {
            return Err(in_use(name, 1, FORCE));
        }
        export.begin_to_end();
        drop(held);
        self.remove_local(entry, export);
        Ok(())
    }

    /// Unpublishes a device everywhere. Returns the number of ended connections.
    pub fn unpublish(&self, _: &Claim<'_>, entry: &Entry, force: bool) -> Result<usize, Fault> {
        let name = entry.name();
        if !force {
            self.check_idle(entry)?;
        }
        let (at, local) = (self.nbd.exports_named(name), self.local_of(name));
        // A client may have connected since the check. None can connect while the exports are held.
        let held: Vec<_> = local.iter().map(|export| export.hold()).collect();
        let used = local.iter().filter(|export| export.is_used()).count();
        if used > 0 && !force {
            return Err(in_use(name, used, FORCE));
        }
        let connections = self.nbd.connections(name) + used;
        // Connections end when their requests complete, so requests must not wait for memory or limits.
        let _now = force.then(|| self.no_waiting(entry));
        if !at.is_empty() {
            let done = self.nbd.unpublish(name, force);
            done.map_err(|e| Fault::failed(Errno::EBUSY, format!("{name}: cannot be unpublished: {e}")))?;
        }
        for export in at {
            self.release_address(&export.address);
        }
        self.lock_local().remove(name);
        for export in &local {
            export.begin_to_end();
        }
        // The kernel writes back its cache of a block device before the export ends.
        drop(held);
        end_all(&local, END_GRACE);
        self.limited.forget_all(name);
        self.absent.forget(name);
        Ok(connections)
    }

    /// Counts one export less at an address that `publish` opened. Closes the address if it was the last.
    fn release_address(&self, address: &Address) {
        {
            let mut addresses = self.addresses();
            let Some(left) = addresses.opened.get_mut(address) else { return };
            *left -= 1;
            if *left > 0 {
                return;
            }
        }
        let Ok(_address) = self.claims.address("unpublish", address) else {
            // The other verb hangs. The address is closed when its next export is unpublished.
            return warn!("{address}: stays open because another verb is working on it");
        };
        {
            let mut addresses = self.addresses();
            // Another device may have been published there while this thread waited.
            if addresses.opened.get(address).is_none_or(|left| *left > 0) {
                return;
            }
            addresses.opened.remove(address);
        }
        self.nbd.close(address);
    }

    // ---- changes of a published device ----------------------------------------------------------

    /// Cuts all connections to a device, as a loss of its power does, runs `action`, and serves the device again.
    /// Requests in flight get no replies. New clients wait until `action` has returned. Returns the number of ended
    /// connections. If the device blocks a thread for longer than [`CUT_GRACE`], that thread may still be in a call
    /// of the device while `action` runs.
    pub fn restart<T>(&self, name: &str, action: impl FnOnce() -> T) -> (usize, T) {
        let local = self.local_of(name);
        let held: Vec<_> = local.iter().map(|export| export.hold()).collect();
        let cut = held.iter().filter(|held| held.cut()).count();
        let end = Instant::now() + CUT_GRACE;
        if !held.iter().all(|held| held.wait_gone(end)) {
            warn!("{name}: a request is still running in the device");
        }
        let (ended, done) = self.nbd.restart(name, action);
        (ended + cut, done)
    }

    /// Replaces the device of this name in all its exports. Connections to the old device keep using it, so the
    /// caller should end them first with [`restart`](Self::restart).
    pub fn replace(&self, new: &Entry) {
        if new.device().is_none() {
            return;
        }
        let limited = |address: &str| self.limited.of(new.name(), address);
        let access_path = |at: &Address| {
            let limited = limited(&at.absolute().to_string());
            access_path(new, at, limited.as_ref()).expect("checked above")
        };
        self.nbd.replace(new.name(), &access_path, &description(new), &new.failures);
        for export in self.local_of(new.name()) {
            export.replace(new, limited(&export.address()).as_deref());
        }
    }

    /// Reports the new size of a device to local exports. NBD clients see it when they connect again.
    pub fn resized(&self, name: &str) {
        for export in self.local_of(name) {
            export.resized();
        }
    }

    /// Stops listening everywhere, completes the requests in flight, and closes all connections. Cuts connections
    /// that are not done after `grace`.
    pub fn shutdown(&self, grace: Duration) {
        let local: Vec<_> = self.lock_local().drain().flat_map(|(_, exports)| exports).collect();
        // Local exports and NBD connections end in parallel.
        for export in &local {
            export.begin_to_end();
        }
        let end = Instant::now() + grace;
        self.nbd.shutdown(grace);
        end_all(&local, end.saturating_duration_since(Instant::now()));
    }
}
