//! Server comparisons over NBD, in groups of equivalent devices. The slices of a group's servers
//! take turns.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::ValueEnum;
use freestone_report::{Report, Row, Summary, Target, Unit, mib};

use super::Args;
use super::bound::{Bound, RequestCost, UpperBound};
use super::peers::Peers;
use super::sides::{Group, Running, Side, Starter};
use crate::data::Data;
use crate::measure::median;
use crate::measure::process::Cpu;
use crate::options::{Options, Set};
use crate::programs::run_dir::RunDir;
use crate::programs::server_process::Memory;
use crate::programs::tool;
use crate::transport::fio_nbd::{self, Amount, COMPRESSIBLE_PERCENT, DEPTH, Direction, Load};

/// Default device size, in bytes.
const BYTES: u64 = 512 << 20;
/// Device sizes are multiples of this, because every peer accepts sizes in MiB.
const MIB: u64 = 1 << 20;
const ROUNDS: u32 = 7;
const QUICK_ROUNDS: u32 = 3;
const SLICE_MS: u32 = 700;
const QUICK_SLICE_MS: u32 = 100;
const CONNECTIONS: [u32; 2] = [1, 4];
const BLOCKS: [u32; 2] = [4 << 10, 128 << 10];
/// Smallest part of the upper bound that meets the target. The rest is for handing over requests,
/// scheduling and Freestone's tables.
const BOUND_PART: f64 = 0.9;
/// Divisor of an overlay's size. The quotient is the number of bytes written before reads, and in
/// every slice of writes.
const WRITTEN_DIVISOR: u64 = 2;

pub struct Bench<'a> {
    pub options: &'a Options,
    pub run_dir: &'a RunDir,
    pub peers: &'a Peers,
    pub freestone: &'a Path,
    pub args: &'a Args,
}

/// Speed and CPU times measured in one slice.
#[derive(Clone, Copy)]
struct Slice {
    per_second: f64,
    /// CPU time of the server per request, in microseconds.
    cpu_per_request: f64,
    /// CPU time of server and client per request, in microseconds.
    all_cpu_per_request: f64,
}

/// Request type, size and number of connections of a load.
#[derive(Clone, Copy)]
struct LoadKind {
    direction: Direction,
    block_bytes: u32,
    connections: u32,
}

/// Results of a load, with one entry of `slices` per side; None for a side that is absent or
/// failed.
struct LoadResult {
    name: String,
    block_bytes: u32,
    slices: Vec<Option<Vec<Slice>>>,
    /// Upper bound of each round; empty if the group has no upper bound.
    bounds: Vec<UpperBound>,
}

struct Member {
    side: Side,
    /// Reason why the side is no longer measured, or None while it is.
    absent: Option<String>,
    /// Server that is used by all slices, except slices of writes to overlays, which start new
    /// servers.
    running: Option<Running>,
    command: String,
    /// Memory of the server before and after its device was filled.
    memory: Option<(Memory, Memory)>,
}

