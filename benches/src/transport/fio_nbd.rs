//! fio as an NBD client, with the same options for every measured server.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::programs::tool;

/// Number of requests in flight on each connection.
pub const DEPTH: u32 = 32;
/// Compressible part of fio's write buffers, in percent.
pub const COMPRESSIBLE_PERCENT: u32 = 60;

/// Request type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Read,
    Write,
}

/// Condition that ends a run.
#[derive(Debug, Clone, Copy)]
pub enum Amount {
    /// Number of requests, of all connections together.
    Requests(u64),
    /// Number of requests, each to a different block. Needs a single connection.
    Distinct(u64),
    Time(Duration),
}

#[derive(Debug, Clone, Copy)]
pub struct Load {
    pub direction: Direction,
    pub block_bytes: u32,
    pub connections: u32,
    pub amount: Amount,
    /// Number of the round, from which the random seeds are computed.
    pub round: u32,
}

#[derive(Debug, PartialEq)]
pub struct RunResult {
    pub per_second: f64,
    pub requests: u64,
}

/// Runs fio against the default export of the server at `socket`.
pub fn run(socket: &Path, load: &Load) -> Result<RunResult> {
    parse(&tool::run(&mut command(socket, load), "fio")?, load.direction)
}

pub fn command(socket: &Path, load: &Load) -> Command {
    let mut command = Command::new("fio");
    let direction = match load.direction {
        Direction::Read => "--rw=randread",
        Direction::Write => "--rw=randwrite",
    };
    command
        .args(["--name=global", "--ioengine=nbd", direction])
        .arg(format!("--bs={}", load.block_bytes))
        .args(["--group_reporting", "--output-format=json"])
        .arg(format!("--buffer_compress_percentage={COMPRESSIBLE_PERCENT}"))
        .arg("--buffer_compress_chunk=4096")
        .arg(format!("--uri=nbd+unix:///?socket={}", socket.display()))
        .arg(format!("--iodepth={DEPTH}"))
        .stdin(Stdio::null());
    let bytes = |requests: u64| requests.max(1) * u64::from(load.block_bytes);
    match load.amount {
        Amount::Requests(all) => {
            command.arg("--norandommap");
            command.arg(format!("--io_size={}", bytes(all / u64::from(load.connections))))
        }
        Amount::Distinct(all) => command.arg(format!("--io_size={}", bytes(all))),
        Amount::Time(time) => {
            command.args(["--norandommap", "--time_based"]);
            command.arg(format!("--runtime={}ms", time.as_millis()))
        }
    };
    for connection in 0..load.connections {
        // Each connection accesses its own random pages, the same ones for every server.
        command.arg(format!("--name=connection{connection}"));
        command.arg(format!("--randseed={}", load.round * load.connections + connection + 1));
    }
    command
}

fn parse(output: &str, direction: Direction) -> Result<RunResult> {
    let json = output.find('{').map_or("", |at| &output[at..]);
    let value: Value = serde_json::from_str(json).context("fio's JSON")?;
    let job = &value["jobs"][0];
    ensure!(job["error"].as_i64() == Some(0), "fio reported error {}", job["error"]);
    let side = match direction {
        Direction::Read => &job["read"],
        Direction::Write => &job["write"],
    };
    let per_second = side["iops"].as_f64().context("fio gave no iops")?;
    let requests = side["total_ios"].as_u64().context("fio gave no total_ios")?;
    ensure!(per_second > 0.0 && requests > 0, "fio did nothing");
    Ok(RunResult { per_second, requests })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_parsed_and_errors_reported() {
        let text = |error, iops| {
            format!(
                "fio: connected to NBD server\n{{\"jobs\": [{{\"error\": {error}, \"write\": {{\"iops\": {iops}, \"total_ios\": 9}}, \
                 \"read\": {{\"iops\": 0.5, \"total_ios\": 3}}}}]}}"
            )
        };
        let done = |per_second, requests| RunResult { per_second, requests };
        assert_eq!(parse(&text(0, 2.5), Direction::Write).unwrap(), done(2.5, 9));
        assert_eq!(parse(&text(0, 2.5), Direction::Read).unwrap(), done(0.5, 3));
        assert!(parse(&text(5, 2.5), Direction::Write).is_err());
        assert!(parse(&text(0, 0.0), Direction::Write).is_err());
        assert!(parse("fio: no", Direction::Read).is_err());
    }

    #[test]
    fn connections_share_count_and_have_own_seeds() {
        let load = Load {
            direction: Direction::Write,
            block_bytes: 4096,
            connections: 4,
            amount: Amount::Requests(1000),
            round: 2,
        };
        let command = command(Path::new("s"), &load);
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        assert!(words.contains(&format!("--io_size={}", 250 * 4096)), "{words:?}");
        let seeds: Vec<_> = words.iter().filter(|word| word.starts_with("--randseed=")).collect();
        assert_eq!(seeds, ["--randseed=9", "--randseed=10", "--randseed=11", "--randseed=12"]);
    }
}
