//! Table of the keys of device specifications, the one place that names them. Parsing, help, `set`, `apply` and the
//! reference of the documentation use the table; the modules of the kinds parse the values.

/// Key of a device specification.
#[derive(Debug)]
pub struct Key {
    /// Name of the key.
    pub name: &'static str,
    /// Form of the value in the help, such as `SIZE|none`. The form of a path begins with PATH, FILE or DIR.
    value: &'static str,
    /// Change of the key at run time.
    pub change: Change,
    /// Sentence of the help. If it is empty, the sentence of the next key is about this key too.
    about: &'static str,
}

/// Change of a key of an existing device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The value is fixed for the life of the device.
    Fixed,
    /// `set` and `apply` change the value.
    Set,
    /// `set` and `apply` change the value. `apply` sets this one when the file no longer contains the key.
    Or(&'static str),
    /// `set` changes the value step by step, so `apply` cannot bring it to the one in a file.
    Steps,
}
use Change::{Fixed, Or, Set, Steps};

macro_rules! keys {
    ($($(#[$doc:meta])* $vis:vis $group:ident { $($name:ident = $value:literal, $change:expr, $about:literal;)* })*) => {
        $($(#[$doc])* $vis const $group: &[Key] = &[
            $(Key { name: stringify!($name), value: $value, change: $change, about: $about }),*
        ];)*
    };
}

keys! {
    /// Limits, which every device and export has.
    pub LIMITS {
        iops = "N|none", Or("0"), "";
        bps = "SIZE|none", Or("0"), "operations and bytes per second; default none";
        iops_burst = "N", Or("0"), "";
        bps_burst = "SIZE", Or("0"), "burst after a pause; default a tenth of iops and bps";
        max_clients = "N|none", Or("0"), "connections over all exports; default none";
    }
    /// Other keys of every device.
    pub(crate) ALL {
        publish = "yes|no", Fixed, "export at the server's own addresses; default yes in serve, no in create";
        tls_clients = "any|NAME[+NAME...]", Fixed, "export only by TLS, to clients whose certificate has one of the names";
    }
    /// Key of devices whose content a server can lose.
    pub(crate) LOSS {
        on_data_loss = "withhold|empty", Or("withhold"), "also template and null: if the content is lost, the next start withholds the exports of the device or publishes it empty; default withhold";
    }
    /// Key of devices whose content the state directory can keep.
    pub(crate) KEEP {
        keep = "yes|no", Or("no"), "ram, fork, snapshot: save the content for the next start; default no";
    }
    /// Keys of a family: RAM disks and forks that share one memory pool.
    pub FAMILY {
        comp_algorithm = "lz4|lz4hc|lzo|zstd|store", Fixed, "default lz4";
        algorithm_params = "WORDS", Fixed, "for example 'level=3'";
        mem_limit = "SIZE|none", Or("none"), "memory for the data; default half of the machine's memory";
        recomp_algorithm = "WORDS", Fixed, "for example 'algo=zstd priority=1'";
        auto_recompress = "no|SECONDS", Fixed, "recompress pages that were idle for this time; default no";
        auto_group = "no|SECONDS", Fixed, "compress neighbouring pages that were idle for this time together; default no";
        auto_dedup = "no|SECONDS", Fixed, "store pages with the same content once if they were idle for this time; default no";
        backing_dev = "PATH|device:NAME", Fixed, "file, block device or device that takes pages when mem_limit is near";
        backing_size = "SIZE", Fixed, "create an unnamed file of this size if backing_dev does not exist";
        compressed_writeback = "yes|no", Fixed, "default yes";
        writeback_limit = "N", Set, "4 KiB units; takes effect with writeback_limit_enable=1";
        writeback_limit_enable = "yes|no", Or("0"), "default no";
        writeback_batch_size = "N", Set, "4 KiB blocks in flight; default 1024";
        full = "error|wait", Set, "what a write does without free memory; default error";
        full_timeout = "SECONDS", Set, "longest wait with full=wait; default 60";
        mem_warn_threshold = "PERCENT|off", Set, "usage above which the log warns; default 90%";
    }
    /// Keys of zoned devices. All but the last are also attributes.
    pub(crate) ZONES {
        zoned = "yes|no", Fixed, "default no";
        zone_size = "SIZE", Fixed, "power of two; default 256M";
        zone_capacity = "SIZE", Fixed, "default zone_size";
        zone_nr_conv = "N", Fixed, "conventional zones at the start";
        zone_max_open = "N", Fixed, "";
        zone_max_active = "N", Fixed, "0: no limit";
        zone_append_max_sectors = "N", Fixed, "largest zone append";
        zone_full = "yes|no", Fixed, "all zones are full at first";
        zone_readonly = "OFFSET[;...]", Steps, "";
        zone_offline = "OFFSET[;...]", Steps, "zones that are read-only or offline at first";
        zone_state = "PATH", Fixed, "of a file: where write pointers are kept; default PATH.zones";
    }
    /// Keys of faults and power cuts.
    pub FAULTS {
        faults = "'RULES'|none", Or("none"), "for example 'write error=EIO chance=1%'; see docs/reference/faults.md";
        seed = "N", Set, "seed of all that is random";
        power_cut = "yes|no", Fixed, "hold unflushed writes back, so that `freestone power-cut` can lose them";
        power_cut_unit = "SIZE", Fixed, "bytes that a power cut does not tear";
        record = "FILE", Fixed, "log of all writes, for `freestone power-cut --at`";
    }
    /// Keys of the access to an image store.
    pub(crate) REACH {
        key = "FILE", Fixed, "key of the store's object names, 64 hexadecimal digits";
        timeout = "TIME", Fixed, "deadline of a fetch; default 30s";
        endpoint = "URL", Fixed, "";
        region = "NAME", Fixed, "";
        credentials = "FILE", Fixed, "";
        anonymous = "yes|no", Fixed, "override the usual variables";
        hedge = "TIME", Fixed, "send a read a second time after this time, for example 200ms";
    }
    /// Keys of the page cache of an image.
    pub(crate) CACHE {
        cache = "DIR|none", Fixed, "page cache on disk; default $FREESTONE_CACHE, else ~/.cache/freestone";
        cache_size = "SIZE", Fixed, "limit of the cache; default 16G";
    }
    /// Keys of an image store that a push creates.
    pub(crate) PUSH {
        encrypt = "yes|no", Fixed, "default no";
        grace = "TIME", Fixed, "how long unreferenced objects stay; default a day";
    }
    pub(crate) RAM {
        disksize = "SIZE", Set, "compressed RAM disk";
        readonly = "yes|no", Fixed, "default no";
    }
    /// All but the last three are also attributes.
    pub(crate) NULL {
        size = "SIZE", Fixed, "test drive; without memory_backed it reads as zeroes";
        blocksize = "512..4096", Fixed, "default 4096";
        memory_backed = "yes|no", Fixed, "store what is written";
        discard = "yes|no", Fixed, "accept discards; needs memory_backed";
        cache_size = "SIZE", Fixed, "";
        fua = "yes|no", Fixed, "volatile write cache; see `freestone power-cut --help`";
        mbps = "N", Fixed, "bandwidth, MiB per second";
        completion_nsec = "N", Fixed, "least latency of a request, nanoseconds";
        badblocks = "+FIRST-LAST[;...]", Steps, "in sectors";
        badblocks_once = "yes|no", Fixed, "a bad range is good after it failed one request; default no";
        badblocks_partial_io = "yes|no", Fixed, "transfer the blocks before the first bad one; default no";
        max_sectors = "N", Fixed, "";
        rotational = "yes|no", Fixed, "";
        readonly = "yes|no", Fixed, "properties that clients see; default none and no";
        comp_algorithm = "NAME", Fixed, "compress what is stored";
        algorithm_params = "WORDS", Fixed, "";
        mem_limit = "SIZE|none", Fixed, "as of ram, with comp_algorithm";
    }
    pub(crate) FILE {
        path = "PATH", Fixed, "raw image or block device";
        readonly = "yes|no", Fixed, "default no";
        direct = "auto|on|off", Fixed, "auto: O_DIRECT for block devices only";
        size = "SIZE", Fixed, "create a sparse file of this size if PATH does not exist";
    }
    pub(crate) QCOW2 {
        path = "PATH", Fixed, "read-only qcow2 image with its backing files";
        standalone = "yes|no", Fixed, "yes: refuse an image that names other files; default no";
    }
    pub(crate) IMAGE {
        url = "URL[:TAG]", Fixed, "read-only image in object storage (s3://BUCKET/PREFIX, gs, az, http, https, file:///DIR)";
        prefetch = "yes|no", Fixed, "fetch what `freestone trace` recorded; default yes";
    }
    pub(crate) NBD {
        uri = "URI", Fixed, "export of any NBD server: nbd://HOST[:PORT]/EXPORT, nbds:// with TLS, nbd+unix:///EXPORT?socket=PATH, nbds+unix://";
        connections = "N", Fixed, "default 4 if the server allows several";
        timeout = "TIME", Fixed, "how long requests wait for a lost server; default 30s";
        readonly = "yes|no", Fixed, "";
        size = "SIZE", Fixed, "default as the export; another size is refused";
    }
    pub(crate) NBD_TLS {
        tls_ca = "FILE", Fixed, "";
        tls_hostname = "NAME", Fixed, "trusted authority and expected name; default the system's, the host";
        tls_cert = "FILE", Fixed, "";
        tls_key = "FILE", Fixed, "client certificate";
    }
    pub(crate) RBD {
        image = "POOL/NAME", Fixed, "image in Ceph's RBD; needs librbd (Debian package librbd1)";
        conf = "FILE", Fixed, "";
        id = "USER", Fixed, "default Ceph's usual configuration file, admin";
        snap = "NAME", Fixed, "a snapshot of the image, read-only";
        timeout = "TIME", Fixed, "how long requests wait for the cluster; default 2m";
        readonly = "yes|no", Fixed, "";
        size = "SIZE", Fixed, "default no; another size is refused";
    }
    pub(crate) FORK {
        base = "NAME", Fixed, "writable disk over a read-only file or export, an image or a snapshot";
    }
    /// Keys of a fork, and of the forks of a template.
    pub(crate) FORK_LIMITS {
        size = "SIZE", Set, "default the size of the base; reads as zeroes beyond the base";
        mem_limit = "SIZE|none", Or("none"), "the fork's own limit within its family's memory; default none";
        mem_min = "SIZE", Or("0"), "memory that the family reserves for the fork; default none";
        full = "error|wait|family", Set, "what a write does without free memory; default as its family";
    }
    pub(crate) TEMPLATE {
        base = "NAME", Fixed, "a fork for each connection, removed when the connection ends";
    }
    pub(crate) TTL {
        ttl = "SECONDS|none", Fixed, "longest time of a connection; default none";
    }
    /// Keys of a snapshot.
    pub SNAPSHOT {
        origin = "NAME", Fixed, "content of a ram device, fork or file at one moment";
        cow = "PATH|DEVICE", Fixed, "COW device for the copies of a file's chunks; default memory";
        cow_size = "SIZE", Fixed, "create a sparse file of this size if there is no file";
        store = "P|PO|N", Fixed, "persistent, persistent with overflow, transient (dm-snapshot); default P";
        chunk_size = "SIZE", Fixed, "unit of copies, 4K to 1G; default 16K, without cow 4K";
        readonly = "yes|no", Fixed, "default yes without cow, no with cow";
        discard_zeroes_cow = "yes|no", Fixed, "";
        discard_passdown_origin = "yes|no", Fixed, "discards as in the kernel; default no";
        force = "yes|no", Fixed, "overwrite what the COW device holds; default no";
        merge = "yes|no", Fixed, "merge the snapshot into its origin, which shows the merged content from the start of the merge; default no";
    }
}

/// Kind of device, or verb whose keys have the syntax of those of a device.
struct Kind {
    /// Name of the kind or verb.
    name: &'static str,
    /// Keys that the help of the kind describes. The first is required, and its sentence describes the kind.
    own: &'static [&'static [Key]],
    /// Keys that the help describes elsewhere.
    shared: &'static [&'static [Key]],
    /// End of the help.
    note: &'static str,
}

