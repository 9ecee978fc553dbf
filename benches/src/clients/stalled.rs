//! Speed of clients beside other clients that send many reads and receive the replies slowly or not
//! at all.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use freestone_report::{Report, Row, Summary, Target, Unit};

use super::Bench;
use crate::transport::nbd_client::Client;

const ROUNDS: u32 = 15;
const ROUNDS_QUICK: u32 = 2;
const SLICE_MS: u32 = 300;
const SLICE_QUICK_MS: u32 = 30;
/// Pause before a measurement, in which the server handles the other clients' reads as far as their
/// unread replies allow.
const SETTLE: Duration = Duration::from_millis(200);
/// Number of reads that each other client sends at once. The replies exceed the bytes that the
/// server buffers for a connection.
const READS: usize = 16;
const READ_BYTES: usize = 8 << 20;
/// Bytes that a slow reader receives before each pause of `SIP_PAUSE`.
const SIP_BYTES: usize = 4096;
const SIP_PAUSE: Duration = Duration::from_millis(5);
/// Lowest speed that meets the target, relative to clients that are alone.
const SPEED_RATIO_MIN: f64 = 0.9;
/// Number of measured clients, each with one request in flight.
const CLIENTS: usize = 2;
const BLOCKS: [usize; 2] = [4 << 10, 128 << 10];
const DEVICE: &str = "r=ram,disksize=256M";

/// Sides of the comparison: name, number of other clients, and true if these read their replies
/// slowly, false if never.
const SIDES: [(&str, usize, bool); 4] = [
    ("nobody", 0, false),
    ("a slow reader", 1, true),
    ("one that never reads", 1, false),
    ("64 that never read", 64, false),
];

pub(super) fn run(bench: &Bench<'_>) -> Result<Report> {
    let rounds = bench.options.rounds(ROUNDS, ROUNDS_QUICK);
    let usual = if bench.options.quick { SLICE_QUICK_MS } else { SLICE_MS };
    let slice = Duration::from_millis(bench.options.slice_ms.unwrap_or(usual).into());
    let served = bench.serve(DEVICE)?;
    let mut rows = Vec::new();
    for block_bytes in BLOCKS {
        let mut speeds = SIDES.map(|_| Vec::new());
        for round in 0..rounds as usize {
            for turn in 0..SIDES.len() {
                let side = (turn + round) % SIDES.len();
                let (_, others, is_slow) = SIDES[side];
                let speed = run_beside_clients(&served.dir.socket("nbd"), others, is_slow, || {
                    thread::sleep(SETTLE);
                    speed(&served.dir.socket("nbd"), block_bytes, slice)
                })?;
                speeds[side].push(speed / 1e3);
            }
        }
        let load = format!("{} KiB reads", block_bytes >> 10);
        for ((name, ..), speed) in SIDES.iter().zip(&speeds) {
            rows.push(Row::new(
                format!("{load} beside {name}"),
                Unit::Kiops,
                Summary::of(speed.iter().copied()),
            ));
        }
        for ((name, ..), speed) in SIDES.iter().zip(&speeds).skip(1) {
            let row = Row::ratio_of(format!("{load} beside {name} / beside nobody"), speed, &speeds[0]);
            rows.push(row.target(Target::AtLeast(SPEED_RATIO_MIN)));
        }
    }
    Ok(Report::new("clients: stalled", "", 0, "")
        .note(format!(
            "{CLIENTS} clients of a RAM disk over a Unix socket, each with one read at a time. Each other \
             client has sent {READS} reads of {} MiB and takes no replies, or {SIP_BYTES} bytes every {} ms. \
             {rounds} slices of each, in turns.",
            READ_BYTES >> 20,
            SIP_PAUSE.as_millis()
        ))
        .rows(rows))
}

/// Runs `measure` while the other clients are connected.
fn run_beside_clients<T>(
    socket: &Path,
    others: usize,
    is_slow: bool,
    measure: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let mut clients: Vec<Client> = (0..others).map(|_| Client::connect(socket)).collect::<Result<_>>()?;
    for client in &mut clients {
        for number in 0..READS {
            client.send_read(number as u64 * READ_BYTES as u64, READ_BYTES)?;
        }
    }
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        for client in clients.iter_mut().filter(|_| is_slow) {
            scope.spawn(|| {
                // Relaxed: the flag guards no other data. A failed read ends the slow reader, not
                // the measurement.
                while !ends.load(Ordering::Relaxed) && client.receive_and_drop(SIP_BYTES).is_ok() {
                    thread::sleep(SIP_PAUSE);
                }
            });
        }
        let done = measure();
        // Relaxed: the flag guards no other data.
        ends.store(true, Ordering::Relaxed);
        done
    })
}

/// Returns the requests per second of all measured clients together.
fn speed(socket: &Path, block_bytes: usize, slice: Duration) -> Result<f64> {
    let clients: Vec<Client> = (0..CLIENTS).map(|_| Client::connect(socket)).collect::<Result<_>>()?;
    thread::scope(|scope| {
        let threads: Vec<_> = (clients.into_iter())
            .map(|mut client| {
                scope.spawn(move || -> Result<f64> {
                    let (mut block, mut done) = (vec![0; block_bytes], 0_u32);
                    let start = Instant::now();
                    while start.elapsed() < slice || done == 0 {
                        client.read(u64::from(done % 100) * block_bytes as u64, &mut block)?;
                        done += 1;
                    }
                    let speed = f64::from(done) / start.elapsed().as_secs_f64();
                    client.end()?;
                    Ok(speed)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| anyhow::bail!("a client thread panicked")))
            .sum()
    })
}
