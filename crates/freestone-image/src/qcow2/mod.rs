//! qcow2 images as read-only devices ([`Image`]), and the changes of a fork as a qcow2 overlay
//! ([`delta`]).
//!
//! Supported are versions 2 and 3, deflate and zstd compressed clusters, zero clusters, and
//! subclusters (extended L2 entries). Also supported are backing chains (raw or qcow2, at most 64
//! files), external data files, and images on block devices. Internal snapshots and bitmaps are
//! ignored. Encryption and unknown incompatible features are refused, with an error that names
//! them. As in qemu, an image that is marked dirty or corrupt can be read; refcounts are not read.
//!
//! **Corrupt images** do not cause a panic, and use no more memory than sound ones. A read through
//! an invalid entry fails with [`Error::Media`]; other reads succeed. An entry is invalid if it is
//! not aligned, beyond the end of the file, or not a whole cluster when decompressed. The log
//! contains the file of the chain and the damage, at most once a minute per file. A file that ends
//! within its last cluster is padded with zeroes, as in qemu. Unlike in qemu, clusters beyond the
//! end of the file are an error: zeroes would hide that the file was truncated.
//!
//! **Blocking.** Each image of the chain caches its whole L1 table (at most 32 MiB; 16 KiB for 1
//! TiB with 64 KiB clusters). Each image also caches parts of its L2 tables, and decompressed
//! clusters (at most 16 MiB of each). Reads of data in these caches or in the page cache complete
//! inline. At most four threads, shared by all images, decompress clusters. Requests never block a
//! thread on a disk; opening an image and [`Device::extents`] do.
//!
//! **Trust.** An image names other files, which are opened with the rights of this process;
//! [`Config::standalone`] refuses such images. If the format of a backing file is not given, it is
//! probed, as in qemu.
//!
//! **Why not imago.** The crate imago 0.2.6 does not support zstd, and refuses images marked dirty
//! or corrupt. Because imago ignores the encryption field, it would return encrypted data. The
//! crate either blocks the caller's thread or needs tokio's locks, as two features that exclude
//! each other in one program. So inline reads cannot be combined with requests that do not block a
//! thread. Decompression uses flate2 and zstd.

mod block_options;
mod cache;
mod chain;
pub mod delta;
mod error;
mod header;
mod inflate;
mod job;
mod reader;
mod source;
mod table;

use std::fmt;
use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, ExtentKind, Geometry, IoBuf, Op, Request, Result, TryResult,
    range_end,
};

use crate::file::FileChange;

use chain::Chain;
pub use chain::Format;
pub use error::{Fault, SetupError};
use job::Job;
use reader::{Cursor, Location};

/// Maximum number of bytes that one inline read returns.
const INLINE_MAX_BYTES: u64 = 256 << 10;
/// Maximum number of runs (ranges in one place of a file) that one extent query examines.
const MAX_EXTENT_STEPS: u32 = 1024;
/// Logical block size of the device in bytes.
const SECTOR_BYTES: u32 = 512;
/// Preferred smallest request size (physical block, `io_min`) in bytes.
const PREFERRED_BYTES: u32 = 4096;
/// Preferred request size (`io_opt`) in bytes, above which streaming is not faster.
const STREAM_BYTES: u32 = 1 << 20;

/// Options for opening an [`Image`].
#[derive(Debug, Clone)]
pub struct Config {
    /// Path of the image: a regular file or a block device.
    pub path: PathBuf,
    /// Refuses an image that names a backing file or an external data file.
    pub standalone: bool,
}

impl Config {
    /// Returns options for opening an image together with its backing chain.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), standalone: false }
    }
}

/// A qcow2 image with its backing chain, as a read-only device. The files stay locked (shared, as
/// by [`File`](crate::file::File)) while the image is open. Programs that ignore such locks must
/// not change the files; [`change`](Self::change) reports if one did.
pub struct Image {
    chain: Arc<Chain>,
}

/// Returns true if a file begins with the qcow2 magic number. (A raw disk may begin with it, too,
/// as a guest can write the first sector.)
pub fn is_qcow2(path: &Path) -> io::Result<bool> {
    let mut magic = Vec::new();
    fs::File::open(path)?.take(4).read_to_end(&mut magic)?;
    Ok(magic == header::MAGIC.to_be_bytes())
}

impl Image {
    /// Opens an image and its backing chain. Blocks during the reads of headers and tables.
    ///
    /// # Errors
    /// Fails with a [`SetupError`], whose message contains the file and the reason.
    pub fn open(config: &Config) -> std::result::Result<Self, SetupError> {
        job::THREADS.start().map_err(SetupError::Threads)?;
        Ok(Self { chain: Chain::open(&config.path, config.standalone)? })
    }

