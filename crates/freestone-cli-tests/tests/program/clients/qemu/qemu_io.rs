//! qemu-io: verified patterns, unaligned requests and overlapping requests.

use crate::harness::prelude::*;

fn qemu_io(uri: &str, commands: &[&str]) -> Command {
    let mut command = tool("qemu-io");
    command.args(["-f", "raw"]);
    for line in commands {
        command.args(["-c", line]);
    }
    command.arg(uri);
    command
}

/// Runs commands in one qemu-io session. Fails if a command fails or a read does not match its
/// pattern.
#[track_caller]
fn all(uri: &str, commands: &[&str]) {
    let output = ok(&mut qemu_io(uri, commands));
    assert!(!output.contains("failed"), "{output}");
}

#[test]
fn patterns_are_read_back() {
    let serve = Serve::start(&["ram0=ram,disksize=128M", "ram1=ram,disksize=128M,comp_algorithm=zstd"]);
    for name in ["ram0", "ram1"] {
        let uri = uri(&serve, name);
        all(
            &uri,
            &[
                "read -P 0 0 32M",
                "write -P 0xab 0 8M",
                "write -P 0xcd 4M 1M",
                "read -P 0xab 0 4M",
                "read -P 0xcd 4M 1M",
                "read -P 0xab 5M 3M",
                "write -z 1M 64k",
                "read -P 0 1M 64k",
                "read -P 0xab 1088k 64k",
                "discard 2M 1M",
                "read -P 0 2M 1M",
                "flush",
                "write -f -P 0x11 127M 1M",
                "read -P 0x11 127M 1M",
                "writev -P 0x22 64M 4k 8k 512 1k",
                "readv -P 0x22 64M 512 1k 4k 8k",
            ],
        );
        // A read with a wrong pattern fails, so the checks of the session before are effective.
        let message = fails(&mut qemu_io(&uri, &["read -P 0xab 4M 1M"]));
        assert!(message.contains("Pattern verification failed"), "{message}");
        // The disk stores 8 MiB less 1 MiB that was discarded, plus 1 MiB at the end and four
        // pages.
        let pages = (8 << 20) - (1 << 20) + (1 << 20) + (16 << 10);
        assert_eq!(stat(&serve, name, "mm_stat", "orig_data_size"), pages);
    }
}

#[test]
fn requests_smaller_than_a_page() {
    let serve = Serve::start(&["ram0=ram,disksize=16M"]);
    let uri = uri(&serve, "ram0");
    all(
        &uri,
        &[
            "write -P 0x55 0 64k",
            "write -P 0x66 512 512",
            "write -P 0x77 3584 1024",
            "write -z 8704 512",
            "discard 16896 512",
            "read -P 0x55 0 512",
            "read -P 0x66 512 512",
            "read -P 0x55 1024 2560",
            "read -P 0x77 3584 1024",
            "read -P 0x55 4608 4096",
            "read -P 0 8704 512",
            "read -P 0x55 9216 7168",
            // A partial write into a page that was never written; the rest of the page reads as
            // zeroes.
            "write -P 0x88 1049088 512",
            "read -P 0 1048576 512",
            "read -P 0x88 1049088 512",
            "read -P 0 1049600 3072",
        ],
    );
    // The discarded parts of a page read as zeroes or as before: NBD does not promise more. The
    // other data of the pages stays.
    all(&uri, &["read -P 0x55 16384 512", "read -P 0x55 17408 4096"]);
}

#[test]
fn overlapping_requests() {
    let serve = Serve::start(&["ram0=ram,disksize=64M"]);
    let uri = uri(&serve, "ram0");
    // Overlapping writes are in flight at the same time. After a barrier, later writes are in
    // order.
    let mut commands: Vec<String> = Vec::new();
    for round in 0..24 {
        commands.push(format!("aio_write -q -P {} {}k 192k", round + 1, round * 64));
        commands.push(format!("aio_write -q -P 0xee {}M 1M", 8 + round));
        commands.push(format!("aio_read -q {}k 256k", round * 32));
    }
    commands.push("aio_flush".to_owned());
    for round in 0..24 {
        commands.push(format!("read -q -P 0xee {}M 1M", 8 + round));
    }
    commands.push("write -P 0x99 0 2M".to_owned());
    commands.push("read -P 0x99 0 2M".to_owned());
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    all(&uri, &commands);
}

#[test]
fn requests_beyond_the_end_fail() {
    let serve = Serve::start(&["ram0=ram,disksize=1M"]);
    let uri = uri(&serve, "ram0");
    fails(&mut qemu_io(&uri, &["write -P 1 1M 4k"]));
    fails(&mut qemu_io(&uri, &["read 1020k 8k"]));
    all(&uri, &["write -P 1 1020k 4k", "read -P 1 1020k 4k"]);
}
