//! Checks figures in sentences. A comment after a paragraph names the source of each figure:
//!
//! ```text
//! <!-- figures
//! 0.869 | forks | forks: an origin on a device, first writes | 2 workers: ours / theirs
//! 1.41 | writeback-reads | writeback reads [real] | reads: packed / fio | blocks a read
//! -->
//! ```
//!
//! The fields are: the figure as in the sentence, the run, the report (followed by the name of its data in brackets if
//! several reports differ only in that), the row, and, unless the figure is the row's median, a part of the row,
//! `published` or `target`. On the page of the benchmarks every number with a decimal point needs such a line.

use std::collections::BTreeMap;

use freestone_report::{Document, Report, Row, Target};

use super::region::{Piece, split};

const BEGIN: &str = "<!-- figures";
const END: &str = "-->";
/// Words before numbers that are versions or settings, not figures.
const NO_FIGURE_AFTER: [&str; 8] = ["fio", "Linux", "nbdkit", "qemu-nbd", "QEMU", "libnbd", "Debian", "zipf"];

/// Returns the problems of a page's figures: line, text. If `all` is true, a figure without a source is a problem.
pub fn problems(text: &str, runs: &BTreeMap<String, Document>, all: bool) -> Vec<(usize, String)> {
    let Ok(pieces) = split(text) else { return Vec::new() };
    let mut problems = Vec::new();
    let mut line = 1;
    for piece in pieces {
        match piece {
            Piece::Region(region) => line += region.whole.lines().count(),
            Piece::Prose(prose) => {
                for paragraph in paragraphs(prose) {
                    paragraph.check(runs, all, &mut |at, what| problems.push((line + at, what)));
                }
                line += prose.matches('\n').count();
            }
        }
    }
    problems
}

/// Lines of a page without a blank line between them, and the sources of their figures.
#[derive(Default)]
struct Paragraph<'t> {
    /// Number of the first line in the prose, counted from 0.
    at: usize,
    lines: Vec<&'t str>,
    /// Lines that name the source of a figure, with their line numbers.
    figures: Vec<(usize, &'t str)>,
}

fn paragraphs(prose: &str) -> Vec<Paragraph<'_>> {
    let mut paragraphs: Vec<Paragraph<'_>> = Vec::new();
    let (mut in_figures, mut in_code, mut after_blank) = (false, false, true);
    for (at, line) in prose.lines().enumerate() {
        if line.starts_with("```") {
            in_code = !in_code;
        }
        if line == BEGIN {
            in_figures = true;
        } else if in_figures {
            match paragraphs.last_mut() {
                _ if line == END => in_figures = false,
                Some(paragraph) => paragraph.figures.push((at, line)),
                None => paragraphs.push(Paragraph { at, figures: vec![(at, line)], ..Paragraph::default() }),
            }
        } else if line.trim().is_empty() || in_code {
            after_blank = true;
        } else {
            if after_blank {
                paragraphs.push(Paragraph { at, ..Paragraph::default() });
            }
            after_blank = false;
            if let Some(paragraph) = paragraphs.last_mut() {
                paragraph.lines.push(line);
            }
        }
    }
    paragraphs
}

impl Paragraph<'_> {
    fn check(&self, runs: &BTreeMap<String, Document>, all: bool, report: &mut dyn FnMut(usize, String)) {
        let in_text: Vec<(usize, &str)> = (self.at..)
            .zip(&self.lines)
            .flat_map(|(at, line)| numbers(line).into_iter().map(move |number| (at, number)))
            .collect();
        let mut known = Vec::new();
        for &(at, line) in &self.figures {
            let number = line.split(" | ").next().unwrap_or_default();
            known.push(number);
            if !in_text.iter().any(|(_, text)| *text == number) {
                report(at, format!("{number} is not in the paragraph before"));
            }
            match value(line, runs) {
                Ok(value) if as_precise(number, value) == number => {}
                Ok(value) => report(at, format!("{number} is {} in the run", as_precise(number, value))),
                Err(what) => report(at, what),
            }
        }
        for (at, number) in in_text.into_iter().filter(|(_, number)| all && number.contains('.')) {
            if !known.contains(&number) {
                report(at, format!("{number} has no source: add a line to the figures after the paragraph"));
            }
        }
    }
}

