//! Statistics of every device, and zram's `block_state` and `debug_stat` of RAM disks.

use serde_json::Deserializer;

use crate::harness::prelude::*;

#[test]
fn every_device_counts_requests() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    std::fs::write(&image, vec![1; 4 << 20]).unwrap();
    let qcow2 = dir.path().join("q");
    let (status, ..) = finish(
        std::process::Command::new(freestone_testkit::tools::find("qemu-img"))
            .args(["create", "-qf", "qcow2"])
            .arg(&qcow2)
            .arg("4M"),
    );
    assert_eq!(status, 0);
    let serve = Serve::start(&[
        "r=ram,disksize=4M",
        "n=null,size=4M",
        "m=null,size=4M,memory_backed=1,blocksize=512",
        &format!("f=file,path={}/file,size=4M", dir.path().display()),
        &format!("golden=file,path={},readonly=yes", image.display()),
        &format!("q=qcow2,path={}", qcow2.display()),
        "fork=fork,base=golden",
        "over=fork,base=q",
        "s=snapshot,origin=f",
        "rs=snapshot,origin=r",
        "faulty=ram,disksize=4M,faults=write error=EIO at=1M+4K,seed=1",
        "cut=ram,disksize=4M,power_cut=yes",
        "z=null,size=4M,memory_backed=1,zoned=1,zone_size=1M",
    ]);
    let names = ["r", "n", "m", "f", "golden", "q", "fork", "over", "s", "rs", "faulty", "cut", "z"];
    for name in names {
        let readonly = ["golden", "q", "s", "rs"].contains(&name);
        let mut client = Raw::connect(&serve, name);
        for n in 0..3 {
            client.read(n * 4096, 4096).unwrap();
        }
        client.read(0, 65536).unwrap();
        if !readonly {
            assert_eq!(client.write(0, 0, &[7; 8192]), 0, "{name}");
            assert_eq!(client.write(FUA, 8192, &[7; 4096]), 0, "{name}");
            // A zone must be written sequentially, and write zeroes would reset the zone, so zone `z` is omitted.
            if name != "z" {
                assert_eq!(client.zero(0, 16384), 0, "{name}");
            }
        }
        let io = serve.json(&["stat", name])["io"].clone();
        let of = |key: &str| io[key].as_u64().unwrap_or_else(|| panic!("{name}: no {key} in {io}"));
        // Forks and snapshots read their bases and origins too, so the read counters of these devices may be larger.
        let more = ["golden", "q", "f"].contains(&name);
        assert!(of("reads") == 4 || more && of("reads") >= 4, "{name}: {io}");
        assert!(of("read_bytes") == 3 * 4096 + 65536 || more, "{name}: {io}");
        let writes = if readonly { (0, 0) } else { (2, 12288) };
        assert_eq!((of("writes"), of("written_bytes")), writes, "{name}: {io}");
        let zeroes = if readonly || name == "z" { (0, 0) } else { (1, 16384) };
        assert_eq!((of("zeroes"), of("zeroed_bytes")), zeroes, "{name}: {io}");
        assert_eq!((of("discards"), of("discarded_bytes"), of("errors"), of("in_flight")), (0, 0, 0, 0));
        if !readonly && name != "n" {
            let mut client = Raw::connect(&serve, name);
            assert_eq!(client.flush(), 0);
            assert_eq!(stat(&serve, name, "io", "flushes"), 1, "{name}");
        }
    }
    // Errors of fault rules are counted in `io`, above all layers of the device, and not in `ops`.
    let mut client = Raw::connect(&serve, "faulty");
    assert_eq!(client.write(0, MIB, &[1; 4096]), EIO);
    assert_eq!(stat(&serve, "faulty", "io", "errors"), 1);
    assert_eq!(stat(&serve, "faulty", "ops", "errors"), 0);
    let text = serve.text(&["stat", "r"]);
    assert!(text.contains("  io\n    reads            4\n    read_bytes       77824 (76K)\n"), "{text}");
    let all = serve.json(&["stat"]);
    assert!(all["devices"].as_array().unwrap().iter().all(|device| device["io"].is_object()), "{all}");
}

