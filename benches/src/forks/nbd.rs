//! A fork over NBD beside a qcow2 overlay behind qemu-nbd and nbdkit's cow filter, on one raw base, and beside our null export. fio is
//! the client of all.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use freestone::device::IoBuf;
use serde_json::Value;

use super::server::Served;
use super::{Bench, Image};
use crate::data::Data;
use crate::measure::Summary;
use crate::options::Set;
use crate::process;
use crate::report::{Report, Row, Target, Unit};

/// The base where `--size` does not say.
const BYTES: u64 = 1 << 30;
const ROUNDS: u32 = 7;
/// Writes of a slice: as many as half of the base has pages.
const WRITTEN_PART: u64 = 2;
const DEPTH: u32 = 32;
const CONNECTIONS: [u32; 2] = [1, 4];
/// A server that does not listen by then never will.
const START_MAX: Duration = Duration::from_secs(20);
/// How far ours has to be from what it costs others.
const CPU_SHARE: f64 = 1.0 / 3.0;

/// Who serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Fork,
    Null,
    Qemu,
    Nbdkit,
}

const SIDES: [Side; 4] = [Side::Fork, Side::Null, Side::Qemu, Side::Nbdkit];

/// One slice.
struct Run {
    per_second: f64,
    /// Of the server, in microseconds.
    cpu_per_write: f64,
}

/// A server's process; killed when this is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended; there is nobody to tell.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(super) fn run(bench: &Bench) -> Result<Report> {
    let data = Data::open(Set::Fio, bench.options.bytes(BYTES), bench.options)?;
    let base = Image::sparse(&bench.dir, "base", data.bytes())?;
    fill(&base.0, &data)?;
    let mut rows = Vec::new();
    for connections in CONNECTIONS {
        let mut runs = SIDES.map(|_| Vec::new());
        for round in 0..bench.rounds(ROUNDS) {
            let mut order = SIDES;
            order.rotate_left(round as usize % SIDES.len());
            for side in order {
                let run = slice(bench, side, &base.0, data.pages / WRITTEN_PART, connections, round)
                    .with_context(|| format!("{side:?}"))?;
                runs[side as usize].push(run);
            }
        }
        rows.extend(compare(connections, &runs));
    }
    Ok(Report {
        name: "forks: over NBD",
        data: format!("a raw base with {}", data.description),
        data_bytes: data.bytes(),
        algorithm: "lz4",
        notes: vec![
            versions(),
            format!(
                "Random 4 KiB writes over a Unix socket, {} a slice (fio, nbd engine, {DEPTH} in flight on each connection, {} % compressible buffers). \
                 Every slice has a new server with a new overlay: most writes are first ones. A server's CPU time is that of its process (user \
                 and system, from /proc); what the kernel does later for the files of others is not in it.",
                data.pages / WRITTEN_PART,
                60
            ),
            "qemu-nbd: a qcow2 overlay made by qemu-img, in the same directory, default cache and aio. nbdkit: --filter=cow file, its overlay in \
             the same directory. The base is in the page cache."
                .into(),
        ],
        rows,
    })
}

