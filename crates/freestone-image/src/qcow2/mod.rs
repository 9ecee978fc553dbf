//! qcow2 images: read-only bases ([`Image`]), and what a fork changed as an overlay ([`delta`]).
//!
//! Versions 2 and 3 are read: deflate and zstd compressed clusters, zero clusters, subclusters
//! (extended L2 entries), chains of backing files (raw or qcow2, at most 64 files), external data
//! files, images on block devices. Internal snapshots and bitmaps are passed over. Refused, each
//! with its name: encryption, incompatible features that are not known. As in qemu, an image that is
//! marked dirty or corrupt can be read; its refcounts are not looked at.
//!
//! **Corrupt images** never panic and cost no more memory than sound ones. An entry that cannot be
//! (not aligned, behind the end of the file, no whole cluster when unpacked) answers
//! [`Error::Media`] where it is read, and nowhere else; the log names the file of the chain and
//! what is wrong, once a minute for each file. A file that ends within its last cluster is
//! followed by zeroes, as in qemu; one whose clusters lie behind its end was cut off, and there
//! qemu's zeroes would hide it.
//!
//! **Waiting.** Each image of the chain keeps its L1 table (at most 32 MiB, 16 KiB for 1 TiB with
//! the usual clusters), parts of its L2 tables and unpacked clusters (at most 16 MiB of each). What
//! is there, or in the page cache, is read inline; compressed clusters are unpacked on at most four
//! threads for all images. No request keeps a thread waiting for a disk; opening and
//! [`Device::extents`] do.
//!
//! **Trust.** An image names other files, and they are opened with the rights of this process:
//! [`Config::standalone`] refuses that. A backing file whose format is not given is probed, as in
//! qemu.
//!
//! **Why not a library.** imago (0.2.6) was looked at: it has no zstd, refuses images that are
//! marked dirty or corrupt, does not look at the encryption field (an encrypted image would be read
//! as it lies), and either waits in the caller's thread or needs tokio's locks, as two features
//! that exclude each other in one program; so neither "what needs no waiting, inline" nor "no
//! thread per waiting request" could be kept. Decompression is flate2's and zstd's.

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
use reader::{Cursor, Found};

/// Most bytes that one try reads.
const INLINE_MAX_BYTES: u64 = 256 << 10;
/// Most places that one call for extents looks at.
const MAX_EXTENT_STEPS: u32 = 1024;
/// Smallest request in bytes.
const SECTOR_BYTES: u32 = 512;
/// Preferred smallest request in bytes.
const PREFERRED_BYTES: u32 = 4096;
/// Request size at which streaming stops getting faster, in bytes.
const STREAM_BYTES: u32 = 1 << 20;

/// What to open, and how.
#[derive(Debug, Clone)]
pub struct Config {
    /// The image: a regular file or a block device.
    pub path: PathBuf,
    /// Refuse an image that names a backing file or a data file.
    pub standalone: bool,
}

impl Config {
    /// The image with all that it stands on.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), standalone: false }
    }
}

/// A qcow2 image with all that it stands on, as a read-only device. The files stay locked (shared,
/// as by [`File`](crate::file::File)) while it is open, and must not be changed by programs that
/// pay no heed to such locks; [`changed`](Self::changed) tells whether one did.
pub struct Image {
    chain: Arc<Chain>,
}

/// Whether a file begins like a qcow2 image. (A raw disk may as well: its first sector is the
/// guest's to write.)
///
/// # Errors
/// The file cannot be read.
pub fn is_qcow2(path: &Path) -> io::Result<bool> {
    let mut magic = Vec::new();
    fs::File::open(path)?.take(4).read_to_end(&mut magic)?;
    Ok(magic == header::MAGIC.to_be_bytes())
}

impl Image {
    /// Opens an image. Waits for the disk.
    ///
    /// # Errors
    /// Each [`SetupError`] names the file and what is wrong with it.
    pub fn open(config: &Config) -> std::result::Result<Self, SetupError> {
        job::THREADS.start().map_err(SetupError::Threads)?;
        Ok(Self { chain: Chain::open(&config.path, config.standalone)? })
    }

    /// Every file that belongs to it: the image itself, its data file, and so on down to the last
    /// backing file.
    pub fn files(&self) -> Vec<PathBuf> {
        self.chain.paths().collect()
    }

    /// The first of its files that changed since it was opened, and how, as of the last look
    /// ([`look_now`](crate::file::look_now)).
    pub fn changed(&self) -> Option<(PathBuf, Changed)> {
        self.chain.sources().find_map(|source| Some((source.path(), source.changed()?)))
    }

    /// Returns each of its files with its [identity](crate::file::File::identity). Disks have none.
    pub fn identities(&self) -> Vec<(PathBuf, String)> {
        self.chain.sources().filter_map(|source| Some((source.path(), source.identity()?))).collect()
    }

    /// What a located run is, for those who ask for extents: kind and length; a raw file may know
    /// better.
    fn extent(&self, cursor: &Cursor, found: Found) -> Result<(ExtentKind, u64)> {
        let run = cursor.run();
        let (layer, host) = match found {
            Found::Data { layer, host } => (&self.chain.layers[layer], host),
            Found::Zero { kept: true } => return Ok((ExtentKind::Zero, run)),
            Found::Nowhere | Found::Zero { kept: false } => return Ok((ExtentKind::Hole, run)),
            Found::Cluster { .. } | Found::Need(_) => return Ok((ExtentKind::Data, run)),
        };
        // Holes of a file in which clusters were put one after the other say nothing that the image
        // does not say.
        if layer.table.is_some() || !layer.source.is_plain(host, run) {
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
        // Whole sectors, as all runs are.
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
            // A flush: there is nothing to make durable.
            _ => done.complete(Ok(()), buffer),
        }
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let end = range_end(offset, len, self.chain.size())?;
        let mut cursor = Cursor::new(offset, end - offset);
        // Neighbours of one kind in different tables or files are one row.
        let mut pending: Option<Extent> = None;
        for _ in 0..MAX_EXTENT_STEPS {
            let at = cursor.at;
            let next = self.chain.locate_waiting(&mut cursor).and_then(|found| self.extent(&cursor, found));
            let (kind, len) = match (next, pending) {
                (Ok(next), _) => next,
                // What was found before an error is worth telling; the next call meets the error
                // again.
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
