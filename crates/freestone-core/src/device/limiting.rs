//! Limits of a device and of each access path. A submitted request first pays for its access path, then for
//! the device.

use std::io;

use super::zoned::AppendCompletion;
use super::{Completion, Device, Error, Flags, IoBuf, Op, Request, Tally};
use crate::limits::{Cost, Ended, Lifted, Limiter, Limits, Waits};
use crate::sync::{Arc, AtomicU32, Ordering};

/// Limits of an access path and of its device.
///
/// A request pays one after the other, so a request in the device's queue has paid for its path.
pub struct Limiting {
    /// Number of active limits of the device and all its access paths. Checked by each request.
    any: Arc<AtomicU32>,
    path_limiter: Limiter<Ticket>,
    device_limiter: Arc<Limiter<Ticket>>,
}

/// A submitted request, passed to the device when it has paid.
pub enum Submitted {
    Io(Request, IoBuf, Completion),
    Append(u64, IoBuf, Flags, AppendCompletion),
}

pub struct Ticket {
    submitted: Submitted,
    inner: Arc<dyn Device>,
    limiting: Arc<Limiting>,
    tally: Arc<Tally>,
    has_paid_path: bool,
    /// The request was counted as delayed.
    has_waited: bool,
}

/// Guard during which requests to a device, or on an access path, do not wait for limits.
pub struct Unlimited {
    _guards: Guards,
}

enum Guards {
    Lifted { _all: Vec<Lifted<Ticket>> },
    Ended { _all: Vec<Ended<Ticket>> },
}

impl Limiting {
    /// Creates the limits of a device's first access path, initially unlimited.
    pub fn new() -> Self {
        let any = Arc::default();
        let limiter = || Limiter::new(Arc::clone(&any));
        Self { path_limiter: limiter(), device_limiter: Arc::new(limiter()), any }
    }

    /// Creates another access path, which shares the device's limits and has none of its own.
    pub fn another_way(&self) -> Self {
        let any = Arc::clone(&self.any);
        Self {
            path_limiter: Limiter::new(Arc::clone(&any)),
            device_limiter: Arc::clone(&self.device_limiter),
            any,
        }
    }

    /// Returns true if the device or any access path has limits.
    #[inline]
    pub fn has_any(&self) -> bool {
        // Acquire: pairs with the Release of a queue that becomes inactive: all waiting requests have
        // continued.
        self.any.load(Ordering::Acquire) != 0
    }

    /// Returns true if a request on this path may have to pay.
    pub fn is_limited(&self) -> bool {
        self.path_limiter.is_on() || self.device_limiter.is_on()
    }

    pub fn set_way(&self, limits: &Limits) -> io::Result<()> {
        self.path_limiter.set(limits)
    }

    pub fn set_device(&self, limits: &Limits) -> io::Result<()> {
        self.device_limiter.set(limits)
    }

    pub fn way(&self) -> Limits {
        self.path_limiter.limits()
    }

    pub fn device(&self) -> Limits {
        self.device_limiter.limits()
    }

    /// Closes this access path: its waiting requests fail.
    pub fn close_way(self: &Arc<Self>) {
        let device_limiter = self.device_limiter.as_ref();
        device_limiter.end_those(|ticket| Arc::ptr_eq(&ticket.limiting, self));
        drop(self.path_limiter.end());
        // Removing limits starts no thread, so this cannot fail.
        let _ = self.path_limiter.set(&Limits::default());
    }
}

impl Unlimited {
    /// Suspends the limits; waiting requests continue.
    pub fn lifted<'a>(ways: impl Iterator<Item = &'a Limiting>) -> Self {
        let (mut all, mut last) = (Vec::new(), None);
        for way in ways {
            all.push(way.path_limiter.lift());
            last = Some(way);
        }
        all.extend(last.map(|way| way.device_limiter.lift()));
        Self { _guards: Guards::Lifted { _all: all } }
    }

    /// Fails waiting requests with [`Error::Gone`], and new ones that would have to wait.
    pub fn failing<'a>(ways: impl Iterator<Item = &'a Limiting>) -> Self {
        let (mut all, mut last) = (Vec::new(), None);
        for way in ways {
            all.push(way.path_limiter.end());
            last = Some(way);
        }
        all.extend(last.map(|way| way.device_limiter.end()));
        Self { _guards: Guards::Ended { _all: all } }
    }
}

impl Ticket {
    pub fn new(
        submitted: Submitted,
        inner: Arc<dyn Device>,
        limiting: Arc<Limiting>,
        tally: Arc<Tally>,
    ) -> Self {
        Self { submitted, inner, limiting, tally, has_paid_path: false, has_waited: false }
    }

    /// Pays, and passes the request to the device, now or later.
    pub fn pay_and_submit(mut self) {
        let (limiting, cost) = (Arc::clone(&self.limiting), self.cost());
        if !self.has_paid_path {
            let Some(ticket) = limiting.path_limiter.enter(self, cost) else { return };
            self = ticket;
            self.has_paid_path = true;
        }
        if let Some(ticket) = limiting.device_limiter.enter(self, cost) {
            ticket.submit();
        }
    }

    /// Returns the cost as qemu's throttling defines it: one operation for each request, and the bytes of
    /// data.
    fn cost(&self) -> Cost {
        let bytes = match &self.submitted {
            Submitted::Io(request, ..) if matches!(request.op, Op::Read | Op::Write) => request.len,
            Submitted::Io(..) => 0,
            Submitted::Append(_, data, ..) => data.len() as u64,
        };
        Cost { operations: 1, bytes }
    }

    fn submit(self) {
        match self.submitted {
            Submitted::Io(request, buffer, done) => self.inner.submit(request, buffer, done),
            Submitted::Append(offset, data, flags, done) => match self.inner.zoned() {
                Some(zones) => zones.submit_append(offset, data, flags, done),
                None => done(Err(Error::Unsupported)),
            },
        }
    }
}

impl Waits for Ticket {
    fn waits(&mut self) {
        // Counted once, even if the request waits in both queues.
        if !std::mem::replace(&mut self.has_waited, true) {
            self.tally.counts().limited();
        }
    }

    fn go(mut self) {
        if self.has_paid_path {
            return self.submit();
        }
        self.has_paid_path = true;
        self.pay_and_submit();
    }

    fn gone(self) {
        match self.submitted {
            Submitted::Io(_, buffer, done) => done.complete(Err(Error::Gone), buffer),
            Submitted::Append(.., done) => done(Err(Error::Gone)),
        }
    }
}
