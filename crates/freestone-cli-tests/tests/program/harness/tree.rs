//! Directory trees of real files, and file system images made from them.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, symlink};
use std::path::{Path, PathBuf};

use super::tools::{KIB, MIB, noise, ok, tool};

/// Directories from which files are copied: our own source code, and programs and documents of this
/// machine.
const SOURCES: [&str; 4] =
    [concat!(env!("CARGO_MANIFEST_DIR"), "/.."), "/usr/share/doc", "/usr/bin", "/usr/lib"];
/// Largest file that is copied, in bytes: many small files test a file system better than a few
/// large ones.
const FILE_BYTES_MAX: u64 = 8 * MIB;
/// Each source directory provides at most 1/SHARES of the bytes of a tree, so every tree has text
/// and code.
const SHARES: u64 = 3;

/// Creates a directory tree of about `bytes` bytes in `dir`, also with links, a sparse file and an
/// empty file.
pub fn plant(dir: &Path, bytes: u64) {
    fs::create_dir(dir).unwrap();
    let mut planted = 0;
    for (number, place) in SOURCES.iter().enumerate() {
        let mut left = (bytes / SHARES).min(bytes.saturating_sub(planted));
        let before = left;
        copy(Path::new(place), &dir.join(number.to_string()), &mut left);
        planted += before - left;
    }
    // A minimal machine may have too few files in these directories.
    if planted < bytes / 2 {
        fs::write(dir.join("noise"), noise(1, bytes / 2)).unwrap();
    }
    fs::create_dir_all(dir.join("deep/a/b/c/d/e")).unwrap();
    fs::write(dir.join("deep/a/b/c/d/e/empty"), "").unwrap();
    fs::write(dir.join("Größe mit Leerzeichen"), "x").unwrap();
    symlink("deep/a", dir.join("link")).unwrap();
    fs::hard_link(dir.join("Größe mit Leerzeichen"), dir.join("same")).unwrap();
    let sparse = File::create(dir.join("sparse")).unwrap();
    sparse.set_len(4 * MIB).unwrap();
    sparse.write_all_at(b"end", 4 * MIB - 3).unwrap();
    sparse.write_all_at(&[7; 100], 300 * KIB).unwrap();
}

/// Copies regular files and directories until `left` bytes are copied. Subtracts the copied bytes
/// from `left`.
fn copy(from: &Path, to: &Path, left: &mut u64) {
    let Ok(entries) = fs::read_dir(from) else { return };
    let mut entries: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    entries.sort();
    fs::create_dir(to).unwrap();
    for entry in entries {
        if *left == 0 {
            return;
        }
        let Ok(metadata) = fs::symlink_metadata(&entry) else { continue };
        let target = to.join(entry.file_name().unwrap());
        if metadata.is_dir() {
            copy(&entry, &target, left);
        } else if metadata.is_file() && metadata.len() <= FILE_BYTES_MAX && fs::copy(&entry, &target).is_ok()
        {
            *left = left.saturating_sub(metadata.len().next_multiple_of(4 * KIB));
        }
    }
}

/// Creates the ext4 image `image` of `size` bytes in `dir`, with about `bytes` bytes of real files.
/// Returns its path.
pub fn ext4_image(dir: &Path, bytes: u64, size: u64) -> PathBuf {
    let (tree, image) = (dir.join("tree"), dir.join("image"));
    plant(&tree, bytes);
    let blocks = (size / KIB).to_string();
    ok(tool("mke2fs").args(["-q", "-t", "ext4", "-F", "-d"]).arg(&tree).arg(&image).arg(blocks + "k"));
    check(&image);
    image
}

/// Checks that e2fsck finds no error in the file system image.
#[track_caller]
pub fn check(image: &Path) {
    ok(tool("e2fsck").arg("-fn").arg(image));
}
