//! Many servers of the real program that start at once, on one host and on several, which are caches of
//! their own: each fork boots as a guest did, and what goes over the line to the store is counted and held
//! against the calculation in `model.rs`.

use std::path::Path;

use anyhow::Result;
use freestone_report::{Report, Row, Summary, Target, Unit, mib};

use super::boot::BYTES_MAX;
use super::facts::Facts;
use super::kit::Kit;
use super::model::{Asked, Fleet, Kind, Start, off};
use super::remote::{BITS_PER_SECOND, Remote};
use super::servers::{Bench, Counted};
use crate::measure::median;
use crate::options::Options;
use crate::place::Place;

const ROUNDS: u32 = 3;
const ROUNDS_QUICK: u32 = 1;
/// What is measured, in a smoke run, and what the model is held against.
const WHOLE: Fleet = Fleet { hosts: 1, servers: 20, forks: 10 };
const WHOLE_QUICK: Fleet = Fleet { hosts: 1, servers: 3, forks: 4 };
const OTHERS: [Fleet; 5] = [
    Fleet { hosts: 1, servers: 1, forks: 10 },
    Fleet { hosts: 1, servers: 5, forks: 10 },
    Fleet { hosts: 1, servers: 20, forks: 2 },
    Fleet { hosts: 2, servers: 5, forks: 2 },
    Fleet { hosts: 4, servers: 5, forks: 2 },
];
const OTHERS_QUICK: [Fleet; 2] =
    [Fleet { hosts: 1, servers: 1, forks: 1 }, Fleet { hosts: 2, servers: 2, forks: 2 }];
/// What the model is asked for at last.
const LARGE: Fleet = Fleet { hosts: 1000, servers: 20, forks: 10 };
/// Pauses are so many times shorter than the guest's, whose processor was slow.
const PAUSES_BY: u32 = 4;
/// After so long, twice the time to the store and back, a read is sent a second time, where that is tried.
const HEDGE: &str = "40ms";
/// Lines of stores, in Gbit/s.
const LINES_GBIT: [u64; 2] = [10, 100];

/// Rows of one kind of start of the whole fleet.
struct Times {
    name: String,
    seconds: Vec<f64>,
    counted: Vec<Counted>,
}

impl Times {
    fn new(name: &str) -> Self {
        Self { name: name.to_owned(), seconds: Vec::new(), counted: Vec::new() }
    }

    /// `expected` are the times from a local file, and what the model says, where that is known.
    fn rows(&self, facts: &Facts, expected: Option<(&[f64], &Asked)>) -> Vec<Row> {
        let (name, counted) = (&self.name, &self.counted);
        let most = counted.iter().map(|counted| counted.most).max().unwrap_or(0);
        let row =
            Row::one(format!("{name}: the most that one chunk left the store"), Unit::Count, most as f64);
        // A read that is sent twice may leave it twice.
        let mut rows = vec![if expected.is_some() { row.target(Target::AtMost(1.0)) } else { row }];
        let bytes = Summary::of(counted.iter().map(|of| of.bytes as f64 / facts.chunks.bytes as f64));
        let bytes = Row::new(format!("{name}: bytes that came / chunks that were read"), Unit::Ratio, bytes)
            .part("came MiB", mib(counted.last().map_or(0, |of| of.bytes)))
            .part("chunks that were read MiB", mib(facts.chunks.bytes));
        rows.push(if expected.is_some() { bytes.target(Target::AtMost(BYTES_MAX)) } else { bytes });
        let requests = Summary::of(counted.iter().map(|of| of.asked.values().sum::<u64>() as f64));
        let row = Row::new(format!("{name}: requests"), Unit::Count, requests);
        rows.push(counted.last().map_or(row.clone(), |of| with_kinds(row, &of.asked)));
        if let Some((local, model)) = expected {
            let off = counted.iter().map(|counted| off(&counted.asked, model)).max().unwrap_or(0);
            let name_of_row = format!("{name}: requests that the model has not");
            rows.push(Row::one(name_of_row, Unit::Count, off as f64).target(Target::AtMost(0.0)));
            let row =
                Row::over(format!("{name}: until all have booted / from a local file"), &self.seconds, local);
            rows.push(row.part("s", median(&self.seconds)).part("local s", median(local)));
        }
        rows
    }
}

