//! More cores than this machine has: a model whose numbers were all measured with one thread, or
//! with threads that share nothing.
//!
//! The old lock is a server that one thread at a time visits ([`crate::simulate`]). It is modelled
//! twice: as it is measured here, and handed over in turn as the kernel's spinlocks are; what is
//! gained is counted from the better one. Where reads and writes meet at a read-write lock, that is
//! what is simulated ([`crate::shared`]). The fine lock has no server: its threads share nothing
//! that is modelled, no memory bandwidth either, so its figure is an upper bound. What the model
//! says of 1 and 2 threads is set beside what was measured in the same run; no number of it was
//! chosen to fit there.

use crate::costs::Machine;
use crate::experiment::{Beyond, Check, Modelled, Table};
use crate::shared::{self, Mix, Visit};
use crate::simulate::{self, Costs, Discipline, Work};

/// Numbers of threads, each on a core of its own, that are modelled.
pub const BEYOND: [usize; 4] = [4, 8, 16, 48];
/// Numbers of threads that are measured as well.
const CHECKED: [usize; 2] = [1, 2];
/// A prediction that is further away from the measurement is flagged.
pub const ERROR_MAX: f64 = 0.15;

/// A load as it is known from measurements with one thread, or with threads that share nothing:
/// what it says of any number of threads that have a core each. Speeds are operations a second.
pub trait Speeds {
    /// With the old lock as it is measured here.
    fn old(&self, machine: &Machine, threads: usize) -> f64;
    /// With the old lock where whoever waits gets it in turn and nobody sleeps, as in the kernel.
    fn in_turn(&self, machine: &Machine, threads: usize) -> f64;
    fn fine(&self, threads: usize) -> f64;
    /// The part of one thread's time that it keeps others from the old lock.
    fn held_share(&self, machine: &Machine) -> f64;
    /// The measured numbers that went in, by name.
    fn inputs(&self, costs: &Costs) -> Vec<(&'static str, f64)>;
}

/// One lock that one thread at a time has; in nanoseconds an operation.
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
    /// Operations a second that the old way cannot exceed whatever its lock does.
    pub at_most: Option<f64>,
}

/// One read-write lock over reads and writes; in nanoseconds a page.
#[derive(Debug, Clone, Copy)]
pub struct Mixed {
    /// With the fine lock.
    pub read: f64,
    pub write: f64,
    /// Under the lock.
    pub read_held: f64,
    pub write_held: f64,
    pub mix: Mix,
    /// What two threads that share nothing do together, over what the numbers above make of them.
    pub apart: f64,
}

/// Half of the threads read and take no lock at all; the others are `writes`.
#[derive(Debug, Clone, Copy)]
pub struct HalfReads {
    pub read: f64,
    pub writes: Inputs,
}

/// How many times as long everything takes where the other CPUs work as well. `apart` is what two
/// threads that share nothing do, of what they would do if each were alone.
fn slower(threads: usize, apart: f64) -> f64 {
    // More than each alone is noise.
    if threads == 1 { 1.0 } else { (1.0 / apart).max(1.0) }
}

