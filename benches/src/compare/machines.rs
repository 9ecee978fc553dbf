//! Devices for virtual machines, measured without a virtual machine. `qemu-img bench` measures
//! vhost-user-blk devices with one queue through libblkio, and the same devices over NBD.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use freestone::PAGE_BYTES;
use freestone_report::{Report, Row, Summary, Target, Unit};

use super::bound::Bound;
use super::groups::{Bench, WHOLE, command_line, copy};
use super::sides::{Running, Side, Starter};
use crate::data::Data;
use crate::options::Set;
use crate::programs::server_process::Server;
use crate::programs::tool;
use crate::transport::fio_nbd::Direction;

const BYTES: u64 = 512 << 20;
const ROUNDS: u32 = 7;
const QUICK_ROUNDS: u32 = 1;
/// Loads: queue depth, number of requests over vhost-user, and number of requests over NBD.
const DEPTHS: [(u32, u32, u32); 2] = [(1, 6_000, 4_000), (32, 150_000, 40_000)];
const QUICK_PART: u32 = 20;
/// Targets for vhost-user-blk, relative to the same disk over NBD: lowest speed, and largest CPU
/// time per request.
const OVER_NBD: f64 = 2.0;
const CPU_OF_NBD: f64 = 0.5;
/// Smallest part of the upper bound that meets the target. The bound is computed from the null
/// device and the bare codec.
const BOUND_PART: f64 = 0.85;

/// A device, and the protocol over which the client accesses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disk {
    Null,
    NullNbd,
    Same,
    SameNbd,
    Ram,
    QemuNull,
    QemuFile,
}

pub const DISKS: [Disk; 7] =
    [Disk::Null, Disk::NullNbd, Disk::Same, Disk::SameNbd, Disk::Ram, Disk::QemuNull, Disk::QemuFile];

impl Disk {
    pub fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::NullNbd => "null, NBD",
            Self::Same => "same-filled",
            Self::SameNbd => "same-filled, NBD",
            Self::Ram => "ram",
            Self::QemuNull => "qemu-storage-daemon null-co",
            Self::QemuFile => "qemu-storage-daemon file in tmpfs",
        }
    }

    pub fn is_nbd(self) -> bool {
        matches!(self, Self::NullNbd | Self::SameNbd)
    }
}

pub struct Member {
    pub disk: Disk,
    served: DiskServer,
    /// Socket of the NBD or vhost-user server.
    pub socket: PathBuf,
    pub command: String,
}

impl Member {
    pub fn server(&self) -> &Server {
        match &self.served {
            DiskServer::LibraryCodec(running) => &running.server,
            DiskServer::Qemu { server, .. } => server,
        }
    }

    /// Returns the image options with which `qemu-img` opens the device.
    fn image(&self) -> String {
        let path = self.socket.display();
        if self.disk.is_nbd() {
            format!("driver=nbd,server.type=unix,server.path={path}")
        } else {
            format!("driver=virtio-blk-vhost-user,path={path},cache.direct=on")
        }
    }
}

enum DiskServer {
    LibraryCodec(Running),
    Qemu { server: Server, _files: tempfile::TempDir },
}

/// Speed and server CPU time in one run of the client.
#[derive(Clone, Copy)]
pub struct Slice {
    pub per_second: f64,
    pub cpu_us: f64,
}

pub fn run(bench: &Bench<'_>) -> Result<Report> {
    let data = Data::open(Set::Fio, bench.options.bytes(BYTES), bench.options)?;
    let bytes = data.bytes() & !((1 << 20) - 1);
    let image = bench.run_dir.image(&data, bytes)?;
    let starter = bench.starter(&image, bytes);
    let members: Vec<_> = DISKS.iter().map(|disk| start(*disk, &starter)).collect::<Result<_>>()?;
    let bound = Bound::new(&data)?;
    let rounds = bench.options.rounds(ROUNDS, QUICK_ROUNDS);
    let mut rows = Vec::new();
    for direction in [Direction::Read, Direction::Write] {
        for (depth, many, few) in DEPTHS {
            let part = if bench.options.quick { QUICK_PART } else { 1 };
            let mut slices: Vec<Vec<Slice>> = vec![Vec::new(); members.len()];
            let mut codec = Vec::new();
            for round in 0..rounds {
                for turn in 0..members.len() {
                    let index = (turn + round as usize) % members.len();
                    let member = &members[index];
                    let count = if member.disk.is_nbd() { few } else { many } / part;
                    slices[index].push(slice(bench, member, direction, depth, count)?);
                }
                codec.push(bound.page_us(direction, round)?);
            }
            let what = if direction == Direction::Read { "reads" } else { "writes" };
            let name = format!("4 KiB {what}, depth {depth}");
            let results = DiskResults { name, is_deep: depth > 1, slices: &slices };
            rows.extend(results.rows());
            if direction == Direction::Read {
                rows.push(results.codec_bound_row(&codec));
            }
        }
    }
    let mut report = Report {
        rows,
        ..Report::new("compare: disks for virtual machines", data.description.clone(), bytes, "lz4")
    };
    for member in &members {
        report = report.note(format!("{}: {}", member.disk.name(), member.command));
    }
    let client = client(bench, "IMAGE", Direction::Read, 32, DEPTHS[1].1);
    Ok(report
        .note(format!("The client of all: {}", bench.peers.shown(&command_line(&client))))
        .note(format!(
            "The sides take turns, {rounds} runs of each. A ratio compares runs of the same round. Every write \
             has the same bytes, so ram stores same-filled pages. CPU time: the server's process."
        ))
        .note("What null and the codec give: the speed if a request took as long as one of our null device in \
               the same round, and then the bare codec.")
        .print())
}