fn with_kinds(row: Row, asked: &Asked) -> Row {
    asked.iter().fold(row, |row, (kind, count)| row.part(kind.name(), *count as f64))
}

/// Starts the whole fleet, from an empty cache each time.
fn whole(bench: &Bench<'_>, options: &Options) -> Result<Report> {
    let fleet = if options.quick { WHOLE_QUICK } else { WHOLE };
    let (mut no_trace, mut trace) = (Times::new("no trace"), Times::new("its trace known"));
    let mut hedged = Times::new(&format!("no trace, hedge={HEDGE}"));
    let mut local = Vec::new();
    let start = |prefetch, hedge: Option<&str>, times: &mut Times| -> Result<()> {
        let caches = bench.caches(fleet)?;
        let device = |host: u64| bench.device(Start::Empty, caches[host as usize].path(), prefetch, hedge);
        let (seconds, counted) = bench.counted(|| {
            let (seconds, servers) = bench.start(fleet, &device, Some(PAUSES_BY))?;
            Bench::ended(servers)?;
            Ok(seconds)
        })?;
        times.seconds.push(seconds);
        times.counted.push(counted);
        Ok(())
    };
    let mut from_file = || -> Result<()> {
        let device = format!("file,path={},readonly=yes", bench.kit.file.display());
        let (seconds, servers) = bench.start(fleet, &|_| device.clone(), Some(PAUSES_BY))?;
        local.push(seconds);
        Bench::ended(servers)
    };
    for round in 0..options.rounds(ROUNDS, ROUNDS_QUICK) {
        // Every other round in the opposite order.
        if round % 2 == 0 {
            from_file()?;
            start(false, None, &mut no_trace)?;
            start(true, None, &mut trace)?;
        } else {
            start(true, None, &mut trace)?;
            start(false, None, &mut no_trace)?;
            from_file()?;
        }
    }
    start(false, Some(HEDGE), &mut hedged)?;
    let facts = &bench.facts;
    let model = |prefetch| fleet.asks(Start::Empty, prefetch, facts).0;
    let rows = [
        no_trace.rows(facts, Some((&local, &model(false)))),
        trace.rows(facts, Some((&local, &model(true)))),
        hedged.rows(facts, None),
    ];
    let (kit, asked) = (bench.kit, bench.reads.iter().map(|read| read.len as u64).sum::<u64>());
    Ok(Report::new("images: fleet", kit.data.description.clone(), kit.data.bytes(), "zstd")
        .note(format!(
            "{fleet}: servers of the program that begin at once and share a cache, which is empty; each fork boots by \
             an NBD connection of its own: {} reads, {:.1} MiB, benches/data/boot.trace, with a quarter of its pauses. \
             They read {} chunks, {:.1} MiB compressed. Counted on the line to {}, of 20 ms to and fro and 1 Gbit/s; \
             bytes have answers' headers, manifest, maps, tags and traces in them. The local file, in the page cache, \
             has the same servers and forks. hedge={HEDGE}: a read that is not answered by then is sent again, so a chunk may \
             leave the store twice.",
            bench.reads.len(),
            mib(asked),
            facts.chunks.count,
            mib(facts.chunks.bytes),
            bench.remote.name
        ))
        .rows(rows.into_iter().flatten().collect()))
}

