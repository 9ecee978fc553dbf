//! Reads of pages in each form, from disks whose background work is done.

use std::hint::black_box;

use anyhow::Result;
use freestone::PAGE_BYTES;
use freestone::device::{Blocking, IoBuf};
use freestone_report::{Report, Row, Summary, Target, Unit};

use super::contenders::{Filled, PLAIN};
use crate::data::{Data, Order};
use crate::measure::{Side, Slices, Times, alternate};

/// Size of a read in order.
const LARGE_BYTES: usize = 128 << 10;
/// Contender whose pages are compressed alone by the algorithm of groups. Groups are judged by it.
const ALONE: &str = "zstd";
/// Bounds of the time of a random read and of the speed of reads in order, against pages alone.
const RANDOM_MAX: f64 = 4.0;
const IN_ORDER_MIN: f64 = 1.2;

/// Measures all disks in turn; `stored` are the pages that have an object. The slices together must be short: a page
/// that is read in three different seconds leaves its group.
pub fn run(disks: &[Filled], data: &Data, stored: &[u32], slices: Slices) -> Result<Report> {
    let grouped = |disk: &Filled| disk.ram.group_stat().map(|stat| stat.pages);
    let before: Vec<_> = disks.iter().map(grouped).collect();
    let order = Order::new(7, 0, stored.len() as u32);
    let random = measure(disks, slices, PAGE_BYTES, stored, |number| order.choice(number).into())?;
    let units = large_units(stored);
    let in_order = measure(disks, slices, LARGE_BYTES, &units, |number| number % units.len() as u64)?;
    let mut rows = Vec::new();
    for (number, disk) in disks.iter().enumerate() {
        for (what, times, bytes) in
            [("random 4 KiB", &random, PAGE_BYTES), ("128 KiB in order", &in_order, LARGE_BYTES)]
        {
            let micros = Summary::of(times[number].wall.iter().map(|ns| ns / 1e3));
            let mib = bytes as f64 / f64::from(1 << 20);
            let row = Row::new(format!("{what}: {}", disk.name), Unit::Micros, micros);
            rows.push(row.part("MiB/s", mib * 1e6 / micros.median));
        }
    }
    let index = |name| disks.iter().position(|disk| disk.name == name);
    for (number, disk) in disks.iter().enumerate() {
        for base in [PLAIN, ALONE] {
            let Some(base_at) = index(base).filter(|at| *at != number) else { continue };
            let (mut slower, mut faster) = (
                Row::ratio_of(
                    format!("time of a random 4 KiB read: {} / {base}", disk.name),
                    &random[number].wall,
                    &random[base_at].wall,
                ),
                Row::ratio_of(
                    format!("speed in order: {} / {base}", disk.name),
                    &in_order[base_at].wall,
                    &in_order[number].wall,
                ),
            );
            if let (Some(before), Some(after), ALONE) = (before[number], grouped(disk), base) {
                let left = 100.0 * before.saturating_sub(after) as f64 / before.max(1) as f64;
                slower = slower.target(Target::AtMost(RANDOM_MAX)).part("pages that left groups, %", left);
                faster = faster.target(Target::AtLeast(IN_ORDER_MIN));
            }
            rows.extend([slower.withhold_if_unsteady(), faster.withhold_if_unsteady()]);
        }
    }
    Ok(Report::new("density: reads", data.description.clone(), data.bytes(), "each its own")
        .note(
            "One thread calls read_at of the library; disks take turns. Groups are judged by zstd, the same \
             algorithm with each page alone. Only pages and units of 128 KiB without pages of one pattern are read, \
             unless every unit has such a page.",
        )
        .rows(rows))
}

/// Returns the numbers of the large units without a page of one pattern. If there are none, of all units with other pages.
fn large_units(stored: &[u32]) -> Vec<u32> {
    const PAGES: u32 = (LARGE_BYTES / PAGE_BYTES) as u32;
    let units = |least| {
        let units = stored.chunk_by(|a, b| a / PAGES == b / PAGES).filter(move |unit| unit.len() >= least);
        units.map(|unit| unit[0] / PAGES).collect::<Vec<_>>()
    };
    let whole = units(PAGES as usize);
    if whole.is_empty() { units(1) } else { whole }
}

/// Times reads of these units of `bytes` bytes each. `pick` returns the index of a read's unit.
fn measure(
    disks: &[Filled],
    slices: Slices,
    bytes: usize,
    units: &[u32],
    pick: impl Fn(u64) -> u64 + Copy,
) -> Result<Vec<Times>> {
    let mut sides: Vec<Box<dyn FnMut(u64, u64) + '_>> = Vec::new();
    for disk in disks {
        let mut into = IoBuf::zeroed(bytes)?;
        sides.push(Box::new(move |from, count| {
            for number in from..from + count {
                let offset = u64::from(units[pick(number) as usize]) * bytes as u64;
                assert!(
                    disk.ram.read_at(offset, black_box(&mut into)).is_ok(),
                    "{}: a read failed",
                    disk.name
                );
            }
        }));
    }
    let mut sides: Vec<Side<'_>> = sides.iter_mut().map(|side| &mut **side as Side<'_>).collect();
    Ok(alternate(slices, &mut sides))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_units_avoid_patterns_if_possible() {
        let whole: Vec<u32> = (3..96).collect();
        assert_eq!(large_units(&whole), [1, 2]);
        assert_eq!(large_units(&[5, 6, 70]), [0, 2]);
    }
}
