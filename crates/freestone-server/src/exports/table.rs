//! The table of exports: a record for each export of each device, whether it is published, withheld or retried.
//!
//! [`Exports`](super::Exports) owns the table. Verbs, the start and the thread that retries exports change the records
//! of a device that they have claimed; statistics read them without a claim. The state directory holds the records in
//! the form of [`freestone_state::Export`].
//!
//! The table is indexed by device. The index by address is the NBD server's table of what sessions read: the exports,
//! the default export and the allow list of each open address.
//!
//! Random verbs check the records against a model, over crashes and restarts: `restarts/random.rs` in
//! `freestone-cli-tests`, and `program/lives` in `freestone-torture`.

use std::collections::HashMap;
use std::sync::Arc;

use freestone_nbd::{Address, AllowList};
use freestone_spec::limits::LimitSpec;

use super::export_limits::ExportLimits;
use super::export_spec::{ExportAddress, ExportSet, ExportSpec};
use super::standalone_export::StandaloneExport;

/// The records of all devices, and the addresses that no record mentions.
///
/// Lock order: claim of a device, claim of an address, then the table. The table is locked only while it is read or
/// changed. Under its lock no thread waits, calls a device, or locks the tables of the NBD server.
#[derive(Default)]
pub(super) struct Table {
    /// Records by device name. A device may be missing, for example until its remote server answers.
    pub(super) devices: HashMap<String, DeviceExports>,
    /// Device for which the default export (the empty name) of an address is reserved, so that clients are not
    /// connected to another device after a restart. A reservation ends when the device is published at the address,
    /// unpublished or removed.
    pub(super) reserved_defaults: HashMap<Address, String>,
    /// The server's own addresses (`--nbd`), open until the server ends.
    pub(super) server: Vec<Address>,
    /// Allow list of the own addresses. `None` admits every client.
    pub(super) allow: Option<AllowList>,
    /// True if the allow list comes from the command line, so a configuration file must not change it.
    pub(super) allow_is_fixed: bool,
    /// Own addresses as configured, for the loop check of devices that are created before these addresses are open.
    pub(super) planned: Vec<Address>,
}

/// The exports of a device.
#[derive(Default, Clone)]
pub struct DeviceExports {
    /// True if a configuration file declares the device. A later file that no longer does removes the device.
    pub is_declared: bool,
    /// Set while the device is withheld: its exports wait until `freestone publish` releases the device.
    pub withheld: Option<Withheld>,
    /// True while the device is created in a running server and must not be published yet.
    pub is_new: bool,
    /// Reason why the device is not published at the server's own addresses yet, if it belongs there.
    pub absent_at_server: Option<String>,
    /// Exports, also those at the server's own addresses if they are published.
    pub records: Vec<ExportRecord>,
    /// Exports whose records in the state cannot be parsed. Kept until the device is unpublished.
    pub unparsed: Vec<UnparsedExport>,
}

/// Reason why a device is withheld from clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Withheld {
    /// The device lost content with the previous server. The next start withholds it as well.
    LostContent,
    /// Another reason.
    Other(&'static str),
}

/// An export of a device.
#[derive(Clone)]
pub struct ExportRecord {
    /// The export as a verb, a configuration file or the state specifies it.
    pub spec: ExportSpec,
    /// The published export, or the reason why it is absent. The reason is empty if the device is withheld.
    pub published: Result<LiveExport, String>,
}

/// A published export.
#[derive(Clone)]
pub struct LiveExport {
    /// Address, with the port that was chosen instead of port 0.
    pub at: ExportAddress,
    /// True if clients cannot write.
    pub read_only: bool,
    /// Current limits, which a verb may have changed since the export was published.
    pub limits: Arc<ExportLimits>,
    /// The vhost-user or ublk export, or `None` for an export of the NBD server.
    pub standalone: Option<Arc<StandaloneExport>>,
}

/// An export in the state whose record cannot be parsed, for example because a newer version wrote it. The server does
/// not retry the export.
#[derive(Debug, Clone)]
pub struct UnparsedExport {
    /// The unchanged state record.
    pub record: freestone_state::Export,
    /// Reason why the record cannot be parsed.
    pub why: String,
}

impl Table {
    /// Returns the records of a device, which are created if the device has none.
    pub fn device(&mut self, name: &str) -> &mut DeviceExports {
        self.devices.entry(name.to_owned()).or_default()
    }
}

impl LiveExport {
    /// Returns true if the export is at an NBD address.
    pub fn is_at(&self, address: &Address) -> bool {
        matches!(&self.at, ExportAddress::Nbd(at) if at == address)
    }

    /// Returns the address: `unix:PATH`, `tcp:HOST:PORT`, `vhost-user:PATH` or `/dev/ublkbN`.
    pub fn address(&self) -> String {
        match (&self.standalone, &self.at) {
            (None, ExportAddress::Nbd(at)) => at.to_string(),
            (Some(export), _) => export.address(),
            (None, at) => at.to_string(),
        }
    }
}

impl ExportRecord {
    fn is_waiting_at(&self, place: &ExportAddress) -> bool {
        self.published.is_err() && (self.spec.address.is_same(place) || self.spec.address == *place)
    }
}