pub struct DiskResults<'a> {
    pub name: String,
    /// True for loads with many requests in flight. Only these have targets.
    pub is_deep: bool,
    /// Slices of each disk of [`DISKS`]; empty for a disk that was not measured.
    pub slices: &'a [Vec<Slice>],
}

impl DiskResults<'_> {
    fn of(&self, disk: Disk, what: fn(&Slice) -> f64) -> Vec<f64> {
        let index = DISKS.iter().position(|one| *one == disk).unwrap_or_default();
        self.slices[index].iter().map(what).collect()
    }

    fn speed(&self, disk: Disk) -> Vec<f64> {
        self.of(disk, |one| one.per_second)
    }

    fn cpu(&self, disk: Disk) -> Vec<f64> {
        self.of(disk, |one| one.cpu_us)
    }

    /// Returns a row for each disk, and rows for the ratios of Freestone's disks to the others.
    pub fn rows(&self) -> Vec<Row> {
        let name = &self.name;
        let mut rows = Vec::new();
        for disk in DISKS.into_iter().filter(|disk| !self.speed(*disk).is_empty()) {
            let value = Summary::of(self.speed(disk).into_iter().map(|speed| speed / 1e3));
            let row = Row::new(format!("{name}: {}", disk.name()), Unit::Kiops, value);
            rows.push(row.part("CPU us a request", Summary::of(self.cpu(disk)).median));
        }
        let mut over = |ours: Disk, other: Disk, least: Option<f64>| {
            let theirs = self.speed(other);
            if theirs.is_empty() {
                return;
            }
            let ratio = Summary::ratio(&self.speed(ours), &theirs);
            let row = Row::ratio(format!("{name}: {} / {}", ours.name(), other.name()), ratio)
                .with_verdict(true)
                .withhold_if_unsteady();
            rows.push(match least.filter(|_| self.is_deep) {
                Some(least) => row.target(Target::AtLeast(least)),
                None => row,
            });
        };
        over(Disk::Null, Disk::NullNbd, Some(OVER_NBD));
        over(Disk::Same, Disk::SameNbd, Some(OVER_NBD));
        over(Disk::Null, Disk::QemuNull, Some(1.0));
        over(Disk::Same, Disk::QemuNull, Some(1.0));
        over(Disk::Ram, Disk::QemuFile, None);
        for (ours, nbd) in [(Disk::Null, Disk::NullNbd), (Disk::Same, Disk::SameNbd)] {
            let theirs = self.cpu(nbd);
            if theirs.is_empty() {
                continue;
            }
            let ratio = Summary::ratio(&self.cpu(ours), &theirs);
            let row = Row::ratio(format!("{name}: CPU a request, {} / {}", ours.name(), nbd.name()), ratio);
            let row = row.with_verdict(false).withhold_if_unsteady();
            rows.push(if self.is_deep { row.target(Target::AtMost(CPU_OF_NBD)) } else { row });
        }
        rows
    }

    /// Returns the row that compares the speed of the RAM disk with its upper bound. The bound is
    /// computed from the times of the null device and of the bare codec.
    fn codec_bound_row(&self, codec_us: &[f64]) -> Row {
        let null = self.speed(Disk::Null);
        let possible: Vec<_> =
            null.iter().zip(codec_us).map(|(null, codec)| 1e6 / (1e6 / null + codec)).collect();
        let ratio = Summary::ratio(&self.speed(Disk::Ram), &possible);
        let row = Row::ratio(format!("{}: ram / what null and the codec give", self.name), ratio)
            .withhold_if_unsteady();
        if self.is_deep { row.target(Target::AtLeast(BOUND_PART)) } else { row }
    }
}

