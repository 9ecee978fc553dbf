//! `cargo xtask gate`: the checks that a change must pass beyond the tests, and a few pieces of the slow lane.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::record::{LANDINGS_MAX, Record};
use crate::steps::{self, Lane, Step, Verdict};

/// Expected duration of a piece that has never run, in minutes. No piece may take longer.
const PIECE_MINUTES_MAX: u64 = 12;
/// Factor from the last duration of a piece to its expected duration, because machines differ in speed.
const MARGIN: f64 = 1.25;

/// Runs the gate, then pieces of the slow lane until `time` is over, those that ran longest ago first.
pub fn run(time: Duration) -> Result<Verdict> {
    let start = Instant::now();
    let mut done = steps::run_all(&steps::of_lane(Lane::Gate), start)?;
    let mut waiting = oldest_first(&Record::read()?);
    let names: Vec<_> = waiting.iter().map(|piece| piece.name()).collect();
    println!("\nslow lane, longest ago first: {}", names.join(", "));
    while let Some(at) = first_that_fits(&waiting, &Record::read()?, time.saturating_sub(start.elapsed())) {
        done.push(steps::run(waiting.remove(at), start, &[])?);
    }
    let record = Record::read()?;
    record.print()?;
    Ok(steps::summary(&done, start, &overdue(&record)))
}

/// Returns the pieces in the order of their last run; pieces that never ran come first.
fn oldest_first(record: &Record) -> Vec<Step> {
    let mut pieces = steps::of_lane(Lane::Slow);
    pieces.sort_by_key(|piece| record.slow.get(&piece.name()).map(|run| run.date.clone()));
    pieces
}

/// Returns the index of the first piece that is expected to end within `left`, or None.
fn first_that_fits(waiting: &[Step], record: &Record, left: Duration) -> Option<usize> {
    waiting.iter().position(|piece| {
        // The last run may have been on a busy machine.
        let last = record.slow.get(&piece.name()).map_or(PIECE_MINUTES_MAX, |run| run.minutes);
        let minutes = last.min(PIECE_MINUTES_MAX);
        Duration::from_secs_f64(minutes as f64 * 60.0 * MARGIN) <= left
    })
}

/// Returns a message for each piece that ran too long ago, or failed when it last ran.
fn overdue(record: &Record) -> Vec<String> {
    let mut overdue = Vec::new();
    for piece in steps::of_lane(Lane::Slow) {
        let name = piece.name();
        match record.slow.get(&name) {
            // A piece that has never run is the first one in the next gate.
            None => {}
            Some(run) if run.failed > 0 => {
                overdue.push(format!("{name} failed at {}: run it with --only {name}", run.commit));
            }
            Some(run) => match run.age() {
                Ok(age) if age <= LANDINGS_MAX => {}
                Ok(age) => overdue.push(format!("{name} last ran {age} landings ago, at {}", run.commit)),
                Err(error) => {
                    overdue.push(format!("{name}: cannot count the landings since its last run: {error:#}"));
                }
            },
        }
    }
    overdue
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{first_that_fits, oldest_first};
    use crate::record::{Record, Run};
    use crate::steps::Step;

    fn run(date: &str, minutes: u64) -> Run {
        Run { commit: "c".into(), date: date.into(), passed: 1, failed: 0, minutes }
    }

    #[test]
    fn pieces_rotate_within_the_time() {
        let mut record = Record::default();
        for piece in oldest_first(&record) {
            record.slow.insert(piece.name(), run("2026-01-02 00:00", 4));
        }
        record.slow.insert(Step::Mutants.name(), run("2026-01-01 00:00", 10));
        record.slow.insert(Step::TortureLong.name(), run("2026-01-01 12:00", 30));
        record.slow.remove(&Step::Ceph.name());
        let pieces = oldest_first(&record);
        assert_eq!(pieces[..3], [Step::Ceph, Step::Mutants, Step::TortureLong]);
        let fits = |pieces: &[Step], minutes: u64| {
            first_that_fits(pieces, &record, Duration::from_secs(60 * minutes))
        };
        let minutes = |minutes| fits(&pieces, minutes);
        assert_eq!(minutes(20), Some(0));
        assert_eq!(minutes(13), Some(1));
        assert_eq!(minutes(6), Some(3));
        assert_eq!(minutes(2), None);
        assert_eq!(fits(&[Step::TortureLong], 15), Some(0), "its last run was on a busy machine");
    }
}
