//! Reference of the kinds of devices and their keys: `freestone help KIND` and `freestone serve
//! --help-devices`.

use clap::Command;

/// Help text about one kind of device, or about keys that several kinds have.
struct Topic {
    name: &'static str,
    text: &'static str,
}

/// Help text about the keys of every device, also part of the help of each command that creates devices.
macro_rules! common_keys {
    () => {
        "\
Keys of every device:
  iops=N|none, bps=SIZE|none                operations and bytes per second; default none
  iops_burst=N, bps_burst=SIZE              burst after a pause; default a tenth of iops and bps
  max_clients=N|none                        connections over all exports; default none
  tls_clients=any|NAME[+NAME...]            export only by TLS, to clients whose certificate has one of the names
  publish=yes|no                            export at the server's own addresses; default yes in serve, no in create
Keys of devices that hold content in memory, with serve --state DIR:
  keep=yes|no                               ram, fork, snapshot: save the content for the next start; default no
  on_data_loss=withhold|empty               also template and null: if the content is lost, the next start withholds
                                            the exports of the device or publishes it empty; default withhold"
    };
}
pub(crate) use common_keys;

/// Help text about the keys of a fork, also part of the help of the command `fork`.
macro_rules! fork_keys {
    () => {
        "  size=SIZE                                 default the size of the base; reads as zeroes beyond the base
  mem_limit=SIZE|none                       the fork's own limit within its family's memory; default none
  mem_min=SIZE                              memory that the family reserves for the fork; default none
  full=error|wait|family                    what a write does without free memory; default as its family"
    };
}
pub(crate) use fork_keys;

/// Help text about the keys of a snapshot, also part of the help of the command `snapshot`.
macro_rules! snapshot_keys {
    () => {
        "  cow=PATH|DEVICE                           COW device for the copies of a file's chunks; default memory
  cow_size=SIZE                             create a sparse file of this size if there is no file
  store=P|PO|N                              persistent, persistent with overflow, transient (dm-snapshot); default P
  chunk_size=SIZE                           unit of copies, 4K to 1G; default 16K, without cow 4K
  readonly=yes|no                           default yes without cow, no with cow
  merge=yes|no                              merge the snapshot into its origin, which shows the merged content from
                                            the start of the merge; default no
  discard_zeroes_cow=yes|no, discard_passdown_origin=yes|no
  force=yes|no                              overwrite what the COW device holds; default no"
    };
}
pub(crate) use snapshot_keys;