fn compare(connections: u32, runs: &[Vec<Run>; 4]) -> Vec<Row> {
    let plural = if connections == 1 { "" } else { "s" };
    let name = |what: &str| format!("{connections} connection{plural}: {what}");
    let speeds = |side: Side| runs[side as usize].iter().map(|run| run.per_second).collect::<Vec<_>>();
    let cpus = |side: Side| runs[side as usize].iter().map(|run| run.cpu_per_write).collect::<Vec<_>>();
    let mut rows = Vec::new();
    for (side, what) in
        [(Side::Fork, "fork"), (Side::Null, "null"), (Side::Qemu, "qemu-nbd"), (Side::Nbdkit, "nbdkit")]
    {
        let speed = Summary::of(speeds(side).into_iter().map(|speed| speed / 1e3));
        let cpu = Summary::of(cpus(side)).median;
        rows.push(Row::new(name(what), Unit::Kiops, speed).part("CPU us a write", cpu));
    }
    for (side, what, bound) in
        [(Side::Null, "null", 0.85), (Side::Qemu, "qemu-nbd", 1.0), (Side::Nbdkit, "nbdkit", 1.0)]
    {
        let ratio = Summary::ratio(&speeds(Side::Fork), &speeds(side));
        let row = Row::new(name(&format!("writes a second, fork / {what}")), Unit::Ratio, ratio);
        rows.push(row.target(Target::AtLeast(bound)).steady());
    }
    for (side, what) in [(Side::Qemu, "qemu-nbd"), (Side::Nbdkit, "nbdkit")] {
        let ratio = Summary::ratio(&cpus(Side::Fork), &cpus(side));
        let row = Row::new(name(&format!("server CPU a write, fork / {what}")), Unit::Ratio, ratio);
        rows.push(row.target(Target::AtMost(CPU_SHARE)).steady());
    }
    rows
}

/// Writes the data to the base; that leaves it in the page cache.
fn fill(path: &Path, data: &Data) -> Result<()> {
    const PAGES: u64 = 256;
    let mut file = File::options().write(true).open(path)?;
    let mut buffer = IoBuf::zeroed(PAGES as usize * freestone::PAGE_BYTES)?;
    for first in (0..data.pages).step_by(PAGES as usize) {
        let part = &mut buffer[..(data.pages - first).min(PAGES) as usize * freestone::PAGE_BYTES];
        data.read(first, part)?;
        file.write_all(part)?;
    }
    Ok(file.sync_all()?)
}

fn slice(bench: &Bench, side: Side, base: &Path, writes: u64, connections: u32, round: u32) -> Result<Run> {
    // Sockets have short names; overlays may be large.
    let sockets = tempfile::tempdir()?;
    let overlays = tempfile::tempdir_in(&bench.dir)?;
    let socket = sockets.path().join("nbd");
    let mut process = Process(start(side, base, &socket, overlays.path())?);
    wait_for(&socket, &mut process.0)?;
    let pid = process.0.id();
    let before = process::cpu_of(pid)?;
    let done = fio(&socket, connections, writes, round)?;
    let cpu = process::cpu_of(pid)?.saturating_sub(before);
    Ok(Run { per_second: done.per_second, cpu_per_write: cpu.as_secs_f64() * 1e6 / done.writes as f64 })
}

fn start(side: Side, base: &Path, socket: &Path, dir: &Path) -> Result<Child> {
    let base = base.canonicalize()?;
    let mut command = match side {
        Side::Fork | Side::Null => {
            let kind = if side == Side::Fork { Served::Fork } else { Served::Null };
            let kind = kind.to_possible_value().context("a name")?.get_name().to_owned();
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["nbd-server", &kind]).arg(&base).arg(socket);
            command
        }
        Side::Qemu => {
            let overlay = dir.join("overlay.qcow2");
            let mut make = Command::new("qemu-img");
            make.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(&base).arg(&overlay);
            let status =
                make.status().context("qemu-img could not be started; the package is called qemu-utils")?;
            ensure!(status.success(), "qemu-img failed");
            let mut command = Command::new("qemu-nbd");
            command
                .args(["--format=qcow2", "--persistent", "--shared=8", "--socket"])
                .arg(socket)
                .arg(overlay);
            command
        }
        Side::Nbdkit => {
            let mut command = Command::new("nbdkit");
            command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(socket);
            let mut file = std::ffi::OsString::from("file=");
            file.push(&base);
            command.args(["--filter=cow", "file"]).arg(file).env("TMPDIR", dir.canonicalize()?);
            command
        }
    };
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
        .spawn()
        .with_context(|| format!("{} could not be started", PathBuf::from(command.get_program()).display()))
}

