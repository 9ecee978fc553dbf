//! Reports as tables. Reports of one name that differ in their data stand side by side.
//!
//! A `pivot` is one or several patterns, separated by `|`. A pattern holds `{row}`, and `{column}` or not; each is matched with the
//! names of the rows. What fits gives the cell of that row and column; without `{column}` the rest of the pattern heads the column.

// Writing to a String cannot fail: results are dropped.
use std::fmt::Write as _;

use super::number;
use super::region::Region;
use super::run::{Report, Reports, Row};

const ROW: &str = "{row}";
const COLUMN: &str = "{column}";
/// Between the patterns of a pivot.
const NEXT: char = '|';
/// The verdict on what is worse than what it is compared with.
const BEHIND: &str = "behind";

/// The tables of a region.
pub fn figures(run: &Reports, region: &Region) -> Result<String, String> {
    let mut names: Vec<&str> = Vec::new();
    for report in run.reports.iter().filter(|report| is_chosen(report, region)) {
        if !names.contains(&report.name.as_str()) {
            names.push(&report.name);
        }
    }
    if names.is_empty() {
        return Err(format!("the run has no report {}", region.report.as_deref().unwrap_or("at all")));
    }
    let mut text = String::new();
    for name in &names {
        let reports: Vec<&Report> = run.reports.iter().filter(|report| report.name == *name).collect();
        if names.len() > 1 {
            let _ = write!(text, "**{name}**\n\n");
        }
        text += &match &region.pivot {
            Some(patterns) => pivot(&reports, region, patterns)?,
            None => list(&reports, region)?,
        };
        text.push('\n');
    }
    Ok(text)
}

fn is_chosen(report: &Report, region: &Region) -> bool {
    match region.report.as_deref() {
        None => true,
        Some(pattern) => match pattern.split_once('*') {
            Some((start, end)) => report.name.strip_prefix(start).is_some_and(|rest| rest.ends_with(end)),
            None => report.name == pattern,
        },
    }
}

/// The rows of a report that the region shows, without what they begin with.
fn rows<'r>(report: &'r Report, region: &Region) -> Vec<(&'r str, &'r Row)> {
    let start = region.rows.as_deref().unwrap_or_default();
    report.rows.iter().filter_map(|row| Some((row.what.strip_prefix(start)?, row))).collect()
}

/// A row for each row.
fn list(reports: &[&Report], region: &Region) -> Result<String, String> {
    let mut whats: Vec<&str> = Vec::new();
    let sides: Vec<_> = reports.iter().map(|report| rows(report, region)).collect();
    for (what, _) in sides.iter().flatten() {
        if !whats.contains(what) {
            whats.push(what);
        }
    }
    if whats.is_empty() {
        return Err(format!("no row begins with {}", region.rows.as_deref().unwrap_or_default()));
    }
    let any = |has: fn(&Row) -> bool| sides.iter().flatten().any(|(_, row)| has(row));
    let targets = any(|row| row.target.is_some());
    let verdicts = any(|row| row.verdict.is_some());
    // Side by side there is no room for them.
    let parts = sides.len() == 1 && any(|row| !row.parts.is_empty());
    let mut header = vec![String::new()];
    match reports {
        [_] => header.push("measured".into()),
        _ => header.extend(reports.iter().map(|report| data_name(report).to_owned())),
    }
    header.extend(targets.then(|| "target".into()));
    header.extend(verdicts.then(String::new));
    header.extend(parts.then(|| "of".into()));
    let mut table = Table::new(header);
    for what in whats {
        let found: Vec<Option<&Row>> = sides
            .iter()
            .map(|side| side.iter().find(|(other, _)| *other == what).map(|(_, row)| *row))
            .collect();
        let mut cells = vec![what.to_owned()];
        cells.extend(found.iter().map(|row| row.map_or(String::new(), |row| value(row, true))));
        let each = |text: fn(&Row) -> Option<String>| {
            let mut texts: Vec<String> = found.iter().flatten().filter_map(|row| text(row)).collect();
            texts.dedup();
            texts.join(", ")
        };
        if targets {
            cells.push(each(|row| row.target.map(|target| number::target(row.unit, target))));
        }
        if verdicts {
            cells.push(each(|row| row.verdict.clone()));
        }
        if parts {
            cells.push(each(|row| {
                let one = |(name, part): &(String, Option<f64>)| {
                    format!("{name} {}", part.map_or("?".into(), number::plain))
                };
                Some(row.parts.iter().map(one).collect::<Vec<_>>().join(", "))
            }));
        }
        table.rows.push(cells);
    }
    Ok(table.text())
}

/// A line of a pivoted table: its name, and its cells by the place of their column.
type Line<'r> = (&'r str, Vec<(usize, String)>);

