//! Allow lists: which clients may connect to which address.

use freestone_control::protocol::RpcError;
use freestone_nbd::{Address, AllowList};

use super::{Exports, LiveExport};
use crate::exports::export_spec::ExportAddress;
use crate::exports::standalone_export::StandaloneExport;
use crate::settings::allow;

impl Exports {
    /// Sets the allow list of the server's own addresses at the start. `is_fixed` is true if the list comes from the
    /// command line, so that a configuration file cannot change it.
    pub fn init_server_allow_list(&self, list: Option<AllowList>, is_fixed: bool) {
        let mut table = self.table();
        (table.allow, table.allow_is_fixed) = (list, is_fixed);
    }

    /// Returns the allow list of the command line, which a configuration file cannot change, or `None`.
    pub fn fixed_server_allow_list(&self) -> Option<AllowList> {
        let table = self.table();
        table.allow.clone().filter(|_| table.allow_is_fixed)
    }

    /// Returns the allow list of the server's own addresses. `None` admits every client.
    pub fn server_allow_list(&self) -> Option<AllowList> {
        self.table().allow.clone()
    }

    /// Replaces the allow list of the server's own addresses.
    pub fn set_server_allow_list(&self, list: &AllowList) {
        self.table().allow = Some(list.clone());
        for address in self.server_addresses() {
            self.nbd.set_allow_list(&address, Some(list.clone()));
        }
    }

    /// Returns the allow list of a published export. The list of an NBD export is that of its address.
    pub(super) fn allow_list(&self, live: &LiveExport) -> Option<AllowList> {
        match (&live.standalone, &live.at) {
            (Some(export), _) => export.allow_list(),
            (None, ExportAddress::Nbd(address)) => self.nbd.allow_list(address),
            (None, _) => None,
        }
    }

    /// Replaces the allow list of the address `place` of a device. `None` admits every client. Does nothing if the
    /// device is not published there.
    pub fn set_allow(&self, name: &str, place: &ExportAddress, list: Option<&AllowList>) {
        if let ExportAddress::Nbd(address) = place {
            self.nbd.set_allow_list(address, list.cloned());
        }
        let standalone = self.find(name, place).and_then(|live| live.standalone);
        if let Some(StandaloneExport::VhostUser(socket)) = standalone.as_deref() {
            socket.set_allow_list(list.cloned());
        }
        // The list belongs to the address, so it applies to all exports there.
        for record in self.table().devices.values_mut().flat_map(|device| &mut device.records) {
            if record.published.as_ref().is_ok_and(|live| live.at.is_same(place)) {
                record.spec.allow = list.cloned();
            }
        }
    }

    /// Returns true if the allow list of the address `place` of a device differs from `list`. Returns false if the
    /// device is not published there, or if the address is one of the server's own.
    pub fn differs(&self, name: &str, place: &ExportAddress, list: Option<&AllowList>) -> bool {
        match place {
            ExportAddress::Nbd(address) => {
                let is_open = self.nbd.is_listening_at(address) && !self.server_addresses().contains(address);
                is_open && self.nbd.allow_list(address).as_ref() != list
            }
            ExportAddress::VhostUser(_) | ExportAddress::Ublk(_) => {
                self.find(name, place).is_some_and(|live| self.allow_list(&live).as_ref() != list)
            }
        }
    }

    /// Refuses an allow list that differs from the list of an open address, because that list applies to all exports of
    /// the address.
    pub fn check_same(
        &self,
        name: &str,
        address: &Address,
        list: Option<&AllowList>,
    ) -> Result<(), RpcError> {
        let current = self.nbd.allow_list(address);
        if list.is_none() || list == current.as_ref() {
            return Ok(());
        }
        let (current, wanted) = (allow::shown(current.as_ref()), allow::shown(list));
        let why =
            format!("{name}: {address}: {current} may connect there, for all its exports, and not {wanted}");
        Err(rpc_error!(EBUSY, "{why}"))
    }
}

/// Refuses an allow list with which no client could connect to the address of an inherited socket.
pub(super) fn check(list: Option<&AllowList>, address: &Address) -> Result<(), RpcError> {
    let checked = list.map_or(Ok(()), |list| allow::check(list, address));
    checked.map_err(|why| rpc_error!(invalid, "--allow: {why}"))
}
