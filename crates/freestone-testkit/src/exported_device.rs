//! A device that is accessed through an export, such as NBD or vhost-user.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};

use freestone_core::device::zoned::{AppendCompletion, ZoneOp, Zoned};
use freestone_core::device::{
    Buffer, Completion, Device, Error, Flags, IoBuf, Op, Request, Result, TryResult, Zone, forward_device,
};
use freestone_core::sync::Mutex;

/// A client of an export that runs one request at a time, for [`ExportedDevice`].
pub trait ExportClient: Send {
    /// Sends a valid request and waits for its completion. `data` is the buffer of a read or write.
    ///
    /// # Errors
    /// Returns the error that the client received.
    fn run_request(&mut self, request: &Request, data: &mut IoBuf) -> Result<()>;

    /// Returns at most `most` zones, from the zone that contains byte `offset` on.
    ///
    /// # Errors
    /// Returns the error that the client received; by default, zones are not supported.
    fn report(&mut self, _offset: u64, _most: usize) -> Result<Vec<Zone>> {
        Err(Error::Unsupported)
    }

    /// Changes the condition of the zone that starts at `offset`, or resets all zones if `offset`
    /// is `None`.
    ///
    /// # Errors
    /// Returns the error that the client received; by default, zones are not supported.
    fn zone_op(&mut self, _op: ZoneOp, _offset: Option<u64>) -> Result<()> {
        Err(Error::Unsupported)
    }

    /// Appends to the zone that starts at `_zone`. Returns the offset of the data in bytes.
    ///
    /// # Errors
    /// Returns the error that the client received; by default, zones are not supported.
    fn append(&mut self, _zone: u64, _data: &[u8]) -> Result<u64> {
        Err(Error::Unsupported)
    }
}

type Job = Box<dyn FnOnce(&mut dyn ExportClient) + Send>;

/// A device that is accessed through an export, with a thread per client. Like the kernel's block
/// layer, it refuses invalid requests itself. With one client, requests keep their order.
pub struct ExportedDevice {
    inner: Arc<dyn Device>,
    clients: Vec<Mutex<mpsc::Sender<Job>>>,
    next: AtomicUsize,
    threads: Vec<JoinHandle<()>>,
    /// The export, which must be dropped after its clients.
    _export: Box<dyn Send + Sync>,
}

impl ExportedDevice {
    /// Returns the device `inner` as clients of `export` access it.
    pub fn new(
        inner: Arc<dyn Device>,
        export_clients: Vec<Box<dyn ExportClient>>,
        export: Box<dyn Send + Sync>,
    ) -> Self {
        let (mut clients, mut threads) = (Vec::new(), Vec::new());
        for mut client in export_clients {
            let (sender, jobs) = mpsc::channel::<Job>();
            clients.push(Mutex::new(sender));
            threads.push(thread::spawn(move || jobs.into_iter().for_each(|job| job(&mut *client))));
        }
        Self { inner, clients, next: AtomicUsize::new(0), threads, _export: export }
    }

    fn send_job(&self, job: Job) {
        let client = &self.clients[self.next.fetch_add(1, Ordering::SeqCst) % self.clients.len()];
        // If the thread of the client has panicked, the closed result channel shows that.
        let _ = client.lock().send(job);
    }

    /// Runs a job on a client and waits for its result. Returns [`Error::Gone`] if the client's
    /// thread has panicked.
    fn run_job<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut dyn ExportClient) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (sender, receiver) = mpsc::channel();
        self.send_job(Box::new(move |client| drop(sender.send(job(client)))));
        receiver.recv().unwrap_or(Err(Error::Gone))
    }

    fn zone_size(&self) -> Result<u64> {
        self.geometry().zones.map(|zones| zones.zone_size).ok_or(Error::Unsupported)
    }

    /// Refuses writes across a zone boundary: a driver would not send these as one request.
    fn check(&self, request: &Request) -> Result<()> {
        request.check(&self.geometry())?;
        let Ok(zone) = self.zone_size() else { return Ok(()) };
        if request.op == Op::Write && request.offset / zone != (request.offset + request.len - 1) / zone {
            return Err(Error::ZoneBoundary);
        }
        Ok(())
    }

    /// Refuses zone offsets for which a driver would not send a request: beyond the end, or not at
    /// the start of a zone.
    fn check_zone(&self, offset: u64) -> Result<()> {
        if offset >= self.geometry().size {
            return Err(Error::OutOfRange);
        }
        if offset.is_multiple_of(self.zone_size()?) { Ok(()) } else { Err(Error::Misaligned) }
    }
}

impl Drop for ExportedDevice {
    fn drop(&mut self) {
        self.clients.clear();
        for thread in self.threads.drain(..) {
            let ended = thread.join();
            assert!(ended.is_ok() || thread::panicking(), "a client's thread has panicked");
        }
    }
}

impl Device for ExportedDevice {
    forward_device!(|device| device.inner => geometry, extents; prefetch: none, zoned: self, changes: none);

    fn try_io(&self, request: &Request, _: Buffer<'_>) -> Result<TryResult> {
        self.check(request)?;
        Ok(TryResult::WouldBlock)
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        if let Err(error) = self.check(&request) {
            return done.complete(Err(error), buffer);
        }
        self.send_job(Box::new(move |client| {
            let outcome = client.run_request(&request, &mut buffer);
            done.complete(outcome, buffer);
        }));
    }
}

impl Zoned for ExportedDevice {
    fn report(&self, offset: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()> {
        let (geometry, size) = (self.geometry(), self.zone_size()?);
        if offset >= geometry.size {
            return Err(Error::OutOfRange);
        }
        let most = geometry.size.div_ceil(size) as usize;
        for mut zone in self.run_job(move |client| client.report(offset, most))? {
            // Drivers know the zone length, so the client need not report it.
            zone.len = size.min(geometry.size - zone.start);
            if !row(zone) {
                break;
            }
        }
        Ok(())
    }

    fn zone_op(&self, op: ZoneOp, offset: u64) -> Result<()> {
        self.check_zone(offset)?;
        self.run_job(move |client| client.zone_op(op, Some(offset)))
    }

    fn reset_all(&self) -> Result<()> {
        self.run_job(|client| client.zone_op(ZoneOp::Reset, None))
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
        self.send_job(Box::new(move |client| done(client.append(offset, &data))));
    }
}
