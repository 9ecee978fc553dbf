//! Images in object storage: what their pages cost once they are cached, and what it takes to have them.

mod boot;
mod cached;
mod disk;
mod facts;
mod fleet;
mod kit;
mod model;
mod push;
mod remote;
mod replay;
mod servers;

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;
use freestone_report::Report;

use crate::options::{Options, Set};
use crate::ours;
use crate::place::Place;

/// What it can be told.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// What to measure, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    part: Vec<PartName>,
    /// push, boot, fleet: an S3 server, `http://ADDRESS:PORT`, with the credentials of the environment [default:
    /// one in this process]
    #[arg(long, value_name = "URL")]
    endpoint: Option<String>,
    /// The bucket there.
    #[arg(long, requires = "endpoint")]
    bucket: Option<String>,
    /// fleet: the program [default: the workspace's own, built as this program was, else the one beside it]
    #[arg(long)]
    freestone: Option<PathBuf>,
}

/// A part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PartName {
    /// Reads of a fork over an image that is cached, beside one over a local file.
    Cached,
    /// The same where it is cached on the disk, and not in memory.
    Disk,
    /// What a guest reads while it starts, from an image of which nothing is cached.
    Boot,
    /// Many servers of a host that start at once, what they ask of the store, and what a thousand hosts would.
    Fleet,
    /// A push over a line, and one of what changed.
    Push,
}

/// Runs the parts.
pub fn run(args: &Args, options: &Options) -> Result<Vec<Report>> {
    let place = Place::new(&options.data_dir, "images-")?;
    let wanted = |part| args.part.is_empty() || args.part.contains(&part);
    let freestone = wanted(PartName::Fleet).then(|| ours::program(args.freestone.as_deref())).transpose()?;
    let mut reports = Vec::new();
    for set in options.sets(&[Set::Real]) {
        let kit = kit::Kit::new(&place, set, options)?;
        if wanted(PartName::Cached) {
            reports.push(cached::run(&kit, options)?.print());
        }
        if wanted(PartName::Disk) {
            reports.push(disk::run(&kit, options)?.print());
        }
        if ![PartName::Push, PartName::Boot, PartName::Fleet].into_iter().any(wanted) {
            continue;
        }
        let remote = remote::Remote::new(args.endpoint.as_deref(), args.bucket.as_deref())?;
        if wanted(PartName::Boot) {
            reports.push(boot::run(&kit, &remote, options)?.print());
        }
        if let Some(freestone) = &freestone {
            reports.extend(fleet::run(&kit, &remote, &place, freestone, options)?);
        }
        // It changes the file.
        if wanted(PartName::Push) {
            reports.push(push::run(&kit, &remote, options)?.print());
        }
    }
    Ok(reports)
}
