//! Quiescing a test drive: a layer that counts what comes through, and can be shut until nobody is
//! inside.
//!
//! It stands under the faults and the pace, which do everything at once and only answer late: so
//! what is delayed or hangs there is not waited for, and nothing that was begun before a loss of
//! power arrives after it.
//!
//! Requests of different CPUs meet nowhere: who is inside is counted by CPU, and so is the
//! ownership of what counts it.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_utils::CachePadded;

use freestone_core::device::zoned::{AppendCompletion, Zone, ZoneOp, Zoned};
use freestone_core::device::{
    Buffer, Changes, Completion, Counted, Device, Error, Extent, Flags, Geometry, IoBuf, OpCounts, Request,
    Result, Tried,
};
use freestone_core::freeze_gate::{FreezeGate, UnderWay};
use freestone_core::per_cpu_arc::PerCpuArc;

/// A device that can be shut.
pub struct Quiesce {
    inner: Arc<dyn Device>,
    state: PerCpuArc<Shell>,
}

struct QuiesceState {
    gate: FreezeGate<()>,
    counts: OpCounts,
}

type Shell = CachePadded<Arc<QuiesceState>>;

/// A request inside, for as long as its call lasts.
struct Visit<'a> {
    counts: &'a OpCounts,
    _inside: UnderWay<'a, ()>,
}

/// A request inside that is answered later.
struct Stay(Arc<Shell>);

/// The device is shut until this is dropped.
pub struct Shut<'a>(&'a QuiesceState);

impl Quiesce {
    /// Open.
    pub fn new(inner: Arc<dyn Device>) -> Self {
        let state = Arc::new(QuiesceState { gate: FreezeGate::new(()), counts: OpCounts::default() });
        Self { inner, state: PerCpuArc::new(|| CachePadded::new(Arc::clone(&state))) }
    }

    /// What came through and how it ended.
    pub fn counts(&self) -> Counted {
        self.state.counts.snapshot()
    }

    /// Lets nobody in and waits until nobody is inside: `None` where that takes longer than `most`.
    /// Requests are answered [`Error::Gone`] meanwhile.
    pub fn shut(&self, most: Duration) -> Option<Shut<'_>> {
        let shut = Shut(&self.state);
        shut.0.gate.close_within(most).then_some(shut)
    }

    fn visit(&self) -> Result<Visit<'_>> {
        let state = &**self.state;
        state.gate.pass().map(|inside| Visit { counts: &state.counts, _inside: inside }).ok_or(Error::Gone)
    }

    fn stay(&self) -> Result<Stay> {
        let state = Arc::clone(&self.state);
        state.gate.enter(|open| open.map(|()| state.gate.begin())).ok_or(Error::Gone)?;
        Ok(Stay(state))
    }

    fn zones(&self) -> Result<&dyn Zoned> {
        self.inner.zoned().ok_or(Error::Unsupported)
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        self.0.gate.end();
    }
}

impl Shut<'_> {
    /// It is never opened again.
    pub fn for_good(self) {
        std::mem::forget(self);
    }
}

impl Drop for Shut<'_> {
    fn drop(&mut self) {
        // Nobody is held up here: who comes meanwhile is told that the device is gone.
        drop(self.0.gate.open());
    }
}