#[test]
fn exports_count_separately_and_measure_latency() {
    let dir = tempfile::tempdir().unwrap();
    let serve = Serve::start(&["r=ram,disksize=4M", "slow=ram,disksize=4M,faults=read delay=20ms,seed=1"]);
    let other = format!("unix:{}/other", dir.path().display());
    serve.text(&["publish", "r", "--nbd", &other]);
    let (mut home, mut there) = (Raw::connect(&serve, "r"), Raw::connect_at(&dir.path().join("other"), "r"));
    for n in 0..2000 {
        home.read(n % 1000 * 4096, 4096).unwrap();
    }
    assert_eq!(there.write(0, 0, &[7; 8192]), 0);
    there.read(0, 8192).unwrap();
    let reply = serve.json(&["stat", "r"]);
    assert_eq!((&reply["io"]["reads"], &reply["io"]["writes"]), (&json!(2001), &json!(1)), "{reply}");
    let of = |address: &str| {
        let exports = reply["exports"].as_array().unwrap();
        exports.iter().find(|export| export["address"].as_str().unwrap().ends_with(address)).unwrap().clone()
    };
    let (at_home, at_other) = (of("/nbd"), of("/other"));
    assert_eq!((&at_home["io"]["reads"], &at_home["io"]["read_bytes"]), (&json!(2000), &json!(2000 * 4096)));
    assert_eq!((&at_home["io"]["writes"], &at_other["io"]["writes"]), (&json!(0), &json!(1)), "{reply}");
    assert_eq!((&at_other["io"]["reads"], &at_other["io"]["written_bytes"]), (&json!(1), &json!(8192)));
    // Only some of the requests that complete at once are measured. Each measured one counts for all requests since the
    // previous one.
    let latency = &reply["latency"]["read"];
    let requests = latency["requests"].as_u64().unwrap();
    assert!((2001 - 128..=2001).contains(&requests), "{latency}");
    let ns = |key: &str| latency[key].as_u64().unwrap();
    assert!(0 < ns("mean_ns") && ns("p50_ns") <= ns("p99_ns") && ns("p99_ns") <= ns("p999_ns"), "{latency}");
    assert_eq!(reply["latency"].get("discard"), None);
    // The counters of the device still include those of an unpublished export.
    drop(there);
    serve.text(&["unpublish", "r", "--force"]);
    assert_eq!((stat(&serve, "r", "io", "reads"), stat(&serve, "r", "io", "writes")), (2001, 1));

    // Every request that waits is measured.
    let mut slow = Raw::connect(&serve, "slow");
    for _ in 0..5 {
        slow.read(0, 4096).unwrap();
    }
    let reply = serve.json(&["stat", "slow"]);
    let read = &reply["latency"]["read"];
    assert_eq!(read["requests"], json!(5), "{reply}");
    let least = [&read["mean_ns"], &read["p50_ns"], &reply["exports"][0]["latency"]["read"]["p999_ns"]];
    assert!(least.iter().all(|ns| ns.as_u64().unwrap() >= 20_000_000), "{reply}");
    let text = serve.text(&["stat", "slow"]);
    assert!(text.contains("  latency\n    read  5 requests, mean 2"), "{text}");
}

#[test]
fn block_state_has_the_kernels_line_format() {
    let dir = tempfile::tempdir().unwrap();
    let serve = Serve::start(&[
        &format!(
            "r=ram,disksize=256M,recomp_algorithm=zstd,backing_dev={}/b,backing_size=16M,mem_limit=none",
            dir.path().display()
        ),
        "n=null,size=1M",
    ]);
    assert_eq!(serve.text(&["block-state", "r"]), "");
    let mut client = Raw::connect(&serve, "r");
    assert_eq!(client.write(0, 0, &[7; 4096]), 0);
    assert_eq!(client.write(0, 3 * 4096, &noise(1, 4096)), 0);
    assert_eq!(client.write(0, 5 * 4096, &noise(2, 4096)), 0);
    serve.text(&["writeback", "r", "page_index=5"]);
    serve.text(&["idle", "r", "all"]);
    let text = serve.text(&["block-state", "r"]);
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    let numbers: Vec<_> = lines.iter().map(|line| (line[0], line[2])).collect();
    assert_eq!(numbers, [("0", "s....."), ("3", "..hi.."), ("5", ".wh...")]);
    // Format of a line in the kernel: `%12zd %12lld.%06lu %c%c%c%c%c%c`
    assert!(text.lines().all(|line| line.len() == 12 + 1 + 12 + 1 + 6 + 1 + 6), "{text}");
    assert!(lines[0][1].parse::<f64>().unwrap() > 0.0 && lines[2][1] == "0.000000", "{text}");
    let json = serve.json(&["block-state", "r", "--offset", "8K", "--length", "8K"]);
    assert_eq!(
        (&json["pages"][0]["index"], &json["pages"][0]["flags"]),
        (&json!(3), &json!("..hi..")),
        "{json}"
    );
    assert_eq!((json["pages"].as_array().unwrap().len(), json.get("next")), (1, None), "{json}");

    // 10240 pages, which are more than the 8192 of one reply.
    for n in 0..40 {
        assert_eq!(client.write(0, 100 * MIB + n * MIB, &vec![n as u8 + 1; MIB as usize]), 0);
    }
    let text = serve.text(&["block-state", "r", "--offset", "100M"]);
    let numbers: Vec<u64> =
        text.lines().map(|line| line.split_whitespace().next().unwrap().parse().unwrap()).collect();
    assert!(numbers.iter().copied().eq(25600..25600 + 10240), "{} lines", numbers.len());
    let ranged = serve.text(&["block-state", "r", "--offset", "100M", "--length", "36M"]);
    assert_eq!(ranged.lines().count(), 9216);
    let parts = serve.text(&["block-state", "r", "--json"]);
    let parts: Vec<Value> = Deserializer::from_str(&parts).into_iter().map(Result::unwrap).collect();
    let rows = |part: &Value| part["pages"].as_array().unwrap().len();
    assert_eq!(parts.iter().map(rows).sum::<usize>(), 10240 + 3);
    assert!(parts.len() > 1 && parts.iter().all(|part| rows(part) <= 8192), "{} answers", parts.len());
    assert_eq!(parts.last().unwrap().get("next"), None);

    assert_eq!(serve.refused(1, &["block-state", "n"]), "n: only a ram device has a block-state");
    let behind = "r: block-state: offset=256M: behind the end of the device";
    assert_eq!(serve.refused(2, &["block-state", "r", "--offset", "256M"]), behind);
}

