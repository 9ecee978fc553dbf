//! Checks that relative links in Markdown have existing targets: files, and headings of pages.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::Problem;

/// Checks links of the forms `[text](target)` and `[label]: target`, outside of code. Returns a
/// problem for each target that does not exist.
pub fn relative(path: &Path, text: &str) -> Vec<Problem> {
    let dir = path.parent().unwrap_or(Path::new(""));
    let mut problems = Vec::new();
    for (number, target) in targets(text) {
        if target.contains("://") || target.starts_with("mailto:") {
            continue;
        }
        let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
        let file_path = dir.join(file);
        if !file.is_empty() && !file_path.exists() {
            problems.push(Problem::new(path, number, format!("{target}: the target does not exist")));
            continue;
        }
        let is_page = file.is_empty() || file_path.extension().is_some_and(|extension| extension == "md");
        if anchor.is_empty() || !is_page {
            continue;
        }
        let has = if file.is_empty() {
            anchors(text).contains(anchor)
        } else {
            fs::read_to_string(&file_path).is_ok_and(|page| anchors(&page).contains(anchor))
        };
        if !has {
            problems.push(Problem::new(path, number, format!("{target}: the page has no such heading")));
        }
    }
    problems
}

/// Returns the links of a page: line and target.
pub fn targets(text: &str) -> Vec<(usize, &str)> {
    let mut targets = Vec::new();
    let mut in_code = false;
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code || line.starts_with("    ") {
            continue;
        }
        // Every second piece is code between backticks.
        for piece in line.split('`').step_by(2) {
            for (at, open) in piece.match_indices("](") {
                let rest = &piece[at + open.len()..];
                let end = rest.find([')', ' ']).unwrap_or(rest.len());
                targets.push((number, &rest[..end]));
            }
        }
        if let Some((label, target)) = line.split_once("]: ").filter(|(label, _)| label.starts_with('['))
            && !label.starts_with("[^")
        {
            targets.push((number, target.split(' ').next().unwrap_or_default()));
        }
    }
    targets
}

/// Returns the anchors of a page's headings, as web forges and mdBook make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    let mut in_code = false;
    for line in text.lines() {
        if line.starts_with("```") {
            in_code = !in_code;
        }
        let title = line.trim_start_matches('#');
        if in_code || title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let anchor = anchor(title.trim());
        // The second heading with the same text has the suffix `-1`.
        let numbered = (1..).map(|number| format!("{anchor}-{number}"));
        let free = [anchor.clone()].into_iter().chain(numbered).find(|anchor| !anchors.contains(anchor));
        anchors.extend(free);
    }
    anchors
}

fn anchor(title: &str) -> String {
    let kept = title.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{anchors, relative};

    #[test]
    fn missing_targets_are_found() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("there.md"), "# There\n## Part\n").unwrap();
        let text = "[a](there.md) [b](there.md#part) [c](#here) [d](https://example.org/x#y)\n\
                    ```\n[e](nowhere)\n```\n`[f](nowhere)` and [`g`](nowhere.md)\n[h]: there.md\n[i]: gone.md\n\
                    # Here\n[j](#there)\n[k](there.md#parts)\n";
        let problems = relative(&dir.path().join("page.md"), text);
        let lines: Vec<_> = problems.iter().map(|p| p.line).collect();
        assert_eq!(lines, [5, 7, 9, 10], "{problems:?}");
    }

    #[test]
    fn anchors_are_those_of_web_forges() {
        let text =
            "# ram: a `ram` disk\n## Part\n```\n# code\n```\n## Part\n#no heading\n### After kill -9\n";
        let expected = ["ram-a-ram-disk", "part", "part-1", "after-kill--9"];
        assert_eq!(anchors(text), expected.map(str::to_owned).into());
    }
}
