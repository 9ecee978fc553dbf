//! Exports of all devices: publishes and unpublishes devices at NBD addresses, at vhost-user sockets and as ublk
//! block devices.
//!
//! [`Exports`] owns the NBD server and the local exports (vhost-user and ublk), which have one device each. Verbs
//! call it with a [`Claim`] of the device.

mod access_path;
mod blocks;
mod checks;
mod device_changes;
mod limits;
mod lists;
mod unpublished;

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

use self::access_path::{access_path, description};
use self::limits::AllExportLimits;
use self::unpublished::UnpublishedExports;
pub use self::unpublished::{UnparsedExport, UnpublishedExport};
use crate::claims::{Claim, Claims};
use crate::control::protocol::RpcError;
use crate::defaults::Defaults;
pub use crate::export::Export;
use crate::export_limits::ExportLimits;
use crate::export_spec::{ExportAddress, ExportSpec};
use crate::loop_check;
use crate::standalone_export::{PublishedExport, StandaloneExport, end_all};
use crate::template;
use crate::tls::{self, Tls};
pub use checks::{DISCONNECT_MAX, FORCE, check_not_connection_fork};
use checks::{errno_of, in_use};

/// Longest wait for requests in flight when a local export (vhost-user or ublk) ends.
const END_GRACE: Duration = Duration::from_secs(5);

/// The exports of all devices.
///
/// Lock order: claim of a device, claim of an address, then `addresses` or `local`. The two mutexes are held only while
/// the data is read or changed, and never together.
pub struct Exports {
    registry: Arc<Registry>,
    /// The NBD server.
    pub nbd: Server,
    /// Reservations of the default export (the empty name), by address.
    pub defaults: Defaults,
    /// TLS settings of the NBD server.
    pub tls: Tls,
    /// Mode, owner and group of the Unix sockets of exports.
    access: Access,
    claims: Claims,
    addresses: Mutex<Addresses>,
    /// Local exports (vhost-user and ublk), by device name.
    local: Mutex<HashMap<String, Vec<Arc<StandaloneExport>>>>,
    /// Limits of all exports.
    limited: AllExportLimits,
    /// Exports recorded in the state directory that cannot be published yet, and are retried.
    pub unpublished: UnpublishedExports,
}