#[test]
fn algorithms_and_debug_stat_are_shown_as_in_sysfs() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("golden"), vec![0; 1 << 20]).unwrap();
    let at = dir.path().display();
    let serve = Serve::start(&[
        &format!("r=ram,disksize=64M,mem_limit=4M,backing_dev={at}/b,backing_size=128M"),
        &format!("golden=file,path={at}/golden,readonly=yes"),
        "f=fork,base=golden",
    ]);
    for (name, shown) in [("r", "[lz4] lz4hc lzo zstd store\n"), ("f", "[lz4] lz4hc lzo zstd store\n")] {
        assert_eq!(serve.text(&["get", name, "comp_algorithm"]), shown);
        assert_eq!(serve.json(&["get", name, "comp_algorithm"]), json!({ "comp_algorithm": "lz4" }));
        assert!(serve.text(&["get", name]).contains("[lz4] lz4hc"));
    }
    assert_eq!(serve.text(&["get", "r", "debug_stat"]), "version: 1\n0 0\n");
    let mut client = Raw::connect(&serve, "r");
    for n in 0..48 {
        assert_eq!(client.write(0, n * MIB, &noise(n, MIB)), 0);
    }
    assert!(stat(&serve, "r", "debug_stat", "writestall") > 0);
    assert_eq!(stat(&serve, "r", "debug_stat", "miss_free"), 0);
}

#[test]
fn statistics_have_kernel_columns() {
    let serve = Serve::start(&["ram0=ram,disksize=64M", "n0=null,size=1G"]);
    let stat = serve.json(&["stat", "ram0"]);
    let keys =
        |section: &str| stat[section].as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" ");
    assert_eq!(
        keys("mm_stat"),
        "orig_data_size compr_data_size mem_used_total mem_limit mem_used_max same_pages pages_compacted \
         huge_pages huge_pages_since"
    );
    assert_eq!(keys("io_stat"), "failed_reads failed_writes invalid_io notify_free");
    assert!(stat["memory"]["process_pss_bytes"].as_u64().unwrap() > 0);
    assert!(stat["memory"]["process_rss_bytes"].as_u64() >= stat["memory"]["process_pss_bytes"].as_u64());
    // The default memory limit is half of the machine's memory.
    assert!(stat["mm_stat"]["mem_limit"].as_u64().unwrap() > 0);

    let all = serve.json(&["stat"]);
    assert_eq!(all["devices"].as_array().unwrap().len(), 2);
    assert!(all["server"]["pid"].as_u64().unwrap() > 1);

    let text = serve.text(&["stat", "ram0"]);
    assert!(text.starts_with("ram0: ram 64M lz4\n  mm_stat\n    orig_data_size    0\n"), "{text}");
    assert!(serve.text(&["stat"]).contains("\nn0: null 1G"));
    assert_eq!(serve.refused(1, &["stat", "ram9"]), "ram9: no such device; ram0?");
}
