//! Rules for crates that are published: complete metadata, versions of their dependencies, and compilers.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::Deserialize;
use toml::{Table, Value};

use super::Problem;

/// Crates with a stable interface.
pub const PUBLIC: [&str; 3] = ["freestone", "freestone-server", "freestone-cli"];
/// End of the description of every other published crate.
const INTERNAL: &str = "Internal to Freestone: the interface is unstable.";
/// Keys of a published package that the workspace defines.
const INHERITED: [&str; 5] = ["version", "rust-version", "keywords", "categories", "publish"];
/// Keys that packages inherit if the workspace has them. The address of the repository is in one place.
const INHERITED_IF_DEFINED: [&str; 2] = ["repository", "homepage"];
const LICENCES: [&str; 2] = ["LICENSE-MIT", "LICENSE-APACHE"];
/// Maximum length of a description, in characters. Search results show it on two lines.
const DESCRIPTION_MAX_CHARS: usize = 170;

/// Checks the metadata of a package that is published; others have `publish = false`. `root` is the manifest of the
/// workspace.
pub fn package(path: &Path, manifest: &Table, root: &Table) -> Vec<Problem> {
    let Some(package) = manifest.get("package").and_then(Value::as_table) else { return Vec::new() };
    if package.get("publish") == Some(&Value::Boolean(false)) {
        return Vec::new();
    }
    let text = |key: &str| package.get(key).and_then(Value::as_str).unwrap_or_default();
    let name = text("name");
    let is_public = PUBLIC.contains(&name);
    let mut missing: Vec<String> = Vec::new();
    let workspace = root.get("workspace").and_then(|workspace| workspace.get("package"));
    let defined = |key: &&str| workspace.is_some_and(|package| package.get(key).is_some());
    for key in INHERITED.into_iter().chain(INHERITED_IF_DEFINED.into_iter().filter(defined)) {
        if package.get(key).and_then(|value| value.get("workspace")) != Some(&Value::Boolean(true)) {
            missing.push(format!("{key}.workspace = true"));
        }
    }
    let readme = if is_public { "README.md" } else { "../INTERNAL.md" };
    for (key, value) in [("readme", readme.to_owned()), ("documentation", format!("https://docs.rs/{name}"))]
    {
        if text(key) != value {
            missing.push(format!("{key} = \"{value}\""));
        }
    }
    let description = text("description");
    if description.chars().count() > DESCRIPTION_MAX_CHARS || is_public == description.ends_with(INTERNAL) {
        let ends = if is_public { "which does not end" } else { "which ends" };
        missing.push(format!(
            "a description of at most {DESCRIPTION_MAX_CHARS} characters {ends} with {INTERNAL:?}"
        ));
    }
    let docs = ["metadata", "docs", "rs", "targets"].iter().try_fold(None::<&Value>, |value, key| {
        Some(Some(value.map_or_else(|| package.get(*key), |value| value.get(*key))?))
    });
    if docs.is_none() {
        missing.push("[package.metadata.docs.rs] with targets".to_owned());
    }
    let dir = path.parent().unwrap_or(Path::new(""));
    for licence in LICENCES.iter().filter(|licence| !dir.join(licence).is_file()) {
        missing.push(format!("the file {licence} (a link to that of the root)"));
    }
    missing.into_iter().map(|what| Problem::new(path, 0, format!("a published crate needs {what}"))).collect()
}

/// Checks that dependencies on published crates have exactly the version of the workspace, and those on other crates none:
/// packages omit development dependencies without a version.
pub fn versions(path: &Path, root: &Table) -> Result<Vec<Problem>> {
    let workspace = root.get("workspace").context("the root is not a workspace")?;
    let version = workspace.get("package").and_then(|package| package.get("version")).and_then(Value::as_str);
    let wanted = format!("={}", version.context("the workspace has no version")?);
    let dependencies = workspace.get("dependencies").and_then(Value::as_table).context("no dependencies")?;
    let mut problems = Vec::new();
    for (name, dependency) in dependencies {
        let Some(dir) = dependency.get("path").and_then(Value::as_str) else { continue };
        let manifest = path.with_file_name(dir).join("Cargo.toml");
        let text =
            fs::read_to_string(&manifest).with_context(|| format!("cannot read {}", manifest.display()))?;
        let manifest: Table = text.parse().with_context(|| format!("cannot read {}", manifest.display()))?;
        let publish = manifest.get("package").and_then(|package| package.get("publish"));
        let expected = (publish != Some(&Value::Boolean(false))).then_some(wanted.as_str());
        if dependency.get("version").and_then(Value::as_str) != expected {
            let what =
                format!("{name}: the version must be {}", expected.unwrap_or("absent: it is not published"));
            problems.push(Problem::new(path, 0, what));
        }
    }
    Ok(problems)
}

