//! `clients` benchmark: the cost of connections for a server, and their effect on other
//! connections. Measures a connect, a storm of connects, and clients that do not read their
//! replies. Runs the real `freestone` program.

mod background;
mod connects;
mod group;
mod stalled;
mod storm;

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::ValueEnum;
use freestone_report::Report;

pub use self::background::Loop;
use crate::options::Options;
use crate::programs::program_path;
use crate::programs::run_dir::RunDir;
use crate::programs::server_process::{Served, Server};

/// Options of the `clients` benchmark.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Parts to measure, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    part: Vec<PartName>,
    /// Path of the `freestone` program to measure [default: the workspace's own, built with this
    /// program's profile, else the one in this program's directory]
    #[arg(long)]
    freestone: Option<PathBuf>,
}

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PartName {
    /// CPU time that a connect costs the server.
    Connects,
    /// Latency of a client during many connects.
    Storm,
    /// Speed of clients beside one that does not read its replies.
    Stalled,
}

struct Bench<'a> {
    options: &'a Options,
    run_dir: RunDir,
    freestone: PathBuf,
}

impl Bench<'_> {
    /// Starts a server with one device. `device` is its description on the command line.
    fn serve(&self, device: &str) -> Result<Served> {
        let dir = self.run_dir.server()?;
        let server = Server::start(&dir.serve(&self.freestone, [device]), &dir.socket("nbd"))?;
        Ok(Served { server, dir })
    }
}

/// Runs the selected parts of the benchmark and returns their reports.
pub fn run(args: &Args, options: &Options) -> Result<Vec<Report>> {
    let bench = Bench {
        options,
        run_dir: RunDir::new(&options.data_dir, "clients-")?,
        freestone: program_path::program(args.freestone.as_deref())?,
    };
    let wanted = |part| args.part.is_empty() || args.part.contains(&part);
    let mut reports = Vec::new();
    if wanted(PartName::Connects) {
        reports.push(connects::run(&bench)?.print());
    }
    if wanted(PartName::Storm) {
        reports.push(storm::run(&bench)?.print());
    }
    if wanted(PartName::Stalled) {
        reports.push(stalled::run(&bench)?.print());
    }
    Ok(reports)
}

/// Connects to the server at `socket`, selects the default export and disconnects.
fn connect_and_disconnect(socket: &Path) -> Result<()> {
    crate::transport::nbd_client::Client::connect(socket)?.end()
}
