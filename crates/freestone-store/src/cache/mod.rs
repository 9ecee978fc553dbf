//! Cache of chunks and descriptions of images on a local disk: a directory shared by all servers of a user.
//!
//! Each chunk is a file with raw pages and a checksum for each page. So a page can be read by itself, and
//! without waiting if it is in the page cache. If a checksum does not match, the file is deleted and the
//! chunk is fetched again. Files may be deleted at any time, also manually; processes that have one open can
//! still use it.
//!
//! ```text
//! chunks/HH/NAME   pages, then a page with their checksums
//! meta/HH/NAME     maps and manifests under their names
//! new/             incomplete files
//! usage            total bytes of these files, in decimal; locked to add a file
//! fetching         a process locks a byte of this file while it fetches an object
//! ```
//!
//! **Size limit.** A process adds the size of a new file to `usage` first. If that would exceed the limit,
//! the least recently used files are deleted, an eighth of the limit at a time, and `usage` is counted again.
//! The count also corrects errors that a crash left in `usage`. The modification time of a file is its time
//! of last use, with a granularity of ten minutes.

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
use crate::objects::Until;
pub use entry::{Entry, Outcome};
pub use lock::FetchLock;

/// Smallest limit in bytes.
pub const BYTES_MIN: u64 = 64 << 20;
/// Default limit in bytes.
pub const BYTES_USUAL: u64 = 16 << 30;
const CHUNKS: &str = "chunks";
const META: &str = "meta";
const NEW: &str = "new";

/// Cache in a directory.
#[derive(Debug)]
pub struct Cache {
    dir: PathBuf,
    limit: u64,
    next: AtomicU64,
}

impl Cache {
    /// Opens a cache. Creates its directory if necessary.
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
        // Report missing write permission now.
        drop(cache.open_usage()?);
        drop(cache.open_fetching()?);
        Ok(Arc::new(cache))
    }

    /// Returns the directory of the cache.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the size limit in bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    fn path(&self, part: &str, name: &Name) -> PathBuf {
        let name = name.to_string();
        self.dir.join(part).join(&name[..2]).join(name)
    }

    /// Returns true if the cache has a chunk.
    pub fn has(&self, name: &Name) -> bool {
        self.path(CHUNKS, name).exists()
    }

    /// Opens a chunk if it is cached. May wait for the disk. Deletes a damaged file.
    pub fn find(&self, name: &Name) -> Option<Entry> {
        let path = self.path(CHUNKS, name);
        let entry = Entry::open(&path, name);
        match &entry {
            Ok(Some(entry)) => entry.mark_used(),
            Err(why) if why.kind() == io::ErrorKind::InvalidData => {
                client_log!(warn, "{}: {why}; it is fetched again", path.display());
                let _ = fs::remove_file(&path);
            }
            // The chunk is not cached, or the error may be temporary.
            Ok(None) | Err(_) => {}
        }
        entry.ok().flatten()
    }

    /// Removes a chunk whose pages do not match their checksums.
    pub fn discard(&self, name: &Name) {
        let path = self.path(CHUNKS, name);
        client_log!(warn, "{}: is damaged; it is fetched again", path.display());
        let _ = fs::remove_file(path);
    }

    /// Adds a chunk.
    ///
    /// # Errors
    /// The file cannot be written, or `until` ended. The chunk is then not cached.
    pub fn keep(&self, name: &Name, pages: &[u8], until: Until<'_>) -> io::Result<Entry> {
        let trailer = entry::trailer(name, pages);
        let path = self.path(CHUNKS, name);
        self.add(&path, &[pages, &trailer], until)?;
        Entry::open(&path, name)?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Returns a cached description of an image, unverified.
    pub fn find_meta(&self, name: &Name) -> Option<Vec<u8>> {
        let path = self.path(META, name);
        let bytes = fs::read(&path).ok()?;
        if let Ok(file) = File::open(&path) {
            entry::touch(&file);
        }
        Some(bytes)
    }

    /// Adds a description of an image.
    ///
    /// # Errors
    /// The file cannot be written, or `until` ended. The description is then not cached.
    pub fn keep_meta(&self, name: &Name, content: &[u8], until: Until<'_>) -> io::Result<()> {
        self.add(&self.path(META, name), &[content], until)
    }

    /// Adds a file within the size limit.
    fn add(&self, path: &Path, parts: &[&[u8]], until: Until<'_>) -> io::Result<()> {
        let bytes: u64 = parts.iter().map(|part| part.len() as u64).sum();
        // Relaxed: the numbers only have to differ.
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let new = self.dir.join(NEW).join(format!(
            "{}-{number}-{}",
            process::id(),
            crate::rt::unique_id().simple()
        ));
        let mut file = self.reserve(&new, bytes, until)?;
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
