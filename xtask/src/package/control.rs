//! Writes the control files of a package, `DEBIAN/`.

use std::fmt::Write as _;
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use super::arch::Arch;
use super::tree::{files, size};
use super::{NAME, VERSION};
use crate::cargo::output;

const SCRIPTS: &str = "packaging/debian";
const SUMMARY: &str = "virtual block devices served by an ordinary process";
const DESCRIPTION: &str = " Freestone brings to user space what Linux has only in the kernel: the
 compressed RAM disk (zram), copy-on-write snapshots (dm-snapshot) with forks of
 one image, and test drives (null_blk): empty, zoned, faulty, or losing power.
 .
 Clients connect over NBD, virtual machines over vhost-user, the machine itself
 through the ublk driver of the kernel. Images may lie in object storage.
";
const EXPERIMENTAL: &str = " .
 On this architecture it is experimental: it was built on another one, and has
 only run in an emulator.
";

pub fn of_program(arch: Arch, root: &Path, maintainer: &str, libraries: &str) -> Result<String> {
    let mut text = head(arch, NAME, "admin", root, maintainer)?;
    writeln!(text, "Depends: adduser, {libraries}")?;
    // Certificates are used for image stores in object storage, and for nbds (NBD over TLS).
    writeln!(text, "Recommends: ca-certificates")?;
    writeln!(text, "Suggests: e2fsprogs, libnbd-bin, librbd1, nbd-client, qemu-utils, udev")?;
    write!(text, "Description: {SUMMARY}\n{DESCRIPTION}")?;
    if arch.is_cross() {
        text += EXPERIMENTAL;
    }
    Ok(text)
}

/// Returns the text of `control` for the package of debug symbols.
pub fn of_symbols(arch: Arch, root: &Path, maintainer: &str, build_id: &str) -> Result<String> {
    let mut text = head(arch, &format!("{NAME}-dbgsym"), "debug", root, maintainer)?;
    write!(
        text,
        "Depends: {NAME} (= {VERSION})\nAuto-Built-Package: debug-symbols\nBuild-Ids: {build_id}\n\
         Description: debug symbols for {NAME}\n"
    )?;
    Ok(text)
}

fn head(arch: Arch, name: &str, section: &str, root: &Path, maintainer: &str) -> Result<String> {
    let (arch, size) = (arch.debian(), size(root)?.div_ceil(1024));
    Ok(format!(
        "Package: {name}\nVersion: {VERSION}\nArchitecture: {arch}\nMaintainer: {maintainer}\nInstalled-Size: {size}\n\
         Section: {section}\nPriority: optional\n"
    ))
}

/// Writes `DEBIAN/` into a complete tree. Only the program's package contains maintainer scripts.
pub fn write(root: &Path, control: &str) -> Result<()> {
    let sums = checksums(root)?;
    let configured: Vec<_> = files(root)?.into_iter().filter(|path| path.starts_with("etc")).collect();
    let dir = root.join("DEBIAN");
    fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    put(&dir, "control", control, 0o644)?;
    put(&dir, "md5sums", &sums, 0o644)?;
    if !configured.is_empty() {
        let text =
            configured.iter().fold(String::new(), |text, path| text + &format!("/{}\n", path.display()));
        put(&dir, "conffiles", &text, 0o644)?;
    }
    if control.starts_with(&format!("Package: {NAME}\n")) {
        for script in ["postinst", "prerm", "postrm"] {
            let path = Path::new(SCRIPTS).join(script);
            let text =
                fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            put(&dir, script, &text, 0o755)?;
        }
    }
    Ok(())
}

fn put(dir: &Path, name: &str, text: &str, mode: u32) -> Result<()> {
    let path = dir.join(name);
    let written =
        fs::write(&path, text).and_then(|()| fs::set_permissions(&path, Permissions::from_mode(mode)));
    written.with_context(|| format!("cannot write {}", path.display()))
}

/// Returns `md5sums`, which `dpkg --verify` reads: a line per file that is not configuration.
fn checksums(root: &Path) -> Result<String> {
    let mut names: Vec<_> = files(root)?.into_iter().filter(|path| !path.starts_with("etc")).collect();
    names.retain(|path| !root.join(path).is_symlink());
    if names.is_empty() {
        return Err(io::Error::from(ErrorKind::NotFound)).context("the package has no files");
    }
    Ok(output(Command::new("md5sum").arg("--").args(&names).current_dir(root))? + "\n")
}
