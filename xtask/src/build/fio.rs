//! `cargo xtask fio`: fetches the source of the installed fio and builds the engine against it.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use crate::cargo::{self, cargo, output};

/// Directory of fio sources, one subdirectory per version that `fio --version` prints. `build.rs` of the engine reads
/// this directory.
const SOURCES: &str = "target/fio";
/// Environment variable with the directory of another fio source. `build.rs` of the engine reads this variable too.
const SOURCE_VARIABLE: &str = "FREESTONE_FIO_SOURCE";
/// File that `./configure` writes.
const CONFIGURED: &str = "config-host.h";
/// Directory of apt's lists of package sources.
const APT_DIR: &str = "/etc/apt";
/// Options of the example command that is printed at the end.
const TRY: &str = "--device=ram0=ram,disksize=64M --rw=randrw --verify=crc32c --iodepth=32";

/// Cargo feature that builds the engine.
pub const FEATURE: &str = "freestone-fio/engine";

/// Returns true if the engine can be built: fio is installed, and its source was fetched and configured.
pub fn is_ready() -> bool {
    env::var_os(SOURCE_VARIABLE).is_some()
        || output(Command::new("fio").arg("--version"))
            .is_ok_and(|version| Path::new(SOURCES).join(version).join(CONFIGURED).is_file())
}

/// Fetches the source if it is missing, builds the engine for release and prints an example command.
pub fn run() -> Result<bool> {
    source()?;
    let mut build = cargo();
    build.args(["build", "--release", "--package", "freestone-fio", "--features", "engine"]);
    if !build.status().context("cannot start cargo")?.success() {
        return Ok(false);
    }
    let target = cargo::target_dir();
    let engine = target.join("release/libfreestone_fio.so");
    let engine = engine.canonicalize().with_context(|| format!("{}: was not built", engine.display()))?;
    let engine = engine.display();
    println!("engine: {engine}");
    println!("try: fio --name=try --ioengine=external:{engine} {TRY}");
    Ok(true)
}

/// Fetches and configures the source of the installed fio if it is missing.
pub fn source() -> Result<()> {
    if env::var_os(SOURCE_VARIABLE).is_some() {
        return Ok(());
    }
    let version = output(Command::new("fio").arg("--version"))
        .context("fio is missing; install the package fio, or run: cargo xtask test --only packages")?;
    let place = Path::new(SOURCES).join(&version);
    if place.join(CONFIGURED).is_file() {
        println!("{version}: its source is in {}", place.display());
        return Ok(());
    }
    let package = ["-W", "-f=${source:Package}=${source:Version}", "fio"];
    let package = output(Command::new("dpkg-query").args(package)).with_context(|| {
        format!("{version} is not from a Debian package; set {SOURCE_VARIABLE} to its source, configured")
    })?;
    // The rename publishes the source only when it is complete.
    let work = Path::new(SOURCES).join(format!("work-{}", std::process::id()));
    let fetched = fetch(&work, &package, &version).and_then(|source| {
        fs::rename(&source, &place).with_context(|| format!("cannot move it to {}", place.display()))
    });
    let cleared = fs::remove_dir_all(&work);
    fetched.with_context(|| {
        format!("cannot fetch the source of {package}; set {SOURCE_VARIABLE} to the directory of a configured source")
    })?;
    cleared.with_context(|| format!("cannot remove {}", work.display()))?;
    println!("{version}: its source is now in {}", place.display());
    Ok(())
}

