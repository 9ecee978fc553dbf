//! `fleet` part: many servers of the real program start at once, on one or several hosts with a cache each.
//! Every fork replays the recorded boot of a guest. The requests to the object store are counted and compared
//! with the model in `model.rs`.

use std::path::Path;

use anyhow::Result;
use freestone_report::{Report, Row, Summary, Target, Unit, mib};

use super::boot::BYTES_MAX;
use super::model::{Fleet, Kind, RequestCounts, Start, mismatches};
use super::remote::{BITS_PER_SECOND, Remote};
use super::requested_objects::RequestedObjects;
use super::servers::{Bench, Traffic};
use super::test_image::TestImage;
use crate::measure::median;
use crate::options::Options;
use crate::programs::run_dir::RunDir;

const ROUNDS: u32 = 3;
const ROUNDS_QUICK: u32 = 1;
/// Fleet whose start is measured in a full run; `WHOLE_QUICK` in a smoke run. The other fleets are compared
/// with the model.
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
/// Large fleet for which the model is evaluated.
const LARGE: Fleet = Fleet { hosts: 1000, servers: 20, forks: 10 };
/// Divisor of the guest's recorded pauses between reads, which are long because its processor was slow.
const PAUSES_BY: u32 = 4;
/// Hedge time of the hedged runs: a second read is sent after twice the round trip to the object store.
const HEDGE: &str = "40ms";
/// Speeds of the object store's network link in Gbit/s, for which the transfer time of a large fleet is
/// computed.
const LINES_GBIT: [u64; 2] = [10, 100];

/// Runs of the whole fleet with one kind of start.
struct FleetRuns {
    name: String,
    seconds: Vec<f64>,
    traffic: Vec<Traffic>,
}

impl FleetRuns {
    fn new(name: &str) -> Self {
        Self { name: name.to_owned(), seconds: Vec::new(), traffic: Vec::new() }
    }

    /// Returns the rows of the report. `expected` has the times from a local file and the requests of the
    /// model; None for hedged runs.
    fn rows(&self, facts: &RequestedObjects, expected: Option<(&[f64], &RequestCounts)>) -> Vec<Row> {
        let (name, traffic) = (&self.name, &self.traffic);
        let max_fetches = traffic.iter().map(|traffic| traffic.max_fetches).max().unwrap_or(0);
        let row = Row::single(
            format!("{name}: the most that one chunk left the store"),
            Unit::Count,
            max_fetches as f64,
        );
        // A hedged read may fetch a chunk twice.
        let mut rows = vec![if expected.is_some() { row.target(Target::AtMost(1.0)) } else { row }];
        let bytes = Summary::of(traffic.iter().map(|of| of.bytes as f64 / facts.chunks.bytes as f64));
        let bytes = Row::new(format!("{name}: bytes that came / chunks that were read"), Unit::Ratio, bytes)
            .part("came MiB", mib(traffic.last().map_or(0, |of| of.bytes)))
            .part("chunks that were read MiB", mib(facts.chunks.bytes));
        rows.push(if expected.is_some() { bytes.target(Target::AtMost(BYTES_MAX)) } else { bytes });
        let requests = Summary::of(traffic.iter().map(|of| of.request_counts.values().sum::<u64>() as f64));
        let row = Row::new(format!("{name}: requests"), Unit::Count, requests);
        rows.push(traffic.last().map_or(row.clone(), |of| with_kinds(row, &of.request_counts)));
        if let Some((local, model)) = expected {
            let mismatches =
                traffic.iter().map(|traffic| mismatches(&traffic.request_counts, model)).max().unwrap_or(0);
            let name_of_row = format!("{name}: requests that the model has not");
            rows.push(Row::single(name_of_row, Unit::Count, mismatches as f64).target(Target::AtMost(0.0)));
            let row = Row::ratio_of(
                format!("{name}: until all have booted / from a local file"),
                &self.seconds,
                local,
            );
            rows.push(row.part("s", median(&self.seconds)).part("local s", median(local)));
        }
        rows
    }
}