impl UnparsedExport {
    /// Returns the address of the export as text.
    pub fn address(&self) -> String {
        let freestone_state::Export { nbd, vhost_user, .. } = &self.record;
        nbd.as_ref().or(vhost_user.as_ref()).cloned().unwrap_or_else(|| "a block device".into())
    }
}

impl DeviceExports {
    /// Returns true if the device has no exports, not even absent or withheld ones.
    pub fn is_unpublished(&self) -> bool {
        let Self { withheld, absent_at_server, records, unparsed, .. } = self;
        withheld.is_none() && absent_at_server.is_none() && records.is_empty() && unparsed.is_empty()
    }

    /// Returns the published exports.
    pub fn live(&self) -> impl Iterator<Item = &LiveExport> {
        self.records.iter().filter_map(|record| record.published.as_ref().ok())
    }

    /// Returns true if the device is published at an NBD address.
    pub fn is_at(&self, address: &Address) -> bool {
        self.live().any(|live| live.is_at(address))
    }

    /// Returns the absent exports, which the server retries, with addresses and reasons. A withheld device has none.
    pub fn absent(&self) -> impl Iterator<Item = (String, &str)> {
        let server = self.absent_at_server.iter().map(|why| ("the server's addresses".to_owned(), &**why));
        let absent = self.records.iter().filter_map(|ExportRecord { spec, published }| {
            published.as_ref().err().map(|why| (spec.address.to_string(), &**why))
        });
        server.chain(absent).filter(|_| self.withheld.is_none())
    }

    /// Returns the specifications of the exports that are not published.
    pub fn unpublished(&self) -> ExportSet {
        let waiting = self.records.iter().filter(|record| record.published.is_err());
        ExportSet {
            at_server_addresses: self.absent_at_server.is_some(),
            exports: waiting.map(|record| record.spec.clone()).collect(),
        }
    }

    /// Returns the exports to publish: all that are not published, or none if the device is withheld or new.
    pub fn to_publish(&self) -> ExportSet {
        if self.withheld.is_some() || self.is_new { ExportSet::default() } else { self.unpublished() }
    }

    /// Replaces the exports that are not published.
    pub fn set_unpublished(&mut self, export_set: ExportSet, why: &str) {
        self.absent_at_server = export_set.at_server_addresses.then(|| why.to_owned());
        self.records.retain(|record| record.published.is_ok());
        let absent = |spec| ExportRecord { spec, published: Err(why.to_owned()) };
        self.records.extend(export_set.exports.into_iter().map(absent));
    }

    /// Records why an export is absent; `None` means the server's own addresses. Returns false if the reason is known.
    pub fn set_absent(&mut self, export: Option<&ExportSpec>, why: &str) -> bool {
        let Some(spec) = export else {
            return self.absent_at_server.replace(why.to_owned()).as_deref() != Some(why);
        };
        let new = ExportRecord { spec: spec.clone(), published: Err(why.to_owned()) };
        let Some(known) = self.records.iter_mut().find(|record| record.is_waiting_at(&spec.address)) else {
            self.records.push(new);
            return true;
        };
        std::mem::replace(known, new).published.err().as_deref() != Some(why)
    }

    /// Removes the absent export at an address. Returns false if no export is absent there.
    pub fn remove_absent(&mut self, place: &ExportAddress) -> bool {
        let found = self.records.iter().position(|record| record.is_waiting_at(place));
        let found = found.filter(|_| self.withheld.is_none());
        found.map(|index| self.records.remove(index)).is_some()
    }

    /// Adds an export that has just been published, in place of the absent one.
    pub fn set_live(&mut self, spec: ExportSpec, live: LiveExport) {
        self.is_declared |= spec.declared;
        if let Some(index) = self.records.iter().position(|record| record.is_waiting_at(&spec.address)) {
            self.records.remove(index);
        }
        self.records.push(ExportRecord { spec, published: Ok(live) });
    }

    /// Changes the limits that a configuration file declares for the export at an address.
    pub fn set_declared_limits(&mut self, place: &ExportAddress, limits: LimitSpec) {
        let is_there = |live: &LiveExport| live.at.is_same(place);
        for record in self.records.iter_mut().filter(|record| record.published.as_ref().is_ok_and(is_there)) {
            record.spec.limits = limits;
        }
    }

    /// Releases a withheld device. Returns the reason and the exports to publish, or `None` if it is not withheld.
    pub fn release(&mut self) -> Option<(Withheld, ExportSet)> {
        let reason = self.withheld.take()?;
        let export_set = self.unpublished();
        self.set_unpublished(ExportSet::default(), "");
        Some((reason, export_set))
    }

    /// Removes all exports. The device remains declared.
    pub fn clear(&mut self) {
        *self = Self { is_declared: self.is_declared, ..Self::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_export_with_port_0_is_not_retried() {
        let address = |port| ExportAddress::Nbd(Address::Tcp { host: "127.0.0.1".into(), port });
        let (spec, mut device) = (ExportSpec::at(address(0)), DeviceExports::default());
        assert!(device.set_absent(Some(&spec), "no sockets are left"));
        assert!(!device.set_absent(Some(&spec), "no sockets are left"));
        assert_eq!(device.to_publish().exports, std::slice::from_ref(&spec));
        let live = LiveExport { at: address(7), read_only: false, limits: Arc::default(), standalone: None };
        device.set_live(spec, live);
        assert_eq!((device.to_publish(), device.records.len()), (ExportSet::default(), 1));
    }
}
