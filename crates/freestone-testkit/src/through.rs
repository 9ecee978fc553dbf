//! A device accessed through an export.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{self, JoinHandle};

use freestone_core::device::zoned::{AppendCompletion, ZoneOp, Zoned};
use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, Flags, Geometry, IoBuf, Op, Request, Result, Tried, Zone,
};

/// A client of an export that runs one request at a time.
pub trait Carrier: Send {
    /// Runs a valid request.
    ///
    /// # Errors
    /// The error that the client received.
    fn carry(&mut self, request: &Request, data: &mut IoBuf) -> Result<()>;

    /// Reports at most `most` zones, from the zone that contains byte `offset` on.
    ///
    /// # Errors
    /// The error that the client received.
    fn report(&mut self, _offset: u64, _most: usize) -> Result<Vec<Zone>> {
        Err(Error::Unsupported)
    }

    /// Changes the zone that begins at `offset`, or all zones for `None` (reset only).
    ///
    /// # Errors
    /// The error that the client received.
    fn zone_op(&mut self, _op: ZoneOp, _offset: Option<u64>) -> Result<()> {
        Err(Error::Unsupported)
    }

    /// Appends to a zone. Returns the offset of the data.
    ///
    /// # Errors
    /// The error that the client received.
    fn append(&mut self, _zone: u64, _data: &[u8]) -> Result<u64> {
        Err(Error::Unsupported)
    }
}

type Job = Box<dyn FnOnce(&mut dyn Carrier) + Send>;

/// A device accessed through an export, with a thread per client. Like a block layer, it refuses
/// invalid requests itself. With one client, requests keep their order.
pub struct Through {
    inner: Arc<dyn Device>,
    clients: Vec<Mutex<mpsc::Sender<Job>>>,
    next: AtomicUsize,
    threads: Vec<JoinHandle<()>>,
    /// The export, dropped after its clients.
    _export: Box<dyn Send + Sync>,
}

impl Through {
    /// Returns `inner` as seen through `export`.
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

    fn send_job(&self, job: Job) {
        let client = &self.clients[self.next.fetch_add(1, Ordering::SeqCst) % self.clients.len()];
        // If the client's thread has panicked, the receiver reports it.
        let _ = client.lock().unwrap_or_else(PoisonError::into_inner).send(job);
    }

    /// Runs a job on a client and waits for its result.
    fn run_job<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut dyn Carrier) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (sender, receiver) = mpsc::channel();
        self.send_job(Box::new(move |carrier| drop(sender.send(job(carrier)))));
        receiver.recv().unwrap_or(Err(Error::Gone))
    }

    fn zone_size(&self) -> Result<u64> {
        self.geometry().zones.map(|zones| zones.zone_size).ok_or(Error::Unsupported)
    }

    /// Refuses writes across a zone boundary, which a driver would not send as one request.
    fn check(&self, request: &Request) -> Result<()> {
        request.check(&self.geometry())?;
        let Ok(zone) = self.zone_size() else { return Ok(()) };
        if request.op == Op::Write && request.offset / zone != (request.offset + request.len - 1) / zone {
            return Err(Error::ZoneBoundary);
        }
        Ok(())
    }

    /// Refuses zone offsets for which a driver would not send a request.
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
        self.send_job(Box::new(move |carrier| {
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
        for mut zone in self.run_job(move |carrier| carrier.report(offset, most))? {
            // Drivers know the zone length without a report.
            zone.len = size.min(geometry.size - zone.start);
            if !row(zone) {
                break;
            }
        }
        Ok(())
    }

    fn zone_op(&self, op: ZoneOp, offset: u64) -> Result<()> {
        self.check_zone(offset)?;
        self.run_job(move |carrier| carrier.zone_op(op, Some(offset)))
    }

    fn reset_all(&self) -> Result<()> {
        self.run_job(|carrier| carrier.zone_op(ZoneOp::Reset, None))
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
        self.send_job(Box::new(move |carrier| done(carrier.append(offset, &data))));
    }
}
