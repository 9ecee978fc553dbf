//! Tests of all benchmarks except `compare`: they run and write plausible JSON. Speed is not
//! judged.

use std::path::Path;

use serde_json::Value;

use crate::{names, part, program, row, run_and_read_json, run_and_read_reports};

// The named zram device does not exist, so a test leaves the machine unchanged.
fn run(bench: &str, dir: &Path) -> Value {
    let json = dir.join(format!("{bench}.json"));
    let mut command = program();
    command.args([bench, "--quick", "--size", "32M", "--zram", "zram999", "--set", "fio,real", "--json"]);
    let value = run_and_read_json(command.arg(&json).arg("--data-dir").arg(dir.join("data")), &json);
    assert_eq!(value["reports"].as_array().unwrap().len(), 2, "one report a data set");
    for report in value["reports"].as_array().unwrap() {
        assert_eq!(report["name"], bench);
        assert_eq!(report["data_bytes"], 32 << 20);
        for row in report["rows"].as_array().unwrap() {
            let number = |key: &str| row[key].as_f64().unwrap();
            // A difference of two measurements may be negative.
            let difference = row["unit"] == "points" || row["unit"] == "micros";
            assert!(number("median").is_finite() && (difference || number("median") >= 0.0), "{row}");
            assert!(number("min") <= number("median") && number("median") <= number("max"), "{row}");
            assert_eq!(row["target"].is_null(), row["met"].is_null(), "{row}");
        }
    }
    value
}

#[test]
fn codec_compares_reads_and_rewrites() {
    let dir = tempfile::tempdir().unwrap();
    let value = run("codec", dir.path());
    for report in value["reports"].as_array().unwrap() {
        for what in ["random 4 KiB reads / bare codec", "random 4 KiB rewrites / bare codec"] {
            let row = row(report, what);
            assert_eq!(row["count"], 3);
            assert!(row["median"].as_f64().unwrap() > 0.0 && row["met"].is_boolean(), "{row}");
        }
    }
    assert!(value["command"].as_str().unwrap().contains("--quick"));
}

#[test]
#[ignore = "slow lane"]
fn threads_compares_one_to_eight() {
    let dir = tempfile::tempdir().unwrap();
    let value = run("threads", dir.path());
    for report in value["reports"].as_array().unwrap() {
        for load in ["reads", "rewrites", "mix"] {
            for threads in [1, 2, 4, 8] {
                row(report, &format!("{load}: {threads} threads / {threads} bare loops"));
            }
            assert!(row(report, &format!("{load}: scaling 1 to 2, engine / bare"))["met"].is_boolean());
        }
    }
}

#[test]
fn memory_overhead_and_released_share_are_plausible() {
    let dir = tempfile::tempdir().unwrap();
    let value = run("memory", dir.path());
    for report in value["reports"].as_array().unwrap() {
        for when in ["after the fill", "rewritten", "compacted"] {
            let overhead = row(report, &format!("overhead {when}"))["median"].as_f64().unwrap();
            // Sanity check: a disk uses at least its compressed bytes, and less than twice as much.
            assert!((1.0..2.0).contains(&overhead), "{when}: {overhead}");
        }
        let returned = row(report, "returned by discarding all")["median"].as_f64().unwrap();
        assert!((0.5..=1.0).contains(&returned), "{returned}");
    }
}