impl Bench<'_> {
    /// Returns a starter of servers without TLS, whose devices have the size of the image.
    pub fn starter<'a>(&'a self, image: &'a Path, bytes: u64) -> Starter<'a> {
        let Self { run_dir, peers, freestone, .. } = *self;
        Starter { run_dir, peers, freestone, image, bytes, tls: None }
    }

    /// Runs the selected groups on one data set. Without `all` only reads of RAM disks are
    /// measured, because writes use fio's own data.
    pub fn run(&self, set: Set, all: bool) -> Result<Vec<Report>> {
        let data = Data::open(set, self.options.bytes(BYTES), self.options)?;
        let bytes = data.bytes() & !(MIB - 1);
        let image = self.run_dir.image(&data, bytes)?;
        let starter = self.starter(&image, bytes);
        let groups = if all { Group::value_variants() } else { &[Group::Memory] };
        let groups =
            groups.iter().filter(|group| self.args.group.is_empty() || self.args.group.contains(group));
        let directions = if all { &[Direction::Read, Direction::Write][..] } else { &[Direction::Read] };
        groups.map(|&group| self.group(group, directions, &starter, &data)).collect()
    }

    fn group(
        &self,
        group: Group,
        directions: &[Direction],
        starter: &Starter,
        data: &Data,
    ) -> Result<Report> {
        let mut members = Vec::new();
        for &side in group.sides() {
            let mut member =
                Member { side, absent: None, running: None, command: String::new(), memory: None };
            let filled = member.fill(group, starter);
            self.omit_failed_peer(&mut member, filled)?;
            members.push(member);
        }
        let bound = group.bounded().map(|_| Bound::new(data)).transpose()?;
        let mut measured = Vec::new();
        for &direction in directions {
            for block_bytes in BLOCKS {
                for connections in CONNECTIONS {
                    let kind = LoadKind { direction, block_bytes, connections };
                    measured.push(self.load(group, kind, starter, &mut members, bound.as_ref())?);
                }
            }
        }
        let mut rows = Vec::new();
        for load in &measured {
            rows.extend(load.rows(group));
        }
        rows.extend(memory_rows(group, &members, starter.bytes));
        Ok(Report {
            notes: self.notes(group, directions, &members),
            rows,
            ..Report::new(group.name(), data.description.clone(), starter.bytes, "each its own")
        }
        .print())
    }

    fn load(
        &self,
        group: Group,
        kind: LoadKind,
        starter: &Starter,
        members: &mut [Member],
        bound: Option<&Bound>,
    ) -> Result<LoadResult> {
        let LoadKind { direction, block_bytes, connections } = kind;
        let mut bounds = Vec::new();
        let mut slices: Vec<Vec<Slice>> = members.iter().map(|_| Vec::new()).collect();
        // Overlays are compared by the first write to each block. So each slice of writes starts
        // with a new overlay, and all slices write the same amount.
        let needs_new_server = group == Group::Overlay && direction == Direction::Write;
        let amount = if needs_new_server {
            Amount::Requests(starter.bytes / WRITTEN_DIVISOR / u64::from(block_bytes))
        } else {
            Amount::Time(self.slice())
        };
        for round in 0..self.rounds() {
            let load = Load { direction, block_bytes, connections, amount, round };
            for turn in 0..members.len() {
                let index = (turn + round as usize) % members.len();
                let member = &mut members[index];
                if member.absent.is_some() {
                    continue;
                }
                let slice = if needs_new_server {
                    starter.start(member.side).and_then(|new| slice(&new, &load))
                } else {
                    member.slice(&load)
                };
                if let Some(slice) = self.omit_failed_peer(member, slice)? {
                    slices[index].push(slice);
                    if let Some(bound) = bound.filter(|_| members[index].side == Side::Null) {
                        let pages = u64::from(block_bytes / 4096);
                        let (server_us, all_us) = (slice.cpu_per_request, slice.all_cpu_per_request);
                        let request_cost = RequestCost { connections, server_us, all_us };
                        bounds.push(bound.of(direction, pages, request_cost, round)?);
                    }
                }
            }
        }
        let plural = if connections == 1 { "" } else { "s" };
        let what = if direction == Direction::Read { "reads" } else { "writes" };
        Ok(LoadResult {
            name: format!("{} KiB {what}, {connections} connection{plural}", block_bytes >> 10),
            block_bytes,
            bounds,
            slices: slices
                .into_iter()
                .zip(members)
                .map(|(slices, member)| member.absent.is_none().then_some(slices))
                .collect(),
        })
    }

    /// Handles the failure of a side. A peer that fails is omitted from then on, its result is
    /// None, and the table reports it. A failure of Freestone's side, or of any side with
    /// `--require-peers`, is an error.
    fn omit_failed_peer<T>(&self, member: &mut Member, result: Result<T>) -> Result<Option<T>> {
        match result {
            Ok(done) => Ok(Some(done)),
            Err(error) if self.args.peers.require_peers || member.side.is_ours() => {
                Err(error.context(member.side.name()))
            }
            Err(error) => {
                member.running = None;
                let why = format!("{error:#}");
                eprintln!("{} is omitted: {why}", member.side.name());
                member.absent = Some(why);
                Ok(None)
            }
        }
    }

    fn rounds(&self) -> u32 {
        self.options.rounds(ROUNDS, QUICK_ROUNDS)
    }

    fn slice(&self) -> Duration {
        let usual = if self.options.quick { QUICK_SLICE_MS } else { SLICE_MS };
        Duration::from_millis(self.options.slice_ms.unwrap_or(usual).into())
    }

    fn notes(&self, group: Group, directions: &[Direction], members: &[Member]) -> Vec<String> {
        let mut notes = vec![format!(
            "Versions: {}; {}; {}; {}. The peers: {}.",
            tool::version(Command::new(self.freestone)),
            tool::version(Command::new("fio")),
            self.peers.version("nbdkit"),
            self.peers.version("qemu-nbd"),
            self.peers.origin()
        )];
        notes.extend(self.peers.fallback_note.clone());
        for Member { side, absent, .. } in members {
            notes.extend(
                absent.as_ref().map(|why| format!("Absent: {}: {}", side.name(), self.peers.shown(why))),
            );
        }
        let load = Load {
            direction: directions[0],
            block_bytes: BLOCKS[0],
            connections: 1,
            amount: Amount::Time(self.slice()),
            round: 0,
        };
        notes.push(format!(
            "fio is the client of all sides, over a Unix socket, with {DEPTH} requests in flight on each \
             connection: {}",
            command_line(&fio_nbd::command(Path::new("nbd"), &load))
        ));
        for Member { side, command, absent, .. } in members {
            if absent.is_none() {
                notes.push(format!("{}: {command}", side.name()));
            }
        }
        notes.push(format!(
            "The sides take turns, {} slices of each. A ratio is Freestone's result over the peer's in the \
             same round; it is omitted if its spread is too wide. \"behind\" and \"ahead\": both quartiles \
             agree. CPU time: the server's process, user and system, from /proc.",
            self.rounds()
        ));
        if group.bounded().is_some() {
            notes.push(
                "What the machine can give: the speed with all CPUs if each request cost the CPU time of our \
                 null export and its client in the same round, and that of the bare codec for the same number \
                 of pages of the data. A loop on each CPU at once measures the codec."
                    .into(),
            );
        }
        notes.push(match group {
            Group::Memory if directions.contains(&Direction::Write) => format!(
                "The device is filled with the data by nbdcopy; reads come first, then writes of fio's {COMPRESSIBLE_PERCENT} % compressible \
                 buffers. {MEMORY}"
            ),
            Group::Memory => format!("The device is filled with the data by nbdcopy. {MEMORY}"),
            Group::Null => "The devices store nothing and read as zeroes, so the numbers show the cost of the \
                            protocol in each server.".into(),
            Group::Overlay => format!(
                "The base is in the page cache. Before the reads fio writes half of the pages, in random \
                 order. Every slice of writes has a new overlay and writes half of its size, so most are first \
                 writes. {MEMORY} Bytes on disk are listed separately. CPU time of later kernel writeback is \
                 not included."
            ),
        });
        notes
    }
}

