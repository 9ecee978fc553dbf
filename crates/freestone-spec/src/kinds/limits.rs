//! Limits of a device: setting them, and lifting them for requests that must not wait.

use std::sync::{Arc, PoisonError};

use freestone::device::{Counting, Unlimited};
use freestone::ram::{self, Ram};

use super::Entry;
use crate::limits::{KEYS, LimitSpec, thread_error};
use crate::refusal::{Errno, Refusal};

/// Guard: while it exists, requests of a device do not wait for space or for their turn.
pub struct NoWaiting {
    _room: Option<ram::NoWaiting>,
    _turn: Option<Unlimited>,
}

impl Entry {
    /// Returns the limits.
    pub fn limits(&self) -> LimitSpec {
        // A panic cannot leave an assignment half done, so poisoning is ignored.
        *self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the limits, also for requests that wait already. Connections above the new limit stay. The
    /// limits of a template apply to later connections.
    ///
    /// # Errors
    /// Fails if a thread cannot be started. Nothing has changed then.
    pub fn set_limits(&self, limits: LimitSpec) -> Result<(), Refusal> {
        if let Some(counting) = &self.counting {
            let set = counting.set_device_limits(&limits.rates);
            set.map_err(|e| {
                Refusal::failed(Errno::ENOMEM, format!("{}: {}", self.name(), thread_error(&e)))
            })?;
        }
        self.clients.set(limits.max_clients.into());
        *self.limits.lock().unwrap_or_else(PoisonError::into_inner) = limits;
        Ok(())
    }

    /// Takes over the limits and the connections of the device that this one replaces.
    ///
    /// # Errors
    /// As [`set_limits`](Self::set_limits).
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

    /// Returns true if `way` is a device from [`way`](Self::way), with counters of this device.
    pub fn is_way(&self, way: &Counting) -> bool {
        self.counting.as_ref().is_some_and(|own| Arc::ptr_eq(own.sum(), way.sum()))
    }

    /// Lets requests through `ways` continue without waiting for space or for their turn, until the
    /// guard is dropped. Requests that wait for their turn continue at once.
    pub fn no_waiting(&self, ways: &[Arc<Counting>]) -> NoWaiting {
        let counters = self.counting.iter().chain(ways).map(|way| &**way);
        let turn = self.counting.as_ref().map(|_| Counting::lift_limits(counters));
        NoWaiting { _room: self.in_memory().map(Ram::no_waiting), _turn: turn }
    }

    /// The same for a device that is removed, or whose content is reset: requests that wait or would
    /// wait for their turn fail with `Gone`.
    pub fn end_waiting(&self, ways: &[Arc<Counting>]) -> NoWaiting {
        let counters = self.counting.iter().chain(ways).map(|way| &**way);
        let turn = self.counting.as_ref().map(|_| Counting::end_waiting(counters));
        NoWaiting { _room: self.in_memory().map(Ram::no_waiting), _turn: turn }
    }
}
