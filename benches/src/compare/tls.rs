//! Servers with TLS beside nbdkit and qemu-nbd, with the same certificate and the same client, in
//! turns. The null device shows the cost of the protocol and TLS, the RAM disk the cost with data.

use std::time::Duration;

use anyhow::{Context as _, Result};
use freestone_report::{Report, Row, Summary, Unit};
use freestone_testkit::certificates::{Authority, Usage};

use super::groups::Bench;
use super::sides::{Running, Side, Starter};
use crate::data::Data;
use crate::options::Set;
use crate::transport::fio_nbd::Direction;
use crate::transport::tls_client::{Client, Load};

const BYTES: u64 = 256 << 20;
const ROUNDS: u32 = 9;
const QUICK_ROUNDS: u32 = 2;
const SLICE_MS: u32 = 600;
const QUICK_SLICE_MS: u32 = 60;
const DEPTH: usize = 32;
const BLOCKS: [usize; 2] = [4 << 10, 128 << 10];
const CONNECTIONS: [usize; 2] = [1, 4];
const SIDES: [Side; 6] =
    [Side::Null, Side::NbdkitNull, Side::NullCo, Side::RamStore, Side::Malloc, Side::Raw];
/// Pairs of a Freestone side and the peer that it is compared with.
const PAIRS: [(Side, Side); 4] = [
    (Side::Null, Side::NbdkitNull),
    (Side::Null, Side::NullCo),
    (Side::RamStore, Side::Malloc),
    (Side::RamStore, Side::Raw),
];

/// Speed and server CPU time measured in one slice.
#[derive(Clone, Copy)]
struct Slice {
    per_second: f64,
    /// CPU time of the server per request, in microseconds.
    cpu_us: f64,
}

pub fn run(bench: &Bench<'_>) -> Result<Report> {
    let data = Data::open(Set::Fio, bench.options.bytes(BYTES), bench.options)?;
    let bytes = data.bytes() & !((1 << 20) - 1);
    let image = bench.run_dir.image(&data, bytes)?;
    let dir = tempfile::tempdir()?;
    let authority = Authority::new(dir.path().join("tls"));
    authority.sign("server", "localhost", Usage::Server);
    let tls = authority.dir();
    let starter = Starter { tls: Some(tls), ..bench.starter(&image, bytes) };
    let running: Vec<Running> =
        SIDES.iter().map(|side| starter.start(*side).context(side.name())).collect::<Result<_>>()?;
    let (mut rows, mut notes) = (Vec::new(), Vec::new());
    for (side, running) in SIDES.iter().zip(&running) {
        let client = Client::connect(&running.socket, tls).context(side.name())?;
        let command = running.command.replace(&tls.display().to_string(), "TLS");
        notes.push(format!("{}: {}: {command}", side.name(), client.cipher()));
    }
    let rounds = bench.options.rounds(ROUNDS, QUICK_ROUNDS);
    // Writes first, so that reads find data.
    for direction in [Direction::Write, Direction::Read] {
        for block_bytes in BLOCKS {
            for connections in CONNECTIONS {
                let mut slices: Vec<Vec<Slice>> = vec![Vec::new(); SIDES.len()];
                for round in 0..rounds {
                    for turn in 0..SIDES.len() {
                        let index = (turn + round as usize) % SIDES.len();
                        let load = Load {
                            direction,
                            block_bytes,
                            depth: DEPTH,
                            time: slice_time(bench),
                            seed: u64::from(round),
                        };
                        let slice = slice(&running[index], tls, load, connections);
                        slices[index].push(slice.with_context(|| SIDES[index].name())?);
                    }
                }
                let plural = if connections == 1 { "" } else { "s" };
                let what = if direction == Direction::Read { "reads" } else { "writes" };
                let name = format!("{} KiB {what}, {connections} connection{plural}", block_bytes >> 10);
                rows.extend(rows_of(&name, block_bytes, &slices));
            }
        }
    }
    let report = Report {
        rows,
        notes,
        ..Report::new("compare: NBD by TLS", data.description.clone(), bytes, "each its own")
    };
    Ok(report
        .note(format!("Versions: {}; {}.", bench.peers.version("nbdkit"), bench.peers.version("qemu-nbd")))
        .note(format!(
            "The client is this program, with rustls and a thread per connection, over a Unix socket, with \
             {DEPTH} requests in flight on each connection; servers do not require a client certificate. The \
             sides take turns, {rounds} slices of each. A ratio is Freestone's result over the peer's in the \
             same round. CPU time: the server's process."
        ))
        .print())
}

fn slice_time(bench: &Bench<'_>) -> Duration {
    let usual = if bench.options.quick { QUICK_SLICE_MS } else { SLICE_MS };
    Duration::from_millis(bench.options.slice_ms.unwrap_or(usual).into())
}

/// Runs the load on all connections at once. The slowest connection determines the duration of the
/// slice.
fn slice(running: &Running, tls: &std::path::Path, load: Load, connections: usize) -> Result<Slice> {
    let clients: Vec<Client> =
        (0..connections).map(|_| Client::connect(&running.socket, tls)).collect::<Result<_>>()?;
    let before = running.server.cpu()?;
    let done: Vec<Result<(u64, Duration)>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (clients.into_iter().enumerate())
            .map(|(number, mut client)| {
                let seed = load.seed * connections as u64 + number as u64 + 1;
                scope.spawn(move || client.run(Load { seed, ..load }))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| anyhow::bail!("a client thread panicked")))
            .collect()
    });
    let cpu = running.server.cpu()?.saturating_sub(before);
    let (mut requests, mut longest) = (0, Duration::ZERO);
    for done in done {
        let (completed, took) = done?;
        (requests, longest) = (requests + completed, longest.max(took));
    }
    Ok(Slice {
        per_second: requests as f64 / longest.as_secs_f64(),
        cpu_us: cpu.as_secs_f64() * 1e6 / requests as f64,
    })
}

fn rows_of(name: &str, block_bytes: usize, slices: &[Vec<Slice>]) -> Vec<Row> {
    let of = |side: Side, what: fn(&Slice) -> f64| -> Vec<f64> {
        let index = SIDES.iter().position(|one| *one == side).unwrap_or_default();
        slices[index].iter().map(what).collect()
    };
    let (speed, cpu) = (|slice: &Slice| slice.per_second, |slice: &Slice| slice.cpu_us);
    let mut rows = Vec::new();
    for side in SIDES {
        let per_second = Summary::of(of(side, speed).into_iter().map(|speed| speed / 1e3));
        rows.push(
            Row::new(format!("{name}: {}", side.name()), Unit::Kiops, per_second)
                .part("CPU us a request", Summary::of(of(side, cpu)).median)
                .part("MiB/s", per_second.median * 1e3 * block_bytes as f64 / f64::from(1 << 20)),
        );
    }
    for (ours, peer) in PAIRS {
        let pair = format!("{} / {}", ours.name(), peer.name());
        let faster = Summary::ratio(&of(ours, speed), &of(peer, speed));
        rows.push(Row::ratio(format!("{name}: {pair}"), faster).with_verdict(true).withhold_if_unsteady());
        let cheaper = Summary::ratio(&of(ours, cpu), &of(peer, cpu));
        rows.push(
            Row::ratio(format!("{name}: CPU a request, {pair}"), cheaper)
                .with_verdict(false)
                .withhold_if_unsteady(),
        );
    }
    rows
}