const MEMORY: &str =
    "Memory: the server's PSS afterwards, and its files in tmpfs as far as they exceed the mapped part.";

impl Member {
    /// Starts the server and stores the initial content of its device.
    fn fill(&mut self, group: Group, starter: &Starter) -> Result<()> {
        let running = starter.start(self.side)?;
        self.command.clone_from(&running.command);
        let before = running.server.memory()?;
        match group {
            Group::Memory => copy(starter.image, &running.socket, &WHOLE)?,
            Group::Null => {}
            Group::Overlay => {
                let half = Load {
                    direction: Direction::Write,
                    block_bytes: 4096,
                    connections: 1,
                    amount: Amount::Distinct(starter.bytes / WRITTEN_DIVISOR / 4096),
                    round: 0,
                };
                fio_nbd::run(&running.socket, &half)?;
            }
        }
        self.memory = Some((before, running.server.memory()?));
        self.running = Some(running);
        Ok(())
    }

    fn slice(&self, load: &Load) -> Result<Slice> {
        slice(self.running.as_ref().context("the server has been stopped")?, load)
    }
}

fn slice(running: &Running, load: &Load) -> Result<Slice> {
    let before = (running.server.cpu()?, Cpu::of_ended_children()?);
    let done = fio_nbd::run(&running.socket, load)?;
    let cpu = running.server.cpu()?.saturating_sub(before.0);
    let client = (Cpu::of_ended_children()? - before.1).total();
    let per_request = |time: Duration| time.as_secs_f64() * 1e6 / done.requests as f64;
    Ok(Slice {
        per_second: done.per_second,
        cpu_per_request: per_request(cpu),
        all_cpu_per_request: per_request(cpu + client),
    })
}

/// Returns a command line as a user would type it.
pub fn command_line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// Options of nbdcopy with which it writes zeroes, too.
pub const WHOLE: [&str; 2] = ["--allocated", "--sparse=0"];

/// Writes an image to the default export of the server at `socket`, with these options of nbdcopy.
pub fn copy(image: &Path, socket: &Path, options: &[&str]) -> Result<()> {
    let mut command = Command::new("nbdcopy");
    command.args(options).arg(image);
    command.arg(format!("nbd+unix:///?socket={}", socket.display()));
    tool::run(&mut command, "libnbd-bin").map(drop)
}

