//! A device over another one, whose behavior a test can change at any time.

use std::any::Any;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use freestone_core::device::zoned::{AppendCompletion, Zone, ZoneGeometry, ZoneOp, Zoned};
use freestone_core::device::{
    Buffer, Change, Changes, Completion, Device, Error, Extent, Flags, Geometry, IoBuf, Op, Request, Result,
    TryResult, range_end,
};
use freestone_core::sync::Mutex;

use crate::Model;

/// Byte with which a failed read fills its buffer.
pub const SPOILT: u8 = 0xEE;

/// How a [`TestDevice`] executes requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// Tries are passed on. Submitted requests complete at once.
    Inline,
    /// Like `Inline`, but a try executes at most this number of bytes. Zoned devices get whole requests.
    Partly(u64),
    /// Tries return "would block". Submitted requests complete at once.
    Submitted,
    /// Tries return "would block". Each submitted request completes on a new thread.
    Thread,
    /// Like `Thread`, after this time.
    Delayed(Duration),
    /// Tries return "would block". The test completes submitted requests.
    Held,
    /// Every second try is executed as in `Partly`, except flushes. The others are executed as in `Held`.
    Mixed(u64),
}

type ReshapeHook = Box<dyn Fn(&mut Geometry) + Send + Sync>;
type SubmittedHook<D> = Box<dyn Fn(&TestDevice<D>, &Request) + Send + Sync>;
type RequestHook = Box<dyn Fn(&Request) + Send + Sync>;
type DoneHook = Arc<dyn Fn(&Request, &[u8]) + Send + Sync>;
type TryHook<D> = Box<dyn Fn(&D, &Request, Buffer<'_>) -> Result<TryResult> + Send + Sync>;
type SubmitHook<D> = Box<dyn Fn(&Arc<D>, Request, IoBuf, Completion) + Send + Sync>;
/// Completes a held request, or drops its completion if the argument is true.
type HeldCompletion = Box<dyn FnOnce(bool) + Send>;

/// A device over `inner`. The builder functions add hooks and change the geometry. The [`Manner`] decides
/// whether tries return "would block", and when submitted requests complete. Requests always take effect on
/// `inner` in order of arrival.
pub struct TestDevice<D: Device + ?Sized = Model> {
    inner: Arc<D>,
    reshape: Option<ReshapeHook>,
    on_request: Option<RequestHook>,
    on_try: Option<TryHook<D>>,
    on_submit: Option<SubmitHook<D>>,
    on_done: Option<DoneHook>,
    on_extents: Option<Box<dyn Fn() + Send + Sync>>,
    on_submitted: Option<SubmittedHook<D>>,
    tries: AtomicU64,
    state: Arc<Mutex<State>>,
    /// Offset of a bad byte: requests that include the byte fail with [`Error::Media`], as do extents from
    /// this offset on. Changes from the byte before fail with [`Error::Gone`]. `u64::MAX` disables this.
    pub bad_byte: Arc<AtomicU64>,
    /// True if the next try must panic.
    pub panics: AtomicBool,
    /// Requests that were executed inline or submitted, including appends.
    pub log: Mutex<Vec<Request>>,
    pub prefetched: Mutex<Vec<(u64, u64)>>,
    /// Value that is dropped after `inner`.
    _owned: Option<Box<dyn Any + Send + Sync>>,
}

struct State {
    manner: Manner,
    held: Vec<(Request, HeldCompletion)>,
}

impl TestDevice<Model> {
    /// Returns a memory device of `size` zero bytes, with a volatile cache.
    pub fn new(size: u64) -> Arc<Self> {
        Self::with(size, |_| {})
    }

    pub fn with(size: u64, change: impl Fn(&mut Geometry) + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self::over(Arc::new(Model::new(size as usize, 512).with_zeroes_as_data())).shaped(
            move |geometry| {
                geometry.physical_block = 4096;
                (geometry.io_min, geometry.io_opt, geometry.discard_granularity) = (4096, 4096, 4096);
                geometry.volatile_cache = true;
                change(geometry);
            },
        ))
    }

    /// Returns a device whose geometry has one zone, without zone operations. Exports use only the geometry.
    pub fn zoned(size: u64) -> Arc<Self> {
        Self::with(size, move |geometry| {
            let limits =
                ZoneGeometry { zone_size: size, nr_zones: 1, max_open: 0, max_active: 0, max_append: 0 };
            geometry.zones = Some(limits);
        })
    }
}

