//! What a file that is an origin says beside its data: that a merge into it is under way, and where the merge's store is.

use std::sync::Arc;

use freestone::cow::Notes;
use freestone::file::File;
use tracing::warn;

/// The attribute `user.freestone.merge`: `NUMBER STORE`, the number in hexadecimal digits.
const NOTE: &str = "merge";

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
