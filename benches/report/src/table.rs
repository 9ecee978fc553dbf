//! Tables of reports. Reports with the same name and different data become columns of one table.

// Writing to a String cannot fail: results are dropped.
use std::fmt::Write as _;

use comfy_table::{CellAlignment, presets};

use crate::number::{Style, measured, plain, target};
use crate::{Report, Row};

const ROW: &str = "{row}";
const COLUMN: &str = "{column}";
/// Separator between the patterns of a pivot.
const PATTERN_SEPARATOR: char = '|';

/// Selection of reports and rows, and the layout of the table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Choice {
    /// Name of the reports to show, in which `*` matches any text. None selects all.
    pub report: Option<String>,
    /// Prefix of the names of the rows to show. None selects all.
    pub rows: Option<String>,
    /// Patterns, separated by `|`, that turn row names into columns. A pattern contains `{row}` and
    /// optionally `{column}`, and is matched with the name of each row. A match gives the cell of
    /// that row and column. Without `{column}` the rest of the pattern is the column heading.
    /// Without patterns the table has one line per row.
    pub pivot: Option<String>,
}

pub struct Table {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

/// Returns the table of a report in its preferred layout, or None if it has no rows.
pub fn of(report: &Report) -> Option<Table> {
    let choice = Choice::default();
    let pivoted = report.pivot.as_deref().and_then(|patterns| pivot(report, &choice, patterns).ok());
    pivoted.or_else(|| list(&[report], &choice).ok())
}

pub fn markdown(reports: &[Report], choice: &Choice) -> Result<String, String> {
    let mut names: Vec<&str> = Vec::new();
    for report in reports.iter().filter(|report| choice.matches(report)) {
        if !names.contains(&report.name.as_str()) {
            names.push(&report.name);
        }
    }
    if names.is_empty() {
        return Err(format!("the run has no report {}", choice.report.as_deref().unwrap_or("at all")));
    }
    let mut text = String::new();
    for name in &names {
        let reports: Vec<&Report> = reports.iter().filter(|report| report.name == *name).collect();
        if names.len() > 1 {
            let _ = write!(text, "**{name}**\n\n");
        }
        match &choice.pivot {
            None => text += &list(&reports, choice)?.markdown(),
            Some(patterns) => {
                for (number, report) in reports.iter().enumerate() {
                    if reports.len() > 1 {
                        let between = if number > 0 { "\n" } else { "" };
                        let _ = write!(text, "{between}{}:\n\n", report.data_name());
                    }
                    text += &pivot(report, choice, patterns)?.markdown();
                }
            }
        }
        text.push('\n');
    }
    Ok(text)
}

impl Choice {
    fn matches(&self, report: &Report) -> bool {
        match self.report.as_deref() {
            None => true,
            Some(pattern) => match pattern.split_once('*') {
                Some((start, end)) => report.name.strip_prefix(start).is_some_and(|rest| rest.ends_with(end)),
                None => report.name == pattern,
            },
        }
    }

    /// Returns the selected rows of a report; the common prefix is removed from their names.
    fn rows<'r>(&self, report: &'r Report) -> Vec<(&'r str, &'r Row)> {
        let start = self.rows.as_deref().unwrap_or_default();
        report.rows.iter().filter_map(|row| Some((row.what.strip_prefix(start)?, row))).collect()
    }
}

