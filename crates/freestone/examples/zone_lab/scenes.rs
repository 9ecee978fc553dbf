//! Fixed parts of the scripts: device attributes, and operations that show differences which random
//! operations would rarely reach. A comment line in a scene names the expected difference of the next line
//! (see `compare.rs`).

/// Device attributes that the kernel accepts, refuses, or rounds to values that it supports.
pub const SETUP: [&str; 33] = [
    "size=16",
    "size=16 blocksize=512",
    "size=16 blocksize=4096",
    "size=16 blocksize=513",
    "size=16 blocksize=256",
    "size=16 blocksize=8192",
    "size=16 memory_backed=0 discard=1",
    "size=16 memory_backed=0 cache_size=1",
    "size=16 memory_backed=1 cache_size=1 rotational=1",
    "size=16 memory_backed=1 discard=1 zoned=1 zone_size=4",
    "size=16 zoned=1 zone_size=0",
    "size=16 zoned=1 zone_size=3",
    "size=16 zoned=1 zone_size=32",
    "size=16 zoned=1 zone_size=16",
    "size=16 zoned=1 zone_size=4 zone_capacity=5",
    "size=16 zoned=1 zone_size=4 zone_capacity=4",
    "size=16 zoned=1 zone_size=4 zone_capacity=3",
    "size=15 zoned=1 zone_size=4 zone_capacity=3",
    "size=15 zoned=1 zone_size=4 zone_capacity=4",
    "size=15 zoned=1 zone_size=4",
    "size=16 zoned=1 zone_size=4 zone_nr_conv=3",
    "size=16 zoned=1 zone_size=4 zone_nr_conv=4",
    "size=16 zoned=1 zone_size=4 zone_nr_conv=1000",
    "size=16 zoned=1 zone_size=4 zone_max_active=4",
    "size=16 zoned=1 zone_size=4 zone_max_active=3 zone_max_open=4",
    "size=16 zoned=1 zone_size=4 zone_max_active=5 zone_max_open=3",
    "size=16 zoned=1 zone_size=4 zone_max_active=3",
    "size=16 zoned=1 zone_size=4 zone_nr_conv=2 zone_max_open=2",
    "size=16 zoned=1 zone_size=1 zone_append_max_sectors=0",
    "size=16 blocksize=4096 zoned=1 zone_size=1 zone_append_max_sectors=15",
    "size=16 blocksize=4096 zoned=1 zone_size=1 zone_append_max_sectors=7",
    "size=16 zoned=1 zone_size=2 zone_capacity=1 zone_append_max_sectors=100000 max_sectors=8192",
    "size=16 zoned=1 zone_size=2 zone_append_max_sectors=100 max_sectors=8192",
];

pub const CROSSING: &str = "a write into the next zone";
pub const VICTIM: &str = "another zone became read-only";
pub const LEAK: &str = "a closed zone that could not be finished when it became read-only";
pub const LONG_RUNS: &str = "runs of more than 512 bad sectors";
pub const OVERWRITE: &str = "an overwrite that was not flushed";
pub const KEPT_DISCARD: &str = "a discard that was not flushed";

/// Script lines with fixed operations. Comment lines name the expected differences.
pub const SCENES: &str = "\
device zoned=1 size=4 blocksize=4096 zone_size=1 memory_backed=1
write 0 65536 1
write 1044480 8192 2
# a write into the next zone
report 1048576 1
reset 0 2097152
report 0 4
zeroes 0 8192
zeroes 8192 4096
report 0 4
zeroes 0 4096
read 0 16384
write 12288 4096 4
reset 0 1048576
read 0 16384
finish 0 1048576
write 1048576 65536 5
write 1114112 65536 6
write 1179648 65536 7
write 1245184 65536 8
write 1310720 65536 9
write 1376256 65536 10
write 1441792 65536 11
write 1507328 65536 12
write 1572864 65536 13
write 1638400 65536 14
write 1703936 65536 15
write 1769472 65536 16
write 1835008 65536 17
write 1900544 65536 18
write 1966080 65536 19
write 2031616 65536 20
report 0 4
finish 1048576 1048576
report 0 4
read 2031616 131072
device zoned=1 size=4 blocksize=4096 zone_size=2 zone_capacity=1 memory_backed=1
write 0 65536 5
write 65536 65536 6
finish 0 2097152
read 65536 131072
finish 0 2097152
report 0 2
zone_readonly 0
read 65536 131072
finish 0 2097152
zone_offline 4096
report 0 2
zone_readonly 0
read 65536 131072
zone_readonly 0
report 0 2
read 0 131072
device zoned=1 size=4 blocksize=4096 zone_size=1 zone_max_open=1 zone_max_active=2
write 0 4096 1
close 0 1048576
write 1048576 4096 1
zone_readonly 0
report 0 4
# a closed zone that could not be finished when it became read-only
write 2097152 4096 1
device zoned=1 size=4 blocksize=4096 zone_size=1 zone_max_open=1
write 0 4096 1
zone_readonly 1048576
# another zone became read-only
report 0 1
device zoned=1 size=4 blocksize=512 zone_size=1 zone_nr_conv=1 bad=1
zone_readonly 0
zone_offline 1048064
zone_offline 4194304
finish 0 1048576
badblocks +0-100
badblocks +101-200
badblocks +150-400
ranges
badblocks +300-1000
# runs of more than 512 bad sectors
ranges
badblocks -0-2000
badblocks +2-2
badblocks +4-4
badblocks -3-4
ranges
badblocks -0-2
badblocks -7-9
badblocks +5-
badblocks -
badblocks 7-9
badblocks +9-7
badblocks +0x10-0x20
badblocks +8191-8192
badblocks -8191-8192
badblocks -0-8191
ranges
device size=8 blocksize=512 memory_backed=1 badblocks_once=1
write 0 65536 1
badblocks +0-20
badblocks +40-40
badblocks +60-571
read 4096 512
ranges
read 0 65536
ranges
read 40960 512
ranges
read 0 65536
badblocks +60-600
read 40960 512
# runs of more than 512 bad sectors
ranges
# runs of more than 512 bad sectors
read 262144 65536
badblocks -0-600
read 0 65536
device size=8 blocksize=4096 memory_backed=1 badblocks_partial_io=1 discard=1
write 0 16384 1
badblocks +17-17
write 0 16384 2
zeroes 8192 16384
badblocks -17-17
read 0 16384
badblocks +17-17
discard 0 16384
badblocks -17-17
read 0 16384
device size=8 blocksize=4096 memory_backed=1 cache_size=64 discard=1
write 0 8192 1
read 0 16384
power
read 0 16384
write 8192 4096 2
zeroes 12288 4096
flush
write 16384 4096 3
read 0 20480
power
read 0 20480
write 4096 4096 4 fua
write 20480 4096 5
power
read 0 24576
write 8192 4096 6
read 8192 4096
power
# an overwrite that was not flushed
read 8192 4096
write 8192 4096 7
flush
discard 8192 4096
read 8192 4096
power
# a discard that was not flushed
read 8192 4096
write 8192 4096 8
flush
power
read 0 24576
";
