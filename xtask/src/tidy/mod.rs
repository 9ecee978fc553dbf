//! The rules of the project that a machine can check and clippy does not.

mod circles;
mod links;
mod manifests;
mod source;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::cargo::files;
use crate::docs;

/// Where a rule is broken, and how.
#[derive(Debug, PartialEq, Eq)]
pub struct Problem {
    path: PathBuf,
    /// Counted from 1; 0 is the file as a whole.
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

/// Checks the tree in the working directory and prints what is wrong. Tells whether nothing is.
pub fn run() -> Result<bool> {
    let mut problems = Vec::new();
    let mut texts = 0;
    for path in files()? {
        // Deleted, and git was not told yet; or a link, whose target is checked where it lies.
        if !path.is_file() || path.is_symlink() {
            continue;
        }
        let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let Ok(text) = String::from_utf8(bytes) else { continue };
        texts += 1;
        problems.extend(check(&path, &text));
        if is_root(&path) {
            problems.extend(circles::of(&path)?);
        }
    }
    problems.extend(manifests::locked()?);
    problems.extend(manifests::research()?);
    let figures = docs::problems()?;
    problems.extend(figures.into_iter().map(|(path, line, what)| Problem { path, line, what }));
    for problem in &problems {
        println!("{problem}");
    }
    println!("{texts} files, {} problems", problems.len());
    Ok(problems.is_empty())
}

/// Whether a crate's modules begin here.
fn is_root(path: &Path) -> bool {
    path.parent().is_some_and(|dir| dir.ends_with("src"))
        && (path.ends_with("lib.rs") || path.ends_with("main.rs"))
}

fn check(path: &Path, text: &str) -> Vec<Problem> {
    let name = path.file_name().unwrap_or_default();
    if name == "Cargo.lock" {
        // Cargo writes it, and names the registry in its own way.
        return manifests::sources(path, text);
    }
    let mut problems = source::any(path, text);
    match path.extension().and_then(|e| e.to_str()) {
        Some("rs") => problems.extend(source::rust(path, text)),
        Some("md") => problems.extend(links::relative(path, text)),
        _ if name == "Cargo.toml" => problems.extend(manifests::package(path, text)),
        _ => {}
    }
    problems
}