/// Addresses of the NBD server.
#[derive(Default)]
struct Addresses {
    /// The server's own addresses (`--nbd`), open until the server ends.
    server: Vec<Address>,
    /// Allow list of the own addresses. `None` admits every client.
    allow: Option<AllowList>,
    /// True if the allow list comes from the command line, so a configuration file must not change it.
    allow_is_fixed: bool,
    /// Own addresses as configured, for the loop check of devices that are created before these addresses are open.
    planned: Vec<Address>,
    /// Addresses opened by `publish`, with the number of exports at each. An address is closed with its last export.
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
            limited: AllExportLimits::default(),
            unpublished: UnpublishedExports::default(),
        }
    }

    fn addresses(&self) -> MutexGuard<'_, Addresses> {
        // A panic cannot leave the addresses inconsistent, so poisoning is ignored.
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_local(&self) -> MutexGuard<'_, HashMap<String, Vec<Arc<StandaloneExport>>>> {
        // A panic cannot leave the map inconsistent, so poisoning is ignored.
        self.local.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn local_of(&self, name: &str) -> Vec<Arc<StandaloneExport>> {
        self.lock_local().get(name).cloned().unwrap_or_default()
    }

    /// Returns all exports of a device, with their allow lists and limits.
    pub fn of(&self, name: &str) -> Vec<Export> {
        let nbd = self.nbd.exports_named(name).into_iter().map(|export| {
            let allow = self.nbd.allow_list(&export.address);
            Export::of_nbd(&export, allow.as_ref())
        });
        let mut all: Vec<_> =
            nbd.chain(self.local_of(name).iter().map(|export| Export::from(&**export))).collect();
        for export in &mut all {
            export.limits = self.limited.limits(name, &export.address).stat();
        }
        all
    }

    /// Returns the specifications of a device's exports, except those at the server's own addresses.
    pub fn specs(&self, name: &str) -> Vec<ExportSpec> {
        let home = self.server_addresses();
        let nbd = self.nbd.exports_named(name).into_iter().filter(|export| !home.contains(&export.address));
        let nbd = nbd.map(|export| {
            let allow = self.nbd.allow_list(&export.address);
            let limits = self.limited.limits(name, &export.address.to_string());
            ExportSpec {
                address: ExportAddress::Nbd(export.address),
                read_only: export.read_only,
                allow,
                limits,
            }
        });
        let local = self.local_of(name);
        let limits = |export: &StandaloneExport| self.limited.limits(name, &export.address());
        let local = local.iter().map(|export| ExportSpec { limits: limits(export), ..export.spec() });
        nbd.chain(local).collect()
    }

    /// Returns the server's own addresses.
    pub fn server_addresses(&self) -> Vec<Address> {
        self.addresses().server.clone()
    }

    /// Returns true if a device is published at all of the server's own addresses.
    pub fn is_at_server_addresses(&self, name: &str) -> bool {
        let exports = self.nbd.exports_named(name);
        self.server_addresses().iter().all(|address| exports.iter().any(|export| export.address == *address))
    }

    /// Returns true if a device is published at an NBD address.
    pub fn is_at(&self, name: &str, address: &Address) -> bool {
        self.nbd.exports_named(name).iter().any(|export| export.address == *address)
    }

    /// Returns the NBD URI of a device at an address, or None if the device is not published there.
    pub fn uri_at(&self, name: &str, address: &Address) -> Option<String> {
        self.nbd.exports_named(name).iter().find(|export| export.address == *address).map(ExportInfo::uri)
    }

    /// Returns the number of connections to a device. Users of a ublk block device are not counted, because the kernel
    /// would have to be asked.
    fn connections(&self, name: &str) -> usize {
        let local: usize = self.local_of(name).iter().map(|export| export.connections()).sum();
        self.nbd.connections(name) + local
    }

    /// Returns the number of clients of a device. A local export in use counts as one.
    fn users(&self, name: &str) -> usize {
        // is_in_use() may block, so it is called without the lock.
        let local = self.local_of(name).iter().filter(|export| export.is_in_use()).count();
        self.nbd.connections(name) + local
    }

    /// Sets the own addresses at which the server will listen, for the loop check.
    pub fn plan_server_addresses(&self, addresses: &[Address]) {
        self.addresses().planned = addresses.to_vec();
    }

    /// Refuses an `nbd` device that connects to an address of this server (loop check).
    pub fn check_no_loop(&self, spec: &Spec) -> Result<(), RpcError> {
        if spec.kind.uri().is_none() {
            return Ok(());
        }
        let mut all = self.addresses().planned.clone();
        // A verb may have opened further addresses, and port 0 was replaced.
        all.extend(self.nbd.addresses());
        loop_check::check_device(spec, &all)
    }

    // ---- publishing and unpublishing ------------------------------------------------------------

    /// Listens for NBD clients at `address`, one of the server's own. Returns the address with the port that was
    /// chosen.
    pub fn listen_at_server_address(&self, address: &Address) -> Result<Address, RpcError> {
        self.tls.check_address(address).map_err(RpcError::invalid)?;
        self.add_server_address(self.nbd.listen_with_access(address, &self.access, self.server_allow_list()))
    }

    /// Adds an own address with a socket that already listens, such as one from systemd. Returns the address of the
    /// socket.
    pub fn adopt_server_socket(&self, socket: OwnedFd) -> Result<Address, RpcError> {
        let allow = self.server_allow_list();
        let at = self.add_server_address(self.nbd.adopt_socket(socket, allow.clone()))?;
        lists::check(allow.as_ref(), &at)?;
        self.tls.check_address(&at).map(|()| at).map_err(RpcError::invalid)
    }

    fn add_server_address(&self, listens: Result<Address, ListenError>) -> Result<Address, RpcError> {
        let at = listens.map_err(|e| RpcError::failed(Errno::EADDRNOTAVAIL, e.to_string()))?;
        loop_check::check_address(&self.registry, &at)?;
        self.addresses().server.push(at.clone());
        Ok(at)
    }

    /// Publishes a device at the server's own addresses.
    pub fn publish_at_server_addresses(&self, claim: &Claim<'_>, entry: &Arc<Entry>) -> Result<(), RpcError> {
        for address in self.server_addresses() {
            if !self.is_at(entry.name(), &address) {
                self.publish(claim, entry, &address, false, None, LimitSpec::default())?;
            }
        }
        self.unpublished.remove(entry.name(), None);
        Ok(())
    }

    /// Refuses to publish a fork that belongs to a connection to a template. Refuses a device with an interrupted
    /// merge, or in exclusive use by another device.
    fn check_publish(&self, entry: &Arc<Entry>) -> Result<(), RpcError> {
        check_not_connection_fork(entry)?;
        entry.check_no_unfinished_merge()?;
        let Some(taken) = self.registry.exclusive_user(entry) else { return Ok(()) };
        let why = format!("{}: {taken}, so it cannot be published", entry.name());
        Err(RpcError::failed(Errno::EBUSY, why))
    }

    /// Publishes a device at an NBD address. If the address is not open yet, the server listens there and admits the
    /// clients of `allow`; if it is open, `allow` must be None or the list of the address. The first export of an
    /// address is also its default export. Returns the address with the port that was chosen.
    pub fn publish(
        &self,
        _: &Claim<'_>,
        entry: &Arc<Entry>,
        address: &Address,
        read_only: bool,
        allow: Option<&AllowList>,
        limits: LimitSpec,
    ) -> Result<Address, RpcError> {
        let name = entry.name();
        self.check_publish(entry)?;
        let limited = Arc::new(ExportLimits::new(limits));
        // With this claim, no other verb closes the address before the device is published.
        let _address = self.claims.address("publish", address)?;
        let (at, opened) = if self.nbd.is_listening_at(address) {
            self.check_same(name, address, allow)?;
            (address.clone(), false)
        } else {
            self.tls.check_address(address).map_err(|why| RpcError::invalid(format!("{name}: {why}")))?;
            let listen = self.nbd.listen_with_access(address, &self.access, allow.cloned());
            (listen.map_err(|e| RpcError::failed(Errno::EADDRNOTAVAIL, format!("{name}: {e}")))?, true)
        };
        // A verb that creates an nbd device registers it first and then checks the open addresses, so one of both verbs
        // finds a loop.
        if opened && let Err(fault) = loop_check::check_address(&self.registry, &at) {
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
                Err(RpcError::failed(Errno::EEXIST, format!("{name}: already published at {at}")))
            }
            Err(e) => {
                if opened {
                    self.nbd.close(&at);
                }
                Err(RpcError::failed(Errno::EIO, format!("{name}: cannot be published at {at}: {e}")))
            }
        }
    }

    fn publish_nbd(
        &self,
        entry: &Arc<Entry>,
        at: &Address,
        read_only: bool,
        default: bool,
        limited: &Arc<ExportLimits>,
    ) -> Result<(), PublishError> {
        let description = description(entry);
        let without_fua = matches!(&entry.spec.kind, KindSpec::Null(null) if !null.fua);
        let read_only = read_only || entry.is_read_only();
        let failures = Arc::clone(&entry.failures);
        let clients = tls::clients_of(&entry.spec);
        let places = vec![Arc::clone(&limited.places), Arc::clone(&entry.clients)];
        let export = ExportOptions {
            read_only,
            default,
            without_fua,
            visible_to: clients,
            description,
            failures,
            places,
        };
        match (access_path(entry, at, Some(limited)), &entry.spec.kind) {
            (Some(device), _) => self.nbd.publish(at, entry.name(), device, export),
            (None, KindSpec::Template(spec)) => {
                let options = TemplateOptions { export, ttl: spec.ttl };
                self.nbd.publish_template(
                    at,
                    entry.name(),
                    options,
                    template::connection_fork_factory(&self.registry, entry, limited),
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
    ) -> Result<Arc<StandaloneExport>, RpcError> {
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
            RpcError::failed(Errno::EADDRNOTAVAIL, why)
        })?;
        self.add_local(name, StandaloneExport::VhostUser(export), &device, limits)
    }

    /// Publishes a device as a ublk block device of this machine with this number of queues; 0 means one queue for each
    /// CPU, at most 4.
    pub fn publish_ublk(
        &self,
        _: &Claim<'_>,
        entry: &Arc<Entry>,
        queues: u16,
        read_only: bool,
        limits: LimitSpec,
    ) -> Result<Arc<StandaloneExport>, RpcError> {
        let name = entry.name();
        let device = self.local_access_path(entry)?;
        let options = ublk::Options {
            read_only: read_only || entry.is_read_only(),
            failures: Arc::clone(&entry.failures),
            queues,
            ..ublk::Options::new(Arc::clone(self.nbd.budget()))
        };
        let export = ublk::Export::new(name, Arc::clone(&device) as _, options);
        let export =
            export.map_err(|error| RpcError::failed(errno_of(&error), format!("{name}: {error}")))?;
        self.add_local(name, StandaloneExport::Ublk(export), &device, limits)
    }

    /// Returns a new access path for a local export. Fails if the device must not be published, or is a template.
    fn local_access_path(&self, entry: &Arc<Entry>) -> Result<Arc<Counting>, RpcError> {
        self.check_publish(entry)?;
        entry.new_access_path().ok_or_else(|| {
            let why = "a template can only be published over NBD; make a fork with `freestone fork` and publish that";
            RpcError::failed(Errno::EOPNOTSUPP, format!("{}: {why}", entry.name()))
        })
    }

    fn add_local(
        &self,
        name: &str,
        export: StandaloneExport,
        access_path: &Arc<Counting>,
        limits: LimitSpec,
    ) -> Result<Arc<StandaloneExport>, RpcError> {
        let address = export.address();
        access_path.tally().set_address(&address);
        let limited = Arc::new(ExportLimits::new(limits));
        limited.join(access_path).map_err(|e| RpcError::failed(Errno::ENOMEM, format!("{name}: {e}")))?;
        let export = Arc::new(export);
        self.lock_local().entry(name.to_owned()).or_default().push(Arc::clone(&export));
        self.limited.put(name, address, limited);
        Ok(export)
    }

    /// Publishes a device as `wanted` specifies. The export is then no longer retried.
    pub fn publish_at(
        &self,
        claim: &Claim<'_>,
        entry: &Arc<Entry>,
        wanted: &ExportSpec,
    ) -> Result<PublishedExport, RpcError> {
        let ExportSpec { address: place, read_only, allow, limits } = wanted;
        let (read_only, allow, limits) = (*read_only, allow.as_ref(), *limits);
        let checked = place.check_limits(&limits);
        checked.map_err(|why| RpcError::invalid(format!("{}: publish: {why}", entry.name())))?;
        let shown = match place {
            ExportAddress::Nbd(at) => {
                PublishedExport::Nbd(self.publish(claim, entry, at, read_only, allow, limits)?)
            }
            ExportAddress::VhostUser(path) => PublishedExport::Standalone(
                self.publish_vhost_user(claim, entry, path, read_only, allow, limits)?,
            ),
            ExportAddress::Ublk(queues) => {
                PublishedExport::Standalone(self.publish_ublk(claim, entry, *queues, read_only, limits)?)
            }
        };
        self.unpublished.remove(entry.name(), Some(place));
        Ok(shown)
    }

    /// Removes a local export, and waits until it has ended, for at most [`END_GRACE`].
    fn remove_local(&self, entry: &Entry, export: &Arc<StandaloneExport>) {
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

    /// Unpublishes a device at one address. Fails if clients are connected, unless `force` is set.
    pub fn unpublish_from(
        &self,
        _: &Claim<'_>,
        entry: &Entry,
        place: &ExportAddress,
        force: bool,
    ) -> Result<(), RpcError> {
        let name = entry.name();
        if self.unpublished.remove(name, Some(place)) {
            return Ok(());
        }
        // Connections end when their requests complete, so requests must not wait for memory or limits.
        let _now = force.then(|| self.bypass_waiting(entry));
        if let ExportAddress::Nbd(address) = place {
            let done = self.nbd.unpublish_at(name, address, force);
            done.map_err(|e| RpcError::failed(Errno::EBUSY, format!("{name}: cannot be unpublished: {e}")))?;
            self.limited.forget(name, &address.absolute().to_string());
            self.release_address(address);
            return Ok(());
        }
        let local = self.local_of(name);
        let Some(export) = local.iter().find(|export| export.spec().address.is_same(place)) else {
            return Ok(());
        };
        let held = export.hold();
        if export.is_in_use() && !force {
            return Err(in_use(name, 1, FORCE));
        }
        export.begin_to_end();
        drop(held);
        self.remove_local(entry, export);
        Ok(())
    }

    /// Unpublishes a device at all addresses. Returns the number of connections that were closed.
    pub fn unpublish(&self, _: &Claim<'_>, entry: &Entry, force: bool) -> Result<usize, RpcError> {
        let name = entry.name();
        if !force {
            self.check_idle(entry)?;
        }
        let (at, local) = (self.nbd.exports_named(name), self.local_of(name));
        // A client may have connected since the check. No client can connect while the exports are held.
        let held: Vec<_> = local.iter().map(|export| export.hold()).collect();
        let used = local.iter().filter(|export| export.is_in_use()).count();
        if used > 0 && !force {
            return Err(in_use(name, used, FORCE));
        }
        let connections = self.nbd.connections(name) + used;
        // Connections end when their requests complete, so requests must not wait for memory or limits.
        let _now = force.then(|| self.bypass_waiting(entry));
        if !at.is_empty() {
            let done = self.nbd.unpublish(name, force);
            done.map_err(|e| RpcError::failed(Errno::EBUSY, format!("{name}: cannot be unpublished: {e}")))?;
        }
        for export in at {
            self.release_address(&export.address);
        }
        self.lock_local().remove(name);
        for export in &local {
            export.begin_to_end();
        }
        // The hold ends first, because the kernel writes back its cache of a block device before the export ends.
        drop(held);
        end_all(&local, END_GRACE);
        self.limited.forget_all(name);
        self.unpublished.forget(name);
        Ok(connections)
    }

    /// Decrements the number of exports at an address that `publish` opened, and closes the address at 0.
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
            // Another verb hangs on the address, which is closed when its next export is unpublished.
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

    /// Stops listening everywhere, completes the requests in flight, and closes all connections. Cuts connections with
    /// requests still in flight after `grace`.
    pub fn shutdown(&self, grace: Duration) {
        let local: Vec<_> = self.lock_local().drain().flat_map(|(_, exports)| exports).collect();
        // Begins here, so that local exports and NBD connections end in parallel.
        for export in &local {
            export.begin_to_end();
        }
        let end = Instant::now() + grace;
        self.nbd.shutdown(grace);
        end_all(&local, end.saturating_duration_since(Instant::now()));
    }
}
