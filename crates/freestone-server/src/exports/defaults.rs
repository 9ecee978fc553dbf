//! Reservations of the default export (the empty name) of each address across a restart: if the device behind
//! the default export is missing, clients must not be connected to another device.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use freestone_nbd::Address;

/// By address: the name of the device for which the default export is reserved. A reservation ends when the
/// device is published at the address or removed. The lock is held only while the map is read or changed.
#[derive(Default)]
pub struct Defaults(Mutex<HashMap<Address, String>>);

impl Defaults {
    fn lock(&self) -> MutexGuard<'_, HashMap<Address, String>> {
        // A panic cannot leave the map inconsistent, so poisoning is ignored.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves the default export of an address for a device.
    pub fn reserve(&self, address: Address, name: &str) {
        self.lock().insert(address, name.to_owned());
    }

    /// Returns true if the default export of the address is not reserved for a device other than `name`.
    pub fn is_free_for(&self, address: &Address, name: &str) -> bool {
        self.lock().get(address).is_none_or(|owner| owner == name)
    }

    /// Returns the addresses whose default export is reserved for a device.
    pub fn of(&self, name: &str) -> Vec<Address> {
        let reserved = self.lock();
        reserved.iter().filter(|(_, owner)| *owner == name).map(|(address, _)| address.clone()).collect()
    }

    /// Removes the reservation of a device that is now published at the address.
    pub fn settle(&self, address: &Address, name: &str) {
        let mut reserved = self.lock();
        if reserved.get(address).is_some_and(|owner| owner == name) {
            reserved.remove(address);
        }
    }

    /// Removes all reservations of a device.
    pub fn release(&self, name: &str) {
        self.lock().retain(|_, owner| owner != name);
    }
}
