//! `density` benchmark: memory a stored byte of real files, in each form that a RAM disk can store and in the
//! peers, when the background work is done. Also the price: CPU time, slower reads, and requests to hot pages
//! meanwhile.

mod chart;
mod contenders;
mod forks;
mod hot;
mod peers;
mod reads;

use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;
use freestone::PAGE_BYTES;
use freestone_report::{Report, Row, Summary, Target, Unit, mib};

use self::chart::Line;
use self::contenders::{Filled, PLAIN};
use self::peers::{NBDKIT, ZRAM};
use crate::compare::peers::{PeerArgs, Peers};
use crate::data::Data;
use crate::engine::bare::same_filled;
use crate::measure::Slices;
use crate::options::{Options, Set};
use crate::programs::run_dir::RunDir;

/// Default data size, in bytes.
const BYTES: u64 = 512 << 20;
/// Time without access after which background work begins (the second value with --quick). Filling a disk takes
/// less, so the CPU time of the fill is not counted.
const IDLE: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(1)];
/// Largest slice of reads. All slices together last less than three seconds.
const SLICE_MAX: Duration = Duration::from_millis(10);
/// Targets: against lz4, and against the densest peer.
const OF_PLAIN_MAX: f64 = 0.75;
const OF_NBDKIT_MAX: f64 = 1.0;
const GROUPS: &str = "auto_group";

/// Options of the `density` benchmark.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Parts to run, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    part: Vec<PartName>,
    #[command(flatten)]
    peers: PeerArgs,
}

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PartName {
    /// Memory, CPU time and reads of each data set; with a picture.
    Sets,
    /// Requests to hot pages while the background works, on the first data set.
    Hot,
    /// 16 forks of 4 related images, made from the Debian disk, or else from the first data set.
    Forks,
}

/// Runs the selected parts and returns their reports. A data set that cannot be had is named in each report.
pub fn run(args: &Args, options: &Options) -> Result<Vec<Report>> {
    let wanted = |part| args.part.is_empty() || args.part.contains(&part);
    let idle = IDLE[usize::from(options.quick)];
    let usual = [Set::Real, Set::Debian, Set::Postgresql, Set::Guest];
    let (mut sets, mut notes) = (Vec::new(), Vec::new());
    for set in options.sets(if options.quick { &usual[..1] } else { &usual }) {
        match Data::open(set, options.bytes(BYTES), options) {
            Ok(data) => sets.push((set, data)),
            Err(error) => {
                let name = format!("{set:?}").to_lowercase();
                notes.push(format!("Left out: the data set {name}: {error:#}."));
            }
        }
    }
    for note in &notes {
        eprintln!("{note}");
    }
    let mut reports = Vec::new();
    let mut add = |mut report: Report| {
        report.notes.extend(notes.iter().cloned());
        reports.push(report.print());
    };
    let Some((_, first)) = sets.first() else { anyhow::bail!("no data set: {}", notes.join(" ")) };
    if wanted(PartName::Sets) {
        let (peers, run_dir) = (Peers::find(&args.peers)?, RunDir::new(&options.data_dir, "density-")?);
        for (_, data) in &sets {
            let set = SetBench {
                args,
                options,
                peers: &peers,
                run_dir: &run_dir,
                data,
                stored: stored_pages(data)?,
            };
            set.run(idle)?.into_iter().for_each(&mut add);
        }
    }
    if wanted(PartName::Hot) {
        add(hot::run(first, idle, options)?);
    }
    if wanted(PartName::Forks) {
        let debian = sets.iter().find(|(set, _)| *set == Set::Debian).map_or(first, |(_, data)| data);
        add(forks::run(debian, idle, options.quick)?);
    }
    Ok(reports)
}

/// Returns the numbers of the pages that do not repeat one pattern. Pages of a pattern, such as zeroes, have no object.
fn stored_pages(data: &Data) -> Result<Vec<u32>> {
    let (mut stored, mut page) = (Vec::new(), [0; PAGE_BYTES]);
    for number in 0..data.pages {
        data.read(number, &mut page)?;
        if same_filled(&page).is_none() {
            stored.push(number as u32);
        }
    }
    Ok(stored)
}

struct SetBench<'a> {
    args: &'a Args,
    options: &'a Options,
    peers: &'a Peers,
    run_dir: &'a RunDir,
    data: &'a Data,
    stored: Vec<u32>,
}

