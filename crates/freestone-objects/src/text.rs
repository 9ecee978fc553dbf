//! Sanitizing text from an object store for messages.

/// Maximum length of a sanitized text in characters, including the `...` of a shortened text.
pub const SENTENCE_CHARS_MAX: usize = 300;

/// Escapes control characters, and characters that reorder or hide text. Shortens the text to
/// [`SENTENCE_CHARS_MAX`] characters.
pub fn plain(text: &str) -> String {
    let mut plain = String::new();
    let mut chars = 0;
    for c in text.trim().chars() {
        let is_bad = c.is_control()
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
        let escaped: String = if is_bad { c.escape_default().collect() } else { c.into() };
        chars += escaped.chars().count();
        if chars > SENTENCE_CHARS_MAX - 3 {
            return plain + "...";
        }
        plain += &escaped;
    }
    plain
}

/// Returns the error code in a response if it is one word of at most 64 characters, else `None`.
pub fn code(text: &str) -> Option<&str> {
    let is_code = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    (!text.is_empty() && text.len() <= 64 && text.chars().all(is_code)).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_text_is_escaped_and_limited() {
        assert_eq!(plain(" a\x1b[2Jb\n\u{202e}ä "), "a\\u{1b}[2Jb\\n\\u{202e}ä");
        let long = plain(&"\x07".repeat(1000));
        assert!(long.ends_with("...") && long.chars().count() <= SENTENCE_CHARS_MAX, "{long}");
        assert_eq!(plain(&"a".repeat(297)).len(), 297);
    }

    #[test]
    fn error_code_is_one_word() {
        assert_eq!(code("NoSuchKey"), Some("NoSuchKey"));
        for no in ["", "a b", "a\n", "<x>", &"a".repeat(65)] {
            assert_eq!(code(no), None);
        }
    }
}
