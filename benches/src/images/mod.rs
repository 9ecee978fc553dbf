//! `images` benchmark: images in object storage. Measures the cost of cached pages, boots, the start of a
//! fleet, and pushes.

mod boot;
mod cached;
mod disk;
mod fleet;
mod model;
mod push;
mod remote;
mod replay;
mod requested_objects;
mod servers;
mod test_image;

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;
use freestone_report::Report;

use crate::options::{Options, Set};
use crate::programs::program_path;
use crate::programs::run_dir::RunDir;

/// Options of the `images` benchmark.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Parts to measure, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    part: Vec<PartName>,
    /// push, boot, fleet: S3 server, `http://ADDRESS:PORT`, with the credentials of the environment [default: a
    /// server in this process]
    #[arg(long, value_name = "URL")]
    endpoint: Option<String>,
    /// Bucket on that server
    #[arg(long, requires = "endpoint")]
    bucket: Option<String>,
    /// fleet: path of the `freestone` program [default: the workspace's own, built with this program's profile,
    /// else the one in this program's directory]
    #[arg(long)]
    freestone: Option<PathBuf>,
}

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PartName {
    /// Reads of a fork over a cached image, beside one over a local file.
    Cached,
    /// The same with a cache on disk and not in memory.
    Disk,
    /// Boot of a guest from an uncached image.
    Boot,
    /// Many servers of a host that start at once, their requests to the store, and those of a thousand hosts by
    /// the model.
    Fleet,
    /// A push over a network link, and a push of changed pages.
    Push,
}

pub fn run(args: &Args, options: &Options) -> Result<Vec<Report>> {
    let run_dir = RunDir::new(&options.data_dir, "images-")?;
    let wanted = |part| args.part.is_empty() || args.part.contains(&part);
    let freestone =
        wanted(PartName::Fleet).then(|| program_path::program(args.freestone.as_deref())).transpose()?;
    let mut reports = Vec::new();
    for set in options.sets(&[Set::Real]) {
        let test_image = test_image::TestImage::new(&run_dir, set, options)?;
        if wanted(PartName::Cached) {
            reports.push(cached::run(&test_image, options)?.print());
        }
        if wanted(PartName::Disk) {
            reports.push(disk::run(&test_image, options)?.print());
        }
        if ![PartName::Push, PartName::Boot, PartName::Fleet].into_iter().any(wanted) {
            continue;
        }
        let remote = remote::Remote::new(args.endpoint.as_deref(), args.bucket.as_deref())?;
        if wanted(PartName::Boot) {
            reports.push(boot::run(&test_image, &remote, options)?.print());
        }
        if let Some(freestone) = &freestone {
            reports.extend(fleet::run(&test_image, &remote, &run_dir, freestone, options)?);
        }
        // The push changes the file, so it is the last part.
        if wanted(PartName::Push) {
            reports.push(push::run(&test_image, &remote, options)?.print());
        }
    }
    Ok(reports)
}
