//! An experiment of the sources as tables: what was published beside what was measured here, charts, and words.

// Writing to a String cannot fail: results are dropped.
use std::fmt::Write as _;

use super::number::plain;
use super::region::Region;
use super::report::Table as Markdown;
use super::run;
use super::run::{Better, Experiment, Modelled, Summary, Table};

/// The same rule as in `benches/src/measure.rs`: quartiles further apart give no ratio, nor do fewer measurements.
const SPREAD_MAX: f64 = 0.25;
const STEADY_COUNT_MIN: usize = 3;

/// All tables; `report` chooses one by its name, without words and model then.
pub fn figures(run: &Experiment, region: &Region, to_docs: &str) -> Result<String, String> {
    if region.rows.is_some() || region.pivot.is_some() {
        return Err("an experiment takes report=\"\" only".into());
    }
    if run.charts.len() != run.tables.len() {
        return Err("the run has not one chart for each table".into());
    }
    let wanted = |table: &Table| region.report.as_ref().is_none_or(|name| table.name == *name);
    let whole = region.report.is_none();
    let mut text = String::new();
    if whole {
        let _ = write!(text, "Source: {}\n\n", run.source);
        text += &bullets(&run.here);
    }
    let mut tables = 0;
    for (table, chart) in run.tables.iter().zip(&run.charts).filter(|(table, _)| wanted(table)) {
        tables += 1;
        let _ = write!(
            text,
            "**{}**: times \"{}\", published / here; above 1 is better. The column \"{}\" has its own {}.\n\n{}\n",
            table.name,
            table.columns[table.old],
            table.columns[table.old],
            table.unit,
            ratios(table)
        );
        let _ = write!(text, "![{}: {}]({to_docs}charts/{chart})\n\n", run.title, table.name);
    }
    if tables == 0 {
        return Err(format!("the run has no table {}", region.report.as_deref().unwrap_or("at all")));
    }
    if whole && !run.model.is_empty() {
        let _ = write!(
            text,
            "**Modelled, not measured**, every thread on a core of its own:\n\n{}\n",
            modelled(&run.model)
        );
    }
    if whole {
        text += &bullets(&run.sentences);
    }
    Ok(text)
}

fn bullets(lines: &[String]) -> String {
    let mut text = String::new();
    for line in lines {
        let _ = writeln!(text, "* {line}");
    }
    text + "\n"
}

fn ratios(table: &Table) -> String {
    let others = || (0..table.columns.len()).filter(|column| *column != table.old);
    let mut header = vec![String::new(), "threads".into(), table.columns[table.old].clone()];
    header.extend(others().map(|column| table.columns[column].clone()));
    let mut markdown = Markdown::new(header);
    for row in &table.rows {
        let both = |published: Option<String>, here: Option<String>| match (published, here) {
            (None, None) => String::new(),
            (published, here) => {
                let or = |text: Option<String>| text.unwrap_or_else(|| "-".into());
                format!("{} / {}", or(published), or(here))
            }
        };
        let base = row.published[table.old];
        let mut cells = vec![row.what.clone(), row.threads.to_string()];
        let own = row.measured[table.old].and_then(|value| value.median);
        cells.push(both(base.map(plain), own.map(plain)));
        cells.extend(others().map(|column| {
            let published = row.published[column].zip(base).map(|(of, to)| match table.better {
                Better::More => of / to,
                Better::Less => to / of,
            });
            both(published.map(plain), row.ratios[column].as_ref().map(steady))
        }));
        markdown.rows.push(cells);
    }
    markdown.text()
}

/// A ratio, where it is sure enough to be given.
fn steady(value: &Summary) -> String {
    let Summary { median, quartile1, quartile3, count } = *value;
    match (median, quartile1, quartile3) {
        (Some(median), Some(low), Some(high))
            if count >= STEADY_COUNT_MIN && high - low <= SPREAD_MAX * median.abs() =>
        {
            plain(median)
        }
        _ => "wide".into(),
    }
}

/// The ratio of the fine lock over the old one, by threads, and how far the model is off where it can be checked.
fn modelled(model: &[Modelled]) -> String {
    let mut threads: Vec<usize> =
        model.iter().flat_map(|model| &model.beyond).map(|beyond| beyond.threads).collect();
    threads.sort_unstable();
    threads.dedup();
    let mut header = vec![String::new()];
    header.extend(threads.iter().map(|threads| format!("{threads} threads")));
    header.push("error where it was measured".into());
    let mut markdown = Markdown::new(header);
    for model in model {
        let mut cells = vec![format!("{}: {}", model.table, model.what)];
        cells.extend(threads.iter().map(|threads| {
            let beyond = model.beyond.iter().find(|beyond| beyond.threads == *threads);
            beyond.map_or(String::new(), |beyond| plain(beyond.ratio))
        }));
        let checks = model.checks.iter().map(|run::Check { threads, column, error }| {
            let error = error.map_or("wide".into(), |error| format!("{:+.0} %", 100.0 * error));
            format!("{column}, {threads}: {error}")
        });
        cells.push(checks.collect::<Vec<_>>().join("; "));
        markdown.rows.push(cells);
    }
    markdown.text()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: &str = r#"{
        "command": "c", "date": "d",
        "machine": {"cpu": "c", "cpus": 2, "memory_mib": 2048, "kernel": "6", "load": "0.1"},
        "title": "T", "source": "S", "here": ["no file system"], "sentences": ["It is so."], "charts": ["x.svg"],
        "tables": [{"name": "writes", "unit": "s", "better": "less", "columns": ["old", "new", "ours"], "old": 0, "rows": [
            {"what": "4 GiB", "threads": 1, "published": [60, 20, null],
             "measured": [{"median": 9, "quartile1": 9, "quartile3": 9, "count": 3}, null, null],
             "ratios": [null, {"median": 2, "quartile1": 1, "quartile3": 9, "count": 3},
                        {"median": 4.5, "quartile1": 4.4, "quartile3": 4.6, "count": 3}]}]}],
        "model": [{"table": "writes", "what": "4 GiB", "checks": [{"threads": 2, "column": "old", "error": -0.031}],
                   "beyond": [{"threads": 8, "ratio": 3.5}]}]
    }"#;

    #[test]
    fn published_and_ours_stand_in_one_cell() {
        let run: Experiment = serde_json::from_str(RUN).unwrap();
        let text = figures(&run, &Region::default(), "docs/").unwrap();
        for part in [
            "Source: S",
            "* no file system",
            "| | threads | old | new | ours |",
            "| 4 GiB | 1 | 60.0 / 9.00 | 3.00 / wide | - / 4.50 |",
            "![T: writes](docs/charts/x.svg)",
            "| writes: 4 GiB | 3.50 | old, 2: -3 % |",
            "* It is so.",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        let one = |name: &str| Region { report: Some(name.into()), ..Region::default() };
        assert!(!figures(&run, &one("writes"), "").unwrap().contains("It is so."));
        assert!(figures(&run, &one("reads"), "").is_err());
    }
}