impl SetBench<'_> {
    fn run(&self, idle: Duration) -> Result<[Report; 2]> {
        let Self { options, data, .. } = *self;
        let contenders = contenders::all(idle);
        let disks: Vec<Filled> =
            contenders.iter().map(|contender| contender.fill(data, options.quick)).collect::<Result<_>>()?;
        let usual = options.slices();
        let slices = Slices { slice: usual.slice.min(SLICE_MAX), ..usual };
        let reads = reads::run(&disks, data, &self.stored, slices)?;
        Ok([self.memory(&disks)?, reads])
    }

    fn memory(&self, disks: &[Filled]) -> Result<Report> {
        let Self { options, data, .. } = *self;
        let stored = self.stored.len() as f64 * PAGE_BYTES as f64;
        let (mut notes, mut peers) = (Vec::new(), Vec::new());
        let nbdkit = peers::nbdkit(self.peers, self.run_dir, data);
        let measured = [(NBDKIT, nbdkit), (ZRAM, peers::zram(&options.zram, data))];
        for (name, bytes) in measured {
            match bytes {
                Ok(bytes) => peers.push((name, bytes)),
                Err(error) if name == NBDKIT && self.args.peers.require_peers => return Err(error),
                Err(error) => {
                    notes.push(format!("Absent: {name}: {}.", self.peers.shown(&format!("{error:#}"))));
                }
            }
        }
        let a_byte = |bytes: u64| bytes as f64 / stored;
        let row = |name: &str, bytes| {
            Row::ratio(format!("memory a stored byte: {name}"), Summary::one(a_byte(bytes)))
                .part("MiB", mib(bytes))
        };
        let mut rows = Vec::new();
        for disk in disks {
            let peak = disk.timeline.iter().map(|(_, bytes)| *bytes).max().unwrap_or(disk.memory);
            let row = row(disk.name, disk.memory).part("peak MiB", mib(peak));
            rows.push(row.part("after compact MiB", mib(disk.compacted)));
        }
        rows.extend(peers.iter().map(|(name, bytes)| row(name, *bytes)));
        let bases = disks.iter().map(|disk| (disk.name, disk.memory)).chain(peers.iter().copied());
        for (base, bytes) in bases.filter(|(name, _)| [PLAIN, NBDKIT, ZRAM].contains(name)) {
            for disk in disks.iter().filter(|disk| disk.name != base) {
                let ratio = Summary::one(disk.memory as f64 / bytes as f64);
                let row = Row::ratio(format!("memory: {} / {base}", disk.name), ratio);
                rows.push(match (disk.name, base) {
                    (GROUPS, PLAIN) => row.target(Target::AtMost(OF_PLAIN_MAX)),
                    (GROUPS, NBDKIT) => row.target(Target::AtMost(OF_NBDKIT_MAX)).with_verdict(false),
                    (_, PLAIN) => row,
                    _ => row.with_verdict(false),
                });
            }
        }
        rows.extend(disks.iter().filter_map(|disk| cpu_row(disk, disks[0].memory)));
        let chart = self.draw(disks, &peers, stored)?;
        let patterns = data.pages - self.stored.len() as u64;
        Ok(Report {
            chart: Some(chart),
            notes,
            ..Report::new("density: memory", data.description.clone(), data.bytes(), "each its own")
        }
        .note(format!(
            "Stored bytes: pages that do not repeat one pattern, {:.0} MiB; {patterns} pages do. Memory of our disks: pool, \
             tables and compression streams, by their own statistics, when the background no longer changes them; after \
             recompress by hand also compact. Of nbdkit: growth of its process and of its files in memory. Of zram: pool, slots and handles. \
             CPU: of this process after the last write, with pages idle for {} s.",
            stored / f64::from(1 << 20),
            IDLE[usize::from(options.quick)].as_secs()
        ))
        .rows(rows))
    }

    /// Draws the memory over time, and returns the name of the picture, which is beside the JSON.
    fn draw(&self, disks: &[Filled], peers: &[(&str, u64)], stored: f64) -> Result<String> {
        let data = self.data.description.split(':').next().unwrap_or_default();
        let name = format!("density-{data}.svg");
        let json = self.options.json_file("density");
        let path = json.with_file_name(&name);
        if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
            std::fs::create_dir_all(dir)?;
        }
        let mut lines: Vec<Line> = Vec::new();
        for disk in disks {
            let steps = disk.timeline.iter().map(|(at, bytes)| (*at, *bytes as f64 / stored)).collect();
            lines.push(Line { name: disk.name.into(), steps });
        }
        for (name, bytes) in peers {
            lines.push(Line { name: (*name).into(), steps: vec![(Duration::ZERO, *bytes as f64 / stored)] });
        }
        chart::draw(&format!("Memory over time: {data}"), &lines, &path)?;
        Ok(name)
    }
}

/// Returns the row of the CPU time for each percent of lz4's memory that was gained, if the disk has such work.
fn cpu_row(disk: &Filled, plain: u64) -> Option<Row> {
    let (cpu, took) = disk.spent?;
    let gained = 100.0 * (1.0 - disk.memory as f64 / plain as f64);
    let name = format!("background CPU a percent: {}", disk.name);
    // Without a gain there is no price.
    let row = if gained > 0.0 {
        Row::single(name, Unit::Seconds, cpu / gained)
    } else {
        Row::absent(name, Unit::Seconds)
    };
    Some(row.part("CPU s", cpu).part("gained %", gained).part("took s", took.as_secs_f64()))
}
