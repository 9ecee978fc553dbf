//! Makes a copy of the sources in which the experiments can choose other locks and compression streams.
//!
//! The product has no such choice. Each file of `research/variants` replaces the file of the same path below `crates`;
//! the product's own file becomes the module `ours` of its replacement, one of the choices.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cargo::{RESEARCH, cargo, files, target_dir};

/// Directory of the copied sources.
const TREE: &str = "target/variants/tree";
/// Files and directories that the copy contains.
const COPIED: [&str; 6] = ["Cargo.toml", "Cargo.lock", "crates", "benches", "research", "xtask"];
const VARIANTS: &str = "research/variants";
/// File of the copy that declares the module `variants`, which chooses a variant and does not exist in the product.
const DECLARED_IN: &str = "crates/freestone-core/src/lib.rs";
const DECLARATION: &str = "\npub mod variants;\n";

/// Workspace to build in the copy.
#[derive(Debug, Clone, Copy)]
pub enum CopiedWorkspace {
    Library,
    Research,
}

/// Updates the copy and returns a cargo command for one of its workspaces. Build output goes to the usual target
/// directory.
pub fn with_variants(verb: &str, what: CopiedWorkspace) -> Result<Command> {
    update()?;
    let manifest = match what {
        CopiedWorkspace::Library => "Cargo.toml",
        CopiedWorkspace::Research => RESEARCH,
    };
    let mut command = cargo();
    command.arg(verb).arg("--manifest-path").arg(Path::new(TREE).join(manifest));
    command.env("CARGO_TARGET_DIR", target_dir());
    Ok(command)
}

/// Updates the copy. Unchanged files keep their modification time, so cargo does not rebuild them.
fn update() -> Result<()> {
    let wanted = sources()?;
    let tree = Path::new(TREE);
    for (path, content) in &wanted {
        let path = tree.join(path);
        if fs::read(&path).ok().as_ref() != Some(content) {
            fs::create_dir_all(path.parent().unwrap_or(tree))
                .with_context(|| format!("{}", path.display()))?;
            fs::write(&path, content).with_context(|| format!("{}", path.display()))?;
        }
    }
    remove_others(tree, tree, &wanted)
}

fn sources() -> Result<BTreeMap<PathBuf, Vec<u8>>> {
    let is_copied = |path: &PathBuf| COPIED.iter().any(|copied| path.starts_with(copied));
    let mut sources = BTreeMap::new();
    for path in files()?.into_iter().filter(is_copied) {
        // git also lists deleted files, which cannot be read.
        if let Ok(content) = fs::read(&path) {
            sources.insert(path, content);
        }
    }
    let is_variant = |path: &&PathBuf| path.starts_with(VARIANTS);
    for variant in sources.keys().filter(is_variant).cloned().collect::<Vec<_>>() {
        let place = Path::new("crates").join(variant.strip_prefix(VARIANTS)?);
        if let Some(ours) = sources.remove(&place) {
            sources.insert(place.with_extension("").join("ours.rs"), ours);
        }
        if let Some(content) = sources.get(&variant).cloned() {
            sources.insert(place, content);
        }
    }
    let lib = sources.get_mut(Path::new(DECLARED_IN)).with_context(|| format!("no {DECLARED_IN}"))?;
    lib.extend_from_slice(DECLARATION.as_bytes());
    Ok(sources)
}

fn remove_others(tree: &Path, dir: &Path, wanted: &BTreeMap<PathBuf, Vec<u8>>) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("{}", dir.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            remove_others(tree, &path, wanted)?;
        } else if !wanted.contains_key(path.strip_prefix(tree)?) {
            fs::remove_file(&path).with_context(|| format!("{}", path.display()))?;
        }
    }
    Ok(())
}
