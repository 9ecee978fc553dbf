//! A device as it is at the other end of an export.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{self, JoinHandle};

use freestone_core::device::zoned::{AppendCompletion, ZoneOp, Zoned};
use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, Flags, Geometry, IoBuf, Op, Request, Result, Tried, Zone,
};

/// A client of an export, which carries one request at a time.
pub trait Carrier: Send {
    /// Does a request that a block layer would let pass.
    ///
    /// # Errors
    /// As the client was told.
    fn carry(&mut self, request: &Request, data: &mut IoBuf) -> Result<()>;

    /// Zones from the one that holds the byte `offset` on, `most` at most.
    ///
    /// # Errors
    /// As the client was told.
    fn report(&mut self, _offset: u64, _most: usize) -> Result<Vec<Zone>> {
        Err(Error::Unsupported)
    }

    /// Changes the zone that begins at `offset`; all without one: they are reset.
    ///
    /// # Errors
    /// As the client was told.
    fn zone_op(&mut self, _op: ZoneOp, _offset: Option<u64>) -> Result<()> {
        Err(Error::Unsupported)
    }

    /// Where the data went.
    ///
    /// # Errors
    /// As the client was told.
    fn append(&mut self, _zone: u64, _data: &[u8]) -> Result<u64> {
        Err(Error::Unsupported)
    }
}

type Job = Box<dyn FnOnce(&mut dyn Carrier) + Send>;

/// A device that is used through an export, with a thread for each of its clients. What no block
/// layer lets pass is refused here, as it is there. With one client requests keep their order.
pub struct Through {
    inner: Arc<dyn Device>,
    clients: Vec<Mutex<mpsc::Sender<Job>>>,
    next: AtomicUsize,
    threads: Vec<JoinHandle<()>>,
    /// The export, which ends after its clients.
    _export: Box<dyn Send + Sync>,
}

impl Through {
    /// `inner` through `export`.
    pub fn new(
        inner: Arc<dyn Device>,
        carriers: Vec<Box<dyn Carrier>>,
        export: Box<dyn Send + Sync>,
    ) -> Self {
        let (mut clients, mut threads) = (Vec::new(), Vec::new());
        for mut carrier in carriers {
            let (sender, jobs) = mpsc::channel::<Job>();
            clients.push(Mutex::new(sender));
            threads.push(thread::spawn(move || jobs.into_iter().for_each(|job| job(&mut *carrier))));
        }
        Self { inner, clients, next: AtomicUsize::new(0), threads, _export: export }
    }

    fn give(&self, job: Job) {
        let client = &self.clients[self.next.fetch_add(1, Ordering::SeqCst) % self.clients.len()];
        // A client whose thread has panicked answers nothing; who waits says so.
        let _ = client.lock().unwrap_or_else(PoisonError::into_inner).send(job);
    }

    /// Has it done, and waits.
    fn ask<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut dyn Carrier) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (tell, told) = mpsc::channel();
        self.give(Box::new(move |carrier| drop(tell.send(job(carrier)))));
        told.recv().unwrap_or(Err(Error::Gone))
    }

    fn zone_size(&self) -> Result<u64> {
        self.geometry().zones.map(|zones| zones.zone_size).ok_or(Error::Unsupported)
    }

    /// A write that goes beyond its zone is not one request for any driver.
    fn check(&self, request: &Request) -> Result<()> {
        request.check(&self.geometry())?;
        let Ok(zone) = self.zone_size() else { return Ok(()) };
        if request.op == Op::Write && request.offset / zone != (request.offset + request.len - 1) / zone {
            return Err(Error::ZoneBoundary);
        }
        Ok(())
    }

    /// What a driver makes no request of.
    fn check_zone(&self, offset: u64) -> Result<()> {
        if offset >= self.geometry().size {
            return Err(Error::OutOfRange);
        }
        if offset.is_multiple_of(self.zone_size()?) { Ok(()) } else { Err(Error::Misaligned) }
    }
}

impl Drop for Through {
    fn drop(&mut self) {
        self.clients.clear();
        for thread in self.threads.drain(..) {
            let ended = thread.join();
            assert!(ended.is_ok() || thread::panicking(), "a client's thread has panicked");
        }
    }
}

impl Device for Through {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn try_io(&self, request: &Request, _: Buffer<'_>) -> Result<Tried> {
        self.check(request)?;
        Ok(Tried::WouldBlock)
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        if let Err(error) = self.check(&request) {
            return done.complete(Err(error), buffer);
        }
        self.give(Box::new(move |carrier| {
            let outcome = carrier.carry(&request, &mut buffer);
            done.complete(outcome, buffer);
        }));
    }

    fn zoned(&self) -> Option<&dyn Zoned> {
        self.inner.zoned().map(|_| self as &dyn Zoned)
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.inner.extents(offset, len, row)
    }
}

impl Zoned for Through {
    fn report(&self, offset: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()> {
        let (geometry, size) = (self.geometry(), self.zone_size()?);
        if offset >= geometry.size {
            return Err(Error::OutOfRange);
        }
        let most = geometry.size.div_ceil(size) as usize;
        for mut zone in self.ask(move |carrier| carrier.report(offset, most))? {
            // What a driver knows without being told.
            zone.len = size.min(geometry.size - zone.start);
            if !row(zone) {
                break;
            }
        }
        Ok(())
    }

    fn zone_op(&self, op: ZoneOp, offset: u64) -> Result<()> {
        self.check_zone(offset)?;
        self.ask(move |carrier| carrier.zone_op(op, Some(offset)))
    }

    fn reset_all(&self) -> Result<()> {
        self.ask(|carrier| carrier.zone_op(ZoneOp::Reset, None))
    }

    fn try_append(&self, _: u64, _: &[u8], _: Flags) -> Result<Option<u64>> {
        Ok(None)
    }

    fn submit_append(&self, offset: u64, data: IoBuf, _: Flags, done: AppendCompletion) {
        let block = u64::from(self.geometry().logical_block);
        let whole = !data.is_empty() && (data.len() as u64).is_multiple_of(block);
        if let Err(error) = self.check_zone(offset).and(if whole { Ok(()) } else { Err(Error::Misaligned) }) {
            return done(Err(error));
        }
        self.give(Box::new(move |carrier| done(carrier.append(offset, &data))));
    }
}
