//! Data sets that the scripts of `benches/sets` make: a Debian guest's disk, its memory, and the disk
//! of a database server.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::programs::tool;

const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/sets");
const MIB: u64 = 1 << 20;

/// Returns the disk of a Debian guest.
pub(super) fn debian(dir: &Path) -> Result<PathBuf> {
    let disk = dir.join("debian.img");
    make(&disk, "guest.sh", &[disk.as_os_str()])
}

/// Returns the memory of a Debian guest that has booted from [`debian`].
pub(super) fn guest(dir: &Path) -> Result<PathBuf> {
    let memory = dir.join("guest.mem");
    make(&memory, "guest.sh", &[debian(dir)?.as_os_str(), memory.as_os_str()])
}

/// Returns a disk of `bytes` bytes, rounded down to MiB, with the files of a database server.
pub(super) fn postgresql(dir: &Path, bytes: u64) -> Result<PathBuf> {
    let mib = (bytes / MIB).to_string();
    let disk = dir.join(format!("postgresql-{mib}M.img"));
    make(&disk, "postgresql.sh", &[disk.as_os_str(), mib.as_ref()])
}

/// Returns `path`. Runs a script first if the file does not exist.
fn make(path: &Path, script: &str, args: &[&OsStr]) -> Result<PathBuf> {
    if !path.exists() {
        let dir = path.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(dir).with_context(|| format!("{}", dir.display()))?;
        eprintln!("making {}, which may take minutes", path.display());
        tool::run(Command::new(Path::new(SCRIPTS).join(script)).args(args), "bash")?;
    }
    Ok(path.to_owned())
}
