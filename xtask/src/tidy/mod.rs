//! `cargo xtask tidy`: checks the rules of CONTRIBUTING.md that clippy does not.

mod book;
mod cycles;
pub mod links;
mod manifests;
mod prose;
pub mod published;
mod sizes;
mod source;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::cargo::files;
use crate::docs;

#[derive(Debug, PartialEq, Eq)]
pub struct Problem {
    path: PathBuf,
    /// Line number, counted from 1; 0 for the file as a whole.
    line: usize,
    what: String,
}

impl Problem {
    fn new(path: &Path, line: usize, what: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, what: what.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path.display(), self.what),
            line => write!(f, "{}:{line}: {}", self.path.display(), self.what),
        }
    }
}

/// Checks the tree in the working directory and prints the problems. Returns true if there are none.
pub fn run() -> Result<bool> {
    let mut problems = Vec::new();
    let texts = texts()?;
    let root = manifests::root()?;
    for (path, text) in &texts {
        problems.extend(check(path, text, &root));
        if is_crate_root(path) {
            problems.extend(cycles::of(path)?);
        }
    }
    problems.extend(book::problems(&texts));
    problems.extend(sizes::problems(&texts));
    problems.extend(prose::record::problems(&hits(&texts))?);
    problems.extend(manifests::locked()?);
    problems.extend(manifests::dependencies(&root)?);
    problems.extend(manifests::research()?);
    let figures = docs::problems()?;
    problems.extend(figures.into_iter().map(|(path, line, what)| Problem { path, line, what }));
    for problem in &problems {
        println!("{problem}");
    }
    println!("{} files, {} problems", texts.len(), problems.len());
    Ok(problems.is_empty())
}

/// `cargo xtask tidy --lower`: lowers the record of the prose check to the hits that the tree has.
pub fn lower() -> Result<()> {
    prose::record::lower(&hits(&texts()?))
}

/// Reads the text files of the tree, sorted by path.
fn texts() -> Result<Vec<(PathBuf, String)>> {
    let mut texts = Vec::new();
    for path in files()? {
        // Skip deleted files that are still in git's index, and links, whose targets are checked under their
        // own paths.
        if !path.is_file() || path.is_symlink() {
            continue;
        }
        let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let Ok(text) = String::from_utf8(bytes) else { continue };
        texts.push((path, text));
    }
    Ok(texts)
}

fn hits(texts: &[(PathBuf, String)]) -> prose::record::Hits {
    let prose = prose::Prose::new();
    let hits = texts.iter().map(|(path, text)| (path.clone(), prose.hits(path, text)));
    hits.filter(|(_, hits)| !hits.is_empty()).collect()
}

/// Returns true for `lib.rs` or `main.rs` in a crate's `src`.
fn is_crate_root(path: &Path) -> bool {
    path.parent().is_some_and(|dir| dir.ends_with("src"))
        && (path.ends_with("lib.rs") || path.ends_with("main.rs"))
}

fn check(path: &Path, text: &str, root: &toml::Table) -> Vec<Problem> {
    let name = path.file_name().unwrap_or_default();
    if name == "Cargo.lock" {
        // Cargo writes the name of the registry into lock files; the name is forbidden in other files.
        return manifests::sources(path, text);
    }
    let mut problems = source::any(path, text);
    match path.extension().and_then(|e| e.to_str()) {
        Some("rs") => problems.extend(source::rust(path, text)),
        Some("md") => problems.extend(links::relative(path, text)),
        _ if name == "Cargo.toml" => problems.extend(manifests::package(path, text, root)),
        _ => {}
    }
    problems
}