    /// Returns the paths of all files: the image itself, its data file, and so on to the last
    /// backing file.
    pub fn files(&self) -> Vec<PathBuf> {
        self.chain.paths().collect()
    }

    /// Returns the first file that changed since it was opened, and the change, as of the last
    /// check ([`check_now`](crate::file::check_now)); `None` if all files are unchanged.
    pub fn change(&self) -> Option<(PathBuf, FileChange)> {
        self.chain.sources().find_map(|source| Some((source.path(), source.change()?)))
    }

    /// Returns each file with its [identity](crate::file::File::identity). Block devices do not
    /// have an identity and are omitted.
    pub fn identities(&self) -> Vec<(PathBuf, String)> {
        self.chain.sources().filter_map(|source| Some((source.path(), source.identity()?))).collect()
    }

    /// Returns the kind and length in bytes of the run that was located at the cursor. For a run in
    /// a raw file, the file system may report a hole.
    fn extent(&self, cursor: &Cursor, found: Location) -> Result<(ExtentKind, u64)> {
        let run = cursor.run();
        let (layer, host) = match found {
            Location::Data { layer, host } => (&self.chain.layers[layer], host),
            Location::Zero { allocated: true } => return Ok((ExtentKind::Zero, run)),
            Location::Nowhere | Location::Zero { allocated: false } => return Ok((ExtentKind::Hole, run)),
            Location::Cluster { .. } | Location::Fetch(_) => return Ok((ExtentKind::Data, run)),
        };
        // Holes of a qcow2 file only show how its clusters were allocated, so report them as data.
        if layer.table.is_some() || !layer.source.is_aligned(host, run) {
            return Ok((ExtentKind::Data, run));
        }
        let mut first = None;
        layer.source.extents(host, run, &mut |row| {
            first = Some((row.kind, row.len));
            false
        })?;
        first.ok_or(Error::Media)
    }
}

impl Device for Image {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.chain.size(),
            logical_block: SECTOR_BYTES,
            physical_block: PREFERRED_BYTES,
            io_min: PREFERRED_BYTES,
            io_opt: STREAM_BYTES,
            discard_granularity: 0,
            fast_zeroes: false,
            volatile_cache: false,
            padding: 0,
            volatile_media: false,
            rotational: false,
            max_request: 0,
            read_only: true,
            ignores_data: false,
            zones: None,
        }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        request.check(&self.geometry())?;
        let Buffer::Read(out) = buffer else { return Ok(TryResult::Done) };
        let mut cursor = Cursor::new(request.offset, request.len.min(INLINE_MAX_BYTES));
        self.chain.advance(&mut cursor, request.offset, out)?;
        // The number of bytes is a multiple of 512, as all runs consist of whole sectors.
        Ok(match cursor.at - request.offset {
            0 => TryResult::WouldBlock,
            done if done == request.len => TryResult::Done,
            done => TryResult::Partly(done),
        })
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        if let Err(error) = request.check(&self.geometry()) {
            return done.complete(Err(error), buffer);
        }
        match request.op {
            Op::Read if buffer.len() as u64 == request.len => {
                Job::new(Arc::clone(&self.chain), request, buffer, done).run();
            }
            Op::Read => done.complete(Err(Error::Misaligned), buffer),
            // The device is read-only, so a flush has nothing to write.
            _ => done.complete(Ok(()), buffer),
        }
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let end = range_end(offset, len, self.chain.size())?;
        let mut cursor = Cursor::new(offset, end - offset);
        // Merge adjacent runs of the same kind in different tables or files into one extent.
        let mut pending: Option<Extent> = None;
        for _ in 0..MAX_EXTENT_STEPS {
            let at = cursor.at;
            let next = self.chain.locate_blocking(&mut cursor).and_then(|found| self.extent(&cursor, found));
            let (kind, len) = match (next, pending) {
                (Ok(next), _) => next,
                // Report the extents found before the error; the next call returns the error.
                (Err(_), Some(_)) => break,
                (Err(error), None) => return Err(error),
            };
            cursor.pass(len);
            match &mut pending {
                Some(before) if before.kind == kind => before.len += len,
                before => {
                    if let Some(before) = before.replace(Extent { offset: at, len, kind })
                        && !row(before)
                    {
                        return Ok(at - offset);
                    }
                }
            }
            if cursor.at == end {
                break;
            }
        }
        Ok(pending.map_or(0, |last| {
            row(last);
            last.offset + last.len - offset
        }))
    }
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Image").field("files", &self.files()).field("size", &self.chain.size()).finish()
    }
}