/// Starts the server of a disk, and fills the disk if it is a RAM disk of Freestone.
pub fn start(disk: Disk, starter: &Starter) -> Result<Member> {
    let side = match disk {
        Disk::Null | Disk::NullNbd => Side::Null,
        Disk::Same | Disk::SameNbd | Disk::Ram => Side::Ram,
        Disk::QemuNull | Disk::QemuFile => return qemu(disk, starter),
    };
    let running = starter.start(side)?;
    match disk {
        Disk::Same | Disk::SameNbd => copy(&same_filled(starter)?, &running.socket, &WHOLE)?,
        Disk::Ram => copy(starter.image, &running.socket, &WHOLE)?,
        _ => {}
    }
    let mut command = running.command.clone();
    let mut socket = running.socket.clone();
    if !disk.is_nbd() {
        socket = running.socket.with_file_name("v");
        let mut publish = Command::new(starter.freestone);
        publish.args(["publish", "d", "--vhost-user"]).arg(format!("unix:{}", socket.display()));
        publish.arg("--control").arg(running.socket.with_file_name("control"));
        tool::run(&mut publish, "freestone")?;
        command += "; freestone publish d --vhost-user unix:v --control control";
    }
    Ok(Member { disk, served: DiskServer::LibraryCodec(running), socket, command })
}

/// Returns the path of an image in which every page is filled with its own number. Creates the
/// image if it does not exist.
fn same_filled(starter: &Starter) -> Result<PathBuf> {
    let path = starter.image.with_file_name("same.img");
    if !path.exists() {
        let mut image = vec![0_u8; starter.bytes as usize];
        for (number, page) in (1_u32..).zip(image.chunks_exact_mut(PAGE_BYTES)) {
            page.as_chunks_mut().0.fill(number.to_ne_bytes());
        }
        std::fs::write(&path, image).with_context(|| format!("{}", path.display()))?;
    }
    Ok(path)
}

fn qemu(disk: Disk, starter: &Starter) -> Result<Member> {
    let files = tempfile::tempdir_in("/dev/shm")?;
    let socket = files.path().join("v");
    let node = if disk == Disk::QemuNull {
        format!("driver=null-co,node-name=f0,size={},read-zeroes=on", starter.bytes)
    } else {
        let path = files.path().join("img");
        std::fs::copy(starter.image, &path).with_context(|| format!("{}", path.display()))?;
        format!("driver=file,node-name=f0,filename={},locking=off,aio=io_uring", path.display())
    };
    let mut command = starter.peers.program("qemu-storage-daemon");
    command.args(["--blockdev", &node, "--export"]).arg(format!(
        "type=vhost-user-blk,id=e,node-name=f0,addr.type=unix,addr.path={},writable=on,num-queues=4",
        socket.display()
    ));
    let shown =
        starter.peers.shown(&command_line(&command)).replace(&format!("{}/", files.path().display()), "");
    let server = Server::start_until(&command, &|| socket.exists())?;
    Ok(Member { disk, served: DiskServer::Qemu { server, _files: files }, socket, command: shown })
}

fn client(bench: &Bench<'_>, image: &str, direction: Direction, depth: u32, count: u32) -> Command {
    let mut command = bench.peers.program("qemu-img");
    command.args(["bench", "-t", "none", "--image-opts", "-s", "4096"]);
    if direction == Direction::Write {
        command.arg("-w");
    }
    command.args(["-d", &depth.to_string(), "-c", &count.to_string(), image]);
    bench.peers.with_modules(&mut command);
    command
}

fn slice(bench: &Bench<'_>, member: &Member, direction: Direction, depth: u32, count: u32) -> Result<Slice> {
    let server = member.server();
    let before = server.cpu()?;
    let output = tool::run(&mut client(bench, &member.image(), direction, depth, count), "qemu-utils")
        .with_context(|| member.disk.name())?;
    let cpu = server.cpu()?.saturating_sub(before);
    let seconds =
        output.split_once("completed in ").and_then(|(_, rest)| rest.split(' ').next()?.parse::<f64>().ok());
    let seconds = seconds.with_context(|| format!("qemu-img bench printed {output:?}"))?;
    ensure!(seconds > 0.0, "qemu-img bench took no time");
    Ok(Slice { per_second: f64::from(count) / seconds, cpu_us: cpu.as_secs_f64() * 1e6 / f64::from(count) })
}
