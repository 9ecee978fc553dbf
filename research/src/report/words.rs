//! Text about the tables and the model, computed from the numbers.

use std::fmt::Write;

use crate::model::ERROR_MAX;
use crate::results::{Check, Experiment, LoadModel, Table, TableRow};

/// Published ratio above which a row counts as a gain of the source.
const PUBLISHED_MIN: f64 = 1.1;
/// Number of threads with which the gain must show on this machine.
const THREADS: usize = 2;

/// Result of the fine lock with two threads, in a row that gained in the source.
#[derive(Debug, Clone, PartialEq)]
enum Verdict {
    Beats(f64),
    /// Steady measurement without a gain.
    Not(f64),
    /// The spread of the rounds is too wide.
    Unsure,
    NotRun,
}

/// Returns the text of the experiment itself, then that on every table, then that on the model.
pub fn of(experiment: &Experiment, cpus: usize) -> Vec<String> {
    let mut words = experiment.words.clone();
    if cpus < THREADS {
        words.push(format!(
            "This process may use {cpus} CPU: threads take turns, and no lock can show what it gains."
        ));
    }
    for table in &experiment.tables {
        words.extend(words_of_table(table, &experiment.model, cpus));
    }
    for model in &experiment.model {
        words.extend(words_of_model(model));
    }
    words
}

/// Returns the number of threads with which a load is judged. A load with one thread in the source
/// is about batches, not locks, so it is judged with one thread.
fn judged_with(table: &Table, row: &TableRow) -> usize {
    let more = table.rows.iter().any(|other| other.what == row.what && other.threads >= THREADS);
    if more { THREADS } else { row.threads }
}

fn verdict(table: &Table, row: &TableRow) -> Verdict {
    let threads = judged_with(table, row);
    let Some(here) = table.sibling(row, threads).filter(|here| here.ratios[table.ours].is_some()) else {
        return Verdict::NotRun;
    };
    match (here.steady_ratio(table.ours), here.ratios[table.ours]) {
        // A majority of the rounds is not enough: three quarters must be above 1.
        (Some(ratio), Some(all)) if all.quartile1 > 1.0 => Verdict::Beats(ratio),
        (Some(ratio), _) => Verdict::Not(ratio),
        _ => Verdict::Unsure,
    }
}

fn words_of_table(table: &Table, model: &[LoadModel], cpus: usize) -> Vec<String> {
    // A load that was published for several numbers of threads is judged once, by the nearest
    // number.
    let mut gained: Vec<(&TableRow, f64)> = Vec::new();
    for row in &table.rows {
        let Some(ratio) = table.published_ratio(row, table.new).filter(|ratio| *ratio > PUBLISHED_MIN) else {
            continue;
        };
        match gained.iter_mut().find(|(other, _)| other.what == row.what) {
            Some(other) if row.threads == THREADS => *other = (row, ratio),
            Some(_) => {}
            None => gained.push((row, ratio)),
        }
    }
    if gained.is_empty() {
        return Vec::new();
    }
    let ours = table.columns[table.ours];
    let old = table.columns[table.old];
    let verdicts: Vec<_> =
        gained.iter().map(|(row, published)| (*row, *published, verdict(table, row))).collect();
    let mut beaten = Vec::new();
    for (row, published, verdict) in &verdicts {
        if let Verdict::Beats(ratio) = verdict {
            beaten.push(format!("{} {ratio:.2} (there {published:.2} with {})", row.what, row.threads));
        }
    }
    let threads = gained.iter().map(|(row, _)| judged_with(table, row)).max().unwrap_or(THREADS);
    let mut first = format!(
        "{}: of {} that gained more than {PUBLISHED_MIN} in the source, \"{ours}\" beats \"{old}\" with {} here in {}",
        table.name,
        counted(gained.len(), "load"),
        counted(threads, "thread"),
        beaten.len()
    );
    if beaten.is_empty() {
        first.push('.');
    } else {
        let _ = write!(first, ": {}.", beaten.join(", "));
    }
    let mut words = vec![first];
    for (row, published, verdict) in &verdicts {
        let name = format!("{}, {} (there {published:.2})", table.name, row.what);
        match verdict {
            Verdict::Beats(_) => {}
            Verdict::NotRun => {
                words.push(format!("{name}: not run with {} here.", counted(threads, "thread")));
            }
            Verdict::Unsure => words.push(format!(
                "{name}: the rounds are too far apart to say whether it beats the old lock; run it on a quiet machine. {}",
                why(table, row, model, cpus)
            )),
            Verdict::Not(ratio) => {
                words.push(format!("{name}: does not beat it, {ratio:.2}. {}", why(table, row, model, cpus)));
            }
        }
    }
    words
}

