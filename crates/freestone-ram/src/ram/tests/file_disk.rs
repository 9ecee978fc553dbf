//! A backing device in a file, whose content outlives the process.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use super::ram;
use crate::ram::Backing;
use crate::ram::geometry::PAGE;
use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, Geometry, IoBuf, Op, Request, Result, TryResult,
};

struct FileDisk {
    file: File,
    size: u64,
}

/// Returns the file at `path`, which is created with `size` bytes if it does not exist, as a backing device of an
/// adoptable family.
pub(in crate::ram) fn file_backing(path: &Path, size: u64, compressed_writeback: bool) -> Backing {
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap();
    file.set_len(size).unwrap();
    let handle = Arc::new(file.try_clone().unwrap().into());
    Backing { file: Some(handle), ..Backing::new(Arc::new(FileDisk { file, size }), compressed_writeback) }
}

impl Device for FileDisk {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.size, ..ram(PAGE).geometry() }
    }

    fn try_io(&self, _: &Request, _: Buffer<'_>) -> Result<TryResult> {
        Ok(TryResult::WouldBlock)
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        let outcome = match request.op {
            Op::Read => self.file.read_exact_at(&mut buffer, request.offset),
            Op::Write => self.file.write_all_at(&buffer, request.offset),
            _ => Ok(()),
        };
        done.complete(outcome.map_err(|_| Error::Media), buffer);
    }

    fn extents(&self, _: u64, _: u64, _: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        Err(Error::Unsupported)
    }
}