/// Fetches and configures the source of a package. Changes nothing outside `work`.
fn fetch(work: &Path, package: &str, version: &str) -> Result<PathBuf> {
    let parts = work.join("sources");
    for dir in [&parts, &work.join("state/lists/partial"), &work.join("cache/archives/partial")] {
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    let work = work.canonicalize().context("the new directory is gone")?;
    derive_sources(Path::new(APT_DIR), &parts)?;
    let apt = |words: &[&str]| {
        let mut command = Command::new("apt-get");
        command.arg("-qq");
        for (key, path) in [
            ("Dir::Etc::sourcelist", "/dev/null".to_owned()),
            ("Dir::Etc::sourceparts", work.join("sources").display().to_string()),
            ("Dir::State", work.join("state").display().to_string()),
            ("Dir::Cache", work.join("cache").display().to_string()),
            // apt's sandbox user may have no access to this directory.
            ("APT::Sandbox::User", String::new()),
        ] {
            command.arg("-o").arg(format!("{key}={path}"));
        }
        command.args(words).current_dir(&work).stdin(Stdio::null());
        println!("$ apt-get {}", words.join(" "));
        command.status().context("cannot start apt-get")
    };
    // Other repositories may have no sources, so an error of the update is ignored. The next command fails if the
    // source of fio is missing.
    apt(&["update"])?;
    if !apt(&["source", package])?.success() {
        bail!("apt-get source failed (it needs dpkg-dev)");
    }
    let source = unpacked(&work)?;
    let found = generated_version(&source)?;
    if found != version {
        bail!("the source is of {found}, but the installed program is {version}");
    }
    println!("$ ./configure");
    let log = fs::File::create(source.join("configure.log")).context("cannot write a log")?;
    let mut configure = Command::new("./configure");
    configure.args(["--disable-native", "--prefix=/usr"]).current_dir(&source);
    configure.stdin(Stdio::null()).stdout(log);
    if !configure.status().context("cannot start ./configure")?.success() {
        bail!("./configure failed");
    }
    Ok(source)
}

/// Writes lists of source packages to `to`, derived from the machine's lists of packages in `from`.
fn derive_sources(from: &Path, to: &Path) -> Result<()> {
    let mut lists = vec![from.join("sources.list")];
    if let Ok(parts) = fs::read_dir(from.join("sources.list.d")) {
        lists.extend(parts.flatten().map(|entry| entry.path()));
    }
    let mut written = 0;
    for list in lists {
        let extension = list.extension().and_then(|extension| extension.to_str());
        let (Some(name), Ok(text)) = (list.file_name(), fs::read_to_string(&list)) else { continue };
        let text = match extension {
            Some("list") => one_line_style(&text),
            Some("sources") => deb822_style(&text),
            _ => continue,
        };
        if !text.is_empty() {
            fs::write(to.join(name), text).context("cannot write a list of sources")?;
            written += 1;
        }
    }
    if written == 0 {
        bail!("{} names no packages", from.display());
    }
    Ok(())
}

/// Rewrites lines `deb ...` as `deb-src ...`.
fn one_line_style(text: &str) -> String {
    let binary = text.lines().filter_map(|line| line.trim().strip_prefix("deb "));
    binary.flat_map(|rest| ["deb-src ", rest, "\n"]).collect()
}

/// Sets the types of all stanzas to `deb-src`.
fn deb822_style(text: &str) -> String {
    let is_types = |line: &str| line.to_ascii_lowercase().starts_with("types:");
    text.lines().flat_map(|line| [if is_types(line) { "Types: deb-src" } else { line }, "\n"]).collect()
}

/// Returns the directory below `work` that `apt-get source` unpacked.
fn unpacked(work: &Path) -> Result<PathBuf> {
    let entries = fs::read_dir(work).context("cannot look at what was fetched")?;
    let mut dirs =
        entries.flatten().map(|entry| entry.path()).filter(|path| path.join("ioengines.h").is_file());
    dirs.next().context("apt-get source left no source; install dpkg-dev")
}

/// Returns the version that a fio built from this source prints.
fn generated_version(source: &Path) -> Result<String> {
    let text = fs::read_to_string(source.join("FIO-VERSION-GEN")).context("it has no FIO-VERSION-GEN")?;
    let version = text.lines().find_map(|line| line.strip_prefix("DEF_VER="));
    Ok(version.context("its FIO-VERSION-GEN names no version")?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::{deb822_style, derive_sources, one_line_style};

    #[test]
    fn package_lists_become_source_lists() {
        let list = "# deb a\ndeb [signed-by=/k] http://h.example/debian stable main\ndeb-src x y z\n";
        assert_eq!(one_line_style(list), "deb-src [signed-by=/k] http://h.example/debian stable main\n");
        let stanzas = "Types: deb deb-src\nURIs: u\n\ntypes: deb\nURIs: v\n";
        assert_eq!(deb822_style(stanzas), "Types: deb-src\nURIs: u\n\nTypes: deb-src\nURIs: v\n");
    }

    #[test]
    fn derive_sources_ignores_disabled_lists() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        assert!(derive_sources(from.path(), to.path()).is_err());
        std::fs::create_dir(from.path().join("sources.list.d")).unwrap();
        std::fs::write(from.path().join("sources.list.d/a.sources"), "Types: deb\n").unwrap();
        std::fs::write(from.path().join("sources.list.d/b.sources.disabled"), "Types: deb\n").unwrap();
        derive_sources(from.path(), to.path()).unwrap();
        let names: Vec<_> = std::fs::read_dir(to.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["a.sources"]);
    }
}
