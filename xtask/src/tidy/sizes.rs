//! Limits of a folder and of the pages in the root.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::Problem;

/// Largest number of Rust files in a folder.
const RUST_FILES_MAX: usize = 15;
/// Pages in the root with their largest number of lines.
const PAGE_LINES_MAX: [(&str, usize); 3] =
    [("README.md", 150), ("ARCHITECTURE.md", 300), ("CONTRIBUTING.md", 200)];

pub fn problems(texts: &[(PathBuf, String)]) -> Vec<Problem> {
    let mut folders: BTreeMap<&Path, usize> = BTreeMap::new();
    for (path, _) in texts {
        if path.extension().is_some_and(|extension| extension == "rs") {
            *folders.entry(path.parent().unwrap_or(path)).or_default() += 1;
        }
    }
    let large = folders.into_iter().filter(|(_, files)| *files > RUST_FILES_MAX);
    let mut problems: Vec<_> = large
        .map(|(folder, files)| {
            Problem::new(folder, 0, format!("{files} Rust files; a folder has at most {RUST_FILES_MAX}"))
        })
        .collect();
    for (path, text) in texts {
        let Some((_, max)) = PAGE_LINES_MAX.iter().find(|(page, _)| path == Path::new(page)) else {
            continue;
        };
        let lines = text.lines().count();
        if lines > *max {
            problems.push(Problem::new(path, 0, format!("{lines} lines; this page has at most {max}")));
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_folders_and_long_pages_are_reported() {
        let file = |number: usize| (PathBuf::from(format!("a/src/{number}.rs")), String::new());
        let mut texts: Vec<_> = (0..RUST_FILES_MAX).map(file).collect();
        texts.push(("README.md".into(), "\n".repeat(150)));
        assert_eq!(problems(&texts), []);
        texts.push(file(RUST_FILES_MAX));
        texts.push(("CONTRIBUTING.md".into(), "\n".repeat(201)));
        let paths: Vec<_> = problems(&texts).into_iter().map(|problem| problem.path).collect();
        assert_eq!(paths, [Path::new("a/src"), Path::new("CONTRIBUTING.md")]);
    }
}
