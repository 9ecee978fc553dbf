//! An experiment for people.

use comfy_table::{CellAlignment, Table as Printed, presets};

use crate::experiment::{Experiment, Modelled, Table};

/// Shows it, the words last.
pub fn print(experiment: &Experiment, words: &[String]) {
    println!("==== {}. {}", experiment.number, experiment.title);
    println!("   source: {}", experiment.source);
    for line in &experiment.here {
        println!("   here: {line}");
    }
    for table in &experiment.tables {
        println!(
            "\n== {} ({}; x is the ratio to \"{}\", above 1 is better)",
            table.name, table.unit, table.columns[table.old]
        );
        println!("{}", figures(table));
    }
    if !experiment.model.is_empty() {
        println!("\n== modelled, not measured: every thread on a core of its own");
        println!(
            "   \"in turn\": the old lock as the kernel hands it over, without sleeping; the ratio is to the better of both. The fine lock's \
             figure is an upper bound: no memory bandwidth and no cache is in it."
        );
        println!("{}", modelled(&experiment.model));
        for model in &experiment.model {
            let inputs: Vec<String> =
                model.inputs.iter().map(|(name, value)| format!("{name} {}", number(*value))).collect();
            println!("   {}, {}: from {}", model.table, model.what, inputs.join(", "));
        }
    }
    println!();
    for line in words {
        println!("   {line}");
    }
    println!();
}

/// A row twice: as published, and as measured here.
fn figures(table: &Table) -> Printed {
    let mut printed = Printed::new();
    printed.load_style(presets::UTF8_HORIZONTAL_ONLY);
    let mut header = vec!["", "threads", ""];
    header.extend(&table.columns);
    printed.set_header(header);
    for row in &table.rows {
        let columns = 0..table.columns.len();
        let name = |side: &str| vec![row.what.clone(), row.threads.to_string(), side.to_owned()];
        if row.published.iter().any(Option::is_some) {
            let mut cells = name("published");
            cells.extend(columns.clone().map(|column| {
                let Some(figure) = row.published[column] else { return String::new() };
                let ratio = table.published_ratio(row, column).filter(|_| column != table.old);
                number(figure) + &ratio.map(|ratio| format!(" x{ratio:.2}")).unwrap_or_default()
            }));
            printed.add_row(cells);
        }
        if row.measured.iter().any(Option::is_some) {
            let mut cells = name("here");
            cells.extend(columns.map(|column| {
                let Some(figure) = row.measured[column] else { return String::new() };
                let ratio = row.ratios[column].filter(|_| column != table.old);
                let ratio = ratio.map(|ratio| {
                    if ratio.is_steady() {
                        format!(" x{:.2} ({:.2}-{:.2})", ratio.median, ratio.quartile1, ratio.quartile3)
                    } else {
                        " x: too wide a spread".into()
                    }
                });
                number(figure.median) + &ratio.unwrap_or_default()
            }));
            printed.add_row(cells);
        }
    }
    right(&mut printed, 1);
    printed
}

fn modelled(model: &[Modelled]) -> Printed {
    let mut printed = Printed::new();
    printed.load_style(presets::UTF8_HORIZONTAL_ONLY);
    printed.set_header(["", "", "threads", "old lock", "in turn", "fine lock", "ratio", "measured", "error"]);
    for model in model {
        for check in &model.checks {
            let fine = check.column != model.checks[0].column;
            let predicted = number(check.predicted);
            let (old, ours) = if fine { (String::new(), predicted) } else { (predicted, String::new()) };
            let error = match check.error {
                Some(error) => format!("{:+.0} %{}", 100.0 * error, if check.off { " OFF" } else { "" }),
                None => "too wide a spread".into(),
            };
            let threads = check.threads.to_string();
            let measured = number(check.measured);
            printed.add_row([
                format!("{}: {}", model.table, model.what),
                "check".into(),
                threads,
                old,
                String::new(),
                ours,
                String::new(),
                measured,
                error,
            ]);
        }
        for beyond in &model.beyond {
            printed.add_row([
                format!("{}: {}", model.table, model.what),
                "modelled".into(),
                beyond.threads.to_string(),
                number(beyond.old),
                number(beyond.in_turn),
                number(beyond.ours),
                format!("x{:.2}", beyond.ratio),
                String::new(),
                String::new(),
            ]);
        }
    }
    right(&mut printed, 2);
    printed
}

/// Numbers stand on the right.
fn right(printed: &mut Printed, first: usize) {
    for column in first..printed.column_count() {
        if let Some(column) = printed.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

/// With about four digits.
pub fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 100.0 => format!("{value:.1}"),
        size if size >= 10.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}
