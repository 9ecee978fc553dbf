//! Command line of the program, without the options of the subcommands.

use clap::{ArgAction, Parser, Subcommand};
use freestone_server::verbs::content::{
    block_state, compact, delta, idle, pull, push, recompress, restore, save, trace, writeback,
};
use freestone_server::verbs::devices::{
    apply, create, dump, fork, get, merge, publish, remove, reset, rewind, set, snapshot, unpublish,
};
use freestone_server::verbs::drives::{mark, power_cut, release, zones};
use freestone_server::verbs::jobs::{cancel, jobs};
use freestone_server::verbs::status::list;

use crate::client::Call;
use crate::client::long::LongCall;
use crate::explore;
use crate::help::examples;
use crate::mounts::{mount, umount};
use crate::serve::ServeArgs;
use crate::verbs::{hold, images, prune, shutdown, stat, top, ublk_owner, upgrade, wait};

/// Display order of global options in the help: after the options of the subcommand.
const LAST: usize = 900;

/// Virtual block devices served over NBD: compressed RAM disks, images, forks and snapshots of
/// them.
#[derive(Debug, Parser)]
#[command(name = "freestone", version = env!("FREESTONE_VERSION"), after_help = examples::PROGRAM)]
pub struct Cli {
    /// Verbosity of the log.
    #[arg(short, long, action = ArgAction::Count, global = true, display_order = LAST)]
    #[arg(help = "Log more to stderr; repeat it for debug and trace messages (RUST_LOG overrides)")]
    pub verbose: u8,
    /// Log errors only
    #[arg(short, long, global = true, conflicts_with = "verbose", display_order = LAST + 1)]
    pub quiet: bool,
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// Subcommands: the server, and the verbs for a running server.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve devices over NBD until SIGINT or SIGTERM
    #[command(after_help = examples::serve())]
    Serve(Box<ServeArgs>),
    /// Wait until a server is ready, or until a background job has ended
    #[command(after_help = examples::WAIT)]
    Wait(Call<wait::Line>),
    /// List the devices of a server
    #[command(after_help = examples::LIST)]
    List(Call<list::Params>),
    /// Show statistics
    #[command(after_help = examples::STAT)]
    Stat(Call<stat::Line>),
    /// Show the busiest devices, refreshed every second
    #[command(after_help = examples::TOP)]
    Top(Call<top::Line>),
    /// Show attributes
    #[command(after_help = examples::GET)]
    Get(Call<get::Params>),
    /// Set attributes of a device
    #[command(after_help = examples::SET)]
    Set(Call<set::Line>),
    /// Create a device
    #[command(after_help = examples::create())]
    Create(Call<create::Params>),
    /// Create writable disks over a read-only device, image or snapshot
    #[command(after_help = examples::fork())]
    Fork(Call<fork::Params>),
    /// Take a snapshot of devices while they are in use
    #[command(after_help = examples::snapshot())]
    Snapshot(Call<snapshot::Line>),
    /// Merge a snapshot into its origin
    #[command(after_help = examples::MERGE)]
    Merge(LongCall<merge::Params>),
    /// Show, export (qcow2) or apply the changes of a fork or snapshot
    #[command(subcommand, after_help = examples::DELTA)]
    Delta(DeltaCommand),
    /// Save ram devices, forks and snapshots to a file
    #[command(after_help = examples::SAVE)]
    Save(LongCall<save::Params>),
    /// Create devices from a saved file
    #[command(after_help = examples::RESTORE)]
    Restore(LongCall<restore::Params>),
    /// Discard the changes of a fork, or return a device to a snapshot
    #[command(after_help = examples::REWIND)]
    Rewind(Call<rewind::Line>),
    /// Unpublish and remove a device
    #[command(after_help = examples::REMOVE)]
    Remove(LongCall<remove::Line>),
    /// Wipe a ram or null device, or discard the changes of a fork
    #[command(after_help = examples::RESET)]
    Reset(Call<reset::Line>),
    /// Free memory by compacting the pool of a ram device
    #[command(after_help = examples::COMPACT)]
    Compact(LongCall<compact::Params>),
    /// Mark pages of a ram device as idle
    #[command(after_help = examples::IDLE)]
    Idle(Call<idle::Params>),
    /// Write pages of a ram device to its backing device
    #[command(after_help = examples::WRITEBACK)]
    Writeback(LongCall<writeback::Line>),
    /// Recompress pages of a ram device with a secondary algorithm
    #[command(after_help = examples::RECOMPRESS)]
    Recompress(LongCall<recompress::Line>),
    /// List running, waiting and finished jobs
    #[command(after_help = examples::JOBS)]
    Jobs(Call<jobs::Line>),
    /// Cancel a running job
    #[command(after_help = examples::CANCEL)]
    Cancel(Call<cancel::Line>),
    /// Apply a configuration file to a running server
    #[command(after_help = examples::APPLY)]
    Apply(Call<apply::Params>),
    /// Print the devices and exports as a configuration file
    #[command(after_help = examples::DUMP)]
    Dump(Call<dump::Params>),
    /// Save and flush everything, then stop the server
    #[command(after_help = examples::SHUTDOWN)]
    Shutdown(Call<shutdown::Line>),
    /// Replace the program of a running server, while clients stay connected
    #[command(after_help = examples::UPGRADE)]
    Upgrade(Call<upgrade::Line>),
    /// Show the state of each page of a ram device, in zram's format
    #[command(after_help = examples::BLOCK_STATE)]
    BlockState(Call<block_state::Params>),
    /// List, open, close, finish or reset zones
    #[command(after_help = examples::ZONES)]
    Zones(Call<zones::Params>),
    /// Simulate a power loss: some or all unflushed writes are lost
    #[command(after_help = examples::POWER_CUT)]
    PowerCut(Call<power_cut::Params>),
    /// Add a mark to the write log of a device
    #[command(after_help = examples::MARK)]
    Mark(Call<mark::Params>),
    /// Check every state that a power loss can leave of a recorded run
    #[command(after_help = examples::EXPLORE)]
    Explore(Box<explore::Line>),
    /// Release requests held by a "hang" fault rule
    #[command(after_help = examples::RELEASE)]
    Release(Call<release::Params>),
    /// Export a device by NBD, vhost-user-blk or ublk
    #[command(after_help = examples::PUBLISH)]
    Publish(Call<publish::Params>),
    /// Push a device to object storage; sends only missing chunks
    #[command(after_help = examples::PUSH)]
    Push(LongCall<push::Line>),
    /// Fetch a whole image from object storage into the cache
    #[command(after_help = examples::PULL)]
    Pull(LongCall<pull::Params>),
    /// Record which chunks of an image were read first, for prefetching
    #[command(after_help = examples::TRACE)]
    Trace(Call<trace::Params>),
    /// List the images in object storage
    #[command(after_help = examples::IMAGES)]
    Images(images::Images),
    /// Delete images and chunks that no tag refers to
    #[command(after_help = examples::PRUNE)]
    Prune(prune::Line),
    /// Mount the file system of a device, or list the mounts
    #[command(after_help = mount::EXAMPLES)]
    Mount(Call<mount::Line>),
    /// Unmount devices that `freestone mount` mounted
    #[command(after_help = umount::EXAMPLES)]
    Umount(Call<umount::Line>),
    /// Remove exports of a device
    #[command(after_help = examples::UNPUBLISH)]
    Unpublish(Call<unpublish::Params>),
    /// Hold the memory of a server's devices; started by `serve --recoverable`
    #[command(after_help = examples::HOLD)]
    Hold(hold::Line),
    /// Print owner and group of a ublk device, for udev rules
    #[command(after_help = examples::UBLK_OWNER)]
    UblkOwner(ublk_owner::Line),
}

/// The subcommands of `delta`.
#[derive(Debug, Subcommand)]
pub enum DeltaCommand {
    /// List the changes of a fork or snapshot
    Show(Call<delta::Name>),
    /// Write the changes to a qcow2 overlay on the base
    Save(LongCall<delta::NameAndFile>),
    /// Write the changes of an overlay to a fork of the same base
    Apply(LongCall<delta::ApplyParams>),
}
