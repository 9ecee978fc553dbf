//! What a device lets through, and who does not wait for that.

use std::sync::{Arc, PoisonError};

use freestone::device::{Counting, Unlimited};
use freestone::ram::{self, Ram};

use super::Entry;
use crate::limits::{KEYS, LimitSpec, unset};
use crate::refusal::{Errno, Refusal};

/// Requests do not wait until this is dropped.
pub struct NoWaiting {
    _room: Option<ram::NoWaiting>,
    _turn: Option<Unlimited>,
}

impl Entry {
    /// What it lets through.
    pub fn limits(&self) -> LimitSpec {
        // Nothing in here can be half done.
        *self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on it lets through that, also of what waits already. Who is connected stays; of a
    /// template it is for connections that come.
    ///
    /// # Errors
    /// A thread could not be started; nothing has changed.
    pub fn set_limits(&self, limits: LimitSpec) -> Result<(), Refusal> {
        if let Some(counting) = &self.counting {
            let set = counting.set_device_limits(&limits.rates);
            set.map_err(|e| Refusal::failed(Errno::ENOMEM, format!("{}: {}", self.name(), unset(&e))))?;
        }
        self.clients.set(limits.max_clients.into());
        *self.limits.lock().unwrap_or_else(PoisonError::into_inner) = limits;
        Ok(())
    }

    /// It comes in the place of another one: lets through what that did, to those who are connected to
    /// that.
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

    /// Whether this is a way into it.
    pub fn is_way(&self, way: &Counting) -> bool {
        self.counting.as_ref().is_some_and(|own| Arc::ptr_eq(own.sum(), way.sum()))
    }

    /// Requests on these ways do not wait until what is returned is dropped, neither for room nor for
    /// their turn; those that wait for their turn go on.
    pub fn no_waiting(&self, ways: &[Arc<Counting>]) -> NoWaiting {
        let all = self.counting.iter().chain(ways).map(|way| &**way);
        let turn = self.counting.as_ref().map(|_| Counting::lift_limits(all));
        NoWaiting { _room: self.in_memory().map(Ram::no_waiting), _turn: turn }
    }

    /// The same for a device whose content goes, or that goes itself: those that wait for their turn,
    /// or would have to, are answered that it is gone.
    pub fn end_waiting(&self, ways: &[Arc<Counting>]) -> NoWaiting {
        let all = self.counting.iter().chain(ways).map(|way| &**way);
        let turn = self.counting.as_ref().map(|_| Counting::end_waiting(all));
        NoWaiting { _room: self.in_memory().map(Ram::no_waiting), _turn: turn }
    }
}
