//! Texts printed below the options in the help of subcommands: examples, columns, rules.

use super::devices::{common_keys, keys_of};

pub const PROGRAM: &str = "\
Examples:
  freestone serve                                       a compressed RAM disk of 1G
  freestone serve ram0=ram,disksize=4G,comp_algorithm=zstd
  freestone serve base=file,path=golden.img,readonly=1 --nbd tcp:127.0.0.1:10809
  freestone serve --run 'qemu-img info \"$uri\"'          serve for one command
  freestone list
  freestone set ram0 mem_limit=2G disksize=8G
  freestone mount job-7 /mnt/job                        the file system of a device
  freestone umount job-7

Sizes take K, M, G and T (1024-based).";

const SERVE_DEVICES: &str = "\
Devices: NAME=KIND[,key=value]...
  ram        compressed RAM disk                              ram0=ram,disksize=4G
  null       test drive                                       n0=null,size=1T
  file       raw image or block device                        data=file,path=data.img
  qcow2      read-only qcow2 image                            base=qcow2,path=base.qcow2
  image      read-only image in object storage                base=image,url=s3://bucket/images:debian
  nbd        export of another NBD server                     far=nbd,uri=nbd://host/disk
  rbd        image in Ceph's RBD                              vol=rbd,image=pool/name
  fork       writable disk over a read-only device            job=fork,base=golden
  template   a fork for each connection                       ci=template,base=golden
  snapshot   content of a device at one moment                s1=snapshot,origin=data
`freestone help KIND` lists the keys of a kind, `freestone help zoned` and `freestone help faults` those of zoned
devices and of injected faults, `freestone serve --help-devices` all of them.
Put a device after the devices that it uses. Write a comma inside a value twice. Without a device and without
--config, the server has ram0=ram,disksize=1G.
";

const SERVE_EXAMPLES: &str = "\
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

pub fn serve() -> String {
    format!("{SERVE_DEVICES}\n{}\n\n{SERVE_EXAMPLES}", common_keys())
}

const CREATE: &str = "\
Example:
  freestone create ram1=ram,disksize=4G,mem_limit=1G

`freestone help KIND` lists the keys of a kind of device.";

pub fn create() -> String {
    format!("{CREATE}\n\n{}", common_keys())
}

pub const WAIT: &str = "\
Examples:
  freestone serve ram0=ram,disksize=4G & freestone wait && freestone list
  freestone wait --timeout 1m --control ctl.sock
  freestone serve --config disks.toml & freestone wait --pid $!     fails at once if the server does not start
  freestone save ram0 ram0.saved --background && freestone wait --job 1

A server is ready when all its devices exist, its NBD addresses accept connections, and it replies. Status 1: the server
was not ready in time, process PID has ended, or the server ended. `wait` keeps waiting at a socket that a killed server
left, because the next server replaces it. With --job, the status and the error are those of the command itself.";

pub const LIST: &str = "\
Columns (names in brackets: see stat and get):
  NAME, KIND  name and kind of the device
  DISKSIZE    size
  DATA        data in the pages, before compression (orig_data_size)
  COMPR       the same data after compression (compr_data_size)
  ALGORITHM   comp_algorithm
  MEM-USED    current memory use (mem_used_total)
  MEM-MAX     largest memory use so far (mem_used_max); `freestone set NAME mem_used_max=0` restarts it
  MEM-LIMIT   memory limit (mem_limit): a fork's own limit if it has one, otherwise that of its family
  BACKING     used part of the backing device (backing_dev)
  ZERO-PAGES  pages filled with one repeated pattern, zeroes or another (same_pages)
  BASE        base of a fork, origin of a snapshot
  CLIENTS     open connections
  EXPORTS     NBD addresses, (ro) if clients cannot write

A dash means that this kind of device has no such value. --json gives bytes.";

pub const STAT: &str = "\
Examples:
  freestone stat
  freestone stat job-7 --json
  freestone stat 'job-*' ram0";

pub const TOP: &str = "\
Examples:
  freestone top
  freestone top --by latency
  freestone top --once --count 5 --json

