//! Packs the static program with its manual pages and completions as an archive.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use super::arch::Arch;
use super::{NAME, VERSION, changed, copyright, empty_dir, out_dir, program, tree, write_manuals};

/// Last part of the name of the archive and of its directory.
pub const TARGET: &str = "x86_64-linux-musl";

/// Builds the program with a profile of cargo and returns the path of the archive.
pub fn build(profile: &str) -> Result<PathBuf> {
    let arch = Arch::Musl;
    arch.ensure()?;
    let out = out_dir()?;
    let built = program::build(arch, profile)?;
    let manuals = out.join("manuals");
    write_manuals(&manuals, profile)?;
    let name = format!("{NAME}-{VERSION}-{TARGET}");
    let work = out.join("archive");
    let root = empty_dir(&work)?.join(&name);
    let program =
        tree::Program { parts: program::parts(arch, &built, &out.join("musl"))?, manuals: &manuals };
    tree::fill_archive(&root, &program, &copyright::file(Path::new("."), arch.triple())?)?;
    println!("program: {:.1} MB without symbols", fs::metadata(&program.parts.stripped)?.len() as f64 / 1e6);
    let archive = out.join(format!("{name}.tar.gz"));
    let mut tar = Command::new("tar");
    tar.args(["--create", "--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--format=gnu"]);
    tar.args([&format!("--mtime=@{}", changed()?), "--use-compress-program=gzip -9 --no-name", "--file"]);
    tar.arg(&archive).arg("--directory").arg(&work).arg(&name);
    if !tar.stdin(Stdio::null()).status().context("cannot start tar")?.success() {
        bail!("tar could not write {}", archive.display());
    }
    Ok(archive)
}
