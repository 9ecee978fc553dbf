//! An experiment as it is told and written: a report for each table, and one for the model.

use freestone_report::{Report, Row, Summary, Unit};

use crate::experiment::{Experiment, Modelled, Table};
use crate::words::counted;

/// All of them, the model last.
pub fn of(experiment: &Experiment) -> Vec<Report> {
    let mut reports: Vec<Report> = experiment.tables.iter().map(of_table).collect();
    if !experiment.model.is_empty() {
        reports.push(of_model(&experiment.model));
    }
    reports
}

/// A row for each figure, and one for what each is times the old one's.
fn of_table(table: &Table) -> Report {
    let old = table.columns[table.old];
    let mut rows = Vec::new();
    for row in &table.rows {
        let load = format!("{}, {}", row.what, counted(row.threads, "thread"));
        for (at, column) in table.columns.iter().enumerate() {
            let name = format!("{load}: {column}");
            let ratio = format!("{name} / {old}");
            rows.extend(figure(name, table.unit, row.published[at], row.measured[at]));
            if at != table.old {
                let published = table.published_ratio(row, at);
                rows.extend(figure(ratio, Unit::Ratio, published, row.ratios[at]).map(Row::steady));
            }
        }
    }
    let notes = vec![format!(
        "Published / here. \"{old}\" has its own figures, the others are so many times better."
    )];
    Report {
        name: table.name.clone(),
        notes,
        rows,
        pivot: Some(format!("{{row}}: {old} | {{row}}: {{column}} / {old}")),
        ..Report::default()
    }
}

fn figure(what: String, unit: Unit, published: Option<f64>, here: Option<Summary>) -> Option<Row> {
    let row = match here {
        Some(here) => Row::new(what, unit, here),
        None if published.is_none() => return None,
        None => Row::absent(what, unit),
    };
    Some(Row { published, ..row })
}

fn of_model(model: &[Modelled]) -> Report {
    let mut rows = Vec::new();
    for model in model {
        let name = format!("{}, {}", model.table, model.what);
        for beyond in &model.beyond {
            let what = format!("on {} cores, upper bound: {name}", beyond.threads);
            rows.push(
                Row::ratio(what, Summary::one(beyond.ratio))
                    .part("old lock", beyond.old)
                    .part("in turn", beyond.in_turn)
                    .part("fine lock", beyond.ours),
            );
        }
        for check in &model.checks {
            let what = format!("error, {}, {}: {name}", check.column, counted(check.threads, "thread"));
            let error = check.error.map_or(f64::NAN, |error| 100.0 * error);
            let row = Row::one(what, Unit::Percent, error);
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
            "Every thread on a core of its own: how many times better the fine lock is; how far the model is \
             off where it can be checked; how much of a thread's time the old lock is held."
                .into(),
            "\"In turn\": the old lock as the kernel hands it over, without sleeping; the ratio is to the better \
             of both. The fine lock's figure is an upper bound, and so is the ratio: no memory bandwidth and no cache \
             is in it."
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
    use crate::experiment::{Better, Check};

    #[test]
    fn every_figure_has_a_row() {
        let mut table = Table::new("t", Unit::Seconds, Better::Less, &["old", "absent", "ours"]);
        table.add("x", 2, &[Some(68.0), None, Some(17.0)], &[vec![2.0; 3], vec![], vec![1.0, 4.0, 9.0]]);
        table.add("x", 96, &[Some(8.0)], &[]);
        let report = of_table(&table);
        let row = |what: &str| report.rows.iter().find(|row| row.what == what);
        assert!(row("x, 2 threads: old").is_some_and(|row| row.value.count == 3 && !row.refused));
        let ratio = row("x, 2 threads: ours / old").unwrap();
        assert_eq!((ratio.published, ratio.refused), (Some(4.0), true));
        assert!(row("x, 2 threads: absent").is_none() && row("x, 96 threads: ours / old").is_none());
        let published = row("x, 96 threads: old").unwrap();
        assert_eq!((published.published, published.value.count), (Some(8.0), 0));
    }

    #[test]
    fn what_the_model_cannot_be_checked_with_is_no_miss() {
        let check =
            |error, off| Check { threads: 2, column: "old", predicted: 1.0, measured: 1.0, error, off };
        let model = Modelled {
            table: "t".into(),
            what: "x".into(),
            inputs: Vec::new(),
            held_share: 0.5,
            checks: vec![check(Some(0.2), true), check(Some(0.1), false), check(None, false)],
            beyond: Vec::new(),
        };
        let met: Vec<_> = of_model(&[model]).rows.iter().map(|row| row.met).collect();
        assert_eq!(met, [Some(false), Some(true), None, None]);
    }
}
