//! Copies the documentation, and everything that it links to, to a directory with the layout of the tree.
//!
//! The pages of docs/ link to files outside of it, for example ARCHITECTURE.md and scripts. A copy with these files keeps
//! all links relative and valid.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::cargo;
use crate::tidy::links;

/// Pages outside of docs/ that are chapters, with their titles: the first one, and those at the end.
const FIRST: (&str, &str) = ("README.md", "Freestone");
const LAST: [(&str, &str); 4] = [
    ("ARCHITECTURE.md", "Architecture"),
    ("CONTRIBUTING.md", "Contributing"),
    ("CHANGELOG.md", "Changes"),
    ("fuzz/README.md", "Fuzzing"),
];
const SETTINGS: &str = "docs/book.toml";
const SUMMARY: &str = "docs/SUMMARY.md";
/// Generated directories, each with the page below which its pages are listed and their place in docs/.
const GENERATED: [(&str, &str, &str); 2] = [
    ("verbs", "reference/commands.md", "reference/verbs"),
    ("kinds", "reference/keys.md", "reference/kinds"),
];

/// Fills `dir` with the settings and sources of the book. `generated` has the pages that the program writes.
pub fn fill(dir: &Path, generated: &Path) -> Result<()> {
    let source = dir.join("src");
    copy(Path::new(SETTINGS), &dir.join("book.toml"))?;
    let mut waiting: Vec<PathBuf> = cargo::files()?;
    waiting
        .retain(|path| path.starts_with("docs") && path != Path::new(SETTINGS) && path != Path::new(SUMMARY));
    waiting.extend([FIRST].iter().chain(&LAST).map(|(page, _)| PathBuf::from(page)));
    let mut copied = BTreeSet::new();
    while let Some(path) = waiting.pop() {
        if !path.is_file() || !copied.insert(path.clone()) {
            continue;
        }
        if !is_page(&path) {
            copy(&path, &source.join(&path))?;
            continue;
        }
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        waiting.extend(linked_files(&path, &text));
        let to = source.join(with_index(&path.display().to_string()));
        create_parent(&to)?;
        fs::write(&to, with_index(&text)).with_context(|| format!("cannot write {}", to.display()))?;
    }
    let mut below = BTreeMap::new();
    for (name, parent, place) in GENERATED {
        below.insert(parent, copy_generated(&generated.join(name), &source.join("docs"), place)?);
    }
    let text = fs::read_to_string(SUMMARY).with_context(|| format!("cannot read {SUMMARY}"))?;
    let summary = with_index(&summary(&text, &below));
    for page in copied.iter().filter(|path| is_page(path)) {
        if !summary.contains(&format!("]({})", with_index(&page.display().to_string()))) {
            bail!(
                "{} is linked and not a chapter: list it in {SUMMARY} or in xtask/src/site",
                page.display()
            );
        }
    }
    fs::write(source.join("SUMMARY.md"), summary).context("cannot write the summary")
}

fn is_page(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "md")
}

/// Returns the files that a page links to, as paths relative to the root.
fn linked_files(page: &Path, text: &str) -> Vec<PathBuf> {
    let dir = page.parent().unwrap_or(Path::new(""));
    let is_file =
        |target: &str| !target.is_empty() && !target.contains("://") && !target.starts_with("mailto:");
    let targets =
        links::targets(text).into_iter().map(|(_, target)| target.split('#').next().unwrap_or_default());
    targets.filter(|target| is_file(target)).map(|target| normal(&dir.join(target))).collect()
}

/// Removes `..` and the component before it.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => _ = normal.pop(),
            component => normal.push(component),
        }
    }
    normal
}

