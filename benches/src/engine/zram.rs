//! `zram` benchmark: the library against the kernel's zram, with the same loop on both.

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;

use anyhow::Result;
use freestone::PAGE_BYTES;
use freestone::device::{Blocking, Flags, IoBuf};
use freestone::ram::Ram;
use freestone_report::{Report, Row, Summary, Target};

use super::setup::{Setup, mixing};
use super::zram_device::ZramDevice;
use crate::data::Order;
use crate::measure::machine;
use crate::measure::{Times, alternate};
use crate::options::{Options, Set};

/// Default data size, in bytes.
const BYTES: u64 = 512 << 20;
const LARGE_BYTES: usize = 128 << 10;

/// Runs the benchmark on every selected data set and returns a report for each.
pub fn run(options: &Options) -> Result<Vec<Report>> {
    let cpus = machine::allowed_cpus()?;
    machine::pin_to(cpus[cpus.len() - 1])?;
    let mut reports = Vec::new();
    for set in options.sets(&[Set::Fio, Set::Real]) {
        let device = match ZramDevice::claim(&options.zram, "lz4", options.bytes(BYTES)) {
            Ok(device) => device,
            Err(error) if options.if_present => {
                println!("== zram | omitted: {error:#}\n");
                break;
            }
            Err(error) => return Err(error),
        };
        reports.push(run_set(set, &Setup::new(set, BYTES, options)?, &device, options)?);
    }
    machine::pin_to_any(&cpus)?;
    Ok(reports)
}

/// Operations that the RAM disk and the zram device have in common.
trait Disk {
    fn read(&self, offset: u64, into: &mut [u8]) -> bool;
    fn write(&self, offset: u64, data: &[u8]) -> bool;
}

impl Disk for Ram {
    fn read(&self, offset: u64, into: &mut [u8]) -> bool {
        self.read_at(offset, into).is_ok()
    }
    fn write(&self, offset: u64, data: &[u8]) -> bool {
        self.write_at(offset, data, Flags::empty()).is_ok()
    }
}

impl Disk for File {
    fn read(&self, offset: u64, into: &mut [u8]) -> bool {
        self.read_exact_at(into, offset).is_ok()
    }
    fn write(&self, offset: u64, data: &[u8]) -> bool {
        self.write_all_at(data, offset).is_ok()
    }
}

/// Reads the given units of `into.len()` bytes.
fn reads(disk: &impl Disk, units: impl Iterator<Item = u32>, into: &mut [u8]) {
    let bytes = into.len() as u64;
    for unit in units {
        assert!(disk.read(u64::from(unit) * bytes, black_box(into)), "a read of unit {unit} failed");
        black_box(&*into);
    }
}

/// Writes units of `bytes` bytes each, with the content of another unit.
fn writes(disk: &impl Disk, units: impl Iterator<Item = (u32, u32)>, pages: &[u8], bytes: usize) {
    for (unit, content) in units {
        let data = black_box(&pages[content as usize * bytes..][..bytes]);
        assert!(disk.write(u64::from(unit) * bytes as u64, data), "a write of unit {unit} failed");
    }
}

fn run_set(set: Set, setup: &Setup, device: &ZramDevice, options: &Options) -> Result<Report> {
    let (ram, kernel, pages) = (&setup.ram, device.file()?, &setup.pages);
    device.fill(setup.data.pages, |page, into| setup.data.read(page, into))?;
    // Warm up and mix zram's pool in the same way as that of the RAM disk.
    writes(kernel, mixing(setup.data.pages), pages, PAGE_BYTES);
    let (slots, contents) = setup.orders();
    let units = (setup.data.bytes() / LARGE_BYTES as u64) as u32;
    let (large, large_contents) = (Order::new(5, 0, units), Order::new(6, 0, units));

    let slices = options.slices();
    let mut rows = vec![memory(setup, device)?];
    let small_write = if set == Set::Fio { 2.0 } else { 1.2 };
    for (bytes, order, contents, name, goals) in [
        (PAGE_BYTES, slots, contents, "4 KiB", (1.6, small_write)),
        (LARGE_BYTES, large, large_contents, "128 KiB", (1.3, 1.0)),
    ] {
        let (mut ours, mut theirs) = (IoBuf::zeroed(bytes)?, IoBuf::zeroed(bytes)?);
        let times = alternate(
            slices,
            &mut [
                &mut |from, count| reads(ram, order.choices(from, count), &mut ours),
                &mut |from, count| reads(kernel, order.choices(from, count), &mut theirs),
            ],
        );
        rows.extend(compare(&format!("random {name} reads"), &times, goals.0));
        let both = |from, count| order.choices(from, count).zip(contents.choices(from, count));
        let times = alternate(
            slices,
            &mut [&mut |from, count| writes(ram, both(from, count), pages, bytes), &mut |from, count| {
                writes(kernel, both(from, count), pages, bytes);
            }],
        );
        rows.extend(compare(&format!("random {name} rewrites"), &times, goals.1));
    }
    Ok(Report::new("zram", setup.data.description.clone(), setup.data.bytes(), "lz4 on both sides")
        .note(setup.census_note())
        .note(
            "Ratios are speeds: above 1 is faster than the kernel; less memory is better. Memory is everything \
             that either side uses: pool, table, handles, and on our side back-references and streams too. One \
             synchronous loop, pinned to one CPU: pread and pwrite with O_DIRECT on the kernel's device, \
             read_at and write_at of the library. The kernel's side includes system calls and the block layer, \
             which a program has to pay.",
        )
        .rows(rows)
        .print())
}

/// Returns the row that compares the memory of both disks for the same pages, right after all pages
/// were rewritten.
fn memory(setup: &Setup, device: &ZramDevice) -> Result<Row> {
    let (stat, memory) = (setup.ram.mm_stat(), setup.ram.memory_overhead());
    let beside = memory.leaves_bytes + memory.backrefs_bytes + memory.metadata_bytes + memory.streams_bytes;
    let ours = (stat.mem_used_total + beside) as f64 / setup.data.bytes() as f64;
    let kernel = device.stat()?.memory(setup.data.pages) as f64 / setup.data.bytes() as f64;
    let row = Row::ratio("memory a stored byte / zram", Summary::one(ours / kernel)).with_verdict(false);
    Ok(row.part("ours", ours).part("zram", kernel))
}

fn compare(what: &str, times: &[Times], target: f64) -> Vec<Row> {
    let [ours, kernel] = times else { return Vec::new() };
    vec![
        Row::ratio_of(format!("{what} / zram"), &kernel.wall, &ours.wall)
            .target(Target::AtLeast(target))
            .with_verdict(true)
            .part("ns", ours.median())
            .part("zram ns", kernel.median()),
        Row::ratio_of(format!("{what} / zram, CPU time"), &kernel.cpu, &ours.cpu).with_verdict(true),
    ]
}
