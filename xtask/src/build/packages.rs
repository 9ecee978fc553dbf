//! Finds and installs the Debian packages whose programs the tests run.

use std::env;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use crate::cargo::output;

/// A program (or the absolute path of a file) and its package. A package of another architecture is `NAME:ARCH`.
pub type Tool = (&'static str, &'static str);

/// Table of the tools that tests run. freestone-testkit reads the same file.
const TABLE: &str = include_str!("../../../crates/freestone-testkit/src/tools.txt");

/// Returns the tools that tests run. The C compiler is not listed, because the codecs cannot be built without one.
pub fn tools() -> Vec<Tool> {
    TABLE.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once(' ')).collect()
}

pub const INSTRUCTIONS: [Tool; 1] = [("valgrind", "valgrind")];
/// Tools that the kernel lab needs.
pub const LAB: [Tool; 16] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("cpio", "cpio"),
    ("zstd", "zstd"),
    ("bc", "bc"),
    ("python3", "python3"),
    ("nbd-client", "nbd-client"),
    ("dmsetup", "dmsetup"),
    ("nsenter", "util-linux"),
    ("blkzone", "util-linux"),
    ("mkfs.xfs", "xfsprogs"),
    ("mkfs.f2fs", "f2fs-tools"),
    ("fsck.f2fs", "f2fs-tools"),
    ("mkfs.btrfs", "btrfs-progs"),
    ("btrfs", "btrfs-progs"),
    ("fio", "fio"),
];
/// Tools of the piece `tasks` besides those of the kernel lab: databases.
pub const TASKS: [Tool; 3] =
    [("/usr/lib/postgresql/15/bin/initdb", "postgresql-15"), ("sqlite3", "sqlite3"), ("pgrep", "procps")];
/// Tools of the piece `explore-databases` besides those of the tests: the module `dbm.gnu`, which Debian's Python lacks.
pub const EXPLORE: [Tool; 1] = [("/usr/share/doc/python3-gdbm/copyright", "python3-gdbm")];
/// Tools of the piece `python-suite` besides those of the tests.
pub const SUITE: [Tool; 1] = [("/usr/lib/postgresql/15/bin/initdb", "postgresql-15")];
/// Tools of the piece `lab-libvirt`. The program `virt-qemu-run` shows whether libvirt's driver for qemu is installed.
pub const LIBVIRT: [Tool; 3] = [
    ("libvirtd", "libvirt-daemon"),
    ("virt-qemu-run", "libvirt-daemon-driver-qemu"),
    ("virsh", "libvirt-clients"),
];
/// Tools of the piece `ceph`: an object store of one node.
pub const CEPH: [Tool; 6] = [
    ("ceph-mon", "ceph-mon"),
    ("ceph-mgr", "ceph-mgr"),
    ("ceph-osd", "ceph-osd"),
    ("radosgw", "radosgw"),
    ("ceph", "ceph-common"),
    ("curl", "curl"),
];
/// Tools of the pieces `package-...`: a clean root, lintian, an emulator of arm64, containers.
pub const PACKAGING: [Tool; 7] = [
    ("mmdebstrap", "mmdebstrap"),
    ("lintian", "lintian"),
    ("qemu-aarch64-static", "qemu-user-static"),
    ("podman", "podman"),
    ("runc", "runc"),
    ("catatonit", "catatonit"),
    ("go", "golang-go"),
];
/// Tools that build images for containers.
pub const IMAGES: [Tool; 2] = [("podman", "podman"), ("runc", "runc")];
/// Tools of the pieces `ci-...`, besides those of the kernel lab.
pub const CI_TEMPLATES: [Tool; 6] = [
    ("sudo", "sudo"),
    ("git", "git"),
    ("rsync", "rsync"),
    ("npm", "npm"),
    ("go", "golang-go"),
    ("shellcheck", "shellcheck"),
];
/// Tools of the pieces `recipes-...`, besides those of the kernel lab. Debian's Go may be older than a module requires,
/// and then fetches a newer one.
pub const RECIPES: [Tool; 15] = [
    ("sudo", "sudo"),
    ("fuser", "psmisc"),
    ("git", "git"),
    ("rsync", "rsync"),
    ("npm", "npm"),
    ("go", "golang-go"),
    ("gcc", "gcc"),
    ("pkg-config", "pkg-config"),
    ("/usr/include/libnbd.h", "libnbd-dev"),
    ("mvn", "maven"),
    ("java", "default-jdk-headless"),
    ("mmdebstrap", "mmdebstrap"),
    ("podman", "podman"),
    ("podman-compose", "podman-compose"),
    ("runc", "runc"),
];

/// Longest time in which apt-get waits for another process that installs packages, in seconds.
const APT_LOCK_MAX_SECONDS: u32 = 600;

/// Directories of system tools. Not every user has the last two in PATH.
const SYSTEM_DIRS: [&str; 3] = ["/usr/bin", "/usr/sbin", "/sbin"];

