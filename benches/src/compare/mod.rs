//! The engine and the server beside what a user would take instead, on the same data and with the
//! same client. What calls in process and what goes through a server stand in different tables;
//! where a peer is better, the table says "behind".

mod bound;
mod groups;
mod machines;
mod peers;
mod queues;
mod sides;
mod tls;

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;
use freestone_report::Report;

use self::groups::Group;
use self::peers::{Peers, Wanted};
use crate::options::{Options, Set};
use crate::place::Place;
use crate::zram_device::ZramDevice;
use crate::{ours, zram};

/// What it can be told.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// What to compare, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    part: Vec<PartName>,
    /// server: which kinds of devices, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    group: Vec<Group>,
    /// server: which versions of nbdkit and qemu-nbd.
    #[arg(long, value_enum, default_value = "debian13")]
    peers: Wanted,
    /// server: where those of Debian 13 are unpacked.
    #[arg(long, default_value = "target/peers/debian13")]
    peers_dir: PathBuf,
    /// server: fail where a peer cannot be had or started, instead of saying so in the table.
    #[arg(long)]
    require_peers: bool,
    /// server: the program to measure [default: the workspace's own, built as this program was,
    /// else the one beside it]
    #[arg(long)]
    freestone: Option<PathBuf>,
}

/// A part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PartName {
    /// The library against the kernel's zram.
    Engine,
    /// `freestone serve` against nbdkit and qemu-nbd.
    Server,
    /// Disks for virtual machines against qemu-storage-daemon and NBD.
    Machines,
    /// The same with one queue and with four, and a client of our own.
    Queues,
    /// By TLS, against nbdkit and qemu-nbd, with a client of our own.
    Tls,
}

/// Runs the parts.
pub fn run(args: &Args, options: &Options) -> Result<Vec<Report>> {
    let wanted = |part| args.part.is_empty() || args.part.contains(&part);
    let mut reports = Vec::new();
    if wanted(PartName::Engine) {
        reports.extend(engine(options)?);
    }
    if [PartName::Server, PartName::Machines, PartName::Queues, PartName::Tls].into_iter().any(wanted) {
        let peers = Peers::find(args)?;
        let freestone = ours::program(args.freestone.as_deref())?;
        let place = Place::new(&options.data_dir, "compare-")?;
        let bench = groups::Bench { options, place: &place, peers: &peers, freestone: &freestone, args };
        if wanted(PartName::Server) {
            for (number, set) in options.sets(&[Set::Fio, Set::Real]).into_iter().enumerate() {
                reports.extend(bench.run(set, number == 0)?);
            }
        }
        if args.part.contains(&PartName::Machines) || (args.part.is_empty() && peers.are_unpacked()) {
            reports.push(machines::run(&bench)?);
        } else if args.part.is_empty() {
            eprintln!(
                "disks for virtual machines are left out: they need Debian 13's qemu-img, with libblkio"
            );
        }
        if args.part.contains(&PartName::Queues) || (args.part.is_empty() && peers.are_unpacked()) {
            reports.push(queues::run(&bench)?);
        }
        if wanted(PartName::Tls) {
            reports.push(tls::run(&bench)?);
        }
    }
    Ok(reports)
}

/// The library and zram, or why not.
fn engine(options: &Options) -> Result<Vec<Report>> {
    // Small, and given back at once: a device that can be had now can be had again.
    if let Err(error) = ZramDevice::claim(&options.zram, "lz4", 1 << 20) {
        let report = Report::new("zram", "none", 0, "none")
            .note(format!("The kernel's zram is not compared with: {error:#}."));
        return Ok(vec![report.print()]);
    }
    zram::run(options)
}
