//! A device with the numbers that the block layer's `stat` file has of a disk: what its users asked
//! for, however it is done below, and how long that took.

use std::cell::Cell;
use std::io;

use crossbeam_utils::CachePadded;
use tracing::Span;

use super::limiting::{Limiting, Submitted, Ticket, Unlimited};
use super::watched::{self, Watched};
use super::zoned::{AppendCompletion, Zone, ZoneOp, Zoned};
use super::{
    Account, Buffer, Changes, Completion, Counted, Counter, Device, Error, Extent, Flags, Geometry, IoBuf,
    Request, Result, Sum, Tally, Told, Tried, sampling,
};
use crate::limits::Limits;
use crate::per_cpu_arc::PerCpuArc;
use crate::sync::{Arc, Instant, OnceLock, thread_local};

/// Counts what comes through, on each way into a device. Requests of different CPUs meet nowhere:
/// neither the counters nor the ownership of them is shared.
///
/// Counts and bytes are exact. How long a request took, from when the device was asked until it had
/// answered, is measured of each that had to wait, and of those that are answered at once of one in
/// 64, by chance, which stands for the others. Where the device did such a one in several turns, it
/// is measured from the first one where they follow one another on one thread, else the last turn
/// is.
///
/// Here is also where a way, and all ways together, have [limits](crate::limits): while they do, what is
/// tried would block, and what is submitted waits until it has paid. That is of the time it took. Zone
/// operations, hints and questions pay nothing.
pub struct Counting {
    inner: Arc<dyn Device>,
    way: Way,
    /// For requests that are answered later, which own the way; from the first one on.
    shells: OnceLock<PerCpuArc<Shell>>,
}

/// What a request counts in, and the sum that this is a part of: while the one is used, the other
/// is.
#[derive(Clone)]
struct Way {
    tally: Arc<Tally>,
    of_device: Arc<Sum<Tally>>,
    limiting: Arc<Limiting>,
}

type Shell = CachePadded<Way>;

thread_local! {
    /// A request that was measured and is not done, on this thread.
    static TURN: Cell<Option<Turn>> = const { Cell::new(None) };
}

/// How it goes on.
#[derive(Clone, Copy)]
struct Turn {
    tally: usize,
    rest: Request,
    begun: Instant,
}

impl Counting {
    /// A way into the device of that name; all numbers are 0.
    pub fn new(name: &str, inner: Arc<dyn Device>) -> Self {
        Self::of(name, inner, Arc::default(), Limiting::new())
    }

    /// Another way into the same device, with numbers of its own, which are also in this one's.
    #[must_use]
    pub fn another_way(&self) -> Self {
        let of_device = Arc::clone(&self.way.of_device);
        let limiting = self.way.limiting.another_way();
        Self::of(self.tally().device(), Arc::clone(&self.inner), of_device, limiting)
    }

    fn of(name: &str, inner: Arc<dyn Device>, of_device: Arc<Sum<Tally>>, limiting: Limiting) -> Self {
        let tally = Arc::new(Tally::new(name));
        of_device.take_in(Arc::clone(&tally));
        let way = Way { tally, of_device, limiting: Arc::new(limiting) };
        Self { inner, way, shells: OnceLock::new() }
    }

    /// Limits what comes on this way from now on, also what waits already.
    ///
    /// # Errors
    /// The threads that this needs could not be started; nothing has changed.
    pub fn set_limits(&self, limits: &Limits) -> io::Result<()> {
        self.way.limiting.set_way(limits)
    }

    /// Limits what comes on all ways together, in the same manner.
    ///
    /// # Errors
    /// As [`set_limits`](Self::set_limits).
    pub fn set_device_limits(&self, limits: &Limits) -> io::Result<()> {
        self.way.limiting.set_device(limits)
    }

    /// The limits of this way.
    pub fn limits(&self) -> Limits {
        self.way.limiting.way()
    }

    /// The limits of all ways together.
    pub fn device_limits(&self) -> Limits {
        self.way.limiting.device()
    }