/// Returns true in continuous integration, where a missing package is a failure.
pub fn is_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| !value.is_empty())
}

/// Installs missing `tools` as root or with a sudo that asks for no password. An error names the missing packages and
/// the command that installs them.
pub fn ensure(tools: &[Tool]) -> Result<()> {
    let missing = missing(tools);
    if missing.is_empty() {
        println!("already installed: {}", packages(tools).join(" "));
        return Ok(());
    }
    let packages = packages(&missing);
    let names: Vec<_> = missing.iter().map(|(tool, _)| *tool).collect();
    println!("missing: {}", names.join(" "));
    let by_hand = format!("apt-get install --no-install-recommends {}", packages.join(" "));
    if !is_installed("apt-get") {
        bail!(
            "install the equivalent of Debian's packages {} (this machine has no apt-get)",
            packages.join(" ")
        );
    }
    let sudo: &[&str] = if rustix::process::geteuid().is_root() {
        &[]
    } else if is_installed("sudo") && quiet(&["sudo", "-n", "true"]) {
        &["sudo", "-n"]
    } else {
        bail!("not root, and sudo wants a password; run: sudo {by_hand}");
    };
    println!("installing: {}", packages.join(" "));
    for arch in foreign(&packages)? {
        println!("$ {}", [sudo, &["dpkg", "--add-architecture", arch]].concat().join(" "));
        if !quiet(&[sudo, &["dpkg", "--add-architecture", arch]].concat()) {
            bail!(
                "dpkg does not add the architecture {arch}; run: dpkg --add-architecture {arch}, then {by_hand}"
            );
        }
    }
    // A fresh machine has no package lists. So the lists are updated only if the installation fails.
    if !apt(sudo, &["install", "-y", "-qq", "--no-install-recommends"], &packages)? {
        println!("trying again with fresh lists of packages");
        if !apt(sudo, &["update", "-qq"], &[])? {
            println!("apt-get update failed");
        }
        if !apt(sudo, &["install", "-y", "-qq", "--no-install-recommends"], &packages)? {
            bail!("apt-get failed; run: {by_hand}");
        }
    }
    match self::missing(tools).as_slice() {
        [] => Ok(()),
        rest => bail!("{} is in none of the packages {}", rest[0].0, packages.join(" ")),
    }
}

/// Returns the architectures of `packages` that dpkg does not know yet.
fn foreign<'a>(packages: &[&'a str]) -> Result<Vec<&'a str>> {
    let mut archs: Vec<_> =
        packages.iter().filter_map(|package| package.split_once(':').map(|(_, arch)| arch)).collect();
    archs.dedup();
    if !archs.is_empty() {
        let known = output(Command::new("dpkg").arg("--print-foreign-architectures"))?;
        archs.retain(|arch| !known.lines().any(|line| line == *arch));
    }
    Ok(archs)
}

/// Returns the tools that are not installed.
pub fn missing(tools: &[Tool]) -> Vec<Tool> {
    tools.iter().copied().filter(|(tool, _)| !is_installed(tool)).collect()
}

fn packages(tools: &[Tool]) -> Vec<&'static str> {
    let mut packages: Vec<_> = tools.iter().map(|(_, package)| *package).collect();
    packages.sort_unstable();
    packages.dedup();
    packages
}

fn is_installed(tool: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut dirs = env::split_paths(&path).chain(SYSTEM_DIRS.iter().map(Into::into));
    dirs.any(|dir| Path::new(&dir).join(tool).is_file())
}

fn quiet(words: &[&str]) -> bool {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn apt(sudo: &[&str], verb: &[&str], packages: &[&str]) -> Result<bool> {
    // sudo may clear the environment, so the variable goes through env(1).
    let lock = format!("DPkg::Lock::Timeout={APT_LOCK_MAX_SECONDS}");
    let program = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-o", &lock];
    let words = [sudo, &program, verb, packages].concat();
    println!("$ {}", words.join(" "));
    let status = Command::new(words[0]).args(&words[1..]).stdin(Stdio::null()).status();
    Ok(status.context("cannot start apt-get")?.success())
}

#[cfg(test)]
mod tests {
    use super::{is_installed, packages, tools};

    #[test]
    fn table_names_tools_and_packages() {
        let tools = tools();
        assert!(tools.contains(&("qemu-io", "qemu-utils")) && tools.len() > 20, "{tools:?}");
        let packages = packages(&tools);
        assert_eq!(packages.iter().filter(|package| **package == "qemu-utils").count(), 1);
        assert!(packages.iter().all(|package| !package.contains(' ')), "{packages:?}");
    }

    #[test]
    fn is_installed_finds_programs_and_paths() {
        assert!(is_installed("sh"));
        assert!(!is_installed("no-such-tool-anywhere"));
        assert!(is_installed("/etc/passwd") && !is_installed("/etc/no-such-file-anywhere"));
    }
}