/// Output of `cargo metadata`.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    rust_version: Option<String>,
}

/// Checks that no dependency needs a newer compiler than `rust-version` of the workspace. `metadata` is the output of
/// `cargo metadata`.
pub fn compilers(path: &Path, root: &Table, metadata: &[u8]) -> Result<Vec<Problem>> {
    let key = ["workspace", "package", "rust-version"];
    let own = key.iter().try_fold(&Value::Table(root.clone()), |value, key| value.get(key)).cloned();
    let own = own.as_ref().and_then(Value::as_str).context("the workspace has no rust-version")?.to_owned();
    let Metadata { packages } = serde_json::from_slice(metadata).context("cargo metadata")?;
    let newer = packages.into_iter().filter_map(|Package { name, version, rust_version }| {
        let needs = rust_version.filter(|needs| numbers(needs) > numbers(&own))?;
        let what = format!("{name} {version} needs Rust {needs}, and rust-version is {own}");
        Some(Problem::new(path, 0, what))
    });
    Ok(newer.collect())
}

/// Returns the first two numbers of a compiler's version: a release of the third changes no interface.
fn numbers(version: &str) -> (u32, u32) {
    let mut numbers = version.split('.').map(|number| number.parse().unwrap_or_default());
    (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::{INTERNAL, LICENCES, compilers, package, versions};

    const ROOT: &str = "[workspace.package]\nversion = \"0.2.0\"\nrust-version = \"1.88\"\n";
    const KEYS: &str = "version.workspace = true\nrust-version.workspace = true\nkeywords.workspace = true\n\
                        categories.workspace = true\npublish.workspace = true\n";

    #[test]
    fn incomplete_metadata_is_found() {
        let dir = tempfile::tempdir().unwrap();
        for licence in LICENCES {
            fs::write(dir.path().join(licence), "").unwrap();
        }
        let path = dir.path().join("Cargo.toml");
        let found =
            |text: &str, root: &str| package(&path, &text.parse().unwrap(), &root.parse().unwrap()).len();
        let good = format!(
            "[package]\nname = \"freestone-core\"\ndescription = \"Parts. {INTERNAL}\"\n{KEYS}\
             readme = \"../INTERNAL.md\"\ndocumentation = \"https://docs.rs/freestone-core\"\n\
             [package.metadata.docs.rs]\ntargets = [\"x86_64-unknown-linux-gnu\"]\n"
        );
        assert_eq!(found(&good, ROOT), 0);
        assert_eq!(found(&good, &format!("{ROOT}repository = \"https://example.org/f\"\n")), 1);
        assert_eq!(found(&good.replace(INTERNAL, ""), ROOT), 1);
        assert_eq!(found(&good.replace("freestone-core", "freestone"), ROOT), 2);
        assert_eq!(found(&good.replace("docs.rs]", "docs.net]"), ROOT), 1);
        assert_eq!(found(&good.replace("keywords.workspace = true\n", ""), ROOT), 1);
        assert_eq!(found("[package]\nname = \"a\"\npublish = false\n", ROOT), 0);
        fs::remove_file(dir.path().join(LICENCES[0])).unwrap();
        assert_eq!(found(&good, ROOT), 1);
    }

    #[test]
    fn wrong_versions_of_dependencies_are_found() {
        let dir = tempfile::tempdir().unwrap();
        for (name, publish) in [("a", "publish.workspace = true\n"), ("b", "publish = false\n")] {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("Cargo.toml"), format!("[package]\n{publish}")).unwrap();
        }
        let found = |a: &str, b: &str| {
            let root = format!(
                "{ROOT}[workspace.dependencies]\nc = \"1\"\na = {{ path = \"a\"{a} }}\nb = {{ path = \"b\"{b} }}\n"
            );
            versions(&dir.path().join("Cargo.toml"), &root.parse().unwrap()).unwrap().len()
        };
        assert_eq!(found(", version = \"=0.2.0\"", ""), 0);
        assert_eq!(found(", version = \"0.2.0\"", ""), 1);
        assert_eq!(found("", ", version = \"=0.2.0\""), 2);
    }

    #[test]
    fn dependency_on_a_newer_compiler_is_found() {
        let found = |needs: &str| {
            let metadata = format!(
                "{{\"packages\":[{{\"name\":\"a\",\"version\":\"1.0.0\",\"rust_version\":{needs}}}]}}"
            );
            compilers(Path::new("Cargo.toml"), &ROOT.parse().unwrap(), metadata.as_bytes()).unwrap().len()
        };
        assert_eq!([found("null"), found("\"1.9\""), found("\"1.88.1\""), found("\"1.89\"")], [0, 0, 0, 1]);
    }
}
