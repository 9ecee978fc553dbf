//! The command line.

use clap::{ArgAction, Parser, Subcommand};

use crate::serve::ServeArgs;
use crate::ublk_owner;
use crate::verbs::long::LongCall;
use crate::verbs::{
    Call, apply, block_state, cancel, compact, create, delta, dump, fork, get, idle, images, jobs, list,
    mark, merge, power_cut, publish, pull, push, recompress, release, remove, reset, restore, rewind, save,
    set, shutdown, snapshot, stat, top, trace, unpublish, wait, writeback, zones,
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
      comp_algorithm=lz4|lz4hc|lzo|zstd|store   default lz4
      algorithm_params=WORDS                for example 'level=3'
      mem_limit=SIZE|none                   default half of the machine's memory
      backing_dev=PATH|device:NAME          pages go to this file, disk or device when mem_limit is near
      backing_size=SIZE                     makes a nameless file of this size where none is
      compressed_writeback=yes|no           default yes
      writeback_limit=N                     4 KiB units; with writeback_limit_enable=1
      writeback_batch_size=N                blocks
      recomp_algorithm=WORDS                for example 'algo=zstd priority=1'
      auto_recompress=no|SECONDS            recompress what is idle for so long; default no
      full=error|wait                       what a write does that finds no room; default error
      full_timeout=SECONDS                  how long it waits; default 60
      full_warn=PERCENT|off                 share of the limit above which the log warns; default 90%
  NAME=null,size=SIZE       test drive; without memory_backed writes vanish and reads are zeroes
      blocksize=512..4096                   default 4096
      memory_backed=yes|no                  keeps what is written; comp_algorithm: compressed; discard=yes
      cache_size=SIZE, fua=yes|no           volatile write cache, see power-cut
      mbps=N, completion_nsec=N             MiB a second; an answer takes so long at least
      badblocks=+FIRST-LAST[;...]           in sectors; badblocks_once=yes, badblocks_partial_io=yes
      max_sectors=N, rotational=yes|no, readonly=yes|no
  NAME=file,path=PATH       raw image or block device
      readonly=yes|no                       default no
      direct=auto|on|off                    auto: O_DIRECT for block devices only
      size=SIZE                             makes a sparse file of this size where none is
      what its forks share is set here too, with readonly=yes: all keys of ram but disksize
  NAME=qcow2,path=PATH      read-only qcow2 image, with those that it stands on
      standalone=yes|no                     yes refuses one that names other files; default no
      and the keys of what its forks share
  NAME=image,url=URL[:TAG]  read-only image in object storage (s3://BUCKET/PREFIX, gs, az, http, https, file:///DIR)
      cache=DIR|none                        where pages are kept; default $FREESTONE_CACHE, else ~/.cache/freestone
      cache_size=SIZE                       the most of them; default 16G
      key=FILE                              the key of the store's names, 64 hexadecimal digits
      timeout=TIME                          how long a fetch may take; default 30s
      endpoint=URL, region=NAME, credentials=FILE, anonymous=yes|no   where the usual variables do not say it
      prefetch=yes|no                       fetch what `freestone trace` noted of it; default yes
      hedge=TIME                            a read that takes longer is sent a second time, for example 200ms
      and the keys of what its forks share
  NAME=nbd,uri=URI          export of any NBD server: nbd://HOST[:PORT]/EXPORT, nbds:// with TLS,
                            nbd+unix:///EXPORT?socket=PATH, nbds+unix://
      connections=N, timeout=TIME           default 4, where the server allows that; 30s without a server
      readonly=yes|no, size=SIZE            default as the export is; another size is refused
      tls_ca=FILE, tls_hostname=NAME        whom to trust; default the system's certificates, the host
      tls_cert=FILE, tls_key=FILE           shown to the server
      what its forks share is set here too, with readonly=yes: all keys of ram but disksize
  NAME=rbd,image=POOL/NAME  image in Ceph's RBD, by librbd (Debian's package librbd1)
      conf=FILE, id=USER                    default as Ceph finds its configuration; admin
      snap=NAME                             a snapshot of the image, read-only
      timeout=TIME                          how long a request waits for the cluster; default 2m
      readonly=yes|no, size=SIZE            default no; another size is refused
      what its forks share is set here too, with readonly=yes or snap: all keys of ram but disksize
  NAME=fork,base=NAME       disk over a file or export with readonly=yes, an image or a snapshot
      size=SIZE                             default the base's; beyond it are zeroes
      mem_limit=SIZE|none                   its own cap in its family's memory; default none
      mem_min=SIZE                          what its family keeps for it; default none
      full=error|wait|family                where there is no room; default as its family
  NAME=template,base=NAME   a fork for every connection, gone when that ends
      size, mem_limit, mem_min, full        as for a fork
      ttl=SECONDS|none                      how long a connection may last; default none
  NAME=snapshot,origin=NAME what a ram device, fork or file held when this was made
      cow=PATH|DEVICE                       where copies of a file's chunks go; default memory
      cow_size=SIZE                         makes a sparse file of this size where none is
      store=P|PO|N                          dm-snapshot's persistent, with overflow, transient; default P
      chunk_size=SIZE                       unit of copies, 4K to 1G; default 16K, without cow 4K
      readonly=yes|no                       default yes without cow, no with it
      merge=yes|no                          merge it into its origin, whose part it plays from the beginning on; default no
      discard_zeroes_cow=yes|no, discard_passdown_origin=yes|no, force=yes|no
  ram, null and file take   zoned=yes, zone_size=SIZE (default 256M), zone_capacity=SIZE, zone_nr_conv=N,
                            zone_max_open=N, zone_max_active=N, zone_append_max_sectors=N, zone_full=yes|no,
                            zone_readonly=OFFSET[;...], zone_offline=OFFSET[;...]; a file zone_state=PATH
  ram, null, file, nbd, rbd and fork  faults='RULES'|none, seed=N, power_cut=yes|no, power_cut_unit=SIZE,
                            record=FILE
  A device comes after what it stands on. All take publish=no, which keeps a device off the NBD addresses, and
  tls_clients=any|NAME[+NAME...], which shows it by TLS only, to whose certificate has one of the names. A comma inside a value is written twice.
  Without any device and without --config: ram0=ram,disksize=1G

Examples:
  freestone serve ram0=ram,disksize=4G ram1=ram,disksize=16G,mem_limit=2G
  freestone serve big=ram,disksize=16G,mem_limit=1G,backing_dev=spill.img,backing_size=8G
  freestone serve n0=null,size=1T,blocksize=512 --nbd unix:/run/n0.sock --nbd tcp:127.0.0.1:10809
  freestone serve golden=file,path=golden.img,readonly=yes,mem_limit=8G vm1=fork,base=golden vm2=fork,base=golden
  freestone serve n0=null,size=4G,zoned=1,zone_size=64M,memory_backed=1,faults='write error=EIO chance=1%',seed=7
  freestone serve scratch=ram,disksize=2G --run 'nbdcopy disk.img \"$uri\"'
  freestone serve vm=ram,disksize=4G --nbd unix:/run/vm.sock --socket-mode 0660 --socket-group kvm
  freestone serve vm1=ram,disksize=4G,tls_clients=vm1 --nbd tcp:192.0.2.1:10809 --tls require \\
      --tls-cert server-cert.pem --tls-key server-key.pem --tls-client-ca ca-cert.pem
  socat TCP-LISTEN:10809,fork EXEC:'freestone serve --single own=ram\\,disksize=1G'    a server for each client";

const WAIT_EXAMPLES: &str = "\
Examples:
  freestone serve ram0=ram,disksize=4G & freestone wait && freestone list
  freestone wait --timeout 1m --control ctl.sock
  freestone save ram0 ram0.saved --background && freestone wait --job 1

A server is ready when all its devices are there, its NBD addresses take clients, and it answers. Status 1: it was not
in time. With --job, the status and the error are those that the verb would have had in the foreground.";

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
  BASE        what a fork was made of, the origin of a snapshot
  CLIENTS     open connections
  EXPORTS     NBD addresses, (ro) where clients cannot write

A dash stands where a kind of device has no such thing. --json gives bytes.";

const TOP_EXAMPLES: &str = "\
Examples:
  freestone top
  freestone top --by latency
  freestone top --once --count 5 --json

In a terminal: q, Esc or Ctrl-C end it; r, b and l sort by requests, bytes and latency. Elsewhere tables, or with
--json answers, follow one another until the reader leaves; --once gives one.

Columns, all of the time since the last look:
  READ/S, WRITE/S, OTHER/S  requests a second that succeeded; others are discards, zeroes, flushes, appends
  READ, WRITTEN             bytes a second
  ERRORS/S                  requests a second that failed
  WAITING                   requests that could not be answered at once and are not yet
  P50, P99                  in which half and 99 % of the requests were done, estimated (see stat)";

const FORK_EXAMPLES: &str = "\
Examples:
  freestone fork golden job --nbd unix:/run/job.sock
  freestone fork golden job mem_limit=512M size=20G
  freestone fork golden job-%n --count 100 --nbd unix:/run/job-%n.sock
  freestone fork golden ci --template --ttl 3600 --nbd unix:/run/ci.sock
      every connection to ci gets a fork of its own, ci@1, ci@2 and so on, gone when it ends

A live device is no base: `freestone snapshot ram0 ram0-1` makes one of it. All forks of a file or image share
memory, limit and backing device, which are keys of the base: base=file,path=golden.img,readonly=yes,mem_limit=8G";

const MERGE_EXAMPLES: &str = "\
Example:
  freestone merge disk-1 --into-origin        disk is again what it was, or what was written to disk-1
  freestone merge disk-1 --into-origin --background

From the beginning on, users of both see the snapshot's content. A merge that ended early (a failure, a crash,
Ctrl-C) goes on with the same command, and where a server opens the store again: the origin is never shown half merged.
Only snapshots with cow=PATH or DEVICE and store=P or PO are merged.";

