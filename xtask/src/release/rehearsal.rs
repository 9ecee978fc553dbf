//! Rehearses a release in two clones in different directories, whose files must be equal byte for byte.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use super::CHECKSUMS;
use crate::build::cargo_tools::{self, CYCLONEDX, DENY};
use crate::cargo::{Outcome, cargo, output, target_dir};
use crate::package::empty_dir;

/// Version of the rehearsal, above all others.
const VERSION: &str = "9999.0.0";
/// Parts that need no build of the program.
const PARTS: [&str; 4] = ["version", "licences", "crates", "components"];
/// Author and date of the commits, so that both clones have the same commit.
const COMMIT: [(&str, &str); 6] = [
    ("GIT_AUTHOR_NAME", "rehearsal"),
    ("GIT_AUTHOR_EMAIL", "rehearsal@example.org"),
    ("GIT_AUTHOR_DATE", "2027-01-02T00:00:00Z"),
    ("GIT_COMMITTER_NAME", "rehearsal"),
    ("GIT_COMMITTER_EMAIL", "rehearsal@example.org"),
    ("GIT_COMMITTER_DATE", "2027-01-02T00:00:00Z"),
];

/// Makes the release twice. Each of the two counts as one test, and their equality as another.
pub fn run() -> Result<Outcome> {
    let work = empty_dir(&std::path::absolute(target_dir())?.join("rehearsal"))?;
    let tools = [cargo_tools::ensure(&DENY)?, cargo_tools::ensure(&CYCLONEDX)?];
    let mut outcome = Outcome::of(true);
    let mut sums = Vec::new();
    // The names differ in length, so a path in a file also changes its size.
    for name in ["one", "another"] {
        let clone = work.join(name);
        output(Command::new("git").args(["clone", "--quiet", "--no-hardlinks", "."]).arg(&clone))?;
        // The tools are those of this tree, so that no clone builds them again.
        for tool in &tools {
            let tools_dir = clone.join("target/tools");
            fs::create_dir_all(&tools_dir)?;
            let dir = tool.ancestors().nth(2).context("a tool has no directory")?;
            let link = tools_dir.join(dir.file_name().unwrap_or_default());
            std::os::unix::fs::symlink(dir, link).context("cannot link a tool")?;
        }
        let release = make(&clone)?;
        check(&clone, &release)?;
        sums.push(fs::read_to_string(release.join(CHECKSUMS))?);
        outcome.add(Outcome::of_test(true));
    }
    println!("{}", sums[0].trim_end());
    outcome.add(Outcome::of_test(sums[0] == sums[1]));
    if sums[0] != sums[1] {
        println!("the files of the second clone differ:\n{}", sums[1].trim_end());
    }
    fs::remove_dir_all(work).context("cannot remove the clones")?;
    Ok(outcome)
}

/// Makes the release in a clone, and returns the directory of its files.
fn make(clone: &Path) -> Result<PathBuf> {
    let mut release = cargo();
    release.args(["run", "--quiet", "--package", "xtask", "--", "release", VERSION]).current_dir(clone);
    for part in PARTS {
        release.args(["--only", part]);
    }
    release.env_remove("CARGO_TARGET_DIR").envs(COMMIT);
    let status = release.status().context("cannot start cargo")?;
    ensure!(status.success(), "cargo xtask release: {status}");
    Ok(clone.join("target").join(format!("release-{VERSION}")))
}

/// Checks the files of a release: checksums, the version everywhere, and a tree without changes.
fn check(clone: &Path, release: &Path) -> Result<()> {
    output(Command::new("sha256sum").args(["--check", "--quiet", CHECKSUMS]).current_dir(release))?;
    let git = |arguments: &[&str]| output(Command::new("git").args(arguments).current_dir(clone));
    ensure!(git(&["status", "--porcelain"])?.is_empty(), "the release leaves changes in the tree");
    ensure!(
        git(&["log", "-1", "--format=%s"])? == format!("release: set version {VERSION}"),
        "no commit of the version"
    );
    let sums = fs::read_to_string(release.join(CHECKSUMS))?;
    for part in [format!("freestone-{VERSION}.crate"), format!("freestone-{VERSION}.cdx.json")] {
        ensure!(
            sums.lines().any(|line| line.ends_with(&format!("  {part}"))),
            "the release has no {part}: {sums}"
        );
    }
    let list = fs::read_to_string(release.join(format!("freestone-{VERSION}.cdx.json")))?;
    let components: serde_json::Value = serde_json::from_str(&list).context("the list of components")?;
    let names = components["components"].as_array().context("no components")?;
    let has = |name: &str| names.iter().any(|component| component["name"] == name);
    ensure!(
        has("rustls") && has("zstd-sys") && has("object_store"),
        "the list of components is not complete"
    );
    ensure!(!list.contains(&clone.display().to_string()), "the list of components has the path of the tree");
    Ok(())
}
