//! A fork over NBD beside a qcow2 overlay served by qemu-nbd and nbdkit's cow filter, all on one
//! raw base, and beside Freestone's null export. fio is the client of all.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use clap::ValueEnum;
use freestone_report::{Report, Row, Summary, Target, Unit};

use super::server::ServedDevice;
use super::{Bench, Image};
use crate::data::Data;
use crate::options::Set;
use crate::programs::server_process::Server;
use crate::programs::tool;
use crate::transport::fio_nbd::{self, Amount, COMPRESSIBLE_PERCENT, DEPTH, Direction, Load};

/// Default size of the base, in bytes.
const BYTES: u64 = 1 << 30;
const ROUNDS: u32 = 7;
/// Divisor of the base's pages. The quotient is the number of writes per slice.
const WRITTEN_DIVISOR: u64 = 2;
const CONNECTIONS: [u32; 2] = [1, 4];
/// Largest server CPU time per write that meets the target, relative to the peers.
const CPU_SHARE: f64 = 1.0 / 3.0;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Fork,
    Null,
    Qemu,
    Nbdkit,
}

const SIDES: [Side; 4] = [Side::Fork, Side::Null, Side::Qemu, Side::Nbdkit];

/// Speed and server CPU time measured in one slice.
struct SliceResult {
    per_second: f64,
    /// CPU time of the server per write, in microseconds.
    cpu_per_write: f64,
}

pub(super) fn run(bench: &Bench) -> Result<Report> {
    let data = Data::open(Set::Fio, bench.options.bytes(BYTES), bench.options)?;
    let base = Image::sparse(&bench.dir, "base", data.bytes())?;
    // Writing the base leaves it in the page cache.
    data.save(&base.0)?;
    let mut rows = Vec::new();
    for connections in CONNECTIONS {
        let mut runs = SIDES.map(|_| Vec::new());
        for round in 0..bench.options.rounds(ROUNDS, 2) {
            let mut order = SIDES;
            order.rotate_left(round as usize % SIDES.len());
            for side in order {
                let run = slice(bench, side, &base.0, data.pages / WRITTEN_DIVISOR, connections, round)
                    .with_context(|| format!("{side:?}"))?;
                runs[side as usize].push(run);
            }
        }
        rows.extend(compare(connections, &runs));
    }
    Ok(Report::new("forks: over NBD", format!("a raw base with {}", data.description), data.bytes(), "lz4")
        .note(format!("Versions:{}", ["fio", "qemu-nbd", "nbdkit"].map(version).concat()))
        .note(format!(
            "Random 4 KiB writes over a Unix socket, {} per slice (fio, nbd engine, {DEPTH} in flight on each \
             connection, {} % compressible buffers). Every slice has a new server with a new overlay, so most \
             are first writes. CPU time of a server: its process, user and system, from /proc. Later kernel \
             writeback of the peers' files is not included.",
            data.pages / WRITTEN_DIVISOR,
            COMPRESSIBLE_PERCENT
        ))
        .note(
            "qemu-nbd: a qcow2 overlay created by qemu-img in the same directory, default cache and aio. \
             nbdkit: --filter=cow file, with its overlay in the same directory. The base is in the page cache.",
        )
        .rows(rows))
}

fn compare(connections: u32, runs: &[Vec<SliceResult>; 4]) -> Vec<Row> {
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
        let row = Row::ratio(name(&format!("writes a second, fork / {what}")), ratio);
        rows.push(row.target(Target::AtLeast(bound)).withhold_if_unsteady());
    }
    for (side, what) in [(Side::Qemu, "qemu-nbd"), (Side::Nbdkit, "nbdkit")] {
        let ratio = Summary::ratio(&cpus(Side::Fork), &cpus(side));
        let row = Row::ratio(name(&format!("server CPU a write, fork / {what}")), ratio);
        rows.push(row.target(Target::AtMost(CPU_SHARE)).withhold_if_unsteady());
    }
    rows
}

fn slice(
    bench: &Bench,
    side: Side,
    base: &Path,
    writes: u64,
    connections: u32,
    round: u32,
) -> Result<SliceResult> {
    // Socket paths must be short, so sockets are in the temporary directory. Overlays may be large,
    // so they are in the directory for images.
    let sockets = tempfile::tempdir()?;
    let overlays = tempfile::tempdir_in(&bench.dir)?;
    let socket = sockets.path().join("nbd");
    let server = Server::start(&command(side, base, &socket, overlays.path())?, &socket)?;
    let before = server.cpu()?;
    let (direction, amount) = (Direction::Write, Amount::Requests(writes));
    let done = fio_nbd::run(&socket, &Load { direction, block_bytes: 4096, connections, amount, round })?;
    let cpu = server.cpu()?.saturating_sub(before);
    Ok(SliceResult {
        per_second: done.per_second,
        cpu_per_write: cpu.as_secs_f64() * 1e6 / done.requests as f64,
    })
}

fn command(side: Side, base: &Path, socket: &Path, dir: &Path) -> Result<Command> {
    let base = base.canonicalize()?;
    Ok(match side {
        Side::Fork | Side::Null => {
            let kind = if side == Side::Fork { ServedDevice::Fork } else { ServedDevice::Null };
            let kind = kind.to_possible_value().context("kind of device has no name")?.get_name().to_owned();
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["nbd-server", &kind]).arg(&base).arg(socket);
            command
        }
        Side::Qemu => {
            let overlay = dir.join("overlay.qcow2");
            let mut create = Command::new("qemu-img");
            create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(&base).arg(&overlay);
            tool::run(&mut create, "qemu-utils")?;
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
    })
}

fn version(program: &str) -> String {
    format!(" {program}: {};", tool::version(Command::new(program)))
}
