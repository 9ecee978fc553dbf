//! Freestone's own benchmarks. Each prints a table with the target beside what was measured, and
//! writes JSON.
//!
//! Numbers are medians of ratios between slices of two loops that take turns in one run: what else
//! happens on the machine meets both sides alike. Run with `cargo run --release -p
//! freestone-benches -- all`.
//!
//! The modules that are public are what the sources' experiments, in `research/`, measure with.

mod bare;
mod callgrind;
mod clients;
mod codec;
mod compare;
pub mod data;
pub mod export;
mod fio_nbd;
pub mod forks;
mod gate;
mod images;
mod instructions;
pub mod machine;
pub mod measure;
mod memory;
mod nbd_client;
pub mod options;
mod ours;
mod place;
mod process;
mod restarts;
mod served;
pub mod setup;
mod threads;
mod tls_client;
pub mod tool;
mod virtio;
pub mod writeback;
mod zipf;
pub mod zones;
mod zram;
mod zram_device;

use anyhow::Result;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use freestone_report::{Document, Report};

use crate::options::Options;

/// Freestone's own benchmarks.
#[derive(Parser)]
#[command(
    version,
    after_help = "The sources' experiments are another program: cargo xtask bench reproduce --help"
)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
    #[command(flatten)]
    options: Options,
}

#[derive(Subcommand)]
enum Bench {
    /// Random 4 KiB reads and rewrites of a RAM disk against the bare codec on the same pages, one
    /// thread.
    Codec,
    /// The library against the kernel's zram, one synchronous loop each (needs root and an unused
    /// zram device).
    Zram,
    /// Threads on distinct slots against as many copies of the bare codec loop.
    Threads,
    /// Memory: overhead after a fill, after rewrites, after compaction; what discarding returns;
    /// PSS.
    Memory,
    /// Codec, threads, zram and memory in turn.
    All,
    /// Spilling a whole disk, reads of spilled pages, what memory serves of a zipfian load,
    /// recompression. Needs fio and a disk that takes direct I/O.
    Writeback(writeback::Args),
    /// Snapshots and forks: against one lock, what a fork costs, over NBD beside qemu-nbd and
    /// nbdkit, 64 busy forks and a quiet one, a thousand forks. Needs fio with its nbd engine,
    /// qemu-utils and nbdkit.
    Forks(forks::Args),
    /// The engine and the server against their peers: the kernel's zram, nbdkit, qemu-nbd. Needs
    /// fio with its nbd engine and nbdcopy; Debian 13's peers are unpacked at the first use.
    Compare(compare::Args),
    /// Test drives: what the contract itself costs, memory backing beside memcpy, a lock a zone
    /// beside one a device.
    Zones(zones::Args),
    /// What lasts over restarts: the cost of a state, starts with many forks, how fast kept content
    /// is there again, what increments and saves cost.
    Restarts(restarts::Args),
    /// Clients of one server: what a connect costs it, what others notice of many connects and of clients
    /// that do not read.
    Clients(clients::Args),
    /// What another process does while `clients` measures.
    #[command(hide = true)]
    ClientsLoop(clients::Loop),
    /// Images in object storage: what their pages cost once they are cached, a boot and a fleet's start
    /// from a store over a line, pushes.
    Images(images::Args),
    /// Instructions of a read and of a write, and against another build of this program. Needs
    /// valgrind.
    Instructions(callgrind::Args),
    /// The loop that `instructions` counts.
    #[command(hide = true)]
    InstructionsLoop {
        #[command(flatten)]
        what: instructions::Loop,
        /// The disk has a backing device, which nothing is written to.
        #[arg(long)]
        backed: bool,
        /// The disk is a fork, which has every page itself.
        #[arg(long, conflicts_with = "backed")]
        fork: bool,
    },
    /// Instructions of the hot paths against the committed baseline; fails where one rose. Needs
    /// valgrind.
    Gate(gate::Args),
    /// The loop that `gate` counts.
    #[command(hide = true)]
    GateLoop(gate::Loop),
    /// The NBD server that `gate` counts.
    #[command(hide = true)]
    GateServer(gate::ServerArgs),
    /// The NBD server that `forks` measures.
    #[command(hide = true)]
    NbdServer(forks::ServerArgs),
}

impl Bench {
    /// What there is to report; nothing where another program looks on.
    fn run(&self, options: &Options) -> Result<Option<Vec<Report>>> {
        let reports = match self {
            Self::Codec => codec::run(options)?,
            Self::Zram => zram::run(options)?,
            Self::Threads => threads::run(options)?,
            Self::Memory => memory::run(options)?,
            Self::All => {
                let mut reports = codec::run(options)?;
                reports.extend(threads::run(options)?);
                reports.extend(zram::run(options)?);
                reports.extend(memory::run(options)?);
                reports
            }
            Self::Writeback(args) => writeback::run(args, options)?,
            Self::Forks(args) => forks::run(args, options)?,
            Self::Compare(args) => compare::run(args, options)?,
            Self::Zones(args) => zones::run(args, options)?,
            Self::Restarts(args) => restarts::run(args, options)?,
            Self::Clients(args) => clients::run(args, options)?,
            Self::ClientsLoop(what) => {
                what.run()?;
                return Ok(None);
            }
            Self::Images(args) => images::run(args, options)?,
            Self::Instructions(args) => callgrind::run(args)?,
            Self::InstructionsLoop { what, backed, fork } => {
                let ram = match (backed, fork) {
                    (true, _) => setup::backed_ram,
                    (_, true) => setup::forked_ram,
                    _ => setup::new_ram,
                }(instructions::DISK_BYTES)?;
                instructions::run(&ram, *what)?;
                return Ok(None);
            }
            Self::Gate(args) => gate::run(args)?,
            Self::GateLoop(what) => {
                what.run()?;
                return Ok(None);
            }
            Self::GateServer(args) => {
                gate::serve(args)?;
                return Ok(None);
            }
            Self::NbdServer(args) => {
                forks::serve(args)?;
                return Ok(None);
            }
        };
        Ok(Some(reports))
    }
}

/// A run that begins now, which is told.
pub fn begin() -> Document {
    let document = Document::begin(env!("CARGO_PKG_VERSION"), bare::lz4_version());
    println!("{}", document.machine);
    println!("command: {}\n", document.command);
    document
}

/// The program.
pub fn main() -> Result<()> {
    let matches = Cli::command().get_matches();
    let cli = Cli::from_arg_matches(&matches)?;
    cli.options.check()?;
    let mut document = begin();
    let Some(reports) = cli.bench.run(&cli.options)? else { return Ok(()) };
    document.reports = reports;
    document.finish(&cli.options.json_file(matches.subcommand_name().unwrap_or_default()))
}
