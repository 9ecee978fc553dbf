//! I/O and connection limits of a device. Sets the limits, and suspends them for requests that must
//! not wait.

use std::sync::Arc;

use freestone::device::{Counting, LimitSuspension};
use freestone::ram::{self, Ram};

use super::Entry;
use crate::limits::{KEYS, LimitSpec, thread_error};
use crate::refusal::Refusal;

/// Guard during whose life requests of a device do not wait for memory or for the rate limits.
pub struct WaitBypass {
    _room: Option<ram::NoWaitGuard>,
    _turn: Option<LimitSuspension>,
}

impl Entry {
    /// Returns the present I/O and connection limits of the device.
    pub fn limits(&self) -> LimitSpec {
        *self.limits.lock()
    }

    /// Sets the I/O and connection limits, which also apply to requests that already wait. Existing
    /// connections above the new limit stay open. The limits of a template apply to later
    /// connections.
    ///
    /// # Errors
    /// `ENOMEM` if a thread cannot be started. Nothing is changed then.
    pub fn set_limits(&self, limits: LimitSpec) -> Result<(), Refusal> {
        if let Some(counting) = &self.counting {
            let set = counting.set_device_limits(&limits.rates);
            set.map_err(|e| refusal!(ENOMEM, "{}: {}", self.name(), thread_error(&e)))?;
        }
        self.clients.set(limits.max_clients.into());
        *self.limits.lock() = limits;
        Ok(())
    }

    /// Takes over the limits and the connection count of `other`, the device that this one
    /// replaces.
    pub fn take_limits_of(&mut self, other: &Self) -> Result<(), Refusal> {
        self.clients = Arc::clone(&other.clients);
        let limits = other.limits();
        self.set_limits(limits)?;
        for key in KEYS {
            if limits.value(key) != self.spec.limits.value(key) {
                let now = limits.words().find(|(known, _)| *known == key);
                self.words.put(&self.spec, key, &now.map_or("0".to_owned(), |(_, text)| text));
            }
        }
        Ok(())
    }

    /// Returns true if `access_path` was returned by [`new_access_path`](Self::new_access_path) of
    /// this device.
    pub fn is_access_path(&self, access_path: &Counting) -> bool {
        self.counting.as_ref().is_some_and(|own| Arc::ptr_eq(own.sum(), access_path.sum()))
    }

    /// Makes requests through `access_paths` run without waiting for memory or for the rate limits,
    /// until the guard is dropped. Requests that already wait for a rate limit run at once.
    pub fn bypass_waiting(&self, access_paths: &[Arc<Counting>]) -> WaitBypass {
        let counters = self.counting.iter().chain(access_paths).map(|access_path| &**access_path);
        let turn = self.counting.as_ref().map(|_| Counting::suspend_limits(counters));
        WaitBypass { _room: self.ram_data().map(Ram::disable_waiting), _turn: turn }
    }

    /// Makes requests through `access_paths` fail with `Gone` instead of waiting for the rate
    /// limits, until the guard is dropped. Used when the device is removed or its content is reset.
    pub fn fail_waiting(&self, access_paths: &[Arc<Counting>]) -> WaitBypass {
        let counters = self.counting.iter().chain(access_paths).map(|access_path| &**access_path);
        let turn = self.counting.as_ref().map(|_| Counting::reject_waiting(counters));
        WaitBypass { _room: self.ram_data().map(Ram::disable_waiting), _turn: turn }
    }
}
