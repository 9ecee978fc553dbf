//! Who may connect to which address.

use freestone_nbd::{Address, AllowList};
use freestone_spec::refusal::Errno;

use super::Exports;
use crate::allow;
use crate::alone::Alone;
use crate::control::protocol::Fault;
use crate::places::Place;

impl Exports {
    /// Who may connect to the addresses of the command line; `is_fixed` where that says so.
    pub fn begin_home_allow(&self, list: Option<AllowList>, is_fixed: bool) {
        let mut addresses = self.addresses();
        addresses.allow = list;
        addresses.allow_is_fixed = is_fixed;
    }

    /// The list that no file changes.
    pub fn fixed_home_allow(&self) -> Option<AllowList> {
        let addresses = self.addresses();
        addresses.allow.clone().filter(|_| addresses.allow_is_fixed)
    }

    /// Who may connect to the addresses of the command line; `None`: whoever can.
    pub fn home_allow(&self) -> Option<AllowList> {
        self.addresses().allow.clone()
    }

    /// Lets only these connect to the addresses of the command line from now on.
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

    /// Lets only these connect to a place of a device from now on, or whoever can. Nothing happens
    /// where it is not there.
    pub fn set_allow(&self, name: &str, place: &Place, list: Option<&AllowList>) {
        if let Place::Nbd(address) = place {
            self.nbd.set_allow(address, list.cloned());
        }
        for export in self.alone_of(name) {
            if let Alone::VhostUser(socket) = &*export
                && export.wanted().place.is(place)
            {
                socket.set_allow(list.cloned());
            }
        }
    }

    /// Whether others than these may connect to a place of a device. Not where it is not there, or is the
    /// server's.
    pub fn differs(&self, name: &str, place: &Place, list: Option<&AllowList>) -> bool {
        match place {
            Place::Nbd(address) => {
                let is_open = self.nbd.listens_at(address) && !self.home().contains(address);
                is_open && self.nbd.allow_at(address).as_ref() != list
            }
            Place::VhostUser(_) | Place::Ublk(_) => {
                let all = self.alone_of(name);
                let found = all.iter().map(|export| export.wanted()).find(|is| is.place.is(place));
                found.is_some_and(|is| is.allow.as_ref() != list)
            }
        }
    }

    /// Refuses a list of a device where another one holds already: it is the address's, and of all that is
    /// published there.
    pub fn check_same(&self, name: &str, address: &Address, list: Option<&AllowList>) -> Result<(), Fault> {
        let is = self.nbd.allow_at(address);
        if list.is_none() || list == is.as_ref() {
            return Ok(());
        }
        let (is, said) = (allow::shown(is.as_ref()), allow::shown(list));
        let why = format!("{name}: {address}: {is} may connect there, for all its exports, and not {said}");
        Err(Fault::failed(Errno::EBUSY, why))
    }
}

/// Refuses a list by which nobody could connect to an address of a socket that was handed over.
pub(super) fn check(list: Option<&AllowList>, address: &Address) -> Result<(), Fault> {
    let checked = list.map_or(Ok(()), |list| allow::check(list, address));
    checked.map_err(|why| Fault::invalid(format!("--allow: {why}")))
}
