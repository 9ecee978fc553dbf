//! Checks that relative links in Markdown have existing targets.

use std::path::Path;

use super::Problem;

/// Checks `[text](target)` and `[label]: target`, outside of code.
pub fn relative(path: &Path, text: &str) -> Vec<Problem> {
    let dir = path.parent().unwrap_or(Path::new(""));
    let mut problems = Vec::new();
    for (number, target) in targets(text) {
        let file = target.split('#').next().unwrap_or_default();
        let elsewhere = file.is_empty() || target.contains("://") || target.starts_with("mailto:");
        if !elsewhere && !dir.join(file).exists() {
            problems.push(Problem::new(path, number, format!("{target}: the target does not exist")));
        }
    }
    problems
}

fn targets(text: &str) -> Vec<(usize, &str)> {
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

#[cfg(test)]
mod tests {
    use std::fs;

    use super::relative;

    #[test]
    fn missing_targets_are_found() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("there.md"), "").unwrap();
        let text = "[a](there.md) [b](there.md#part) [c](#here) [d](https://example.org/x)\n\
                    ```\n[e](nowhere)\n```\n`[f](nowhere)` and [`g`](nowhere.md)\n[h]: there.md\n[i]: gone.md\n";
        let problems = relative(&dir.path().join("page.md"), text);
        let lines: Vec<_> = problems.iter().map(|p| p.line).collect();
        assert_eq!(lines, [5, 7], "{problems:?}");
    }
}