impl Inputs {
    fn with_old(&self, discipline: Discipline, machine: &Machine, threads: usize) -> f64 {
        let slower = self.slower(threads);
        let held = self.held * slower;
        let outside = (self.fine + self.visits * self.lock - self.held).max(0.0) * slower;
        let work = Work { outside, held, visits: self.visits };
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

    /// While it holds the lock and, where waiters look at it all the time, while its line is on the
    /// way.
    fn held_share(&self, machine: &Machine) -> f64 {
        let line = match self.discipline {
            Discipline::InTurn => machine.costs.line,
            Discipline::Parking => 0.0,
        };
        ((self.held + self.visits * line) / (self.fine + self.visits * self.lock)).min(1.0)
    }

    fn inputs(&self, costs: &Costs) -> Vec<(&'static str, f64)> {
        let mut inputs = vec![
            ("operation with the fine lock, ns", self.fine),
            ("under the old lock, ns", self.held),
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

impl Mixed {
    fn slower(&self, threads: usize) -> f64 {
        slower(threads, self.apart)
    }
}

impl Speeds for Mixed {
    fn old(&self, machine: &Machine, threads: usize) -> f64 {
        let slower = self.slower(threads);
        let visit =
            |all: f64, held: f64| Visit { outside: (all - held).max(0.0) * slower, held: held * slower };
        let (read, write) = (visit(self.read, self.read_held), visit(self.write, self.write_held));
        shared::speed(read, write, self.mix, machine.costs.line, threads)
    }

    /// It spins: the kernel's is no other.
    fn in_turn(&self, machine: &Machine, threads: usize) -> f64 {
        self.old(machine, threads)
    }

    fn fine(&self, threads: usize) -> f64 {
        let threads_speed = match self.mix {
            Mix::ByThread => threads.div_ceil(2) as f64 / self.read + (threads / 2) as f64 / self.write,
            // As many pages of one as of the other.
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
    /// The readers' speed, and the writers' by their number.
    fn both(&self, threads: usize, writes: impl Fn(usize) -> f64) -> f64 {
        let slower = self.writes.slower(threads);
        let reads = threads.div_ceil(2) as f64 * 1e9 / (self.read * slower);
        let writes = match threads / 2 {
            0 => 0.0,
            // What is known of one writer is of one that is alone; here it has readers beside it.
            1 => writes(1) / slower,
            many => writes(many),
        };
        reads + writes
    }
}

impl Speeds for HalfReads {
    fn old(&self, machine: &Machine, threads: usize) -> f64 {
        self.both(threads, |writers| self.writes.old(machine, writers))
    }

    fn in_turn(&self, machine: &Machine, threads: usize) -> f64 {
        self.both(threads, |writers| self.writes.in_turn(machine, writers))
    }

    fn fine(&self, threads: usize) -> f64 {
        self.both(threads, |writers| self.writes.fine(writers))
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

/// What the model says of the row `what` of a table; `unit` of the table's units are one operation
/// a second.
pub fn predict(table: &Table, what: &str, load: &dyn Speeds, machine: &Machine, unit: f64) -> Modelled {
    let both = |threads| [(table.old, load.old(machine, threads)), (table.ours, load.fine(threads))];
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
    let beyond = BEYOND.map(|threads| {
        let [(_, old), (_, ours)] = both(threads);
        let in_turn = load.in_turn(machine, threads);
        let ratio = ours / old.max(in_turn);
        Beyond { threads, old: old * unit, in_turn: in_turn * unit, ours: ours * unit, ratio }
    });
    Modelled {
        table: table.name.clone(),
        what: what.into(),
        inputs: load.inputs(&machine.costs),
        held_share: load.held_share(machine),
        checks,
        beyond: beyond.into(),
    }
}

#[cfg(test)]
mod tests {
    use freestone_report::Unit;

    use super::*;
    use crate::experiment::Better;

    const INPUTS: Inputs = Inputs {
        fine: 380.0,
        held: 100.0,
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
        // A lock whose waiters sleep is worse; what is gained is counted from the one that is
        // handed over in turn.
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

    #[test]
    fn what_the_old_way_cannot_exceed_bounds_it() {
        let modelled =
            |at_most| predict(&table([1.0; 2], 1.0), "x", &Inputs { at_most, ..INPUTS }, &machine(), 1e-3);
        let (free, bound) = (modelled(None), modelled(Some(4e6)));
        assert!(free.beyond[3].old > 5000.0, "{free:?}");
        assert!((bound.beyond[3].old - 4000.0).abs() < 1e-6 && bound.beyond[3].ratio > free.beyond[3].ratio);
    }

    #[test]
    fn reads_and_writes_under_one_read_write_lock() {
        let of = Mixed {
            read: 1000.0,
            write: 3000.0,
            read_held: 900.0,
            write_held: 500.0,
            mix: Mix::ByPages(4),
            apart: 1.0,
        };
        let modelled = predict(&table([1.0; 2], 1.0), "x", &of, &machine(), 1e-3);
        assert!((modelled.held_share - 0.35).abs() < 1e-9);
        // One thread meets nobody; two do, and the fine lock does not mind.
        assert!((of.old(&machine(), 1) / of.fine(1) - 1.0).abs() < 0.02);
        assert!(of.old(&machine(), 2) < 0.95 * of.fine(2));
        assert!((of.fine(2) / of.fine(1) - 2.0).abs() < 1e-9);
        assert!(modelled.beyond.windows(2).all(|two| two[1].ratio > two[0].ratio), "{modelled:?}");
        let by_thread = Mixed { mix: Mix::ByThread, apart: 0.5, ..of };
        assert!((by_thread.fine(2) - 0.5 * (1e6 + 1e6 / 3.0)).abs() < 1.0);
    }

    #[test]
    fn readers_that_take_no_lock_are_added_to_the_writers() {
        let of = HalfReads { read: 500.0, writes: INPUTS };
        let writer = INPUTS.fine(1);
        assert!((of.fine(2) - (2e6 + writer)).abs() < 1.0);
        // One writer meets no other, but takes the old lock; two do.
        assert!((of.old(&machine(), 2) / of.fine(2) - 1.0).abs() < 0.04);
        assert!(of.old(&machine(), 16) < of.fine(16) - 0.1 * INPUTS.fine(8));
        assert!(predict(&table([1.0; 2], 1.0), "x", &of, &machine(), 1e-3).beyond[3].ratio > 1.0);
    }
}
