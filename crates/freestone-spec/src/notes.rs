//! Notes of snapshot origins: the merge in progress and its store, and the content with which the
//! origin and its stores were closed. The notes of a file are extended attributes of the file; those
//! of a device in memory end with the device. `freestone::cow` reads and writes them.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use freestone::cow::{Left, Notes, Stamp};
use freestone::file::File;
use tracing::warn;

/// Attribute `user.freestone.merge`: `NUMBER STORE`, the number in hexadecimal digits.
const NOTE: &str = "merge";
/// Attribute `user.freestone.snapshots`: `closed CONTENT MTIME SIZE`, the time in nanoseconds; or
/// `in use`.
const CONTENT: &str = "snapshots";
const IN_USE: &str = "in use";

/// Notes of a file.
#[derive(Clone)]
pub struct FileNotes {
    file: Arc<File>,
    /// Merge in progress. Read once, when the file is opened, and changed with the attribute, so that
    /// a later read error cannot make a half-merged origin look whole.
    merge: Arc<Mutex<Option<Merge>>>,
}

/// A merge into a file.
#[derive(Debug, Clone)]
struct Merge {
    id: u64,
    /// Path of the store that is merged.
    store: String,
}

impl FileNotes {
    /// Reads the notes of a file.
    ///
    /// # Errors
    /// Returns a message if the note of a merge cannot be read. The file may be half merged then.
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

    fn lock_merge(&self) -> MutexGuard<'_, Option<Merge>> {
        // A panic cannot leave an assignment half done, so poisoning is ignored.
        self.merge.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the error message if a merge into the file was not finished, so that it cannot be served
    /// alone as the device `name`.
    pub fn half_merged_message(&self, name: &str) -> Option<String> {
        let Merge { store, .. } = self.lock_merge().clone()?;
        Some(format!(
            "{}: an unfinished merge left it half old, half new; serve it together with the snapshot that is merged: \
             NAME=snapshot,origin={name},cow={store},merge=yes",
            self.file.path().display()
        ))
    }
}

impl Notes for FileNotes {
    fn merge(&self) -> Option<u64> {
        self.lock_merge().as_ref().map(|merge| merge.id)
    }

    fn merge_begins(&self, id: u64, store: &str) {
        *self.lock_merge() = Some(Merge { id, store: store.to_owned() });
        if let Err(error) = self.file.set_note(NOTE, &format!("{id:016x} {store}")) {
            let path = self.file.path().display();
            warn!(
                "{path}: cannot set its attribute user.freestone.merge, which records the merge into it: {error}"
            );
        }
    }

    fn merge_ended(&self) -> bool {
        *self.lock_merge() = None;
        let removed = self.file.remove_note(NOTE);
        if let Err(error) = &removed {
            let path = self.file.path().display();
            warn!("{path}: cannot remove its attribute user.freestone.merge: {error}");
        }
        removed.is_ok()
    }

    fn left(&self) -> Option<Left> {
        match self.file.note(CONTENT) {
            Ok(text) => Some(parse_closed(&text?, self.file.found()).unwrap_or(Left::InUse)),
            // A note that cannot be read is treated as after a crash.
            Err(_) => Some(Left::InUse),
        }
    }

    fn in_use(&self) -> bool {
        self.file.set_note(CONTENT, IN_USE).is_ok()
    }

    fn closed(&self, content: Stamp) {
        // Without a time the note stays "in use", so that the next open assumes changes.
        let Some((time, size)) = self.file.modified() else { return };
        if let Err(error) = self.file.set_note(CONTENT, &format!("closed {content} {time} {size}")) {
            let path = self.file.path().display();
            warn!(
                "{path}: cannot set its attribute user.freestone.snapshots, which records its orderly close: {error}"
            );
        }
    }
}

/// Parses the note of a file that was closed in order, and checks whether the file was modified
/// since.
fn parse_closed(text: &str, found: Option<(i128, u64)>) -> Option<Left> {
    let [content, time, size] =
        text.strip_prefix("closed ")?.split(' ').collect::<Vec<_>>().try_into().ok()?;
    let then = (time.parse().ok()?, size.parse().ok()?);
    Some(Left::Closed { content: content.parse().ok()?, changed: found? != then })
}

/// Notes of a device in memory.
#[derive(Default)]
pub struct MemoryNotes(Mutex<Option<u64>>);

impl MemoryNotes {
    fn merge_id(&self) -> MutexGuard<'_, Option<u64>> {
        // A panic cannot leave an assignment half done, so poisoning is ignored.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Notes for MemoryNotes {
    fn merge(&self) -> Option<u64> {
        *self.merge_id()
    }

    fn merge_begins(&self, id: u64, _: &str) {
        *self.merge_id() = Some(id);
    }

    fn merge_ended(&self) -> bool {
        *self.merge_id() = None;
        true
    }

    fn in_use(&self) -> bool {
        true
    }
}

/// Reads the note of a merge into a file. An unknown format is an error.
fn read_merge(file: &File) -> io::Result<Option<Merge>> {
    let Some(text) = file.note(NOTE)? else { return Ok(None) };
    let merge = text.split_once(' ').and_then(|(id, store)| {
        Some(Merge { id: u64::from_str_radix(id, 16).ok()?, store: store.to_owned() })
    });
    merge.map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into())
}
