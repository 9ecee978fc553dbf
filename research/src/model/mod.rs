//! Model for more cores than this machine has. All inputs of the model are measured with one
//! thread, or with threads that share nothing.
//!
//! The old lock is a server that one thread at a time visits ([`crate::model::simulate`]). The old lock is
//! modelled twice: as measured on this machine, and handed over in order like the kernel's
//! spinlocks. The gain is relative to the better of the two. Read-write locks under reads and
//! writes are simulated ([`crate::model::shared`]). The fine lock has no server: its threads share nothing
//! in the model, not even memory bandwidth, so its figure is an upper bound.
//!
//! For 1 and 2 threads the prediction is compared with the measurement of the same run. No input is
//! fitted to these measurements.

pub mod costs;
pub mod events;
pub mod shared;
pub mod simulate;

use crate::results::{Check, LoadModel, Prediction, Table};
use costs::Machine;
use shared::{Mix, Visit};
use simulate::{Costs, Discipline, Operation};

/// Modelled numbers of threads, each on its own core.
pub const PREDICTED_THREADS: [usize; 4] = [4, 8, 16, 48];
/// Numbers of threads that are also measured.
const CHECKED: [usize; 2] = [1, 2];
/// Relative error above which a prediction is flagged.
pub const ERROR_MAX: f64 = 0.15;

/// Predictions for a load, from measurements with one thread or with threads that share nothing.
/// Every thread has its own core. Speeds are operations per second.
pub trait Speeds {
    /// Returns the speed with the old lock and the mutex of this machine.
    fn old(&self, machine: &Machine, threads: usize) -> f64;
    /// Returns the speed with the old lock and waiters served in order without sleeping, as in the
    /// kernel.
    fn in_turn(&self, machine: &Machine, threads: usize) -> f64;
    fn fine(&self, threads: usize) -> f64;
    /// Returns the part of a thread's time in which the thread keeps others from the old lock.
    fn held_share(&self, machine: &Machine) -> f64;
    fn inputs(&self, costs: &Costs) -> Vec<(&'static str, f64)>;
}

/// Inputs for a lock that one thread at a time holds, in nanoseconds per operation.
#[derive(Debug, Clone, Copy)]
pub struct Inputs {
    /// Duration of the whole operation, with the fine lock.
    pub fine: f64,
    pub hold_time: f64,
    /// Number of times that an operation acquires the old lock.
    pub visits: f64,
    /// Locking and unlocking the old lock once without contention.
    pub lock: f64,
    pub discipline: Discipline,
    /// Speed of two threads that share nothing, relative to one thread.
    pub apart: f64,
    /// Limit of the old way in operations per second, whatever its lock is; None without a limit.
    pub at_most: Option<f64>,
}

/// Inputs for a read-write lock under reads and writes, in nanoseconds per page.
#[derive(Debug, Clone, Copy)]
pub struct MixedInputs {
    /// Duration of a read with the fine lock; `write` is that of a write.
    pub read: f64,
    pub write: f64,
    /// Time under the lock in a read; `write_held` is that in a write.
    pub read_held: f64,
    pub write_held: f64,
    pub mix: Mix,
    /// Measured speed of two threads with a disk each, relative to their speed computed from `read`
    /// and `write`.
    pub apart: f64,
}

/// Inputs for a load in which half of the threads read without any lock, and the others are
/// described by `writes`.
#[derive(Debug, Clone, Copy)]
pub struct HalfReads {
    pub read: f64,
    pub writes: Inputs,
}

/// Returns the factor by which everything slows down if the other CPUs work too. `apart` is the
/// speed of two threads that share nothing, relative to twice the speed of one.
fn slower(threads: usize, apart: f64) -> f64 {
    // A value of `apart` above 1 is noise.
    if threads == 1 { 1.0 } else { (1.0 / apart).max(1.0) }
}

impl Inputs {
    fn with_old(&self, discipline: Discipline, machine: &Machine, threads: usize) -> f64 {
        let slower = self.slower(threads);
        let hold_time = self.hold_time * slower;
        let outside = (self.fine + self.visits * self.lock - self.hold_time).max(0.0) * slower;
        let work = Operation { outside, hold_time, visits: self.visits };
        simulate::speed(work, discipline, machine.costs, threads).min(self.at_most.unwrap_or(f64::INFINITY))
    }

