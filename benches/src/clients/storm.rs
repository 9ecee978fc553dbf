//! What a client notices while others connect and leave as fast as they can. These have a control
//! group of their own, so they take no CPU time that is the client's and the server's; what the
//! server does for them it does in its own.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use freestone::PAGE_BYTES;
use freestone_report::{Report, Row, Summary, Target, Unit};

use super::Bench;
use super::group::Group;
use super::looped::{Burden, What};
use crate::nbd_client::Client;

const ROUNDS: u32 = 15;
const ROUNDS_QUICK: u32 = 2;
const SLICE_MS: u32 = 500;
const SLICE_QUICK_MS: u32 = 50;
/// Until what was begun is done, and what is held stands still.
const SETTLE: Duration = Duration::from_millis(50);
/// How much longer the slowest hundredth may take.
const WORSE_MAX: f64 = 1.5;
const SIDES: [&str; 3] = ["alone", "beside connects", "beside busy CPUs"];

pub(super) fn run(bench: &Bench<'_>) -> Result<Report> {
    let rounds = bench.options.rounds(ROUNDS, ROUNDS_QUICK);
    let usual = if bench.options.quick { SLICE_QUICK_MS } else { SLICE_MS };
    let slice = Duration::from_millis(bench.options.slice_ms.unwrap_or(usual).into());
    let served = bench.serve("n=null,size=1G")?;
    let socket = served.socket();
    let burdens = [Burden::start(What::Connect, &socket)?, Burden::start(What::Burn, &socket)?];
    let groups = grouped(&[std::process::id(), served.server.pid()], &burdens.each_ref().map(Burden::pid));
    let mut client = Client::connect(&socket)?;
    let mut tails = SIDES.map(|_| Vec::new());
    let mut connecting = Duration::ZERO;
    for round in 0..rounds as usize {
        for turn in 0..SIDES.len() {
            let side = (turn + round) % SIDES.len();
            let burden = side.checked_sub(1).map(|burden| &burdens[burden]);
            let begun = Instant::now();
            if let Some(burden) = burden {
                burden.let_go()?;
            }
            thread::sleep(SETTLE);
            tails[side].push(slowest_hundredth(&mut client, slice)?);
            if let Some(burden) = burden {
                burden.hold()?;
            }
            if side == 1 {
                connecting += begun.elapsed();
            }
            thread::sleep(SETTLE);
        }
    }
    client.end()?;
    let [connects, burning] = burdens;
    let a_second = connects.end()? as f64 / connecting.as_secs_f64();
    burning.end()?;
    let told = match groups {
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
        Row::over("99th percentile, beside connects / alone", beside, alone)
            .target(Target::AtMost(WORSE_MAX)),
    );
    rows.push(Row::over("99th percentile, beside busy CPUs / alone", busy, alone));
    rows.push(Row::over("99th percentile, beside connects / beside busy CPUs", beside, busy));
    rows.push(Row::one("connects a second", Unit::Iops, a_second));
    Ok(Report::new("clients: a storm of connects", "", 0, "")
        .note(format!(
            "A client that reads 4 KiB of a null drive at a time, over a Unix socket, while nobody, four threads that connect, choose the export \
             and leave, or four threads that only use CPUs are beside it. {told}. {rounds} slices of each, in turns."
        ))
        .rows(rows))
}

/// Puts each side into a group of its own; they last as long as what is returned.
fn grouped(ours: &[u32], others: &[u32]) -> Result<[Group; 2]> {
    let groups = [Group::new("server")?, Group::new("others")?];
    for (group, pids) in groups.iter().zip([ours, others]) {
        pids.iter().try_for_each(|pid| group.take(*pid))?;
    }
    Ok(groups)
}

/// The 99th percentile of a slice's requests, in microseconds.
fn slowest_hundredth(client: &mut Client, slice: Duration) -> Result<f64> {
    let (mut took, mut page) = (Vec::new(), [0; PAGE_BYTES]);
    let begun = Instant::now();
    while begun.elapsed() < slice || took.is_empty() {
        let asked = Instant::now();
        client.read(took.len() as u64 % 1000 * PAGE_BYTES as u64, &mut page)?;
        took.push(asked.elapsed());
    }
    took.sort_unstable();
    Ok(took[(took.len() * 99 / 100).min(took.len() - 1)].as_secs_f64() * 1e6)
}
