//! Measurement of loops that take turns, and of the CPUs, memory and CPU time of processes.

pub mod machine;
pub(crate) mod process;
pub(crate) mod settle;

use std::time::{Duration, Instant};

use freestone_report::Summary;
use rustix::time::{ClockId, clock_gettime};

#[derive(Debug, Clone, Copy)]
pub struct Slices {
    /// Number of slices of each side.
    pub pairs: u32,
    pub slice: Duration,
}

/// A side of a comparison: runs the operations `from..from + count` of a fixed sequence.
pub type Side<'a> = &'a mut dyn FnMut(u64, u64);

/// Nanoseconds per operation, by slice.
#[derive(Debug, Clone, Default)]
pub struct Times {
    pub wall: Vec<f64>,
    /// CPU time of the thread, which excludes other programs.
    pub cpu: Vec<f64>,
}

impl Times {
    /// Returns the median wall-clock nanoseconds per operation.
    pub fn median(&self) -> f64 {
        median(&self.wall)
    }

    fn push(&mut self, ops: u64, side: Side<'_>, from: u64) {
        let (wall, cpu) = (Instant::now(), thread_clock());
        side(from, ops);
        let (wall, cpu) = (wall.elapsed(), thread_clock().saturating_sub(cpu));
        self.wall.push(wall.as_nanos() as f64 / ops as f64);
        self.cpu.push(cpu.as_nanos() as f64 / ops as f64);
    }
}

/// Returns the CPU time of the calling thread so far.
pub fn thread_clock() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns the median of at least one number.
pub fn median(of: &[f64]) -> f64 {
    Summary::of(of.iter().copied()).median
}

/// Runs the sides in turn and returns the times of each. All sides run the same operations in a
/// round; every other round uses the opposite order. The caller must have warmed up the sides.
pub fn alternate(slices: Slices, sides: &mut [Side<'_>]) -> Vec<Times> {
    let ops = calibrate(slices.slice, sides);
    let mut times = vec![Times::default(); sides.len()];
    for round in 0..slices.pairs {
        let from = u64::from(round) * ops;
        let mut order: Vec<usize> = (0..sides.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for side in order {
            times[side].push(ops, &mut *sides[side], from);
        }
    }
    times
}

/// Returns the number of operations with which the slowest side fills a slice.
fn calibrate(slice: Duration, sides: &mut [Side<'_>]) -> u64 {
    let mut fewest = u64::MAX;
    for side in sides {
        let mut ops = 64;
        loop {
            let start = Instant::now();
            side(0, ops);
            let took = start.elapsed();
            if took * 4 >= slice {
                fewest = fewest.min((ops as f64 * slice.as_secs_f64() / took.as_secs_f64()) as u64);
                break;
            }
            ops *= 2;
        }
    }
    fewest.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_run_the_same_operations() {
        let slices = Slices { pairs: 4, slice: Duration::from_micros(200) };
        let (mut a, mut b) = (Vec::new(), Vec::new());
        let work = |list: &mut Vec<(u64, u64)>, from, count| {
            list.push((from, count));
            for n in 0..count {
                std::hint::black_box(n);
            }
        };
        let times = alternate(slices, &mut [&mut |f, c| work(&mut a, f, c), &mut |f, c| work(&mut b, f, c)]);
        assert_eq!(times.len(), 2);
        assert!(times.iter().all(|t| t.wall.len() == 4 && t.cpu.len() == 4));
        assert_eq!(a[a.len() - 4..], b[b.len() - 4..]);
    }
}