/// Explains from the profile of the old lock why a fine lock gains nothing with two threads.
fn why(table: &Table, row: &TableRow, model: &[LoadModel], cpus: usize) -> String {
    if let Some((_, reason)) = table.reasons.iter().find(|(what, _)| *what == row.what) {
        return (*reason).into();
    }
    // A table of latencies shares the profile of its throughput table; both names start alike.
    let name_prefix = |name: &str| name.split(',').next().map(str::to_owned);
    let profiles = || model.iter().filter(|model| model.what == row.what);
    let model = profiles()
        .find(|model| model.table == table.name)
        .or_else(|| profiles().find(|model| name_prefix(&model.table) == name_prefix(&table.name)));
    let Some(model) = model else {
        return "No profile of the lock was taken, so why is not known.".into();
    };
    // A model that overestimates the old lock's cost still bounds the gain. A model that
    // underestimates it does not.
    let old = table.columns[table.old];
    let too_kind =
        |check: &Check| check.off && check.column == old && check.error.is_some_and(|error| error > 0.0);
    if model.checks.iter().any(too_kind) {
        return "The old lock costs more than its model says where that can be checked, so it does not say why.".into();
    }
    let share = model.held_share;
    let busy = share * THREADS.min(cpus) as f64;
    let gain_max = 1.0 + share;
    if busy < 0.5 {
        format!(
            "The old lock is held for {:.1} % of a thread's time: {THREADS} threads hold it for {:.0} % of the time together and seldom meet \
             there, so a finer one could gain a factor of {gain_max:.2} at most. It would be full with {:.0} threads.",
            100.0 * share,
            100.0 * busy,
            (1.0 / share).ceil()
        )
    } else {
        format!(
            "The old lock is held for {:.0} % of a thread's time, so {THREADS} threads do meet there; it should gain, and the cost lies \
             elsewhere.",
            100.0 * share
        )
    }
}

fn words_of_model(model: &LoadModel) -> Vec<String> {
    let off: Vec<String> = model.checks.iter().filter(|check| check.off).map(off_by).collect();
    let unsure = model.checks.iter().any(|check| check.error.is_none());
    let name = format!("Model of {}, {}", model.table, model.what);
    let mut words = Vec::new();
    if !off.is_empty() {
        words.push(format!(
            "{name}: off by more than {:.0} % where it can be checked ({}); what it says of more cores is a direction, not a figure.",
            100.0 * ERROR_MAX,
            off.join(", ")
        ));
    }
    if unsure {
        words.push(format!("{name}: a measurement that it would be checked with has too wide a spread."));
    }
    words
}

fn off_by(check: &Check) -> String {
    let error = check.error.unwrap_or(f64::NAN);
    format!("{} with {}: {:+.0} %", check.column, counted(check.threads, "thread"), 100.0 * error)
}

