//! What the tables say, in words that are computed from them.

use std::fmt::Write;

use crate::experiment::{Check, Experiment, Modelled, Table, TableRow};
use crate::model::ERROR_MAX;

/// Rows whose published ratio is above this are looked at.
const PUBLISHED_MIN: f64 = 1.1;
/// So many threads here are to show it.
const THREADS: usize = 2;

/// How the fine lock does with two threads in a row that gained in the source.
#[derive(Debug, Clone, PartialEq)]
enum Verdict {
    Beats(f64),
    /// It was measured well enough, and it does not.
    Not(f64),
    /// The rounds are too far apart to tell.
    Unsure,
    NotRun,
}

/// The experiment's own words, then those on every table, then those on the model.
pub fn of(experiment: &Experiment, cpus: usize) -> Vec<String> {
    let mut words = experiment.words.clone();
    if cpus < THREADS {
        words.push(format!(
            "This process may use {cpus} CPU: threads take turns, and no lock can show what it gains."
        ));
    }
    for table in &experiment.tables {
        words.extend(of_table(table, &experiment.model, cpus));
    }
    for modelled in &experiment.model {
        words.extend(of_model(modelled));
    }
    words
}

/// With how many threads a load is judged. What has one thread in the source is no matter of locks,
/// but of batches: it is compared as it is.
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
        // More than half of the rounds is not enough: three quarters are to be above 1.
        (Some(ratio), Some(all)) if all.quartile1 > 1.0 => Verdict::Beats(ratio),
        (Some(ratio), _) => Verdict::Not(ratio),
        _ => Verdict::Unsure,
    }
}

