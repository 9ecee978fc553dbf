//! fio as the reference for the speed of the disk.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::programs::tool;

/// A run of one fio job, with `O_DIRECT` and `io_uring`.
pub struct Job<'a> {
    path: &'a Path,
    rw: &'static str,
    block: u32,
    depth: u32,
    /// Size of the accessed range at the start of the file, in bytes.
    bytes: u64,
    io_bytes: u64,
    seed: u64,
}

pub struct Speed {
    pub bytes_per_second: f64,
    pub operations_per_second: f64,
    /// fio's CPU time, relative to the duration.
    pub cpu: f64,
}

impl<'a> Job<'a> {
    /// Creates a job of sequential 1 MiB writes, four at a time, from the start of the file.
    pub fn sequential_writes(path: &'a Path, bytes: u64) -> Self {
        Self { path, rw: "write", block: 1 << 20, depth: 4, bytes, io_bytes: bytes, seed: 1 }
    }

    /// Creates a job of 4 KiB reads, each block at most once, from the first `bytes` of the file.
    pub fn random_reads(path: &'a Path, bytes: u64, depth: u32, count: u64, seed: u64) -> Self {
        Self { path, rw: "randread", block: 4096, depth, bytes, io_bytes: (count * 4096).min(bytes), seed }
    }
}

pub fn run(job: &Job) -> Result<Speed> {
    let Job { path, rw, block, depth, bytes, io_bytes, seed } = job;
    // A colon separates file names in fio's option.
    let name = path.to_str().filter(|name| !name.contains(':'));
    let Some(name) = name else { bail!("{}: fio does not accept this file name", path.display()) };
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

/// Parses fio's output, which may have messages before the JSON.
fn parse(output: &str, direction: &str) -> Result<Speed> {
    let json = output.find('{').map_or("", |at| &output[at..]);
    let value: Value = serde_json::from_str(json).context("fio's JSON")?;
    let job = &value["jobs"][0];
    let number =
        |value: &Value, name: &str| value[name].as_f64().with_context(|| format!("fio gave no {name}"));
    ensure!(job["error"].as_i64() == Some(0), "fio reported error {}", job["error"]);
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
    fn result_of_direction_is_parsed() {
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
