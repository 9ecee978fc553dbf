//! How long a server takes to be ready that finds many forks in its state, each with a socket of its
//! own, after the one before was killed.

use std::fs::File;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use freestone_report::{Report, Row, Summary, Target, Unit, mib};
use serde_json::json;

use super::Bench;
use super::control::Control;
use super::home::{Home, unix};
use crate::nbd_client::Client;
use crate::served::{Patience, Server};

const FORKS: u32 = 10_000;
const FORKS_QUICK: u32 = 100;
const ROUNDS: u32 = 5;
const ROUNDS_QUICK: u32 = 2;
const BASE_BYTES: u64 = 64 << 20;
const READY_MAX_S: f64 = 10.0;
const READY: Patience = Patience { most: Duration::from_secs(300), pause: Duration::from_millis(1) };

pub(super) fn run(bench: &Bench<'_>) -> Result<Report> {
    let count = bench.args.forks.unwrap_or(if bench.options.quick { FORKS_QUICK } else { FORKS });
    let home = Home::new(bench)?;
    let image = home.file("base.img");
    File::create(&image)?.set_len(BASE_BYTES)?;
    let base = format!("base=file,path={},readonly=yes", image.display());
    let (server, mut control) = home.start(&home.stateful(&[&base]))?;
    let nbd = unix(&home.socket("f%n"));
    let begun = Instant::now();
    control.call(
        "fork",
        &json!({ "base": "base", "name": "fork", "count": count, "nbd": nbd, "on_lost": "empty" }),
    )?;
    let made = begun.elapsed().as_secs_f64();
    // Dropping a server kills it.
    drop(server);
    let (mut seconds, mut list) = (Vec::new(), Vec::new());
    for _ in 0..bench.options.rounds(ROUNDS, ROUNDS_QUICK) {
        let begun = Instant::now();
        let mut server = Server::spawn(&home.stateful(&[]))?;
        let mut control = server.wait_for(READY, &mut || home.control().ok())?;
        seconds.push(begun.elapsed().as_secs_f64());
        list.push(check(&mut control, &home, count)?);
    }
    let topology = std::fs::metadata(home.state().join("topology"))?.len();
    Ok(Report::new("restarts: many forks", "", 0, "")
        .note(format!(
            "{count} forks of one file, on_lost=empty, each with an export at a Unix socket of its own. Before every \
             start the server is killed (kill -9). From before the server's process is made until its control \
             socket takes a connection, which it does last of all; then every fork is in the list, and the first and \
             the last are connected to."
        ))
        .rows(vec![
            Row::new(format!("start with {count} forks"), Unit::Seconds, Summary::of(seconds))
                .target(Target::AtMost(READY_MAX_S))
                .part("state MiB", mib(topology)),
            Row::one(format!("making {count} forks in one verb"), Unit::Seconds, made),
            Row::new(format!("listing {count} forks"), Unit::Seconds, Summary::of(list)),
        ]))
}

/// All forks are there, and can be used. Returns how long listing them takes.
fn check(control: &mut Control, home: &Home, count: u32) -> Result<f64> {
    let begun = Instant::now();
    let list = control.call("list", &json!({ "pattern": "fork-*" }))?;
    let took = begun.elapsed().as_secs_f64();
    let there = list["devices"].as_array().map_or(0, |devices| {
        let shown =
            devices.iter().filter(|device| device["exports"].as_array().is_some_and(|e| !e.is_empty()));
        shown.count()
    });
    ensure!(there == count as usize, "of {count} forks {there} are there with an export");
    for number in [0, count - 1] {
        Client::connect(&home.socket(&format!("f{number}")))?.end()?;
    }
    Ok(took)
}
