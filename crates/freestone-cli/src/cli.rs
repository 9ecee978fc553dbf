//! The command line.

use clap::{ArgAction, Args, Parser, Subcommand};

use crate::serve::ServeArgs;
use crate::verbs::{
    Common, compact, create, get, idle, list, publish, recompress, remove, reset, set, stat, unpublish,
    writeback,
};

const EXAMPLES: &str = "\
Examples:
  freestone serve                                       a compressed RAM disk of 1G
  freestone serve ram0=ram,disksize=4G,comp_algorithm=zstd
  freestone serve base=file,path=golden.img,readonly=1 --nbd tcp:127.0.0.1:10809
  freestone serve --run 'qemu-img info \"$uri\"'          serve for one command
  freestone list
  freestone set ram0 mem_limit=2G disksize=8G

Sizes take K, M, G and T (1024-based).";

const SERVE_EXAMPLES: &str = "\
Devices:
  NAME=ram,disksize=SIZE    compressed RAM disk
      comp_algorithm=lz4|lz4hc|zstd|store   default lz4
      algorithm_params=WORDS                for example 'level=3'
      mem_limit=SIZE|none                   default half of the machine's memory
      backing_dev=PATH                      pages go to this file or disk when mem_limit is near
      backing_size=SIZE                     makes a nameless file of this size where none is
      compressed_writeback=yes|no           default yes
      writeback_limit=N                     4 KiB units; with writeback_limit_enable=1
      writeback_batch_size=N                blocks
      recomp_algorithm=WORDS                for example 'algo=zstd priority=1'
      auto_recompress=no|SECONDS            recompress what is idle for so long; default no
  NAME=null,size=SIZE       writes vanish, reads are zeroes
      blocksize=512..4096                   default 4096
  NAME=file,path=PATH       raw image or block device
      readonly=yes|no                       default no
      direct=auto|on|off                    auto: O_DIRECT for block devices only
      size=SIZE                             makes a sparse file of this size where none is
  All take publish=no, which keeps a device off the NBD addresses. A comma inside a value is written twice.
  Without any device: ram0=ram,disksize=1G

Examples:
  freestone serve ram0=ram,disksize=4G ram1=ram,disksize=16G,mem_limit=2G
  freestone serve big=ram,disksize=16G,mem_limit=1G,backing_dev=spill.img,backing_size=8G
  freestone serve n0=null,size=1T,blocksize=512 --nbd unix:/run/n0.sock --nbd tcp:127.0.0.1:10809
  freestone serve scratch=ram,disksize=2G --run 'nbdcopy disk.img \"$uri\"'";

const LIST_COLUMNS: &str = "\
Columns (the names are zramctl's; after the names in brackets see stat and get):
  NAME, KIND  of the device
  DISKSIZE    its size
  DATA        what its pages hold, before compression (orig_data_size)
  COMPR       the same as stored (compr_data_size)
  ALGORITHM   comp_algorithm
  TOTAL       memory that this takes now (mem_used_total)
  MEM-LIMIT   the most it may take (mem_limit)
  MEM-USED    the most it took so far (mem_used_max); `freestone set NAME mem_used_max=0` starts anew
  ZERO-PAGES  pages filled with one repeated pattern, zeroes or not; next to no memory (same_pages)
  CLIENTS     open connections
  EXPORTS     NBD addresses, (ro) where clients cannot write

A dash stands where a kind of device has no such thing. --json gives bytes.";

const IDLE_EXAMPLES: &str = "\
Examples:
  freestone idle big all       mark every page; reads and writes take the mark off again
  freestone idle big 3600      mark what nobody touched for an hour";

const WRITEBACK_EXAMPLES: &str = "\
Examples:
  freestone writeback big idle                             what `freestone idle` marked
  freestone writeback big huge                             what is stored uncompressed
  freestone writeback big incompressible                   what `freestone recompress` gave up
  freestone writeback big page_index=7 page_indexes=100-199

Where writeback_limit or the room on the backing device will not do for all, the largest objects go first.";

const RECOMPRESS_EXAMPLES: &str = "\
Examples:
  freestone recompress big type=idle
  freestone recompress big type=huge priority=2 max_pages=10000
  freestone recompress big threshold=2000 algo=zstd

The algorithms are those of recomp_algorithm, given when the device was created.";

/// Behind the options of the subcommand.
const LAST: usize = 900;

/// Virtual block devices served over NBD: compressed RAM disks, raw images, null devices.
#[derive(Debug, Parser)]
#[command(name = "freestone", version, after_help = EXAMPLES)]
pub struct Cli {
    /// Logs more.
    #[arg(short, long, action = ArgAction::Count, global = true, display_order = LAST)]
    #[arg(help = "Log more to stderr; twice and thrice for still more (RUST_LOG overrides)")]
    pub verbose: u8,
    /// Log errors only
    #[arg(short, long, global = true, conflicts_with = "verbose", display_order = LAST + 1)]
    pub quiet: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands: the server, and a verb each.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve devices over NBD until SIGINT or SIGTERM
    #[command(after_help = SERVE_EXAMPLES)]
    Serve(ServeArgs),
    /// List the devices of a server
    #[command(after_help = LIST_COLUMNS)]
    List(Call<list::Params>),
    /// Show statistics
    Stat(Call<stat::Params>),
    /// Show attributes
    Get(Call<get::Params>),
    /// Set attributes: all that were given, or none
    Set(Call<set::Line>),
    /// Create a device
    #[command(after_help = "Example:\n  freestone create ram1=ram,disksize=4G,mem_limit=1G")]
    Create(Call<create::Params>),
    /// Unpublish and remove a device
    Remove(Call<remove::Params>),
    /// Wipe a ram or null device
    Reset(Call<reset::Params>),
    /// Give memory back that a ram device holds in partly used places
    Compact(Call<compact::Params>),
    /// Mark the pages of a ram device that nobody uses
    #[command(after_help = IDLE_EXAMPLES)]
    Idle(Call<idle::Params>),
    /// Write pages of a ram device to its backing device
    #[command(after_help = WRITEBACK_EXAMPLES)]
    Writeback(Call<writeback::Line>),
    /// Pack pages of a ram device smaller with a secondary algorithm
    #[command(after_help = RECOMPRESS_EXAMPLES)]
    Recompress(Call<recompress::Line>),
    /// Publish a device at an NBD address
    #[command(after_help = "Example:\n  freestone publish ram1 --nbd unix:/run/ram1.sock --read-only")]
    Publish(Call<publish::Params>),
    /// Take a device off all NBD addresses
    Unpublish(Call<unpublish::Params>),
}

/// A verb with what all verbs take.
#[derive(Debug, Args)]
pub struct Call<A: Args> {
    /// Its parameters.
    #[command(flatten)]
    pub args: A,
    /// `--json`, `--control`.
    #[command(flatten)]
    pub common: Common,
}