const IMAGE_NOTE: &str = "Also the keys of ram except disksize: its forks share them.";
const READONLY_NOTE: &str = "With readonly=yes also the keys of ram except disksize: its forks share them.";
const SNAP_NOTE: &str =
    "With readonly=yes or snap also the keys of ram except disksize: its forks share them.";
const COPIES_NOTE: &str =
    "Of a file also the keys of ram except disksize: copies in memory and its forks share them.";

/// Kinds, in the order of the help, and verbs.
static KINDS: [Kind; 13] = [
    Kind { name: "ram", own: &[RAM], shared: &[LOSS, KEEP, FAMILY, ZONES, FAULTS, ALL], note: "" },
    Kind { name: "null", own: &[NULL], shared: &[ZONES, FAULTS, ALL, LOSS], note: "" },
    Kind { name: "file", own: &[FILE], shared: &[FAMILY, ZONES, FAULTS, ALL], note: READONLY_NOTE },
    Kind { name: "qcow2", own: &[QCOW2], shared: &[FAMILY, ALL], note: IMAGE_NOTE },
    Kind { name: "image", own: &[IMAGE, REACH, CACHE], shared: &[FAMILY, ALL], note: IMAGE_NOTE },
    Kind { name: "nbd", own: &[NBD, NBD_TLS], shared: &[FAULTS, FAMILY, ALL], note: READONLY_NOTE },
    Kind { name: "rbd", own: &[RBD], shared: &[FAULTS, FAMILY, ALL], note: SNAP_NOTE },
    Kind { name: "fork", own: &[FORK, FORK_LIMITS], shared: &[FAULTS, ALL, LOSS, KEEP], note: "" },
    Kind { name: "template", own: &[TEMPLATE, FORK_LIMITS, TTL], shared: &[FAULTS, ALL, LOSS], note: "" },
    Kind { name: "snapshot", own: &[SNAPSHOT], shared: &[FAMILY, ALL, LOSS, KEEP], note: COPIES_NOTE },
    Kind { name: "push", own: &[], shared: &[REACH, PUSH], note: "" },
    Kind { name: "images", own: &[], shared: &[REACH], note: "" },
    Kind { name: "prune", own: &[], shared: &[REACH], note: "" },
];

