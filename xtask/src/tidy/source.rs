//! Rules for source text.

use std::path::Path;

use super::Problem;

const RUST_LINES_MAX: usize = 500;
/// Maximum distance from a comment to its `unsafe` or ordering, in lines that are neither comments nor continue a chain
/// of calls.
const COMMENT_REACH_LINES: usize = 3;

const ORDERINGS: [&str; 4] = ["Relaxed", "Acquire", "Release", "AcqRel"];

// Each string is split, so that this file does not violate its own rules.
const UNFINISHED: [&str; 5] = [
    concat!("to", "do!"),
    concat!("unimple", "mented!"),
    concat!("FIX", "ME"),
    concat!("XX", "X"),
    concat!("#[ig", "nore"),
];

/// Attribute of tests that the slow lane runs. No other test may be ignored.
const SLOW_LANE: &str = concat!("#[ig", "nore = \"slow lane\"]");

/// Paths of developers' machines, and hosts on which a build must not depend.
const LOCAL: [&str; 8] = [
    concat!("/wo", "rk/"),
    concat!("/ro", "ot/"),
    concat!("/ho", "me/"),
    concat!("/Us", "ers/"),
    concat!("crates", ".io"),
    concat!("arti", "factory"),
    concat!("npmjs", ".org"),
    concat!("debian", ".org"),
];

pub fn any(path: &Path, text: &str) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        for word in LOCAL.iter().filter(|word| line.contains(*word)) {
            problems.push(Problem::new(
                path,
                number,
                format!("\"{word}\" is specific to one machine or mirror"),
            ));
        }
        let line = line.replace(SLOW_LANE, "");
        for word in UNFINISHED.iter().filter(|word| has_word(&line, word)) {
            problems.push(Problem::new(path, number, format!("\"{word}\" marks unfinished work")));
        }
    }
    problems
}

pub fn rust(path: &Path, text: &str) -> Vec<Problem> {
    let lines: Vec<&str> = text.lines().collect();
    let mut problems = Vec::new();
    if lines.len() > RUST_LINES_MAX {
        let what = format!("{} lines; a file has at most {RUST_LINES_MAX}", lines.len());
        problems.push(Problem::new(path, 0, what));
    }
    let mut has_unsafe = false;
    for (index, line) in lines.iter().enumerate() {
        let code = code_of(line);
        if is_unsafe(code) {
            has_unsafe = true;
            if !explained(&lines, index, &["SAFETY:"]) {
                problems.push(Problem::new(path, index + 1, "unsafe without a SAFETY: comment above it"));
            }
        }
        let used: Vec<_> = ORDERINGS.into_iter().filter(|o| uses_ordering(code, o)).collect();
        if !used.is_empty() {
            let names: Vec<String> = used.iter().map(|o| format!("{o}:")).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            if !explained(&lines, index, &names) {
                let what = format!("no comment above opens with {}", names.join(" or "));
                problems.push(Problem::new(path, index + 1, what));
            }
        }
    }
    if has_unsafe && !text.contains("UNSAFETY:") {
        problems.push(Problem::new(path, 0, "has unsafe code, but no UNSAFETY: line with the reason"));
    }
    problems
}

/// Returns the part of the line before a comment. A `//` in a string also ends the code.
fn code_of(line: &str) -> &str {
    line.split("//").next().unwrap_or_default()
}

/// Returns true if the code has an unsafe block or implementation. Clippy checks unsafe functions.
fn is_unsafe(code: &str) -> bool {
    let opens = ["{", "impl ", "impl<"];
    let mut rest = code;
    while let Some(at) = rest.find("unsafe ") {
        let whole = at == 0 || !is_word(rest.as_bytes()[at - 1]);
        rest = &rest[at + "unsafe ".len()..];
        if whole && opens.iter().any(|open| rest.starts_with(open)) {
            return true;
        }
    }
    false
}

fn uses_ordering(code: &str, ordering: &str) -> bool {
    // Matches the qualified name, or an import of the variant, which would hide its uses from this check.
    let path = format!("Ordering::{ordering}");
    has_word(code, &path) || (code.contains("Ordering::{") && has_word(code, ordering))
}

