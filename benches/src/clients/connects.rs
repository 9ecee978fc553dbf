//! CPU time that a server uses for a client that connects, selects an export and disconnects.

use anyhow::Result;
use freestone_report::{Report, Row, Summary, Target, Unit};

use super::{Bench, connect_and_disconnect};

const ROUNDS: u32 = 9;
const ROUNDS_QUICK: u32 = 2;
/// Number of connects per round. The kernel counts CPU time in ticks of 10 ms, so a round uses
/// about fifty ticks.
const CONNECTS: u32 = 5000;
const CONNECTS_QUICK: u32 = 300;
/// Largest CPU time of a connect that meets the target, in microseconds.
const COST_MAX_US: f64 = 150.0;

pub(super) fn run(bench: &Bench<'_>) -> Result<Report> {
    let rounds = bench.options.rounds(ROUNDS, ROUNDS_QUICK);
    let connects = if bench.options.quick { CONNECTS_QUICK } else { CONNECTS };
    let served = bench.serve("n=null,size=1G")?;
    let mut micros = Vec::new();
    for _ in 0..rounds {
        let before = served.server.cpu()?;
        for _ in 0..connects {
            connect_and_disconnect(&served.dir.socket("nbd"))?;
        }
        let spent = served.server.cpu()?.saturating_sub(before);
        micros.push(spent.as_secs_f64() * 1e6 / f64::from(connects));
    }
    Ok(Report::new("clients: connects", "", 0, "")
        .note(format!(
            "CPU time of the server's process, in user space and in the kernel, for a client that connects to \
             a Unix socket, selects the export and disconnects. Clients follow each other, {rounds} rounds of \
             {connects}."
        ))
        .rows(vec![
            Row::new("CPU a connect", Unit::Micros, Summary::of(micros)).target(Target::AtMost(COST_MAX_US)),
        ]))
}