fn with_kinds(row: Row, request_counts: &RequestCounts) -> Row {
    request_counts.iter().fold(row, |row, (kind, count)| row.part(kind.name(), *count as f64))
}

/// Starts the whole fleet several times, each time with an empty cache.
fn run_whole_fleet(bench: &Bench<'_>, options: &Options) -> Result<Report> {
    let fleet = if options.quick { WHOLE_QUICK } else { WHOLE };
    let (mut no_trace, mut trace) = (FleetRuns::new("no trace"), FleetRuns::new("its trace known"));
    let mut hedged = FleetRuns::new(&format!("no trace, hedge={HEDGE}"));
    let mut local = Vec::new();
    let start = |prefetch, hedge: Option<&str>, times: &mut FleetRuns| -> Result<()> {
        let caches = bench.caches(fleet)?;
        let device = |host: u64| bench.device(Start::Empty, caches[host as usize].path(), prefetch, hedge);
        let (seconds, traffic) = bench.measure_traffic(|| {
            let (seconds, servers) = bench.start(fleet, &device, Some(PAUSES_BY))?;
            Bench::end_servers(servers)?;
            Ok(seconds)
        })?;
        times.seconds.push(seconds);
        times.traffic.push(traffic);
        Ok(())
    };
    let mut from_file = || -> Result<()> {
        let device = format!("file,path={},readonly=yes", bench.test_image.file.display());
        let (seconds, servers) = bench.start(fleet, &|_| device.clone(), Some(PAUSES_BY))?;
        local.push(seconds);
        Bench::end_servers(servers)
    };
    for round in 0..options.rounds(ROUNDS, ROUNDS_QUICK) {
        // Every other round uses the opposite order.
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
    let model = |prefetch| fleet.expected_requests(Start::Empty, prefetch, facts).0;
    let rows = [
        no_trace.rows(facts, Some((&local, &model(false)))),
        trace.rows(facts, Some((&local, &model(true)))),
        hedged.rows(facts, None),
    ];
    let (test_image, read_bytes) =
        (bench.test_image, bench.reads.iter().map(|read| read.len as u64).sum::<u64>());
    Ok(Report::new("images: fleet", test_image.data.description.clone(), test_image.data.bytes(), "zstd")
        .note(format!(
            "{fleet}: servers of the program that start at once and share an empty cache. Each fork boots over \
             its own NBD connection: {} reads, {:.1} MiB, benches/data/boot.trace, with a quarter of its \
             pauses. They read {} chunks, {:.1} MiB compressed. Counted on the link to {}, with a round trip \
             of 20 ms and 1 Gbit/s; bytes include HTTP headers, manifest, maps, tags and traces. The local \
             file, in the page cache, has the same servers and forks. hedge={HEDGE}: a read without a reply by \
             then is sent again, so a chunk may be fetched twice.",
            bench.reads.len(),
            mib(read_bytes),
            facts.chunks.count,
            mib(facts.chunks.bytes),
            bench.remote.name
        ))
        .rows(rows.into_iter().flatten().collect()))
}

/// Compares the model with the requests of fleets of several sizes. Also returns the largest number of
/// chunks per host that were fetched but not read, without a trace and with one.
fn compare_with_model(bench: &Bench<'_>, options: &Options) -> Result<(Report, [u64; 2])> {
    let fleets = if options.quick { &OTHERS_QUICK[..] } else { &OTHERS };
    let (mut rows, mut ahead) = (Vec::new(), [0; 2]);
    for fleet in fleets {
        for prefetch in [false, true] {
            let caches = bench.caches(*fleet)?;
            let mut servers = Vec::new();
            for start in [Start::Empty, Start::Running, Start::Cached, Start::Known] {
                let device = |host: u64| bench.device(start, caches[host as usize].path(), prefetch, None);
                let ((), traffic) = bench.measure_traffic(|| {
                    if start == Start::Running {
                        return bench.boot(&mut servers, fleet.forks, None);
                    }
                    Bench::end_servers(std::mem::take(&mut servers))?;
                    servers = bench.start(*fleet, &device, None)?.1;
                    Ok(())
                })?;
                let (model, _) = fleet.expected_requests(start, prefetch, &bench.facts);
                let too_often = traffic.max_fetches.saturating_sub(fleet.hosts);
                let mismatches = (mismatches(&traffic.request_counts, &model) + too_often) as f64;
                let trace = if prefetch { "trace known" } else { "no trace" };
                let what = format!("{fleet}: {}, {trace}: requests that the model has not", start.name());
                rows.push(with_kinds(
                    Row::single(what, Unit::Count, mismatches).target(Target::AtMost(0.0)),
                    &traffic.request_counts,
                ));
                let not_read = traffic.request_counts.get(&Kind::Ahead).copied().unwrap_or(0);
                let ahead = &mut ahead[usize::from(prefetch)];
                *ahead = not_read.div_ceil(fleet.hosts).max(*ahead);
            }
            Bench::end_servers(servers)?;
        }
    }
    for (name, ahead) in ["no trace", "trace known"].into_iter().zip(ahead) {
        let ratio = ahead as f64 / bench.facts.chunks.count as f64;
        rows.push(
            Row::single(
                format!("{name}: chunks that came and were not read / chunks that were read, at most"),
                Unit::Ratio,
                ratio,
            )
            .target(Target::AtMost(BYTES_MAX - 1.0))
            .part("of a host", ahead as f64),
        );
    }
    let test_image = bench.test_image;
    let report = Report::new(
        "images: fleets and the model",
        test_image.data.description.clone(),
        test_image.data.bytes(),
        "zstd",
    )
        .note(
            "Fleets of several sizes, without pauses: each starts with an empty cache, boots all forks once \
             more while running, and then is restarted. Each host has its own cache. The parts of a row are \
             the counted requests. The row counts the differences from the model (benches/src/images/model.rs) \
             by kind, and fetches of a chunk beyond one per host. Chunks that were fetched ahead and not read \
             are not in the model.",
        )
        .rows(rows);
    Ok((report, ahead))
}

fn large_fleet_report(bench: &Bench<'_>, ahead: [u64; 2]) -> Report {
    let facts = &bench.facts;
    let mut rows = Vec::new();
    for prefetch in [false, true] {
        for start in [Start::Empty, Start::Cached, Start::Known, Start::Running] {
            let (request_counts, bytes) = LARGE.expected_requests(start, prefetch, facts);
            let trace = if prefetch { "trace known" } else { "no trace" };
            let requests = request_counts.values().sum::<u64>() as f64;
            let row = Row::single(format!("{}, {trace}: requests", start.name()), Unit::Count, requests);
            let mut row = with_kinds(row, &request_counts).part("GiB", mib(bytes) / 1024.0);
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
    let (_, host) = Fleet { hosts: 1, ..LARGE }.expected_requests(Start::Empty, true, facts);
    rows.push(Row::single(
        "a host by itself: seconds at 1 Gbit/s for what it asks, nothing cached",
        Unit::Seconds,
        (host * 8) as f64 / BITS_PER_SECOND as f64,
    ));
    let test_image = bench.test_image;
    Report::new(
        format!("images: what {} hosts ask", LARGE.hosts),
        test_image.data.description.clone(),
        test_image.data.bytes(),
        "zstd",
    )
    .note(format!(
        "{LARGE} each, by the model with the facts of this image: {} chunks are read, {:.1} MiB; {} maps, \
             {:.2} MiB; a manifest of {} bytes, a trace of {}, a tag of {}, freestone.json of {}. Bytes are \
             those of objects, without HTTP headers; times are those of the bytes alone on a link of that \
             speed.",
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
    test_image: &TestImage,
    remote: &Remote,
    run_dir: &RunDir,
    freestone: &Path,
    options: &Options,
) -> Result<Vec<Report>> {
    let bench = Bench::new((test_image, remote), run_dir, freestone, options)?;
    let whole = run_whole_fleet(&bench, options)?.print();
    let (checked, ahead) = compare_with_model(&bench, options)?;
    Ok(vec![whole, checked.print(), large_fleet_report(&bench, ahead).print()])
}