/// Holds the model against what fleets of several sizes ask. Returns the most chunks of a host that came and
/// were not read, too, without a trace and with one.
fn against_model(bench: &Bench<'_>, options: &Options) -> Result<(Report, [u64; 2])> {
    let fleets = if options.quick { &OTHERS_QUICK[..] } else { &OTHERS };
    let (mut rows, mut ahead) = (Vec::new(), [0; 2]);
    for fleet in fleets {
        for prefetch in [false, true] {
            let caches = bench.caches(*fleet)?;
            let mut servers = Vec::new();
            for start in [Start::Empty, Start::Running, Start::Cached, Start::Known] {
                let device = |host: u64| bench.device(start, caches[host as usize].path(), prefetch, None);
                let ((), counted) = bench.counted(|| {
                    if start == Start::Running {
                        return bench.boot(&mut servers, fleet.forks, None);
                    }
                    Bench::ended(std::mem::take(&mut servers))?;
                    servers = bench.start(*fleet, &device, None)?.1;
                    Ok(())
                })?;
                let (model, _) = fleet.asks(start, prefetch, &bench.facts);
                let too_often = counted.most.saturating_sub(fleet.hosts);
                let off = (off(&counted.asked, &model) + too_often) as f64;
                let trace = if prefetch { "trace known" } else { "no trace" };
                let what = format!("{fleet}: {}, {trace}: requests that the model has not", start.name());
                rows.push(with_kinds(
                    Row::one(what, Unit::Count, off).target(Target::AtMost(0.0)),
                    &counted.asked,
                ));
                let not_read = counted.asked.get(&Kind::Ahead).copied().unwrap_or(0);
                let ahead = &mut ahead[usize::from(prefetch)];
                *ahead = not_read.div_ceil(fleet.hosts).max(*ahead);
            }
            Bench::ended(servers)?;
        }
    }
    for (name, ahead) in ["no trace", "trace known"].into_iter().zip(ahead) {
        let most = ahead as f64 / bench.facts.chunks.count as f64;
        rows.push(
            Row::one(
                format!("{name}: chunks that came and were not read / chunks that were read, at most"),
                Unit::Ratio,
                most,
            )
            .target(Target::AtMost(BYTES_MAX - 1.0))
            .part("of a host", ahead as f64),
        );
    }
    let kit = bench.kit;
    let report = Report::new("images: fleets and the model", kit.data.description.clone(), kit.data.bytes(), "zstd")
        .note(
            "Fleets of several sizes, without pauses, each from an empty cache, then running (all boot once more), then \
             started anew. Each host has a cache of its own. What is counted is beside; the row counts by how much kinds \
             of requests differ from the model (benches/src/images/model.rs), and how much more often than once for each \
             host a chunk came. What was fetched ahead and not read is no part of the model.",
        )
        .rows(rows);
    Ok((report, ahead))
}

/// What the model says of a large fleet.
fn large(bench: &Bench<'_>, ahead: [u64; 2]) -> Report {
    let facts = &bench.facts;
    let mut rows = Vec::new();
    for prefetch in [false, true] {
        for start in [Start::Empty, Start::Cached, Start::Known, Start::Running] {
            let (asked, bytes) = LARGE.asks(start, prefetch, facts);
            let trace = if prefetch { "trace known" } else { "no trace" };
            let requests = asked.values().sum::<u64>() as f64;
            let row = Row::one(format!("{}, {trace}: requests", start.name()), Unit::Count, requests);
            let mut row = with_kinds(row, &asked).part("GiB", mib(bytes) / 1024.0);
            for gbit in LINES_GBIT {
                row = row
                    .part(format!("s at {gbit} Gbit/s"), (bytes * 8) as f64 / (gbit * 1_000_000_000) as f64);
            }
            if start == Start::Empty {
                row =
                    row.part("chunks not read, at most", (ahead[usize::from(prefetch)] * LARGE.hosts) as f64);
            }
            rows.push(row);
        }
    }
    let (_, host) = Fleet { hosts: 1, ..LARGE }.asks(Start::Empty, true, facts);
    rows.push(Row::one(
        "a host by itself: seconds at 1 Gbit/s for what it asks, nothing cached",
        Unit::Seconds,
        (host * 8) as f64 / BITS_PER_SECOND as f64,
    ));
    let kit = bench.kit;
    Report::new(format!("images: what {} hosts ask", LARGE.hosts), kit.data.description.clone(), kit.data.bytes(), "zstd")
        .note(format!(
            "{LARGE} of each, by the model, from the facts of this image: {} chunks are read, {:.1} MiB; {} maps, \
             {:.2} MiB; a manifest of {} bytes, a trace of {}, a tag of {}, freestone.json of {}. Bytes are those of \
             objects, without what HTTP adds; times are those of the bytes on a line of that speed alone.",
            facts.chunks.count,
            mib(facts.chunks.bytes),
            facts.maps.count,
            mib(facts.maps.bytes),
            facts.manifest,
            facts.trace,
            facts.tag,
            facts.domain
        ))
        .rows(rows)
}

pub fn run(
    kit: &Kit,
    remote: &Remote,
    place: &Place,
    freestone: &Path,
    options: &Options,
) -> Result<Vec<Report>> {
    let bench = Bench::new((kit, remote), place, freestone, options)?;
    let whole = whole(&bench, options)?.print();
    let (checked, ahead) = against_model(&bench, options)?;
    Ok(vec![whole, checked.print(), large(&bench, ahead).print()])
}