#[test]
#[ignore = "slow lane"]
fn writeback_runs_every_part() {
    // /tmp may be on a file system without direct I/O.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let value = run("writeback", dir.path());
    let median = |row: &Value| row["median"].as_f64().unwrap();
    for report in value["reports"].as_array().unwrap() {
        let packed = row(report, "spill: packed, the whole disk");
        let plain = row(report, "spill: plain, the whole disk");
        let old = row(report, "spill: old way, 1/1 of the disk");
        for spilled in [packed, plain, old] {
            assert_eq!(spilled["count"], 2);
            assert!(
                part(spilled, "pages") > 1000.0 && part(spilled, "pages") <= part(spilled, "of"),
                "{spilled}"
            );
            // The kernel's count must agree with the count of the disk itself.
            assert!(
                part(spilled, "by the kernel's count") >= 0.99 * part(spilled, "written MiB"),
                "{spilled}"
            );
        }
        let same = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} is not {b}");
        same(part(plain, "pages"), part(packed, "pages"));
        same(part(plain, "written / page"), 1.0);
        same(part(old, "written / page"), 1.0);
        assert!((0.1..0.9).contains(&part(packed, "written / page")), "{packed}");
        for what in [
            "spill: speed, packed / old way, a page",
            "spill: CPU a page, packed",
            "spill: bytes / s, packed / fio, written blocks",
            "spill: bytes / s, packed / fio, sparse file",
            "reads: random 4 KiB, depth 32, packed / fio",
            "reads: random 4 KiB, depth 32, plain / fio",
        ] {
            assert!(median(row(report, what)) > 0.0, "{what}");
        }
        let ours = median(row(report, "zipf: served from memory, ours"));
        let exact = median(row(report, "zipf: served from memory, exact LRU"));
        let less = median(row(report, "zipf: exact LRU less ours, percentage points"));
        assert!((1.0..100.0).contains(&ours) && (50.0..100.0).contains(&exact), "{ours} {exact}");
        assert!((exact - ours - less).abs() < 1e-6, "{exact} - {ours} is not {less}");
    }
    let real = &value["reports"][1];
    for what in ["by hand, zstd level 3", "automatic, zstd with a dictionary", "by hand, in groups"] {
        let gain = row(real, &format!("recompress: bytes, {what}"));
        assert!((0.2..1.0).contains(&median(gain)) && part(gain, "CPU s") > 0.0, "{gain}");
    }
    let left: Vec<_> =
        std::fs::read_dir(dir.path().join("data")).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(left.iter().all(|path| path.extension().is_some_and(|e| e == "tar")), "{left:?}");
}

#[test]
#[ignore = "slow lane"]
fn forks_runs_every_part() {
    // /tmp may be on a file system without direct I/O.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let data = dir.path().join("data");
    let small = ["--quick", "--size", "4M", "--pairs", "3", "--set", "fio", "--dirty", "4M", "--base", "32M"];
    let mut command = program();
    command.arg("forks").args(small).args(["--busy", "8", "--forks", "20", "--cycles", "100", "--data-dir"]);
    let reports = run_and_read_reports(command.arg(&data), &dir.path().join("forks.json"));
    assert_eq!(
        names(&reports),
        [
            "forks: a RAM disk with a live snapshot, first writes",
            "forks: a fork of a RAM snapshot, first writes",
            "forks: an origin on a device, first writes",
            "forks: a snapshot on a device, first writes",
            "forks: costs",
            "forks: over NBD",
            "forks: density",
            "forks: a thousand of one base",
        ]
    );
    for report in &reports {
        for row in report["rows"].as_array().unwrap() {
            // An unsteady ratio has no median and is not judged.
            assert_eq!(row["median"].is_null(), row["refused"].as_bool().unwrap(), "{row}");
            assert_eq!(row["target"].is_null(), row["met"].is_null(), "{row}");
            assert!(!(row["refused"] == true && row["met"].is_boolean()), "{row}");
        }
    }
    for (report, variants) in reports.iter().zip([5, 5, 2, 2]) {
        let speeds = report["rows"].as_array().unwrap().iter().filter(|row| row["unit"] == "kiops");
        assert!(speeds.clone().all(|row| row["median"].as_f64().unwrap() > 0.0 && row["count"] == 3));
        assert_eq!(speeds.count(), 4 * variants, "workers by variants");
    }
    let nbd = &reports[5];
    for server in ["fork", "null", "qemu-nbd", "nbdkit"] {
        for connections in ["1 connection", "4 connections"] {
            assert!(row(nbd, &format!("{connections}: {server}"))["median"].as_f64().unwrap() > 0.0);
        }
    }
    let density = &reports[6];
    assert!(part(row(density, "writing every page once"), "writes") >= 8192.0);
    let pool = row(density, "the family's pool at the end");
    assert!(part(pool, "blocks written to the spill file, MiB") > 0.0, "nothing was spilled: {pool}");
    let thousand = &reports[7];
    assert_eq!(row(thousand, "descriptors more after 100 cycles")["met"], true);
    let left: Vec<_> = std::fs::read_dir(data).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn zones_runs_every_part() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = program();
    command.args(["zones", "--quick", "--size", "16M", "--pairs", "3", "--slice-ms", "5"]);
    let reports = run_and_read_reports(&mut command, &dir.path().join("zones.json"));
    assert_eq!(
        names(&reports),
        [
            "zones: the floor",
            "zones: memory backing",
            "zones: a lock a zone, no backing",
            "zones: a lock a zone, memory backing",
        ]
    );
    for what in ["writes", "reads, buffer untouched", "reads"] {
        assert_eq!(row(&reports[0], what)["count"], 3);
    }
    for what in ["128 KiB reads / memcpy", "128 KiB writes / memcpy", "4 KiB reads / memcpy"] {
        assert!(part(row(&reports[1], what), "memcpy") > 0.0);
    }
    for report in &reports[2..] {
        for load in ["random reads", "writes", "random reads, limits", "writes, limits"] {
            for threads in ["1 thread", "2 threads", "4 threads", "8 threads"] {
                let speed = row(report, &format!("{load}: {threads}"));
                assert!(speed["median"].as_f64().unwrap() > 0.0, "{speed}");
                let ratio = row(report, &format!("{load}: {threads}, a lock a zone / one lock"));
                assert!(part(ratio, "one lock") > 0.0, "{ratio}");
            }
            row(report, &format!("{load}: 2 threads, a lock a zone / apart"));
        }
    }
}