const TOPICS: &[Topic] = &[
    Topic {
        name: "ram",
        text: "\
NAME=ram,disksize=SIZE                      compressed RAM disk
  comp_algorithm=lz4|lz4hc|lzo|zstd|store   default lz4
  algorithm_params=WORDS                    for example 'level=3'
  mem_limit=SIZE|none                       memory for the data; default half of the machine's memory
  backing_dev=PATH|device:NAME              file, block device or device that takes pages when mem_limit is near
  backing_size=SIZE                         create an unnamed file of this size if backing_dev does not exist
  compressed_writeback=yes|no               default yes
  writeback_limit=N                         4 KiB units; takes effect with writeback_limit_enable=1
  writeback_batch_size=N                    4 KiB blocks in flight; default 1024
  recomp_algorithm=WORDS                    for example 'algo=zstd priority=1'
  auto_recompress=no|SECONDS                recompress pages that were idle for this time; default no
  full=error|wait                           what a write does without free memory; default error
  full_timeout=SECONDS                      longest wait with full=wait; default 60
  mem_warn_threshold=PERCENT|off            usage above which the log warns; default 90%
  readonly=yes|no                           default no",
    },
    Topic {
        name: "null",
        text: "\
NAME=null,size=SIZE                         test drive; without memory_backed it reads as zeroes
  blocksize=512..4096                       default 4096
  memory_backed=yes|no                      store what is written; comp_algorithm=NAME compresses it
  discard=yes|no                            accept discards; needs memory_backed
  cache_size=SIZE, fua=yes|no               volatile write cache; see `freestone power-cut --help`
  mbps=N                                    bandwidth, MiB per second
  completion_nsec=N                         least latency of a request, nanoseconds
  badblocks=+FIRST-LAST[;...]               in sectors; badblocks_once=yes, badblocks_partial_io=yes
  max_sectors=N, rotational=yes|no, readonly=yes|no",
    },
    Topic {
        name: "file",
        text: "\
NAME=file,path=PATH                         raw image or block device
  readonly=yes|no                           default no
  direct=auto|on|off                        auto: O_DIRECT for block devices only
  size=SIZE                                 create a sparse file of this size if PATH does not exist
  With readonly=yes also the keys of ram except disksize: its forks share them.",
    },
    Topic {
        name: "qcow2",
        text: "\
NAME=qcow2,path=PATH                        read-only qcow2 image with its backing files
  standalone=yes|no                         yes: refuse an image that names other files; default no
  Also the keys of ram except disksize: its forks share them.",
    },
    Topic {
        name: "image",
        text: "\
NAME=image,url=URL[:TAG]                    read-only image in object storage (s3://BUCKET/PREFIX, gs, az, http, https,
                                            file:///DIR)
  cache=DIR|none                            page cache on disk; default $FREESTONE_CACHE, else ~/.cache/freestone
  cache_size=SIZE                           limit of the cache; default 16G
  key=FILE                                  key of the store's object names, 64 hexadecimal digits
  timeout=TIME                              deadline of a fetch; default 30s
  endpoint=URL, region=NAME, credentials=FILE, anonymous=yes|no   override the usual variables
  prefetch=yes|no                           fetch what `freestone trace` recorded; default yes
  hedge=TIME                                send a read a second time after this time, for example 200ms
  Also the keys of ram except disksize: its forks share them.",
    },
    Topic {
        name: "nbd",
        text: "\
NAME=nbd,uri=URI                            export of any NBD server: nbd://HOST[:PORT]/EXPORT, nbds:// with TLS,
                                            nbd+unix:///EXPORT?socket=PATH, nbds+unix://
  connections=N                             default 4 if the server allows several
  timeout=TIME                              how long requests wait for a lost server; default 30s
  readonly=yes|no, size=SIZE                default as the export; another size is refused
  tls_ca=FILE, tls_hostname=NAME            trusted authority and expected name; default the system's, the host
  tls_cert=FILE, tls_key=FILE               client certificate
  With readonly=yes also the keys of ram except disksize: its forks share them.",
    },
    Topic {
        name: "rbd",
        text: "\
NAME=rbd,image=POOL/NAME                    image in Ceph's RBD; needs librbd (Debian package librbd1)
  conf=FILE, id=USER                        default Ceph's usual configuration file, admin
  snap=NAME                                 a snapshot of the image, read-only
  timeout=TIME                              how long requests wait for the cluster; default 2m
  readonly=yes|no, size=SIZE                default no; another size is refused
  With readonly=yes or snap also the keys of ram except disksize: its forks share them.",
    },
    Topic {
        name: "fork",
        text: concat!(
            "\
NAME=fork,base=NAME                         writable disk over a read-only file or export, an image or a snapshot
",
            fork_keys!()
        ),
    },
    Topic {
        name: "template",
        text: concat!(
            "\
NAME=template,base=NAME                     a fork for each connection, removed when the connection ends
",
            fork_keys!(),
            "
  ttl=SECONDS|none                          longest time of a connection; default none"
        ),
    },
    Topic {
        name: "snapshot",
        text: concat!(
            "\
NAME=snapshot,origin=NAME                   content of a ram device, fork or file at one moment
",
            snapshot_keys!()
        ),
    },
    Topic {
        name: "zoned",
        text: "\
Zoned devices: ram, null and file with zoned=yes
  zone_size=SIZE                            power of two; default 256M
  zone_capacity=SIZE                        default zone_size
  zone_nr_conv=N                            conventional zones at the start
  zone_max_open=N, zone_max_active=N        0: no limit
  zone_append_max_sectors=N                 largest zone append
  zone_full=yes|no                          all zones are full at first
  zone_readonly=OFFSET[;...], zone_offline=OFFSET[;...]
  zone_state=PATH                           of a file: where write pointers are kept; default PATH.zones",
    },
    Topic {
        name: "faults",
        text: "\
Faults and power cuts: ram, null, file, nbd, rbd and fork
  faults='RULES'|none                       for example 'write error=EIO chance=1%'; see docs/reference/faults.md
  seed=N                                    seed of all that is random
  power_cut=yes|no                          hold unflushed writes back, so that `freestone power-cut` can lose them
  power_cut_unit=SIZE                       bytes that a power cut does not tear
  record=FILE                               log of all writes, for `freestone power-cut --at`",
    },
];

const RULES: &str = "\
Put a device after the devices that it uses. Write a comma inside a value twice.";

/// Returns the help of a topic, or None if the topic is unknown or a subcommand has its name.
pub fn topic(name: &str, parser: &Command) -> Option<String> {
    let topic = TOPICS.iter().find(|topic| topic.name == name)?;
    let is_verb = parser.get_subcommands().any(|verb| verb.get_name() == name);
    (!is_verb).then(|| format!("{}\n\n{}\n\n{RULES}\n", topic.text, common_keys!()))
}

/// Returns the help of all topics, as printed by `freestone serve --help-devices`.
pub fn all() -> String {
    let topics: Vec<_> = TOPICS.iter().map(|topic| topic.text).collect();
    format!("{}\n\n{}\n\n{RULES}\n", topics.join("\n\n"), common_keys!())
}

/// Returns the names and texts of all topics, including the keys of all kinds.
pub fn topics() -> impl Iterator<Item = (&'static str, &'static str)> {
    let topics = TOPICS.iter().map(|topic| (topic.name, topic.text));
    [("all kinds", common_keys!())].into_iter().chain(topics)
}

#[cfg(test)]
mod tests {
    use freestone_spec::kinds::{KINDS, RESTORED};

    use super::{TOPICS, all};

    #[test]
    fn each_kind_has_a_topic() {
        for kind in KINDS.iter().filter(|kind| **kind != RESTORED) {
            assert!(TOPICS.iter().any(|topic| topic.name == *kind), "{kind}");
        }
    }

    #[test]
    fn help_of_devices_fits_120_columns() {
        for line in all().lines() {
            assert!(line.len() <= 120, "{line}");
        }
    }
}