impl<D: Device + ?Sized> TestDevice<D> {
    pub fn over(inner: Arc<D>) -> Self {
        Self {
            inner,
            reshape: None,
            on_request: None,
            on_try: None,
            on_submit: None,
            on_done: None,
            on_extents: None,
            on_submitted: None,
            tries: AtomicU64::new(0),
            state: Arc::new(Mutex::new(State { manner: Manner::Inline, held: Vec::new() })),
            bad_byte: Arc::new(AtomicU64::new(u64::MAX)),
            panics: AtomicBool::new(false),
            log: Mutex::default(),
            prefetched: Mutex::default(),
            _owned: None,
        }
    }

    #[must_use]
    pub fn shaped(mut self, change: impl Fn(&mut Geometry) + Send + Sync + 'static) -> Self {
        self.reshape = Some(Box::new(change));
        self
    }

    #[must_use]
    pub fn with_manner(self, manner: Manner) -> Self {
        self.set(manner);
        self
    }

    #[must_use]
    pub fn with_bad_byte(self, offset: Option<u64>) -> Self {
        self.bad_byte.store(offset.unwrap_or(u64::MAX), SeqCst);
        self
    }

    /// Calls `hook` before each request that is executed inline or submitted.
    #[must_use]
    pub fn on_request(mut self, hook: impl Fn(&Request) + Send + Sync + 'static) -> Self {
        self.on_request = Some(Box::new(hook));
        self
    }

    /// Replaces `try_io` of `inner`. The manner then applies only to submitted requests.
    #[must_use]
    pub fn on_try(
        mut self,
        hook: impl Fn(&D, &Request, Buffer<'_>) -> Result<TryResult> + Send + Sync + 'static,
    ) -> Self {
        self.on_try = Some(Box::new(hook));
        self
    }

    /// Replaces `submit` of `inner`.
    #[must_use]
    pub fn on_submit(
        mut self,
        hook: impl Fn(&Arc<D>, Request, IoBuf, Completion) + Send + Sync + 'static,
    ) -> Self {
        self.on_submit = Some(Box::new(hook));
        self
    }

    /// Calls `hook` after each successful request, with the data of a write.
    #[must_use]
    pub fn on_done(mut self, hook: impl Fn(&Request, &[u8]) + Send + Sync + 'static) -> Self {
        self.on_done = Some(Arc::new(hook));
        self
    }

    /// Calls `hook` after the extents of a range are determined, before they are reported.
    #[must_use]
    pub fn on_extents(mut self, hook: impl Fn() + Send + Sync + 'static) -> Self {
        self.on_extents = Some(Box::new(hook));
        self
    }

    /// Calls `hook` after each submitted request.
    #[must_use]
    pub fn on_submitted(mut self, hook: impl Fn(&Self, &Request) + Send + Sync + 'static) -> Self {
        self.on_submitted = Some(Box::new(hook));
        self
    }

    /// Keeps `owned` until `inner` is dropped.
    #[must_use]
    pub fn owning(self, owned: impl Any + Send + Sync) -> Self {
        Self { _owned: Some(Box::new(owned)), ..self }
    }

    pub fn set(&self, manner: Manner) {
        self.state.lock().manner = manner;
    }

    /// Returns the logged requests with this operation.
    pub fn requests(&self, op: Op) -> Vec<Request> {
        self.log.lock().iter().copied().filter(|request| request.op == op).collect()
    }

    pub fn held(&self) -> Vec<Request> {
        self.state.lock().held.iter().map(|(request, _)| *request).collect()
    }

    /// Completes the held request at `index`.
    pub fn release(&self, index: usize) {
        assert!(self.release_by(|_| (index, false)), "no request is held");
    }

    pub fn release_all_backwards(&self) {
        while self.release_by(|held| (held - 1, false)) {}
    }

    /// Drops the held requests without a result, so that they complete with Gone.
    pub fn drop_all(&self) {
        while self.release_by(|_| (0, true)) {}
    }

    /// Completes or drops one held request. `choose` receives the number of held requests, and returns the
    /// index, and true to drop the request. Returns false if no request is held.
    pub fn release_by(&self, choose: impl FnOnce(usize) -> (usize, bool)) -> bool {
        let mut state = self.state.lock();
        if state.held.is_empty() {
            return false;
        }
        let (index, drops) = choose(state.held.len());
        let (_, complete) = state.held.remove(index);
        drop(state);
        complete(drops);
        true
    }

    fn called(&self, request: &Request) {
        if let Some(hook) = &self.on_request {
            hook(request);
        }
    }

    fn record(&self, request: Request) {
        self.log.lock().push(request);
    }

    fn submitted(&self, request: &Request) {
        if let Some(hook) = &self.on_submitted {
            hook(self, request);
        }
    }

    fn inner_zones(&self) -> Result<&dyn Zoned> {
        self.inner.zoned().ok_or(Error::Unsupported)
    }
}

/// Returns a function that completes a submitted request by `finish` as the manner requires.
fn completer(state: &Arc<Mutex<State>>, request: Request) -> impl FnOnce(HeldCompletion) + Send + use<> {
    let state = Arc::clone(state);
    move |finish| {
        let mut state = state.lock();
        match state.manner {
            Manner::Held | Manner::Mixed(_) => state.held.push((request, finish)),
            Manner::Thread => drop(thread::spawn(move || finish(false))),
            Manner::Delayed(time) => {
                thread::spawn(move || {
                    thread::sleep(time);
                    finish(false);
                });
            }
            Manner::Inline | Manner::Partly(_) | Manner::Submitted => {
                drop(state);
                finish(false);
            }
        }
    }
}

/// Fails if the request includes the bad byte.
fn check_byte(bad: &AtomicU64, request: &Request) -> Result<()> {
    let range = request.offset..request.offset + request.len;
    if range.contains(&bad.load(SeqCst)) { Err(Error::Media) } else { Ok(()) }
}

impl<D: Device + ?Sized> Deref for TestDevice<D> {
    type Target = D;