    fn slower(&self, threads: usize) -> f64 {
        slower(threads, self.apart / 2.0)
    }
}

impl Speeds for Inputs {
    fn old(&self, machine: &Machine, threads: usize) -> f64 {
        self.with_old(self.discipline, machine, threads)
    }

    fn in_turn(&self, machine: &Machine, threads: usize) -> f64 {
        self.with_old(Discipline::InTurn, machine, threads)
    }

    fn fine(&self, threads: usize) -> f64 {
        threads as f64 * 1e9 / (self.fine * self.slower(threads))
    }

    /// The time of holding the lock. If waiters spin, the transfer of its cache line counts too.
    fn held_share(&self, machine: &Machine) -> f64 {
        let line = match self.discipline {
            Discipline::InTurn => machine.costs.line,
            Discipline::Parking => 0.0,
        };
        ((self.hold_time + self.visits * line) / (self.fine + self.visits * self.lock)).min(1.0)
    }

    fn inputs(&self, costs: &Costs) -> Vec<(&'static str, f64)> {
        let mut inputs = vec![
            ("operation with the fine lock, ns", self.fine),
            ("under the old lock, ns", self.hold_time),
            ("visits to the old lock", self.visits),
            ("taking it free, ns", self.lock),
            ("two threads apart over one", self.apart),
            ("cache line between CPUs, ns", costs.line),
            ("looking before sleeping, ns", costs.spin),
            ("waking, ns", costs.wake),
            ("until the woken one runs, ns", costs.wake_latency),
        ];
        inputs.extend(self.at_most.map(|most| ("the old way at the most, a second", most)));
        inputs
    }
}

impl MixedInputs {
    fn slower(&self, threads: usize) -> f64 {
        slower(threads, self.apart)
    }
}

impl Speeds for MixedInputs {
    fn old(&self, machine: &Machine, threads: usize) -> f64 {
        let slower = self.slower(threads);
        let visit = |all: f64, hold_time: f64| Visit {
            outside: (all - hold_time).max(0.0) * slower,
            hold_time: hold_time * slower,
        };
        let (read, write) = (visit(self.read, self.read_held), visit(self.write, self.write_held));
        shared::speed(read, write, self.mix, machine.costs.line, threads)
    }

    /// The same as `old`, because the modelled read-write lock spins already, like the kernel's.
    fn in_turn(&self, machine: &Machine, threads: usize) -> f64 {
        self.old(machine, threads)
    }

    fn fine(&self, threads: usize) -> f64 {
        let threads_speed = match self.mix {
            Mix::ByThread => threads.div_ceil(2) as f64 / self.read + (threads / 2) as f64 / self.write,
            // Reads and writes have the same number of pages.
            Mix::ByPages(_) => threads as f64 * 2.0 / (self.read + self.write),
        };
        1e9 * threads_speed / self.slower(threads)
    }

    fn held_share(&self, _machine: &Machine) -> f64 {
        (self.read_held + self.write_held) / (self.read + self.write)
    }

    fn inputs(&self, costs: &Costs) -> Vec<(&'static str, f64)> {
        vec![
            ("read with the fine lock, ns", self.read),
            ("of it under the old lock, ns", self.read_held),
            ("write with the fine lock, ns", self.write),
            ("of it under the old lock, ns", self.write_held),
            ("two threads apart over the sum of both", self.apart),
            ("cache line between CPUs, ns", costs.line),
        ]
    }
}

impl HalfReads {
    /// Returns the sum of the speeds of readers and writers. `writes` is the speed by number of
    /// writers.
    fn combined(&self, threads: usize, writes: impl Fn(usize) -> f64) -> f64 {
        let slower = self.writes.slower(threads);
        let reads = threads.div_ceil(2) as f64 * 1e9 / (self.read * slower);
        let writes = match threads / 2 {
            0 => 0.0,
            // The measured writer ran alone; this one runs beside readers.
            1 => writes(1) / slower,
            many => writes(many),
        };
        reads + writes
    }
}

impl Speeds for HalfReads {
    fn old(&self, machine: &Machine, threads: usize) -> f64 {
        self.combined(threads, |writers| self.writes.old(machine, writers))
    }

