//! The version that the program tells: in a release build with the commit that it was built from, which
//! `$FREESTONE_COMMIT` says where there is no git. Other builds have none: each commit would build them anew.

use std::env;
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=FREESTONE_COMMIT");
    let version = env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let is_release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let said = env::var("FREESTONE_COMMIT").ok().filter(|commit| !commit.is_empty());
    let commit = said.or_else(|| is_release.then(commit).flatten());
    let version = commit.map_or_else(|| version.clone(), |commit| format!("{version} ({commit})"));
    println!("cargo::rustc-env=FREESTONE_VERSION={version}");
}

/// The commit of the working tree.
fn commit() -> Option<String> {
    // Git writes a line there whenever it comes to another commit.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"])?;
    if Path::new(&log).exists() {
        println!("cargo::rerun-if-changed={log}");
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
    String::from_utf8(output.stdout).ok().map(|text| text.trim().to_owned())
}