    fn deref(&self) -> &D {
        &self.inner
    }
}

impl<D: Device + ?Sized> Device for TestDevice<D> {
    fn geometry(&self) -> Geometry {
        let mut geometry = self.inner.geometry();
        if let Some(change) = &self.reshape {
            change(&mut geometry);
        }
        geometry
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        assert!(!self.panics.swap(false, SeqCst), "injected");
        request.check(&self.geometry())?;
        match &buffer {
            Buffer::None => assert!(!matches!(request.op, Op::Read | Op::Write)),
            Buffer::Read(buffer) => assert_eq!(buffer.len() as u64, request.len),
            Buffer::Write(buffer) => assert_eq!(buffer.len() as u64, request.len),
        }
        let manner = self.state.lock().manner;
        let is_whole = self.on_try.is_some() || self.geometry().zones.is_some();
        let most = match manner {
            Manner::Partly(most) | Manner::Mixed(most) if !is_whole => most,
            _ => u64::MAX,
        };
        let passes = match manner {
            Manner::Inline | Manner::Partly(_) => true,
            Manner::Mixed(_) => request.op != Op::Flush && self.tries.fetch_add(1, SeqCst) % 2 == 1,
            _ => self.on_try.is_some(),
        };
        if !passes {
            return Ok(TryResult::WouldBlock);
        }
        self.called(request);
        let part = Request { len: request.len.min(most), ..*request };
        let buffer = match buffer {
            Buffer::None => Buffer::None,
            Buffer::Read(out) => Buffer::Read(&mut out[..part.len as usize]),
            Buffer::Write(data) => Buffer::Write(&data[..part.len as usize]),
        };
        let written = if let Buffer::Write(data) = buffer { data } else { &[] };
        let tried = match (&self.on_try, check_byte(&self.bad_byte, &part), buffer) {
            (Some(hook), _, buffer) => hook(&self.inner, &part, buffer).and_then(|tried| {
                let len = match tried {
                    TryResult::Done => part.len,
                    TryResult::Partly(len) => len,
                    TryResult::WouldBlock => 0,
                };
                check_byte(&self.bad_byte, &Request { len, ..part }).map(|()| tried)
            }),
            (None, Ok(()), buffer) => self.inner.try_io(&part, buffer),
            (None, Err(error), Buffer::Read(out)) => {
                out.fill(SPOILT);
                Err(error)
            }
            (None, Err(error), _) => Err(error),
        };
        let done = match tried {
            Ok(TryResult::WouldBlock) => return tried,
            Ok(TryResult::Partly(len)) => Request { len, ..part },
            Ok(TryResult::Done) | Err(_) => part,
        };
        self.record(done);
        tried?;
        if let Some(hook) = &self.on_done {
            hook(&done, written);
        }
        Ok(if done.len < request.len { TryResult::Partly(done.len) } else { TryResult::Done })
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.called(&request);
        self.record(request);
        let (completer, bad) = (completer(&self.state, request), Arc::clone(&self.bad_byte));
        let on_done = self.on_done.clone();
        let done = Completion::new(move |outcome: Result<()>, mut buffer| {
            if let (Ok(()), Some(hook)) = (outcome, on_done) {
                hook(&request, if request.op == Op::Write { &buffer } else { &[] });
            }
            completer(Box::new(move |drops| {
                let outcome = outcome.and_then(|()| check_byte(&bad, &request));
                if outcome.is_err() && request.op == Op::Read {
                    buffer.fill(SPOILT);
                }
                if !drops {
                    done.complete(outcome, buffer);
                }
            }));
        });
        let checked = request.check(&self.geometry()).and_then(|()| check_byte(&self.bad_byte, &request));
        match (checked, &self.on_submit) {
            (Ok(()), Some(hook)) => hook(&self.inner, request, buffer, done),
            (Ok(()), None) => self.inner.submit(request, buffer, done),
            (Err(error), _) => done.complete(Err(error), buffer),
        }
        self.submitted(&request);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        range_end(offset, len, self.geometry().size)?;
        if self.bad_byte.load(SeqCst) == offset {
            return Err(Error::Media);
        }
        let Some(hook) = &self.on_extents else { return self.inner.extents(offset, len, row) };
        let mut rows = Vec::new();
        self.inner.extents(offset, len, &mut |extent| {
            rows.push(extent);
            true
        })?;
        hook();
        let mut described = 0;
        for extent in rows {
            described += extent.len;
            if !row(extent) {
                break;
            }
        }
        Ok(described)
    }