/// Returns true if `kind` is a verb.
pub(crate) fn is_verb(kind: &str) -> bool {
    KINDS.iter().any(|known| known.name == kind && known.own.is_empty())
}

/// Returns the keys of a kind or verb, except the limits.
pub fn of_kind(kind: &str) -> impl Iterator<Item = &'static Key> {
    let kind = KINDS.iter().find(|known| known.name == kind);
    kind.into_iter().flat_map(|kind| kind.own.iter().chain(kind.shared)).copied().flatten()
}

/// Returns true if `name` is one of the keys.
pub fn has(keys: &[Key], name: &str) -> bool {
    keys.iter().any(|key| key.name == name)
}

/// Returns the names of the first `N` keys.
pub const fn names<const N: usize>(keys: &[Key]) -> [&'static str; N] {
    let (mut names, mut at) = ([""; N], 0);
    while at < N {
        names[at] = keys[at].name;
        at += 1;
    }
    names
}

/// Returns true if the value of the key `name` is a path, of any kind or verb.
pub(crate) fn is_path(name: &str) -> bool {
    let keys = KINDS.iter().flat_map(|kind| of_kind(kind.name));
    let is_path = |key: &Key| ["PATH", "FILE", "DIR"].iter().any(|form| key.value.starts_with(form));
    keys.filter(|key| key.name == name).any(is_path)
}

