//! Zoned devices: the verb `zones`, writes at the write pointer and elsewhere, and restarts.

use std::os::unix::fs::FileExt as _;

use crate::harness::prelude::*;

fn lines(serve: &Serve, args: &[&str]) -> Vec<String> {
    serve.text(&[&["zones"], args].concat()).lines().map(str::to_owned).collect()
}

/// Returns the condition and the write pointer (in sectors) of the zone at the byte offset `at`.
#[track_caller]
fn zone(serve: &Serve, name: &str, at: u64) -> (String, u64) {
    let report = serve.json(&["zones", name]);
    let zones = report["zones"].as_array().unwrap();
    let zone = zones.iter().find(|zone| zone["start"] == at).unwrap();
    let pointer = zone["write_pointer"].as_u64().unwrap() - at;
    (zone["condition"].as_str().unwrap().to_owned(), pointer)
}

#[test]
fn zones_verb_equals_blkzone() {
    let serve = Serve::start(&["n=null,size=10M,zoned=1,zone_size=4M,zone_nr_conv=1,blocksize=512"]);
    assert_eq!(
        lines(&serve, &["n"]),
        [
            "  start: 0x000000000, len 0x002000, cap 0x002000, wptr 0x000000 reset:0 non-seq:0, zcond: 0(nw) [type: 1(CONVENTIONAL)]",
            "  start: 0x000002000, len 0x002000, cap 0x002000, wptr 0x000000 reset:0 non-seq:0, zcond: 1(em) [type: 2(SEQ_WRITE_REQUIRED)]",
            "  start: 0x000004000, len 0x001000, cap 0x001000, wptr 0x000000 reset:0 non-seq:0, zcond: 1(em) [type: 2(SEQ_WRITE_REQUIRED)]",
        ]
    );
    assert_eq!(
        lines(&serve, &["n", "report", "--offset", "5M", "--count", "1"]),
        lines(&serve, &["n"])[1..2]
    );
    assert_eq!(serve.text(&["zones", "n", "open", "--offset", "4M", "--count", "1"]), "n: 1 zone opened\n");
    assert_eq!(zone(&serve, "n", 4 * MIB), ("EXP_OPEN".into(), 0));
    // An open zone without written data becomes empty when it is closed.
    serve.text(&["zones", "n", "close", "--offset", "4M", "--count", "1"]);
    assert_eq!(zone(&serve, "n", 4 * MIB).0, "EMPTY");
    assert_eq!(serve.text(&["zones", "n", "finish", "--offset", "4M"]), "n: 2 zones finished\n");
    assert_eq!(zone(&serve, "n", 8 * MIB), ("FULL".into(), 2 * MIB));
    assert_eq!(serve.text(&["zones", "n", "reset"]), "n: 3 zones reset\n");
    assert_eq!(
        (zone(&serve, "n", 4 * MIB).0, zone(&serve, "n", 8 * MIB).0),
        ("EMPTY".into(), "EMPTY".into())
    );

    let first = serve.refused(1, &["zones", "n", "open"]);
    assert_eq!(first, "n: the zone at 0 is not opened: the zone's condition forbids it");
    let behind = serve.refused(2, &["zones", "n", "reset", "--offset", "10M"]);
    assert_eq!(behind, "n: zones: offset=10M: behind the end of the device");
    let few = serve.refused(2, &["zones", "n", "reset", "--offset", "8M", "--count", "2"]);
    assert_eq!(few, "n: zones: count=2: from 8M on there are 1 zones");
    let (code, _, err) = finish(freestone(serve.dir.path()).args(["zones", "n", "--offset", "8192"]));
    assert_eq!(code, 2);
    assert!(err.contains("give a unit; 4M, if these are sectors?"), "{err}");
    let counts = serve.json(&["stat", "n"])["zones"].clone();
    assert_eq!(
        (&counts["conventional"], &counts["empty"], &counts["finishes"]),
        (&json!(1), &json!(2), &json!(2))
    );
    assert!(serve.text(&["list"]).contains("null zoned"));
}

