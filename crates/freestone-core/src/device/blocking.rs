//! Blocking calls for users of Freestone as a library, based on `try_io` and `submit`.

use super::{Buffer, Completion, Device, Error, Flags, IoBuf, Op, Request, Result, TryResult};
use crate::plug;
use crate::sync::mpsc;

/// Blocking I/O on any [`Device`].
pub trait Blocking: Device {
    /// Reads `buf.len()` bytes at `offset` into `buf`.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let mut request = Request::read(offset, buf.len() as u64);
        let mut at = 0;
        loop {
            match self.try_io(&request, Buffer::Read(&mut buf[at..]))? {
                TryResult::Done => return Ok(()),
                TryResult::Partly(n) => {
                    at += n as usize;
                    request = request.rest(n);
                }
                TryResult::WouldBlock => {
                    let data = wait(self, request, IoBuf::zeroed(buf.len() - at)?)?;
                    buf[at..].copy_from_slice(&data);
                    return Ok(());
                }
            }
        }
    }

    /// Writes `data` at `offset`.
    fn write_at(&self, offset: u64, data: &[u8], flags: Flags) -> Result<()> {
        let mut request = Request::write(offset, data.len() as u64).with(flags);
        let mut at = 0;
        loop {
            match self.try_io(&request, Buffer::Write(&data[at..]))? {
                TryResult::Done => return Ok(()),
                TryResult::Partly(n) => {
                    at += n as usize;
                    request = request.rest(n);
                }
                TryResult::WouldBlock => {
                    return wait(self, request, IoBuf::copy_of(&data[at..])?).map(drop);
                }
            }
        }
    }

    /// Runs a request without data: discard, write zeroes or flush.
    fn run(&self, request: Request) -> Result<()> {
        let mut request = request;
        loop {
            match self.try_io(&request, Buffer::None)? {
                TryResult::Done => return Ok(()),
                TryResult::Partly(n) => request = request.rest(n),
                TryResult::WouldBlock => return wait(self, request, IoBuf::empty()).map(drop),
            }
        }
    }

    /// Makes every completed write durable.
    fn flush(&self) -> Result<()> {
        self.run(Request::flush())
    }

    /// Discards `len` bytes at `offset`.
    fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.run(Request::new(Op::Discard, offset, len))
    }

    /// Writes zeroes to `len` bytes at `offset`.
    fn write_zeroes(&self, offset: u64, len: u64, flags: Flags) -> Result<()> {
        self.run(Request::new(Op::WriteZeroes, offset, len).with(flags))
    }
}

impl<D: Device + ?Sized> Blocking for D {}

fn wait<D: Device + ?Sized>(device: &D, request: Request, buffer: IoBuf) -> Result<IoBuf> {
    let (tx, rx) = mpsc::sync_channel(1);
    device.submit(
        request,
        buffer,
        Completion::new(move |outcome, buffer| {
            // The receiver `rx` exists until the completion was called, so sending cannot fail.
            let _ = tx.send(outcome.map(|()| buffer));
        }),
    );
    plug::flush();
    rx.recv().unwrap_or(Err(Error::Gone))
}