impl Device for Quiesce {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        let visit = self.visit()?;
        let outcome = self.inner.try_io(request, buffer);
        visit.counts.tried(request, &outcome);
        outcome
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let stay = match self.stay() {
            Ok(stay) => stay,
            Err(error) => return done.complete(Err(error), buffer),
        };
        let done = Completion::new(move |outcome, buffer| {
            stay.0.counts.answered(&request, &outcome);
            drop(stay);
            done.complete(outcome, buffer);
        });
        self.inner.submit(request, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let _visit = self.visit()?;
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

impl Zoned for Quiesce {
    fn report(&self, offset: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()> {
        self.zones()?.report(offset, row)
    }

    fn zone_op(&self, op: ZoneOp, offset: u64) -> Result<()> {
        let _visit = self.visit()?;
        self.zones()?.zone_op(op, offset)
    }

    fn reset_all(&self) -> Result<()> {
        let _visit = self.visit()?;
        self.zones()?.reset_all()
    }

    fn try_append(&self, offset: u64, data: &[u8], flags: Flags) -> Result<Option<u64>> {
        let visit = self.visit()?;
        let outcome = self.zones()?.try_append(offset, data, flags);
        if !matches!(outcome, Ok(None)) {
            visit.counts.appended(data.len() as u64, &outcome);
        }
        outcome
    }

    fn submit_append(&self, offset: u64, data: IoBuf, flags: Flags, done: AppendCompletion) {
        let (stay, zones) = match (self.stay(), self.zones()) {
            (Ok(stay), Ok(zones)) => (stay, zones),
            (Err(error), _) | (_, Err(error)) => return done(Err(error)),
        };
        let bytes = data.len() as u64;
        let done = Box::new(move |outcome| {
            stay.0.counts.appended(bytes, &outcome);
            drop(stay);
            done(outcome);
        });
        zones.submit_append(offset, data, flags, done);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex, PoisonError};
    use std::time::Duration;

    use super::Quiesce;
    use crate::null::{Config, Null};
    use freestone_core::device::{
        Blocking as _, Buffer, Completion, Device, Error, Extent, Flags, Geometry, IoBuf, Request, Result,
        Tried,
    };

    /// Keeps what is submitted.
    struct Slow(Null, Mutex<Vec<(IoBuf, Completion)>>);

    impl Device for Slow {
        fn geometry(&self) -> Geometry {
            self.0.geometry()
        }
        fn try_io(&self, _: &Request, _: Buffer<'_>) -> Result<Tried> {
            Ok(Tried::WouldBlock)
        }
        fn submit(&self, _: Request, buffer: IoBuf, done: Completion) {
            self.1.lock().unwrap_or_else(PoisonError::into_inner).push((buffer, done));
        }
        fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
            self.0.extents(offset, len, row)
        }
    }

    #[test]
    fn it_shuts_when_the_last_one_is_out() {
        let slow = Arc::new(Slow(Null::new(Config::plain(1 << 20, 512)).unwrap(), Mutex::default()));
        let quiesce = Arc::new(Quiesce::new(Arc::clone(&slow) as Arc<dyn Device>));
        let writer = {
            let quiesce = Arc::clone(&quiesce);
            std::thread::spawn(move || quiesce.write_at(0, &[1; 512], Flags::empty()))
        };
        while slow.1.lock().unwrap().is_empty() {
            std::thread::yield_now();
        }
        assert!(quiesce.shut(Duration::from_millis(20)).is_none());
        // It is open again after that.
        assert_eq!(quiesce.extents(0, 512, &mut |_| true), Ok(512));
        let waits = {
            let quiesce = Arc::clone(&quiesce);
            std::thread::spawn(move || {
                let shut = quiesce.shut(Duration::from_secs(60)).expect("the writer ends");
                assert_eq!(quiesce.flush(), Err(Error::Gone));
                drop(shut);
            })
        };
        let (buffer, done) = slow.1.lock().unwrap().pop().unwrap();
        done.complete(Ok(()), buffer);
        assert_eq!(writer.join().unwrap(), Ok(()));
        waits.join().unwrap();
        assert_eq!((quiesce.counts().writes, quiesce.counts().written_bytes), (1, 512));
        // A completion that is dropped is an answer too.
        let writer = {
            let quiesce = Arc::clone(&quiesce);
            std::thread::spawn(move || quiesce.flush())
        };
        loop {
            let mut held = slow.1.lock().unwrap();
            if held.pop().is_some() {
                break;
            }
            drop(held);
            std::thread::yield_now();
        }
        assert_eq!(writer.join().unwrap(), Err(Error::Gone));
        assert!(quiesce.shut(Duration::ZERO).is_some());
    }
}
