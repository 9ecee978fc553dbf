//! Issues requests as an export does: first a try, then a submission of the part that the try did
//! not complete. Requests are issued on the runner's thread, on one of several request threads, or
//! on a worker.

use std::panic::{self, AssertUnwindSafe};

use freestone::device::{Buffer, Completion, Device, IoBuf, Op, Request, Result as Answer, TryResult};

use freestone_core::bytes::Bytes;
use freestone_core::workers::Workers;

use super::Event;
use crate::rt::sync::{Arc, mpsc};
use crate::rt::thread::{self, JoinHandle};
use crate::stack::Finding;

pub(super) struct DeviceRequest {
    /// Number of the request, given by the runner.
    pub id: u64,
    pub request: Request,
    /// Data to write; empty for other operations.
    pub data: Vec<u8>,
    pub device: Arc<dyn Device>,
    /// Submits the request without a preceding try.
    pub submit: bool,
    /// Worker that executes the request; `None` submits the request to the device directly.
    pub worker: Option<Arc<WorkerUser>>,
}

/// A user of a device that hands its requests to worker threads.
pub(super) struct WorkerUser {
    user: Bytes,
    workers: Workers,
}

impl WorkerUser {
    pub fn new(device: &Arc<dyn Device>, workers: &Workers) -> Arc<Self> {
        Arc::new(Self { user: Bytes::new(Arc::clone(device)), workers: workers.clone() })
    }
}

pub(super) enum TryOutcome {
    /// The try completed the whole request: its result, and the bytes read.
    Completed(Answer<()>, Vec<u8>),
    Blocked(Remainder),
}

/// The part of a request that the try did not complete and that must be submitted.
pub(super) struct Remainder {
    id: u64,
    request: Request,
    owned: IoBuf,
    /// Bytes read by the try before the remainder.
    head: Vec<u8>,
    device: Arc<dyn Device>,
    worker: Option<Arc<WorkerUser>>,
}

impl DeviceRequest {
    pub fn try_inline(self) -> Result<TryOutcome, Finding> {
        let Self { id, mut request, data, device, submit, worker } = self;
        let mut head = vec![0; if request.op == Op::Read { request.len as usize } else { 0 }];
        let (mut from, mut tries) = (0, !submit && worker.is_none());
        while tries {
            let part = match request.op {
                Op::Read => Buffer::Read(&mut head[from..]),
                Op::Write => Buffer::Write(&data[from..]),
                _ => Buffer::None,
            };
            match device.try_io(&request, part) {
                Ok(TryResult::Done) => return Ok(TryOutcome::Completed(Ok(()), head)),
                Ok(TryResult::Partly(bytes)) => {
                    from += bytes as usize;
                    request = request.rest(bytes);
                }
                Ok(TryResult::WouldBlock) => tries = false,
                Err(error) => return Ok(TryOutcome::Completed(Err(error), Vec::new())),
            }
        }
        let owned = match request.op {
            Op::Read => IoBuf::zeroed(request.len as usize),
            Op::Write => IoBuf::copy_of(&data[from..]),
            _ => Ok(IoBuf::empty()),
        };
        let Ok(owned) = owned else { return Err(Finding::Message("no memory for a request".into())) };
        head.truncate(from);
        Ok(TryOutcome::Blocked(Remainder { id, request, owned, head, device, worker }))
    }
}

impl Remainder {
    pub fn submit(self, events: mpsc::Sender<Event>) {
        let Self { id, request, owned, mut head, device, worker } = self;
        let done = Completion::new(move |answer, buffer: IoBuf| {
            head.extend_from_slice(&buffer);
            // The runner no longer receives events after the end of the run.
            let _ = events.send(Event::Completed(id, answer, head));
        });
        match worker {
            Some(worker) => {
                worker.user.send_to_worker(&worker.workers, &Arc::default(), request, owned, done);
            }
            None => device.submit(request, owned, done),
        }
    }
}

pub(super) struct RequestThread {
    pub requests: mpsc::Sender<DeviceRequest>,
    thread: JoinHandle<()>,
}

impl RequestThread {
    pub fn new(events: &mpsc::Sender<Event>) -> Self {
        let (requests, todo) = mpsc::channel::<DeviceRequest>();
        let events = events.clone();
        let thread = thread::spawn(move || {
            while let Ok(device_request) = todo.recv() {
                let id = device_request.id;
                let outcome =
                    panic::catch_unwind(AssertUnwindSafe(|| match device_request.try_inline()? {
                        TryOutcome::Completed(answer, bytes) => Ok(Some(Event::Completed(id, answer, bytes))),
                        TryOutcome::Blocked(remainder) => {
                            remainder.submit(events.clone());
                            Ok(None)
                        }
                    }));
                let event = match outcome {
                    Ok(Ok(event)) => event,
                    Ok(Err(finding)) => Some(Event::Finding(finding)),
                    Err(_) => Some(Event::Finding(Finding::Message("a request panicked".into()))),
                };
                if event.into_iter().chain([Event::Released(id)]).any(|event| events.send(event).is_err()) {
                    return;
                }
            }
        });
        Self { requests, thread }
    }

    /// Ends the thread after its last completion, and joins it.
    pub fn end(self) {
        drop(self.requests);
        // The panic hook has already reported a panic of that thread.
        let _ = self.thread.join();
    }
}
