//! Pages on a local disk, so that they come over the network once: a directory that all servers of a
//! user share.
//!
//! Each chunk is a file with its pages as they are, 4 KiB each, and a checksum for each, so a page is
//! read by itself, and where it is in the kernel's page cache without waiting. What does not fit its
//! checksum is not served; the file goes, and the chunk is fetched again. Files may be deleted at any
//! time, also by hand: whoever has one open goes on with it.
//!
//! ```text
//! chunks/HH/NAME   pages, and a page with their checksums
//! meta/HH/NAME     maps and manifests, as their names say
//! new/             what is not complete
//! usage            bytes of all these, in decimal; locked by who adds to it
//! fetching         a byte of it is locked by who fetches an object: one fetch on a host
//! ```
//!
//! **Bound.** Who adds a file first adds its bytes to `usage`. Where that would go beyond the limit, the
//! files that were used least recently are deleted, an eighth of the limit at a time, and `usage` is
//! counted anew, so what a crash left wrong there lasts until then. A file's time of modification says
//! when it was last used, to ten minutes.

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

/// The smallest limit in bytes.
pub const BYTES_MIN: u64 = 64 << 20;
/// The limit where nothing was said.
pub const BYTES_USUAL: u64 = 16 << 30;
const CHUNKS: &str = "chunks";
const META: &str = "meta";
const NEW: &str = "new";

/// A directory with pages.
#[derive(Debug)]
pub struct Cache {
    dir: PathBuf,
    limit: u64,
    next: AtomicU64,
}

impl Cache {
    /// Opens it; the directory is made where it is not there.
    ///
    /// # Errors
    /// It cannot be made or written. `limit` is below [`BYTES_MIN`].
    pub fn open(dir: impl Into<PathBuf>, limit: u64) -> io::Result<Arc<Self>> {
        let dir = dir.into();
        if limit < BYTES_MIN {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a cache has 64 MiB at least"));
        }
        for part in [CHUNKS, META, NEW] {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(dir.join(part))?;
        }
        let cache = Self { dir, limit, next: AtomicU64::new(0) };
        // Whether it can be written shows now.
        drop(cache.usage()?);
        drop(cache.fetching()?);
        Ok(Arc::new(cache))
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Most bytes of it.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    fn path(&self, part: &str, name: &Name) -> PathBuf {
        let name = name.to_string();
        self.dir.join(part).join(&name[..2]).join(name)
    }

    /// Whether a chunk is there.
    pub fn has(&self, name: &Name) -> bool {
        self.path(CHUNKS, name).exists()
    }

    /// The pages of a chunk, if they are there. Waits for the disk.
    pub fn find(&self, name: &Name) -> Option<Entry> {
        let path = self.path(CHUNKS, name);
        let entry = Entry::open(&path, name);
        match &entry {
            Ok(Some(entry)) => entry.used(),
            Err(why) if why.kind() == io::ErrorKind::InvalidData => {
                client_log!(warn, "{}: {why}; it is fetched again", path.display());
                let _ = fs::remove_file(&path);
            }
            // Another look may find it.
            Ok(None) | Err(_) => {}
        }
        entry.ok().flatten()
    }

    /// Takes a chunk out, as its pages do not fit their checksums.
    pub fn discard(&self, name: &Name) {
        let path = self.path(CHUNKS, name);
        client_log!(warn, "{}: is damaged; it is fetched again", path.display());
        let _ = fs::remove_file(path);
    }

    /// Keeps the pages of a chunk.
    ///
    /// # Errors
    /// What the disk says. The pages are not kept then.
    pub fn keep(&self, name: &Name, pages: &[u8], until: Until<'_>) -> io::Result<Entry> {
        let trailer = entry::trailer(name, pages);
        let path = self.path(CHUNKS, name);
        self.add(&path, &[pages, &trailer], until)?;
        Entry::open(&path, name)?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// What describes images, if it is there; to be verified.
    pub fn find_meta(&self, name: &Name) -> Option<Vec<u8>> {
        let path = self.path(META, name);
        let bytes = fs::read(&path).ok()?;
        if let Ok(file) = File::open(&path) {
            entry::touch(&file);
        }
        Some(bytes)
    }

    /// Keeps what describes images.
    ///
    /// # Errors
    /// What the disk says. It is not kept then.
    pub fn keep_meta(&self, name: &Name, content: &[u8], until: Until<'_>) -> io::Result<()> {
        self.add(&self.path(META, name), &[content], until)
    }

    /// Adds a file, within the limit.
    fn add(&self, path: &Path, parts: &[&[u8]], until: Until<'_>) -> io::Result<()> {
        let bytes: u64 = parts.iter().map(|part| part.len() as u64).sum();
        // Relaxed: only the numbers have to differ.
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
