//! Splits the comments of Rust and the prose of Markdown into sentences.

use std::borrow::Cow;

/// Token for the start of a sentence, in sentences and in patterns.
pub const START: &str = "^";
/// Token for the start of the first sentence of a comment; a pattern with START matches this token
/// too.
pub const COMMENT: &str = "^^";
/// Token for an inline code span.
const CODE: &str = "`";

/// Lines of text without a break between them.
pub struct Paragraph<'t> {
    /// True for the first paragraph of a comment.
    opens_comment: bool,
    /// Lines of text with their numbers, counted from 1.
    lines: Vec<(usize, &'t str)>,
}

pub struct Sentence<'t> {
    pub line: usize,
    pub text: String,
    /// Words in lower case and punctuation marks, after START or COMMENT.
    pub tokens: Vec<Cow<'t, str>>,
}

impl<'t> Paragraph<'t> {
    pub fn sentences(&self) -> Vec<Sentence<'t>> {
        let mut sentences = Vec::new();
        let mut open: Option<Sentence<'t>> = None;
        let mut in_code = false;
        for (line, word) in
            self.lines.iter().flat_map(|(line, text)| text.split_whitespace().map(move |w| (*line, w)))
        {
            let start = if self.opens_comment && sentences.is_empty() { COMMENT } else { START };
            let sentence = open.get_or_insert_with(|| Sentence {
                line,
                text: String::new(),
                tokens: vec![start.into()],
            });
            if !sentence.text.is_empty() {
                sentence.text.push(' ');
            }
            sentence.text.push_str(word);
            let was_code = in_code;
            in_code ^= word.matches('`').count() % 2 == 1;
            // Of a link, only its text and what follows its target are read.
            let (word, rest) = word.split_once("](").unwrap_or((word, word));
            let plain = word.trim_matches(|c: char| !c.is_alphanumeric() && c != '`');
            if was_code || plain.contains('`') {
                if !was_code {
                    sentence.tokens.push(CODE.into());
                }
            } else if plain.bytes().any(|byte| byte.is_ascii_uppercase()) {
                sentence.tokens.push(plain.to_ascii_lowercase().into());
            } else if !plain.is_empty() {
                sentence.tokens.push(plain.into());
            }
            let mark = rest.trim_end_matches(['"', ')', '*', '_', ']', '\'']);
            match mark.bytes().next_back() {
                _ if in_code || ["e.g.", "i.e."].contains(&mark) => {}
                Some(b'.' | b'!' | b'?') => {
                    // Questions are not checked, because a question may begin with any word.
                    let question = mark.ends_with('?');
                    sentence.tokens.push(".".into());
                    sentences.extend(open.take().filter(|_| !question));
                }
                Some(b',') => sentence.tokens.push(",".into()),
                Some(b':' | b';') => sentence.tokens.push(";".into()),
                _ => {}
            }
        }
        sentences.extend(open);
        sentences
    }
}

/// Returns the paragraphs of comments that have a line of their own, without examples.
pub fn comments(text: &str) -> Vec<Paragraph<'_>> {
    let mut paragraphs = Paragraphs::default();
    let mut marker = "";
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim_start();
        let found =
            ["///", "//!", "//"].into_iter().find(|marker| line.starts_with(marker)).unwrap_or_default();
        let opens_comment = found != marker;
        marker = found;
        if opens_comment {
            paragraphs.end();
        }
        if !found.is_empty() {
            paragraphs.add(opens_comment, number, line[found.len()..].trim());
        }
    }
    paragraphs.list
}

/// Returns the paragraphs of a page without code, tables, headings and HTML comments.
pub fn markdown(text: &str) -> Vec<Paragraph<'_>> {
    let mut paragraphs = Paragraphs::default();
    let mut in_comment = false;
    for (number, line) in (1..).zip(text.lines()) {
        let skipped =
            in_comment || line.starts_with("<!--") || line.starts_with("    ") && !paragraphs.is_open;
        in_comment = (in_comment || line.starts_with("<!--")) && !line.contains("-->");
        paragraphs.add(false, number, if skipped { "" } else { line.trim() });
    }
    paragraphs.list
}

#[derive(Default)]
struct Paragraphs<'t> {
    list: Vec<Paragraph<'t>>,
    /// True if the next line continues the last paragraph.
    is_open: bool,
    in_example: bool,
}

impl<'t> Paragraphs<'t> {
    fn end(&mut self) {
        (self.is_open, self.in_example) = (false, false);
    }

    /// Adds a line to the last paragraph, or begins another paragraph with it.
    fn add(&mut self, opens_comment: bool, number: usize, line: &'t str) {
        let is_fence = line.starts_with("```");
        self.in_example ^= is_fence;
        if is_fence || self.in_example || line.is_empty() || line.starts_with(['|', '#', '<']) {
            self.is_open = false;
            return;
        }
        let number_end = line.trim_start_matches(|c: char| c.is_ascii_digit());
        let item = ["* ", "- "].into_iter().find_map(|bullet| line.strip_prefix(bullet));
        let item = item.or_else(|| number_end.strip_prefix(". ").filter(|_| number_end.len() < line.len()));
        let line = (number, item.unwrap_or(line));
        match self.list.last_mut().filter(|_| self.is_open && item.is_none()) {
            Some(paragraph) => paragraph.lines.push(line),
            None => self.list.push(Paragraph { opens_comment, lines: vec![line] }),
        }
        self.is_open = true;
    }
}
