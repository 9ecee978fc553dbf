//! qemu-img: `convert` in both directions, `compare` and `map`.

use crate::harness::prelude::*;
use crate::harness::tree::{check, ext4_image};

#[test]
fn convert_and_compare() {
    let dir = tempfile::tempdir().unwrap();
    let image = ext4_image(dir.path(), 12 * MIB, 80 * MIB);
    let (qcow, raw) = (dir.path().join("qcow2"), dir.path().join("raw"));
    let serve = Serve::start(&["ram0=ram,disksize=80M", "ram1=ram,disksize=80M,comp_algorithm=zstd"]);
    let (ram0, ram1) = (uri(&serve, "ram0"), uri(&serve, "ram1"));

    ok(tool("qemu-img").args(["convert", "-n", "-f", "raw", "-O", "raw"]).arg(&image).arg(&ram0));
    assert!(stat(&serve, "ram0", "mm_stat", "orig_data_size") <= allocated(&image));
    ok(tool("qemu-img").args(["compare", "-f", "raw", "-F", "raw"]).arg(&image).arg(&ram0));

    // `-W` writes out of order, with sixteen requests in flight.
    let wild = ["convert", "-n", "-W", "-m", "16", "-f", "raw", "-O", "raw"];
    ok(tool("qemu-img").args(wild).args([&ram0, &ram1]));
    ok(tool("qemu-img").args(["compare", "-s", "-f", "raw", "-F", "raw", &ram0, &ram1]));

    // The content is converted to qcow2 and back.
    ok(tool("qemu-img").args(["convert", "-W", "-m", "8", "-f", "raw", "-O", "qcow2", &ram1]).arg(&qcow));
    ok(tool("qemu-img").args(["compare", "-f", "raw", "-F", "qcow2", &ram0]).arg(&qcow));
    ok(tool("qemu-img").args(["convert", "-f", "qcow2", "-O", "raw"]).arg(&qcow).arg(&raw));
    assert_eq!(sha256(&raw), sha256(&image));
    ok(tool("qemu-img").args(["convert", "-f", "raw", "-O", "raw", &ram0]).arg(&raw));
    assert_eq!(sha256(&raw), sha256(&image));
    check(&raw);

    // `compare` finds a difference at its offset.
    ok(tool("qemu-io").args(["-f", "raw", "-c", "write -P 1 70M 512", &ram1]));
    ok(tool("qemu-io").args(["-f", "raw", "-c", "write -P 2 70M 512", &ram0]));
    let message = fails(tool("qemu-img").args(["compare", "-f", "raw", "-F", "raw", &ram0, &ram1]));
    assert!(message.contains(&format!("offset {}", 70 * MIB)), "{message}");
}

#[test]
fn map_agrees_with_what_was_written() {
    let serve = Serve::start(&["ram0=ram,disksize=64M"]);
    let uri = uri(&serve, "ram0");
    // Zeroes that may become a hole (`-u`), and zeroes that must stay allocated.
    let writes = ["write -P 9 1M 128k", "write -P 9 32M 4k", "write -z -u 1088k 4k", "write -z 1096k 4k"];
    let writes = writes.iter().flat_map(|write| ["-c", write]);
    ok(tool("qemu-io").args(["-d", "unmap", "-f", "raw"]).args(writes).arg(&uri));
    let map = json(tool("qemu-img").args(["map", "--output=json", "-f", "raw", &uri]));
    let extents: Vec<(u64, u64, bool, bool)> = map
        .as_array()
        .unwrap()
        .iter()
        .map(|e: &Value| {
            let number = |key: &str| e[key].as_u64().unwrap();
            let flag = |key: &str| e[key].as_bool().unwrap();
            (number("start"), number("length"), flag("data"), flag("zero"))
        })
        .collect();
    let expected = [
        (0, MIB, false, true),
        (MIB, 64 * KIB, true, false),
        (1088 * KIB, 4 * KIB, false, true),
        (1092 * KIB, 4 * KIB, true, false),
        (1096 * KIB, 4 * KIB, true, true),
        (1100 * KIB, 52 * KIB, true, false),
        (1152 * KIB, 32 * MIB - 1152 * KIB, false, true),
        (32 * MIB, 4 * KIB, true, false),
        (32 * MIB + 4 * KIB, 32 * MIB - 4 * KIB, false, true),
    ];
    assert_eq!(extents, expected);
}

/// A single log line names the damaged file of the backing chain, and the damage.
#[test]
fn damage_of_an_image_is_logged_with_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("raw"), vec![7; 1 << 20]).unwrap();
    ok(tool("qemu-img").args(["convert", "-f", "raw", "-O", "qcow2", "raw", "base.qcow2"]).current_dir(at));
    let over = ["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2"];
    ok(tool("qemu-img").args(over).current_dir(at));
    let base = fs::File::options().write(true).open(at.join("base.qcow2")).unwrap();
    base.set_len(base.metadata().unwrap().len() - 512 * KIB).unwrap();
    let serve = Serve::logged_in(dir, &["q=qcow2,path=top.qcow2", "--nbd=unix:nbd", "--control", "control"]);
    let mut client = Raw::connect(&serve, "q");
    assert_eq!(client.read(0, 512).unwrap(), [7; 512]);
    for page in 0..8 {
        client.read(MIB - 4096 * (page + 1), 4096).unwrap_err();
    }
    let log = serve.log_with("the image is damaged: ");
    let lines: Vec<_> = log.lines().filter(|line| line.contains("the image is damaged: ")).collect();
    assert_eq!(lines.len(), 1, "{log}");
    let names = format!("file={}", serve.path("base.qcow2").display());
    let what = "lies in the header or beyond the end of the file";
    assert!(lines[0].contains(&names) && lines[0].contains(what), "{log}");
}