const DELTA_EXAMPLES: &str = "\
Examples:
  freestone delta show job-7
  freestone delta save job-7 job-7.qcow2      qemu-img check, map, compare and rebase take it
  freestone delta apply job-8 job-7.qcow2     job-8 is a fork of the same file or image";

const SAVE_EXAMPLES: &str = "\
Examples:
  freestone save ram0 ram0.saved
  freestone save data,log db.saved                both as they are at one moment
  freestone save golden jobs.saved --family       all forks of golden, and their snapshots
  freestone save ram0 ram0.saved --background     it goes on by itself, as a job

The devices go on meanwhile. The file is the old one or the new one at any moment, also after a crash or Ctrl-C.";

const RESTORE_EXAMPLES: &str = "\
Examples:
  freestone restore ram0.saved
  freestone restore ram0.saved ram1 mem_limit=2G
  freestone restore jobs.saved                    the base of the forks must be there, with its content
  freestone restore jobs.saved record=job-%n.log  each disk and fork records its writes in a log of its own

The whole file is checked before any device of it is there. After Ctrl-C none is.";

const PUBLISH_EXAMPLES: &str = "\
Examples:
  freestone publish ram1 --nbd unix:/run/ram1.sock --read-only
  freestone publish job-7 --vhost-user unix:/run/job-7.sock
      a disk for a virtual machine: -chardev socket,id=c,path=/run/job-7.sock -device vhost-user-blk-pci,chardev=c
  freestone publish job-7 --ublk
      a block device of this machine, /dev/ublkbN
  freestone publish golden scratch --template --ttl 600 --nbd unix:/run/scratch.sock
      every connection to scratch gets a fork of golden; the same as
      `freestone fork golden scratch --template --ttl 600 --nbd unix:/run/scratch.sock`";

