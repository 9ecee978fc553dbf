//! Sizes, offsets and lengths that are not multiples of a block, from clients that send such requests.

use std::os::unix::fs::FileExt as _;

use crate::harness::prelude::*;

fn mount(serve: &Serve, name: &str) -> Fuse {
    Fuse::start(tool, serve, name, serve.path(&format!("fuse-{name}")))
}

#[test]
fn unaligned_bytes_through_nbdfuse() {
    let serve = Serve::start(&[
        "ram0=ram,disksize=64M",
        "f=file,path=f.img,size=64M",
        "b=null,size=1G,blocksize=4096",
    ]);
    let data = noise(5, 3_000_000);
    fs::write(serve.path("data"), &data).unwrap();
    let from = serve.path("data").display().to_string();
    for name in ["ram0", "f"] {
        let fuse = mount(&serve, name);
        let disk = fuse.file().display().to_string();
        // dd writes 1000 bytes at a time. Another write neither starts nor ends at a block boundary.
        ok(tool("dd").args([
            "bs=1000",
            "conv=notrunc",
            "status=none",
            &format!("if={from}"),
            &format!("of={disk}"),
        ]));
        ok(tool("dd")
            .args(["bs=2M", "seek=4000001", "oflag=seek_bytes", "count=1", "conv=notrunc,fsync"])
            .args(["status=none", &format!("if={from}"), &format!("of={disk}")]));
        let file = fs::File::open(&disk).unwrap();
        let mut found = vec![0; data.len()];
        file.read_exact_at(&mut found, 0).unwrap();
        assert!(found == data, "{name}");
        found.truncate(2 << 20);
        file.read_exact_at(&mut found, 4_000_001).unwrap();
        assert!(found == data[..2 << 20], "{name}");
    }
    let fuse = mount(&serve, "b");
    let disk = fuse.file().display().to_string();
    ok(tool("dd").args([
        "bs=1000",
        "count=9",
        "conv=notrunc",
        "status=none",
        &format!("if={from}"),
        &format!("of={disk}"),
    ]));
}

/// A raw image of 1000 bytes, exported under a name with slashes. Writes may extend to the end of the file.
#[test]
fn files_that_end_within_a_block() {
    let dir = tempfile::tempdir().unwrap();
    let old = noise(7, 1000);
    fs::write(dir.path().join("odd.img"), &old).unwrap();
    fs::write(dir.path().join("empty.img"), b"").unwrap();
    let devices = ["images/odd=file,path=odd.img", "empty=file,path=empty.img", "none=null,size=0"];
    let serve = Serve::start_in(dir, &devices, true);
    for (name, size) in [("images/odd", 1000), ("empty", 0), ("none", 0)] {
        let reply = json(tool("nbdinfo").arg("--json").arg(uri(&serve, name)));
        assert_eq!(reply["exports"][0]["export-size"], size, "{name}");
        assert_eq!(reply["exports"][0]["block_size_minimum"], 1, "{name}");
        assert_eq!(serve.json(&["get", name, "size"])["size"], size, "{name}");
    }
    let (odd, out) = (uri(&serve, "images/odd"), serve.path("out"));
    assert!(odd.contains("///images/odd?"), "{odd}");
    ok(tool("nbdcopy").arg(&odd).arg(&out));
    assert!(fs::read(&out).unwrap() == old);

    let mut wanted = noise(8, 1000);
    fs::write(&out, &wanted).unwrap();
    ok(tool("nbdcopy").args(["--flush"]).arg(&out).arg(&odd));
    qemu_io(&odd, &["write -P 9 700 300", "write -z 600 30", "flush"]);
    wanted[700..].fill(9);
    wanted[600..630].fill(0);
    assert!(fs::read(serve.path("odd.img")).unwrap() == wanted);
    fails(tool("qemu-io").args(["-f", "raw", "-c", "write 700 301", &odd]));

    // The size of a fork is rounded up to whole sectors.
    drop(serve);
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("odd.img"), &wanted).unwrap();
    let serve = Serve::start_in(dir, &["g=file,path=odd.img,readonly=yes", "k=fork,base=g"], true);
    ok(tool("nbdcopy").arg(uri(&serve, "k")).arg(serve.path("out")));
    wanted.resize(1024, 0);
    assert!(fs::read(serve.path("out")).unwrap() == wanted);

    fs::write(serve.path("odd2.img"), [1; 1000]).unwrap();
    let message = refused(serve.dir.path(), 1, &["serve", "d=file,path=odd2.img,direct=on"]);
    assert!(message.contains("is not a multiple of its"), "{message}");
}

/// Requests of the largest size that these clients send, also at unaligned offsets. (Tests of the NBD server crate send
/// 64 MiB at once.)
#[test]
fn large_requests() {
    let serve = Serve::start(&["ram0=ram,disksize=256M"]);
    let reply = json(tool("nbdinfo").arg("--json").arg(uri(&serve, "ram0")));
    assert_eq!(reply["exports"][0]["block_size_maximum"], 64 * MIB);
    let data = noise(3, 64 * MIB);
    fs::write(serve.path("data"), &data).unwrap();
    let requests = ["--requests=2", "--request-size=33554432", "--connections=1"];
    let ram0 = uri(&serve, "ram0");
    ok(tool("nbdcopy").args(requests).arg(serve.path("data")).arg(&ram0));
    let lines = ["write -P 4 100000001 33554431", "read -P 4 100000001 33554431", "read -P 0 100000000 1"];
    qemu_io(&ram0, &lines);
    ok(tool("nbdcopy").args(requests).arg(&ram0).arg(serve.path("out")));
    assert!(fs::read(serve.path("out")).unwrap()[..64 << 20] == data);
}

#[test]
fn read_only_ram_disk_refuses_writes() {
    let serve = Serve::start(&["ram0=ram,disksize=4M", "blank=ram,disksize=4M,readonly=yes"]);
    qemu_io(&uri(&serve, "ram0"), &["write -P 5 1M 1M"]);
    serve.text(&["save", "ram0", "saved"]);
    serve.text(&["restore", "saved", "golden/one", "readonly=yes"]);
    let nbd = format!("unix:{}", serve.path("nbd").display());
    serve.text(&["publish", "golden/one", "--nbd", &nbd]);
    for (name, filled) in [("golden/one", 5), ("blank", 0)] {
        let reply = json(tool("nbdinfo").arg("--json").arg(uri(&serve, name)));
        assert_eq!(reply["exports"][0]["is_read_only"], true, "{name}");
        assert_eq!(serve.json(&["get", name, "readonly"])["readonly"], true, "{name}");
        qemu_io(&uri(&serve, name), &[format!("read -P {filled} 1M 1M")]);
        let message = fails(tool("qemu-io").args(["-f", "raw", "-c", "write 0 4k", &uri(&serve, name)]));
        assert!(message.contains("read-only") || message.contains("Permission denied"), "{message}");
    }
    assert_eq!(serve.json(&["get", "ram0", "readonly"])["readonly"], false);
}