/// Renames `README.md` to `index.md` at the end of a path, and in the links of a text. mdBook makes the page `index.html` of
/// a readme, but keeps the name in links.
fn with_index(text: &str) -> String {
    const README: &str = "README.md";
    let mut renamed = String::new();
    for (number, piece) in text.split("](").enumerate() {
        let end = piece.find([')', '#']).unwrap_or(piece.len());
        let (target, rest) = piece.split_at(end);
        let is_link = number > 0 || !text.contains("](");
        renamed += if number > 0 { "](" } else { "" };
        match target.strip_suffix(README).filter(|dir| is_link && (dir.is_empty() || dir.ends_with('/'))) {
            Some(dir) => renamed = renamed + dir + "index.md",
            None => renamed += target,
        }
        renamed += rest;
    }
    renamed
}

fn create_parent(path: &Path) -> Result<()> {
    let dir = path.parent().unwrap_or(Path::new(""));
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    create_parent(to)?;
    fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    Ok(())
}

/// Copies generated pages to `place` below `docs`. Returns their titles and paths relative to `docs`.
fn copy_generated(from: &Path, docs: &Path, place: &str) -> Result<Vec<(String, String)>> {
    let mut pages = Vec::new();
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let text = fs::read_to_string(&path)?;
        let title =
            text.lines().next().and_then(|line| line.strip_prefix("# ")).context("a page has no title")?;
        pages.push((title.to_owned(), format!("{place}/{name}")));
        copy(&path, &docs.join(place).join(&name))?;
    }
    pages.sort();
    Ok(pages)
}

/// Returns the table of contents of the site: that of docs/, with the generated pages below the pages in `below`, and the
/// pages outside of docs/.
fn summary(docs: &str, below: &BTreeMap<&str, Vec<(String, String)>>) -> String {
    let mut text = format!("# Summary\n\n[{}]({})\n", FIRST.1, FIRST.0);
    for line in docs.lines().filter(|line| *line != "# Summary") {
        text += &line.replace("](", "](docs/");
        text.push('\n');
        let page = line.split_once("](").and_then(|(_, rest)| rest.strip_suffix(')'));
        for (title, path) in page.and_then(|page| below.get(page)).into_iter().flatten() {
            let _ = writeln!(text, "  - [{title}](docs/{path})");
        }
    }
    text += "\n# The project\n\n";
    for (page, title) in LAST {
        let _ = writeln!(text, "- [{title}]({page})");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::{Path, PathBuf};

    use super::{linked_files, summary, with_index};

    #[test]
    fn readmes_become_index_pages() {
        assert_eq!(with_index("docs/README.md"), "docs/index.md");
        assert_eq!(with_index("docs/a.md"), "docs/a.md");
        let text = "README.md is here: [a](README.md) [b](../README.md#start) [c](OTHER-README.md) [d](a.md)";
        let expected =
            "README.md is here: [a](index.md) [b](../index.md#start) [c](OTHER-README.md) [d](a.md)";
        assert_eq!(with_index(text), expected);
    }

    #[test]
    fn links_to_files_are_relative_to_the_root() {
        let text = "[a](../b.md#part) [b](https://example.org/x) [c](#d) [e](f.png) `[g](h.md)`\n";
        let expected = ["docs/b.md", "docs/how-to/f.png"].map(PathBuf::from);
        assert_eq!(linked_files(Path::new("docs/how-to/a.md"), text), expected);
    }

    #[test]
    fn generated_pages_are_listed_below_their_parent() {
        let pages = vec![("freestone fork".to_owned(), "reference/verbs/fork.md".to_owned())];
        let text = summary(
            "# Summary\n\n# Reference\n\n- [Commands](reference/commands.md)\n- [Zones](reference/zones.md)\n",
            &BTreeMap::from([("reference/commands.md", pages)]),
        );
        let part = "- [Commands](docs/reference/commands.md)\n  - [freestone fork](docs/reference/verbs/fork.md)\n- [Zones](docs/reference/zones.md)\n";
        assert!(text.starts_with("# Summary\n\n[Freestone](README.md)\n") && text.contains(part), "{text}");
    }
}
