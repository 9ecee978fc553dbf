//! What an origin says beside its data: that a merge into it is under way, and where the merge's
//! store is; and with what content it and its stores were closed. Files have attributes for that.

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
pub struct FileNotes(pub Arc<File>);

impl Notes for FileNotes {
    fn merge(&self) -> Option<u64> {
        under_way(&self.0).map(|(id, _)| id)
    }

    fn merge_begins(&self, id: u64, store: &str) {
        if let Err(error) = self.0.set_note(NOTE, &format!("{id:016x} {store}")) {
            let path = self.0.path().display();
            warn!("{path}: cannot be told beside its data that it is being merged into: {error}");
        }
    }

    fn merge_ended(&self) {
        if let Err(error) = self.0.remove_note(NOTE) {
            let path = self.0.path().display();
            warn!("{path}: its attribute user.freestone.merge could not be taken away: {error}");
        }
    }

    fn left(&self) -> Option<Left> {
        let text = self.0.note(CONTENT)?;
        // What is not understood says as little as a crash.
        Some(closed(&text, self.0.found()).unwrap_or(Left::InUse))
    }

    fn in_use(&self) -> bool {
        self.0.set_note(CONTENT, IN_USE).is_ok()
    }

    fn closed(&self, content: Stamp) {
        let Some((time, size)) = self.0.modified() else { return };
        if let Err(error) = self.0.set_note(CONTENT, &format!("closed {content} {time} {size}")) {
            let path = self.0.path().display();
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

    fn merge_ended(&self) {
        *self.merge_id() = None;
    }

    fn in_use(&self) -> bool {
        true
    }
}

/// The number of the merge into a file that is under way, and where its store is.
fn under_way(file: &File) -> Option<(u64, String)> {
    let text = file.note(NOTE)?;
    let (id, store) = text.split_once(' ')?;
    Some((u64::from_str_radix(id, 16).ok()?, store.to_owned()))
}

/// Why a file is not served as it is; `None` where nobody is merging into it.
pub fn half_merged(file: &File, name: &str) -> Option<String> {
    let (_, store) = under_way(file)?;
    Some(format!(
        "{}: a merge into it is under way, and it is half old, half new; serve it together with the snapshot that is merged: \
         NAME=snapshot,origin={name},cow={store},merge=yes",
        file.path().display()
    ))
}
