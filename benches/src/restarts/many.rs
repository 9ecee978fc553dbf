//! `many` part: start time of a server with many forks in its state directory, each with its own
//! socket, after the previous server was killed.

use std::fs::File;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use freestone_report::{Report, Row, Summary, Target, Unit, mib};
use serde_json::json;

use super::Bench;
use super::control::Control;
use super::home::{Home, unix};
use crate::programs::server_process::{Server, WaitLimits};
use crate::transport::nbd_client::Client;

const FORKS: u32 = 10_000;
const FORKS_QUICK: u32 = 100;
const ROUNDS: u32 = 5;
const ROUNDS_QUICK: u32 = 2;
const BASE_BYTES: u64 = 64 << 20;
const READY_MAX_S: f64 = 10.0;
const READY: WaitLimits = WaitLimits { timeout: Duration::from_secs(300), pause: Duration::from_millis(1) };

pub(super) fn run(bench: &Bench<'_>) -> Result<Report> {
    let count = bench.args.forks.unwrap_or(if bench.options.quick { FORKS_QUICK } else { FORKS });
    let home = Home::new(bench)?;
    let image = home.file("base.img");
    File::create(&image)?.set_len(BASE_BYTES)?;
    let base = format!("base=file,path={},readonly=yes", image.display());
    let (server, mut control) = home.start(&home.command_with_state(&[&base]))?;
    let nbd_socket = unix(&home.socket("f%n"));
    let started = Instant::now();
    let request = json!({
        "base": "base", "name": "fork", "count": count, "nbd": nbd_socket, "on_data_loss": "empty"
    });
    control.call("fork", &request)?;
    let fork_seconds = started.elapsed().as_secs_f64();
    // Drop kills the server, as a crash would.
    drop(server);
    let (mut seconds, mut list) = (Vec::new(), Vec::new());
    for _ in 0..bench.options.rounds(ROUNDS, ROUNDS_QUICK) {
        let started = Instant::now();
        let mut server = Server::spawn(&home.command_with_state(&[]))?;
        let mut control = server.wait_for(READY, &mut || home.control().ok())?;
        seconds.push(started.elapsed().as_secs_f64());
        list.push(check(&mut control, &home, count)?);
    }
    let topology = std::fs::metadata(home.state().join("topology"))?.len();
    Ok(Report::new("restarts: many forks", "", 0, "")
        .note(format!(
            "{count} forks of one file, on_data_loss=empty, each exported at its own Unix socket. Before \
             every start the server is killed (kill -9). The time is from before the server's process is started \
             until its control socket accepts a connection, which is its last step. Then every fork must be \
             listed, and the first and the last must accept a connection."
        ))
        .rows(vec![
            Row::new(format!("start with {count} forks"), Unit::Seconds, Summary::of(seconds))
                .target(Target::AtMost(READY_MAX_S))
                .part("state MiB", mib(topology)),
            Row::single(format!("making {count} forks in one verb"), Unit::Seconds, fork_seconds),
            Row::new(format!("listing {count} forks"), Unit::Seconds, Summary::of(list)),
        ]))
}

/// Checks that all forks exist with an export and can be used. Returns the duration of the verb
/// `list` in seconds.
fn check(control: &mut Control, home: &Home, count: u32) -> Result<f64> {
    let started = Instant::now();
    let list = control.call("list", &json!({ "pattern": "fork-*" }))?;
    let took = started.elapsed().as_secs_f64();
    let exported_count = list["devices"].as_array().map_or(0, |devices| {
        let shown =
            devices.iter().filter(|device| device["exports"].as_array().is_some_and(|e| !e.is_empty()));
        shown.count()
    });
    ensure!(exported_count == count as usize, "only {exported_count} of {count} forks have an export");
    for number in [0, count - 1] {
        Client::connect(&home.socket(&format!("f{number}")))?.end()?;
    }
    Ok(took)
}