#[test]
fn zone_limits_return_the_kernels_errors() {
    let serve = Serve::start(&[
        "open=null,size=16M,zoned=1,zone_size=1M,zone_max_open=2",
        "active=ram,disksize=16M,zoned=1,zone_size=1M,zone_max_active=2",
    ]);
    let control = serve.control();
    let open = |name: &str, at: u64| {
        let params = json!({ "name": name, "action": "open", "offset": at, "count": 1 });
        let line = json!({ "jsonrpc": "2.0", "id": 1, "method": "zones", "params": params }).to_string();
        ask(&control, line.as_bytes())
    };
    for (name, errno) in [("open", "ETOOMANYREFS"), ("active", "EOVERFLOW")] {
        assert!(open(name, 0)["error"].is_null() && open(name, MIB)["error"].is_null());
        let refused = open(name, 2 * MIB);
        assert_eq!(refused["error"]["data"]["errno"], errno, "{refused}");
        // NBD has no error numbers for these limits, so clients receive EIO.
        let mut client = Raw::connect(&serve, name);
        assert_eq!(client.write(0, 2 * MIB, &[1; 4096]), EIO);
        assert_eq!(client.write(0, MIB, &[1; 4096]), 0);
        serve.text(&["zones", name, "reset"]);
        assert_eq!(client.write(0, 2 * MIB, &[1; 4096]), 0);
    }
    // An offset inside a zone selects this zone.
    assert_eq!(open("open", 512)["result"]["count"], 1);
    assert_eq!(zone(&serve, "open", 0).0, "EXP_OPEN");
}

