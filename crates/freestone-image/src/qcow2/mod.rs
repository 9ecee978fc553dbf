//! qcow2 images as read-only devices ([`Image`]), and the changes of a fork as a qcow2 overlay
//! ([`delta`]).
//!
//! Supported: versions 2 and 3, deflate and zstd compressed clusters, zero clusters, subclusters
//! (extended L2 entries), backing chains (raw or qcow2, at most 64 files), external data files, and
//! images on block devices. Internal snapshots and bitmaps are ignored. Encryption and unknown
//! incompatible features are refused by name. As in qemu, an image that is marked dirty or corrupt
//! can be read; refcounts are not read.
//!
//! **Corrupt images** cause no panic and use no more memory than sound ones. A read through an
//! invalid entry (not aligned, beyond the end of the file, or not a whole cluster when
//! decompressed) fails with [`Error::Media`]; other reads succeed. The log names the file of the
//! chain and the damage, at most once a minute per file. A file that ends within its last cluster
//! is padded with zeroes, as in qemu. Clusters that lie beyond the end of the file are an error,
//! unlike in qemu: zeroes would hide a truncated file.
//!
//! **Blocking.** Each image of the chain caches its whole L1 table (at most 32 MiB; 16 KiB for 1
//! TiB with 64 KiB clusters), parts of its L2 tables and decompressed clusters (at most 16 MiB of
//! each). Reads of cached data, here or in the page cache, complete inline. At most four threads,
//! shared by all images, decompress clusters. No request blocks a thread on a disk; opening an
//! image and [`Device::extents`] do.
//!
//! **Trust.** An image names other files, which are opened with the rights of this process;
//! [`Config::standalone`] refuses such images. If the format of a backing file is not given, it is
//! probed, as in qemu.
//!
//! **Why not a library.** imago 0.2.6 lacks zstd, refuses images marked dirty or corrupt, and
//! ignores the encryption field, so an encrypted image would be read as it is. It either blocks the
//! caller's thread or needs tokio's locks, as two features that exclude each other in one program.
//! That rules out inline reads combined with requests that block no thread. Decompression uses
//! flate2 and zstd.

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
    Buffer, Completion, Device, Error, Extent, ExtentKind, Geometry, IoBuf, Op, Request, Result, Tried,
    range_end,
};

use crate::file::Changed;

use chain::Chain;
pub use chain::Format;
pub use error::{Fault, SetupError};
use job::Job;
use reader::{Cursor, Location};

/// Maximum number of bytes that one inline read returns.
const INLINE_MAX_BYTES: u64 = 256 << 10;
/// Maximum number of runs that one extent query examines.
const MAX_EXTENT_STEPS: u32 = 1024;
/// Logical block size in bytes.
const SECTOR_BYTES: u32 = 512;
/// Preferred request size in bytes.
const PREFERRED_BYTES: u32 = 4096;
/// Request size at which streaming stops getting faster, in bytes.
const STREAM_BYTES: u32 = 1 << 20;

/// Options for opening an [`Image`].
#[derive(Debug, Clone)]
pub struct Config {
    /// The image: a regular file or a block device.
    pub path: PathBuf,
    /// Refuses an image that names a backing file or a data file.
    pub standalone: bool,
}

impl Config {
    /// Returns options for an image together with its backing chain.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), standalone: false }
    }
}

/// A qcow2 image with its backing chain, as a read-only device. The files stay locked (shared, as
/// by [`File`](crate::file::File)) while it is open. Programs that ignore such locks must not
/// change them; [`changed`](Self::changed) reports if one did.
pub struct Image {
    chain: Arc<Chain>,
}

/// Returns true if a file begins with the qcow2 magic number. (A raw disk may too: a guest can
/// write its first sector.)
///
/// # Errors
/// The file cannot be read.
pub fn is_qcow2(path: &Path) -> io::Result<bool> {
    let mut magic = Vec::new();
    fs::File::open(path)?.take(4).read_to_end(&mut magic)?;
    Ok(magic == header::MAGIC.to_be_bytes())
}

impl Image {
    /// Opens an image and its backing chain. Blocks.
    ///
    /// # Errors
    /// Each [`SetupError`] names the file and what is wrong with it.
    pub fn open(config: &Config) -> std::result::Result<Self, SetupError> {
        job::THREADS.start().map_err(SetupError::Threads)?;
        Ok(Self { chain: Chain::open(&config.path, config.standalone)? })
    }

    /// Returns the paths of all files: the image itself, its data file, and so on down to the last
    /// backing file.
    pub fn files(&self) -> Vec<PathBuf> {
        self.chain.paths().collect()
    }

    /// Returns the first file that changed since it was opened, and the change, as of the last
    /// check ([`look_now`](crate::file::look_now)).
    pub fn changed(&self) -> Option<(PathBuf, Changed)> {
        self.chain.sources().find_map(|source| Some((source.path(), source.changed()?)))
    }

    /// Returns each file with its [identity](crate::file::File::identity). Block devices have none
    /// and are omitted.
    pub fn identities(&self) -> Vec<(PathBuf, String)> {
        self.chain.sources().filter_map(|source| Some((source.path(), source.identity()?))).collect()
    }

    /// Returns kind and length of a located run. For a run in a raw file, the file system may
    /// report a hole.
    fn extent(&self, cursor: &Cursor, found: Location) -> Result<(ExtentKind, u64)> {
        let run = cursor.run();
        let (layer, host) = match found {
            Location::Data { layer, host } => (&self.chain.layers[layer], host),
            Location::Zero { allocated: true } => return Ok((ExtentKind::Zero, run)),
            Location::Nowhere | Location::Zero { allocated: false } => return Ok((ExtentKind::Hole, run)),
            Location::Cluster { .. } | Location::Fetch(_) => return Ok((ExtentKind::Data, run)),
        };
        // Holes of a qcow2 file reflect only how its clusters were allocated.
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
            zones: None,
        }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        request.check(&self.geometry())?;
        let Buffer::Read(out) = buffer else { return Ok(Tried::Done) };
        let mut cursor = Cursor::new(request.offset, request.len.min(INLINE_MAX_BYTES));
        self.chain.advance(&mut cursor, request.offset, out)?;
        // A whole number of sectors, as all runs are.
        Ok(match cursor.at - request.offset {
            0 => Tried::WouldBlock,
            done if done == request.len => Tried::Done,
            done => Tried::Partly(done),
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
            // A flush has nothing to write.
            _ => done.complete(Ok(()), buffer),
        }
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let end = range_end(offset, len, self.chain.size())?;
        let mut cursor = Cursor::new(offset, end - offset);
        // Adjacent runs of one kind in different tables or files become one row.
        let mut pending: Option<Extent> = None;
        for _ in 0..MAX_EXTENT_STEPS {
            let at = cursor.at;
            let next = self.chain.locate_blocking(&mut cursor).and_then(|found| self.extent(&cursor, found));
            let (kind, len) = match (next, pending) {
                (Ok(next), _) => next,
                // Rows found before the error are reported; the next call meets the error again.
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