In a terminal, q, Esc or Ctrl-C end it; r, b and l sort by requests, bytes and latency. Otherwise, top prints one table
(or one JSON object) after the other until the reader closes the pipe; --once prints one.

Columns, for the time since the last refresh:
  READ/S, WRITE/S, OTHER/S  successful requests per second; other: discard, write zeroes, flush, zone append
  READ, WRITTEN             bytes per second
  ERRORS/S                  failed requests per second
  WAITING                   requests in flight that wait for a device, a limit or memory
  P50, P99                  estimated latency percentiles (see stat)";

pub const GET: &str = "\
Examples:
  freestone get ram0
  freestone get ram0 mm_stat";

pub const SET: &str = "\
Examples:
  freestone set ram0 mem_limit=2G disksize=8G
  freestone set job-7 mem_limit=512M mem_min=64M";

const FORK: &str = "\
Examples:
  freestone fork golden job --nbd unix:/run/job.sock
  freestone fork golden job mem_limit=512M size=20G
  freestone fork golden job-%n --count 100 --nbd unix:/run/job-%n.sock
  freestone fork golden ci --template --ttl 3600 --nbd unix:/run/ci.sock
      each connection to ci gets a fork of its own, ci@1, ci@2 and so on, removed when the connection ends

A live device cannot be a base; take a snapshot of it: `freestone snapshot ram0 ram0-1`. All forks of a file or image
share memory, limit and backing device, which are keys of the base: base=file,path=golden.img,readonly=yes,mem_limit=8G

Keys of a fork:";

pub fn fork() -> String {
    format!("{FORK}\n{}\n\n{}", keys_of("fork"), common_keys())
}

const SNAPSHOT: &str = "\
Examples:
  freestone snapshot ram0 ram0-monday
  freestone snapshot data,log data-1,log-1               both at one moment
  freestone snapshot disk disk-1                         of a file; copies go to memory
  freestone snapshot disk disk-1 cow=./disk-1.cow cow_size=2G store=PO chunk_size=64K
      copies go to a file in dm-snapshot's format; clients may write the snapshot unless readonly=yes

To write to a snapshot in memory, fork it: `freestone fork ram0-monday trial`.

Keys of a snapshot:";

pub fn snapshot() -> String {
    format!("{SNAPSHOT}\n{}", keys_of("snapshot"))
}

pub const MERGE: &str = "\
Examples:
  freestone merge disk-1 --into-origin        disk becomes what disk-1 holds
  freestone merge disk-1 --into-origin --background

From its start on, clients of both devices see the snapshot's content. A merge that was interrupted (a failure, a crash,
Ctrl-C) is resumed by the same command, or when a server opens the store again; clients never see a half-merged origin.
Only snapshots with cow=PATH or DEVICE and store=P or PO can be merged.";

pub const DELTA: &str = "\
Examples:
  freestone delta show job-7
  freestone delta save job-7 job-7.qcow2      for qemu-img check, map, compare and rebase
  freestone delta apply job-8 job-7.qcow2     job-8 is a fork of the same file or image";

pub const SAVE: &str = "\
Examples:
  freestone save ram0 ram0.saved
  freestone save data,log db.saved                both at one moment
  freestone save golden jobs.saved --family       all forks of golden, and their snapshots
  freestone save ram0 ram0.saved --background     as a job

The devices stay in use meanwhile. At any moment, also after a crash or Ctrl-C, the file is either the old or the new one.";

pub const RESTORE: &str = "\
Examples:
  freestone restore ram0.saved
  freestone restore ram0.saved ram1 mem_limit=2G
  freestone restore jobs.saved                    the base of the forks must exist with the same content
  freestone restore jobs.saved record=job-%n.log  each disk and fork records its writes in its own log

The whole file is verified before a device is created. Ctrl-C creates none.";

pub const REWIND: &str = "\
Examples:
  freestone rewind job-7
  freestone rewind 'job-*' trial
  freestone rewind ram0 --to ram0-monday";

pub const REMOVE: &str = "\
Examples:
  freestone remove job-7 --force
  freestone remove big --background      frees its memory after the reply
  freestone remove 'job-*' golden        removes forks before their base";

