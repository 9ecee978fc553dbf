//! Fills the directory trees of the packages with files in their installed places.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use super::NAME;
use super::program::Parts;
use crate::cargo::output;

/// Files that are copied unchanged: source, destination, mode. For a directory, the [`PAGES`] below it are copied.
const COPIES: [(&str, &str, u32); 12] = [
    ("packaging/ci/freestone-ci", "usr/lib/freestone/freestone-ci", 0o755),
    ("packaging/systemd/freestone-mkfs", "usr/lib/freestone/freestone-mkfs", 0o755),
    ("packaging/udev/freestone-name", "usr/lib/freestone/freestone-name", 0o755),
    ("packaging/udev/61-freestone-names.rules", "usr/lib/udev/rules.d/61-freestone-names.rules", 0o644),
    ("packaging/etc/freestone.toml", "etc/freestone.toml", 0o644),
    ("packaging/etc/freestone-server.toml", "etc/freestone-server.toml", 0o644),
    // These files affect other users of the machine, so the package installs them as examples only.
    (
        "packaging/udev/60-freestone-ublk.rules",
        "usr/share/doc/freestone/examples/60-freestone-ublk.rules",
        0o644,
    ),
    ("packaging/systemd/tmp.mount", "usr/share/doc/freestone/examples/tmp.mount", 0o644),
    ("packaging/systemd/srv-build.mount", "usr/share/doc/freestone/examples/srv-build.mount", 0o644),
    ("README.md", "usr/share/doc/freestone/README.md", 0o644),
    ("CHANGELOG.md", "usr/share/doc/freestone/CHANGELOG.md", 0o644),
    ("docs", "usr/share/doc/freestone/docs", 0o644),
];
/// Extensions of pages and of the pictures that pages show. Published runs in JSON stay out of the package.
const PAGES: [&str; 3] = ["md", "png", "svg"];
const UNITS: &str = "packaging/systemd";
const UNITS_INSTALLED: &str = "usr/lib/systemd/system";
/// Sections of the manual with pages.
const MANUAL_SECTIONS: [&str; 2] = ["1", "7"];
/// Completions: path below the manuals directory, and the path where the shell looks for it.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash/freestone", "usr/share/bash-completion/completions/freestone"),
    ("zsh/_freestone", "usr/share/zsh/vendor-completions/_freestone"),
    ("fish/freestone.fish", "usr/share/fish/vendor_completions.d/freestone.fish"),
];

/// Files of the program's package that a build produces.
pub struct Program<'a> {
    pub parts: Parts,
    pub manuals: &'a Path,
}

pub fn fill(root: &Path, program: &Program<'_>, changelog: &str, copyright: &str) -> Result<()> {
    put(&program.parts.stripped, root, &format!("usr/bin/{NAME}"), 0o755)?;
    for (from, to, mode) in COPIES {
        let from = Path::new(from);
        if from.is_dir() {
            put_pages(from, root, to, mode)?;
        } else {
            put(from, root, to, mode)?;
        }
    }
    for kind in ["service", "socket"] {
        put_each(&files_of(Path::new(UNITS), kind)?, root, UNITS_INSTALLED, 0o644)?;
    }
    for section in MANUAL_SECTIONS {
        let pages = files_of(&program.manuals.join("man"), section)?;
        ensure!(!pages.is_empty(), "no manual pages of section {section} in {}", program.manuals.display());
        for page in put_each(&pages, root, &format!("usr/share/man/man{section}"), 0o644)? {
            gzip(&page)?;
        }
    }
    for (from, to) in COMPLETIONS {
        put(&program.manuals.join(from), root, to, 0o644)?;
    }
    let doc = root.join("usr/share/doc").join(NAME);
    write(&doc.join("copyright"), copyright)?;
    write(&doc.join("changelog"), changelog)?;
    gzip(&doc.join("changelog"))
}

/// Fills the tree of an archive, which can be copied to a prefix such as `/usr/local`.
pub fn fill_archive(root: &Path, program: &Program<'_>, copyright: &str) -> Result<()> {
    put(&program.parts.stripped, root, &format!("bin/{NAME}"), 0o755)?;
    for section in MANUAL_SECTIONS {
        let pages = files_of(&program.manuals.join("man"), section)?;
        put_each(&pages, root, &format!("share/man/man{section}"), 0o644)?;
    }
    for (from, to) in COMPLETIONS {
        put(&program.manuals.join(from), root, to.trim_start_matches("usr/"), 0o644)?;
    }
    for page in ["README.md", "CHANGELOG.md"] {
        put(Path::new(page), root, &format!("share/doc/{NAME}/{page}"), 0o644)?;
    }
    write(&root.join("share/doc").join(NAME).join("copyright"), copyright)
}

pub fn fill_symbols(root: &Path, parts: &Parts) -> Result<()> {
    let (first, rest) = parts.build_id.split_at(2);
    put(&parts.symbols, root, &format!("usr/lib/debug/.build-id/{first}/{rest}.debug"), 0o644)?;
    let doc = root.join("usr/share/doc");
    fs::create_dir_all(&doc)?;
    symlink(NAME, doc.join(format!("{NAME}-dbgsym"))).context("cannot make a link")
}

fn put_each(files: &[PathBuf], root: &Path, dir: &str, mode: u32) -> Result<Vec<PathBuf>> {
    let mut copied = Vec::new();
    for file in files {
        let to = format!("{dir}/{}", file.file_name().unwrap_or_default().to_string_lossy());
        put(file, root, &to, mode)?;
        copied.push(root.join(to));
    }
    Ok(copied)
}

/// Copies the pages below a directory, with their pictures.
fn put_pages(from: &Path, root: &Path, to: &str, mode: u32) -> Result<()> {
    for file in files(from)? {
        if file.extension().is_some_and(|is| PAGES.iter().any(|page| is == *page)) {
            put(&from.join(&file), root, &format!("{to}/{}", file.display()), mode)?;
        }
    }
    Ok(())
}

fn put(from: &Path, root: &Path, to: &str, mode: u32) -> Result<()> {
    let to = root.join(to);
    let dir = to.parent().unwrap_or(root);
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let cannot = || format!("cannot copy {} to {}", from.display(), to.display());
    fs::copy(from, &to).with_context(cannot)?;
    fs::set_permissions(&to, Permissions::from_mode(mode)).with_context(cannot)
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    fs::set_permissions(path, Permissions::from_mode(0o644)).context("cannot set a mode")
}

/// Compresses a file as Debian's policy requires: at the highest level and reproducibly.
fn gzip(path: &Path) -> Result<()> {
    output(Command::new("gzip").args(["-9", "-n"]).arg(path)).map(drop)
}

/// Returns the files of a directory that have an extension, sorted.
fn files_of(dir: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let path = entry?.path();
        if path.is_file() && path.extension().is_some_and(|is| is == extension) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Returns everything below `root` that is not a directory, as sorted paths relative to `root`.
pub fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut dirs = vec![root.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).with_context(|| format!("cannot read {}", dir.display()))? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                dirs.push(entry.path());
            } else {
                found.push(entry.path().strip_prefix(root)?.to_owned());
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Returns the total size of all files, in bytes.
pub fn size(root: &Path) -> Result<u64> {
    let mut bytes = 0;
    for path in files(root)? {
        bytes += root.join(path).symlink_metadata()?.len();
    }
    Ok(bytes)
}
