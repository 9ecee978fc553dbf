//! What clients of one server cost it, and what they notice of each other, with the real program: a
//! connect, many connects from elsewhere, and clients that do not take their replies.

mod connects;
mod group;
mod looped;
mod stalled;
mod storm;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use clap::ValueEnum;
use freestone_report::Report;

pub use self::looped::Loop;
use crate::options::Options;
use crate::ours;
use crate::place::{Own, Place};
use crate::served::Server;

/// What it can be told.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// What to measure, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    part: Vec<PartName>,
    /// The program to measure [default: the workspace's own, built as this program was, else the one
    /// beside it]
    #[arg(long)]
    freestone: Option<PathBuf>,
}

/// A part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PartName {
    /// What a connect costs the server.
    Connects,
    /// What a client notices of many connects.
    Storm,
    /// What clients notice of one that does not read its replies.
    Stalled,
}

/// What every part works with.
struct Bench<'a> {
    options: &'a Options,
    place: Place,
    freestone: PathBuf,
}

/// A server with its socket.
struct Served {
    server: Server,
    own: Own,
}

impl Bench<'_> {
    /// Serves one device, told by its words.
    fn serve(&self, device: &str) -> Result<Served> {
        let own = self.place.server()?;
        let socket = own.socket("nbd");
        let mut command = Command::new(&self.freestone);
        command.args(["serve", device]).arg(format!("--nbd=unix:{}", socket.display()));
        // Not where the user's own server listens.
        command.arg("--control").arg(own.socket("control"));
        let server = Server::start(&command, &socket)?;
        Ok(Served { server, own })
    }
}

impl Served {
    fn socket(&self) -> PathBuf {
        self.own.socket("nbd")
    }
}

/// Runs the parts.
pub fn run(args: &Args, options: &Options) -> Result<Vec<Report>> {
    let bench = Bench {
        options,
        place: Place::new(&options.data_dir, "clients-")?,
        freestone: ours::program(args.freestone.as_deref())?,
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

/// Connects, chooses the export and leaves.
fn visit(socket: &Path) -> Result<()> {
    crate::nbd_client::Client::connect(socket)?.end()
}
