//! Checks that `docs/SUMMARY.md`, the table of contents of the book, lists every page once.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{Problem, links};
use crate::docs::{PARTS, RUNS_DIR};

const SUMMARY: &str = "docs/SUMMARY.md";

/// Returns the pages that the table of contents omits or lists twice.
pub fn problems(texts: &[(PathBuf, String)]) -> Vec<Problem> {
    let Some((summary, text)) = texts.iter().find(|(path, _)| path == Path::new(SUMMARY)) else {
        return vec![Problem::new(Path::new(SUMMARY), 0, "does not exist")];
    };
    let dir = summary.parent().unwrap_or(Path::new(""));
    let mut listed: BTreeMap<PathBuf, usize> = BTreeMap::new();
    for (_, target) in links::targets(text) {
        *listed.entry(dir.join(target)).or_default() += 1;
    }
    let pages = texts.iter().map(|(path, _)| path).filter(|path| is_page(path));
    let wrong = pages.filter_map(|page| match listed.get(page).copied().unwrap_or_default() {
        0 => Some(Problem::new(summary, 0, format!("does not list {}", page.display()))),
        1 => None,
        _ => Some(Problem::new(summary, 0, format!("lists {} twice", page.display()))),
    });
    wrong.collect()
}

/// Returns true for a page of a part or of the published runs.
fn is_page(path: &Path) -> bool {
    let is_in = |dir: &str| path.parent() == Some(Path::new(dir));
    path.extension().is_some_and(|extension| extension == "md")
        && (PARTS.into_iter().any(is_in) || is_in(RUNS_DIR))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn omitted_and_repeated_pages_are_found() {
        let text = "# Parts\n\n- [A](how-to/a.md)\n- [B](reference/b.md)\n- [B](reference/b.md)\n";
        let pages =
            ["docs/how-to/a.md", "docs/reference/b.md", "docs/runs/c.md", "docs/runs/c.json", "README.md"];
        let mut texts: Vec<_> = pages.map(|page| (page.into(), String::new())).into();
        texts.push((SUMMARY.into(), text.into()));
        let found: Vec<_> = problems(&texts).into_iter().map(|problem| problem.what).collect();
        assert_eq!(found, ["lists docs/reference/b.md twice", "does not list docs/runs/c.md"]);
    }
}