    /// No request waits for the limits of these ways into one device, and of the device, until what is
    /// returned is dropped; those that do go on.
    #[must_use]
    pub fn lift_limits<'a>(ways: impl Iterator<Item = &'a Self>) -> Unlimited {
        Unlimited::lifted(ways.map(|way| &*way.way.limiting))
    }

    /// Requests that wait for the limits of these ways into one device, or of the device, are answered
    /// [`Error::Gone`], and so are those that would have to, until what is returned is dropped.
    #[must_use]
    pub fn end_waiting<'a>(ways: impl Iterator<Item = &'a Self>) -> Unlimited {
        Unlimited::gone(ways.map(|way| &*way.way.limiting))
    }

    /// What came through on all ways and how it ended, without latencies.
    pub fn counts(&self) -> Counted {
        self.way.of_device.counted()
    }

    /// The same with latencies.
    pub fn account(&self) -> Account {
        self.way.of_device.told()
    }

    /// What came on this way alone.
    pub fn tally(&self) -> &Tally {
        &self.way.tally
    }

    /// The ways that there are.
    pub fn ways(&self) -> Vec<Arc<Tally>> {
        self.way.of_device.members()
    }

    /// The sum of all ways.
    pub fn sum(&self) -> &Arc<Sum<Tally>> {
        &self.way.of_device
    }

    fn shell(&self) -> Arc<Shell> {
        let make = || PerCpuArc::new(|| CachePadded::new(self.way.clone()));
        Arc::clone(self.shells.get_or_init(make))
    }

    fn zones(&self) -> Result<&dyn Zoned> {
        self.inner.zoned().ok_or(Error::Unsupported)
    }

    fn ticket(&self, submitted: Submitted) -> Ticket {
        let Way { tally, limiting, .. } = &self.way;
        Ticket::new(submitted, Arc::clone(&self.inner), Arc::clone(limiting), Arc::clone(tally))
    }

    /// A try where there are limits, perhaps of another way.
    #[cold]
    #[inline(never)]
    fn try_limited(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        if self.way.limiting.are_on() {
            return Ok(Tried::WouldBlock);
        }
        self.try_counted(request, buffer)
    }

    #[inline]
    fn try_counted(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        if sampling::is_due() {
            return self.try_seen(request, buffer, true);
        }
        if watched::is_wanted() {
            return self.try_seen(request, buffer, false);
        }
        let outcome = self.inner.try_io(request, buffer);
        // Nearly all are, and here is all that is done for these.
        if let Ok(Tried::Done) = outcome {
            self.way.tally.counts().done(request.op, request.len);
            return outcome;
        }
        self.tried(request, outcome)
    }

    /// A try that is measured, or looked at.
    #[cold]
    #[inline(never)]
    fn try_seen(&self, request: &Request, buffer: Buffer<'_>, is_due: bool) -> Result<Tried> {
        if !watched::is_wanted() {
            return self.try_measured(request, buffer);
        }
        let tally = &self.way.tally;
        let watched = Watched::begin(tally, request.op.into(), request.offset, request.len, false);
        let outcome = watched.within(|| {
            if is_due {
                return self.try_measured(request, buffer);
            }
            let outcome = self.inner.try_io(request, buffer);
            self.tried(request, outcome)
        });
        watched.tried(tally, &outcome);
        outcome
    }

    /// A try that is measured.
    #[cold]
    #[inline(never)]
    fn try_measured(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        let stands_for = sampling::next();
        let tally = Arc::as_ptr(&self.way.tally).addr();
        let before = TURN.take().filter(|turn| turn.tally == tally && turn.rest == *request);
        let begun = before.map_or_else(Instant::now, |turn| turn.begun);
        let outcome = self.inner.try_io(request, buffer);
        match outcome {
            Ok(Tried::Done) => self.way.tally.took(request.op.into(), begun.elapsed(), stands_for),
            Ok(Tried::Partly(bytes)) => {
                TURN.set(Some(Turn { tally, rest: request.rest(bytes), begun }));
                sampling::again(stands_for);
            }
            // What is submitted is measured for itself.
            Ok(Tried::WouldBlock) | Err(_) => {}
        }
        self.tried(request, outcome)
    }

    #[cold]
    #[inline(never)]
    fn append_watched(
        &self,
        zones: &dyn Zoned,
        offset: u64,
        data: &[u8],
        flags: Flags,
    ) -> Result<Option<u64>> {
        let tally = &self.way.tally;
        let watched = Watched::begin(tally, Counter::Append, offset, data.len() as u64, false);
        let outcome = watched.within(|| zones.try_append(offset, data, flags));
        let tried = outcome.map(|place| place.map_or(Tried::WouldBlock, |_| Tried::Done));
        watched.tried(tally, &tried);
        outcome
    }

    #[inline(never)]
    fn tried(&self, request: &Request, outcome: Result<Tried>) -> Result<Tried> {
        self.way.tally.counts().tried(request, &outcome);
        if outcome.is_err() {
            self.way.tally.failed(request.op.into());
        }
        outcome
    }
}

