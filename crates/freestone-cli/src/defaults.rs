//! Whose the empty name is at an address: a client that asks for nothing must not get another device
//! because the one that it had is not there after a restart.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use freestone_nbd::Address;

/// By address, the device that had it, until it is there again or gone for good. Locked for a look or a
/// change.
#[derive(Default)]
pub struct Defaults(Mutex<HashMap<Address, String>>);

impl Defaults {
    fn lock(&self) -> MutexGuard<'_, HashMap<Address, String>> {
        // Nothing in here can be half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A device had it when a server ended.
    pub fn reserve(&self, address: Address, name: &str) {
        self.lock().insert(address, name.to_owned());
    }

    /// Whether a device may have it.
    pub fn is_free_for(&self, address: &Address, name: &str) -> bool {
        self.lock().get(address).is_none_or(|owner| owner == name)
    }

    /// Where a device is to have it again.
    pub fn of(&self, name: &str) -> Vec<Address> {
        let reserved = self.lock();
        reserved.iter().filter(|(_, owner)| *owner == name).map(|(address, _)| address.clone()).collect()
    }

    /// A device is seen at an address.
    pub fn settle(&self, address: &Address, name: &str) {
        let mut reserved = self.lock();
        if reserved.get(address).is_some_and(|owner| owner == name) {
            reserved.remove(address);
        }
    }

    /// A device is seen nowhere any more.
    pub fn release(&self, name: &str) {
        self.lock().retain(|_, owner| owner != name);
    }
}