pub const RESET: &str = "\
Examples:
  freestone reset ram0
  freestone reset 'ram*'";

pub const COMPACT: &str = "\
Examples:
  freestone compact ram0
  freestone compact ram0 --progress json";

pub const IDLE: &str = "\
Examples:
  freestone idle big all       mark every page; a read or write clears the mark
  freestone idle big 3600      mark pages that were not accessed for an hour";

pub const WRITEBACK: &str = "\
Examples:
  freestone writeback big idle                             pages marked by `freestone idle`
  freestone writeback big huge                             pages stored uncompressed
  freestone writeback big incompressible                   pages that `freestone recompress` could not shrink
  freestone writeback big page_index=7 page_indexes=100-199

If writeback_limit or the backing device has no room for all of them, the largest objects go first.";

pub const RECOMPRESS: &str = "\
Examples:
  freestone recompress big type=idle
  freestone recompress big type=huge priority=2 max_pages=10000
  freestone recompress big threshold=2000 algo=zstd

The algorithms are those of recomp_algorithm, set when the device was created.";

pub const JOBS: &str = "\
Examples:
  freestone jobs
  freestone jobs ram0 --json

The server remembers the last 2048 background jobs that ended.";

pub const CANCEL: &str = "\
Examples:
  freestone cancel ram0                  all its jobs: save, merge, delta, writeback, recompress, compact
  freestone cancel ram0 writeback
  freestone cancel --job 3               also a restore

cancel returns at once; `freestone wait --job` waits for the end. save, delta save and restore leave nothing behind;
merge, writeback, recompress, compact and delta apply keep the work done so far. remove cannot be cancelled.";

pub const APPLY: &str = "\
Examples:
  freestone apply freestone.toml --check      print what would change
  freestone apply freestone.toml
  kill -HUP PID                               the same for the file of serve --config; also reloads the files of --tls

apply prints each change. Devices created at run time stay unless --prune is given. If a change is impossible (a fixed
key, a device in use), apply reports it and changes nothing.";

pub const DUMP: &str = "\
Examples:
  freestone dump > freestone.toml
  freestone serve --config freestone.toml

The file has neither the content of devices nor the forks of connections to a template.";

pub const SHUTDOWN: &str = "\
Examples:
  freestone shutdown
  freestone shutdown --timeout 10s";

pub const UPGRADE: &str = "\
Examples:
  freestone upgrade                       the program at the path of the running one, after a package has replaced it
  freestone upgrade ./freestone-2

The server needs a state directory (serve --state), and --recoverable for the content of RAM disks, forks and snapshots in
memory. The program takes its place in the same process. Requests wait until it has opened the devices; NBD clients without
TLS stay connected, others connect again. If the program cannot take over, the server goes on, and the status is 1.";

pub const BLOCK_STATE: &str = "\
Examples:
  freestone block-state ram0                         page number, last access (seconds since boot), flags
  freestone block-state ram0 --offset 1G --length 2M

Flags: s one repeated pattern, w on the backing device, h stored uncompressed, i idle, r recompressed, n no algorithm
compresses it. Empty pages are omitted. --json prints one object after another.";

pub const ZONES: &str = "\
Examples:
  freestone zones n0                                 in sectors, as blkzone report; --json: in bytes
  freestone zones n0 report --offset 1G --count 4
  freestone zones n0 reset                           all zones that can be reset
  freestone zones n0 finish --offset 64M --count 1";

pub const POWER_CUT: &str = "\
Examples:
  freestone power-cut n0                       prints the seed
  freestone power-cut n0 --seed 7              loses the same unflushed blocks again
  freestone power-cut n0 --after 1000writes    after 1000 more writes
  freestone power-cut f0 --at 'commit 17'      with record=FILE: the device as it was at the mark
  freestone power-cut f0 --at 120 --seed 7     after 120 entries of the log, with a power cut there

Connections end without replies to requests in flight; clients that reconnect find the device as after a reboot. Flushed
data is there, and any part of the unflushed data.";

pub const MARK: &str = "\
Example:
  freestone mark f0 'commit 17 acknowledged'";