    fn in_turn(&self, machine: &Machine, threads: usize) -> f64 {
        self.combined(threads, |writers| self.writes.in_turn(machine, writers))
    }

    fn fine(&self, threads: usize) -> f64 {
        self.combined(threads, |writers| self.writes.fine(writers))
    }

    fn held_share(&self, machine: &Machine) -> f64 {
        self.writes.held_share(machine)
    }

    fn inputs(&self, costs: &Costs) -> Vec<(&'static str, f64)> {
        let mut inputs = vec![("read, which takes no stream, ns", self.read)];
        inputs.extend(self.writes.inputs(costs));
        inputs
    }
}

/// Predicts the row `what` of a table. An operation per second is `unit` of the table's units.
pub fn predict(table: &Table, what: &str, load: &dyn Speeds, machine: &Machine, unit: f64) -> LoadModel {
    let combined = |threads| [(table.old, load.old(machine, threads)), (table.ours, load.fine(threads))];
    let mut checks = Vec::new();
    for threads in CHECKED {
        let Some(row) = table.rows.iter().find(|row| row.what == what && row.threads == threads) else {
            continue;
        };
        for (column, speed) in combined(threads) {
            // A measurement that is an input of the model cannot check the prediction.
            let Some(measured) = row.measured[column].filter(|_| threads > 1 || column == table.old) else {
                continue;
            };
            let predicted = speed * unit;
            let error = measured.is_steady().then_some(predicted / measured.median - 1.0);
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
    let predictions = PREDICTED_THREADS.map(|threads| {
        let [(_, old), (_, ours)] = combined(threads);
        let in_turn = load.in_turn(machine, threads);
        let ratio = ours / old.max(in_turn);
        Prediction { threads, old: old * unit, in_turn: in_turn * unit, ours: ours * unit, ratio }
    });
    LoadModel {
        table: table.name.clone(),
        what: what.into(),
        inputs: load.inputs(&machine.costs),
        held_share: load.held_share(machine),
        checks,
        predictions: predictions.into(),
    }
}

#[cfg(test)]
mod tests {
    use freestone_report::Unit;

    use super::*;
    use crate::results::Better;

    const INPUTS: Inputs = Inputs {
        fine: 380.0,
        hold_time: 100.0,
        visits: 1.0,
        lock: 20.0,
        discipline: Discipline::InTurn,
        apart: 2.0,
        at_most: None,
    };

    fn machine() -> Machine {
        Machine { costs: Costs { line: 25.0, ..Costs::default() }, mutex: 20.0, clock: 20.0 }
    }

    fn table(old: [f64; 2], ours: f64) -> Table {
        let mut table = Table::new("t", Unit::Kiops, Better::More, &["old", "ours"]);
        table.add("x", 1, &[], &[vec![old[0]; 3], vec![1.0; 3]]);
        table.add("x", 2, &[], &[vec![old[1]; 3], vec![ours, ours, ours]]);
        table
    }

    #[test]
    fn old_lock_saturates_and_fine_lock_scales() {
        let load_model = predict(&table([1.0; 2], 1.0), "x", &INPUTS, &machine(), 1e-3);
        // 100 ns under the lock and 25 ns for the cache line, of 400 ns.
        assert!((load_model.held_share - 0.3125).abs() < 1e-9);
        let last = load_model.predictions.last().unwrap();
        assert_eq!(last.threads, 48);
        // The lock is the bottleneck: its hold time and the transfer of the cache line.
        assert!((last.old / (1e6 / 125.0) - 1.0).abs() < 0.01, "{last:?}");
        assert!((last.ours / (48.0 * 1e6 / 380.0) - 1.0).abs() < 1e-9, "{last:?}");
        assert!((last.ratio - last.ours / last.old).abs() < 1e-9);
        // A lock whose waiters sleep is slower. The gain is relative to the lock that is handed
        // over in order.
        let parking = Inputs { discipline: Discipline::Parking, ..INPUTS };
        let costs = Costs { line: 25.0, wake: 5e3, wake_nobody: 100.0, wake_latency: 2e4, spin: 0.0 };
        let sleepy = Machine { costs, ..machine() };
        let sleepy = predict(&table([1.0; 2], 1.0), "x", &parking, &sleepy, 1e-3);
        let slept = sleepy.predictions.last().unwrap();
        assert!(slept.old < 0.9 * slept.in_turn, "{slept:?}");
        assert!((slept.ratio / last.ratio - 1.0).abs() < 1e-9, "{slept:?}");
        // CPUs that slow each other down affect both sides.
        let slow = Inputs { apart: 1.0, ..INPUTS };
        let slow = predict(&table([1.0; 2], 1.0), "x", &slow, &machine(), 1e-3);
        assert!((slow.predictions[3].ours / last.ours - 0.5).abs() < 1e-9);
        assert!(slow.predictions[3].old < 0.6 * last.old);
    }

    #[test]
    fn inaccurate_predictions_are_flagged() {
        let right = 2.0 * 1e6 / 380.0;
        let load_model = predict(&table([2500.0, 1000.0], right), "x", &INPUTS, &machine(), 1e-3);
        let by: Vec<_> = load_model.checks.iter().map(|c| (c.threads, c.column, c.off)).collect();
        assert_eq!(by, [(1, "old", false), (2, "old", true), (2, "ours", false)]);
        assert!(load_model.checks[2].error.unwrap().abs() < 1e-9);
        // A missing measurement is not an error of the model.
        let mut unsure = table([2500.0, 1000.0], right);
        unsure.rows.pop();
        unsure.add("x", 2, &[], &[vec![1.0, 5.0, 9.0], vec![1.0, 5.0, 9.0]]);
        let load_model = predict(&unsure, "x", &INPUTS, &machine(), 1e-3);
        assert!(load_model.checks[1..].iter().all(|check| check.error.is_none() && !check.off));
    }

    #[test]
    fn limit_of_old_way_bounds_prediction() {
        let load_model =
            |at_most| predict(&table([1.0; 2], 1.0), "x", &Inputs { at_most, ..INPUTS }, &machine(), 1e-3);
        let (free, bound) = (load_model(None), load_model(Some(4e6)));
        assert!(free.predictions[3].old > 5000.0, "{free:?}");
        assert!(
            (bound.predictions[3].old - 4000.0).abs() < 1e-6
                && bound.predictions[3].ratio > free.predictions[3].ratio
        );
    }

    #[test]
    fn mixed_load_contends_for_read_write_lock() {
        let of = MixedInputs {
            read: 1000.0,
            write: 3000.0,
            read_held: 900.0,
            write_held: 500.0,
            mix: Mix::ByPages(4),
            apart: 1.0,
        };
        let load_model = predict(&table([1.0; 2], 1.0), "x", &of, &machine(), 1e-3);
        assert!((load_model.held_share - 0.35).abs() < 1e-9);
        // A single thread sees no contention. Two threads contend for the old lock, but not for the
        // fine lock.
        assert!((of.old(&machine(), 1) / of.fine(1) - 1.0).abs() < 0.02);
        assert!(of.old(&machine(), 2) < 0.95 * of.fine(2));
        assert!((of.fine(2) / of.fine(1) - 2.0).abs() < 1e-9);
        assert!(load_model.predictions.windows(2).all(|two| two[1].ratio > two[0].ratio), "{load_model:?}");
        let by_thread = MixedInputs { mix: Mix::ByThread, apart: 0.5, ..of };
        assert!((by_thread.fine(2) - 0.5 * (1e6 + 1e6 / 3.0)).abs() < 1.0);
    }

    #[test]
    fn lock_free_readers_add_to_writers() {
        let of = HalfReads { read: 500.0, writes: INPUTS };
        let writer = INPUTS.fine(1);
        assert!((of.fine(2) - (2e6 + writer)).abs() < 1.0);
        // A single writer sees no contention but takes the old lock; several writers contend.
        assert!((of.old(&machine(), 2) / of.fine(2) - 1.0).abs() < 0.04);
        assert!(of.old(&machine(), 16) < of.fine(16) - 0.1 * INPUTS.fine(8));
        assert!(predict(&table([1.0; 2], 1.0), "x", &of, &machine(), 1e-3).predictions[3].ratio > 1.0);
    }
}
