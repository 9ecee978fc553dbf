//! Freestone's benchmarks. Each prints a table with targets and measured values, and writes JSON.
//!
//! Numbers are medians of ratios between slices of two loops that take turns in one run, so other load on
//! the machine affects both sides alike. Run with `cargo run --release -p freestone-benches -- all`.
//!
//! Public modules are used by the experiments in `research/`.

#![allow(missing_docs, reason = "a tool: only what a name does not say has a comment")]

mod callgrind;
mod clients;
mod compare;
pub mod data;
mod density;
mod engine;
pub mod forks;
mod gate;
mod images;
pub mod measure;
pub mod options;
mod programs;
mod restarts;
mod transport;
pub mod writeback;
pub mod zones;

pub use engine::setup;
pub use measure::machine;
pub use programs::tool;
pub use transport::export;

use anyhow::Result;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use freestone_report::{Document, Report};

use callgrind::instructions;
use engine::{codec, memory, threads, zram};
use options::Options;

/// Freestone's benchmarks.
#[derive(Parser)]
#[command(
    version,
    after_help = "The experiments of the sources are a separate program: cargo xtask bench reproduce --help"
)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
    #[command(flatten)]
    options: Options,
}

#[derive(Subcommand)]
enum Bench {
    /// Random 4 KiB reads and rewrites of a RAM disk against the bare codec on the same pages, with one
    /// thread.
    Codec,
    /// The library against the kernel's zram, with one synchronous loop each (needs root and an unused
    /// zram device).
    Zram,
    /// Threads on distinct slots against the same number of copies of the bare codec loop.
    Threads,
    /// Memory: overhead after a fill, after rewrites and after compaction; memory released by discards;
    /// PSS.
    Memory,
    /// Codec, threads, zram and memory in turn.
    All,
    /// Writeback of a whole disk, reads of written-back pages, hit rate of a zipfian load, recompression.
    /// Needs fio and a disk that supports direct I/O.
    Writeback(writeback::Args),
    /// Snapshots and forks: against one lock, cost of a fork, over NBD beside qemu-nbd and nbdkit, 64
    /// busy forks and a quiet one, a thousand forks. Needs fio with its nbd engine, qemu-utils and
    /// nbdkit.
    Forks(forks::Args),
    /// The engine and the server against their peers: the kernel's zram, nbdkit, qemu-nbd. Needs fio with
    /// its nbd engine and nbdcopy; Debian 13's peers are unpacked at the first use.
    Compare(compare::Args),
    /// Memory a stored byte of real files, in each form that a RAM disk can store and in nbdkit and zram, and its
    /// price: CPU time, slower reads, requests meanwhile. With pictures. Debian 13's peers are unpacked at the first
    /// use.
    Density(density::Args),
    /// Test devices: cost of the device contract alone, memory backing beside memcpy, a lock per zone
    /// beside one per device.
    Zones(zones::Args),
    /// Persistence over restarts: cost of state updates, starts with many forks, time to restore kept
    /// content, cost of increments and saves.
    Restarts(restarts::Args),
    /// Clients of one server: cost of a connect, and the effect of many connects and of clients that do
    /// not read on others.
    Clients(clients::Args),
    /// Background load while `clients` measures.
    #[command(hide = true)]
    ClientsLoop(clients::Loop),
    /// Images in object storage: cost of cached pages, a boot and the start of a fleet from a store over
    /// a network link, pushes.
    Images(images::Args),
    /// Instructions of a read and of a write, also against another build of this program. Needs valgrind.
    Instructions(callgrind::Args),
    /// The loop that `instructions` counts.
    #[command(hide = true)]
    InstructionsLoop {
        #[command(flatten)]
        what: instructions::Loop,
        /// Add a backing device, which is never written
        #[arg(long)]
        backed: bool,
        /// Use a fork that holds every page itself
        #[arg(long, conflicts_with = "backed")]
        fork: bool,
    },
    /// Instructions of the hot paths against the committed baseline; fails if a count rose. Needs
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
    /// Runs the benchmark. Returns None for hidden commands, which another process measures.
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
            Self::Density(args) => density::run(args, options)?,
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

pub fn begin() -> Document {
    let document = Document::new(env!("CARGO_PKG_VERSION"), engine::bare::lz4_version());
    println!("{}", document.machine);
    println!("command: {}\n", document.command);
    document
}

pub fn main() -> Result<()> {
    let matches = Cli::command().get_matches();
    let cli = Cli::from_arg_matches(&matches)?;
    cli.options.check()?;
    let mut document = begin();
    let Some(reports) = cli.bench.run(&cli.options)? else { return Ok(()) };
    document.reports = reports;
    document.save(&cli.options.json_file(matches.subcommand_name().unwrap_or_default()))
}