/// Builds a table with one line per row.
fn list(reports: &[&Report], choice: &Choice) -> Result<Table, String> {
    let mut names: Vec<&str> = Vec::new();
    let sides: Vec<_> = reports.iter().map(|report| choice.rows(report)).collect();
    for (what, _) in sides.iter().flatten() {
        if !names.contains(what) {
            names.push(what);
        }
    }
    if names.is_empty() {
        return Err(format!("no row begins with {}", choice.rows.as_deref().unwrap_or_default()));
    }
    let any = |has: fn(&Row) -> bool| sides.iter().flatten().any(|(_, row)| has(row));
    let targets = any(|row| row.target.is_some());
    let verdicts = any(|row| row.verdict.is_some());
    // A table with several columns has no room for the parts.
    let parts = sides.len() == 1 && any(|row| !row.parts.is_empty());
    let mut header = vec![String::new()];
    match reports {
        [_] => header.push("measured".into()),
        _ => header.extend(reports.iter().map(|report| report.data_name().to_owned())),
    }
    header.extend(targets.then(|| "target".into()));
    header.extend(verdicts.then(String::new));
    header.extend(parts.then(|| "of".into()));
    let mut table = Table { header, rows: Vec::new() };
    for what in names {
        let find = |side: &Vec<(&str, &'_ Row)>| side.iter().position(|(other, _)| *other == what);
        let found: Vec<Option<&Row>> = sides.iter().map(|side| find(side).map(|at| side[at].1)).collect();
        let mut cells = vec![what.to_owned()];
        cells.extend(
            (found.iter().zip(reports))
                .map(|(row, report)| row.map_or(String::new(), |row| cell(report, row, Style::Full))),
        );
        let each = |text: fn(&Row) -> Option<String>| {
            let mut texts: Vec<String> = found.iter().flatten().filter_map(|row| text(row)).collect();
            texts.dedup();
            texts.join(", ")
        };
        if targets {
            cells.push(each(target));
        }
        if verdicts {
            cells.push(each(|row| row.verdict.map(|verdict| verdict.name().into())));
        }
        if parts {
            let one = |(name, part): &(String, f64)| format!("{name} {}", plain(*part));
            cells.push(
                found[0]
                    .map_or(String::new(), |row| row.parts.iter().map(one).collect::<Vec<_>>().join(", ")),
            );
        }
        table.rows.push(cells);
    }
    Ok(table)
}

/// Builds a table with the rows and columns that the patterns match.
fn pivot(report: &Report, choice: &Choice, patterns: &str) -> Result<Table, String> {
    let mut columns: Vec<String> = Vec::new();
    // Target of each column. A target of a single cell is printed in the cell.
    let mut targets: Vec<Option<String>> = Vec::new();
    // Row name, and its cells with their column index.
    let mut lines: Vec<(&str, Vec<(usize, String)>)> = Vec::new();
    for pattern in patterns.split(PATTERN_SEPARATOR).map(str::trim) {
        if !pattern.contains(ROW) {
            return Err(format!("the pivot {pattern} has no {ROW}"));
        }
        let mut match_count = 0;
        for (what, row) in choice.rows(report) {
            let Some((line, column)) = match_name(pattern, what) else { continue };
            match_count += 1;
            let mut text = cell(report, row, Style::Short);
            let mut of_column = target(row);
            if column.is_some()
                && let Some(target) = of_column.take()
            {
                // Other cells of this column have no target.
                let _ = write!(text, ", target {target}");
            }
            let column = column.map_or_else(|| heading(pattern), str::to_owned);
            let at = columns.iter().position(|other| *other == column).unwrap_or_else(|| {
                columns.push(column);
                targets.push(None);
                columns.len() - 1
            });
            // A withheld ratio has no target, but other ratios of its column have one.
            targets[at] = targets[at].take().or(of_column);
            match lines.iter_mut().find(|(other, _)| *other == line) {
                Some((_, cells)) => cells.push((at, text)),
                None => lines.push((line, vec![(at, text)])),
            }
        }
        if match_count == 0 {
            return Err(format!("no row fits {pattern}"));
        }
    }
    let headed = columns.iter().zip(targets).map(|(column, target)| match target {
        Some(target) => format!("{column} ({target})"),
        None => column.clone(),
    });
    let mut table =
        Table { header: std::iter::once(String::new()).chain(headed).collect(), rows: Vec::new() };
    for (line, cells) in lines {
        let mut row = vec![String::new(); columns.len() + 1];
        line.clone_into(&mut row[0]);
        for (at, cell) in cells {
            row[at + 1] = cell;
        }
        table.rows.push(row);
    }
    Ok(table)
}

/// Matches a row name with a pattern and returns the names of row and column, or None if they do
/// not match. The first placeholder matches the shortest possible text.
fn match_name<'w>(pattern: &str, what: &'w str) -> Option<(&'w str, Option<&'w str>)> {
    let Some(column) = pattern.find(COLUMN) else {
        let (before, after) = pattern.split_once(ROW)?;
        return Some((what.strip_prefix(before)?.strip_suffix(after)?, None));
    };
    let column_first = column < pattern.find(ROW)?;
    let (one, two) = if column_first { (COLUMN, ROW) } else { (ROW, COLUMN) };
    let (before, rest) = pattern.split_once(one)?;
    let (between, after) = rest.split_once(two)?;
    if between.is_empty() {
        return None;
    }
    let (one, two) = what.strip_prefix(before)?.strip_suffix(after)?.split_once(between)?;
    Some(if column_first { (two, Some(one)) } else { (one, Some(two)) })
}

/// Returns the column heading of a pattern without `{column}`.
fn heading(pattern: &str) -> String {
    pattern.replace(ROW, "").trim_matches([' ', ',', ':']).to_owned()
}

/// Formats a cell. If the report has published values, the cell starts with the published value.
fn cell(report: &Report, row: &Row, style: Style) -> String {
    if report.rows.iter().all(|row| row.published.is_none()) {
        return measured(row, style);
    }
    let published = row.published.map_or("-".into(), plain);
    let here = if row.value.count > 0 { measured(row, style) } else { "-".into() };
    format!("{published} / {here}")
}

