//! More cores than this machine has: a model whose numbers were all measured with one thread, or with threads that share nothing.
//!
//! The old lock is a server that one thread at a time visits ([`super::simulate`]). It is modelled twice: as it is measured here, and
//! handed over in turn as the kernel's spinlocks are; what is gained is counted from the better one. The fine lock has no server:
//! its threads share nothing that is modelled, no memory bandwidth either, so its figure is an upper bound. What the model says of 1 and 2 threads is set beside what was measured in the
//! same run; no number of it was chosen to fit there.

use serde::Serialize;

use super::costs::Machine;
use super::experiment::Table;
use super::simulate::{self, Discipline, Work};
use crate::report::is_steady;

/// Numbers of threads, each on a core of its own, that are modelled.
pub const BEYOND: [usize; 4] = [4, 8, 16, 48];
/// Numbers of threads that are measured as well.
const CHECKED: [usize; 2] = [1, 2];
/// A prediction that is further away from the measurement is flagged.
pub const ERROR_MAX: f64 = 0.15;

/// What is known of a load from measurements with one thread, in nanoseconds an operation.
#[derive(Debug, Clone, Copy)]
pub struct Inputs {
    /// With the fine lock.
    pub fine: f64,
    /// Under the old lock.
    pub held: f64,
    /// How often the old lock is taken.
    pub visits: f64,
    /// Taking the old lock and letting it go, once, where it is free.
    pub lock: f64,
    pub discipline: Discipline,
    /// What two threads that share nothing do together, over what one does.
    pub apart: f64,
}

/// One load beyond this machine's cores.
#[derive(Debug, Clone, Serialize)]
pub struct Modelled {
    /// The table and the row's name.
    pub table: String,
    pub what: String,
    pub unit: &'static str,
    /// The measured numbers that go in, by name.
    pub inputs: Vec<(&'static str, f64)>,
    /// The part of one thread's time that it keeps others from the old lock.
    pub held_share: f64,
    pub checks: Vec<Check>,
    pub beyond: Vec<Beyond>,
}

/// A prediction beside its measurement.
#[derive(Debug, Clone, Serialize)]
pub struct Check {
    pub threads: usize,
    pub column: &'static str,
    pub predicted: f64,
    pub measured: f64,
    /// Of the measurement; nothing where its spread is too wide to compare with.
    pub error: Option<f64>,
    /// The error is above [`ERROR_MAX`].
    pub off: bool,
}

/// Modelled, not measured.
#[derive(Debug, Clone, Serialize)]
pub struct Beyond {
    pub threads: usize,
    /// The old lock as it is measured here.
    pub old: f64,
    /// The old lock where whoever waits gets it in turn and nobody sleeps, as in the kernel.
    pub in_turn: f64,
    pub ours: f64,
    /// Over the better one of the old ones.
    pub ratio: f64,
}

impl Inputs {
    /// Operations a second with the old lock.
    fn old(&self, discipline: Discipline, machine: &Machine, threads: usize) -> f64 {
        let slower = self.slower(threads);
        let held = self.held * slower;
        let outside = (self.fine + self.visits * self.lock - self.held).max(0.0) * slower;
        let work = Work { outside, held, visits: self.visits };
        simulate::speed(work, discipline, machine.costs, threads)
    }

    /// Operations a second with the fine lock.
    fn fine(&self, threads: usize) -> f64 {
        threads as f64 * 1e9 / (self.fine * self.slower(threads))
    }

    /// How many times as long everything takes where the other CPUs work as well.
    fn slower(&self, threads: usize) -> f64 {
        // More than twice as much is noise.
        if threads == 1 { 1.0 } else { (2.0 / self.apart).max(1.0) }
    }

