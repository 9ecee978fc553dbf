//! `compare` benchmark: compares the engine and the server with the alternatives that a user has,
//! on the same data and with the same client. In-process calls and servers have separate tables. If
//! a peer is better, the table says "behind".

mod bound;
pub(crate) mod groups;
mod machines;
pub(crate) mod peers;
mod queues;
pub(crate) mod sides;
mod tls;

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;
use freestone_report::Report;

use self::peers::{PeerArgs, Peers};
use self::sides::Group;
use crate::engine::zram;
use crate::engine::zram_device::ZramDevice;
use crate::options::{Options, Set};
use crate::programs::program_path;
use crate::programs::run_dir::RunDir;

/// Options of the `compare` benchmark.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Parts to run, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    part: Vec<PartName>,
    /// server: kinds of devices, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    group: Vec<Group>,
    #[command(flatten)]
    peers: PeerArgs,
    /// server: path of the `freestone` program to measure [default: the workspace's own, built with
    /// this program's profile, else the one in this program's directory]
    #[arg(long)]
    freestone: Option<PathBuf>,
}

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PartName {
    /// Library against the kernel's zram.
    Engine,
    /// `freestone serve` against nbdkit and qemu-nbd.
    Server,
    /// Disks for virtual machines against qemu-storage-daemon and NBD.
    Machines,
    /// Disks for virtual machines with one queue and with four, with this program as the client.
    Queues,
    /// NBD over TLS against nbdkit and qemu-nbd, with this program as the client.
    Tls,
}

/// Runs the selected parts of the benchmark and returns their reports.
pub fn run(args: &Args, options: &Options) -> Result<Vec<Report>> {
    let wanted = |part| args.part.is_empty() || args.part.contains(&part);
    let mut reports = Vec::new();
    if wanted(PartName::Engine) {
        reports.extend(engine(options)?);
    }
    if [PartName::Server, PartName::Machines, PartName::Queues, PartName::Tls].into_iter().any(wanted) {
        let peers = Peers::find(&args.peers)?;
        let freestone = program_path::program(args.freestone.as_deref())?;
        let run_dir = RunDir::new(&options.data_dir, "compare-")?;
        let bench = groups::Bench { options, run_dir: &run_dir, peers: &peers, freestone: &freestone, args };
        if wanted(PartName::Server) {
            for (number, set) in options.sets(&[Set::Fio, Set::Real]).into_iter().enumerate() {
                reports.extend(bench.run(set, number == 0)?);
            }
        }
        if args.part.contains(&PartName::Machines) || (args.part.is_empty() && peers.are_unpacked()) {
            reports.push(machines::run(&bench)?);
        } else if args.part.is_empty() {
            eprintln!(
                "disks for virtual machines are omitted: they need Debian 13's qemu-img, with libblkio"
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

/// Compares the Freestone library with the kernel's zram, or reports why zram is unavailable.
fn engine(options: &Options) -> Result<Vec<Report>> {
    // Check that zram is available with a small device that is released at once. A device that can
    // be claimed now can be claimed again.
    if let Err(error) = ZramDevice::claim(&options.zram, "lz4", 1 << 20) {
        let report = Report::new("zram", "none", 0, "none")
            .note(format!("The kernel's zram is not compared with: {error:#}."));
        return Ok(vec![report.print()]);
    }
    zram::run(options)
}
