//! A copy of the sources in which the locks and streams of the sources' experiments stand in the
//! place of the product's own.
//!
//! The product knows nothing of them. A file of `research/variants` goes to the place of the same
//! name below `crates`; the product's own file there becomes a module `ours` in it, one of those
//! that can be chosen.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cargo::{RESEARCH, cargo, files, target_dir};

/// Where the copy is.
const TREE: &str = "target/variants/tree";
/// Of the sources what is built there.
const COPIED: [&str; 6] = ["Cargo.toml", "Cargo.lock", "crates", "benches", "research", "xtask"];
const VARIANTS: &str = "research/variants";
/// What says which of them is used has no place in the product; there it is declared.
const DECLARED_IN: &str = "crates/freestone-core/src/lib.rs";
const DECLARATION: &str = "\npub mod variants;\n";

/// Of what there is a copy with other locks and streams.
#[derive(Debug, Clone, Copy)]
pub enum Varied {
    /// The workspace of the product.
    Library,
    /// The experiments.
    Research,
}

/// A cargo that does this in the copy of the sources in which the library's locks and streams can
/// be chosen, with the library or with the experiments. What it builds lies with everything else.
pub fn with_variants(verb: &str, what: Varied) -> Result<Command> {
    make()?;
    let manifest = match what {
        Varied::Library => "Cargo.toml",
        Varied::Research => RESEARCH,
    };
    let mut command = cargo();
    command.arg(verb).arg("--manifest-path").arg(Path::new(TREE).join(manifest));
    command.env("CARGO_TARGET_DIR", target_dir());
    Ok(command)
}

/// Brings the copy up to date. What has not changed is not touched, so that it is not built anew.
fn make() -> Result<()> {
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
        // Git lists what was deleted, too.
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
