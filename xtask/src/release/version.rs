//! The version of the tree: manifests, lock files, changelog, and names of files in pages.

use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::cargo::{RESEARCH, cargo, output};
use crate::package::VERSION;

const MANIFEST: &str = "Cargo.toml";
const CHANGELOG: &str = "CHANGELOG.md";
/// Pages that name files with the version.
const PAGES: [&str; 2] = ["docs/how-to/install.md", "docs/how-to/python.md"];

/// Sets the version and the date of the changelog, and commits the change if there is one.
pub fn set(version: &str) -> Result<()> {
    ensure!(is_version(version), "{version}: a version is three numbers, such as 0.2.0");
    let changed = output(Command::new("git").args(["status", "--porcelain"]))?;
    ensure!(changed.is_empty(), "the tree has changes that are not committed:\n{changed}");
    let tag = |version: &str| {
        let name = format!("refs/tags/v{version}");
        output(Command::new("git").args(["rev-parse", "--quiet", "--verify", &name])).is_ok()
    };
    ensure!(!tag(version), "v{version} is a tag already: that version was released");
    let today = output(Command::new("date").args(["-u", "+%Y-%m-%d"]))?;
    edit(CHANGELOG, |text| changelog(text, VERSION, version, &today, tag(VERSION)))?;
    edit(MANIFEST, |text| Ok(manifest(text, VERSION, version)))?;
    for page in PAGES {
        edit(page, |text| Ok(page_of(text, VERSION, version)))?;
    }
    for manifest in [MANIFEST, RESEARCH] {
        output(cargo().args(["metadata", "--format-version", "1", "--manifest-path", manifest]))?;
    }
    if output(Command::new("git").args(["status", "--porcelain"]))?.is_empty() {
        println!("the tree has version {version} of {today}");
        return Ok(());
    }
    output(Command::new("git").args([
        "commit",
        "--quiet",
        "--all",
        "--message",
        &format!("release: set version {version}"),
    ]))?;
    println!("committed version {version} of {today}");
    Ok(())
}

fn is_version(text: &str) -> bool {
    let numbers: Vec<_> = text.split('.').collect();
    let is_number = |number: &&str| number.parse::<u32>().is_ok_and(|value| value.to_string() == **number);
    numbers.len() == 3 && numbers.iter().all(is_number)
}

fn edit(path: &str, change: impl FnOnce(&str) -> Result<String>) -> Result<()> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    let new = change(&text)?;
    if new != text {
        fs::write(path, new).with_context(|| format!("cannot write {path}"))?;
    }
    Ok(())
}

/// Returns the changelog with `new` and the date in its first heading. The first section is that of the version `old` of the
/// tree, unless `old` was released: then the changes since need a section of their own.
fn changelog(text: &str, old: &str, new: &str, date: &str, was_released: bool) -> Result<String> {
    let heading =
        text.lines().find(|line| line.starts_with("## ")).context("the changelog has no version")?;
    let first = heading.trim_start_matches("## ").split(' ').next().unwrap_or_default();
    let is_open = first == new || (first == old && !was_released);
    ensure!(
        is_open,
        "{CHANGELOG} begins with {first}, which was released: add `## {new} ({date})` with the changes since"
    );
    Ok(text.replacen(heading, &format!("## {new} ({date})"), 1))
}

/// Returns the manifest of the workspace with another version, also in the dependencies on its own crates.
fn manifest(text: &str, old: &str, new: &str) -> String {
    let text = text.replacen(&format!("\nversion = \"{old}\"\n"), &format!("\nversion = \"{new}\"\n"), 1);
    text.replace(&format!("version = \"={old}\", path = "), &format!("version = \"={new}\", path = "))
}

/// Returns a page with another version in the names of packages: `freestone_0.1.0_amd64.deb`, `freestone-0.1.0-`.
fn page_of(text: &str, old: &str, new: &str) -> String {
    let names = [("_", "_"), ("-", "-")];
    names.iter().fold(text.to_owned(), |text, (before, after)| {
        text.replace(&format!("{before}{old}{after}"), &format!("{before}{new}{after}"))
    })
}

#[cfg(test)]
mod tests {
    use super::{changelog, is_version, manifest, page_of};

    #[test]
    fn version_is_three_numbers() {
        assert!(is_version("0.2.0") && is_version("10.0.12"));
        for wrong in ["", "0.2", "0.2.0.1", "v0.2.0", "0.02.0", "0.2.0-rc1", "0.-2.0"] {
            assert!(!is_version(wrong), "{wrong}");
        }
    }

    #[test]
    fn changelog_of_a_released_version_is_refused() {
        let text = "# Changes\n\n## 0.1.0 (2026-11-26)\n\n* All.\n";
        let set = |new, released| changelog(text, "0.1.0", new, "2027-01-02", released);
        assert_eq!(set("0.1.0", false).unwrap(), text.replace("2026-11-26", "2027-01-02"));
        assert_eq!(set("0.2.0", false).unwrap(), text.replace("0.1.0 (2026-11-26)", "0.2.0 (2027-01-02)"));
        assert!(set("0.2.0", true).unwrap_err().to_string().contains("add `## 0.2.0 (2027-01-02)`"));
    }

    #[test]
    fn version_is_set_everywhere() {
        let text = "[workspace.package]\nversion = \"0.1.0\"\n[workspace.dependencies]\n\
                    a = { version = \"=0.1.0\", path = \"a\" }\nb = \"0.1.0\"\n";
        let expected = "[workspace.package]\nversion = \"0.2.0\"\n[workspace.dependencies]\n\
                        a = { version = \"=0.2.0\", path = \"a\" }\nb = \"0.1.0\"\n";
        assert_eq!(manifest(text, "0.1.0", "0.2.0"), expected);
        assert_eq!(
            page_of("`f_0.1.0_amd64.deb`, since 0.1.0", "0.1.0", "0.2.0"),
            "`f_0.2.0_amd64.deb`, since 0.1.0"
        );
    }
}