/// Returns true if a comment on the line or within `COMMENT_REACH_LINES` above has one of the words.
fn explained(lines: &[&str], index: usize, words: &[&str]) -> bool {
    let mut code_lines = 0;
    for (above, line) in lines[..=index].iter().rev().enumerate() {
        let comment = line.find("//").map(|at| &line[at..]);
        if comment.is_some_and(|comment| words.iter().any(|word| has_word(comment, word))) {
            return true;
        }
        let free = line.trim_start().starts_with("//") || line.trim_start().starts_with('.');
        if above > 0 && !free {
            code_lines += 1;
            if code_lines == COMMENT_REACH_LINES {
                return false;
            }
        }
    }
    false
}

fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].bytes().next_back();
        let after = line[at + word.len()..].bytes().next();
        let whole_end = !word.ends_with(|c: char| c.is_alphanumeric()) || !after.is_some_and(is_word);
        (word.starts_with('#') || !before.is_some_and(is_word)) && whole_end
    })
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{LOCAL, RUST_LINES_MAX, SLOW_LANE, UNFINISHED, any, rust};

    /// Lines with problems in a text without any.
    const NONE: [usize; 0] = [];

    fn lines_of(text: &str) -> Vec<usize> {
        rust(Path::new("a.rs"), text).iter().map(|p| p.line).collect()
    }

    #[test]
    fn length_is_limited() {
        assert_eq!(lines_of(&"\n".repeat(RUST_LINES_MAX)), NONE);
        assert_eq!(lines_of(&"\n".repeat(RUST_LINES_MAX + 1)), [0]);
    }

    #[test]
    fn unsafe_is_explained() {
        let good = "// UNSAFETY: c\n// SAFETY: it\n// is.\nlet a =\n    unsafe { f() };\n";
        assert_eq!(lines_of(good), NONE);
        assert_eq!(lines_of(&good.replace("UNSAFETY", "NOTHING")), [0]);
        assert_eq!(lines_of("// UNSAFETY: c\n\n\n\nunsafe { f() }\n"), [5]);
        assert_eq!(lines_of("// UNSAFETY: c\nunsafe impl<T> Send for A<T> {}\n"), [2]);
        assert_eq!(lines_of("// UNSAFETY: c\n// SAFETY: a\n1\n2\n3\n4\nunsafe { f() }\n"), [7]);
        assert_eq!(
            lines_of("// unsafe { f() }\nlet unsafely = 1;\ntype F = unsafe extern \"C\" fn(u8);\n"),
            NONE
        );
    }

    #[test]
    fn orderings_are_explained() {
        assert_eq!(lines_of("// Release: pairs.\na.store(1, Ordering::Release);\n"), NONE);
        assert_eq!(lines_of("a.store(1, Ordering::Release); // Release: pairs.\n"), NONE);
        assert_eq!(lines_of("// Acquire: pairs.\na.store(1, Ordering::Release);\n"), [2]);
        assert_eq!(lines_of("a.store(1, Ordering::SeqCst);\n"), NONE);
        assert_eq!(lines_of("use std::sync::atomic::Ordering::{Acquire, SeqCst};\n"), [1]);
        assert_eq!(lines_of("// AcqRel: a.\n1\n2\na.swap(1, Ordering::AcqRel);\n"), NONE);
        assert_eq!(lines_of("// AcqRel: a.\n1\n2\n.b()\n.c()\n.map(|a| a.load(Ordering::AcqRel))\n"), NONE);
        assert_eq!(lines_of("// AcqRel: a.\n1\n2\n3\n4\na.swap(1, Ordering::AcqRel);\n"), [6]);
    }

    #[test]
    fn unfinished_work_and_local_names_are_found() {
        for word in UNFINISHED.iter().chain(&LOCAL) {
            assert_eq!(any(Path::new("a"), &format!("ok\n  {word}\n")).len(), 1, "{word}");
        }
        assert_eq!(any(Path::new("a"), "mkdtemp: aXXXXXX\n"), []);
        assert_eq!(any(Path::new("a"), SLOW_LANE), []);
        assert_eq!(any(Path::new("a"), &SLOW_LANE.replace(" lane", "")).len(), 1);
    }
}
