//! What is asked of the device, and what may come of it.

use std::sync::{Arc, mpsc};
use std::thread;

use freestone::device::{Completion, Device as _, Error, Extent, ExtentKind, IoBuf, Op, Request, Result};
use freestone_nbd_client::Nbd;
use freestone_nbd_proto::command;

use super::{sound, written};

/// A request that the client sends as one. Each has a part of the disk of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    pub command: u16,
    pub offset: u64,
    pub len: u32,
    /// Block size of the device.
    pub block: u32,
}

/// What a request is answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Nothing.
    None,
    /// Success, with the data of a read.
    Done(Vec<u8>),
    /// Lengths and flags.
    Status(Vec<(u32, u32)>),
    /// With this number.
    Failed(u32),
}

/// What the device answered.
#[derive(Debug)]
pub enum Came {
    Data(IoBuf),
    Rows(Vec<Extent>),
}

type Waits = mpsc::Receiver<Result<Came>>;

impl Asked {
    fn op(&self) -> Op {
        match self.command {
            command::WRITE => Op::Write,
            command::FLUSH => Op::Flush,
            command::TRIM => Op::Discard,
            command::WRITE_ZEROES => Op::WriteZeroes,
            _ => Op::Read,
        }
    }

    /// Data that goes with it.
    pub fn payload(&self) -> Vec<u8> {
        let len = if self.command == command::WRITE { self.len as usize } else { 0 };
        (0..len).map(|at| written(self, at)).collect()
    }

    /// Begins it; the outcome comes to the receiver.
    pub fn begin<'scope>(&self, scope: &'scope thread::Scope<'scope, '_>, device: &Arc<Nbd>) -> Waits {
        let (tell, told) = mpsc::channel();
        let (offset, len) = (self.offset, u64::from(self.len));
        if self.command == command::BLOCK_STATUS {
            let device = Arc::clone(device);
            scope.spawn(move || {
                let mut rows = Vec::new();
                let told = device.extents(offset, len, &mut |row| {
                    rows.push(row);
                    true
                });
                drop(device);
                let rows = told.map(|told| {
                    assert_eq!(told, rows.iter().map(|row| row.len).sum::<u64>());
                    Came::Rows(rows)
                });
                let _ = tell.send(rows);
            });
            return told;
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
            let _ = tell.send(outcome.map(|()| Came::Data(buffer)));
        });
        let request = Request::new(self.op(), offset, len);
        device.submit(request, buffer.expect("there is memory"), done);
        told
    }

    /// Compares what came with what was to come.
    pub fn judge(&self, expected: &Answer, outcome: Result<Came>) {
        match (expected, outcome) {
            // A sound server was asked.
            (Answer::None, Ok(came)) => match came {
                Came::Data(data) if self.command == command::READ => {
                    assert!((self.offset..).zip(&data[..]).all(|(at, byte)| *byte == sound(at)), "{self:?}");
                }
                Came::Data(_) => {}
                Came::Rows(rows) => self.judge_rows(&rows, &[(self.len, 3)]),
            },
            (Answer::Done(expected), Ok(Came::Data(data))) if self.command == command::READ => {
                assert!(data[..] == expected[..], "{self:?}: other bytes than were sent");
            }
            (Answer::Done(_), Ok(Came::Data(_))) if self.command != command::BLOCK_STATUS => {}
            (Answer::Status(all), Ok(Came::Rows(rows))) => self.judge_rows(&rows, all),
            (Answer::Failed(errno), Err(error)) => assert_eq!(error, self.error(*errno), "{self:?}"),
            (expected, outcome) => panic!("{self:?}: {outcome:?}, and not {expected:?}"),
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

    /// Rows are of whole blocks one after the other, and no more is said of a byte than the server said.
    fn judge_rows(&self, rows: &[Extent], told: &[(u32, u32)]) {
        assert!(!rows.is_empty(), "nothing is said");
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
            for (len, flags) in told {
                let end = from + u64::from(*len);
                let both = end.min(at).saturating_sub(from.max(row.offset));
                assert!(both == 0 || flags & needed == needed, "{row:?} of {told:?}");
                covered += both;
                from = end;
            }
            assert_eq!(covered, row.len, "{row:?} of {told:?}");
        }
        // Whole blocks of which something was told are not left out.
        let all: u64 = told.iter().map(|(len, _)| u64::from(*len)).sum();
        assert!(at - self.offset >= all.min(u64::from(self.len)), "{rows:?} of {told:?}");
    }
}
