//! Requests to the NBD client device, and the check of their outcomes.

use std::sync::{Arc, mpsc};
use std::thread;

use freestone::device::{Completion, Device as _, Error, Extent, ExtentKind, IoBuf, Op, Request, Result};
use freestone_nbd_client::Nbd;
use freestone_nbd_proto::command;

use super::{sound_byte, written_byte};

/// A request that the client sends without splitting it. Each request has its own part of the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SentRequest {
    pub command: u16,
    pub offset: u64,
    pub len: u32,
    /// Block size of the device in bytes.
    pub block: u32,
}

/// Expected answer to a request, according to the replies of the script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The request has no complete reply.
    None,
    /// Success, with the data of a read. Other requests have no data.
    Done(Vec<u8>),
    /// Success of a block status, with the length in bytes and the flags of each extent.
    Status(Vec<(u32, u32)>),
    /// Failure with this error number.
    Failed(u32),
}

/// Result of a request to the device.
#[derive(Debug)]
pub enum RequestResult {
    Data(IoBuf),
    Rows(Vec<Extent>),
}

type ResultReceiver = mpsc::Receiver<Result<RequestResult>>;

impl SentRequest {
    fn op(&self) -> Op {
        match self.command {
            command::WRITE => Op::Write,
            command::FLUSH => Op::Flush,
            command::TRIM => Op::Discard,
            command::WRITE_ZEROES => Op::WriteZeroes,
            _ => Op::Read,
        }
    }

    /// Returns the data of a write, or no data for other requests.
    pub fn payload(&self) -> Vec<u8> {
        let len = if self.command == command::WRITE { self.len as usize } else { 0 };
        (0..len).map(|at| written_byte(self, at)).collect()
    }

    /// Submits the request to the device. The returned receiver receives the outcome.
    pub fn begin<'scope>(
        &self,
        scope: &'scope thread::Scope<'scope, '_>,
        device: &Arc<Nbd>,
    ) -> ResultReceiver {
        let (sender, received) = mpsc::channel();
        let (offset, len) = (self.offset, u64::from(self.len));
        if self.command == command::BLOCK_STATUS {
            let device = Arc::clone(device);
            scope.spawn(move || {
                let mut rows = Vec::new();
                let received = device.extents(offset, len, &mut |row| {
                    rows.push(row);
                    true
                });
                drop(device);
                let rows = received.map(|received| {
                    assert_eq!(received, rows.iter().map(|row| row.len).sum::<u64>());
                    RequestResult::Rows(rows)
                });
                let _ = sender.send(rows);
            });
            return received;
        }
        let buffer = match self.command {
            command::READ => IoBuf::zeroed(self.len as usize).map(|mut buffer| {
                buffer.fill(0xee);
                buffer
            }),
            command::WRITE => IoBuf::copy_of(&self.payload()),
            _ => Ok(IoBuf::empty()),
        };
        let done = Completion::new(move |outcome, buffer| {
            let _ = sender.send(outcome.map(|()| RequestResult::Data(buffer)));
        });
        let request = Request::new(self.op(), offset, len);
        device.submit(request, buffer.expect("there is memory"), done);
        received
    }

    /// Asserts that the outcome of the request matches the expected answer.
    pub fn check(&self, expected: &Answer, outcome: Result<RequestResult>) {
        match (expected, outcome) {
            // The sound server that followed has completed the request.
            (Answer::None, Ok(result)) => match result {
                RequestResult::Data(data) if self.command == command::READ => {
                    assert!(
                        (self.offset..).zip(&data[..]).all(|(at, byte)| *byte == sound_byte(at)),
                        "{self:?}"
                    );
                }
                RequestResult::Data(_) => {}
                RequestResult::Rows(rows) => self.check_rows(&rows, &[(self.len, 3)]),
            },
            (Answer::Done(expected), Ok(RequestResult::Data(data))) if self.command == command::READ => {
                assert!(data[..] == expected[..], "{self:?}: the data differs from the sent data");
            }
            (Answer::Done(_), Ok(RequestResult::Data(_))) if self.command != command::BLOCK_STATUS => {}
            (Answer::Status(all), Ok(RequestResult::Rows(rows))) => self.check_rows(&rows, all),
            (Answer::Failed(errno), Err(error)) => assert_eq!(error, self.error(*errno), "{self:?}"),
            (expected, outcome) => panic!("{self:?}: {outcome:?}, expected {expected:?}"),
        }
    }

    fn error(&self, errno: u32) -> Error {
        match errno {
            1 if self.op() != Op::Read => Error::ReadOnly,
            28 => Error::NoSpace,
            95 => Error::Unsupported,
            _ => Error::Media,
        }
    }

    /// Asserts that the extents are contiguous and consist of whole blocks, and that zero extents contain
    /// only bytes that the server reported as zero.
    fn check_rows(&self, rows: &[Extent], received: &[(u32, u32)]) {
        assert!(!rows.is_empty(), "no extents");
        let block = u64::from(self.block);
        let mut at = self.offset;
        for row in rows {
            assert!(row.offset == at && row.len > 0 && row.len.is_multiple_of(block), "{rows:?}");
            at += row.len;
            assert!(at <= self.offset + u64::from(self.len), "{rows:?}");
            let needed = match row.kind {
                ExtentKind::Data => continue,
                ExtentKind::Zero => 2,
                ExtentKind::Hole => 3,
            };
            let mut from = self.offset;
            let mut covered = 0;
            for (len, flags) in received {
                let end = from + u64::from(*len);
                let both = end.min(at).saturating_sub(from.max(row.offset));
                assert!(both == 0 || flags & needed == needed, "{row:?} of {received:?}");
                covered += both;
                from = end;
            }
            assert_eq!(covered, row.len, "{row:?} of {received:?}");
        }
        // The extents must cover the whole range whose status the server reported.
        let all: u64 = received.iter().map(|(len, _)| u64::from(*len)).sum();
        assert!(at - self.offset >= all.min(u64::from(self.len)), "{rows:?} of {received:?}");
    }
}
