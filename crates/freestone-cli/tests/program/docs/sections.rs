//! What the sections of the docs take for granted.

/// Sections whose commands are not run here: fio's own tests run the engine, and the lab has a Ceph
/// (`lab/ceph-rbd.sh` runs what nbd-client.md and rbd.md show).
pub const NOT_RUN: [(&str, &str); 5] = [
    ("docs/fio.md", "fio"),
    ("docs/fio.md", "Verifying"),
    ("docs/nbd-client.md", "Ceph"),
    ("docs/object-storage.md", "Ceph"),
    ("docs/rbd.md", "Ceph"),
];

/// Files, in any section.
const IMAGES: &str = "
truncate -s 256M golden.img disk.img
head -c 16M \"$(type -P freestone)\" > t.tar
head -c 4M t.tar > new.img
cp t.tar big.img
";

/// What is done before the first command of a section, by the same bash.
pub fn prepared(page: &str, section: &str) -> String {
    let own = match (page, section) {
        // More than the limit, however it is compressed.
        ("README.md", "Little RAM: a disk larger than its memory") => "head -c 320M /dev/urandom > t.tar",
        ("docs/control.md", "The control socket") => {
            "serve golden=file,path=golden.img,readonly=yes
             freestone fork golden job --count 2
             freestone fork golden trial"
        }
        ("docs/control.md", "An example") => "cp .block.0 example.py",
        ("docs/devices.md", "Several at once, and a file that says so") => {
            "cp .block.0 freestone.toml; truncate -s 256M img"
        }
        ("docs/faults.md", "Faults") => "serve disk=null,size=1G,faults=none",
        ("docs/nbd.md", "A scratch disk, start to end") => "trap 'umount mnt' EXIT",
        ("docs/object-storage.md", "A first session")
        | ("README.md", "Fleets: images in object storage, disks on any host") => {
            "cp t.tar debian.img; truncate -s 2G debian.img"
        }
        ("docs/power.md", "After so many writes or flushes") => {
            "serve golden=file,path=golden.img,readonly=yes f=fork,base=golden,power_cut=yes"
        }
        ("docs/power.md", "The log") => {
            "serve golden=file,path=golden.img,readonly=yes f=fork,base=golden,power_cut=yes,record=f.log
             nbdcopy t.tar 'nbd+unix:///f?socket=/tmp/freestone-0/nbd.sock'
             nbdcopy t.tar 'nbd+unix:///f?socket=/tmp/freestone-0/nbd.sock'"
        }
        // Two trials will do.
        ("docs/power.md", "For tests of a file system or a database") => {
            "cp golden.img ext4.img
             seq() { echo 1 2; }
             run-workload() { qemu-io -f raw -c 'write 0 1M' -c flush \"$1\"; }
             check-recovery() { qemu-io -f raw -c 'read -P 0xcd 0 1M' \"$1\" && [ -s \"$2\" ]; }"
        }
        ("docs/snapshots.md", "Merges that are cut short") => {
            "serve disk=file,path=disk.img
             freestone snapshot disk monday cow=./monday.cow cow_size=2G
             qemu-io -f raw -c 'write 0 64M' 'nbd+unix:///disk?socket=/tmp/freestone-0/nbd.sock'
             end"
        }
        ("docs/zram.md", "block_state") => {
            "serve r=ram,disksize=64M,backing_dev=./b,backing_size=16M
             head -c 8K /dev/urandom > noise
             qemu-io -f raw -c 'write -P 7 0 4k' -c 'write -s noise 12k 4k' -c 'write -s noise 20k 4k' \
                 'nbd+unix:///r?socket=/tmp/freestone-0/nbd.sock'
             freestone writeback r page_index=5
             freestone idle r all"
        }
        ("docs/zones.md", "The verb") => {
            "serve n0=null,size=4G,zoned=1,zone_size=64M,memory_backed=1,zone_max_open=8
             qemu-io -f raw -c 'write 0 1M' 'nbd+unix:///n0?socket=/tmp/freestone-0/nbd.sock'"
        }
        _ => "",
    };
    format!("{SERVERS}{IMAGES}{own}\n")
}

/// Waits for a server that was started last and prints to a file; starts one; ends it.
const SERVERS: &str = "
ready() { until grep -q ^control: $1; do sleep 0.02; kill -0 $! || return 1; done; }
serve() { freestone serve \"$@\" >.served 2>&1 & ready .served; }
end() { kill $!; wait $!; }
";
