//! Directories in `content` that belong to no device.
//!
//! The content may be needed again if another state is put in place, for example an older copy. So the first start that
//! finds such a directory marks it with a file, and a start at least [`GRACE`] later removes it.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tracing::warn;
use uuid::Uuid;

/// Time after which content that belongs to no device is removed.
const GRACE: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// Name of the mark file. Its modification time is that of the first start that found the directory unused.
const MARK: &str = "unused";

/// Returns the paths of the directories with saved content, sorted. Logs a warning about every other entry.
pub fn directories(content: &Path) -> io::Result<Vec<PathBuf>> {
    let rows = match fs::read_dir(content) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        rows => rows?,
    };
    let mut all = Vec::new();
    for row in rows {
        let row = row?;
        let name = row.file_name();
        // Accepts only the form of a UUID that the server writes: 32 lowercase hexadecimal digits.
        let is_ours = |text: &str| Uuid::parse_str(text).is_ok_and(|uuid| uuid.simple().to_string() == text);
        // Follows symbolic links, for example to a directory on another disk. An entry that cannot be examined
        // counts as a directory, so that opening it fails and its devices are refused.
        let is_dir = match fs::metadata(row.path()) {
            Ok(meta) => meta.is_dir(),
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        };
        if is_dir && name.to_str().is_some_and(is_ours) {
            all.push(row.path());
        } else {
            warn!("{}: ignored, because it is not a directory of kept content", row.path().display());
        }
    }
    all.sort();
    Ok(all)
}

/// Returns true if a directory has belonged to no device for [`GRACE`]. Marks a directory without a mark. Returns false
/// if the mark cannot be read or created. Replaces a mark older than `saved`, the time of the newest save in the
/// directory: the clock was wrong when the mark was created.
pub fn has_expired(dir: &Path, saved: SystemTime) -> bool {
    let mark = dir.join(MARK);
    let since = match fs::metadata(&mark).and_then(|meta| meta.modified()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => make(&mark),
        Ok(since) if since < saved => make(&mark),
        since => since,
    };
    match since {
        Ok(since) => since.elapsed().is_ok_and(|age| age >= GRACE),
        Err(why) => {
            warn!("{}: cannot be marked as unused: {why}", dir.display());
            false
        }
    }
}

fn make(mark: &Path) -> io::Result<SystemTime> {
    let now = SystemTime::now();
    File::create(mark)?.set_modified(now).map(|()| now)
}

/// Removes the mark of a directory, if it has one.
pub fn unmark(dir: &Path) {
    match fs::remove_file(dir.join(MARK)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            warn!("{}: stays marked as unused: {error}", dir.display());
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_directory_expires_after_grace() {
        let dir = tempfile::tempdir().unwrap();
        let saved = SystemTime::now() - 2 * GRACE;
        let has_expired = || has_expired(dir.path(), saved);
        let age = |age: Duration| {
            let mark = File::options().write(true).open(dir.path().join(MARK)).unwrap();
            mark.set_modified(SystemTime::now() - age).unwrap();
        };
        assert!(!has_expired() && !has_expired());
        age(GRACE);
        assert!(has_expired());
        // A mark older than the save means that the clock was wrong, so the mark is replaced.
        age(3 * GRACE);
        assert!(!has_expired() && !has_expired());
        age(GRACE);
        unmark(dir.path());
        assert!(!has_expired());
    }

    #[test]
    fn foreign_names_are_not_listed() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("0123456789abcdef0123456789abcdef");
        for name in ["backup", "0123456789ABCDEF0123456789abcdef", "01234567-89ab-cdef-0123-456789abcdef"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        fs::create_dir(&own).unwrap();
        fs::write(dir.path().join("fedcba9876543210fedcba9876543210"), "a file").unwrap();
        assert_eq!(directories(dir.path()).unwrap(), [own]);
        assert!(directories(&dir.path().join("none")).unwrap().is_empty());
    }
}
