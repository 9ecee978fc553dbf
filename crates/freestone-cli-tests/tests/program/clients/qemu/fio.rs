//! Load tests by fio: many requests in flight, with verification of the data.

use crate::harness::prelude::*;

fn fio(serve: &Serve, export: &str, args: &[&str]) -> Command {
    let mut command = tool("fio");
    command.args(["--name=job", "--ioengine=nbd", "--thread", "--group_reporting"]);
    command.arg(format!("--uri={}", uri(serve, export))).args(args);
    // fio writes state files to its working directory.
    command.current_dir(serve.dir.path());
    command
}

/// Total bytes that the jobs of a fio run read, wrote and trimmed.
#[derive(Debug, Default)]
struct Moved {
    read: u64,
    written: u64,
    trimmed: u64,
}

/// Runs fio, which must report no error. Returns the bytes moved.
#[track_caller]
fn run(command: &mut Command) -> Moved {
    let printed = ok(command.arg("--output-format=json"));
    // The NBD engine of fio prints lines to stdout before the JSON report.
    let report = &printed[printed.find("\n{").unwrap_or_else(|| panic!("no report: {printed}"))..];
    let report: Value = serde_json::from_str(report).unwrap_or_else(|e| panic!("{e}: {printed}"));
    let mut moved = Moved::default();
    for job in report["jobs"].as_array().unwrap() {
        assert_eq!(job["error"], 0, "{job}");
        let bytes = |way: &str| job[way]["io_bytes"].as_u64().unwrap_or_else(|| panic!("{job}"));
        moved.read += bytes("read");
        moved.written += bytes("write");
        moved.trimmed += bytes("trim");
    }
    moved
}

const VERIFY: [&str; 5] =
    ["--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0", "--do_verify=1", "--randrepeat=1"];
/// fio options for four jobs, each with a connection and a quarter of the 64 MiB device.
const FOUR: [&str; 4] = ["--numjobs=4", "--offset_increment=16M", "--size=16M", "--iodepth=16"];

#[test]
fn four_jobs_verify() {
    let serve = Serve::start(&["ram0=ram,disksize=64M", "ram1=ram,disksize=64M,comp_algorithm=zstd"]);
    let mix = ["--rw=randrw", "--bsrange=512-64k", "--bs_unaligned=0", "--blockalign=512"];
    let Moved { read, written, .. } = run(fio(&serve, "ram0", &VERIFY).args(FOUR).args(mix));
    // Half of the requests write, and fio reads all written data again to verify it.
    assert!(written > 16 * MIB && read > written, "{read} read, {written} written");
    let Moved { written, .. } =
        run(fio(&serve, "ram1", &VERIFY).args(FOUR).args(["--rw=randwrite", "--bs=4k"]));
    assert_eq!(written, 64 * MIB);
    assert_eq!(stat(&serve, "ram1", "mm_stat", "orig_data_size"), 64 * MIB);
    for name in ["ram0", "ram1"] {
        let io: Value = serve.json(&["stat", name])["io_stat"].clone();
        assert_eq!(
            (&io["failed_reads"], &io["failed_writes"], &io["invalid_io"]),
            (&0.into(), &0.into(), &0.into())
        );
    }
}

#[test]
fn trims_between_writes() {
    let serve = Serve::start(&["ram0=ram,disksize=64M"]);
    let Moved { trimmed, written, .. } = run(fio(&serve, "ram0", &FOUR).args(["--rw=trimwrite", "--bs=4k"]));
    assert_eq!((trimmed, written), (64 * MIB, 64 * MIB));
    assert_eq!(stat(&serve, "ram0", "mm_stat", "orig_data_size"), 64 * MIB);
    // One job trims one half of the device while the other job verifies the other half.
    let verified = ["--size=32M", "--iodepth=16", "--rw=randrw", "--bs=4k"];
    let trimmed = ["--name=trim", "--ioengine=nbd", "--thread", "--offset=32M", "--size=32M", "--loops=4"];
    let mut both = fio(&serve, "ram0", &VERIFY);
    both.args(verified).args(trimmed).args(["--rw=randtrim", "--bs=4k", "--iodepth=16"]);
    let moved = run(both.arg(format!("--uri={}", uri(&serve, "ram0"))));
    assert_eq!(moved.trimmed, 4 * 32 * MIB);
    assert!(moved.written > 8 * MIB && moved.read > moved.written, "{moved:?}");
    let left = stat(&serve, "ram0", "mm_stat", "orig_data_size");
    assert!(left <= 32 * MIB, "{left} bytes where half is trimmed");
    let moved = run(fio(&serve, "ram0", &FOUR).args(["--rw=trim", "--bs=1M"]));
    assert_eq!(moved.trimmed, 64 * MIB);
    assert_eq!(stat(&serve, "ram0", "mm_stat", "orig_data_size"), 0);
    assert_eq!(stat(&serve, "ram0", "mm_stat", "compr_data_size"), 0);
}

#[test]
fn zeroes_and_compressible_data() {
    let serve = Serve::start(&["ram0=ram,disksize=64M"]);
    run(fio(&serve, "ram0", &["--rw=write", "--bs=64k", "--zero_buffers"]).args(FOUR));
    assert_eq!(stat(&serve, "ram0", "mm_stat", "orig_data_size"), 64 * MIB);
    assert_eq!(stat(&serve, "ram0", "mm_stat", "same_pages"), 64 * MIB / 4096);
    assert_eq!(stat(&serve, "ram0", "mm_stat", "compr_data_size"), 0);

    let data = ["--refill_buffers", "--buffer_compress_percentage=60", "--buffer_compress_chunk=4k"];
    run(fio(&serve, "ram0", &["--rw=randwrite", "--bs=4k"]).args(FOUR).args(data));
    let stored = stat(&serve, "ram0", "mm_stat", "orig_data_size");
    let compressed = stat(&serve, "ram0", "mm_stat", "compr_data_size");
    assert_eq!((stored, stat(&serve, "ram0", "mm_stat", "same_pages")), (64 * MIB, 0));
    // 40 % of each page is incompressible.
    assert!((stored * 35 / 100..stored * 50 / 100).contains(&compressed), "{compressed} of {stored}");
    // fio overwrites the existing data and verifies the new data.
    run(fio(&serve, "ram0", &VERIFY).args(FOUR).args(data).args(["--rw=randrw", "--bs=8k"]));
}

#[test]
fn null_swallows_everything() {
    let serve = Serve::start(&["n0=null,size=64M"]);
    let Moved { read, written, .. } =
        run(fio(&serve, "n0", &["--rw=randrw", "--bs=64k", "--loops=4"]).args(FOUR));
    assert_eq!(read + written, 4 * 64 * MIB);
    assert!(read > 0 && written > 0);
}
