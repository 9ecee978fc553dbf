//! Null devices: the parameters of the kernel's `null_blk`, and their effect on clients.

use crate::harness::prelude::*;

fn export(serve: &Serve, name: &str) -> Value {
    json(tool("nbdinfo").arg("--json").arg(uri(serve, name)))["exports"][0].clone()
}

#[test]
fn export_shows_configured_sizes_and_flags() {
    let serve = Serve::start(&[
        "plain=null,size=64M,blocksize=512",
        "all=null,size=64M,memory_backed=1,discard=1,cache_size=1M,max_sectors=192,rotational=1",
        "unfua=null,size=64M,memory_backed=1,cache_size=1M,fua=0",
        "ro=null,size=64M,readonly=1",
        "packed=null,size=64M,memory_backed=1,comp_algorithm=zstd,blocksize=2K,discard=1",
    ]);
    let plain = export(&serve, "plain");
    assert_eq!((&plain["can_trim"], &plain["is_rotational"]), (&false.into(), &false.into()));
    assert_eq!((&plain["block_size_minimum"], &plain["block_size_maximum"]), (&1.into(), &(64 * MIB).into()));
    let all = export(&serve, "all");
    assert_eq!(
        (&all["can_trim"], &all["is_rotational"], &all["can_fua"]),
        (&true.into(), &true.into(), &true.into())
    );
    assert_eq!(all["block_size_maximum"], 96 * KIB);
    assert!(all["block_size_preferred"].as_u64() <= Some(96 * KIB));
    assert_eq!(export(&serve, "unfua")["can_fua"], false);
    assert_eq!(export(&serve, "ro")["is_read_only"], true);
    assert_eq!(export(&serve, "packed")["block_size_minimum"], 1);

    // A write with FUA fails with EINVAL (22) if the export does not offer FUA. A request larger
    // than the preferred size is served.
    let mut client = Raw::connect(&serve, "unfua");
    assert_eq!((client.write(FUA, 0, &[1; 4096]), client.write(0, 0, &[1; 4096])), (22, 0));
    let mut client = Raw::connect(&serve, "all");
    let data = noise(1, MIB);
    assert_eq!(client.write(FUA, 4096, &data), 0);
    assert!(client.read(4096, 1 << 20).unwrap() == data);

    let attrs = serve.json(&["get", "all"]);
    assert_eq!(
        (&attrs["memory_backed"], &attrs["cache_size"], &attrs["max_sectors"]),
        (&1.into(), &MIB.into(), &192.into())
    );
    assert_eq!(serve.text(&["get", "plain", "badblocks"]), "none\n");
    let fixed = serve.refused(1, &["set", "all", "rotational=0"]);
    assert_eq!(fixed, "all: rotational=0: fixed for the life of a null device");
}

#[test]
fn memory_backed_drive_keeps_data_until_reset() {
    let serve = Serve::start(&[
        "plain=null,size=16M,memory_backed=1,discard=1",
        "packed=null,size=16M,memory_backed=1,discard=1,comp_algorithm=lz4,mem_limit=none",
        "cached=null,size=16M,memory_backed=1,discard=1,cache_size=4M",
        "nothing=null,size=16M",
    ]);
    let io = |name: &str, commands: &[&str]| {
        let mut command = tool("qemu-io");
        command.args(["-f", "raw"]);
        for line in commands {
            command.args(["-c", line]);
        }
        command.arg(uri(&serve, name));
        command
    };
    for name in ["plain", "packed", "cached"] {
        let write = ["write -P 0xab 1M 1M", "write -z 1088k 64k", "discard 1536k 64k", "flush"];
        ok(&mut io(name, &write));
        let read = [
            "read -P 0 0 1M",
            "read -P 0xab 1M 64k",
            "read -P 0 1088k 64k",
            "read -P 0xab 1152k 384k",
            "read -P 0 1536k 64k",
        ];
        ok(&mut io(name, &read));
        assert_eq!(serve.text(&["reset", name, "--force"]), "");
        ok(&mut io(name, &["read -P 0 0 16M"]));
    }
    fails(&mut io("plain", &["read -P 0xab 1M 4k"]));
    ok(&mut io("nothing", &["write -P 0xab 0 1M", "read -P 0 0 1M"]));
    assert!(stat(&serve, "nothing", "ops", "writes") > 0);
    assert_eq!(stat(&serve, "nothing", "ops", "written_bytes"), MIB);
    assert_eq!(stat(&serve, "plain", "null_stat", "used_bytes"), 0);
    ok(&mut io("packed", &["write -P 7 0 1M", "flush"]));
    assert_eq!(stat(&serve, "packed", "mm_stat", "orig_data_size"), MIB);
    assert!(serve.text(&["stat", "plain"]).contains("\n  ops\n    reads "));
}

