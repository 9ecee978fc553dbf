//! Allow lists: which clients may connect to which address.

use freestone_nbd::{Address, AllowList};
use freestone_spec::refusal::Errno;

use super::Exports;
use crate::allow;
use crate::alone::Alone;
use crate::control::protocol::Fault;
use crate::places::Place;

impl Exports {
    /// Sets the allow list of the server's own addresses at the start; `is_fixed` if it comes from the command
    /// line.
    pub fn begin_home_allow(&self, list: Option<AllowList>, is_fixed: bool) {
        let mut addresses = self.addresses();
        addresses.allow = list;
        addresses.allow_is_fixed = is_fixed;
    }

    /// Returns the allow list of the command line, which a configuration file does not change.
    pub fn fixed_home_allow(&self) -> Option<AllowList> {
        let addresses = self.addresses();
        addresses.allow.clone().filter(|_| addresses.allow_is_fixed)
    }

    /// Returns the allow list of the server's own addresses; `None`: all clients.
    pub fn home_allow(&self) -> Option<AllowList> {
        self.addresses().allow.clone()
    }

    /// Replaces the allow list of the server's own addresses.
    pub fn set_home_allow(&self, list: &AllowList) {
        let home = {
            let mut addresses = self.addresses();
            addresses.allow = Some(list.clone());
            addresses.home.clone()
        };
        for address in home {
            self.nbd.set_allow(&address, Some(list.clone()));
        }
    }

    /// Replaces the allow list of a place of a device; `None`: all clients. Does nothing if the device is not
    /// published there.
    pub fn set_allow(&self, name: &str, place: &Place, list: Option<&AllowList>) {
        if let Place::Nbd(address) = place {
            self.nbd.set_allow(address, list.cloned());
        }
        for export in self.local_of(name) {
            if let Alone::VhostUser(socket) = &*export
                && export.wanted().place.is(place)
            {
                socket.set_allow(list.cloned());
            }
        }
    }

    /// Returns true if the allow list of a device's place differs from `list`. Returns false if the device is
    /// not published there, or if the place is one of the server's own addresses.
    pub fn differs(&self, name: &str, place: &Place, list: Option<&AllowList>) -> bool {
        match place {
            Place::Nbd(address) => {
                let is_open = self.nbd.listens_at(address) && !self.home().contains(address);
                is_open && self.nbd.allow_at(address).as_ref() != list
            }
            Place::VhostUser(_) | Place::Ublk(_) => {
                let local = self.local_of(name);
                let found = local.iter().map(|export| export.wanted()).find(|known| known.place.is(place));
                found.is_some_and(|known| known.allow.as_ref() != list)
            }
        }
    }

    /// Refuses a list that differs from the list of an open address. The list of an address applies to all its
    /// exports.
    pub fn check_same(&self, name: &str, address: &Address, list: Option<&AllowList>) -> Result<(), Fault> {
        let current = self.nbd.allow_at(address);
        if list.is_none() || list == current.as_ref() {
            return Ok(());
        }
        let (current, wanted) = (allow::shown(current.as_ref()), allow::shown(list));
        let why =
            format!("{name}: {address}: {current} may connect there, for all its exports, and not {wanted}");
        Err(Fault::failed(Errno::EBUSY, why))
    }
}

/// Refuses a list with which nobody could connect to the address of an inherited socket.
pub(super) fn check(list: Option<&AllowList>, address: &Address) -> Result<(), Fault> {
    let checked = list.map_or(Ok(()), |list| allow::check(list, address));
    checked.map_err(|why| Fault::invalid(format!("--allow: {why}")))
}
