//! Builds the C half of the engine against the source of the installed fio.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

/// Environment variable with the path of another fio source.
const SOURCE_VARIABLE: &str = "FREESTONE_FIO_SOURCE";
/// Header written by `./configure`; without it the layout of structures is unknown.
const CONFIGURED: &str = "config-host.h";
/// Callbacks that only some versions have, and the macros that announce them to the C code.
const CALLBACKS: [(&str, &str); 3] = [
    ("(*cancel)", "FREESTONE_FIO_CANCEL"),
    ("(*finish_zone)", "FREESTONE_FIO_FINISH_ZONE"),
    ("(*get_max_active_zones)", "FREESTONE_FIO_MAX_ACTIVE_ZONES"),
];

fn main() -> Result<()> {
    println!("cargo:rerun-if-env-changed={SOURCE_VARIABLE}");
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_ENGINE").is_none() {
        return Ok(());
    }
    println!("cargo:rerun-if-changed=src/engine.c");
    println!("cargo:rerun-if-changed=src/engine.h");
    // fio unloads an engine when a job ends, but device threads and thread-local destructors may
    // still need it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    let source = source()?;
    println!("cargo:rerun-if-changed={}", source.join(CONFIGURED).display());
    let mut build = cc::Build::new();
    build.file("src/engine.c").include("src").std("gnu99");
    build.warnings(true).extra_warnings(true).warnings_into_errors(true);
    // As system headers, so that warnings concern only our own code.
    build.flag("-isystem").flag(utf8(&source)?);
    build.flag("-include").flag(utf8(&source.join(CONFIGURED))?);
    // As in fio's Makefile.
    build.define("_GNU_SOURCE", None).define("_LARGEFILE_SOURCE", None).define("_FILE_OFFSET_BITS", "64");
    build.define("FREESTONE_FIO_VERSION", format!("\"{}\"", version(&source)?).as_str());
    let header = read(&source.join("ioengines.h"))?;
    for (callback, define) in CALLBACKS {
        if header.contains(callback) {
            build.define(define, None);
        }
    }
    build.compile("freestone_fio_engine");
    Ok(())
}

/// Returns the directory of fio's source.
fn source() -> Result<PathBuf> {
    if let Some(path) = env::var_os(SOURCE_VARIABLE) {
        let path = PathBuf::from(path);
        if !path.join(CONFIGURED).is_file() {
            bail!("{SOURCE_VARIABLE}: {} has no {CONFIGURED}; run ./configure there", path.display());
        }
        return Ok(path);
    }
    let fio = Command::new("fio").arg("--version").output();
    let fio = fio.context("the fio engine needs fio: there is no such program; run: cargo xtask fio")?;
    let version = String::from_utf8(fio.stdout).context("fio --version does not print text")?;
    // The source is in one place, independent of the target directory.
    let package = env::var_os("CARGO_MANIFEST_DIR").context("cargo has not set CARGO_MANIFEST_DIR")?;
    let root = Path::new(&package).join("../..");
    let path = root.join("target/fio").join(version.trim());
    println!("cargo:rerun-if-changed={}", path.display());
    if !path.join(CONFIGURED).is_file() {
        let version = version.trim();
        bail!("the fio engine needs the source of {version}, which this command fetches: cargo xtask fio");
    }
    Ok(path)
}

/// Returns the version that a fio built from this source prints.
fn version(source: &Path) -> Result<String> {
    // FIO-VERSION-FILE exists after a build, and includes commits after the last release.
    let built = source.join("FIO-VERSION-FILE");
    let (path, key) =
        if built.is_file() { (built, "FIO_VERSION =") } else { (source.join("FIO-VERSION-GEN"), "DEF_VER=") };
    let text = read(&path)?;
    let version = text.lines().find_map(|line| line.strip_prefix(key));
    Ok(version.with_context(|| format!("{}: has no {key}", path.display()))?.trim().to_owned())
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

fn utf8(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{}: the path is not UTF-8", path.display()))
}