/// Formats a count with its noun, such as "1 thread" or "2 threads".
pub fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use freestone_report::Unit;

    use super::*;
    use crate::results::Better;

    fn table(ours: &[f64]) -> Table {
        let mut table = Table::new("t", Unit::Kiops, Better::More, &["one lock", "ours"]);
        table.add("reads", 96, &[Some(1361.0), Some(4096.0)], &[]);
        table.add("reads", 2, &[], &[vec![1.0; ours.len()], ours.to_vec()]);
        table.add("writes", 96, &[Some(465.0), Some(456.0)], &[]);
        table.add("writes", 2, &[], &[vec![1.0; 4], vec![0.5; 4]]);
        table
    }

    fn model_of(held_share: f64, checks: Vec<Check>) -> LoadModel {
        LoadModel {
            table: "t".into(),
            what: "reads".into(),
            inputs: Vec::new(),
            held_share,
            checks,
            predictions: Vec::new(),
        }
    }

    #[test]
    fn gain_is_reported_with_its_ratio() {
        let words = words_of_table(&table(&[1.5, 1.6, 1.5]), &[], 2);
        assert_eq!(words.len(), 1, "{words:?}");
        assert!(
            words[0].contains("of 1 load") && words[0].contains("in 1: reads 1.50 (there 3.01"),
            "{words:?}"
        );
    }

    #[test]
    fn missing_gain_is_explained_by_profile() {
        for (ours, expected) in [(&[0.9, 0.9, 0.9][..], "0.90"), (&[0.97, 0.99, 1.05, 1.06], "1.02")] {
            let words = words_of_table(&table(ours), &[model_of(0.05, Vec::new())], 2);
            assert!(words[0].ends_with("in 0."), "{words:?}");
            assert!(words[1].contains("does not beat") && words[1].contains(expected), "{words:?}");
            assert!(words[1].contains("5.0 %") && words[1].contains("20 threads"), "{words:?}");
            assert!(!words.iter().any(|word| word.contains("writes")), "it gained nothing there: {words:?}");
        }
        let words = words_of_table(&table(&[0.9; 3]), &[], 2);
        assert!(words[1].contains("why is not known"), "{words:?}");
        let mut with_reason = table(&[0.9; 3]);
        with_reason.reasons.push(("reads", "They never meet."));
        let words = words_of_table(&with_reason, &[], 2);
        assert!(words[1].ends_with("0.90. They never meet."), "{words:?}");
        let words = words_of_table(&table(&[0.9; 3]), &[model_of(0.9, Vec::new())], 2);
        assert!(words[1].contains("lies elsewhere"), "{words:?}");
        let off = Check {
            threads: 2,
            column: "one lock",
            predicted: 2.0,
            measured: 1.0,
            error: Some(1.0),
            off: true,
        };
        let words = words_of_table(&table(&[0.9; 3]), &[model_of(0.05, vec![off])], 2);
        assert!(words[1].contains("does not say why"), "{words:?}");
    }

    #[test]
    fn wide_spread_gives_no_verdict() {
        let words = words_of_table(&table(&[0.5, 1.5, 4.0, 8.0]), &[], 2);
        assert!(words[0].ends_with("in 0.") && words[1].contains("too far apart"), "{words:?}");
        let mut absent = table(&[1.5; 3]);
        absent.rows.remove(1);
        let words = words_of_table(&absent, &[], 2);
        assert!(words[1].contains("not run with 2 threads"), "{words:?}");
    }

    #[test]
    fn inaccurate_model_is_reported() {
        let check = |error| Check {
            threads: 2,
            column: "one lock",
            predicted: 1.0,
            measured: 1.0,
            error,
            off: error.is_some_and(|error: f64| error.abs() > ERROR_MAX),
        };
        assert!(words_of_model(&model_of(0.5, vec![check(Some(0.1))])).is_empty());
        let words = words_of_model(&model_of(0.5, vec![check(Some(-0.4)), check(None)]));
        assert!(words[0].contains("one lock with 2 threads: -40 %"), "{words:?}");
        assert!(words[1].contains("too wide"), "{words:?}");
    }
}
