//! Disks for virtual machines with one queue and with four, beside qemu-storage-daemon, and over NBD with
//! the same number of connections. The client is this program, with one thread per queue.

use anyhow::{Context, Result, ensure};
use freestone_report::Report;

use super::groups::Bench;
use super::machines::{self, DISKS, DiskResults, Member, Slice};
use crate::data::Data;
use crate::options::Set;
use crate::transport::fio_nbd::{self, Amount, Direction};
use crate::transport::virtio::{Load, Virtio};

const BYTES: u64 = 512 << 20;
const ROUNDS: u32 = 7;
const QUICK_ROUNDS: u32 = 1;
const QUEUES: [usize; 2] = [1, 4];
/// Loads: queue depth, number of requests over vhost-user, and number of requests over NBD.
const DEPTHS: [(usize, u64, u64); 2] = [(1, 12_000, 0), (fio_nbd::DEPTH as usize, 200_000, 40_000)];
const QUICK_PART: u64 = 20;

/// A load: request type, queue depth, and numbers of queues and requests.
#[derive(Clone, Copy)]
struct Case {
    direction: Direction,
    depth: usize,
    queues: usize,
    /// Number of requests over vhost-user, and over NBD. Zero omits the disks with that protocol.
    counts: (u64, u64),
}

impl Case {
    fn name(self) -> String {
        let what = if self.direction == Direction::Read { "reads" } else { "writes" };
        let plural = if self.queues == 1 { "" } else { "s" };
        format!("4 KiB {what}, {} queue{plural}, depth {}", self.queues, self.depth)
    }
}

pub fn run(bench: &Bench<'_>) -> Result<Report> {
    let data = Data::open(Set::Fio, bench.options.bytes(BYTES), bench.options)?;
    let bytes = data.bytes() & !((1 << 20) - 1);
    let image = bench.run_dir.image(&data, bytes)?;
    let starter = bench.starter(&image, bytes);
    let members: Vec<_> = DISKS.iter().map(|disk| machines::start(*disk, &starter)).collect::<Result<_>>()?;
    let rounds = bench.options.rounds(ROUNDS, QUICK_ROUNDS);
    let part = if bench.options.quick { QUICK_PART } else { 1 };
    let mut rows = Vec::new();
    // Reads run first, because writes replace the data by same-filled pages.
    for direction in [Direction::Read, Direction::Write] {
        for queues in QUEUES {
            for (depth, many, few) in DEPTHS {
                let case = Case { direction, depth, queues, counts: (many / part, few / part) };
                let mut slices: Vec<Vec<Slice>> = vec![Vec::new(); members.len()];
                for round in 0..rounds {
                    for turn in 0..members.len() {
                        let index = (turn + round as usize) % members.len();
                        if let Some(slice) = slice(&members[index], case, round, bytes)? {
                            slices[index].push(slice);
                        }
                    }
                }
                let results = DiskResults { name: case.name(), is_deep: depth > 1, slices: &slices };
                rows.extend(results.rows());
            }
        }
    }
    let mut report = Report {
        rows,
        ..Report::new(
            "compare: disks for virtual machines, one queue and four",
            data.description.clone(),
            bytes,
            "lz4",
        )
    };
    for member in &members {
        report = report.note(format!("{}: {}", member.disk.name(), member.command));
    }
    Ok(report
        .note(format!(
            "The client is this program, with libblkio's driver and a thread per queue; for NBD it is fio, \
             with the same number of connections. The sides take turns, {rounds} runs of each. A ratio \
             compares runs of the same round. Every write has the same bytes, so ram stores same-filled pages. \
             CPU time: the server's process."
        ))
        .print())
}

/// Runs one slice. Returns None if the case has no requests for the protocol of the disk.
fn slice(member: &Member, case: Case, round: u32, bytes: u64) -> Result<Option<Slice>> {
    let count = if member.disk.is_nbd() { case.counts.1 } else { case.counts.0 };
    if count == 0 {
        return Ok(None);
    }
    let server = member.server();
    if member.disk.is_nbd() {
        let load = fio_nbd::Load {
            direction: case.direction,
            block_bytes: 4096,
            connections: case.queues as u32,
            amount: Amount::Requests(count),
            round,
        };
        let before = server.cpu()?;
        let done = fio_nbd::run(&member.socket, &load).with_context(|| member.disk.name())?;
        let cpu = server.cpu()?.saturating_sub(before).as_secs_f64() * 1e6 / done.requests as f64;
        return Ok(Some(Slice { per_second: done.per_second, cpu_us: cpu }));
    }
    let mut client = Virtio::connect(&member.socket, case.queues).with_context(|| member.disk.name())?;
    let load = Load { direction: case.direction, depth: case.depth, batch: 1 };
    let before = server.cpu()?;
    let took = client.run(load, count, bytes).with_context(|| member.disk.name())?;
    let cpu = server.cpu()?.saturating_sub(before);
    ensure!(!took.is_zero(), "the requests took no time");
    let per_second = count as f64 / took.as_secs_f64();
    Ok(Some(Slice { per_second, cpu_us: cpu.as_secs_f64() * 1e6 / count as f64 }))
}