impl Table {
    pub fn terminal(&self) -> comfy_table::Table {
        let mut table = comfy_table::Table::new();
        table.load_style(presets::UTF8_HORIZONTAL_ONLY).set_header(&self.header).add_rows(&self.rows);
        if let Some(column) = table.column_mut(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table
    }

    fn markdown(&self) -> String {
        let line = |cells: &[String]| {
            let mut line = String::from("|");
            for cell in cells {
                line += " ";
                line += &cell.replace('|', "\\|");
                line += if cell.is_empty() { "|" } else { " |" };
            }
            line + "\n"
        };
        let rule = format!("|{}\n", "---|".repeat(self.header.len()));
        [line(&self.header), rule].into_iter().chain(self.rows.iter().map(|row| line(row))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Summary, Target, Unit, Verdict};

    fn row(what: &str, median: f64) -> Row {
        let value = Summary { quartile1: 1.0, quartile3: 3.0, count: 5, ..Summary::one(median) };
        Row::new(what, Unit::Ratio, value)
    }

    fn row_below_target(what: &str, median: f64) -> Row {
        row(what, median).target(Target::AtLeast(2.5)).part("us", 7.0)
    }

    fn reports() -> Vec<Report> {
        let report = |name, data, rows| Report::new(name, data, 0, "none").rows(rows);
        let behind = Row { verdict: Some(Verdict::Behind), ..row("reads: 1 thread, x", 1.5) };
        let source = |row, published| Row { published: Some(published), ..row };
        vec![
            report("a", "fio: noise", vec![row_below_target("reads", 2.0)]),
            report("a", "real: tar", vec![row("reads", 3.0), row("writes", 4.0)]),
            report(
                "b",
                "none",
                vec![behind, row("reads: 2 threads, x", 2.0), row_below_target("reads: 2 threads, y", 2.25)],
            ),
            report(
                "c",
                "none",
                vec![
                    source(row("reads: old", 9.0), 60.0),
                    row("reads: new / old", 2.0).withhold_if_unsteady(),
                    source(Row::absent("writes: old", Unit::Ratio), 3.0),
                ],
            ),
        ]
    }

    fn of(report: &str, rows: Option<&str>, pivot: Option<&str>) -> Result<String, String> {
        let owned = |text: &str| text.to_owned();
        let choice = Choice { report: Some(report.into()), rows: rows.map(owned), pivot: pivot.map(owned) };
        markdown(&reports(), &choice)
    }

    #[test]
    fn data_sets_become_columns() {
        let text = of("a", None, None).unwrap();
        assert_eq!(
            text.trim(),
            "| | fio | real | target |\n|---|---|---|---|\n\
             | reads | **2.00** (1.000 - 3.00) | 3.00 (1.000 - 3.00) | at least 2.5 |\n\
             | writes | | 4.00 (1.000 - 3.00) | |"
        );
        assert!(of("z", None, None).is_err() && of("a", Some("z"), None).is_err());
    }

    #[test]
    fn single_report_shows_parts() {
        let text = of("b", Some("reads: 2 threads, "), None).unwrap();
        assert_eq!(
            text.trim(),
            "| | measured | target | of |\n|---|---|---|---|\n| x | 2.00 (1.000 - 3.00) | | |\n\
             | y | **2.25** (1.000 - 3.00) | at least 2.5 | us 7.00 |"
        );
    }

    #[test]
    fn pivot_turns_rows_into_columns() {
        let text = of("b", None, Some("{row}: {column}, x | {row}: 2 threads, y")).unwrap();
        assert_eq!(
            text.trim(),
            "| | 1 thread | 2 threads | 2 threads, y (at least 2.5) |\n|---|---|---|---|\n| reads | **1.500** | 2.00 | **2.25** |"
        );
        let turned = of("b", None, Some("{column}: {row}, x")).unwrap();
        assert!(turned.starts_with("| | reads |\n|---|---|\n| 1 thread | **1.500** |"), "{turned}");
        for bad in ["{column}", "{row}: 3 threads", "{row}{column}"] {
            assert!(of("b", None, Some(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn published_and_measured_share_a_cell() {
        let text = of("c", None, Some("{row}: old | {row}: {column} / old")).unwrap();
        assert_eq!(
            text.trim(),
            "| | old | new |\n|---|---|---|\n| reads | 60.0 / 9.00 | - / too wide a spread (1.000 - 3.00) |\n| writes | 3.00 / - | |"
        );
    }

    #[test]
    fn terminal_falls_back_to_list_if_pivot_fails() {
        let mut report = reports().remove(2);
        assert!(super::of(&report).unwrap().terminal().to_string().contains("at least 2.5"));
        for (pivot, heads) in [("{row}: {column}, x", true), ("{row}: 3 threads", false)] {
            report.pivot = Some(pivot.into());
            let text = super::of(&report).unwrap().terminal().to_string();
            assert_eq!(text.contains("1 thread "), heads, "{text}");
        }
        report.rows.clear();
        assert!(super::of(&report).is_none());
    }
}