    /// The part of one thread's time that it keeps others from the old lock: while it holds it and, where waiters look at the lock all the
    /// time, while its line is on the way.
    fn held_share(&self, machine: &Machine) -> f64 {
        let line = match self.discipline {
            Discipline::InTurn => machine.costs.line,
            Discipline::Parking => 0.0,
        };
        ((self.held + self.visits * line) / (self.fine + self.visits * self.lock)).min(1.0)
    }
}

/// What the model says of the row `what` of a table; `unit` of the table's units are one operation a second.
pub fn predict(table: &Table, what: &str, inputs: &Inputs, machine: &Machine, unit: f64) -> Modelled {
    let both = |threads| {
        [(table.old, inputs.old(inputs.discipline, machine, threads)), (table.ours, inputs.fine(threads))]
    };
    let mut checks = Vec::new();
    for threads in CHECKED {
        let Some(row) = table.rows.iter().find(|row| row.what == what && row.threads == threads) else {
            continue;
        };
        for (column, speed) in both(threads) {
            // What it was taken from says nothing about it.
            let Some(measured) = row.measured[column].filter(|_| threads > 1 || column == table.old) else {
                continue;
            };
            let predicted = speed * unit;
            let error = is_steady(&measured).then_some(predicted / measured.median - 1.0);
            checks.push(Check {
                threads,
                column: table.columns[column],
                predicted,
                measured: measured.median,
                error,
                off: error.is_some_and(|error| error.abs() > ERROR_MAX),
            });
        }
    }
    let beyond = BEYOND.map(|threads| {
        let [(_, old), (_, ours)] = both(threads);
        let in_turn = inputs.old(Discipline::InTurn, machine, threads);
        let ratio = ours / old.max(in_turn);
        Beyond { threads, old: old * unit, in_turn: in_turn * unit, ours: ours * unit, ratio }
    });
    let costs = machine.costs;
    Modelled {
        table: table.name.clone(),
        what: what.into(),
        unit: table.unit,
        inputs: vec![
            ("operation with the fine lock, ns", inputs.fine),
            ("under the old lock, ns", inputs.held),
            ("visits to the old lock", inputs.visits),
            ("taking it free, ns", inputs.lock),
            ("two threads apart over one", inputs.apart),
            ("cache line between CPUs, ns", costs.line),
            ("looking before sleeping, ns", costs.spin),
            ("waking, ns", costs.wake),
            ("until the woken one runs, ns", costs.wake_latency),
        ],
        held_share: inputs.held_share(machine),
        checks,
        beyond: beyond.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::experiment::Better;
    use super::super::simulate::Costs;
    use super::*;

    const INPUTS: Inputs = Inputs {
        fine: 380.0,
        held: 100.0,
        visits: 1.0,
        lock: 20.0,
        discipline: Discipline::InTurn,
        apart: 2.0,
    };

    fn machine() -> Machine {
        Machine { costs: Costs { line: 25.0, ..Costs::default() }, mutex: 20.0, clock: 20.0 }
    }

    fn table(old: [f64; 2], ours: f64) -> Table {
        let mut table = Table::new("t", "k/s", Better::More, &["old", "ours"]);
        table.add("x", 1, &[], &[vec![old[0]; 3], vec![1.0; 3]]);
        table.add("x", 2, &[], &[vec![old[1]; 3], vec![ours, ours, ours]]);
        table
    }

    #[test]
    fn the_old_lock_saturates_and_the_fine_one_scales() {
        let modelled = predict(&table([1.0; 2], 1.0), "x", &INPUTS, &machine(), 1e-3);
        // 100 ns, and 25 for the line, of 400.
        assert!((modelled.held_share - 0.3125).abs() < 1e-9);
        let last = modelled.beyond.last().unwrap();
        assert_eq!(last.threads, 48);
        // One server, and the line's way to whoever is next.
        assert!((last.old / (1e6 / 125.0) - 1.0).abs() < 0.01, "{last:?}");
        assert!((last.ours / (48.0 * 1e6 / 380.0) - 1.0).abs() < 1e-9, "{last:?}");
        assert!((last.ratio - last.ours / last.old).abs() < 1e-9);
        // A lock whose waiters sleep is worse; what is gained is counted from the one that is handed over in turn.
        let parking = Inputs { discipline: Discipline::Parking, ..INPUTS };
        let costs = Costs { line: 25.0, wake: 5e3, wake_nobody: 100.0, wake_latency: 2e4, spin: 0.0 };
        let sleepy = Machine { costs, ..machine() };
        let sleepy = predict(&table([1.0; 2], 1.0), "x", &parking, &sleepy, 1e-3);
        let slept = sleepy.beyond.last().unwrap();
        assert!(slept.old < 0.9 * slept.in_turn, "{slept:?}");
        assert!((slept.ratio / last.ratio - 1.0).abs() < 1e-9, "{slept:?}");
        // CPUs that slow each other down slow both sides down.
        let slow = Inputs { apart: 1.0, ..INPUTS };
        let slow = predict(&table([1.0; 2], 1.0), "x", &slow, &machine(), 1e-3);
        assert!((slow.beyond[3].ours / last.ours - 0.5).abs() < 1e-9);
        assert!(slow.beyond[3].old < 0.6 * last.old);
    }

    #[test]
    fn predictions_are_checked_and_flagged() {
        let right = 2.0 * 1e6 / 380.0;
        let modelled = predict(&table([2500.0, 1000.0], right), "x", &INPUTS, &machine(), 1e-3);
        let by: Vec<_> = modelled.checks.iter().map(|c| (c.threads, c.column, c.off)).collect();
        assert_eq!(by, [(1, "old", false), (2, "old", true), (2, "ours", false)]);
        assert!(modelled.checks[2].error.unwrap().abs() < 1e-9);
        // Nothing to compare with is no error of the model.
        let mut unsure = table([2500.0, 1000.0], right);
        unsure.rows.pop();
        unsure.add("x", 2, &[], &[vec![1.0, 5.0, 9.0], vec![1.0, 5.0, 9.0]]);
        let modelled = predict(&unsure, "x", &INPUTS, &machine(), 1e-3);
        assert!(modelled.checks[1..].iter().all(|check| check.error.is_none() && !check.off));
    }
}