/// Returns the numbers of a line that are figures: not code, not part of a link or word, and not a version.
fn numbers(line: &str) -> Vec<&str> {
    let mut numbers = Vec::new();
    let mut before = "";
    // Every second part is code between backticks.
    for text in line.split('`').step_by(2) {
        for word in text.split([' ', '(', ')', '[', ']', '-']) {
            let trimmed = word
                .trim_end_matches(['.', ',', ';', ':', '%'])
                .trim_start_matches('*')
                .trim_end_matches('*');
            let plain = !trimmed.is_empty() && trimmed.chars().all(|c| c.is_ascii_digit() || c == '.');
            if plain && trimmed.matches('.').count() < 2 && !NO_FIGURE_AFTER.contains(&before) {
                numbers.push(trimmed);
            }
            if !word.is_empty() {
                before = word;
            }
        }
    }
    numbers
}

/// Formats a value with as many decimals as `number` has.
fn as_precise(number: &str, value: f64) -> String {
    let decimals = number.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    format!("{value:.decimals$}")
}

/// Returns the value in the published runs to which a line with the source of a figure refers.
fn value(line: &str, runs: &BTreeMap<String, Document>) -> Result<f64, String> {
    let mut fields = line.split(" | ").skip(1);
    let (Some(run), Some(report), Some(what)) = (fields.next(), fields.next(), fields.next()) else {
        return Err("a figure is written as NUMBER | RUN | REPORT | ROW".into());
    };
    let run = runs.get(run).ok_or_else(|| format!("no run is named {run}"))?;
    let (name, data) = match report.strip_suffix(']').and_then(|report| report.split_once(" [")) {
        Some((name, data)) => (name, Some(data)),
        None => (report, None),
    };
    let matches =
        |report: &&Report| report.name == name && data.is_none_or(|data| report.data_name() == data);
    let report = run.reports.iter().find(matches).ok_or_else(|| format!("the run has no report {report}"))?;
    let row = report.rows.iter().find(|row| row.what == what);
    let row = row.ok_or_else(|| format!("the report has no row {what}"))?;
    of_row(row, fields.next()).ok_or_else(|| format!("{what} does not have that part"))
}

fn of_row(row: &Row, part: Option<&str>) -> Option<f64> {
    match part {
        None => Some(row.value.median),
        Some("published") => row.published,
        Some("target") => match row.target? {
            Target::AtLeast(bound) | Target::AtMost(bound) => Some(bound),
            Target::Within(..) => None,
        },
        Some(part) => row.parts.iter().find(|(name, _)| name == part).map(|(_, value)| *value),
    }
}

#[cfg(test)]
mod tests {
    use freestone_report::{Summary, Unit};

    use super::*;

    fn found(text: &str) -> Vec<(usize, String)> {
        let row = Row::new("reads", Unit::Ratio, Summary::one(1.2345)).part("blocks", 2.0);
        let reports = ["fio", "real"]
            .map(|data| Report::new("r", format!("{data}: x"), 0, "none").rows(vec![row.clone()]));
        let run = Document { reports: reports.into(), ..Document::new("0.1.0", String::new()) };
        problems(text, &[("zones".to_owned(), run)].into(), true)
    }

    #[test]
    fn figure_must_equal_the_run() {
        let good = "It is 1.23, with 2 blocks; fio 3.33 and 1.42.3 are versions, `1.5` is code.\n\
                    <!-- figures\n1.23 | zones | r [real] | reads\n2 | zones | r | reads | blocks\n-->\n";
        assert_eq!(found(good), []);
        let bad = "a\n\nIt is 1.24.\n<!-- figures\n1.24 | zones | r | reads\n-->\n";
        assert_eq!(found(bad), [(5, "1.24 is 1.23 in the run".into())]);
        for bad in [
            "zones | r | writes",
            "zones | s | reads",
            "zones | r [huge] | reads",
            "forks | r | reads",
            "zones",
        ] {
            let text = format!("It is 1.23.\n<!-- figures\n1.23 | {bad}\n-->\n");
            assert_eq!(found(&text).len(), 1, "{bad}");
        }
    }

    #[test]
    fn figure_without_source_is_reported() {
        let found = found("so\n\nof 2.50\n<!-- figures\n1.23 | zones | r | reads\n-->\n");
        let lines: Vec<usize> = found.iter().map(|(line, _)| *line).collect();
        assert_eq!(lines, [5, 3], "{found:?}");
    }
}
