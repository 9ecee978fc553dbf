//! Exports of all devices: publishes and unpublishes devices at NBD addresses, at vhost-user sockets and as ublk
//! block devices.
//!
//! [`Exports`] owns the NBD server and the local exports (vhost-user and ublk), which have one device each. Verbs
//! call it with a claim of the device.

mod block_recovery;
mod blocks;
mod checks;
mod device_changes;
mod export;
pub mod export_limits;
pub mod export_spec;
mod limits;
mod lists;
mod publish;
pub mod standalone_export;
mod table;
mod template;
mod unpublish;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use freestone_control::protocol::RpcError;
use freestone_core::sync::{Mutex, MutexGuard};
use freestone_nbd::{Access, Address, ExportInfo, Limits, Server};
use freestone_spec::kinds::Spec;
use freestone_spec::kinds::registry::Registry;

pub use self::block_recovery::BlockRecovery;
pub use self::checks::{DISCONNECT_MAX, FORCE, check_not_connection_fork};
pub use self::export::Export;
use self::export_spec::{ExportAddress, ExportSet, ExportSpec};
use self::standalone_export::StandaloneExport;
pub use self::table::{DeviceExports, LiveExport, UnparsedExport, Withheld};
use self::table::{ExportRecord, Table};
use crate::devices::claims::Claims;
use crate::devices::loop_check;
use crate::settings::tls::Tls;

/// The exports of all devices. The lock order is stated at the table.
pub struct Exports {
    registry: Arc<Registry>,
    /// The NBD server.
    pub nbd: Server,
    /// TLS settings of the NBD server.
    pub tls: Tls,
    /// Mode, owner and group of the Unix sockets of exports.
    access: Access,
    /// Recovery of block devices, if the server is recoverable.
    pub block_recovery: OnceLock<BlockRecovery>,
    claims: Claims,
    table: Mutex<Table>,
    /// True while a thread retries the absent exports.
    is_retried: AtomicBool,
}

