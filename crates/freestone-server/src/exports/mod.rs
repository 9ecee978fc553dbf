//! Exports of all devices: publishes and unpublishes devices at NBD addresses, at vhost-user sockets and as ublk
//! block devices.
//!
//! [`Exports`] owns the NBD server and the local exports (vhost-user and ublk), which have one device each. Verbs
//! call it with a claim of the device.

mod blocks;
mod checks;
mod defaults;
mod device_changes;
mod export;
pub mod export_limits;
pub mod export_spec;
mod limits;
mod lists;
mod publish;
pub mod standalone_export;
mod template;
mod unpublish;
mod unpublished;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use freestone_control::protocol::RpcError;
use freestone_nbd::{Access, Address, AllowList, ExportInfo, Limits, Server};
use freestone_spec::kinds::Spec;
use freestone_spec::kinds::registry::Registry;

pub use self::checks::{DISCONNECT_MAX, FORCE, check_not_connection_fork};
use self::defaults::Defaults;
pub use self::export::Export;
use self::export_spec::{ExportAddress, ExportSpec};
use self::limits::AllExportLimits;
use self::standalone_export::StandaloneExport;
use self::unpublished::UnpublishedExports;
pub use self::unpublished::{UnparsedExport, UnpublishedExport};
use crate::devices::claims::Claims;
use crate::devices::loop_check;
use crate::settings::tls::Tls;

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
}
