//! Shared parts of the fault tests.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use freestone_core::device::{Blocking, Completion, Device, Flags, IoBuf, Request, Result};
use freestone_drive::faults::{Faults, Rules};
use freestone_testkit::TestDevice;

/// Deadline for any completion.
pub const PATIENCE: Duration = Duration::from_secs(20);
pub const BLOCK: usize = 4096;

pub fn rules(text: &str) -> Rules {
    text.parse().unwrap_or_else(|error| panic!("{error}"))
}

pub fn faults(inner: Arc<dyn Device>, text: &str) -> Faults {
    Faults::new(inner, rules(text), 42).expect("the timer starts")
}

/// A submitted request whose result may still be pending.
pub struct PendingRequest(mpsc::Receiver<(Result<()>, IoBuf)>);

pub fn submit(device: &dyn Device, request: Request, data: &[u8]) -> PendingRequest {
    let (tx, rx) = mpsc::channel();
    let done = Completion::new(move |outcome, buffer| tx.send((outcome, buffer)).unwrap_or_default());
    device.submit(request, IoBuf::copy_of(data).expect("memory"), done);
    PendingRequest(rx)
}

impl PendingRequest {
    pub fn wait(&self) -> Result<()> {
        self.0.recv_timeout(PATIENCE).expect("it is answered").0
    }

    pub fn is_open(&self) -> bool {
        self.poll().is_none()
    }

    /// Returns the result if the request has completed, else None.
    pub fn poll(&self) -> Option<Result<()>> {
        self.0.try_recv().ok().map(|(outcome, _)| outcome)
    }
}

pub fn read(device: &dyn Device, offset: u64, len: usize) -> Vec<u8> {
    let mut data = vec![0x5c; len];
    device.read_at(offset, &mut data).expect("it is read");
    data
}

pub fn write(device: &dyn Device, offset: u64, byte: u8, len: usize) -> Result<()> {
    device.write_at(offset, &vec![byte; len], Flags::empty())
}

/// Returns, for each rule, how often the rule fired.
pub fn fired(faults: &Faults) -> Vec<u64> {
    faults.counts().iter().map(|count| count.fired).collect()
}

/// Returns how many of the logged requests have FUA, and clears the log.
pub fn take_durable<D: Device + ?Sized>(device: &TestDevice<D>) -> usize {
    let log = std::mem::take(&mut *device.log.lock());
    log.iter().filter(|request| request.flags.contains(Flags::FUA)).count()
}