#[test]
#[ignore = "slow lane"]
fn restarts_runs_every_part() {
    // /tmp may be in memory, where durable writes take no time.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let data = dir.path().join("data");
    let mut command = program();
    command.args(["restarts", "--quick", "--size", "32M", "--set", "fio", "--forks", "30"]);
    let freestone = Path::new(command.get_program()).with_file_name("freestone");
    if freestone.exists() {
        command.arg("--freestone").arg(freestone);
    }
    let reports =
        run_and_read_reports(command.arg("--data-dir").arg(&data), &dir.path().join("restarts.json"));
    assert_eq!(
        names(&reports),
        [
            "restarts: verbs",
            "restarts: many forks",
            "restarts: restore",
            "restarts: increments",
            "restarts: writes beside saves",
        ]
    );
    let median = |report: &Value, what: &str| row(report, what)["median"].as_f64().unwrap();
    for what in ["a fork with an export, with a state", "a bare append and fdatasync"] {
        assert!(median(&reports[0], what) > 0.0, "{what}");
    }
    assert!(median(&reports[1], "start with 30 forks") > 0.0);
    for cache in ["cold", "warm"] {
        assert!(median(&reports[2], &format!("{cache}: until the first read is answered")) > 0.0);
        let loaded = row(&reports[2], &format!("{cache}: until all is in memory / plain reads"));
        assert!(part(loaded, "s") > 0.0 && part(loaded, "plain MiB/s") > 0.0, "{loaded}");
    }
    let increment = row(&reports[3], "increment / compressed bytes of the changed pages");
    // Sanity check: an increment is larger than its pages and much smaller than the disk.
    let over = increment["median"].as_f64().unwrap();
    assert!((1.0..4.0).contains(&over), "{increment}");
    // Saves may be too short to be noticed, so only the presence of the row is checked.
    row(&reports[4], "writes while a save runs / before it");
    let left: Vec<_> = std::fs::read_dir(data).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
#[ignore = "slow lane"]
fn clients_runs_every_part() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = program();
    command.args(["clients", "--quick"]);
    let freestone = Path::new(command.get_program()).with_file_name("freestone");
    if freestone.exists() {
        command.arg("--freestone").arg(freestone);
    }
    let data = dir.path().join("data");
    let reports =
        run_and_read_reports(command.arg("--data-dir").arg(&data), &dir.path().join("clients.json"));
    assert_eq!(names(&reports), ["clients: connects", "clients: a storm of connects", "clients: stalled"]);
    let median = |report: &Value, what: &str| row(report, what)["median"].as_f64().unwrap();
    assert!(median(&reports[0], "CPU a connect") > 0.0);
    for side in ["alone", "beside connects", "beside busy CPUs"] {
        assert!(median(&reports[1], &format!("99th percentile, {side}")) > 0.0, "{side}");
    }
    assert!(median(&reports[1], "connects a second") > 0.0);
    for load in ["4 KiB reads", "128 KiB reads"] {
        for others in ["a slow reader", "one that never reads", "64 that never read"] {
            // The measured clients make progress even though the others occupy the server's memory.
            let ratio = row(&reports[2], &format!("{load} beside {others} / beside nobody"));
            assert!(ratio["median"].as_f64().unwrap() > 0.0, "{ratio}");
        }
    }
    let left: Vec<_> = std::fs::read_dir(data).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn images_runs_cached_disk_and_push_parts() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut command = program();
    command.args(["images", "--quick", "--part", "cached,disk,push", "--size", "32M", "--set", "fio"]);
    command.arg("--data-dir").arg(dir.path().join("data"));
    let reports = run_and_read_reports(&mut command, &dir.path().join("images.json"));
    assert_eq!(names(&reports), ["images: cached", "images: from the disk cache", "images: push"]);
    for what in ["4 KiB at random: image / file", "128 KiB at random: image / file"] {
        assert!(part(row(&reports[0], what), "image ns") > 0.0);
    }
    let over_nbd = row(&reports[0], "4 KiB at random over NBD: file / image");
    assert!(part(over_nbd, "image reads/s") > 0.0, "{over_nbd}");
    for threads in ["1 thread", "16 threads"] {
        let of_disk = row(&reports[1], &format!("4 KiB at random, {threads}: reads a second, image / file"));
        assert!(part(of_disk, "image reads/s") > 0.0, "{of_disk}");
    }
}

