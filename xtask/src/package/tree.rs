//! What lies where, once the package is installed.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use super::NAME;
use super::program::Parts;
use crate::cargo::output;

/// What is copied as it is: from, to, mode. A directory's files go each to the same directory.
const COPIES: [(&str, &str, u32); 11] = [
    ("packaging/systemd/freestone-mkfs", "usr/lib/freestone/freestone-mkfs", 0o755),
    ("packaging/udev/freestone-name", "usr/lib/freestone/freestone-name", 0o755),
    ("packaging/udev/61-freestone-names.rules", "usr/lib/udev/rules.d/61-freestone-names.rules", 0o644),
    ("packaging/etc/freestone.toml", "etc/freestone.toml", 0o644),
    ("packaging/etc/freestone-server.toml", "etc/freestone-server.toml", 0o644),
    // These change what the machine does for others, so who wants them puts them where they belong.
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
const UNITS: &str = "packaging/systemd";
const UNITS_INSTALLED: &str = "usr/lib/systemd/system";
const PAGES_INSTALLED: &str = "usr/share/man/man1";
/// Completions: as they are written, and where the shells look for them.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash/freestone", "usr/share/bash-completion/completions/freestone"),
    ("zsh/_freestone", "usr/share/zsh/vendor-completions/_freestone"),
    ("fish/freestone.fish", "usr/share/fish/vendor_completions.d/freestone.fish"),
];

/// What is built.
pub struct Program<'a> {
    pub parts: Parts,
    /// Manual pages and completions.
    pub manuals: &'a Path,
}

/// Fills the tree of the program's package.
pub fn fill(root: &Path, program: &Program<'_>, changelog: &str, copyright: &str) -> Result<()> {
    put(&program.parts.stripped, root, &format!("usr/bin/{NAME}"), 0o755)?;
    for (from, to, mode) in COPIES {
        let from = Path::new(from);
        if from.is_dir() {
            put_each(&files_of(from, "md")?, root, to, mode)?;
        } else {
            put(from, root, to, mode)?;
        }
    }
    for kind in ["service", "socket"] {
        put_each(&files_of(Path::new(UNITS), kind)?, root, UNITS_INSTALLED, 0o644)?;
    }
    let pages = files_of(&program.manuals.join("man"), "1")?;
    ensure!(pages.len() > 1, "there are no manual pages in {}", program.manuals.display());
    for page in put_each(&pages, root, PAGES_INSTALLED, 0o644)? {
        gzip(&page)?;
    }
    for (from, to) in COMPLETIONS {
        put(&program.manuals.join(from), root, to, 0o644)?;
    }
    let doc = root.join("usr/share/doc").join(NAME);
    write(&doc.join("copyright"), copyright)?;
    write(&doc.join("changelog"), changelog)?;
    gzip(&doc.join("changelog"))
}

/// Fills the tree of the symbols' package.
pub fn fill_symbols(root: &Path, parts: &Parts) -> Result<()> {
    let (first, rest) = parts.build_id.split_at(2);
    put(&parts.symbols, root, &format!("usr/lib/debug/.build-id/{first}/{rest}.debug"), 0o644)?;
    let doc = root.join("usr/share/doc");
    fs::create_dir_all(&doc)?;
    symlink(NAME, doc.join(format!("{NAME}-dbgsym"))).context("cannot make a link")
}

/// Copies files to a directory, and returns where they are.
fn put_each(files: &[PathBuf], root: &Path, dir: &str, mode: u32) -> Result<Vec<PathBuf>> {
    let mut put_there = Vec::new();
    for file in files {
        let to = format!("{dir}/{}", file.file_name().unwrap_or_default().to_string_lossy());
        put(file, root, &to, mode)?;
        put_there.push(root.join(to));
    }
    Ok(put_there)
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

/// As Debian wants it: as small as can be, and the same each time.
fn gzip(path: &Path) -> Result<()> {
    output(Command::new("gzip").args(["-9", "-n"]).arg(path)).map(drop)
}

/// The files of a directory with an extension, sorted.
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

/// All that is no directory, below and relative to a root, sorted.
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

/// The bytes of all files.
pub fn size(root: &Path) -> Result<u64> {
    let mut bytes = 0;
    for path in files(root)? {
        bytes += root.join(path).symlink_metadata()?.len();
    }
    Ok(bytes)
}