pub const EXPLORE: &str = "\
Examples:
  freestone explore --mount --fs ext4 --size 64M --run './workload \"$dir\"' --check './check \"$dir\" \"$mark\"'
  freestone explore --run './store \"$uri\"' --check './store --verify \"$uri\"' --log run.log --model torn
  freestone explore --log run.log --size 1G --check './store --verify \"$uri\"' --budget 10m --junit result.xml
  freestone explore --log run.log --base ext4.img --file --check 'e2fsck -fp \"$file\"; test $? -le 1'
  freestone explore --log run.log --size 1G --state 120-45 --check './store --verify \"$uri\"'

--run has $uri, $nbd, $unixsocket, $control, and $device for `freestone mark \"$device\" TEXT`; with --mount $dir. --check
has $uri, $nbd, $unixsocket, $state, $entry and $mark, the last mark before the state; with --mount $dir, with --file
$file. It may write to the disk.

A state is the disk after the first ENTRY entries of the log, without some of the writes since the last flush. Models:
  prefix   nothing is lost: a power loss between two writes
  subset   any of the unflushed writes are lost, in blocks of 4096 bytes
  torn     as subset, in pieces of --unit bytes

Exit status: 0 all states passed, 1 a state or the workload failed, 2 usage, 130 interrupted.";

pub const RELEASE: &str = "\
Example:
  freestone release n0";

pub const PUBLISH: &str = "\
Examples:
  freestone publish ram1 --nbd unix:/run/ram1.sock --read-only
  freestone publish job-7 --vhost-user unix:/run/job-7.sock
      a disk for a virtual machine: -chardev socket,id=c,path=/run/job-7.sock -device vhost-user-blk-pci,chardev=c
  freestone publish job-7 --ublk
      a block device of this machine, /dev/ublkbN
  freestone publish golden scratch --template --ttl 600 --nbd unix:/run/scratch.sock
      each connection to scratch gets a fork of golden; the same as
      `freestone fork golden scratch --template --ttl 600 --nbd unix:/run/scratch.sock`";

pub const UNPUBLISH: &str = "\
Example:
  freestone unpublish ram1";

pub const PUSH: &str = "\
Examples:
  freestone push golden s3://bucket/images:debian
  freestone push job-7 s3://bucket/images:job-7              changes of a fork whose base is in the store
  freestone push 'd=qcow2,path=disk.qcow2' file:///srv/images:disk       without a server
  freestone push vm s3://bucket/images:vm --restore vm.saved             a saved file, also without a server
  freestone push vm s3://bucket/images:vm --restore vm.saved --device golden=file,path=golden.img,readonly=yes
  freestone push golden s3://bucket/secret:v1 key=domain.key encrypt=yes

A live ram device or fork is pushed as of one moment and stays in use. push sets the tag last, unless somebody else has
changed it meanwhile. An interrupted push changes no tag, and the next push sends the rest.";

pub const PULL: &str = "\
Examples:
  freestone pull s3://bucket/images:debian golden && freestone fork golden vm1
  freestone pull s3://bucket/images:debian golden cache=/srv/cache cache_size=64G

Without a pull, data is fetched on its first read.";

pub const TRACE: &str = "\
Example:
  freestone trace golden      after a virtual machine on a fork of golden has booted";

pub const IMAGES: &str = "\
Examples:
  freestone images s3://bucket/images
  freestone images file:///srv/images --untag old";

pub const PRUNE: &str = "\
Examples:
  freestone prune s3://bucket/images --dry-run
  freestone prune s3://bucket/images
  freestone prune s3://bucket/images --tags 'nightly-*' --keep-last 7 --keep-within 30d

Without --tags the rules apply to all tags. If the rules would keep none of the tags that they apply to, prune removes
none. Objects younger than the store's grace time (a day, or what its first push set) stay: a push in progress may use
them.";

pub const HOLD: &str = "\
Without a server, ends when its socket is removed from the state directory; the
memory is free then.";

pub const UBLK_OWNER: &str = "\
Example:
  freestone ublk-owner ublkb0";