/// Counts the requests of fleets of several sizes to an object store, and compares the counts with
/// the model.
#[test]
#[ignore = "slow lane"]
fn images_fleet_requests_match_model() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let data = dir.path().join("data");
    let mut command = program();
    command.args(["images", "--quick", "--part", "boot,fleet", "--size", "32M", "--set", "fio"]);
    let freestone = Path::new(command.get_program()).with_file_name("freestone");
    if freestone.exists() {
        command.arg("--freestone").arg(freestone);
    }
    let reports = run_and_read_reports(command.arg("--data-dir").arg(&data), &dir.path().join("images.json"));
    assert_eq!(
        names(&reports),
        ["images: boot", "images: fleet", "images: fleets and the model", "images: what 1000 hosts ask"]
    );
    for trace in ["its trace known", "no trace"] {
        let boot =
            row(&reports[0], &format!("with the guest's pauses: nothing cached, {trace} / local file"));
        assert!(part(boot, "s") > 0.0 && part(boot, "local s") > 0.0, "{boot}");
        let most = row(&reports[1], &format!("{trace}: the most that one chunk left the store"));
        assert!(most["median"] == 1.0 && most["met"] == true, "{most}");
        let off = row(&reports[1], &format!("{trace}: requests that the model has not"));
        assert_eq!(off["met"], true, "{off}");
        let requests = row(&reports[1], &format!("{trace}: requests"));
        assert_eq!((part(requests, "tags"), part(requests, "maps")), (3.0, 1.0), "{requests}");
        let bytes = row(&reports[1], &format!("{trace}: bytes that came / chunks that were read"));
        // The image's metadata is transferred too, so the ratio is above 1.
        assert!(bytes["median"].as_f64().unwrap() > 1.0 && bytes["met"] == true, "{bytes}");
    }
    let write_baseline = reports[2]["rows"].as_array().unwrap();
    assert!(write_baseline.iter().all(|row| row["met"] == true), "{write_baseline:#?}");
    let (alone, two) = ("1 host, 1 server, 1 fork", "2 hosts, 2 servers, 2 forks");
    let of = |fleet: &str, start: &str| {
        row(&reports[2], &format!("{fleet}: {start}, trace known: requests that the model has not")).clone()
    };
    let (alone, two) = (of(alone, "nothing cached"), of(two, "nothing cached"));
    for (kind, times) in [("chunks", 2.0), ("maps", 2.0), ("manifests", 2.0), ("tags", 4.0), ("traces", 4.0)]
    {
        let (alone, two) = (part(&alone, kind), part(&two, kind));
        assert!(alone > 0.0 && (two - times * alone).abs() < 0.1, "{kind}: {alone} and {two}");
    }
    let left: Vec<_> = std::fs::read_dir(data).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn callgrind_loop_runs_without_valgrind() {
    for request in ["read", "write"] {
        for content in ["compressible", "same"] {
            for disk in [None, Some("--backed"), Some("--fork")] {
                let loops = ["instructions-loop", request, content, "100"];
                let out = program().args(loops).args(disk).output().unwrap();
                assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
            }
        }
    }
    let out = program().args(["instructions-loop", "read", "huge", "100"]).output().unwrap();
    assert!(!out.status.success());
}

