//! Hashes the inputs of a check: the sources of a package and of its dependencies in the workspace.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

use crate::cargo::{cargo, output};

/// Files that every package depends on.
const COMMON: [&str; 2] = ["Cargo.toml", "Cargo.lock"];

pub struct Packages {
    /// Directory and dependencies (including those of tests), by package name.
    packages: BTreeMap<String, (String, Vec<String>)>,
    /// Version of the compiler, which is part of every hash.
    compiler: String,
}

/// Output of `cargo metadata`.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    manifest_path: PathBuf,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// Directory of a dependency in the workspace; None for a dependency from a registry.
    path: Option<PathBuf>,
}

impl Packages {
    /// Reads the packages from `cargo metadata`.
    pub fn read() -> Result<Self> {
        let text = output(cargo().args(["metadata", "--format-version", "1", "--no-deps", "--offline"]))?;
        let metadata: Metadata = serde_json::from_str(&text).context("cannot read cargo metadata")?;
        let root = std::env::current_dir().context("the working directory is gone")?;
        let mut packages = BTreeMap::new();
        for Package { name, manifest_path, dependencies } in metadata.packages {
            let dir = manifest_path.parent().unwrap_or(Path::new(""));
            let dir = dir.strip_prefix(&root).unwrap_or(dir).display().to_string();
            let own = dependencies.into_iter().filter(|dependency| dependency.path.is_some());
            packages.insert(name, (dir, own.map(|dependency| dependency.name).collect()));
        }
        let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        Ok(Self { packages, compiler: output(Command::new(rustc).arg("--version"))? })
    }

    /// Returns a hash of the sources of these packages, of their dependencies in the workspace, and of the files and
    /// directories in `more`, all as in the working tree.
    pub fn content(&self, packages: &[&str], more: &[&str]) -> Result<String> {
        let mut dirs: BTreeSet<&str> = COMMON.iter().chain(more).copied().collect();
        let mut waiting: Vec<&str> = packages.to_vec();
        let mut seen = BTreeSet::new();
        while let Some(name) = waiting.pop() {
            if seen.insert(name) {
                let (dir, dependencies) = self
                    .packages
                    .get(name)
                    .with_context(|| format!("the workspace has no package {name}"))?;
                dirs.insert(dir);
                waiting.extend(dependencies.iter().map(String::as_str));
            }
        }
        let listed = ["ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", "--"];
        let files = output(Command::new("git").args(listed).args(&dirs))?;
        // git also lists deleted files, which have no content to hash.
        let files: Vec<_> = files.lines().filter(|file| Path::new(file).is_file()).collect();
        let hashes = git_hash(&["--stdin-paths"], &(files.join("\n") + "\n"))?;
        let named: Vec<_> = hashes.lines().zip(&files).map(|(hash, file)| format!("{hash} {file}")).collect();
        git_hash(&["--stdin"], &format!("{}\n{}", self.compiler, named.join("\n")))
    }
}

/// Runs `git hash-object` with `input` as standard input and returns the printed hashes.
fn git_hash(arguments: &[&str], input: &str) -> Result<String> {
    let mut git = Command::new("git");
    git.arg("hash-object").args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = git.spawn().context("cannot start git")?;
    let mut stdin = child.stdin.take().context("git has no input")?;
    let bytes = input.as_bytes().to_vec();
    // git writes while it reads, so a thread feeds it: otherwise both sides could block.
    let writer = std::thread::spawn(move || stdin.write_all(&bytes));
    let out = child.wait_with_output().context("cannot wait for git")?;
    writer.join().ok().context("the thread that writes to git panicked")?.context("cannot write to git")?;
    ensure!(out.status.success(), "git hash-object: {}", out.status);
    Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}
