//! Splits a page into prose and regions that are generated from runs.
//!
//! ```text
//! <!-- begin NAME [report="..."] [rows="..."] [pivot="..."] -->
//! <!-- end NAME -->
//! ```
//!
//! `report`, `rows` and `pivot` are the fields of [`Choice`]. Until the run is published, the region's only line may be
//! "Not measured yet."

use freestone_report::Choice;

pub const BEGIN: &str = "<!-- begin ";
const END: &str = "<!-- end ";
const CLOSE: &str = " -->";
/// Content of a region whose run has not been published yet.
const UNMEASURED: &str = "Not measured yet.";

#[derive(Debug, PartialEq, Eq)]
pub enum Piece<'t> {
    Prose(&'t str),
    Region(Region<'t>),
}

/// A generated region, from its first marker to its last.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Region<'t> {
    pub name: String,
    /// Number of the region's first line, counted from 1.
    pub line: usize,
    /// Text of the region, including both markers.
    pub whole: &'t str,
    pub choice: Choice,
}

impl Region<'_> {
    /// Returns true if the region says that there is no run yet.
    pub fn is_unmeasured(&self) -> bool {
        self.whole.lines().nth(1) == Some(UNMEASURED) && self.whole.lines().count() == 3
    }
}

/// Splits a page into prose and regions. An error has the line number and the problem.
pub fn split(text: &str) -> Result<Vec<Piece<'_>>, (usize, String)> {
    let mut pieces = Vec::new();
    let mut open: Option<(Region<'_>, usize)> = None;
    let (mut at, mut prose_from, mut in_code) = (0, 0, false);
    for (number, line) in (1..).zip(text.split_inclusive('\n')) {
        let (from, until) = (at, at + line.len());
        at = until;
        let line = line.trim_end();
        if line.starts_with("```") {
            in_code = !in_code;
        }
        if in_code {
            continue;
        }
        if let Some(words) = line.strip_prefix(BEGIN) {
            let words = words
                .strip_suffix(CLOSE)
                .ok_or((number, format!("a region begins with {BEGIN}NAME{CLOSE}")))?;
            if let Some((region, _)) = &open {
                return Err((number, format!("the region {} is still open", region.name)));
            }
            pieces.push(Piece::Prose(&text[prose_from..from]));
            open = Some((parse(words, number)?, from));
        } else if let Some(name) = line.strip_prefix(END) {
            match open.take() {
                Some((region, begun)) if name == format!("{}{CLOSE}", region.name) => {
                    pieces.push(Piece::Region(Region { whole: &text[begun..until], ..region }));
                    prose_from = until;
                }
                _ => return Err((number, "no region of this name is open".into())),
            }
        }
    }
    if let Some((region, _)) = open {
        return Err((region.line, format!("the region {} has no end", region.name)));
    }
    pieces.push(Piece::Prose(&text[prose_from..]));
    Ok(pieces)
}

fn parse<'t>(words: &str, line: usize) -> Result<Region<'t>, (usize, String)> {
    let (name, mut rest) = words.split_once(' ').unwrap_or((words, ""));
    let mut region = Region { name: name.to_owned(), line, ..Region::default() };
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if name.is_empty() || !name.chars().all(plain) {
        return Err((
            line,
            format!("\"{name}\": the name of a run has only lower-case letters, digits and hyphens"),
        ));
    }
    while !rest.trim_start().is_empty() {
        rest = rest.trim_start();
        let bad = || (line, format!("{rest}: expected report=\"...\", rows=\"...\" or pivot=\"...\""));
        let (key, value) = rest.split_once("=\"").ok_or_else(bad)?;
        let (value, after) = value.split_once('"').ok_or_else(bad)?;
        let place = match key {
            "report" => &mut region.choice.report,
            "rows" => &mut region.choice.rows,
            "pivot" => &mut region.choice.pivot,
            _ => return Err(bad()),
        };
        *place = Some(value.to_owned());
        rest = after;
    }
    Ok(region)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_keeps_all_text() {
        let text = "a\n<!-- begin zones report=\"zones: x\" rows=\"w\" -->\n1\n<!-- end zones -->\nb\n";
        let pieces = split(text).unwrap();
        let Piece::Region(region) = &pieces[1] else { panic!("{pieces:?}") };
        assert_eq!((region.name.as_str(), region.line), ("zones", 2));
        assert_eq!(region.choice.report.as_deref(), Some("zones: x"));
        assert_eq!(region.choice.rows.as_deref(), Some("w"));
        let whole: String = pieces
            .iter()
            .map(|piece| match piece {
                Piece::Prose(prose) => *prose,
                Piece::Region(region) => region.whole,
            })
            .collect();
        assert_eq!(whole, text);
    }

    #[test]
    fn split_reports_errors_with_their_lines() {
        for (text, line) in [
            ("<!-- begin a -->\n", 1),
            ("x\n<!-- end a -->\n", 2),
            ("<!-- begin a -->\n<!-- end b -->\n", 2),
            ("<!-- begin a -->\n<!-- begin b -->\n", 2),
            ("<!-- begin a colour=\"red\" -->\n<!-- end a -->\n", 1),
            ("<!-- begin a rows=\"x -->\n<!-- end a -->\n", 1),
            ("<!-- begin ../a -->\n<!-- end ../a -->\n", 1),
            ("<!-- begin a\n", 1),
        ] {
            assert_eq!(split(text).unwrap_err().0, line, "{text}");
        }
        // Markers in a code block do not open a region.
        assert_eq!(split("```\n<!-- begin a -->\n```\n").unwrap().len(), 1);
    }
}