impl LoadResult {
    fn rows(&self, group: Group) -> Vec<Row> {
        let sides = group.sides();
        let of = |side: Side| {
            let index = sides.iter().position(|one| *one == side);
            index.and_then(|index| self.slices[index].as_deref())
        };
        let speeds = |slices: &[Slice]| slices.iter().map(|slice| slice.per_second).collect::<Vec<_>>();
        let cpus = |slices: &[Slice]| slices.iter().map(|slice| slice.cpu_per_request).collect::<Vec<_>>();
        let mut rows = Vec::new();
        for &side in sides {
            let name = format!("{}: {}", self.name, side.name());
            let Some(slices) = of(side) else {
                rows.push(Row::absent(name, Unit::Kiops));
                continue;
            };
            let speed = Summary::of(speeds(slices).into_iter().map(|speed| speed / 1e3));
            let row = Row::new(name, Unit::Kiops, speed);
            let row = row.part("CPU us a request", Summary::of(cpus(slices)).median);
            rows.push(row.part("MiB/s", speed.median * 1e3 * f64::from(self.block_bytes) / MIB as f64));
        }
        for &(ours, peer) in group.pairs() {
            let name = |what: &str| format!("{}: {what}{} / {}", self.name, ours.name(), peer.name());
            let (Some(mine), Some(theirs)) = (of(ours), of(peer)) else {
                rows.push(Row::absent(name(""), Unit::Ratio));
                rows.push(Row::absent(name("CPU a request, "), Unit::Ratio));
                continue;
            };
            let speed = Summary::ratio(&speeds(mine), &speeds(theirs));
            rows.push(Row::ratio(name(""), speed).with_verdict(true).withhold_if_unsteady());
            let cpu = Summary::ratio(&cpus(mine), &cpus(theirs));
            rows.push(Row::ratio(name("CPU a request, "), cpu).with_verdict(false).withhold_if_unsteady());
        }
        if let Some(ours) = group.bounded()
            && let Some(mine) = of(ours)
            && !self.bounds.is_empty()
        {
            let name = format!("{}: {} / what the machine can give", self.name, ours.name());
            let of = |what: fn(&UpperBound) -> f64| self.bounds.iter().map(what).collect::<Vec<_>>();
            let row = Row::ratio(name, Summary::ratio(&speeds(mine), &of(|bound| bound.here)))
                .withhold_if_unsteady();
            rows.push(
                row.target(Target::AtLeast(BOUND_PART))
                    .part("k/s", median(&of(|bound| bound.here)) / 1e3)
                    .part("16 CPUs k/s", median(&of(|bound| bound.modelled)) / 1e3)
                    .part("of them codec", median(&of(|bound| bound.codec_cpus))),
            );
        }
        rows
    }
}

/// Returns rows with the bytes of server memory per byte stored on the device.
fn memory_rows(group: Group, members: &[Member], device_bytes: u64) -> Vec<Row> {
    let stored = match group {
        Group::Memory => device_bytes,
        Group::Overlay => device_bytes / WRITTEN_DIVISOR,
        Group::Null => return Vec::new(),
    };
    let of = |side: Side| {
        let member = members.iter().find(|member| member.side == side);
        member.and_then(|member| member.memory)
    };
    let part = |bytes: u64| bytes as f64 / stored as f64;
    let mut rows = Vec::new();
    for &side in group.sides() {
        let name = format!("memory a stored byte: {}", side.name());
        let Some((before, after)) = of(side) else {
            rows.push(Row::absent(name, Unit::Ratio));
            continue;
        };
        let row = Row::ratio(name, Summary::one(part(after.bytes)));
        rows.push(
            row.part("MiB", mib(after.bytes))
                .part("MiB before", mib(before.bytes))
                .part("on disk MiB", mib(after.disk_bytes)),
        );
    }
    for &(ours, peer) in group.pairs() {
        let name = format!("memory a stored byte: {} / {}", ours.name(), peer.name());
        rows.push(match (of(ours), of(peer)) {
            (Some((_, mine)), Some((_, theirs))) => {
                let ratio = Summary::one(mine.bytes as f64 / theirs.bytes as f64);
                Row::ratio(name, ratio).with_verdict(false)
            }
            _ => Row::absent(name, Unit::Ratio),
        });
    }
    rows
}
