//! Asking a device as an export does: a try, and what that leaves submitted; on the thread that
//! knows the world, on one of several, or by handing it on to a worker.

use std::panic::{self, AssertUnwindSafe};

use freestone::device::{Buffer, Completion, Device, IoBuf, Op, Request, Result as Answer, Tried};

use freestone_core::bytes::Bytes;
use freestone_core::workers::Workers;

use super::Event;
use crate::rt::sync::{Arc, mpsc};
use crate::rt::thread::{self, JoinHandle};
use crate::stack::Wrong;

/// A request to a device.
pub(super) struct Ask {
    /// Of the flight.
    pub id: u64,
    pub request: Request,
    /// What is written.
    pub data: Vec<u8>,
    pub device: Arc<dyn Device>,
    /// It is only submitted, without a try.
    pub submit: bool,
    /// A worker tries it.
    pub by: Option<Arc<Hands>>,
}

/// A user of a device that hands its request on.
pub(super) struct Hands {
    user: Bytes,
    workers: Workers,
}

impl Hands {
    pub fn new(device: &Arc<dyn Device>, workers: &Workers) -> Arc<Self> {
        Arc::new(Self { user: Bytes::new(Arc::clone(device)), workers: workers.clone() })
    }
}

/// What came of trying.
pub(super) enum Asked {
    /// With what was read.
    Answered(Answer<()>, Vec<u8>),
    Waits(Rest),
}

/// What is left to be submitted.
pub(super) struct Rest {
    id: u64,
    request: Request,
    owned: IoBuf,
    /// What was read before.
    head: Vec<u8>,
    device: Arc<dyn Device>,
    by: Option<Arc<Hands>>,
}

impl Ask {
    pub fn tries(self) -> Result<Asked, Wrong> {
        let Self { id, mut request, data, device, submit, by } = self;
        let mut head = vec![0; if request.op == Op::Read { request.len as usize } else { 0 }];
        let (mut from, mut tries) = (0, !submit && by.is_none());
        while tries {
            let part = match request.op {
                Op::Read => Buffer::Read(&mut head[from..]),
                Op::Write => Buffer::Write(&data[from..]),
                _ => Buffer::None,
            };
            match device.try_io(&request, part) {
                Ok(Tried::Done) => return Ok(Asked::Answered(Ok(()), head)),
                Ok(Tried::Partly(bytes)) => {
                    from += bytes as usize;
                    request = request.rest(bytes);
                }
                Ok(Tried::WouldBlock) => tries = false,
                Err(error) => return Ok(Asked::Answered(Err(error), Vec::new())),
            }
        }
        let owned = match request.op {
            Op::Read => IoBuf::zeroed(request.len as usize),
            Op::Write => IoBuf::copy_of(&data[from..]),
            _ => Ok(IoBuf::empty()),
        };
        let Ok(owned) = owned else { return Err(Wrong::Said("no memory for a request".into())) };
        head.truncate(from);
        Ok(Asked::Waits(Rest { id, request, owned, head, device, by }))
    }
}

impl Rest {
    pub fn submit(self, events: mpsc::Sender<Event>) {
        let Self { id, request, owned, mut head, device, by } = self;
        let done = Completion::new(move |answer, buffer: IoBuf| {
            head.extend_from_slice(&buffer);
            // Nobody listens when the run has ended.
            let _ = events.send(Event::Answer(id, answer, head));
        });
        match by {
            Some(by) => by.user.hand_on(&by.workers, &Arc::default(), request, owned, done),
            None => device.submit(request, owned, done),
        }
    }
}

/// A thread that asks.
pub(super) struct Asker {
    pub asks: mpsc::Sender<Ask>,
    thread: JoinHandle<()>,
}

impl Asker {
    pub fn new(events: &mpsc::Sender<Event>) -> Self {
        let (asks, todo) = mpsc::channel::<Ask>();
        let events = events.clone();
        let thread = thread::spawn(move || {
            while let Ok(ask) = todo.recv() {
                let id = ask.id;
                let asked = panic::catch_unwind(AssertUnwindSafe(|| match ask.tries()? {
                    Asked::Answered(answer, bytes) => Ok(Some(Event::Answer(id, answer, bytes))),
                    Asked::Waits(rest) => {
                        rest.submit(events.clone());
                        Ok(None)
                    }
                }));
                let event = match asked {
                    Ok(Ok(event)) => event,
                    Ok(Err(wrong)) => Some(Event::Wrong(wrong)),
                    Err(_) => Some(Event::Wrong(Wrong::Said("a request panicked".into()))),
                };
                if event.into_iter().chain([Event::Asked(id)]).any(|event| events.send(event).is_err()) {
                    return;
                }
            }
        });
        Self { asks, thread }
    }

    /// After its last answer.
    pub fn end(self) {
        drop(self.asks);
        // What panicked there was told.
        let _ = self.thread.join();
    }
}
