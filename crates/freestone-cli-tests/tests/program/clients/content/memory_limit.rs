//! A RAM disk whose memory use reaches its `mem_limit`.

use std::fs::File;

use crate::harness::prelude::*;

#[test]
fn mem_limit_within_a_large_write_keeps_other_data() {
    const KEPT: u64 = 4 * MIB;
    let serve = Serve::start(&["ram0=ram,disksize=256M,mem_limit=16M", "ram1=ram,disksize=64M"]);
    let (ram0, ram1) = (uri(&serve, "ram0"), uri(&serve, "ram1"));
    let file = |name: &str, bytes: &[u8]| {
        fs::write(serve.path(name), bytes).unwrap();
        serve.path(name).display().to_string()
    };
    let kept = noise(1, KEPT);
    let kept_file = file("kept", &kept);
    let large_file = file("large", &noise(2, 32 * MIB));
    let write = |uri: &str, what: &str, place: &str| {
        let mut command = tool("qemu-io");
        command.args(["-f", "raw", "-c", &format!("write -s {what} {place}"), uri]);
        command
    };
    ok(&mut write(&ram0, &kept_file, "0 4M"));
    ok(&mut write(&ram0, &kept_file, "200M 4M"));

    let message = fails(&mut write(&ram0, &large_file, "64M 32M"));
    assert!(message.contains("No space left on device"), "{message}");
    assert!(stat(&serve, "ram0", "mm_stat", "mem_used_total") <= 16 * MIB);
    // `mem_used_max` also includes the page that the limit then rejected, as in the kernel's zram.
    assert!(stat(&serve, "ram0", "mm_stat", "mem_used_max") >= 16 * MIB);
    assert!(stat(&serve, "ram0", "io_stat", "failed_writes") > 0);

    // The failed write changed no data before or after its range.
    let out = serve.path("out");
    ok(tool("nbdcopy").arg(&ram0).arg(&out));
    let mut bytes = Vec::new();
    File::open(&out).unwrap().read_to_end(&mut bytes).unwrap();
    let range = |from: u64, length: u64| {
        &bytes[usize::try_from(from).unwrap()..usize::try_from(from + length).unwrap()]
    };
    assert!(range(0, KEPT) == kept);
    assert!(range(200 * MIB, KEPT) == kept);
    assert!(is_zero(range(KEPT, 60 * MIB)));
    assert!(is_zero(range(96 * MIB, 104 * MIB)));
    // Each page of the failed write has either its entire new content or its entire old content.
    let large = noise(2, 32 * MIB);
    for (number, new) in (0..).zip(large.chunks(4096)) {
        let page = range(64 * MIB + number * 4 * KIB, 4 * KIB);
        assert!(page == new || is_zero(page), "page {number} of the write is a mixture");
    }

    // The server still runs, the other device works, and memory freed by a discard is usable again.
    ok(tool("qemu-io").args(["-f", "raw", "-c", "discard 64M 32M", "-c", "write -P 3 64M 32M", &ram0]));
    ok(tool("qemu-io").args(["-f", "raw", "-c", "discard 64M 32M", &ram0]));
    ok(&mut write(&ram0, &kept_file, "64M 4M"));
    ok(&mut write(&ram1, &large_file, "0 32M"));
}
