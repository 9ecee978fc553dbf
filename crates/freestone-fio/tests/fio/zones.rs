//! Tests of zoned devices with fio's `zonemode=zbd`.

use crate::harness::WorkDir;

const DRIVES: [&str; 3] = [
    "n=null,size=64M,memory_backed=1,zoned=1,zone_size=4M",
    "n=null,size=64M,memory_backed=1,zoned=1,zone_size=4M,zone_capacity=3M,zone_nr_conv=2,zone_max_open=4",
    "n=null,size=64M,memory_backed=1,zoned=1,zone_size=4M,zone_max_active=5,zone_max_open=3",
];

#[test]
fn writes_are_read_back() {
    for drive in DRIVES {
        for rw in ["write", "randwrite", "randrw"] {
            let dir = WorkDir::new();
            let options = format!("zonemode=zbd rw={rw} bs=64k iodepth=8 verify=crc32c verify_fatal=1");
            let run = dir.job(drive, &options).ok();
            assert!(run.sum("write", "io_bytes") >= 24 << 20, "{drive}: {rw}");
            assert!(run.sum("read", "io_bytes") >= run.sum("write", "io_bytes"), "{drive}: {rw}");
        }
    }
}

#[test]
fn several_jobs_write_and_reset() {
    for drive in DRIVES {
        let dir = WorkDir::new();
        // The jobs write more than the size of the device, so that fio resets zones.
        let options = "zonemode=zbd rw=randwrite bs=64k iodepth=4 numjobs=3 io_size=128m group_reporting=1";
        let run = dir.job(drive, options).ok();
        assert_eq!(run.sum("write", "io_bytes"), 3 * (128 << 20), "{drive}");
        let run = dir.job(drive, "zonemode=zbd rw=randread bs=4k io_size=8m numjobs=2").ok();
        assert!(run.errors().iter().all(|&error| error == 0), "{drive}");
    }
}

#[test]
fn delayed_zoned_writes_complete() {
    let dir = WorkDir::new();
    let drive =
        "n=null,size=16M,memory_backed=1,zoned=1,zone_size=1M,zone_max_open=4,'faults=all delay=1ms',seed=1";
    let options = "zonemode=zbd rw=randwrite bs=32k iodepth=8 numjobs=2 io_size=24m";
    let run = dir.job(drive, options).ok();
    assert_eq!(run.sum("write", "io_bytes"), 48 << 20);
}

#[test]
fn trims_reset_zones() {
    let dir = WorkDir::new();
    let device = DRIVES[0];
    let text = format!(
        "[global]\nioengine={}\ndevice={device}\nzonemode=zbd\nstonewall\n[fill]\nrw=write\nbs=1m\n[trim]\nrw=trim\n\
         bs=4m\n[again]\nrw=write\nbs=1m\n",
        crate::harness::engine()
    );
    let run = dir.jobs(&text).ok();
    assert_eq!(run.sum("trim", "io_bytes"), 64 << 20);
    assert_eq!(run.sum("write", "io_bytes"), 128 << 20);
}

#[test]
fn offline_and_read_only_zones_are_avoided() {
    let dir = WorkDir::new();
    let drive = "n=null,size=32M,memory_backed=1,zoned=1,zone_size=4M,zone_offline=4M,zone_readonly=8M";
    // Writes to normal zones succeed; writes to the read-only zone fail.
    dir.job(drive, "zonemode=zbd rw=write bs=64k offset=12m").ok();
    dir.job(drive, "zonemode=zbd rw=write bs=64k offset=8m size=4m").fails_with("error");
}

#[test]
fn fio_emulates_zones_on_conventional_device() {
    let dir = WorkDir::new();
    let run = dir.job(
        "r=ram,disksize=16M,mem_limit=64M",
        "zonemode=zbd zonesize=1m rw=randwrite bs=64k verify=crc32c",
    );
    assert_eq!(run.ok().sum("write", "io_bytes"), 16 << 20);
}

#[test]
fn zoned_device_needs_zonemode_zbd() {
    let dir = WorkDir::new();
    let run = dir.job(DRIVES[0], "rw=randwrite bs=64k").fails_with("consider --zonemode=zbd");
    assert_eq!(run.errors(), [5]);
}