    fn prefetch(&self, offset: u64, len: u64) {
        self.prefetched.lock().push((offset, len));
        self.inner.prefetch(offset, len);
    }

    fn changes(&self) -> Option<&dyn Changes> {
        self.inner.changes().map(|_| self as &dyn Changes)
    }

    fn zoned(&self) -> Option<&dyn Zoned> {
        self.geometry().zones.map(|_| self as &dyn Zoned)
    }
}

impl<D: Device + ?Sized> Changes for TestDevice<D> {
    fn changes(&self, offset: u64, len: u64, row: &mut dyn FnMut(Change) -> bool) -> Result<u64> {
        if self.bad_byte.load(SeqCst) == offset + 1 {
            return Err(Error::Gone);
        }
        self.inner.changes().ok_or(Error::Unsupported)?.changes(offset, len, row)
    }
}

impl<D: Device + ?Sized> Zoned for TestDevice<D> {
    fn report(&self, offset: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()> {
        self.inner_zones()?.report(offset, row)
    }

    fn zone_op(&self, op: ZoneOp, offset: u64) -> Result<()> {
        self.inner_zones()?.zone_op(op, offset)
    }

    fn reset_all(&self) -> Result<()> {
        self.inner_zones()?.reset_all()
    }

    fn try_append(&self, offset: u64, data: &[u8], flags: Flags) -> Result<Option<u64>> {
        if !matches!(self.state.lock().manner, Manner::Inline | Manner::Partly(_)) {
            return Ok(None);
        }
        self.record(Request::write(offset, data.len() as u64).with(flags));
        self.inner_zones()?.try_append(offset, data, flags)
    }

    /// Submits an append. The completion is always called: a held append cannot be dropped.
    fn submit_append(&self, offset: u64, data: IoBuf, flags: Flags, done: AppendCompletion) {
        let request = Request::write(offset, data.len() as u64).with(flags);
        self.record(request);
        let completer = completer(&self.state, request);
        match self.inner_zones() {
            Ok(zones) => {
                let done = Box::new(move |outcome| completer(Box::new(move |_| done(outcome))));
                zones.submit_append(offset, data, flags, done);
            }
            Err(error) => done(Err(error)),
        }
        self.submitted(&request);
    }
}