const PUSH_EXAMPLES: &str = "\
Examples:
  freestone push golden s3://bucket/images:debian
  freestone push job-7 s3://bucket/images:job-7              of a fork of an image that lies there, its changes
  freestone push 'd=qcow2,path=disk.qcow2' file:///srv/images:disk       without a server
  freestone push vm s3://bucket/images:vm --restore vm.saved             of a saved file, without a server, too
  freestone push vm s3://bucket/images:vm --restore vm.saved --device golden=file,path=golden.img,readonly=yes
  freestone push golden s3://bucket/secret:v1 key=domain.key encrypt=yes

A live ram device or fork is pushed as it is at one moment, and goes on meanwhile. The tag is set last, if nobody else
has set it meanwhile. A push that ended early has changed nothing, and the next one sends the rest.";

const PULL_EXAMPLES: &str = "\
Examples:
  freestone pull s3://bucket/images:debian golden && freestone fork golden vm1
  freestone pull s3://bucket/images:debian golden cache=/srv/cache cache_size=64G

Without a pull what is read is fetched when it is read.";

const PRUNE_EXAMPLES: &str = "\
Examples:
  freestone prune s3://bucket/images --dry-run
  freestone prune s3://bucket/images

What is younger than the grace of the store (a day, or what its first push said) stays: a push may be about to refer to it.";

