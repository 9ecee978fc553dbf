//! Tests that errors are reported, and fail the fio run.

use crate::harness::WorkDir;

const EIO: i64 = 5;
const ENOSPC: i64 = 28;
const EILSEQ: i64 = 84;
const ETIMEDOUT: i64 = 110;

#[test]
fn invalid_device_spec_gives_cli_error() {
    let dir = WorkDir::new();
    for (device, sentence) in [
        ("n=nul,size=1M", "freestone: n: unknown kind \"nul\"; null?; the kinds are ram,"),
        ("n=null,size=1", "freestone: n: size=1: "),
        ("f=fork,base=b", "freestone: f: base=b: there is no such device (yet)"),
        ("f=file,path=/nowhere/at/all", "freestone: f: /nowhere/at/all"),
        ("'n=null,size=1M", "a quote is not closed"),
    ] {
        let run = dir.job(device, "rw=read").fails_with(sentence);
        assert_eq!(run.sum("read", "io_bytes"), 0);
    }
}

#[test]
fn unsupported_options_are_refused() {
    let dir = WorkDir::new();
    let plain = "n=null,size=1M";
    for (device, options, sentence) in [
        (plain, "rw=read filename=x", "freestone: filename=x is not supported"),
        (plain, "rw=read nrfiles=2", "freestone: nrfiles=2: a device is one file"),
        (plain, "rw=read bs=256", "freestone: bs=256: the device has blocks of 4096 bytes"),
        ("n=null,size=1M,readonly=1", "rw=randrw", "freestone: the device is read-only"),
    ] {
        dir.job(device, options).fails_with(sentence);
    }
    dir.job("n=null,size=1M,readonly=1", "rw=read").ok();
    // fio refuses offloaded submission: the engine sets FIO_NO_OFFLOAD, because that mode can hang.
    dir.job(plain, "rw=read io_submit_mode=offload").fails_with("can't be used with offloaded submit");
    let engine = crate::harness::engine();
    dir.jobs(&format!("[job]\nioengine={engine}\nrw=read\n")).fails_with("freestone: device is missing");
}

#[test]
fn device_errors_fail_the_job() {
    let dir = WorkDir::new();
    for (faults, options, errno) in [
        ("read error=EIO after=10", "rw=read iodepth=1", EIO),
        ("write error=ENOSPC after=10", "rw=randwrite iodepth=8", ENOSPC),
        ("discard error=EIO", "rw=trim iodepth=4", EIO),
        // fio's flushes reach the device, where they fail.
        ("flush error=EIO", "rw=write fsync=4", EIO),
        ("flush error=EIO", "rw=write fdatasync=4", EIO),
    ] {
        let device = format!("n=null,size=1M,memory_backed=1,discard=1,'faults={faults}',seed=1");
        let run = dir.job(&device, &format!("{options} bs=4k")).fails_with("error");
        assert_eq!(run.errors(), [errno], "{faults}");
    }
    // The device returns errors late: after 20 writes, and with a delay.
    let device = "n=null,size=1M,memory_backed=1,'faults=write error=EIO delay=2ms after=20',seed=1";
    let run = dir.job(device, "rw=randwrite bs=4k iodepth=8").fails_with("error");
    assert_eq!(run.errors(), [EIO]);
    // With continue_on_error, the job continues after errors.
    let run = dir.job(device, "rw=randwrite bs=4k iodepth=8 continue_on_error=all");
    assert!(run.sum("write", "total_ios") > 200);
}

#[test]
fn verify_finds_corruption() {
    let dir = WorkDir::new();
    for (faults, depth) in [("read rot times=1", 1), ("write lost times=1", 16)] {
        let device = format!("r=ram,disksize=4M,mem_limit=64M,'faults={faults}',seed=1");
        let options = format!("rw=write bs=4k verify=crc32c verify_fatal=1 iodepth={depth}");
        let run = dir.job(&device, &options).fails_with("verify");
        assert_eq!(run.errors(), [EILSEQ], "{faults}");
    }
}

#[test]
fn hanging_requests_do_not_block_job_end() {
    let dir = WorkDir::new();
    let device = "n=null,size=1M,memory_backed=1,'faults=read hang after=50',seed=1";
    let run = dir.job(device, "rw=randread bs=4k iodepth=4 time_based=1 runtime=1");
    let run = run.fails_with("error");
    assert_eq!(run.errors(), [ETIMEDOUT]);
}

#[test]
fn random_fault_seed_is_printed() {
    let dir = WorkDir::new();
    let run = dir.job("n=null,size=1M,'faults=read error=EIO'", "rw=read");
    run.fails_with("freestone: n: faults with seed=");
}
