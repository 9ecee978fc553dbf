//! Allow lists: which clients may connect to which address.

use freestone_control::protocol::RpcError;
use freestone_nbd::{Address, AllowList};
use freestone_spec::refusal::Errno;

use super::Exports;
use crate::exports::export_spec::ExportAddress;
use crate::exports::standalone_export::StandaloneExport;
use crate::settings::allow;

impl Exports {
    /// Sets the allow list of the server's own addresses at the start. `is_fixed` is true if the list comes from the
    /// command line, so that a configuration file cannot change it.
    pub fn init_server_allow_list(&self, list: Option<AllowList>, is_fixed: bool) {
        let mut addresses = self.addresses();
        addresses.allow = list;
        addresses.allow_is_fixed = is_fixed;
    }

    /// Returns the allow list of the command line, which a configuration file cannot change, or `None`.
    pub fn fixed_server_allow_list(&self) -> Option<AllowList> {
        let addresses = self.addresses();
        addresses.allow.clone().filter(|_| addresses.allow_is_fixed)
    }

    /// Returns the allow list of the server's own addresses. `None` admits every client.
    pub fn server_allow_list(&self) -> Option<AllowList> {
        self.addresses().allow.clone()
    }

    /// Replaces the allow list of the server's own addresses.
    pub fn set_server_allow_list(&self, list: &AllowList) {
        let home = {
            let mut addresses = self.addresses();
            addresses.allow = Some(list.clone());
            addresses.server.clone()
        };
        for address in home {
            self.nbd.set_allow_list(&address, Some(list.clone()));
        }
    }

    /// Replaces the allow list of the address `place` of a device. `None` admits every client. Does nothing if the
    /// device is not published there.
    pub fn set_allow(&self, name: &str, place: &ExportAddress, list: Option<&AllowList>) {
        if let ExportAddress::Nbd(address) = place {
            self.nbd.set_allow_list(address, list.cloned());
        }
        for export in self.local_of(name) {
            if let StandaloneExport::VhostUser(socket) = &*export
                && export.spec().address.is_same(place)
            {
                socket.set_allow_list(list.cloned());
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
                let local = self.local_of(name);
                let found =
                    local.iter().map(|export| export.spec()).find(|known| known.address.is_same(place));
                found.is_some_and(|known| known.allow.as_ref() != list)
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
        Err(RpcError::failed(Errno::EBUSY, why))
    }
}

/// Refuses an allow list with which no client could connect to the address of an inherited socket.
pub(super) fn check(list: Option<&AllowList>, address: &Address) -> Result<(), RpcError> {
    let checked = list.map_or(Ok(()), |list| allow::check(list, address));
    checked.map_err(|why| RpcError::invalid(format!("--allow: {why}")))
}