/// Returns when the server greets.
fn wait_for(socket: &Path, server: &mut Child) -> Result<()> {
    let begun = Instant::now();
    while greet(socket).is_err() {
        if let Some(status) = server.try_wait()? {
            bail!("the server ended: {status}");
        }
        ensure!(begun.elapsed() < START_MAX, "the server does not listen");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Reads a server's greeting and takes leave with `NBD_OPT_ABORT`, so that it has nothing to complain of.
fn greet(socket: &Path) -> std::io::Result<()> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(START_MAX))?;
    // NBDMAGIC, IHAVEOPT, handshake flags.
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    // Client flags (fixed newstyle, no zeroes), then the option: IHAVEOPT, its number, no data.
    let mut leave = 3_u32.to_be_bytes().to_vec();
    leave.extend(b"IHAVEOPT");
    leave.extend([2_u32.to_be_bytes(), 0_u32.to_be_bytes()].concat());
    stream.write_all(&leave)?;
    // An acknowledgement, or the end.
    stream.read_to_end(&mut Vec::new()).map(drop)
}

/// What fio did.
#[derive(Debug, PartialEq)]
struct Done {
    per_second: f64,
    writes: u64,
}

fn fio(socket: &Path, connections: u32, writes: u64, round: u32) -> Result<Done> {
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let mut command = Command::new("fio");
    command
        .args(["--name=global", "--ioengine=nbd", "--rw=randwrite", "--bs=4k", "--norandommap"])
        .args(["--group_reporting", "--output-format=json"])
        .args(["--buffer_compress_percentage=60", "--buffer_compress_chunk=4096"])
        .arg(format!("--uri={uri}"))
        .arg(format!("--iodepth={DEPTH}"))
        .arg(format!("--io_size={}", (writes / u64::from(connections)).max(1) * 4096))
        .stdin(Stdio::null());
    for connection in 0..connections {
        // Each its own pages, the same for every server.
        command.arg(format!("--name=connection{connection}"));
        command.arg(format!("--randseed={}", round * connections + connection + 1));
    }
    let output = command.output().context("fio could not be started; the package is called fio")?;
    let told = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "fio failed: {told}{}", String::from_utf8_lossy(&output.stderr));
    parse(&told)
}

/// fio puts notes before its JSON.
fn parse(output: &str) -> Result<Done> {
    let json = output.find('{').map_or("", |at| &output[at..]);
    let value: Value = serde_json::from_str(json).context("fio's JSON")?;
    let job = &value["jobs"][0];
    ensure!(job["error"].as_i64() == Some(0), "fio met an error: {}", job["error"]);
    let side = &job["write"];
    let per_second = side["iops"].as_f64().context("fio gave no iops")?;
    let writes = side["total_ios"].as_u64().context("fio gave no total_ios")?;
    ensure!(per_second > 0.0 && writes > 0, "fio wrote nothing");
    Ok(Done { per_second, writes })
}

/// The first line of what each program says of its version.
fn versions() -> String {
    let mut text = String::from("Versions:");
    for program in ["fio", "qemu-nbd", "nbdkit"] {
        let output = Command::new(program).arg("--version").stdin(Stdio::null()).output();
        let told = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        let line = told.as_deref().ok().and_then(|told| told.lines().next()).unwrap_or("not installed");
        // Writing to a String cannot fail.
        let _ = write!(text, " {program}: {line};");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{Done, parse};

    #[test]
    fn fio_s_numbers_are_found_and_its_errors_too() {
        let text = |error, iops| {
            format!(
                "fio: connected to NBD server\n{{\"jobs\": [{{\"error\": {error}, \"write\": {{\"iops\": {iops}, \"total_ios\": 9}}}}]}}"
            )
        };
        assert_eq!(parse(&text(0, 2.5)).unwrap(), Done { per_second: 2.5, writes: 9 });
        assert!(parse(&text(5, 2.5)).is_err());
        assert!(parse(&text(0, 0.0)).is_err());
        assert!(parse("fio: no").is_err());
    }
}