#[test]
#[ignore = "slow lane"]
fn gate_fails_only_on_a_rise() {
    let dir = tempfile::tempdir().unwrap();
    let baseline = dir.path().join("baseline.json");
    let gate = || {
        let mut command = program();
        command.args(["gate", "--path", "null-write,nbd-read", "--baseline"]).arg(&baseline);
        let out = command.arg("--json").arg(dir.path().join("gate.json")).output().unwrap();
        (out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    let (ok, stderr) = gate();
    assert!(!ok && stderr.contains("--accept"), "{stderr}");
    let write_baseline = |null: u32, nbd: u32| {
        let text = format!(r#"{{"build":"another","paths":{{"null-write":{null},"nbd-read":{nbd}}}}}"#);
        std::fs::write(&baseline, text).unwrap();
    };
    // No request executes as many instructions as the first baseline, or as few as the second.
    write_baseline(1_000_000, 1_000_000);
    let (ok, stderr) = gate();
    assert!(ok, "{stderr}");
    write_baseline(1_000_000, 10);
    let (ok, stderr) = gate();
    assert!(!ok && stderr.contains("nbd-read rose") && !stderr.contains("null-write rose"), "{stderr}");
}

#[test]
fn missing_tool_is_named_in_error() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (bench, tool) in
        [(&["writeback", "--quick", "--set", "fio"][..], "fio"), (&["instructions"], "valgrind")]
    {
        let mut command = program();
        let out = command.args(bench).arg("--data-dir").arg(dir.path()).env("PATH", "").output().unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && stderr.contains(tool), "{stderr}");
    }
}

#[test]
fn invalid_options_are_rejected() {
    for bad in [
        &["codec", "--size", "32"][..],
        &["codec", "--size", "1T"],
        &["codec", "--pairs", "0"],
        &["zram", "--zram", "../x"],
        &["writeback", "--part", "spil"],
        &["codec", "--against", "x"],
        &["forks", "--part", "table"],
        &["forks", "--store", "X"],
        &["forks", "--busy", "0"],
        &["zones", "--part", "zone"],
        &["restarts", "--part", "verb"],
        &["restarts", "--forks", "0"],
        &["images", "--part", "fleets"],
        &["images", "--bucket", "b"],
        &["images", "--part", "fleet", "--freestone", "no/such/program"],
        &["density", "--part", "set"],
        &["density", "--set", "ubuntu"],
        &["compare", "--peers", "debian11"],
        &["compare", "--group", "disk"],
        &["compare", "--part", "server", "--freestone", "no/such/program", "--peers", "installed"],
    ] {
        let out = program().args(bad).output().unwrap();
        assert!(!out.status.success(), "{bad:?} was taken");
        assert!(!out.stderr.is_empty());
    }
    let absent = program().args(["zram", "--quick", "--zram", "zram999", "--set", "fio"]).output().unwrap();
    assert!(!absent.status.success());
    assert!(String::from_utf8_lossy(&absent.stderr).contains("zram999"));
}
