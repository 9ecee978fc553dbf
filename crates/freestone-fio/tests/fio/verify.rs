//! Tests that data is read back correctly, for all devices and queue depths.

use crate::harness::WorkDir;

const RANDRW: &str = "rw=randrw bs=4k verify=crc32c verify_fatal=1";

/// Runs a random job with verification at queue depths 1 and 32.
fn both_depths(device: &str) {
    let dir = WorkDir::new();
    for depth in [1, 32] {
        let run = dir.job(device, &format!("{RANDRW} iodepth={depth}")).ok();
        // Each block is read once: by the job itself, or to verify a write.
        let written = run.sum("write", "io_bytes");
        assert!(written > 0, "{device}");
        assert_eq!(run.sum("read", "io_bytes"), (16 << 20), "{device}");
    }
}

#[test]
fn ram() {
    both_depths("r=ram,disksize=16M,mem_limit=64M");
}

#[test]
fn null_with_memory() {
    both_depths("n=null,size=16M,memory_backed=1");
}

#[test]
fn fork() {
    both_depths("r=ram,disksize=16M,mem_limit=64M s=snapshot,origin=r f=fork,base=s");
}

#[test]
fn file() {
    let dir = WorkDir::new();
    both_depths(&format!("d=file,size=16M,path={}", dir.path("disk").display()));
}

#[test]
fn delayed_completions_are_verified() {
    let dir = WorkDir::new();
    let device = "n=null,size=2M,memory_backed=1,'faults=all delay=2ms',seed=1";
    let run = dir.job(device, &format!("{RANDRW} iodepth=32")).ok();
    // The requests wait concurrently: 512 sequential ones would take a second.
    assert!(run.depth("32") > 50.0 && run.sum("write", "runtime") < 700, "{}", run.depth("32"));
    // Requests of several sizes, so that buffers are reused.
    dir.job(device, "rw=randrw bsrange=4k-64k verify=crc32c verify_fatal=1 iodepth=8").ok();
    dir.job(device, "rw=randwrite bs=4k verify=crc32c iodepth=16 iodepth_batch_complete_min=4").ok();
}

#[test]
fn partially_inline_requests_are_verified() {
    let dir = WorkDir::new();
    dir.job("r=ram,disksize=32M,mem_limit=128M", "rw=randrw bs=4m verify=crc32c verify_fatal=1 iodepth=4")
        .ok();
}

#[test]
fn trims_among_writes() {
    let dir = WorkDir::new();
    for device in ["r=ram,disksize=16M,mem_limit=64M", "n=null,size=16M,memory_backed=1,discard=1"] {
        let run = dir.job(device, "rw=randtrim bs=64k iodepth=8").ok();
        assert_eq!(run.sum("trim", "io_bytes"), 16 << 20, "{device}");
        for rw in ["trimwrite", "randtrimwrite"] {
            let run = dir.job(device, &format!("rw={rw} bs=4k iodepth=8 verify=crc32c verify_fatal=1")).ok();
            assert!(run.sum("trim", "io_bytes") > 0, "{device}");
            assert_eq!(
                run.sum("read", "io_bytes"),
                run.sum("write", "io_bytes"),
                "{device}: all was verified"
            );
        }
        // fio also trims blocks that it has written, and checks that they read as zeroes.
        let mix = "rw=randtrimwrite bs=4k iodepth=8 verify=crc32c verify_fatal=1 verify_backlog=64 \
                   trim_percentage=50 trim_backlog=32 trim_verify_zero=1";
        dir.job(device, mix).ok();
    }
}

#[test]
fn trimmed_blocks_read_as_zeroes() {
    let dir = WorkDir::new();
    let (same, job) = ("r=ram,disksize=4M,mem_limit=64M", "bs=64k\nverify=pattern\nverify_pattern=");
    let engine = crate::harness::engine();
    let text = |expected: &str| {
        format!(
            "[global]\nioengine={engine}\ndevice={same}\nstonewall\n[fill]\nrw=write\n{job}0x5a\ndo_verify=0\n\
             [trim]\nrw=trim\nbs=64k\n[look]\nrw=read\n{job}{expected}\n"
        )
    };
    dir.jobs(&text("0x00")).ok();
    let run = dir.jobs(&text("0x5a")).fails_with("verify");
    assert_eq!(run.errors()[..2], [0, 0]);
}
