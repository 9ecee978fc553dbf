//! The prose check: finds sentences that are hard to read in comments, rustdoc and Markdown, and test names that are
//! too long.
//!
//! A rule is a list of word patterns. The record holds the number of hits of each file, which may only fall.

pub mod record;
mod text;

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use text::{COMMENT, Paragraph, START, comments, markdown};

/// Paths that the check skips: history and copied output, which nobody rewrites.
const SKIPPED: [&str; 2] = ["CHANGELOG.md", "docs/runs/"];

/// Longest name of a test, in characters.
const TEST_NAME_MAX: usize = 55;

/// Longest part of a sentence that a problem quotes, in characters.
const QUOTE_MAX: usize = 110;

struct Rule {
    advice: &'static str,
    /// Each pattern is a sequence of elements separated by spaces. An element lists words separated by `|` and matches
    /// one of them; with `!` in front, it matches any other word. Full stop (also for `!`), comma and semicolon (also
    /// for a colon) are words, and so are START and COMMENT.
    patterns: &'static [&'static str],
}

const RULES: [Rule; 11] = [
    Rule {
        advice: "open a comment with a noun or a verb, not with a pronoun",
        patterns: &[
            "^^ it|its|that|those|they|theirs|one|ones",
            "^^ whether|where|what|how it|they|that|this|these|those|one|there",
            "^^ this|these|such is|are|was|has|can|may|must|does|will|makes|means|holds|keeps|needs|takes|gives|lets|.|,",
        ],
    },
    Rule {
        advice: "name the subject of the sentence",
        patterns: &[
            "^ those|ones|theirs",
            "^ of these|them|those",
            "^ one that|which|who|whose|of|is|has|can|may|must|with|without|for|in|on|from|to",
        ],
    },
    Rule {
        advice: "say which component or value; a clause with 'what' or 'who' is not a subject",
        patterns: &["^ what|who|whose|whoever|whatever"],
    },
    Rule {
        advice: "'where' is for places; write 'if' or 'when'",
        patterns: &["^|; where it|there|that|this|one|none|nothing|a|an|the|both|not|no|so"],
    },
    Rule {
        advice: "write 'reports', 'returns', 'logs' or 'prints' for 'tells'",
        patterns: &["tell|tells|told"],
    },
    Rule {
        advice: "write 'returns' or 'reports' for 'answers'",
        patterns: &["answer|answers|answered how|what|whether|which"],
    },
    Rule {
        advice: "write 'is not a' for 'is no'",
        patterns: &[
            "!there is|are|was|were|be no !longer|more|less|better|worse|larger|smaller|such|other|way",
        ],
    },
    Rule {
        advice: "write 'must', 'exists' or 'is available' for 'is to be' and 'is there'",
        patterns: &[
            "to be had",
            "is|are|was|were to be",
            "is|are not to",
            "is|are|was|were there .|,|;|again|already|yet",
        ],
    },
    Rule {
        advice: "use the technical verb (release, free, reach, handle)",
        patterns: &[
            "let|lets go",
            "give|gives|gave|given back",
            "come|comes|came of|to it|that|nothing|be",
            "see|sees|saw to it|that|this|.",
        ],
    },
    Rule {
        advice: "write 'at most N' or 'this many', or say how many; 'so' needs its 'that'",
        patterns: &["so many|much|long|old|often|large|soon !that|as !that|as"],
    },
    Rule {
        advice: "name the thing instead of a pronoun at the end",
        patterns: &["for|of|with|by|under|beside|behind that|those|these ."],
    },
];

/// A sentence that breaks a rule, or a test name that is too long.
#[derive(Debug)]
pub struct Hit {
    line: usize,
    what: String,
}

pub struct Prose {
    patterns: Vec<Pattern>,
    /// Indexes of patterns, by each word that the first positive element of the pattern accepts.
    by_word: HashMap<&'static str, Vec<usize>>,
}

struct Pattern {
    advice: &'static str,
    elements: Vec<Element>,
    /// Index of the pattern's first positive element, the first one without `!`.
    anchor: usize,
}

struct Element {
    negative: bool,
    words: Vec<&'static str>,
}

impl Prose {
    pub fn new() -> Self {
        let mut prose = Self { patterns: Vec::new(), by_word: HashMap::new() };
        for (rule, text) in RULES.iter().flat_map(|rule| rule.patterns.iter().map(move |text| (rule, text))) {
            let elements: Vec<Element> = text.split(' ').map(Element::new).collect();
            let anchor = elements.iter().position(|element| !element.negative).unwrap_or_default();
            let comment = elements[anchor].words.contains(&START).then_some(COMMENT);
            for word in elements[anchor].words.iter().copied().chain(comment) {
                prose.by_word.entry(word).or_default().push(prose.patterns.len());
            }
            prose.patterns.push(Pattern { advice: rule.advice, elements, anchor });
        }
        prose
    }

    /// Returns the hits of one file, in the order of lines.
    pub fn hits(&self, path: &Path, text: &str) -> Vec<Hit> {
        let skipped = SKIPPED.iter().any(|skipped| path.starts_with(skipped));
        let kind = path.extension().and_then(|extension| extension.to_str());
        let mut hits = Vec::new();
        let paragraphs = match kind {
            Some("rs") if !skipped => {
                long_test_names(text, &mut hits);
                comments(text)
            }
            Some("md") if !skipped => markdown(text),
            _ => return hits,
        };
        for sentence in paragraphs.iter().flat_map(Paragraph::sentences) {
            if let Some(advice) = self.broken(&sentence.tokens) {
                let quote: String = sentence.text.chars().take(QUOTE_MAX).collect();
                hits.push(Hit { line: sentence.line, what: format!("{advice}: {quote}") });
            }
        }
        hits.sort_by_key(|hit| hit.line);
        hits
    }

