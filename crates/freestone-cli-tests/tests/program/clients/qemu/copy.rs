//! Copies of whole images to exports and back by nbdcopy.

use crate::harness::prelude::*;
use crate::harness::tree::{check, ext4_image};

/// Allocated bytes that file systems and block sizes may add to a sparse copy.
const SLACK_BYTES: u64 = 4 * MIB;

/// Checks that `copy` equals the image `original`: same content, a sound file system, and the holes
/// kept.
#[track_caller]
fn same_image(original: &Path, copy: &Path) {
    assert_eq!(sha256(original), sha256(copy));
    check(copy);
    let (before, after) = (allocated(original), allocated(copy));
    assert!(after <= before + SLACK_BYTES, "{before} bytes grew to {after}");
}

#[test]
fn file_system_image_is_copied_in_and_out() {
    const SIZE: u64 = 96 * MIB;
    let dir = tempfile::tempdir().unwrap();
    let image = ext4_image(dir.path(), 32 * MIB, SIZE);
    let sparse = allocated(&image);
    assert!(sparse < SIZE / 2 + 16 * MIB && sparse > 24 * MIB, "not the image this test is about: {sparse}");
    let out = dir.path().join("out");
    let args = [
        "ram0=ram,disksize=96M",
        "ram1=ram,disksize=96M,comp_algorithm=zstd",
        "ram2=ram,disksize=96M,comp_algorithm=store",
        "--nbd",
        "tcp:127.0.0.1:0",
        "--nbd",
        "unix:nbd",
        "--control",
        "control",
    ];
    let serve = Serve::start_in(tempfile::tempdir().unwrap(), &args, false);
    let server = serve.json(&["stat"])["server"].clone();
    let tcp = server["addresses"].as_array().unwrap().iter().find_map(|a| a.as_str()?.strip_prefix("tcp:"));
    let tcp = |export: &str| format!("nbd://{}/{export}", tcp.unwrap());

    // nbdcopy with a single connection and one request at a time.
    ok(tool("nbdcopy").args(["--connections=1", "--synchronous"]).arg(&image).arg(uri(&serve, "ram0")));
    let stored = stat(&serve, "ram0", "mm_stat", "orig_data_size");
    assert!(stored <= sparse, "holes are stored: {stored} bytes of {sparse}");
    assert!(stored > sparse / 2, "{stored} bytes cannot be all of {sparse}");
    let compressed = stat(&serve, "ram0", "mm_stat", "compr_data_size");
    assert!(compressed < stored, "{compressed} of {stored}");
    ok(tool("nbdcopy").args(["--connections=1", "--synchronous"]).arg(uri(&serve, "ram0")).arg(&out));
    same_image(&image, &out);
    fs::remove_file(&out).unwrap();

    // nbdcopy with several connections: from one export to the other over TCP, then to a file.
    let several = ["--connections=4", "--threads=2", "--requests=32"];
    ok(tool("nbdcopy").args(several).arg(uri(&serve, "ram0")).arg(tcp("ram1")));
    assert!(stat(&serve, "ram1", "mm_stat", "orig_data_size") <= sparse);
    ok(tool("nbdcopy").args(several).arg("--flush").arg(tcp("ram1")).arg(&out));
    same_image(&image, &out);
    fs::remove_file(&out).unwrap();

    // nbdcopy over existing data must write zeroes into the holes of the image.
    ok(tool("qemu-io").args(["-f", "raw", "-c", "write -P 170 0 96M"]).arg(tcp("ram2")));
    ok(tool("nbdcopy").args(several).arg(&image).arg(tcp("ram2")));
    assert!(stat(&serve, "ram2", "mm_stat", "orig_data_size") <= sparse);
    ok(tool("nbdcopy").args(several).arg(uri(&serve, "ram2")).arg(&out));
    same_image(&image, &out);
}

#[test]
fn image_file_keeps_its_holes() {
    let dir = tempfile::tempdir().unwrap();
    let image = ext4_image(dir.path(), 16 * MIB, 64 * MIB);
    let (target, out) = (dir.path().join("target"), dir.path().join("out"));
    let devices = [
        format!("golden=file,path={},readonly=1", image.display()),
        format!("copy=file,path={},size=64M", target.display()),
    ];
    let serve = Serve::start(&devices);
    ok(tool("nbdcopy").arg("--connections=2").arg(uri(&serve, "golden")).arg(uri(&serve, "copy")));
    ok(tool("nbdcopy").arg(uri(&serve, "copy")).arg(&out));
    same_image(&image, &out);
    // After the server has ended, the file under the exported file device has all data.
    serve.signal(rustix::process::Signal::TERM);
    assert_eq!(serve.wait().0, Some(0));
    same_image(&image, &target);
    assert_eq!(sha256(&image), sha256(&target));
}
