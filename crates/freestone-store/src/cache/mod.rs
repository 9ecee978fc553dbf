//! Cache of chunks and descriptions of images on a local disk: a directory shared by all servers of a user.
//!
//! Each chunk is a file with raw pages and a checksum for each page. So a page can be read by itself, and
//! without waiting if the page is in the kernel's page cache. If a checksum does not match, the file is
//! deleted and the chunk is fetched again. Files may be deleted at any time, also manually; processes that
//! have a deleted file open can still use it.
//!
//! ```text
//! chunks/HH/NAME   pages, then a page with their checksums
//! meta/HH/NAME     maps, manifests and store descriptions under their names
//! new/             incomplete files
//! usage            total size of the files in bytes, in decimal; locked to add a file
//! fetching         a process locks a byte of this file while it fetches an object
//! ```
//!
//! **Size limit.** A process adds the size of a new file to `usage` first. If the sum would exceed the limit,
//! the sizes of all files are counted again. If necessary, the least recently used files are deleted until an
//! eighth of the limit is free. The count also corrects errors that a crash left in `usage`. The modification
//! time of a file is its time of last use, with a granularity of ten minutes.

mod entry;
mod evict;
mod lock;

use crate::rt::sync::Arc;
use crate::rt::sync::atomic::{AtomicU64, Ordering};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process;

use freestone_core::client_log;

use crate::format::CHUNK_BYTES;
use crate::format::name::Name;
use crate::objects::CallLimits;
pub use entry::{Entry, ReadOutcome};
pub use lock::FetchLock;

/// Smallest size limit of a cache, in bytes.
pub const BYTES_MIN: u64 = 64 << 20;
/// Default size limit of a cache, in bytes.
pub const BYTES_DEFAULT: u64 = 16 << 30;
const CHUNKS: &str = "chunks";
const META: &str = "meta";
const NEW: &str = "new";

/// Cache of chunks and image descriptions in a local directory.
#[derive(Debug)]
pub struct Cache {
    dir: PathBuf,
    limit: u64,
    next: AtomicU64,
}

impl Cache {
    /// Opens the cache in the directory `dir`, with a size limit of `limit` bytes. Creates the directory if
    /// necessary.
    ///
    /// # Errors
    /// `limit` is below [`BYTES_MIN`], or the directory cannot be created or written.
    pub fn open(dir: impl Into<PathBuf>, limit: u64) -> io::Result<Arc<Self>> {
        let dir = dir.into();
        if limit < BYTES_MIN {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a cache has 64 MiB at least"));
        }
        for part in [CHUNKS, META, NEW] {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(dir.join(part))?;
        }
        let cache = Self { dir, limit, next: AtomicU64::new(0) };
        // Missing write permission is reported now rather than at the first fetch.
        drop(cache.open_usage()?);
        drop(cache.open_fetching()?);
        Ok(Arc::new(cache))
    }

    /// Returns the path of the directory of the cache.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the size limit of the cache in bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    fn path(&self, part: &str, name: &Name) -> PathBuf {
        let name = name.to_string();
        self.dir.join(part).join(&name[..2]).join(name)
    }

    /// Returns true if the cache has a file for the chunk. The file may be damaged.
    pub fn has(&self, name: &Name) -> bool {
        self.path(CHUNKS, name).exists()
    }

    /// Opens the file of a cached chunk. Returns `None` if the chunk is not cached or the file cannot be
    /// opened. Deletes a damaged file. May wait for the disk.
    pub fn find(&self, name: &Name) -> Option<Entry> {
        freestone_core::trail::step!();
        let path = self.path(CHUNKS, name);
        let entry = Entry::open(&path, name);
        match &entry {
            Ok(Some(entry)) => entry.mark_used(),
            Err(why) if why.kind() == io::ErrorKind::InvalidData => {
                client_log!(warn, "{}: {why}; it is fetched again", path.display());
                let _ = fs::remove_file(&path);
            }
            // The chunk is not cached, or its file is kept because the error may be temporary.
            Ok(None) | Err(_) => {}
        }
        entry.ok().flatten()
    }

    /// Deletes the file of a chunk whose pages do not match their checksums.
    pub fn discard(&self, name: &Name) {
        let path = self.path(CHUNKS, name);
        client_log!(warn, "{}: is damaged; it is fetched again", path.display());
        let _ = fs::remove_file(path);
    }

    /// Adds a chunk to the cache, and opens its file.
    ///
    /// # Errors
    /// The file cannot be written, or a limit of the call was reached. The chunk is then not cached.
    pub fn insert(&self, name: &Name, pages: &[u8], limits: CallLimits<'_>) -> io::Result<Entry> {
        let trailer = entry::trailer(name, pages);
        let path = self.path(CHUNKS, name);
        self.add(&path, &[pages, &trailer], limits)?;
        Entry::open(&path, name)?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Returns a cached image or store description, or `None` if it is not cached. The caller must verify the
    /// content.
    pub fn get_meta(&self, name: &Name) -> Option<Vec<u8>> {
        freestone_core::trail::step!();
        let path = self.path(META, name);
        let bytes = fs::read(&path).ok()?;
        if let Ok(file) = File::open(&path) {
            entry::touch(&file);
        }
        Some(bytes)
    }

    /// Adds an image or store description to the cache.
    ///
    /// # Errors
    /// The file cannot be written, or a limit of the call was reached. The description is then not cached.
    pub fn insert_meta(&self, name: &Name, content: &[u8], limits: CallLimits<'_>) -> io::Result<()> {
        self.add(&self.path(META, name), &[content], limits)
    }

    /// Writes the concatenated `parts` to the file `path`. Evicts other files if the size limit would be
    /// exceeded.
    fn add(&self, path: &Path, parts: &[&[u8]], limits: CallLimits<'_>) -> io::Result<()> {
        freestone_core::trail::step!();
        let bytes: u64 = parts.iter().map(|part| part.len() as u64).sum();
        // Relaxed: the numbers in file names only have to differ.
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let new = self.dir.join(NEW).join(format!(
            "{}-{number}-{}",
            process::id(),
            crate::rt::unique_id().simple()
        ));
        let mut file = self.reserve(&new, bytes, limits)?;
        let written = (|| {
            parts.iter().try_for_each(|part| file.write_all(part))?;
            if let Some(dir) = path.parent() {
                fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
            }
            fs::rename(&new, path)
        })();
        if written.is_err() {
            let _ = fs::remove_file(&new);
        }
        written
    }
}

const _: () = assert!(2 * CHUNK_BYTES < BYTES_MIN as usize);

#[cfg(test)]
mod tests;