    /// Returns the advice of the rule that is broken first in the sentence, or None.
    fn broken(&self, tokens: &[Cow<'_, str>]) -> Option<&'static str> {
        tokens.iter().enumerate().find_map(|(at, token)| {
            let mut patterns = self.by_word.get(token.as_ref())?.iter().map(|&index| &self.patterns[index]);
            patterns.find(|pattern| pattern.matches(tokens, at)).map(|pattern| pattern.advice)
        })
    }
}

impl Pattern {
    /// Returns true if the pattern matches with its first positive element at `at`.
    fn matches(&self, tokens: &[Cow<'_, str>], at: usize) -> bool {
        self.elements.iter().enumerate().all(|(index, element)| {
            let token = (at + index).checked_sub(self.anchor).and_then(|at| tokens.get(at));
            token.is_some_and(|token| element.has(token)) != element.negative
        })
    }
}

impl Element {
    fn new(text: &'static str) -> Self {
        let words = text.strip_prefix('!').unwrap_or(text);
        Self { negative: text.starts_with('!'), words: words.split('|').collect() }
    }

    fn has(&self, token: &str) -> bool {
        self.words.contains(&token) || token == COMMENT && self.words.contains(&START)
    }
}

fn long_test_names(text: &str, hits: &mut Vec<Hit>) {
    let mut is_test = false;
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim_start();
        if line.starts_with("#[test]") {
            is_test = true;
        } else if let Some((_, rest)) = line.split_once("fn ").filter(|_| is_test) {
            is_test = false;
            let name = rest.split('(').next().unwrap_or_default();
            if name.len() > TEST_NAME_MAX {
                let what = format!("a test name has at most {TEST_NAME_MAX} characters: {name}");
                hits.push(Hit { line: number, what });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hits(name: &str, text: &str) -> Vec<usize> {
        Prose::new().hits(Path::new(name), text).iter().map(|hit| hit.line).collect()
    }

    /// Returns the advice for a sentence in a comment of code, or "".
    fn advice(sentence: &str) -> String {
        let hits = Prose::new().hits(Path::new("a.rs"), &format!("/// {sentence}\n"));
        hits.first().map_or(String::new(), |hit| hit.what.split(": ").next().unwrap_or_default().to_owned())
    }

    #[test]
    fn each_rule_finds_its_sentence_and_no_other() {
        // For each rule, sentences that break it and the same thought in plain words.
        let examples: [(&[&str], &[&str]); RULES.len()] = [
            (
                &["Its length.", "Whether it is full.", "This is the pool.", "One test."],
                &["This type owns the pool.", "Length in bytes.", "Where to write. It is a directory."],
            ),
            (
                &["Pages are sorted. Those in use go first.", "Skips it. One that fails is retried."],
                &["Pages are sorted. They stay so.", "Sorts. One page at a time is copied."],
            ),
            (
                &["What cargo prints.", "Sends. Who reads it is gone."],
                &["Reads what cargo prints.", "What if it fails?"],
            ),
            (
                &["Where the file is larger, it is cut.", "Reads it; where there is none, creates it."],
                &["If the file is larger, cuts it.", "The directory where the file lies."],
            ),
            (
                &["The reader is told of it.", "Returns a bit that tells pages apart."],
                &["Reports it to the reader."],
            ),
            (&["The device answers whether it is full."], &["The server answers the request."]),
            (
                &["Fails if the disk is no fork.", "A link is no file."],
                &["There is no fork.", "The page is no longer in use."],
            ),
            (
                &["The lock is to be held.", "Waits until it is there."],
                &["The lock must be held.", "Looks if there is one."],
            ),
            (
                &["Lets go of the lock.", "Gives back the page."],
                &["Releases the lock.", "Gives the page back to it."],
            ),
            (
                &["Sends so many bytes."],
                &["Sends so many bytes that the buffer fills.", "Sends N bytes so far."],
            ),
            (&["Makes room for that."], &["Makes room for that page.", "Returns a copy of it."]),
        ];
        for (rule, (bad, good)) in RULES.iter().zip(examples) {
            for sentence in bad {
                assert_eq!(advice(sentence), rule.advice, "{sentence}");
            }
            for sentence in good {
                assert_eq!(advice(sentence), "", "{sentence}");
            }
        }
    }

    #[test]
    fn prose_is_read_without_code() {
        assert_eq!(hits("a.rs", "let a = 1; // It is.\n    // `it` is.\n    //\n    // It is.\n"), [0; 0]);
        assert_eq!(
            hits("a.rs", "//! A\n//! b. Those\n//! c.\n\n/// ```\n/// Those d.\n/// ```\n/// Those e.\n"),
            [2, 8]
        );
        assert_eq!(hits("a.rs", "/// Reads `a\n/// b`. Those c, i.e. what d.\n"), [2]);
        let page =
            "# Those\n\n* Those a.\n  Those b.\n\n| Those |\n<!-- x\nThose c.\n-->\n[A](b). Those d.\n";
        assert_eq!(hits("a.md", page), [3, 4, 10]);
        assert_eq!(hits("CHANGELOG.md", page), [0; 0]);
        assert_eq!(hits("a.sh", page), [0; 0]);
    }

    #[test]
    fn names_of_tests_are_limited() {
        let test = |length| format!("#[test]\n#[cfg(a)]\nfn {}() {{}}\n", "a".repeat(length));
        assert_eq!(hits("a.rs", &test(TEST_NAME_MAX)), [0; 0]);
        assert_eq!(hits("a.rs", &test(TEST_NAME_MAX + 1)), [3]);
        assert_eq!(hits("a.rs", &test(TEST_NAME_MAX + 1).replace("#[test]", "")), [0; 0]);
    }
}
