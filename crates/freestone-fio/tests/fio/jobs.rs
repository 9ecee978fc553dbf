//! Tests that jobs of one run share a device if their device specifications are the same.

use freestone::power::log::Reader;

use crate::harness::{WorkDir, engine};

/// Returns a fio configuration with two jobs: the second job verifies data that the first job has written.
fn pair(first: &str, second: &str, more: &str) -> String {
    format!(
        "[global]\nioengine={}\nbs=64k\nverify=pattern\nverify_pattern=0xa5\n{more}\n[fill]\ndevice={first}\n\
         rw=write\ndo_verify=0\n[look]\nstonewall\ndevice={second}\nrw=read\n",
        engine()
    )
}

#[test]
fn jobs_with_same_spec_share_device() {
    let dir = WorkDir::new();
    let (a, b) = ("r=ram,disksize=4M,mem_limit=64M", "r=ram,disksize=4M,mem_limit=65M");
    dir.jobs(&pair(a, a, "")).ok();
    // With set-up in the job threads, the jobs run one after the other, and the device outlives the first
    // job.
    dir.jobs(&pair(a, a, "create_serialize=0\nthread=1")).ok();
    let run = dir.jobs(&pair(a, b, "")).fails_with("verify");
    assert_eq!(run.errors()[0], 0);
}

#[test]
fn concurrent_jobs_share_device() {
    let dir = WorkDir::new();
    let options =
        "rw=randrw bs=4k size=4m offset_increment=4m numjobs=4 iodepth=8 verify=crc32c verify_fatal=1";
    for device in [
        "r=ram,disksize=16M,mem_limit=64M",
        "n=null,size=16M,memory_backed=1,'faults=all delay=100us',seed=1",
    ] {
        let run = dir.job(device, options).ok();
        assert_eq!(run.errors().len(), 4);
        assert_eq!(run.sum("read", "io_bytes"), 16 << 20, "{device}");
    }
}

#[test]
fn unserialized_setup_needs_threads() {
    let dir = WorkDir::new();
    let run = dir.job("r=ram,disksize=4M", "rw=read create_serialize=0");
    run.fails_with("freestone: create_serialize=0 needs thread=1");
}

#[test]
fn file_is_complete_after_run() {
    let dir = WorkDir::new();
    let path = dir.path("disk").display().to_string();
    let device = format!("d=file,path={path},size=16M,zoned=1,zone_size=4M");
    let written = "zonemode=zbd bs=64k verify=pattern verify_pattern=0x77";
    dir.job(&device, &format!("rw=write do_verify=0 {written}")).ok();
    // The file contains the written data, and its zones are recorded as full.
    assert!(std::fs::read(&path).unwrap().iter().all(|&byte| byte == 0x77));
    let run = dir.job(&device, &format!("rw=read {written}")).ok();
    assert_eq!(run.sum("read", "io_bytes"), 16 << 20);
}

#[test]
fn sync_writes_and_flushes_reach_device() {
    let dir = WorkDir::new();
    // fio sends no flush after the last write.
    for (options, fua, flushes) in [
        ("sync=1", 16, 0),
        ("sync=0", 0, 0),
        ("fsync=4", 0, 3),
        ("fdatasync=8", 0, 1),
        ("sync=1 iodepth=8", 16, 0),
    ] {
        let log = dir.path("log");
        let device = format!("n=null,size=64K,memory_backed=1,record={}", log.display());
        dir.job(&device, &format!("rw=write bs=4k {options}")).ok();
        // The log is complete, because the device was closed at the end of the run.
        let mut reader = Reader::open(&log).unwrap();
        let mut found = (0, 0, 0);
        while let Some(entry) = reader.next_entry().unwrap() {
            found.0 += u64::from(entry.len != 0);
            found.1 += u64::from(entry.is_fua());
            found.2 += u64::from(entry.is_flush());
        }
        // The device issues one more flush when it is closed.
        assert_eq!(found, (16, fua, flushes + 1), "{options}");
        std::fs::remove_file(&log).unwrap();
    }
}
