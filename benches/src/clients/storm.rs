//! Latency of a client while other clients connect and disconnect as fast as they can. The other
//! clients run in a control group of their own, so they use no CPU time of the measured client and
//! the server. The server's work for the other clients counts in the server's group.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use freestone::PAGE_BYTES;
use freestone_report::{Report, Row, Summary, Target, Unit};

use super::Bench;
use super::background::{BackgroundLoad, LoadKind};
use super::group::Group;
use crate::transport::nbd_client::Client;

const ROUNDS: u32 = 15;
const ROUNDS_QUICK: u32 = 2;
const SLICE_MS: u32 = 500;
const SLICE_QUICK_MS: u32 = 50;
/// Pause before a slice, in which requests in flight complete and paused load processes come to
/// rest.
const SETTLE: Duration = Duration::from_millis(50);
/// Largest 99th percentile of the latency that meets the target, relative to that without load
/// beside the client.
const WORSE_MAX: f64 = 1.5;
const SIDES: [&str; 3] = ["alone", "beside connects", "beside busy CPUs"];

pub(super) fn run(bench: &Bench<'_>) -> Result<Report> {
    let rounds = bench.options.rounds(ROUNDS, ROUNDS_QUICK);
    let usual = if bench.options.quick { SLICE_QUICK_MS } else { SLICE_MS };
    let slice = Duration::from_millis(bench.options.slice_ms.unwrap_or(usual).into());
    let served = bench.serve("n=null,size=1G")?;
    let socket = served.dir.socket("nbd");
    let loads =
        [BackgroundLoad::start(LoadKind::Connect, &socket)?, BackgroundLoad::start(LoadKind::Burn, &socket)?];
    let groups =
        create_groups(&[std::process::id(), served.server.pid()], &loads.each_ref().map(BackgroundLoad::pid));
    let mut client = Client::connect(&socket)?;
    let mut tails = SIDES.map(|_| Vec::new());
    let mut connecting = Duration::ZERO;
    for round in 0..rounds as usize {
        for turn in 0..SIDES.len() {
            let side = (turn + round) % SIDES.len();
            let load = side.checked_sub(1).map(|load| &loads[load]);
            let start = Instant::now();
            if let Some(load) = load {
                load.resume()?;
            }
            thread::sleep(SETTLE);
            tails[side].push(slowest_hundredth(&mut client, slice)?);
            if let Some(load) = load {
                load.pause()?;
            }
            if side == 1 {
                connecting += start.elapsed();
            }
            thread::sleep(SETTLE);
        }
    }
    client.end()?;
    let [connects, burning] = loads;
    let connects_per_second = connects.end()? as f64 / connecting.as_secs_f64();
    burning.end()?;
    let isolation = match groups {
        Ok(_) => {
            "The others are in a control group, client and server in another, with equal shares".to_owned()
        }
        Err(why) => format!("NO CONTROL GROUPS ({why:#}), so the others take CPU time of client and server"),
    };
    let [alone, beside, busy] = &tails;
    let mut rows: Vec<Row> = SIDES
        .iter()
        .zip(&tails)
        .map(|(side, tail)| {
            Row::new(format!("99th percentile, {side}"), Unit::Micros, Summary::of(tail.iter().copied()))
        })
        .collect();
    rows.push(
        Row::ratio_of("99th percentile, beside connects / alone", beside, alone)
            .target(Target::AtMost(WORSE_MAX)),
    );
    rows.push(Row::ratio_of("99th percentile, beside busy CPUs / alone", busy, alone));
    rows.push(Row::ratio_of("99th percentile, beside connects / beside busy CPUs", beside, busy));
    rows.push(Row::single("connects a second", Unit::Iops, connects_per_second));
    Ok(Report::new("clients: a storm of connects", "", 0, "")
        .note(format!(
            "A client reads 4 KiB of a null device at a time, over a Unix socket: alone, beside four threads \
             that connect, select the export and disconnect, or beside four threads that only use CPU time. \
             {isolation}. {rounds} slices of each, in turns."
        ))
        .rows(rows))
}

/// Moves the processes `ours` and the processes `others` into a control group each. The groups
/// exist until the returned value is dropped.
fn create_groups(ours: &[u32], others: &[u32]) -> Result<[Group; 2]> {
    let groups = [Group::new("server")?, Group::new("others")?];
    for (group, pids) in groups.iter().zip([ours, others]) {
        pids.iter().try_for_each(|pid| group.add(*pid))?;
    }
    Ok(groups)
}

/// Returns the 99th percentile of the latency in a slice, in microseconds.
fn slowest_hundredth(client: &mut Client, slice: Duration) -> Result<f64> {
    let (mut took, mut page) = (Vec::new(), [0; PAGE_BYTES]);
    let start = Instant::now();
    while start.elapsed() < slice || took.is_empty() {
        let request_start = Instant::now();
        client.read(took.len() as u64 % 1000 * PAGE_BYTES as u64, &mut page)?;
        took.push(request_start.elapsed());
    }
    took.sort_unstable();
    Ok(took[(took.len() * 99 / 100).min(took.len() - 1)].as_secs_f64() * 1e6)
}