/// A row and a column for what the patterns find; a table for each data set.
fn pivot(reports: &[&Report], region: &Region, patterns: &str) -> Result<String, String> {
    let patterns: Vec<&str> = patterns.split(NEXT).map(str::trim).collect();
    if let Some(bad) = patterns.iter().find(|pattern| !pattern.contains(ROW)) {
        return Err(format!("the pivot {bad} has no {ROW}"));
    }
    let mut text = String::new();
    for report in reports {
        if reports.len() > 1 {
            let _ = write!(text, "{}:\n\n", data_name(report));
        }
        // With the target of what is below.
        let mut columns: Vec<(String, Option<String>)> = Vec::new();
        let mut lines: Vec<Line<'_>> = Vec::new();
        for pattern in &patterns {
            let mut fits = 0;
            for (what, row) in rows(report, region) {
                let Some((line, column)) = fit(pattern, what) else { continue };
                fits += 1;
                let target = row.target.map(|target| number::target(row.unit, target));
                let mut text = value(row, false);
                let column = match (column, &target) {
                    (Some(column), target) => {
                        // The others of the column have none.
                        text.extend(target.iter().map(|target| format!(", target {target}")));
                        column.to_owned()
                    }
                    (None, _) => heading(pattern),
                };
                let at = columns.iter().position(|(other, _)| *other == column).unwrap_or_else(|| {
                    columns.push((column, None));
                    columns.len() - 1
                });
                // A ratio that is not given has none, but its column has.
                if !pattern.contains(COLUMN) {
                    columns[at].1 = columns[at].1.take().or(target);
                }
                let cell = (at, text);
                match lines.iter_mut().find(|(other, _)| *other == line) {
                    Some((_, cells)) => cells.push(cell),
                    None => lines.push((line, vec![cell])),
                }
            }
            if fits == 0 {
                return Err(format!("no row fits {pattern}"));
            }
        }
        let header = columns.iter().map(|(column, target)| match target {
            Some(target) => format!("{column} ({target})"),
            None => column.clone(),
        });
        let mut table = Table::new(std::iter::once(String::new()).chain(header).collect());
        for (line, cells) in lines {
            let mut row = vec![String::new(); columns.len() + 1];
            line.clone_into(&mut row[0]);
            for (at, cell) in cells {
                row[at + 1] = cell;
            }
            table.rows.push(row);
        }
        text += &table.text();
        text.push('\n');
    }
    Ok(text.trim_end().to_owned() + "\n")
}

/// The row's and the column's name, where a name fits; what comes first ends as soon as it can.
fn fit<'w>(pattern: &str, what: &'w str) -> Option<(&'w str, Option<&'w str>)> {
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

/// What a pattern without columns says beside the row.
fn heading(pattern: &str) -> String {
    pattern.replace(ROW, "").trim_matches([' ', ',', ':']).to_owned()
}

/// What a row measured; bold where it missed its target. What is behind has a word beside it in a list, and is bold in a pivot.
fn value(row: &Row, with_quartiles: bool) -> String {
    let text = if with_quartiles || row.value.median.is_none() {
        number::spread(row.unit, &row.value)
    } else {
        number::median(row.unit, &row.value)
    };
    let is_bad = row.met == Some(false) || (!with_quartiles && row.verdict.as_deref() == Some(BEHIND));
    match text.split_once(" (") {
        Some((median, quartiles)) if is_bad => format!("**{median}** ({quartiles}"),
        None if is_bad => format!("**{text}**"),
        _ => text,
    }
}

/// What comes before the colon: "fio", "real".
fn data_name(report: &Report) -> &str {
    report.data.split_once(':').map_or(report.data.as_str(), |(name, _)| name)
}

/// A table in Markdown.
pub struct Table {
    header: Vec<String>,
    pub rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(header: Vec<String>) -> Self {
        Self { header, rows: Vec::new() }
    }

    pub fn text(&self) -> String {
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

    fn run() -> Reports {
        let row = |what: &str, median: f64, extra: &str| {
            format!(
                "{{\"what\":\"{what}\",\"unit\":\"ratio\",\"median\":{median},\"quartile1\":1,\"quartile3\":3,\"count\":5{extra}}}"
            )
        };
        let missed = ",\"target\":{\"at_least\":2.5},\"met\":false,\"parts\":[[\"us\",7]]";
        let report = |name: &str, data: &str, rows: &[String]| {
            format!("{{\"name\":\"{name}\",\"data\":\"{data}\",\"rows\":[{}]}}", rows.join(","))
        };
        let pivoted = [
            row("reads: 1 thread, x", 1.5, ",\"verdict\":\"behind\""),
            row("reads: 2 threads, x", 2.0, ""),
            row("reads: 2 threads, y", 2.25, missed),
        ];
        let reports = [
            report("a", "fio: noise", &[row("reads", 2.0, missed)]),
            report("a", "real: tar", &[row("reads", 3.0, ""), row("writes", 4.0, "")]),
            report("b", "none", &pivoted),
        ];
        let machine = "{\"cpu\":\"c\",\"cpus\":2,\"memory_mib\":2048,\"kernel\":\"6\",\"load\":\"0.1\"}";
        let json = format!(
            "{{\"command\":\"c\",\"date\":\"d\",\"machine\":{machine},\"reports\":[{}]}}",
            reports.join(",")
        );
        serde_json::from_str(&json).unwrap()
    }

    fn of(report: &str, rows: Option<&str>, pivot: Option<&str>) -> Result<String, String> {
        let owned = |text: &str| text.to_owned();
        let region = Region {
            report: Some(report.into()),
            rows: rows.map(owned),
            pivot: pivot.map(owned),
            ..Region::default()
        };
        figures(&run(), &region)
    }

    #[test]
    fn data_sets_stand_side_by_side() {
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
    fn one_report_shows_what_went_in() {
        let text = of("b", Some("reads: 2 threads, "), None).unwrap();
        assert_eq!(
            text.trim(),
            "| | measured | target | of |\n|---|---|---|---|\n| x | 2.00 (1.000 - 3.00) | | |\n\
             | y | **2.25** (1.000 - 3.00) | at least 2.5 | us 7.00 |"
        );
    }

    #[test]
    fn rows_become_columns() {
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
}
