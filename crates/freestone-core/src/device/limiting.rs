//! The limits of a way into a device and of the device: what a request pays before it is handed over,
//! first as what comes on its way, then as what comes to the device.

use std::io;

use super::zoned::AppendCompletion;
use super::{Completion, Device, Error, Flags, IoBuf, Op, Request, Tally};
use crate::limits::{Cost, Ended, Lifted, Limiter, Limits, Waits};
use crate::sync::{Arc, AtomicU32, Ordering};

/// Both limits.
///
/// They are paid one after the other, so who waits in the second line has paid in the first.
pub struct Limiting {
    /// How many limits are on, of the device and of all its ways: what each request looks at.
    any: Arc<AtomicU32>,
    of_way: Limiter<Ticket>,
    of_device: Arc<Limiter<Ticket>>,
}

/// What a submitted request is: it is handed over when it has paid.
pub enum Submitted {
    Io(Request, IoBuf, Completion),
    Append(u64, IoBuf, Flags, AppendCompletion),
}

/// A request that pays.
pub struct Ticket {
    submitted: Submitted,
    inner: Arc<dyn Device>,
    limiting: Arc<Limiting>,
    tally: Arc<Tally>,
    /// It has paid as what comes on its way.
    has_paid_way: bool,
    /// It was counted as one that waits.
    has_waited: bool,
}

/// What comes to a device, or on a way into it, does not wait for its turn until this is dropped.
pub struct Unlimited {
    _kept: Kept,
}

enum Kept {
    Lifted { _all: Vec<Lifted<Ticket>> },
    Ended { _all: Vec<Ended<Ticket>> },
}

impl Limiting {
    /// Of the first way into a device: no limits.
    pub fn new() -> Self {
        let any = Arc::default();
        let limiter = || Limiter::new(Arc::clone(&any));
        Self { of_way: limiter(), of_device: Arc::new(limiter()), any }
    }

    /// Of another one: the device's limits, and none of its own.
    pub fn another_way(&self) -> Self {
        let any = Arc::clone(&self.any);
        Self { of_way: Limiter::new(Arc::clone(&any)), of_device: Arc::clone(&self.of_device), any }
    }

    /// Whether the device or any way into it has limits.
    #[inline]
    pub fn are_any(&self) -> bool {
        // Acquire: pairs with the Release of a line that goes off: all that waited have gone on.
        self.any.load(Ordering::Acquire) != 0
    }

    /// Whether a request may have to pay.
    pub fn are_on(&self) -> bool {
        self.of_way.is_on() || self.of_device.is_on()
    }

    /// Limits of this way.
    pub fn set_way(&self, limits: &Limits) -> io::Result<()> {
        self.of_way.set(limits)
    }

    /// Limits of all ways together.
    pub fn set_device(&self, limits: &Limits) -> io::Result<()> {
        self.of_device.set(limits)
    }

    /// Those of this way.
    pub fn way(&self) -> Limits {
        self.of_way.limits()
    }

    /// Those of the device.
    pub fn device(&self) -> Limits {
        self.of_device.limits()
    }

    /// Nobody comes on this way any more: what waits of it is gone.
    pub fn end_way(self: &Arc<Self>) {
        let of_device = self.of_device.as_ref();
        of_device.end_those(|ticket| Arc::ptr_eq(&ticket.limiting, self));
        drop(self.of_way.end());
        // It fails to begin only.
        let _ = self.of_way.set(&Limits::default());
    }
}

impl Unlimited {
    /// Those that wait go on, and others do not wait.
    pub fn lifted<'a>(ways: impl Iterator<Item = &'a Limiting>) -> Self {
        let (mut all, mut last) = (Vec::new(), None);
        for way in ways {
            all.push(way.of_way.lift());
            last = Some(way);
        }
        all.extend(last.map(|way| way.of_device.lift()));
        Self { _kept: Kept::Lifted { _all: all } }
    }

    /// Those that wait are answered [`Error::Gone`], and so are those that would have to.
    pub fn gone<'a>(ways: impl Iterator<Item = &'a Limiting>) -> Self {
        let (mut all, mut last) = (Vec::new(), None);
        for way in ways {
            all.push(way.of_way.end());
            last = Some(way);
        }
        all.extend(last.map(|way| way.of_device.end()));
        Self { _kept: Kept::Ended { _all: all } }
    }
}

impl Ticket {
    /// A request that comes in.
    pub fn new(
        submitted: Submitted,
        inner: Arc<dyn Device>,
        limiting: Arc<Limiting>,
        tally: Arc<Tally>,
    ) -> Self {
        Self { submitted, inner, limiting, tally, has_paid_way: false, has_waited: false }
    }

    /// Pays, and is handed over: at once, or later.
    pub fn pass(mut self) {
        let (limiting, cost) = (Arc::clone(&self.limiting), self.cost());
        if !self.has_paid_way {
            let Some(ticket) = limiting.of_way.enter(self, cost) else { return };
            self = ticket;
            self.has_paid_way = true;
        }
        if let Some(ticket) = limiting.of_device.enter(self, cost) {
            ticket.hand_over();
        }
    }

    /// As qemu's throttling counts: each request is an operation, and bytes are those of data.
    fn cost(&self) -> Cost {
        let bytes = match &self.submitted {
            Submitted::Io(request, ..) if matches!(request.op, Op::Read | Op::Write) => request.len,
            Submitted::Io(..) => 0,
            Submitted::Append(_, data, ..) => data.len() as u64,
        };
        Cost { operations: 1, bytes }
    }

    fn hand_over(self) {
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
        // One that waits in both lines is one that waited.
        if !std::mem::replace(&mut self.has_waited, true) {
            self.tally.counts().limited();
        }
    }

    fn go(mut self) {
        if self.has_paid_way {
            return self.hand_over();
        }
        self.has_paid_way = true;
        self.pass();
    }

    fn gone(self) {
        match self.submitted {
            Submitted::Io(_, buffer, done) => done.complete(Err(Error::Gone), buffer),
            Submitted::Append(.., done) => done(Err(Error::Gone)),
        }
    }
}