fn of_table(table: &Table, model: &[Modelled], cpus: usize) -> Vec<String> {
    // A load that was published for several numbers of threads is judged once, by the nearest one.
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
        // Writing to a String cannot fail.
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

/// Why a fine lock gains nothing with two threads, from the profile of the old one.
fn why(table: &Table, row: &TableRow, model: &[Modelled], cpus: usize) -> String {
    if let Some((_, reason)) = table.reasons.iter().find(|(what, _)| *what == row.what) {
        return (*reason).into();
    }
    // A table of latencies has its profile with that of the throughput: their names begin alike.
    let kin = |name: &str| name.split(',').next().map(str::to_owned);
    let profiles = || model.iter().filter(|model| model.what == row.what);
    let model = profiles()
        .find(|model| model.table == table.name)
        .or_else(|| profiles().find(|model| kin(&model.table) == kin(&table.name)));
    let Some(model) = model else {
        return "No profile of the lock was taken, so why is not known.".into();
    };
    // A model that is too hard on the old lock still bounds the gain; one that is too kind does
    // not.
    let old = table.columns[table.old];
    let too_kind =
        |check: &Check| check.off && check.column == old && check.error.is_some_and(|error| error > 0.0);
    if model.checks.iter().any(too_kind) {
        return "The old lock costs more than its model says where that can be checked, so it does not say why.".into();
    }
    let share = model.held_share;
    let busy = share * THREADS.min(cpus) as f64;
    let most = 1.0 + share;
    if busy < 0.5 {
        format!(
            "The old lock is held for {:.1} % of a thread's time: {THREADS} threads hold it for {:.0} % of the time together and seldom meet \
             there, so a finer one could gain a factor of {most:.2} at most. It would be full with {:.0} threads.",
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

fn of_model(modelled: &Modelled) -> Vec<String> {
    let off: Vec<String> = modelled.checks.iter().filter(|check| check.off).map(off_by).collect();
    let unsure = modelled.checks.iter().any(|check| check.error.is_none());
    let name = format!("Model of {}, {}", modelled.table, modelled.what);
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

/// Such as "1 thread", "2 threads".
pub fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use freestone_report::Unit;

    use super::*;
    use crate::experiment::Better;

    fn table(ours: &[f64]) -> Table {
        let mut table = Table::new("t", Unit::Kiops, Better::More, &["one lock", "ours"]);
        table.add("reads", 96, &[Some(1361.0), Some(4096.0)], &[]);
        table.add("reads", 2, &[], &[vec![1.0; ours.len()], ours.to_vec()]);
        table.add("writes", 96, &[Some(465.0), Some(456.0)], &[]);
        table.add("writes", 2, &[], &[vec![1.0; 4], vec![0.5; 4]]);
        table
    }

    fn modelled(held_share: f64, checks: Vec<Check>) -> Modelled {
        Modelled {
            table: "t".into(),
            what: "reads".into(),
            inputs: Vec::new(),
            held_share,
            checks,
            beyond: Vec::new(),
        }
    }

    #[test]
    fn a_row_that_beats_is_said_with_its_ratio() {
        let words = of_table(&table(&[1.5, 1.6, 1.5]), &[], 2);
        assert_eq!(words.len(), 1, "{words:?}");
        assert!(
            words[0].contains("of 1 load") && words[0].contains("in 1: reads 1.50 (there 3.01"),
            "{words:?}"
        );
    }

    #[test]
    fn a_row_that_does_not_beat_is_said_with_the_profile() {
        for (ours, told) in [(&[0.9, 0.9, 0.9][..], "0.90"), (&[0.97, 0.99, 1.05, 1.06], "1.02")] {
            let words = of_table(&table(ours), &[modelled(0.05, Vec::new())], 2);
            assert!(words[0].ends_with("in 0."), "{words:?}");
            assert!(words[1].contains("does not beat") && words[1].contains(told), "{words:?}");
            assert!(words[1].contains("5.0 %") && words[1].contains("20 threads"), "{words:?}");
            assert!(!words.iter().any(|word| word.contains("writes")), "it gained nothing there: {words:?}");
        }
        let words = of_table(&table(&[0.9; 3]), &[], 2);
        assert!(words[1].contains("why is not known"), "{words:?}");
        let mut told = table(&[0.9; 3]);
        told.reasons.push(("reads", "They never meet."));
        let words = of_table(&told, &[], 2);
        assert!(words[1].ends_with("0.90. They never meet."), "{words:?}");
        let words = of_table(&table(&[0.9; 3]), &[modelled(0.9, Vec::new())], 2);
        assert!(words[1].contains("lies elsewhere"), "{words:?}");
        let off = Check {
            threads: 2,
            column: "one lock",
            predicted: 2.0,
            measured: 1.0,
            error: Some(1.0),
            off: true,
        };
        let words = of_table(&table(&[0.9; 3]), &[modelled(0.05, vec![off])], 2);
        assert!(words[1].contains("does not say why"), "{words:?}");
    }

    #[test]
    fn a_spread_that_is_too_wide_is_no_verdict() {
        let words = of_table(&table(&[0.5, 1.5, 4.0, 8.0]), &[], 2);
        assert!(words[0].ends_with("in 0.") && words[1].contains("too far apart"), "{words:?}");
        let mut absent = table(&[1.5; 3]);
        absent.rows.remove(1);
        let words = of_table(&absent, &[], 2);
        assert!(words[1].contains("not run with 2 threads"), "{words:?}");
    }

    #[test]
    fn a_model_that_is_off_is_said_to_be() {
        let check = |error| Check {
            threads: 2,
            column: "one lock",
            predicted: 1.0,
            measured: 1.0,
            error,
            off: error.is_some_and(|error: f64| error.abs() > ERROR_MAX),
        };
        assert!(of_model(&modelled(0.5, vec![check(Some(0.1))])).is_empty());
        let words = of_model(&modelled(0.5, vec![check(Some(-0.4)), check(None)]));
        assert!(words[0].contains("one lock with 2 threads: -40 %"), "{words:?}");
        assert!(words[1].contains("too wide"), "{words:?}");
    }
}
