//! Rate limits of a device and of each access path. A submitted request first pays its cost to the limits of
//! its access path, then to those of the device.

use std::io;

use super::Tally;
use crate::device::zoned::AppendCompletion;
use crate::device::{Completion, Device, Error, Flags, IoBuf, Op, Request};
use crate::limits::{Cost, Limiter, Limits, PacedRequest, RejectGuard, SuspendGuard};
use crate::sync::{Arc, AtomicU32, Ordering};

/// Rate limits of an access path and of its device.
///
/// A request pays first for the access path and then for the device, so a request in the device's queue has
/// paid for its path.
pub struct Limiting {
    /// Number of active limits of the device and all its access paths. Checked by each request.
    any: Arc<AtomicU32>,
    path_limiter: Limiter<LimitedRequest>,
    device_limiter: Arc<Limiter<LimitedRequest>>,
}

/// A submitted request, passed to the device when the request has paid its cost.
pub enum SubmittedOp {
    Io(Request, IoBuf, Completion),
    Append(u64, IoBuf, Flags, AppendCompletion),
}

pub struct LimitedRequest {
    submitted: SubmittedOp,
    inner: Arc<dyn Device>,
    limiting: Arc<Limiting>,
    tally: Arc<Tally>,
    has_paid_path: bool,
    /// True if the request was counted as delayed.
    has_waited: bool,
}

/// Guard during whose life requests to a device, or on an access path, do not wait for limits.
pub struct LimitSuspension {
    _guards: Guards,
}

enum Guards {
    Suspended { _all: Vec<SuspendGuard<LimitedRequest>> },
    Rejecting { _all: Vec<RejectGuard<LimitedRequest>> },
}

impl Limiting {
    /// Creates the limits of a device's first access path, initially unlimited.
    pub fn new() -> Self {
        let any = Arc::default();
        let limiter = || Limiter::new(Arc::clone(&any));
        Self { path_limiter: limiter(), device_limiter: Arc::new(limiter()), any }
    }

    /// Creates the limits of another access path, which shares the device's limits and has no limits of its
    /// own.
    pub fn new_access_path(&self) -> Self {
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
        // Acquire: pairs with the Release of a queue that becomes inactive, after all waiting requests have
        // continued.
        self.any.load(Ordering::Acquire) != 0
    }

    /// Returns true if a request on this path may have to pay.
    pub fn is_limited(&self) -> bool {
        self.path_limiter.is_active() || self.device_limiter.is_active()
    }

    pub fn set_path(&self, limits: &Limits) -> io::Result<()> {
        self.path_limiter.set(limits)
    }

    pub fn set_device(&self, limits: &Limits) -> io::Result<()> {
        self.device_limiter.set(limits)
    }

    pub fn path(&self) -> Limits {
        self.path_limiter.limits()
    }

    pub fn device(&self) -> Limits {
        self.device_limiter.limits()
    }

    /// Closes this access path: its waiting requests fail, and its limits are removed.
    pub fn close_path(self: &Arc<Self>) {
        let device_limiter = self.device_limiter.as_ref();
        device_limiter.reject_matching(|request| Arc::ptr_eq(&request.limiting, self));
        drop(self.path_limiter.reject_waiting());
        // Removing limits starts no thread, so this cannot fail.
        let _ = self.path_limiter.set(&Limits::default());
    }
}

impl LimitSuspension {
    /// Suspends the limits of the access paths and of their device. Waiting requests continue.
    pub fn suspend<'a>(paths: impl Iterator<Item = &'a Limiting>) -> Self {
        let (mut all, mut last) = (Vec::new(), None);
        for path in paths {
            all.push(path.path_limiter.suspend());
            last = Some(path);
        }
        all.extend(last.map(|path| path.device_limiter.suspend()));
        Self { _guards: Guards::Suspended { _all: all } }
    }

    /// Fails waiting requests with [`Error::Gone`], and new requests that would have to wait.
    pub fn reject<'a>(paths: impl Iterator<Item = &'a Limiting>) -> Self {
        let (mut all, mut last) = (Vec::new(), None);
        for path in paths {
            all.push(path.path_limiter.reject_waiting());
            last = Some(path);
        }
        all.extend(last.map(|path| path.device_limiter.reject_waiting()));
        Self { _guards: Guards::Rejecting { _all: all } }
    }
}

impl LimitedRequest {
    pub fn new(
        submitted: SubmittedOp,
        inner: Arc<dyn Device>,
        limiting: Arc<Limiting>,
        tally: Arc<Tally>,
    ) -> Self {
        Self { submitted, inner, limiting, tally, has_paid_path: false, has_waited: false }
    }

    /// Pays the request's cost, and passes the request to the device, at once or when the limits allow it.
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

    /// Returns the cost of the request as defined by qemu's throttling: one operation, and the bytes of data.
    fn cost(&self) -> Cost {
        let bytes = match &self.submitted {
            SubmittedOp::Io(request, ..) if matches!(request.op, Op::Read | Op::Write) => request.len,
            SubmittedOp::Io(..) => 0,
            SubmittedOp::Append(_, data, ..) => data.len() as u64,
        };
        Cost { operations: 1, bytes }
    }

    fn submit(self) {
        match self.submitted {
            SubmittedOp::Io(request, buffer, done) => self.inner.submit(request, buffer, done),
            SubmittedOp::Append(offset, data, flags, done) => match self.inner.zoned() {
                Some(zones) => zones.submit_append(offset, data, flags, done),
                None => done(Err(Error::Unsupported)),
            },
        }
    }
}

impl PacedRequest for LimitedRequest {
    fn note_wait(&mut self) {
        // Counted once, even if the request waits in both queues.
        if !std::mem::replace(&mut self.has_waited, true) {
            self.tally.counts().count_limited();
        }
    }

    fn resume(mut self) {
        if self.has_paid_path {
            return self.submit();
        }
        self.has_paid_path = true;
        self.pay_and_submit();
    }

    fn reject(self) {
        match self.submitted {
            SubmittedOp::Io(_, buffer, done) => done.complete(Err(Error::Gone), buffer),
            SubmittedOp::Append(.., done) => done(Err(Error::Gone)),
        }
    }
}