/// Returns the change of the key `name` of a device at run time.
pub fn change(kind: &str, name: &str) -> Change {
    LIMITS.iter().chain(of_kind(kind)).find(|key| key.name == name).map_or(Fixed, |key| key.change)
}

/// Returns the names of the keys that `set` changes, for a message.
pub(crate) fn settable(groups: &[&'static [Key]]) -> String {
    let keys = groups.iter().copied().flatten().filter(|key| key.change != Fixed);
    let names: Vec<_> = keys
        .map(|key| if matches!(key.name, "disksize" | "size") { "disksize (grow)" } else { key.name })
        .collect();
    let (last, names) = names.split_last().expect("a device has settable keys");
    format!("{} and {last}", names.join(", "))
}

/// Section of the help: a kind of device, or keys that several kinds have.
pub struct Topic {
    /// Name of the section. Empty if the section continues the one before.
    pub name: &'static str,
    /// Heading and its sentence.
    pub heading: (String, &'static str),
    /// Keys with their values, and the sentence about them.
    pub rows: Vec<(String, &'static str)>,
    /// Sentence below the keys.
    pub note: &'static str,
}

/// Returns the sections of the help, first those about all kinds.
pub fn topics() -> impl Iterator<Item = Topic> {
    let shared = |name, heading: &str, groups: &[&'static [Key]]| {
        let rows = rows(groups.iter().copied().flatten());
        Topic { name, heading: (heading.to_owned(), ""), rows, note: "" }
    };
    let kinds = KINDS.iter().filter(|kind| !is_verb(kind.name)).map(|kind| {
        let &Kind { name, own, note, .. } = kind;
        let mut keys = own.iter().copied().flatten();
        let first = keys.next().expect("a kind has a required key");
        let family: &[Key] = if name == "ram" { FAMILY } else { &[] };
        let heading = (format!("NAME={name},{}={}", first.name, first.value), first.about);
        Topic { name, heading, rows: rows(keys.chain(family)), note }
    });
    let all = [
        shared("all kinds", "Keys of every device:", &[LIMITS, ALL]),
        shared("", "Keys of devices that hold content in memory, with serve --state DIR:", &[KEEP, LOSS]),
    ];
    let layers = [
        shared("zoned", "Zoned devices: ram, null and file with zoned=yes", &[ZONES]),
        shared("faults", "Faults and power cuts: ram, null, file, nbd, rbd and fork", &[FAULTS]),
    ];
    all.into_iter().chain(kinds).chain(layers)
}

/// Returns the rows of the help about keys. Keys without a sentence are in the row of the next one.
pub fn rows<'a>(keys: impl Iterator<Item = &'a Key>) -> Vec<(String, &'static str)> {
    let mut rows: Vec<(String, &'static str)> = Vec::new();
    for key in keys {
        let text = format!("{}={}", key.name, key.value);
        match rows.last_mut() {
            Some((row, about)) if about.is_empty() => (*row, *about) = (format!("{row}, {text}"), key.about),
            _ => rows.push((text, key.about)),
        }
    }
    rows
}
