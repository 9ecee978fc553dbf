//! Bytes of a file that an image consists of: any range, to the exact end of the file.

use std::path::{Path, PathBuf};

use crate::file::{Changed, Config, File};
use freestone_core::device::{
    Blocking as _, Buffer, Completion, Device as _, Error, Extent, IoBuf, Request, Result, Tried,
};

use super::error::SetupError;

/// A file that is read only. The device below knows whole blocks; images are written by programs
/// that do not care.
#[derive(Debug)]
pub(super) struct Source {
    file: File,
    block: u64,
    /// Bytes of whole blocks.
    whole: u64,
    /// What follows the last whole block.
    tail: Vec<u8>,
}

impl Source {
    pub fn open(path: &Path) -> std::result::Result<Self, SetupError> {
        let config = Config { read_only: true, ..Config::new(path) };
        let (file, tail) = File::open_with_tail(&config)?;
        let geometry = file.geometry();
        Ok(Self { file, block: u64::from(geometry.logical_block), whole: geometry.size, tail })
    }

    pub fn path(&self) -> PathBuf {
        self.file.path().to_owned()
    }

    /// What became of the file since it was opened.
    pub fn changed(&self) -> Option<Changed> {
        self.file.changed()
    }

    /// See [`File::identity`].
    pub fn identity(&self) -> Option<String> {
        self.file.identity()
    }

    /// Bytes of the file.
    pub fn len(&self) -> u64 {
        self.whole + self.tail.len() as u64
    }

    /// Waits for the disk. Behind the end there are zeroes, here and below.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        if self.is_plain(offset, out.len() as u64) {
            return self.file.read_at(offset, out).map_err(plain);
        }
        let (from, len) = self.blocks(offset, out.len());
        let mut blocks = IoBuf::zeroed(len)?;
        if len > 0 {
            self.file.read_at(from, &mut blocks).map_err(plain)?;
        }
        self.gather(offset, &blocks, out);
        Ok(())
    }

    /// Reads what needs no waiting: a number of bytes from the start, perhaps none.
    pub fn try_read(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        if self.is_plain(offset, out.len() as u64) {
            let request = Request::read(offset, out.len() as u64);
            return match self.file.try_io(&request, Buffer::Read(out)).map_err(plain)? {
                Tried::Done => Ok(out.len()),
                Tried::Partly(n) => Ok(n as usize),
                Tried::WouldBlock => Ok(0),
            };
        }
        let (from, len) = self.blocks(offset, out.len());
        let mut blocks = IoBuf::zeroed(len)?;
        if len > 0 {
            let request = Request::read(from, len as u64);
            match self.file.try_io(&request, Buffer::Read(&mut blocks)).map_err(plain)? {
                Tried::Done => {}
                // The rest would have to be put together with what was read; nothing of it is lost
                // by waiting.
                Tried::Partly(_) | Tried::WouldBlock => return Ok(0),
            }
        }
        self.gather(offset, &blocks, out);
        Ok(out.len())
    }

    /// Whether the range can be read without detours.
    pub fn is_plain(&self, offset: u64, len: u64) -> bool {
        len > 0
            && (offset | len).is_multiple_of(self.block)
            && offset.checked_add(len).is_some_and(|end| end <= self.whole)
    }

    /// Reads a plain range into memory of exactly its length.
    pub fn start_plain(&self, offset: u64, buffer: IoBuf, done: Completion) {
        self.file.submit(Request::read(offset, buffer.len() as u64), buffer, done);
    }

    /// Reads the blocks around a range; `done` gets what [`gather`](Self::gather) needs.
    pub fn start(&self, offset: u64, len: usize, done: impl FnOnce(Result<IoBuf>) + Send + 'static) {
        let (from, len) = self.blocks(offset, len);
        match IoBuf::zeroed(len) {
            Ok(buffer) if len > 0 => {
                let done =
                    Completion::new(move |outcome, buffer| done(outcome.map_err(plain).map(|()| buffer)));
                self.file.submit(Request::read(from, len as u64), buffer, done);
            }
            other => done(other),
        }
    }

    /// Fills `out` with the range that begins at `offset`, from the blocks around it.
    pub fn gather(&self, offset: u64, blocks: &[u8], out: &mut [u8]) {
        let (from, len) = self.blocks(offset, out.len());
        out.fill(0);
        overlay(offset, out, from, &blocks[..len.min(blocks.len())]);
        overlay(offset, out, self.whole, &self.tail);
    }

    /// Extents of a plain range.
    pub fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.file.extents(offset, len, row).map_err(plain)
    }

    /// The whole blocks around a range that the file has: first byte and length.
    fn blocks(&self, offset: u64, len: usize) -> (u64, usize) {
        let end = offset.saturating_add(len as u64);
        let end = end.checked_next_multiple_of(self.block).unwrap_or(u64::MAX).min(self.whole);
        let from = (offset - offset % self.block).min(end);
        (from, (end - from) as usize)
    }
}

/// Copies the part of `data`, which lies at `data_at`, that falls into `out`, which lies at
/// `out_at`.
fn overlay(out_at: u64, out: &mut [u8], data_at: u64, data: &[u8]) {
    let start = out_at.max(data_at);
    let end = out_at.saturating_add(out.len() as u64).min(data_at + data.len() as u64);
    if start < end {
        let len = (end - start) as usize;
        let (to, from) = ((start - out_at) as usize, (start - data_at) as usize);
        out[to..to + len].copy_from_slice(&data[from..from + len]);
    }
}

/// Answers of a file below, in terms of a device above it.
pub(super) fn plain(error: Error) -> Error {
    match error {
        Error::NoMemory | Error::Gone => error,
        _ => Error::Media,
    }
}
