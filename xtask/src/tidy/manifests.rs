//! Rules for manifests and lock files.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use toml::{Table, Value};

use super::{Problem, published};
use crate::cargo::{RESEARCH, cargo};

const ROOT: &str = "Cargo.toml";

/// End of the public registry's name in a lock file, also if a mirror is used.
const REGISTRY: &str = concat!("/rust-lang/crates", ".io-index");

/// Checks that a crate inherits lints and licence from the workspace, and has the metadata of a published crate if it is
/// published.
pub fn package(path: &Path, text: &str, root: &Table) -> Vec<Problem> {
    let manifest: Table = match text.parse() {
        Ok(manifest) => manifest,
        Err(error) => return vec![Problem::new(path, 0, format!("cannot be read: {error}"))],
    };
    // The root and packages that are separate workspaces do not inherit from another workspace.
    if manifest.contains_key("workspace") {
        return Vec::new();
    }
    let inherits =
        |value: Option<&Value>| value.and_then(|v| v.get("workspace")) == Some(&Value::Boolean(true));
    let mut problems = Vec::new();
    if !inherits(manifest.get("lints")) {
        problems.push(Problem::new(path, 0, "lints.workspace = true is missing"));
    }
    if !inherits(manifest.get("package").and_then(|package| package.get("license"))) {
        problems.push(Problem::new(path, 0, "license.workspace = true is missing"));
    }
    problems.extend(published::package(path, &manifest, root));
    problems
}

/// Reads the manifest of the workspace.
pub fn root() -> Result<Table> {
    let text = fs::read_to_string(ROOT).with_context(|| format!("cannot read {ROOT}"))?;
    text.parse().with_context(|| format!("cannot read {ROOT}"))
}

/// Checks the dependencies of the workspace on its own crates, and the compilers that other dependencies need.
pub fn dependencies(root: &Table) -> Result<Vec<Problem>> {
    let mut problems = published::versions(Path::new(ROOT), root)?;
    let mut command = cargo();
    let output =
        command.args(["metadata", "--format-version", "1"]).output().context("cannot start cargo")?;
    // A workspace without metadata is a problem that `locked` reports.
    if output.status.success() {
        problems.extend(published::compilers(Path::new(ROOT), root, &output.stdout)?);
    }
    Ok(problems)
}

/// Checks that every dependency comes from the public registry.
pub fn sources(path: &Path, text: &str) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if let Some(source) = line.strip_prefix("source = ")
            && !source.trim_matches('"').ends_with(REGISTRY)
        {
            problems.push(Problem::new(path, number, format!("{source} is not the public registry")));
        }
    }
    problems
}

/// Checks that each `Cargo.lock` is up to date.
pub fn locked() -> Result<Vec<Problem>> {
    let mut problems = Vec::new();
    for manifest in [ROOT, RESEARCH] {
        let mut command = cargo();
        command.args(["metadata", "--locked", "--format-version", "1", "--manifest-path", manifest]);
        let output = command.output().context("cannot start cargo")?;
        if !output.status.success() {
            let lock = Path::new(manifest).with_extension("lock");
            problems.push(Problem::new(&lock, 0, String::from_utf8_lossy(&output.stderr).trim()));
        }
    }
    Ok(problems)
}

/// Checks that the experiments' workspace, which cannot inherit from the root, has the same lints.
pub fn research() -> Result<Vec<Problem>> {
    let read = |path| fs::read_to_string(path).with_context(|| format!("cannot read {path}"));
    Ok(differences(Path::new(RESEARCH), &read(RESEARCH)?.parse()?, &read(ROOT)?.parse()?))
}

fn differences(path: &Path, own: &Table, root: &Table) -> Vec<Problem> {
    let value = |table: &Table, [first, then]: [&str; 2]| table.get(first)?.get(then).cloned();
    let mut problems = Vec::new();
    if value(own, ["workspace", "lints"]) != value(root, ["workspace", "lints"]) {
        problems.push(Problem::new(path, 0, "workspace.lints differs from the root"));
    }
    if value(own, ["lints", "workspace"]) != Some(Value::Boolean(true)) {
        problems.push(Problem::new(path, 0, "lints.workspace = true is missing"));
    }
    problems
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{differences, package, sources};

    #[test]
    fn missing_inheritance_is_found() {
        let path = Path::new("Cargo.toml");
        let found = |text: &str| package(path, text, &toml::Table::new()).len();
        let own = "[package]\nname = \"a\"\npublish = false\n";
        assert_eq!(found(&format!("{own}license.workspace = true\n[lints]\nworkspace = true\n")), 0);
        assert_eq!(found(&format!("{own}license = \"MIT\"\n")), 2);
        assert_eq!(found("[workspace]\n"), 0);
        assert_eq!(found("["), 1);
    }

    #[test]
    fn other_lints_than_the_root_are_found() {
        let root = "[workspace.lints]\na = 1\n";
        let found =
            |own: &str| differences(Path::new("r"), &own.parse().unwrap(), &root.parse().unwrap()).len();
        assert_eq!(found(&format!("{root}[profile.dev]\n[lints]\nworkspace = true\n")), 0);
        assert_eq!(found(&format!("{root}b = 1\n[lints]\nworkspace = true\n")), 1);
        assert_eq!(found("[workspace]\n"), 2);
    }

    #[test]
    fn other_registries_are_found() {
        let path = Path::new("Cargo.lock");
        let text = format!("source = \"registry+https://example/{}\"\n", super::REGISTRY);
        assert_eq!(sources(path, &text), []);
        assert_eq!(
            sources(path, "name = \"a\"\nsource = \"registry+https://mirror.example/index\"\n").len(),
            1
        );
    }
}
