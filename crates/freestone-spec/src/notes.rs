//! Notes of the origins of snapshots: the merge in progress, and the content version with which the
//! origin and its COW stores were closed. The notes of a file are extended attributes of the file;
//! those of a device in memory end with the device. `freestone::cow` reads and writes the notes.

use std::io;
use std::sync::Arc;

use freestone::cow::{LastSession, Notes, Stamp};
use freestone::file::File;
use freestone::sync::Mutex;
use tracing::warn;

/// Name of the extended attribute `user.freestone.merge` for an unfinished merge. Its text is
/// `NUMBER STORE`: the number of the merge in hexadecimal, and the path of the COW store.
const NOTE: &str = "merge";
/// Name of the extended attribute `user.freestone.snapshots` for the content version. Its text is
/// `closed CONTENT MTIME SIZE`, with the time in nanoseconds, or `in use`.
const CONTENT: &str = "snapshots";
const IN_USE: &str = "in use";

/// Notes of an origin that is a file.
#[derive(Clone)]
pub struct FileNotes {
    file: Arc<File>,
    /// Merge in progress, or `None`. Read from the attribute only when the file is opened, so that
    /// a later read error cannot hide that the origin is half merged.
    merge: Arc<Mutex<Option<Merge>>>,
}

/// Unfinished merge of a snapshot into a file.
#[derive(Debug, Clone)]
struct Merge {
    id: u64,
    /// Path of the COW store that is merged.
    store: String,
}

impl FileNotes {
    /// Reads the notes of an open file.
    ///
    /// # Errors
    /// Returns a message if the note about a merge cannot be read, because the file may be half
    /// merged.
    pub fn read(file: Arc<File>) -> Result<Self, String> {
        let merge = read_merge(&file).map_err(|error| {
            format!(
                "{}: cannot read its attribute user.freestone.{NOTE}, which records an unfinished merge: \
                 {error}; the file is not served until the attribute can be read or is removed",
                file.path().display()
            )
        })?;
        Ok(Self { file, merge: Arc::new(Mutex::new(merge)) })
    }

    /// Returns the error message if a merge into the file was not finished, so that the file cannot
    /// be served without the snapshot. `name` is the device of the file. Returns `None` otherwise.
    pub fn half_merged_message(&self, name: &str) -> Option<String> {
        let Merge { store, .. } = self.merge.lock().clone()?;
        Some(format!(
            "{}: an unfinished merge left it half old, half new; serve it together with the snapshot that is merged: \
             NAME=snapshot,origin={name},cow={store},merge=yes",
            self.file.path().display()
        ))
    }
}

impl Notes for FileNotes {
    fn merge_id(&self) -> Option<u64> {
        self.merge.lock().as_ref().map(|merge| merge.id)
    }

    fn record_merge(&self, id: u64, store: &str) {
        *self.merge.lock() = Some(Merge { id, store: store.to_owned() });
        if let Err(error) = self.file.set_xattr(NOTE, &format!("{id:016x} {store}")) {
            let path = self.file.path().display();
            warn!(
                "{path}: cannot set its attribute user.freestone.merge, which records the merge into it: {error}"
            );
        }
    }

    fn remove_merge(&self) -> bool {
        *self.merge.lock() = None;
        let removed = self.file.remove_xattr(NOTE);
        if let Err(error) = &removed {
            let path = self.file.path().display();
            warn!("{path}: cannot remove its attribute user.freestone.merge: {error}");
        }
        removed.is_ok()
    }

    fn last_session(&self) -> Option<LastSession> {
        match self.file.xattr(CONTENT) {
            Ok(text) => {
                Some(parse_closed(&text?, self.file.modified_at_open()).unwrap_or(LastSession::InUse))
            }
            // If the note cannot be read, the file is treated as after a crash.
            Err(_) => Some(LastSession::InUse),
        }
    }

    fn record_in_use(&self) -> bool {
        self.file.set_xattr(CONTENT, IN_USE).is_ok()
    }

    fn record_close(&self, content: Stamp) {
        // Without the modification time, the note stays "in use", so that the next open assumes
        // that the file was changed.
        let Some((time, size)) = self.file.modified() else { return };
        if let Err(error) = self.file.set_xattr(CONTENT, &format!("closed {content} {time} {size}")) {
            let path = self.file.path().display();
            warn!(
                "{path}: cannot set its attribute user.freestone.snapshots, which records its orderly close: {error}"
            );
        }
    }
}

/// Parses the note of a file that was closed in a clean shutdown, and checks whether the file was
/// modified since. `found` is its present modification time and size.
fn parse_closed(text: &str, found: Option<(i128, u64)>) -> Option<LastSession> {
    let [content, time, size] =
        text.strip_prefix("closed ")?.split(' ').collect::<Vec<_>>().try_into().ok()?;
    let then = (time.parse().ok()?, size.parse().ok()?);
    Some(LastSession::Closed { content: content.parse().ok()?, changed: found? != then })
}

/// Notes of an origin in memory: the number of the merge in progress.
#[derive(Default)]
pub struct MemoryNotes(Mutex<Option<u64>>);

impl Notes for MemoryNotes {
    fn merge_id(&self) -> Option<u64> {
        *self.0.lock()
    }

    fn record_merge(&self, id: u64, _: &str) {
        *self.0.lock() = Some(id);
    }

    fn remove_merge(&self) -> bool {
        *self.0.lock() = None;
        true
    }

    fn record_in_use(&self) -> bool {
        true
    }
}

/// Reads the note about an unfinished merge into a file, or returns `None` without one. An unknown
/// format is an error.
fn read_merge(file: &File) -> io::Result<Option<Merge>> {
    let Some(text) = file.xattr(NOTE)? else { return Ok(None) };
    let merge = text.split_once(' ').and_then(|(id, store)| {
        Some(Merge { id: u64::from_str_radix(id, 16).ok()?, store: store.to_owned() })
    });
    merge.map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into())
}
