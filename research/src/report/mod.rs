//! Reports of an experiment: one for each table, and one for the model.

pub mod chart;
pub mod words;

use freestone_report::{Report, Row, Summary, Unit};

use crate::results::{Experiment, LoadModel, Table};
use words::counted;

/// Returns all reports. The model is the last one.
pub fn of(experiment: &Experiment) -> Vec<Report> {
    let mut reports: Vec<Report> = experiment.tables.iter().map(table_report).collect();
    if !experiment.model.is_empty() {
        reports.push(model_report(&experiment.model));
    }
    reports
}

/// Builds a report with a row for each figure, and one for its ratio to the old lock's figure.
fn table_report(table: &Table) -> Report {
    let old = table.columns[table.old];
    let mut rows = Vec::new();
    for row in &table.rows {
        let load = format!("{}, {}", row.what, counted(row.threads, "thread"));
        for (at, column) in table.columns.iter().enumerate() {
            let name = format!("{load}: {column}");
            let ratio = format!("{name} / {old}");
            rows.extend(figure_row(name, table.unit, row.published[at], row.measured[at]));
            if at != table.old {
                let published = table.published_ratio(row, at);
                rows.extend(
                    figure_row(ratio, Unit::Ratio, published, row.ratios[at]).map(Row::withhold_if_unsteady),
                );
            }
        }
    }
    let notes = vec![format!(
        "Published / here. \"{old}\" has its own figures; the other columns are ratios to it, above 1 is \
         better."
    )];
    Report {
        name: table.name.clone(),
        notes,
        rows,
        pivot: Some(format!("{{row}}: {old} | {{row}}: {{column}} / {old}")),
        ..Report::default()
    }
}

fn figure_row(what: String, unit: Unit, published: Option<f64>, here: Option<Summary>) -> Option<Row> {
    let row = match here {
        Some(here) => Row::new(what, unit, here),
        None if published.is_none() => return None,
        None => Row::absent(what, unit),
    };
    Some(Row { published, ..row })
}

fn model_report(model: &[LoadModel]) -> Report {
    let mut rows = Vec::new();
    for model in model {
        let name = format!("{}, {}", model.table, model.what);
        for prediction in &model.predictions {
            let what = format!("on {} cores, upper bound: {name}", prediction.threads);
            rows.push(
                Row::ratio(what, Summary::one(prediction.ratio))
                    .part("old lock", prediction.old)
                    .part("in turn", prediction.in_turn)
                    .part("fine lock", prediction.ours),
            );
        }
        for check in &model.checks {
            let what = format!("error, {}, {}: {name}", check.column, counted(check.threads, "thread"));
            let error = check.error.map_or(f64::NAN, |error| 100.0 * error);
            let row = Row::single(what, Unit::Percent, error);
            rows.push(
                Row { met: check.error.map(|_| !check.off), refused: check.error.is_none(), ..row }
                    .part("predicted", check.predicted)
                    .part("measured", check.measured),
            );
        }
        let held = Summary::one(100.0 * model.held_share);
        let parts = model.inputs.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        rows.push(Row { parts, ..Row::new(format!("old lock held: {name}"), Unit::Percent, held) });
    }
    Report {
        name: "modelled, not measured: upper bounds".into(),
        notes: vec![
            "With every thread on its own core: the ratio of the fine lock to the old one; the error of the \
             model where it can be checked; the part of a thread's time in which the old lock is held."
                .into(),
            "\"In turn\": the old lock as the kernel hands it over, without sleeping; the ratio is to the \
             better of both. The fine lock's figure is an upper bound, and so is the ratio: memory bandwidth \
             and caches are not modelled."
                .into(),
        ],
        rows,
        pivot: Some("on {column}: {row} | error, {column}: {row} | old lock held: {row}".into()),
        ..Report::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::{Better, Check};

    #[test]
    fn every_figure_has_a_row() {
        let mut table = Table::new("t", Unit::Seconds, Better::Less, &["old", "absent", "ours"]);
        table.add("x", 2, &[Some(68.0), None, Some(17.0)], &[vec![2.0; 3], vec![], vec![1.0, 4.0, 9.0]]);
        table.add("x", 96, &[Some(8.0)], &[]);
        let report = table_report(&table);
        let row = |what: &str| report.rows.iter().find(|row| row.what == what);
        assert!(row("x, 2 threads: old").is_some_and(|row| row.value.count == 3 && !row.refused));
        let ratio = row("x, 2 threads: ours / old").unwrap();
        assert_eq!((ratio.published, ratio.refused), (Some(4.0), true));
        assert!(row("x, 2 threads: absent").is_none() && row("x, 96 threads: ours / old").is_none());
        let published = row("x, 96 threads: old").unwrap();
        assert_eq!((published.published, published.value.count), (Some(8.0), 0));
    }

    #[test]
    fn unchecked_prediction_is_not_a_miss() {
        let check =
            |error, off| Check { threads: 2, column: "old", predicted: 1.0, measured: 1.0, error, off };
        let model = LoadModel {
            table: "t".into(),
            what: "x".into(),
            inputs: Vec::new(),
            held_share: 0.5,
            checks: vec![check(Some(0.2), true), check(Some(0.1), false), check(None, false)],
            predictions: Vec::new(),
        };
        let met: Vec<_> = model_report(&[model]).rows.iter().map(|row| row.met).collect();
        assert_eq!(met, [Some(false), Some(true), None, None]);
    }
}
