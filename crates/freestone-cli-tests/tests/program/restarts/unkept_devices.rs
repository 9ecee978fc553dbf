//! Devices without `keep=yes`, after SIGTERM or SIGKILL and a restart with the same state
//! directory.

use super::{image, is_served, serve, stat};
use crate::harness::prelude::*;

/// The two ways in which a server ends: SIGTERM and SIGKILL.
const ENDS: [fn(Serve) -> TempDir; 2] = [Serve::end, Serve::kill];

fn check_pattern(serve: &Serve, name: &str, pattern: u8) {
    qemu_io(&uri(serve, name), &[format!("read -P {pattern} 0 64k")]);
}

#[test]
fn files_and_their_zones_survive_memory_is_empty() {
    for (number, end) in ENDS.into_iter().enumerate() {
        let server = serve(
            tempfile::tempdir().unwrap(),
            &[
                "plain=file,path=plain.img,size=1M",
                "zoned=file,path=zoned.img,size=16M,zoned=1,zone_size=4M",
                "drive=null,size=16M,zoned=1,zone_size=4M,memory_backed=1,on_data_loss=empty",
                "memory=null,size=1M,memory_backed=1",
            ],
        );
        for name in ["plain", "zoned", "drive", "memory"] {
            qemu_io(&uri(&server, name), &["write -P 1 0 64k", "flush"]);
        }
        let server = serve(end(server), &[]);
        check_pattern(&server, "plain", 1);
        check_pattern(&server, "zoned", 1);
        let pointer = |name: &str| {
            let zones = server.json(&["zones", name, "report", "--count", "1"]);
            zones["zones"][0]["write_pointer"].clone()
        };
        // After SIGKILL the zone state file may be out of date. The server then sets the write
        // pointer to the end of the data.
        assert_eq!((pointer("zoned"), pointer("drive")), (Value::from(64 << 10), Value::from(0)), "{number}");
        assert!(!is_served(&server.path("nbd"), "memory"));
        server.text(&["publish", "memory"]);
        check_pattern(&server, "memory", 0);
    }
}

#[test]
fn restart_keeps_persistent_store_only() {
    for end in ENDS {
        let server = serve(image(1 << 20), &["data=file,path=golden.img"]);
        server.text(&["snapshot", "data", "kept", "cow=./kept.cow", "cow_size=4M"]);
        server.text(&["snapshot", "data", "fleeting", "cow=./fleeting.cow", "cow_size=4M", "store=N"]);
        server.text(&["snapshot", "data", "memory"]);
        qemu_io(&uri(&server, "data"), &["write -P 1 0 64k", "flush"]);
        let server = serve(end(server), &[]);
        publish(&server, "kept");
        check_pattern(&server, "data", 1);
        check_pattern(&server, "kept", 7);
        let list = server.json(&["list"]);
        let withheld = |name: &str| {
            let devices = list["devices"].as_array().unwrap();
            devices.iter().find(|device| device["name"] == name).unwrap()["withheld"] == true
        };
        assert!(withheld("fleeting") && withheld("memory") && !withheld("kept"));
    }
}

#[test]
fn unflushed_writes_survive_sigterm_but_not_sigkill() {
    for (end, after) in ENDS.into_iter().zip([2, 1]) {
        let server = serve(tempfile::tempdir().unwrap(), &["f=file,path=f.img,size=1M,power_cut=yes"]);
        qemu_io(&uri(&server, "f"), &["write -P 1 0 64k", "flush"]);
        // The second write uses a separate client, because qemu-io flushes when it ends.
        let mut client = Raw::connect(&server, "f");
        assert_eq!(client.write(0, 0, &vec![2; 64 << 10]), 0);
        let server = serve(end(server), &[]);
        check_pattern(&server, "f", after);
    }
}

#[test]
fn restart_ends_recording_evicted_pages_and_own_forks() {
    for end in ENDS {
        let server = serve(
            image(1 << 20),
            &[
                "golden=file,path=golden.img,readonly=yes",
                "taped=file,path=taped.img,size=1M,record=tape.log",
                "spills=ram,disksize=8M,mem_limit=1M,backing_dev=spill.img,backing_size=16M,on_data_loss=empty",
            ],
        );
        server.text(&["fork", "golden", "each", "--template", "--nbd", "unix:each.sock"]);
        let mut client = UnixStream::connect(server.path("each.sock")).unwrap();
        connect_nbd(&mut client, "each");
        assert!(server.text(&["list"]).contains("\neach@1 "));
        qemu_io(&uri(&server, "taped"), &["write -P 1 0 64k", "flush"]);
        qemu_io(&uri(&server, "spills"), &["write -P 3 0 4M"]);
        let dir = end(server);
        let log = fs::metadata(dir.path().join("tape.log")).unwrap().len();
        let server = serve(dir, &[]);
        check_pattern(&server, "taped", 1);
        check_pattern(&server, "spills", 0);
        assert!(log > 64 << 10 && fs::metadata(server.path("tape.log")).unwrap().len() == log);
        assert!(is_served(&server.path("each.sock"), "each"));
        assert!(!server.text(&["list"]).contains("each@1"));
    }
}

#[test]
fn forks_of_bases_that_grew_are_created_again() {
    for end in ENDS {
        let server =
            serve(image(1 << 20), &["golden=file,path=golden.img,readonly=yes", "disk=ram,disksize=1M"]);
        server.text(&["snapshot", "disk", "early"]);
        for (base, fork, template) in
            [("golden", "of-file", "each-of-file"), ("early", "of-disk", "each-of-disk")]
        {
            server.text(&["fork", base, fork, "size=1028K"]);
            server.text(&["fork", base, template, "--template", "size=1028K"]);
        }
        server.text(&["set", "disk", "disksize=2M"]);
        let dir = end(server);
        fs::write(dir.path().join("golden.img"), vec![7; (2 << 20) + 512]).unwrap();
        let server = serve(dir, &[]);
        for (fork, size) in [("of-file", (2 << 20) + 1024), ("of-disk", 2 << 20)] {
            assert_eq!(stat(&server, fork, "disksize"), size, "{fork}");
            assert_eq!(stat(&server, &format!("each-{fork}"), "disksize"), size, "each-{fork}");
        }
    }
}

#[test]
fn shutdown_verb_waits_for_the_end() {
    let server = serve(tempfile::tempdir().unwrap(), &["f=file,path=f.img,size=1M,power_cut=yes"]);
    let mut client = Raw::connect(&server, "f");
    assert_eq!(client.write(0, 0, &vec![2; 64 << 10]), 0);
    server.text(&["shutdown"]);
    assert!(!server.path("control").exists() && !server.path("nbd").exists());
    let (code, dir) = server.wait();
    assert_eq!(code, Some(0));
    check_pattern(&serve(dir, &[]), "f", 2);
}
