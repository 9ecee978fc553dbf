//! `forks` benchmark: the cost of a single lock over the exception table, of a fork compared with a
//! disk, and of forks over NBD compared with peers. Also many busy forks beside a quiet one, and a
//! thousand forks of one base.

mod costs;
pub mod cow_tables;
mod density;
pub mod locks;
mod many;
mod nbd;
mod ram_tables;
mod server;
pub mod tables;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use freestone::codec::Algorithm;
use freestone::cow::StoreKind;
use freestone::file;
use freestone::ram::{Config, Family};
use freestone_report::Report;

pub use self::server::{ServerArgs, serve};
use crate::options::{Options, Size};

/// Time limit for freeing removed layers (disks, forks and snapshots).
const FREED_WAIT_MAX: Duration = Duration::from_secs(60);

/// Options of the `forks` benchmark.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Directory for images and the spill file [default: that of --data-dir]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Parts to measure, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    part: Vec<PartName>,
    /// tables: exception store of the snapshots on devices: N, P or PO
    #[arg(long, default_value = "N")]
    store: StoreKind,
    /// density: number of busy forks [default: 64, with --quick 8]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    busy: Option<u32>,
    /// density: bytes written to each busy fork [default: 128M, with --quick 4M]
    #[arg(long)]
    dirty: Option<Size>,
    /// thousand: number of forks [default: 1000, with --quick 40]
    #[arg(long, value_parser = clap::value_parser!(u32).range(20..=100_000))]
    forks: Option<u32>,
    /// thousand: size of the sparse base [default: 10G, with --quick 64M]
    #[arg(long)]
    base: Option<Size>,
    /// thousand: forks to create, write and remove one after the other [default: 100000, with
    /// --quick 500]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    cycles: Option<u32>,
}

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PartName {
    /// Writes of an origin and of a snapshot by 1 to 8 workers: one lock per page, one lock over
    /// all, locks by bucket.
    Tables,
    /// First writes and reads that fall through to the base, compared with a disk's.
    Costs,
    /// Forks over NBD, beside qemu-nbd and nbdkit.
    Nbd,
    /// Busy forks under eviction, and a quiet neighbour.
    Density,
    /// A thousand forks of one base.
    Thousand,
}

struct Bench<'a> {
    args: &'a Args,
    options: &'a Options,
    dir: PathBuf,
}

/// Runs the selected parts of the benchmark and returns their reports.
pub fn run(args: &Args, options: &Options) -> Result<Vec<Report>> {
    let dir = args.dir.clone().unwrap_or_else(|| options.data_dir.clone());
    std::fs::create_dir_all(&dir).with_context(|| format!("{}", dir.display()))?;
    let bench = Bench { args, options, dir };
    let wanted = |part| args.part.is_empty() || args.part.contains(&part);
    let mut reports = Vec::new();
    let mut add = |new: Vec<Report>| reports.extend(new.into_iter().map(Report::print));
    if wanted(PartName::Tables) {
        add(vec![ram_tables::origin(&bench)?]);
        add(vec![ram_tables::snapshot(&bench)?]);
        add(vec![cow_tables::origin(&bench)?]);
        add(vec![cow_tables::snapshot(&bench)?]);
    }
    if wanted(PartName::Costs) {
        add(costs::run(&bench)?);
    }
    if wanted(PartName::Nbd) {
        add(vec![nbd::run(&bench)?]);
    }
    if wanted(PartName::Density) {
        add(vec![density::run(&bench)?]);
    }
    if wanted(PartName::Thousand) {
        add(vec![many::run(&bench)?]);
    }
    Ok(reports)
}

impl Bench<'_> {
    /// Returns `given`, a number of the command line, or else the default for a full or a quick
    /// run.
    fn count(&self, given: Option<u32>, usual: u32, quick: u32) -> u64 {
        u64::from(given.unwrap_or(if self.options.quick { quick } else { usual }))
    }

    /// Returns `given`, a size of the command line, or else the default for a full or a quick run,
    /// in bytes. Rounds up to whole leaves of 2 MiB.
    fn size(&self, given: Option<Size>, usual: u64, quick: u64) -> u64 {
        let bytes = given.map_or(if self.options.quick { quick } else { usual }, |size| size.0);
        bytes.next_multiple_of(2 << 20)
    }
}

/// Creates an empty family (disks and their forks, which share memory) without a memory limit.
fn family() -> Result<Family> {
    Ok(Family::new(Config { comp_algorithm: Algorithm::Lz4, ..Config::default() })?)
}

/// Waits until a family has at most `layers` disks, forks and snapshots, and nothing left to free.
fn wait_until_freed(family: &Family, layers: u64) -> Result<()> {
    let wait_start = Instant::now();
    loop {
        let stat = family.stat();
        if stat.layers <= layers && stat.retiring == 0 {
            return Ok(());
        }
        if wait_start.elapsed() > FREED_WAIT_MAX {
            bail!("{} layers and {} bytes were not freed in a minute", stat.layers, stat.retiring);
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Image file of this benchmark, removed on drop.
struct Image(PathBuf);

impl Image {
    /// Creates a sparse file of `bytes` bytes, which is one hole.
    fn sparse(dir: &Path, name: &str, bytes: u64) -> Result<Self> {
        let image = Self(dir.join(format!("freestone-forks-{name}-{}.img", std::process::id())));
        let created = File::create(&image.0).and_then(|file| file.set_len(bytes));
        created.with_context(|| format!("{}", image.0.display()))?;
        Ok(image)
    }

    /// Opens the file as a base of forks.
    fn device(&self) -> Result<file::File> {
        base_device(&self.0)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // The file may be gone already; drop cannot report errors.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Opens a file as a base of forks: read-only, through the page cache.
fn base_device(path: &Path) -> Result<file::File> {
    let mut config = file::Config::new(path);
    config.read_only = true;
    Ok(file::File::open(&config)?)
}
