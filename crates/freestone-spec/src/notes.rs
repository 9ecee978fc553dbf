//! What an origin says beside its data: that a merge into it is under way, and where the merge's
//! store is; and with what content it and its stores were closed. Files have attributes for that.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use freestone::cow::{Left, Notes, Stamp};
use freestone::file::File;
use tracing::warn;

/// The attribute `user.freestone.merge`: `NUMBER STORE`, the number in hexadecimal digits.
const NOTE: &str = "merge";
/// The attribute `user.freestone.snapshots`: `closed CONTENT MTIME SIZE`, the time in nanoseconds;
/// or `in use`.
const CONTENT: &str = "snapshots";
const IN_USE: &str = "in use";

/// The notes of a file.
#[derive(Clone)]
pub struct FileNotes {
    file: Arc<File>,
    /// The merge under way: read once, when the file is opened, and changed with the attribute. So
    /// an attribute that cannot be read later does not make a half-merged origin look whole.
    merge: Arc<Mutex<Option<Merge>>>,
}

/// A merge into a file that is under way.
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
    /// A sentence: the note of a merge cannot be read, so nobody knows whether the file is half
    /// merged.
    pub fn read(file: Arc<File>) -> Result<Self, String> {
        let merge = under_way(&file).map_err(|error| {
            format!(
                "{}: cannot read its attribute user.freestone.{NOTE}, which says whether a merge into it is under way: \
                 {error}; it is not served until the attribute can be read or is removed",
                file.path().display()
            )
        })?;
        Ok(Self { file, merge: Arc::new(Mutex::new(merge)) })
    }

    fn merge_now(&self) -> MutexGuard<'_, Option<Merge>> {
        // A panic cannot leave an assignment half done, so poisoning is ignored.
        self.merge.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says why the file is not served as the device `name`; `None` if no merge is under way.
    pub fn half_merged(&self, name: &str) -> Option<String> {
        let Merge { store, .. } = self.merge_now().clone()?;
        Some(format!(
            "{}: a merge into it is under way, and it is half old, half new; serve it together with the snapshot that is merged: \
             NAME=snapshot,origin={name},cow={store},merge=yes",
            self.file.path().display()
        ))
    }
}

impl Notes for FileNotes {
    fn merge(&self) -> Option<u64> {
        self.merge_now().as_ref().map(|merge| merge.id)
    }

    fn merge_begins(&self, id: u64, store: &str) {
        *self.merge_now() = Some(Merge { id, store: store.to_owned() });
        if let Err(error) = self.file.set_note(NOTE, &format!("{id:016x} {store}")) {
            let path = self.file.path().display();
            warn!("{path}: cannot be told beside its data that it is being merged into: {error}");
        }
    }

    fn merge_ended(&self) -> bool {
        *self.merge_now() = None;
        let removed = self.file.remove_note(NOTE);
        if let Err(error) = &removed {
            let path = self.file.path().display();
            warn!("{path}: its attribute user.freestone.merge could not be taken away: {error}");
        }
        removed.is_ok()
    }

    fn left(&self) -> Option<Left> {
        match self.file.note(CONTENT) {
            Ok(text) => Some(closed(&text?, self.file.found()).unwrap_or(Left::InUse)),
            // A note that cannot be read says as little as a crash.
            Err(_) => Some(Left::InUse),
        }
    }

    fn in_use(&self) -> bool {
        self.file.set_note(CONTENT, IN_USE).is_ok()
    }

    fn closed(&self, content: Stamp) {
        // Without a time the file stays noted as in use, so the next user knows nothing.
        let Some((time, size)) = self.file.modified() else { return };
        if let Err(error) = self.file.set_note(CONTENT, &format!("closed {content} {time} {size}")) {
            let path = self.file.path().display();
            warn!("{path}: cannot be told beside its data that it was closed in order: {error}");
        }
    }
}

/// What a file that was closed in order says, and whether it was modified before it was opened
/// again.
fn closed(text: &str, found: Option<(i128, u64)>) -> Option<Left> {
    let [content, time, size] =
        text.strip_prefix("closed ")?.split(' ').collect::<Vec<_>>().try_into().ok()?;
    let then = (time.parse().ok()?, size.parse().ok()?);
    Some(Left::Closed { content: content.parse().ok()?, changed: found? != then })
}

/// The notes of what is in memory: they end with it.
#[derive(Default)]
pub struct MemoryNotes(Mutex<Option<u64>>);

impl MemoryNotes {
    fn merge_id(&self) -> MutexGuard<'_, Option<u64>> {
        // A number cannot be half done.
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

/// Reads the note of a merge into a file. A note that is not understood is an error.
fn under_way(file: &File) -> io::Result<Option<Merge>> {
    let Some(text) = file.note(NOTE)? else { return Ok(None) };
    let merge = text.split_once(' ').and_then(|(id, store)| {
        Some(Merge { id: u64::from_str_radix(id, 16).ok()?, store: store.to_owned() })
    });
    merge.map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into())
}