impl Exports {
    /// Creates an empty set of exports for the devices of `registry`.
    pub fn new(limits: Limits, access: Access, tls: Tls, registry: Arc<Registry>) -> Self {
        Self {
            registry,
            nbd: Server::new(limits),
            tls,
            access,
            block_recovery: OnceLock::new(),
            claims: Claims::default(),
            table: Mutex::default(),
            is_retried: AtomicBool::new(false),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }

    /// Reads the records of a device, which are empty if the table has none. `read` must not block.
    pub fn read<T>(&self, name: &str, read: impl FnOnce(&DeviceExports) -> T) -> T {
        read(self.table().devices.get(name).unwrap_or(&DeviceExports::default()))
    }

    /// Changes the records of a device. `change` must not block.
    pub fn change<T>(&self, name: &str, change: impl FnOnce(&mut DeviceExports) -> T) -> T {
        let mut table = self.table();
        let device = table.device(name);
        let done = change(device);
        if device.is_unpublished() && !device.is_declared {
            table.devices.remove(name);
        }
        done
    }

    /// Removes all records of a device that was removed.
    pub fn forget(&self, name: &str) {
        self.table().devices.remove(name);
        self.release_defaults(name);
    }

    /// Reserves the default export of an address for a device of the state.
    pub fn reserve_default(&self, address: Address, name: &str) {
        self.table().reserved_defaults.insert(address, name.to_owned());
    }

    /// Removes the reservations of default exports for a device.
    pub fn release_defaults(&self, name: &str) {
        self.table().reserved_defaults.retain(|_, owner| owner != name);
    }

    /// Returns the addresses whose default export is the device, or is reserved for the device.
    pub fn default_addresses(&self, name: &str) -> Vec<Address> {
        let table = self.table();
        let reserved = table.reserved_defaults.iter().filter(|(_, owner)| *owner == name);
        let mut addresses: Vec<_> = reserved.map(|(address, _)| address.clone()).collect();
        drop(table);
        let live = self.nbd.exports_named(name).into_iter().filter(|export| export.default);
        addresses.extend(live.map(|export| export.address));
        addresses
    }

    /// Returns the reason why a device is withheld, or `None` if it is not.
    pub fn withheld(&self, name: &str) -> Option<Withheld> {
        self.read(name, |device| device.withheld)
    }

    /// Returns the names of all devices that configuration files have declared.
    pub fn declared_devices(&self) -> Vec<String> {
        let table = self.table();
        table.devices.iter().filter(|(_, device)| device.is_declared).map(|(name, _)| name.clone()).collect()
    }

    /// Returns the published exports of a device that configuration files have declared, each as specified and with its
    /// actual address.
    pub fn declared(&self, name: &str) -> Vec<(ExportSpec, ExportAddress)> {
        self.read(name, |device| {
            let declared = device.records.iter().filter(|record| record.spec.declared);
            let live = declared.filter_map(|record| Some((&record.spec, record.published.as_ref().ok()?)));
            live.map(|(spec, live)| (spec.clone(), live.at.clone())).collect()
        })
    }

    /// Returns the names of the devices with absent exports, which are retried.
    pub fn absent_devices(&self) -> Vec<String> {
        let table = self.table();
        let absent =
            table.devices.iter().filter(|(_, device)| !device.is_new && device.absent().next().is_some());
        absent.map(|(name, _)| name.clone()).collect()
    }

    /// Returns true if there are exports to retry and no thread retries them. The caller then starts a thread.
    pub fn begin_retries(&self) -> bool {
        !self.absent_devices().is_empty() && !self.is_retried.swap(true, Ordering::SeqCst)
    }

    /// Records that the thread that retries exports has ended.
    pub fn end_retries(&self) {
        self.is_retried.store(false, Ordering::SeqCst);
    }

    fn live(&self, name: &str) -> Vec<LiveExport> {
        self.read(name, |device| device.live().cloned().collect())
    }

    /// Returns the vhost-user and ublk exports of a device.
    fn standalone(&self, name: &str) -> Vec<Arc<StandaloneExport>> {
        self.read(name, |device| device.live().filter_map(|live| live.standalone.clone()).collect())
    }

    /// Returns all published exports of a device, with their allow lists and limits.
    pub fn of(&self, name: &str) -> Vec<Export> {
        let live = self.live(name);
        let nbd = self.nbd.exports_named(name).into_iter().map(|export| {
            let live = live.iter().find(|live| live.is_at(&export.address));
            let limits = live.and_then(|live| live.limits.limits().stat());
            Export::of_nbd(&export, self.nbd.allow_list(&export.address).as_ref(), limits)
        });
        nbd.chain(live.iter().filter_map(Export::of_standalone)).collect()
    }

    /// Returns the present specifications of a device's published exports, except those at the server's own addresses.
    pub fn specs(&self, name: &str) -> Vec<ExportSpec> {
        let live = |record: &ExportRecord| Some((record.published.clone().ok()?, record.spec.declared));
        let live: Vec<_> = self.read(name, |device| device.records.iter().filter_map(live).collect());
        let home = self.server_addresses();
        let is_home = |live: &LiveExport| home.iter().any(|address| live.is_at(address));
        let spec = |(live, declared): (LiveExport, bool)| {
            let (allow, limits) = (self.allow_list(&live), live.limits.limits());
            ExportSpec { address: live.at, read_only: live.read_only, allow, limits, declared }
        };
        let mut specs: Vec<_> = live.into_iter().filter(|(live, _)| !is_home(live)).map(spec).collect();
        // The state lists exports of the NBD server first.
        specs.sort_by_key(|spec| !matches!(spec.address, ExportAddress::Nbd(_)));
        specs
    }

    /// Returns the exports of a device for the state, published or absent. For a withheld device, returns those to
    /// publish when it is released.
    pub fn export_set(&self, name: &str) -> ExportSet {
        let (unpublished, withheld) = self.read(name, |device| (device.unpublished(), device.withheld));
        let mut exports = self.specs(name);
        exports.extend(unpublished.exports);
        let is_at_server = || withheld.is_none() && self.is_at_server_addresses(name);
        ExportSet { at_server_addresses: unpublished.at_server_addresses || is_at_server(), exports }
    }

    /// Returns the server's own addresses.
    pub fn server_addresses(&self) -> Vec<Address> {
        self.table().server.clone()
    }

    /// Returns true if a device is published at all of the server's own addresses.
    pub fn is_at_server_addresses(&self, name: &str) -> bool {
        let home = self.server_addresses();
        self.read(name, |device| home.iter().all(|address| device.is_at(address)))
    }

    /// Returns true if a device is published at an NBD address.
    pub fn is_at(&self, name: &str, address: &Address) -> bool {
        self.read(name, |device| device.is_at(address))
    }

    /// Returns the published export of a device at an address.
    pub fn find(&self, name: &str, place: &ExportAddress) -> Option<LiveExport> {
        self.read(name, |device| device.live().find(|live| live.at.is_same(place)).cloned())
    }

    /// Returns the NBD URI of a device at an address, or None if the device is not published there.
    pub fn uri_at(&self, name: &str, address: &Address) -> Option<String> {
        self.nbd.exports_named(name).iter().find(|export| export.address == *address).map(ExportInfo::uri)
    }

    /// Returns the number of connections to a device. Users of a ublk block device are not counted, because the kernel
    /// would have to be asked.
    fn connections(&self, name: &str) -> usize {
        let local: usize = self.standalone(name).iter().map(|export| export.connections()).sum();
        self.nbd.connections(name) + local
    }

    /// Returns the number of clients of a device. A local export in use counts as one.
    fn users(&self, name: &str) -> usize {
        // is_in_use() may block, so it is called without the lock.
        let local = self.standalone(name).iter().filter(|export| export.is_in_use()).count();
        self.nbd.connections(name) + local
    }

    /// Sets the own addresses at which the server will listen, for the loop check.
    pub fn plan_server_addresses(&self, addresses: &[Address]) {
        self.table().planned = addresses.to_vec();
    }

    /// Refuses an `nbd` device that connects to an address of this server (loop check).
    pub fn check_no_loop(&self, spec: &Spec) -> Result<(), RpcError> {
        if spec.kind.uri().is_none() {
            return Ok(());
        }
        let mut all = self.table().planned.clone();
        // A verb may have opened further addresses, and port 0 was replaced.
        all.extend(self.nbd.addresses());
        loop_check::check_device(spec, &all)
    }
}