#[test]
fn bad_blocks_fail_until_removed() {
    let serve = Serve::start(&[
        "n=null,size=1M,blocksize=512,memory_backed=1,badblocks=+8-15",
        "partial=null,size=1M,blocksize=512,memory_backed=1,badblocks=+8-15,badblocks_partial_io=1",
        "once=null,size=1M,blocksize=512,badblocks=+8-15,badblocks_once=1",
    ]);
    let mut client = Raw::connect(&serve, "n");
    assert_eq!(client.write(0, 0, &[1; 4096]), 0);
    assert_eq!(client.write(0, 7 * 512, &[2; 1024]), EIO);
    // The failed write transferred no data: block 7 keeps its old content.
    assert_eq!(client.read(7 * 512, 512), Ok(vec![1; 512]));
    assert_eq!((client.read(15 * 512, 512), client.read(16 * 512, 512)), (Err(EIO), Ok(vec![0; 512])));
    assert_eq!(serve.text(&["set", "n", "badblocks=-8-9;+2000-2001"]), "badblocks=+10-15;+2000-2001\n");
    assert_eq!(client.write(0, 8 * 512, &[2; 1024]), 0);
    assert_eq!(client.read(2000 * 512, 512), Err(EIO));
    assert!(
        serve.refused(2, &["set", "n", "badblocks=8"]).starts_with("n: badblocks=8: must be +FIRST-LAST")
    );

    let mut client = Raw::connect(&serve, "partial");
    assert_eq!(client.write(0, 6 * 512, &[3; 2048]), EIO);
    assert_eq!(client.read(6 * 512, 1024), Ok(vec![3; 1024]));

    let mut client = Raw::connect(&serve, "once");
    assert_eq!((client.read(0, 8192), client.read(0, 8192)), (Err(EIO), Ok(vec![0; 8192])));
    assert_eq!(serve.text(&["get", "once", "badblocks"]), "none\n");
}

#[test]
fn completion_time_and_bandwidth_apply() {
    let serve = Serve::start(&["slow=null,size=1M,completion_nsec=20000000", "narrow=null,size=64M,mbps=16"]);
    let mut client = Raw::connect(&serve, "slow");
    let begun = Instant::now();
    for _ in 0..10 {
        client.read(0, 4096).unwrap();
    }
    assert!(begun.elapsed() >= Duration::from_millis(200), "{:?}", begun.elapsed());
    // Parallel requests overlap, so 50 of them take far less than 50 times the completion time.
    let begun = Instant::now();
    for n in 0..50 {
        client.send_write(n * 4096, &[0; 4096]);
    }
    for _ in 0..50 {
        assert_eq!(client.reply().unwrap().1, 0);
    }
    let took = begun.elapsed();
    assert!((Duration::from_millis(20)..Duration::from_millis(900)).contains(&took), "{took:?}");

    let mut client = Raw::connect(&serve, "narrow");
    let begun = Instant::now();
    // Requests of 1 MiB, larger than the kernel's `null_blk` allows at this bandwidth, are served.
    for n in 0..8 {
        assert_eq!(client.write(0, n << 20, &vec![0; 1 << 20]), 0);
    }
    let took = begun.elapsed();
    assert!((Duration::from_millis(300)..Duration::from_secs(5)).contains(&took), "{took:?}");
}