const SNAPSHOT_EXAMPLES: &str = "\
Examples:
  freestone snapshot ram0 ram0-monday
  freestone snapshot data,log data-1,log-1               both at one moment
  freestone snapshot disk disk-1                         of a file; copies go to memory
  freestone snapshot disk disk-1 cow=./disk-1.cow cow_size=2G store=PO chunk_size=64K
      copies go to a file in dm-snapshot's format; users of the snapshot may write it (readonly=yes: not)

Fork a snapshot to write: `freestone fork ram0-monday trial`.";

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

const APPLY_EXAMPLES: &str = "\
Examples:
  freestone apply freestone.toml --check      what would change
  freestone apply freestone.toml
  kill -HUP PID                               the same for the file of serve --config, and the files of --tls are read again

Each change is shown. What was made at run time stays, unless with --prune. Where something cannot be (a key
that is fixed, a device in use), that is said and nothing is done.";

const DUMP_EXAMPLES: &str = "\
Examples:
  freestone dump > freestone.toml
  freestone serve --config freestone.toml

What devices hold is not in it, and neither are the forks of connections to a template.";

const BLOCK_STATE_EXAMPLES: &str = "\
Examples:
  freestone block-state ram0                         number, time of the last access (seconds since boot), flags
  freestone block-state ram0 --offset 1G --length 2M

Flags: s one repeated pattern, w on the backing device, h does not compress, i idle, r compressed by a secondary
algorithm, n no algorithm compresses it. Pages that hold nothing are left out. --json prints one answer after another.";

const JOBS_EXAMPLES: &str = "\
Examples:
  freestone jobs
  freestone jobs ram0 --json

Of the verbs in the background that have ended the last 2048 are known.";

const CANCEL_EXAMPLES: &str = "\
Examples:
  freestone cancel ram0                  all that runs on it: save, merge, delta, writeback, recompress, compact
  freestone cancel ram0 writeback
  freestone cancel --job 3               also a restore

It answers at once; `freestone wait --job` waits for the end. save, delta save and restore leave nothing behind; merge,
writeback, recompress, compact and delta apply keep what is done. remove cannot be taken back.";

const ZONES_EXAMPLES: &str = "\
Examples:
  freestone zones n0                                 as blkzone report shows them, in sectors; --json: in bytes
  freestone zones n0 report --offset 1G --count 4
  freestone zones n0 reset                           all that can be reset
  freestone zones n0 finish --offset 64M --count 1";

