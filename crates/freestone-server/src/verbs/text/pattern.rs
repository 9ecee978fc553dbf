//! Patterns that match device names.

/// A pattern in which `*` matches any characters and `?` matches one.
pub struct Pattern(Vec<char>);

impl Pattern {
    /// Creates a pattern from any text. A text without `*` and `?` matches only itself.
    pub fn new(text: &str) -> Self {
        Self(text.chars().collect())
    }

    /// Returns true if a word is a pattern and not a name. A word with a slash is the path of a file, not a pattern.
    pub fn is_pattern(word: &str) -> bool {
        word.contains(['*', '?']) && !word.contains('/')
    }

    /// Returns true if the pattern matches the whole name. The search backtracks only to the last `*`, so the
    /// work is bounded by the product of both lengths.
    pub fn matches(&self, name: &str) -> bool {
        let pattern = &self.0;
        let name: Vec<char> = name.chars().collect();
        let (mut p, mut n) = (0, 0);
        let mut last_star = None;
        while n < name.len() {
            match pattern.get(p) {
                Some('*') => {
                    last_star = Some((p, n));
                    p += 1;
                }
                Some(&c) if c == '?' || c == name[n] => {
                    p += 1;
                    n += 1;
                }
                _ => {
                    // Backtrack: the last `*` matches one more character than before.
                    let Some((star, taken)) = last_star else { return false };
                    last_star = Some((star, taken + 1));
                    (p, n) = (star + 1, taken + 1);
                }
            }
        }
        pattern[p..].iter().all(|c| *c == '*')
    }
}

#[cfg(test)]
mod tests {
    use super::Pattern;

    #[test]
    fn pattern_matches_whole_names() {
        for (pattern, name, expected) in [
            ("*", "ram0", true),
            ("ram?", "ram0", true),
            ("ram?", "ram10", false),
            ("r*0", "ram10", true),
            ("r*1", "ram10", false),
            ("*a*m*", "ram", true),
            ("", "ram", false),
            ("ram", "ram", true),
            ("ram**", "ram", true),
            ("?", "ß", true),
            ("*ab", "aab", true),
        ] {
            assert_eq!(Pattern::new(pattern).matches(name), expected, "{pattern} {name}");
        }
        assert!(!Pattern::new(&"*a".repeat(2000)).matches(&"a".repeat(255).replace("aaa", "aab")));
        assert!(
            Pattern::is_pattern("job-?") && !Pattern::is_pattern("job-1") && !Pattern::is_pattern("./a*")
        );
    }
}
