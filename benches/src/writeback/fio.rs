//! fio as the measure of the disk.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::tool;

/// One run of one job, with `O_DIRECT` and `io_uring`.
pub struct Job<'a> {
    path: &'a Path,
    rw: &'static str,
    block: u32,
    depth: u32,
    /// Bytes from the start of the file that it works on.
    bytes: u64,
    /// Bytes that it moves.
    io_bytes: u64,
    seed: u64,
}

/// What it reached.
pub struct Speed {
    pub bytes_per_second: f64,
    pub operations_per_second: f64,
    /// Its own CPU time, as a part of the time that it ran.
    pub cpu: f64,
}

impl<'a> Job<'a> {
    /// Requests of 1 MiB, four at a time, from the start of the file.
    pub fn sequential_writes(path: &'a Path, bytes: u64) -> Self {
        Self { path, rw: "write", block: 1 << 20, depth: 4, bytes, io_bytes: bytes, seed: 1 }
    }

    /// Reads of 4 KiB, each block at most once, from the first `bytes` of the file.
    pub fn random_reads(path: &'a Path, bytes: u64, depth: u32, count: u64, seed: u64) -> Self {
        Self { path, rw: "randread", block: 4096, depth, bytes, io_bytes: (count * 4096).min(bytes), seed }
    }
}

/// Runs a job to its end.
pub fn run(job: &Job) -> Result<Speed> {
    let Job { path, rw, block, depth, bytes, io_bytes, seed } = job;
    // In fio's option a colon separates file names.
    let name = path.to_str().filter(|name| !name.contains(':'));
    let Some(name) = name else { bail!("{}: fio takes no such name", path.display()) };
    let mut fio = Command::new("fio");
    fio.args(["--name=disk", "--ioengine=io_uring", "--direct=1", "--numjobs=1", "--thread=1"])
        .args(["--fallocate=none", "--output-format=json"])
        .arg(format!("--filename={name}"))
        .arg(format!("--rw={rw}"))
        .arg(format!("--bs={block}"))
        .arg(format!("--iodepth={depth}"))
        .arg(format!("--size={}", bytes.next_multiple_of(u64::from(*block))))
        .arg(format!("--io_size={}", io_bytes.next_multiple_of(u64::from(*block))))
        .arg(format!("--randseed={seed}"));
    parse(&tool::run(&mut fio, "fio")?, if *rw == "write" { "write" } else { "read" })
}

/// fio puts notes before its JSON now and then.
fn parse(output: &str, direction: &str) -> Result<Speed> {
    let json = output.find('{').map_or("", |at| &output[at..]);
    let value: Value = serde_json::from_str(json).context("fio's JSON")?;
    let job = &value["jobs"][0];
    let number =
        |value: &Value, name: &str| value[name].as_f64().with_context(|| format!("fio gave no {name}"));
    ensure!(job["error"].as_i64() == Some(0), "fio met an error: {}", job["error"]);
    let side = &job[direction];
    let cpu = (number(job, "usr_cpu")? + number(job, "sys_cpu")?) / 100.0;
    let speed = Speed {
        bytes_per_second: number(side, "bw_bytes")?,
        operations_per_second: number(side, "iops")?,
        cpu,
    };
    ensure!(speed.bytes_per_second > 0.0, "fio moved nothing");
    Ok(speed)
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn the_numbers_of_the_direction_are_taken() {
        let side = |bw| format!(r#"{{"bw_bytes": {bw}, "iops": {bw}.5}}"#);
        let text = |error| {
            let (read, write) = (side(7), side(9));
            format!(
                "note: x\n{{\"jobs\": [{{\"error\": {error}, \"read\": {read}, \"write\": {write}, \"usr_cpu\": 10.0, \"sys_cpu\": 15.0}}]}}"
            )
        };
        let speed = parse(&text(0), "write").unwrap();
        assert_eq!((speed.bytes_per_second, speed.operations_per_second), (9.0, 9.5));
        assert!((speed.cpu - 0.25).abs() < 1e-9);
        assert!(parse(&text(5), "write").is_err());
        assert!(parse("fio: no", "read").is_err());
    }
}