const POWER_CUT_EXAMPLES: &str = "\
Examples:
  freestone power-cut n0                       tells the seed
  freestone power-cut n0 --seed 7              the same unflushed blocks are lost again
  freestone power-cut n0 --after 1000writes    by itself, after so many more of them
  freestone power-cut f0 --at 'commit 17'      with record=FILE: as it was at the mark
  freestone power-cut f0 --at 120 --seed 7     after 120 entries of the log, and the power cut there

Connections end without answers to what was in flight; who connects again finds the device as after a reboot. What
was flushed is there, and any of what was not.";

const MARK_EXAMPLES: &str = "\
Example:
  freestone mark f0 'commit 17 acknowledged'";

/// Behind the options of the subcommand.
const LAST: usize = 900;

/// Virtual block devices served over NBD: compressed RAM disks, images, forks and snapshots of
/// them.
#[derive(Debug, Parser)]
#[command(name = "freestone", version = env!("FREESTONE_VERSION"), after_help = EXAMPLES)]
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
    Serve(Box<ServeArgs>),
    /// Wait until a server is ready, or until a verb in the background has ended
    #[command(after_help = WAIT_EXAMPLES)]
    Wait(Call<wait::Line>),
    /// List the devices of a server
    #[command(after_help = LIST_COLUMNS)]
    List(Call<list::Params>),
    /// Show statistics
    #[command(
        after_help = "Examples:\n  freestone stat\n  freestone stat job-7 --json\n  freestone stat 'job-*' ram0"
    )]
    Stat(Call<stat::Line>),
    /// Show the busiest devices, second by second
    #[command(after_help = TOP_EXAMPLES)]
    Top(Call<top::Line>),
    /// Show attributes
    #[command(after_help = "Examples:\n  freestone get ram0\n  freestone get ram0 mm_stat")]
    Get(Call<get::Params>),
    /// Set attributes: all that were given, or none
    #[command(
        after_help = "Examples:\n  freestone set ram0 mem_limit=2G disksize=8G\n  freestone set job-7 mem_limit=512M mem_min=64M"
    )]
    Set(Call<set::Line>),
    /// Create a device
    #[command(after_help = "Example:\n  freestone create ram1=ram,disksize=4G,mem_limit=1G")]
    Create(Call<create::Params>),
    /// Make disks over a base: a read-only file or export, an image or a snapshot
    #[command(after_help = FORK_EXAMPLES)]
    Fork(Call<fork::Line>),
    /// Keep what devices hold at one moment, while they go on
    #[command(after_help = SNAPSHOT_EXAMPLES)]
    Snapshot(Call<snapshot::Line>),
    /// Put what a snapshot of a file holds back into the file
    #[command(after_help = MERGE_EXAMPLES)]
    Merge(LongCall<merge::Params>),
    /// What a fork or snapshot holds itself: show it, save it as a qcow2 overlay, apply one
    #[command(subcommand, after_help = DELTA_EXAMPLES)]
    Delta(delta::Line),
    /// Save what ram devices, forks and snapshots hold to a file
    #[command(after_help = SAVE_EXAMPLES)]
    Save(LongCall<save::Line>),
    /// Make the devices of a saved file again
    #[command(after_help = RESTORE_EXAMPLES)]
    Restore(LongCall<restore::Line>),
    /// Set a fork back to its base, at once, or a ram device or fork to a snapshot of it
    #[command(
        after_help = "Examples:\n  freestone rewind job-7\n  freestone rewind 'job-*' trial\n  freestone rewind ram0 --to ram0-monday"
    )]
    Rewind(Call<rewind::Line>),
    /// Unpublish and remove a device
    #[command(
        after_help = "Examples:\n  freestone remove job-7 --force\n  freestone remove big --background      its memory is given back after the answer\n  freestone remove 'job-*' golden      forks go before what they stand on"
    )]
    Remove(LongCall<remove::Line>),
    /// Wipe a ram or null device; a fork is as its base after that
    #[command(after_help = "Examples:\n  freestone reset ram0\n  freestone reset 'ram*'")]
    Reset(Call<reset::Line>),
    /// Give memory back that a ram device holds in partly used places
    #[command(after_help = "Examples:\n  freestone compact ram0\n  freestone compact ram0 --progress json")]
    Compact(LongCall<compact::Params>),
    /// Mark the pages of a ram device that nobody uses
    #[command(after_help = IDLE_EXAMPLES)]
    Idle(Call<idle::Params>),
    /// Write pages of a ram device to its backing device
    #[command(after_help = WRITEBACK_EXAMPLES)]
    Writeback(LongCall<writeback::Line>),
    /// Pack pages of a ram device smaller with a secondary algorithm
    #[command(after_help = RECOMPRESS_EXAMPLES)]
    Recompress(LongCall<recompress::Line>),
    /// Show the verbs that run, and those of the background that wait or have ended
    #[command(after_help = JOBS_EXAMPLES)]
    Jobs(Call<jobs::Line>),
    /// Have a verb that takes long end early
    #[command(after_help = CANCEL_EXAMPLES)]
    Cancel(Call<cancel::Line>),
    /// Bring in what a file says: make, set, publish, and remove what an earlier one had made
    #[command(after_help = APPLY_EXAMPLES)]
    Apply(Call<apply::Params>),
    /// Show the devices and exports as the file that would make them
    #[command(after_help = DUMP_EXAMPLES)]
    Dump(Call<dump::Params>),
    /// End the server in good order, and wait until it has ended
    #[command(after_help = "Examples:\n  freestone shutdown\n  freestone shutdown --timeout 10s")]
    Shutdown(Call<shutdown::Line>),
    /// Show the state of each page of a ram device, in the lines of the kernel
    #[command(after_help = BLOCK_STATE_EXAMPLES)]
    BlockState(Call<block_state::Params>),
    /// Show the zones of a device, or open, close, finish or reset them
    #[command(after_help = ZONES_EXAMPLES)]
    Zones(Call<zones::Params>),
    /// Cut the power of a device: unflushed writes are lost, or some of them
    #[command(after_help = POWER_CUT_EXAMPLES)]
    PowerCut(Call<power_cut::Params>),
    /// Put a mark into the log of a device
    #[command(after_help = MARK_EXAMPLES)]
    Mark(Call<mark::Params>),
    /// Let go of the requests that hang by a rule of faults
    #[command(after_help = "Example:\n  freestone release n0")]
    Release(Call<release::Params>),
    /// Publish a device at an NBD address, at a socket for a virtual machine, or as a block device
    #[command(after_help = PUBLISH_EXAMPLES)]
    Publish(Call<publish::Params>),
    /// Push what a device holds to object storage: only what is not there yet is sent
    #[command(after_help = PUSH_EXAMPLES)]
    Push(LongCall<push::Line>),
    /// Fetch all of an image in object storage into the cache
    #[command(after_help = PULL_EXAMPLES)]
    Pull(LongCall<pull::Line>),
    /// Note in its store what was read first of an image, so that others have it fetched
    #[command(
        after_help = "Example:\n  freestone trace golden      when a machine over a fork of golden has started"
    )]
    Trace(Call<trace::Params>),
    /// List the images in object storage
    #[command(
        after_help = "Examples:\n  freestone images s3://bucket/images\n  freestone images file:///srv/images --untag old"
    )]
    Images(images::Images),
    /// Delete what no tag of a store refers to any more
    #[command(after_help = PRUNE_EXAMPLES)]
    Prune(images::Prune),
    /// Take a device off all its addresses, and its block device away
    #[command(after_help = "Example:\n  freestone unpublish ram1")]
    Unpublish(Call<unpublish::Params>),
    /// Print user and group of a block device, for udev
    #[command(after_help = "Example:\n  freestone ublk-owner ublkb0")]
    UblkOwner(ublk_owner::Line),
}
