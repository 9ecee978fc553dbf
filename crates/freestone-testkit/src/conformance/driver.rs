//! Runs single requests in the ways that exports use: tries, submissions, or both.

use std::sync::mpsc;

use freestone_core::device::{self, Buffer, Completion, Device, Error, IoBuf, Op, Request, TryResult};

use super::{CheckResult, Options, Violation, ensure};
use crate::{Rng, first_difference};

/// Maximum number of tries per request. A device that makes endless tiny progress exceeds it and
/// violates the contract.
const MAX_TRIES: u32 = 1_000_000;

/// How a request is passed to the device: by tries, by a submission, or by both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SubmitMode {
    /// The request is tried until it completes or would block; then the rest is submitted.
    Try,
    /// The request is submitted at once, without a try.
    Submit,
    /// A random prefix of the request is tried; then the rest is submitted.
    Mixed,
}

impl SubmitMode {
    pub const ALL: [Self; 3] = [Self::Try, Self::Submit, Self::Mixed];
}

pub(super) enum Data<'a> {
    None,
    In(&'a mut [u8]),
    Out(&'a [u8]),
}

impl Data<'_> {
    fn buffer(&mut self, from: u64, to: u64) -> Buffer<'_> {
        match self {
            Self::None => Buffer::None,
            Self::In(out) => Buffer::Read(&mut out[from as usize..to as usize]),
            Self::Out(data) => Buffer::Write(&data[from as usize..to as usize]),
        }
    }
}

pub(super) struct Driver<'a> {
    pub device: &'a dyn Device,
    pub options: &'a Options,
    pub check: &'static str,
    pub rng: Rng,
}

pub(super) struct Pending {
    request: Request,
    answer: mpsc::Receiver<(device::Result<()>, IoBuf)>,
}

impl<'a> Driver<'a> {
    pub fn new(device: &'a dyn Device, options: &'a Options, check: &'static str, stream: u64) -> Self {
        let rng = Rng::new(options.seed ^ stream.wrapping_mul(0xa076_1d64_78bd_642f));
        Self { device, options, check, rng }
    }

    /// Runs a request. The outer result is the suite's, the inner one that of the device.
    pub fn run(
        &mut self,
        mode: SubmitMode,
        request: Request,
        mut data: Data<'_>,
    ) -> CheckResult<device::Result<()>> {
        if let Data::In(out) = &mut data {
            // Fill the buffer with a pattern, so that parts which a read skips are detected.
            out.fill(0xa5);
        }
        let block = u64::from(self.device.geometry().logical_block);
        let prefix = match mode {
            SubmitMode::Submit => 0,
            SubmitMode::Try => request.len,
            SubmitMode::Mixed => self.rng.below(request.len / block + 1) * block,
        };
        let mut at = 0;
        if mode == SubmitMode::Try || prefix > 0 {
            let part = Request { len: prefix, ..request };
            let done = match self.attempt(part, &mut data, &mut at)? {
                Ok(done) => done,
                Err(error) => return Ok(Err(error)),
            };
            if done && prefix == request.len {
                return Ok(Ok(()));
            }
        }
        let buffer = match &data {
            Data::None => IoBuf::empty(),
            Data::In(out) => self.memory(out.len() - at as usize)?,
            Data::Out(data) => self.copy(&data[at as usize..])?,
        };
        let pending = self.submit(request.rest(at), buffer);
        match (self.wait(&pending)?, data) {
            (Ok(buffer), Data::In(out)) => {
                out[at as usize..].copy_from_slice(&buffer);
                Ok(Ok(()))
            }
            (answer, _) => Ok(answer.map(drop)),
        }
    }

    /// Tries a request until it completes (returns true) or would block (returns false). Adds the
    /// bytes done to `at`.
    fn attempt(&self, part: Request, data: &mut Data<'_>, at: &mut u64) -> CheckResult<device::Result<bool>> {
        let block = u64::from(self.device.geometry().logical_block);
        for _ in 0..MAX_TRIES {
            let request = part.rest(*at);
            match self.device.try_io(&request, data.buffer(*at, part.len)) {
                Err(error) => return Ok(Err(error)),
                Ok(TryResult::WouldBlock) => return Ok(Ok(false)),
                Ok(TryResult::Done) => {
                    *at = part.len;
                    return Ok(Ok(true));
                }
                Ok(TryResult::Partly(n)) => {
                    ensure!(
                        n > 0 && n < request.len && n.is_multiple_of(block),
                        self.check,
                        "{request:?} returned Partly({n}): it must be a multiple of the block, above 0 and below the length"
                    );
                    *at += n;
                }
            }
        }
        Err(self.violation(format!("{part:?} did not end after {MAX_TRIES} tries")))
    }

    pub fn submit(&self, request: Request, buffer: IoBuf) -> Pending {
        let (tx, answer) = mpsc::channel();
        let done = Completion::new(move |outcome, buffer| {
            // The receiver is gone if the check has already failed.
            let _ = tx.send((outcome, buffer));
        });
        self.device.submit(request, buffer, done);
        Pending { request, answer }
    }

    pub fn wait(&self, pending: &Pending) -> CheckResult<device::Result<IoBuf>> {
        let request = pending.request;
        let Ok((outcome, buffer)) = pending.answer.recv_timeout(self.options.timeout) else {
            return Err(self.violation(format!("{request:?} was submitted but did not complete")));
        };
        ensure!(
            outcome.is_err() || request.op != Op::Read || buffer.len() as u64 == request.len,
            self.check,
            "{request:?} completed with a buffer of {} bytes",
            buffer.len()
        );
        Ok(outcome.map(|()| buffer))
    }

    /// Runs a request that must succeed; an error is a violation.
    pub fn run_ok(&mut self, mode: SubmitMode, request: Request, data: Data<'_>) -> CheckResult {
        match self.run(mode, request, data)? {
            Ok(()) => Ok(()),
            Err(error) => Err(self.violation(format!("{request:?} by {mode:?} failed: {error}"))),
        }
    }

    /// Reads a range in requests of at most `max_io` bytes, which must succeed.
    pub fn read(&mut self, mode: SubmitMode, offset: u64, len: u64) -> CheckResult<Vec<u8>> {
        let mut out = vec![0; len as usize];
        for from in (0..len).step_by(self.options.max_io as usize) {
            let to = (from + self.options.max_io).min(len);
            let data = Data::In(&mut out[from as usize..to as usize]);
            self.run_ok(mode, Request::read(offset + from, to - from), data)?;
        }
        Ok(out)
    }

    /// Reads the content at `offset` and compares it with `expected`. `after` names the preceding
    /// operation in messages.
    pub fn compare(&mut self, mode: SubmitMode, offset: u64, expected: &[u8], after: &str) -> CheckResult {
        let found = self.read(mode, offset, expected.len() as u64)?;
        match first_difference(&found, expected) {
            None => Ok(()),
            Some(at) => Err(self.violation(format!(
                "after {after}: byte {} is {:#04x} and should be {:#04x}",
                offset + at as u64,
                found[at],
                expected[at]
            ))),
        }
    }

    pub fn violation(&self, what: String) -> Violation {
        Violation { check: self.check, message: what }
    }

    pub fn copy(&self, data: &[u8]) -> CheckResult<IoBuf> {
        IoBuf::copy_of(data).map_err(|error| self.no_memory(error))
    }

    pub fn memory(&self, len: usize) -> CheckResult<IoBuf> {
        IoBuf::zeroed(len).map_err(|error| self.no_memory(error))
    }

    fn no_memory(&self, error: Error) -> Violation {
        self.violation(format!("the suite itself: {error}"))
    }
}