impl Way {
    /// A request that is handed over, if somebody looks at it.
    fn watched(&self, counter: Counter, offset: u64, bytes: u64) -> Option<Watched> {
        watched::is_wanted().then(|| Watched::begin(&self.tally, counter, offset, bytes, true))
    }

    /// A request that was submitted is answered.
    fn answered<T>(&self, counter: Counter, begun: Instant, outcome: &Result<T>) {
        self.tally.counts().ended();
        match outcome {
            Ok(_) => self.tally.took(counter, begun.elapsed(), 1),
            Err(_) => self.tally.failed(counter),
        }
    }
}

impl Device for Counting {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        if self.way.limiting.are_any() {
            return self.try_limited(request, buffer);
        }
        self.try_counted(request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let (way, begun) = (self.shell(), Instant::now());
        way.tally.counts().begun();
        let watched = way.watched(request.op.into(), request.offset, request.len);
        let span = watched.as_ref().map(Watched::span);
        let done = Completion::new(move |outcome, buffer| {
            if let Some(watched) = watched {
                watched.answered(&way.tally, &outcome);
            }
            way.answered(request.op.into(), begun, &outcome);
            way.tally.counts().answered(&request, &outcome);
            done.complete(outcome, buffer);
        });
        let _within = span.as_ref().map(Span::enter);
        if !self.way.limiting.are_any() {
            return self.inner.submit(request, buffer, done);
        }
        // What is refused pays nothing.
        if let Err(error) = request.check(&self.inner.geometry()) {
            return done.complete(Err(error), buffer);
        }
        self.ticket(Submitted::Io(request, buffer, done)).pass();
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.inner.extents(offset, len, row)
    }

    fn prefetch(&self, offset: u64, len: u64) {
        self.inner.prefetch(offset, len);
    }

    fn zoned(&self) -> Option<&dyn Zoned> {
        self.inner.zoned().map(|_| self as &dyn Zoned)
    }

    fn changes(&self) -> Option<&dyn Changes> {
        self.inner.changes()
    }
}

impl Zoned for Counting {
    fn report(&self, offset: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()> {
        self.zones()?.report(offset, row)
    }

    fn zone_op(&self, op: ZoneOp, offset: u64) -> Result<()> {
        self.zones()?.zone_op(op, offset)
    }

    fn reset_all(&self) -> Result<()> {
        self.zones()?.reset_all()
    }

    fn try_append(&self, offset: u64, data: &[u8], flags: Flags) -> Result<Option<u64>> {
        let zones = self.zones()?;
        if self.way.limiting.are_any() && self.way.limiting.are_on() {
            return Ok(None);
        }
        let measured = sampling::is_due().then(|| (sampling::next(), Instant::now()));
        let outcome = if watched::is_wanted() {
            self.append_watched(zones, offset, data, flags)
        } else {
            zones.try_append(offset, data, flags)
        };
        if matches!(outcome, Ok(None)) {
            return outcome;
        }
        let tally = &self.way.tally;
        tally.counts().appended(data.len() as u64, &outcome);
        match (&outcome, measured) {
            (Ok(_), Some((stands_for, begun))) => tally.took(Counter::Append, begun.elapsed(), stands_for),
            (Ok(_), None) => {}
            (Err(_), _) => tally.failed(Counter::Append),
        }
        outcome
    }

    fn submit_append(&self, offset: u64, data: IoBuf, flags: Flags, done: AppendCompletion) {
        let zones = match self.zones() {
            Ok(zones) => zones,
            Err(error) => return done(Err(error)),
        };
        let (way, begun, bytes) = (self.shell(), Instant::now(), data.len() as u64);
        way.tally.counts().begun();
        let watched = way.watched(Counter::Append, offset, bytes);
        let done = Box::new(move |outcome| {
            if let Some(watched) = watched {
                watched.answered(&way.tally, &outcome);
            }
            way.answered(Counter::Append, begun, &outcome);
            way.tally.counts().appended(bytes, &outcome);
            done(outcome);
        });
        if self.way.limiting.are_any() {
            return self.ticket(Submitted::Append(offset, data, flags, done)).pass();
        }
        zones.submit_append(offset, data, flags, done);
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        if self.way.limiting.are_any() {
            self.way.limiting.end_way();
        }
    }
}
