//! A file of an image, which can be read at byte granularity up to its exact end.

use std::path::{Path, PathBuf};

use crate::file::{Config, File, FileChange};
use freestone_core::device::{
    Blocking as _, Buffer, Completion, Device as _, Error, Extent, IoBuf, Request, Result, TryResult,
};

use super::error::SetupError;

/// A read-only file of an image. The [`File`] under this layer reads whole blocks only, but an
/// image file may end within a block.
#[derive(Debug)]
pub(super) struct Source {
    file: File,
    block: u64,
    /// Size in bytes of the whole blocks of the file.
    whole: u64,
    /// Content of the file after the last whole block.
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

    pub fn change(&self) -> Option<FileChange> {
        self.file.change()
    }

    pub fn identity(&self) -> Option<String> {
        self.file.identity()
    }

    pub fn len(&self) -> u64 {
        self.whole + self.tail.len() as u64
    }

    /// Reads a range from byte `offset` on. Blocks. Bytes beyond the end of the file read as
    /// zeroes.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        if self.is_aligned(offset, out.len() as u64) {
            return self.file.read_at(offset, out).map_err(device_error);
        }
        let (from, len) = self.blocks(offset, out.len());
        let mut blocks = IoBuf::zeroed(len)?;
        if len > 0 {
            self.file.read_at(from, &mut blocks).map_err(device_error)?;
        }
        self.gather(offset, &blocks, out);
        Ok(())
    }

    /// Reads a range without blocking. Returns the number of bytes read from the start of the
    /// range; 0 if the read would block.
    pub fn try_read(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        if self.is_aligned(offset, out.len() as u64) {
            let request = Request::read(offset, out.len() as u64);
            return match self.file.try_io(&request, Buffer::Read(out)).map_err(device_error)? {
                TryResult::Done => Ok(out.len()),
                TryResult::Partly(n) => Ok(n as usize),
                TryResult::WouldBlock => Ok(0),
            };
        }
        let (from, len) = self.blocks(offset, out.len());
        let mut blocks = IoBuf::zeroed(len)?;
        if len > 0 {
            let request = Request::read(from, len as u64);
            match self.file.try_io(&request, Buffer::Read(&mut blocks)).map_err(device_error)? {
                TryResult::Done => {}
                // A partial result is discarded: the submitted read repeats the whole range.
                TryResult::Partly(_) | TryResult::WouldBlock => return Ok(0),
            }
        }
        self.gather(offset, &blocks, out);
        Ok(out.len())
    }

    /// Returns true if the range consists of whole blocks of the file, and is not empty.
    pub fn is_aligned(&self, offset: u64, len: u64) -> bool {
        len > 0
            && (offset | len).is_multiple_of(self.block)
            && offset.checked_add(len).is_some_and(|end| end <= self.whole)
    }

    /// Submits a read of an aligned range into a buffer that has the length of the range.
    pub fn start_aligned(&self, offset: u64, buffer: IoBuf, done: Completion) {
        self.file.submit(Request::read(offset, buffer.len() as u64), buffer, done);
    }

    /// Submits a read of the whole blocks around a range. `done` receives the blocks, which
    /// [`gather`](Self::gather) converts.
    pub fn start(&self, offset: u64, len: usize, done: impl FnOnce(Result<IoBuf>) + Send + 'static) {
        let (from, len) = self.blocks(offset, len);
        match IoBuf::zeroed(len) {
            Ok(buffer) if len > 0 => {
                let done = Completion::new(move |outcome, buffer| {
                    done(outcome.map_err(device_error).map(|()| buffer));
                });
                self.file.submit(Request::read(from, len as u64), buffer, done);
            }
            other => done(other),
        }
    }

    /// Fills `out` with the range that begins at byte `offset`, from the blocks around that range.
    pub fn gather(&self, offset: u64, blocks: &[u8], out: &mut [u8]) {
        let (from, len) = self.blocks(offset, out.len());
        out.fill(0);
        overlay(offset, out, from, &blocks[..len.min(blocks.len())]);
        overlay(offset, out, self.whole, &self.tail);
    }

    pub fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.file.extents(offset, len, row).map_err(device_error)
    }

    /// Returns the first byte and the length in bytes of the whole blocks around a range, up to the
    /// last whole block of the file.
    fn blocks(&self, offset: u64, len: usize) -> (u64, usize) {
        let end = offset.saturating_add(len as u64);
        let end = end.checked_next_multiple_of(self.block).unwrap_or(u64::MAX).min(self.whole);
        let from = (offset - offset % self.block).min(end);
        (from, (end - from) as usize)
    }
}

/// Copies the part of `data` that overlaps `out`. `data` begins at byte `data_at` of the file,
/// `out` at byte `out_at`.
fn overlay(out_at: u64, out: &mut [u8], data_at: u64, data: &[u8]) {
    let start = out_at.max(data_at);
    let end = out_at.saturating_add(out.len() as u64).min(data_at + data.len() as u64);
    if start < end {
        let len = (end - start) as usize;
        let (to, from) = ((start - out_at) as usize, (start - data_at) as usize);
        out[to..to + len].copy_from_slice(&data[from..from + len]);
    }
}

/// Converts an error of a file to an error of the image device: all errors except `NoMemory` and
/// `Gone` become `Media`.
pub(super) fn device_error(error: Error) -> Error {
    match error {
        Error::NoMemory | Error::Gone => error,
        _ => Error::Media,
    }
}