#[test]
fn zone_conditions_are_set_by_attributes() {
    let serve = Serve::start(&[
        "n=null,size=16M,zoned=1,zone_size=1M,memory_backed=1,zone_nr_conv=1,zone_readonly=2M;3M,zone_offline=4M",
    ]);
    assert_eq!(serve.text(&["get", "n", "zone_readonly"]), "2M;3M\n");
    let mut client = Raw::connect(&serve, "n");
    assert_eq!((client.write(0, 2 * MIB, &[1; 4096]), client.read(2 * MIB, 4096)), (EIO, Ok(vec![0; 4096])));
    assert_eq!(client.read(4 * MIB, 4096), Err(EIO));
    // `set` ends the readonly condition of a zone that is listed again. The zone is then writable
    // and empty.
    assert_eq!(
        serve.text(&["set", "n", "zone_readonly=2M", "zone_offline=5M"]),
        "zone_readonly=3M\nzone_offline=4M;5M\n"
    );
    assert_eq!(client.write(0, 2 * MIB, &[1; 4096]), 0);
    let conventional = serve.refused(2, &["set", "n", "zone_readonly=0"]);
    assert_eq!(conventional, "n: zone_readonly=0: 0 is in a conventional zone");
    let behind = serve.refused(2, &["set", "n", "zone_offline=16M"]);
    assert_eq!(behind, "n: zone_offline=16M: 16M is beyond the end of the device");
    // A reset of the device restores the zone conditions that the attributes set.
    let connected = serve.refused(1, &["reset", "n", "--force"]);
    assert!(connected.contains("it is zoned, and its clients would not notice"), "{connected}");
    drop(client);
    // The server may notice the closed connection only after a moment.
    for _ in 0..500 {
        if serve.text(&["stat", "n"]).contains("(0 connected)") {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    serve.text(&["reset", "n"]);
    let conditions = [2, 3, 4, 5].map(|zone_at| zone(&serve, "n", zone_at * MIB).0);
    assert_eq!(conditions, ["READONLY", "READONLY", "OFFLINE", "EMPTY"]);
}

fn qemu_io(serve: &Serve, name: &str, line: &str) -> Command {
    let mut command = tool("qemu-io");
    command.args(["-f", "raw", "-c", line]).arg(uri(serve, name));
    command
}

#[test]
fn write_off_the_pointer_fails_and_changes_nothing() {
    let serve = Serve::start(&[
        "n=null,size=16M,zoned=1,zone_size=4M,zone_capacity=3M,memory_backed=1,blocksize=512",
    ]);
    ok(&mut qemu_io(&serve, "n", "write -P 0xab 4M 64k"));
    let message = fails(&mut qemu_io(&serve, "n", "write -P 0xcd 4M 64k"));
    assert!(message.contains("Input/output error"), "{message}");
    fails(&mut qemu_io(&serve, "n", "write -P 0xcd 4224k 64k"));
    ok(&mut qemu_io(&serve, "n", "read -P 0xab 4M 64k"));
    // Reads beyond the write pointer return bytes of 0xff, as in the kernel's `null_blk`.
    ok(&mut qemu_io(&serve, "n", "read -P 0xff 4160k 64k"));
    assert_eq!(zone(&serve, "n", 4 * MIB), ("IMP_OPEN".into(), 64 * KIB));
    let mut client = Raw::connect(&serve, "n");
    // A write beyond the zone capacity fails as a whole. A write that exactly fills the capacity
    // succeeds.
    let large = noise(3, 3 * MIB);
    assert_eq!(client.write(0, 4 * MIB + 64 * KIB, &large), EIO);
    assert_eq!(zone(&serve, "n", 4 * MIB).1, 64 * KIB);
    assert_eq!(client.write(0, 8 * MIB, &large), 0);
    assert_eq!(zone(&serve, "n", 8 * MIB), ("FULL".into(), 3 * MIB));
    assert!(client.read(8 * MIB, 3 << 20).unwrap() == large);
}

#[test]
fn writes_of_one_connection_keep_their_order_in_zone() {
    let dir = tempfile::tempdir().unwrap();
    let file = format!("f=file,path={}/disk,size=64M,zoned=1,zone_size=16M", dir.path().display());
    let serve = Serve::start(&[
        "n=null,size=64M,zoned=1,zone_size=16M,memory_backed=1",
        "slow=null,size=64M,zoned=1,zone_size=16M,memory_backed=1,completion_nsec=200000,mbps=2000",
        "late=ram,disksize=64M,zoned=1,zone_size=16M,faults=write delay=1ms chance=30%,seed=3",
        "power=ram,disksize=64M,zoned=1,zone_size=16M,power_cut=yes",
        &file,
    ]);
    for name in ["n", "slow", "late", "power", "f"] {
        let mut fio = tool("fio");
        fio.args([
            "--name=job",
            "--ioengine=nbd",
            "--thread",
            "--rw=write",
            "--iodepth=32",
            "--bs=64k",
            "--size=32M",
        ]);
        let fio = fio.arg(format!("--uri={}", uri(&serve, name))).current_dir(serve.dir.path());
        let printed = ok(fio.arg("--output-format=terse"));
        assert!(!printed.contains("error"), "{name}: {printed}");
        assert_eq!(zone(&serve, name, 0).0, "FULL", "{name}");

        // The server receives requests of these sizes by different code paths. All of the requests
        // are in flight at once.
        let mut client = Raw::connect(&serve, name);
        let (mut at, mut data) = (32 * MIB, Vec::new());
        let lengths = [4 * KIB, 300 * KIB, 4 * KIB, 2 * MIB, 64 * KIB, 255 * KIB - KIB * 3, MIB, 4 * KIB];
        for (seed, len) in (0..).zip(lengths) {
            let piece = noise(seed, len);
            client.send_write(at, &piece);
            at += len;
            data.extend(piece);
        }
        for _ in lengths {
            assert_eq!(client.reply().unwrap().1, 0, "{name}");
        }
        assert!(client.read(32 * MIB, u32::try_from(data.len()).unwrap()).unwrap() == data, "{name}");
        assert_eq!(zone(&serve, name, 32 * MIB).1, data.len() as u64);
    }
}

#[test]
fn zones_of_a_file_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let device = "f=file,path=disk,size=16M,zoned=1,zone_size=2M,zone_max_open=3";
    let serve = Serve::start_in(dir, &[device], true);
    let mut client = Raw::connect(&serve, "f");
    assert_eq!(client.write(0, 0, &noise(1, 2 * MIB)), 0);
    assert_eq!(client.write(0, 2 * MIB, &noise(2, MIB)), 0);
    assert_eq!(client.flush(), 0);
    // `zones` accepts offsets in sectors, as the report prints them.
    assert!(serve.text(&["zones", "f"]).lines().nth(2).unwrap().starts_with("  start: 0x000002000,"));
    serve.text(&["zones", "f", "finish", "--offset", "0x000002000", "--count", "1"]);
    let first = serve.text(&["zones", "f", "--offset", "4M", "--count", "1"]);
    assert_eq!(serve.text(&["zones", "f", "--offset", "4194816B", "--count", "1"]), first);
    drop(client);
    let dir = serve.end();
    assert!(dir.path().join("disk.zones").exists());

    let serve = Serve::start_in(dir, &[device], true);
    assert_eq!(zone(&serve, "f", 0), ("FULL".into(), 2 * MIB));
    // After a restart a zone that was open is closed, with the same write pointer.
    assert_eq!(zone(&serve, "f", 2 * MIB), ("CLOSED".into(), MIB));
    assert_eq!((zone(&serve, "f", 4 * MIB).0, zone(&serve, "f", 6 * MIB).0), ("FULL".into(), "EMPTY".into()));
    let mut client = Raw::connect(&serve, "f");
    assert!(client.read(2 * MIB, 1 << 20).unwrap() == noise(2, MIB));
    drop(client);
    let dir = serve.end();

    // Serving the file without its zones is refused, because writes would not update the zone
    // state. Read-only access is allowed.
    let bare = refused(dir.path(), 1, &["serve", "f=file,path=disk"]);
    let zones = dir.path().join("disk.zones").canonicalize().unwrap();
    let why = "contains its zone state, which writes would not update; give zoned=1, or readonly=yes, or remove that file";
    assert_eq!(bare, format!("f: {} {why}", zones.display()));
    let look = ["serve", "f=file,path=disk,readonly=yes", "--run", "true"];
    assert_eq!(finish(freestone(dir.path()).args(look)).0, 0);

    // The server refuses a zone size that differs from the zone state, and a file that is not a
    // zone state.
    let other = refused(dir.path(), 1, &["serve", "f=file,path=disk,zoned=1,zone_size=4M"]);
    assert!(other.starts_with("f: zone_state: "), "{other}");
    fs::write(dir.path().join("garbage"), noise(9, 8192)).unwrap();
    let serve = ["serve", "f=file,path=disk,zoned=1,zone_size=2M,zone_state=garbage"];
    let garbage = refused(dir.path(), 1, &serve);
    assert!(garbage.starts_with("f: zone_state: "), "{garbage}");
}

#[test]
fn zone_conditions_of_a_file_survive_a_restart() {
    let mut dir = tempfile::tempdir().unwrap();
    let device = "f=file,path=disk,size=8M,zoned=1,zone_size=2M,zone_readonly=2M,zone_offline=4M";
    for _ in 0..3 {
        let serve = Serve::start_in(dir, &[device], true);
        assert_eq!(
            (zone(&serve, "f", 2 * MIB).0, zone(&serve, "f", 4 * MIB).0),
            ("READONLY".into(), "OFFLINE".into())
        );
        dir = serve.end();
    }
}

/// Flushed data survives SIGKILL, and every zone has data up to its write pointer.
#[test]
fn killed_server_keeps_flushed_zone_data() {
    let mut dir = tempfile::tempdir().unwrap();
    let device = "f=file,path=disk,size=16M,zoned=1,zone_size=2M";
    let data = noise(7, 2 * MIB);
    for round in 0..6_u64 {
        let serve = Serve::start_in(dir, &[device], true);
        let at = round * 2 * MIB;
        let mut client = Raw::connect(&serve, "f");
        let flushed = (round * 96 + 4) * KIB;
        for piece in (0..flushed).step_by(4096) {
            let bytes = &data[usize::try_from(piece).unwrap()..][..4096];
            assert_eq!(client.write(0, at + piece, bytes), 0);
        }
        assert_eq!(client.flush(), 0);
        // The client writes more data without a flush. The last writes are in flight at SIGKILL.
        for piece in (flushed..flushed + 256 * KIB).step_by(4096) {
            client.send_write(at + piece, &data[usize::try_from(piece).unwrap()..][..4096]);
        }
        client.reply().unwrap();
        serve.signal(Signal::KILL);
        let (code, left) = serve.wait();
        assert_eq!(code, None);

        let serve = Serve::start_in(left, &[device], true);
        let (condition, pointer) = zone(&serve, "f", at);
        assert_eq!(condition, "CLOSED");
        assert!((flushed..=flushed + 256 * KIB).contains(&pointer), "{flushed} {pointer}");
        let disk = fs::File::open(serve.path("disk")).unwrap();
        let mut found = vec![0; usize::try_from(pointer).unwrap()];
        disk.read_exact_at(&mut found, at).unwrap();
        assert!(found == data[..found.len()], "round {round}");
        // The next write at the write pointer succeeds.
        let mut client = Raw::connect(&serve, "f");
        assert_eq!(client.write(0, at + pointer, &[5; 4096]), 0);
        drop(client);
        dir = serve.end();
    }
}

#[test]
fn counters_of_zones() {
    let serve = Serve::start(&["n=null,size=16M,zoned=1,zone_size=1M,zone_max_open=2"]);
    let mut client = Raw::connect(&serve, "n");
    for zone in 0..4 {
        assert_eq!(client.write(0, zone * MIB, &[1; 4096]), 0);
    }
    assert_eq!((stat(&serve, "n", "zones", "implicit_open"), stat(&serve, "n", "zones", "closed")), (2, 2));
    assert_eq!((stat(&serve, "n", "zones", "implicit_closes"), stat(&serve, "n", "ops", "writes")), (2, 4));
    let value: Value = serve.json(&["get", "n", "zone_max_open"]);
    assert_eq!(value, json!({ "zone_max_open": 2 }));
}
