//! The door of a test drive: counts what comes through, and can be shut until nobody is inside.
//!
//! It stands under the faults and the pace, which do everything at once and only answer late: so what is delayed or hangs
//! there is not waited for, and nothing that was begun before a loss of power arrives after it.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use freestone::device::zoned::{AppendCompletion, Zone, ZoneOp, Zoned};
use freestone::device::{
    Buffer, Changes, Completion, Counted, Device, Error, Extent, Flags, Geometry, IoBuf, OpCounts, Request,
    Result, Tried,
};

/// In [`State::inside`]: nobody comes in any more.
const SHUT: u64 = 1 << 63;

/// A device that can be shut.
pub struct Gate {
    inner: Arc<dyn Device>,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// Requests inside, and [`SHUT`].
    inside: AtomicU64,
    counts: OpCounts,
    /// Held to wait and to wake who waits.
    waiting: Mutex<()>,
    empty: Condvar,
}

/// A request inside.
struct Pass(Arc<State>);

/// The gate is shut until this is dropped.
pub struct Shut<'a>(&'a State);

impl Gate {
    /// Open.
    pub fn new(inner: Arc<dyn Device>) -> Self {
        Self { inner, state: Arc::default() }
    }

    /// What came through and how it ended.
    pub fn counts(&self) -> Counted {
        self.state.counts.snapshot()
    }

    /// Lets nobody in and waits until nobody is inside: `None` where that takes longer than `most`. Requests are answered
    /// [`Error::Gone`] meanwhile. One at a time.
    pub fn shut(&self, most: Duration) -> Option<Shut<'_>> {
        self.state.inside.fetch_or(SHUT, SeqCst);
        let shut = Shut(&self.state);
        let deadline = Instant::now() + most;
        // Nothing is guarded but the moment between a look and the wait.
        let mut waiting = self.state.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        while self.state.inside.load(SeqCst) != SHUT {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            waiting = self.state.empty.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(waiting);
        Some(shut)
    }

    fn enter(&self) -> Result<Pass> {
        let before = self.state.inside.fetch_add(1, SeqCst);
        let pass = Pass(Arc::clone(&self.state));
        if before & SHUT == 0 { Ok(pass) } else { Err(Error::Gone) }
    }

    fn zones(&self) -> Result<&dyn Zoned> {
        self.inner.zoned().ok_or(Error::Unsupported)
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if self.0.inside.fetch_sub(1, SeqCst) == SHUT | 1 {
            drop(self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner));
            self.0.empty.notify_all();
        }
    }
}

impl Drop for Shut<'_> {
    fn drop(&mut self) {
        self.0.inside.fetch_and(!SHUT, SeqCst);
    }
}

impl Device for Gate {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        let _pass = self.enter()?;
        let outcome = self.inner.try_io(request, buffer);
        self.state.counts.tried(request, &outcome);
        outcome
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let pass = match self.enter() {
            Ok(pass) => pass,
            Err(error) => return done.complete(Err(error), buffer),
        };
        let done = Completion::new(move |outcome, buffer| {
            pass.0.counts.answered(&request, &outcome);
            drop(pass);
            done.complete(outcome, buffer);
        });
        self.inner.submit(request, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let _pass = self.enter()?;
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

impl Zoned for Gate {
    fn report(&self, offset: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()> {
        self.zones()?.report(offset, row)
    }

    fn zone_op(&self, op: ZoneOp, offset: u64) -> Result<()> {
        let _pass = self.enter()?;
        self.zones()?.zone_op(op, offset)
    }

    fn reset_all(&self) -> Result<()> {
        let _pass = self.enter()?;
        self.zones()?.reset_all()
    }

    fn try_append(&self, offset: u64, data: &[u8], flags: Flags) -> Result<Option<u64>> {
        let _pass = self.enter()?;
        let outcome = self.zones()?.try_append(offset, data, flags);
        if !matches!(outcome, Ok(None)) {
            self.state.counts.appended(data.len() as u64, &outcome);
        }
        outcome
    }

    fn submit_append(&self, offset: u64, data: IoBuf, flags: Flags, done: AppendCompletion) {
        let (pass, zones) = match (self.enter(), self.zones()) {
            (Ok(pass), Ok(zones)) => (pass, zones),
            (Err(error), _) | (_, Err(error)) => return done(Err(error)),
        };
        let bytes = data.len() as u64;
        let done = Box::new(move |outcome| {
            pass.0.counts.appended(bytes, &outcome);
            drop(pass);
            done(outcome);
        });
        zones.submit_append(offset, data, flags, done);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex, PoisonError};
    use std::time::Duration;

    use freestone::device::{
        Blocking as _, Buffer, Completion, Device, Error, Extent, Flags, Geometry, IoBuf, Request, Result,
        Tried,
    };
    use freestone::null::{Config, Null};

    use super::Gate;

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
        let gate = Arc::new(Gate::new(Arc::clone(&slow) as Arc<dyn Device>));
        let writer = {
            let gate = Arc::clone(&gate);
            std::thread::spawn(move || gate.write_at(0, &[1; 512], Flags::empty()))
        };
        while slow.1.lock().unwrap().is_empty() {
            std::thread::yield_now();
        }
        assert!(gate.shut(Duration::from_millis(20)).is_none());
        // It is open again after that.
        assert_eq!(gate.extents(0, 512, &mut |_| true), Ok(512));
        let waits = {
            let gate = Arc::clone(&gate);
            std::thread::spawn(move || {
                let shut = gate.shut(Duration::from_secs(60)).expect("the writer ends");
                assert_eq!(gate.flush(), Err(Error::Gone));
                drop(shut);
            })
        };
        let (buffer, done) = slow.1.lock().unwrap().pop().unwrap();
        done.complete(Ok(()), buffer);
        assert_eq!(writer.join().unwrap(), Ok(()));
        waits.join().unwrap();
        assert_eq!((gate.counts().writes, gate.counts().written_bytes), (1, 512));
        // A completion that is dropped is an answer too.
        let writer = {
            let gate = Arc::clone(&gate);
            std::thread::spawn(move || gate.flush())
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
        assert!(gate.shut(Duration::ZERO).is_some());
    }
}
