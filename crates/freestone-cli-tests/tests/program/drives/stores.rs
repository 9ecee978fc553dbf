//! Snapshots over all kinds of origins and COW devices, and the effect of power cuts on them.

use freestone_testkit::effort;

use crate::harness::prelude::*;

const SIZE: u64 = 4 * MIB;
/// Size in bytes of each request that reads or writes a whole device.
const PIECE: u64 = MIB;

fn content(serve: &Serve, name: &str) -> Vec<u8> {
    let mut client = Raw::connect(serve, name);
    (0..client.size / PIECE).flat_map(|n| client.read(n * PIECE, PIECE as u32).unwrap()).collect()
}

fn fill(serve: &Serve, name: &str, data: &[u8]) {
    let mut client = Raw::connect(serve, name);
    for (n, piece) in data.chunks(PIECE as usize).enumerate() {
        assert_eq!(client.write(0, n as u64 * PIECE, piece), 0);
    }
}

#[test]
fn every_writable_device_is_origin_and_cow_device() {
    const SMALL: u64 = MIB;
    let dir = tempfile::tempdir().unwrap();
    for (name, size) in [("golden", SMALL), ("large", 4 * SMALL), ("disk", SMALL)] {
        fs::write(dir.path().join(name), noise(9, size)).unwrap();
    }
    let origins = [
        "nothing=null,size=1M",
        "memory=null,size=1M,memory_backed=1",
        "cached=null,size=1M,memory_backed=1,comp_algorithm=lz4,cache_size=1M",
        "ram=ram,disksize=1M",
        "faulty=ram,disksize=1M,faults=none,power_cut=yes",
        "fork=fork,base=golden",
        "file=file,path=disk,power_cut=yes,faults=none",
    ];
    let mut devices = vec!["golden=file,path=golden,readonly=yes", "large=file,path=large,readonly=yes"];
    devices.extend(origins);
    let serve = Serve::start_in(dir, &devices, true);
    let cows = [
        "c=null,size=4M",
        "c=null,size=4M,memory_backed=1,power_cut=yes",
        "c=ram,disksize=4M,faults=none",
        "c=fork,base=large",
        "c=file,path=cow,size=4M,power_cut=yes",
    ];
    for (round, origin) in origins.iter().enumerate() {
        let name = origin.split_once('=').unwrap().0;
        let keeps = name != "nothing";
        for (at, cow) in cows.iter().enumerate() {
            // Each round uses some of the kinds of exception store. Together all rounds combine
            // each kind of store with each kind of COW device.
            let stores = ["N", "P", "PO"].iter();
            let some = effort(
                stores.clone().skip((round + at) % 3).step_by(3),
                stores.skip((round + at) % 2).step_by(2),
            );
            for store in some {
                let what = format!("{origin} {cow} {store}");
                serve.text(&["create", &format!("{cow},publish=no")]);
                let store_key = format!("store={store}");
                let make = ["snapshot", name, "s", "cow=c", &store_key, "chunk_size=8K", "force=yes"];
                if *store != "N" && at == 0 {
                    let why = "s: cow=c: keeps nothing of what is written; use a transient store (N), or memory_backed=1";
                    assert_eq!(serve.refused(1, &make), why);
                    serve.text(&["remove", "c"]);
                    continue;
                }
                if at == 3 && *store != "N" {
                    // The COW device has the content of its base, which is not an exception store.
                    // With zeroes at the start it is accepted as an empty one.
                    publish(&serve, "c");
                    assert_eq!(Raw::connect(&serve, "c").write(0, 0, &[0; 8192]), 0);
                    serve.text(&["unpublish", "c", "--force"]);
                }
                let before = content(&serve, name);
                serve.text(&make);
                let seed = (round * 10 + at) as u64;
                let new = noise(seed, SMALL);
                fill(&serve, name, &new);
                publish(&serve, "s");
                assert!(content(&serve, name) == if keeps { new } else { vec![0; SMALL as usize] }, "{what}");
                // A snapshot on a COW device that keeps no data reads as zeroes.
                assert!(
                    content(&serve, "s") == if at == 0 { vec![0; SMALL as usize] } else { before.clone() },
                    "{what}"
                );
                let copied = &serve.json(&["stat", "s"])["cow_stat"]["copied_chunks"];
                assert_eq!(*copied, json!(SMALL / 8192), "{what}");
                if *store != "N" {
                    serve.text(&["merge", "s", "--into-origin", "--force"]);
                    assert!(
                        content(&serve, name) == if keeps { before } else { vec![0; SMALL as usize] },
                        "{what}"
                    );
                }
                serve.text(&["remove", "s", "c", "--force"]);
                let _ = fs::remove_file(serve.path("cow"));
            }
        }
        // Snapshots without a COW device: a RAM disk or fork moves its old pages to the snapshot,
        // other origins copy them to memory.
        let before = content(&serve, name);
        serve.text(&["snapshot", name, "s"]);
        fill(&serve, name, &noise(99, SMALL));
        publish(&serve, "s");
        assert!(content(&serve, "s") == before, "{origin}");
        let in_memory = matches!(name, "ram" | "fork");
        assert_eq!(serve.json(&["get", "s"]).get("store").is_none(), in_memory, "{origin}");
        serve.text(&["remove", "s", "--force"]);
    }
}

/// An origin, a COW device and a snapshot for tests of power cuts.
const DRIVES: [&str; 3] = [
    "o=null,size=4M,memory_backed=1,power_cut=yes",
    "c=ram,disksize=32M,power_cut=yes",
    "s=snapshot,origin=o,cow=c,store=P,chunk_size=4K",
];

#[test]
fn cow_device_has_no_other_users() {
    let serve = Serve::start(&DRIVES);
    // A COW device is not published by default.
    assert_eq!(serve.json(&["list", "c"])["devices"][0]["exports"], json!([]));
    assert_eq!(serve.json(&["list", "s"])["devices"][0]["status"], "16/65536 16");
    let beside = "c: holds the copies of s, so it cannot be published";
    assert_eq!(serve.refused(1, &["publish", "c", "--nbd", "unix:nbd"]), beside);
    let alone = "cannot be cut off alone: s stands on it; `freestone power-cut s` cuts its origin and COW device at one moment";
    for name in ["o", "c"] {
        for (args, done) in [(&["remove", name, "--force"][..], "removed"), (&["reset", name], "reset")] {
            let why = format!("{name}: cannot be {done}: s stands on it");
            assert_eq!(serve.refused(1, args), why);
        }
        assert_eq!(serve.refused(1, &["power-cut", name]), format!("{name}: {alone}"));
    }
    let copies = "x: origin=c: holds the copies of s";
    assert_eq!(serve.refused(1, &["snapshot", "c", "x"]), copies);
    assert_eq!(serve.refused(1, &["snapshot", "o", "x", "cow=c", "store=N"]), "x: cow=c: is in use by s");
    assert_eq!(
        serve.refused(1, &["power-cut", "s", "--at", "1"]),
        "s: power-cut: at and after are for a drive: its log, or what it is asked for"
    );
    // An exception store that is opened again by the same server is not reported as having missed
    // writes.
    let again = ["snapshot", "o", "s", "cow=c"];
    serve.text(&["remove", "s", "--force"]);
    serve.text(&again);
    assert_eq!(serve.json(&["stat", "s"])["missed_writes"], "no");
    for change in [&["power-cut", "o"][..], &["reset", "o"]] {
        serve.text(&["remove", "s", "--force"]);
        serve.text(change);
        if change[0] == "reset" {
            let why = serve.refused(1, &again);
            assert!(why.starts_with("s: cow=c: the origin was written or used without this store"), "{why}");
        } else {
            serve.text(&again);
        }
    }
    // A COW device with `publish=yes` is refused.
    let dir = tempfile::tempdir().unwrap();
    let c = "c=ram,disksize=32M,power_cut=yes,publish=yes";
    let (code, _, err) =
        finish(freestone(dir.path()).args(["serve", DRIVES[0], c, DRIVES[2], "--nbd", "unix:nbd"]));
    assert_eq!((code, sentence(&err).as_str()), (1, beside));
    // Power cuts need `power_cut=yes` on the origin or on the COW device.
    serve.text(&["create", "plain=ram,disksize=4M"]);
    serve.text(&["snapshot", "plain", "p"]);
    serve.text(&["snapshot", "plain", "q", "cow=./q.cow", "cow_size=8M", "force=yes"]);
    assert_eq!(
        serve.refused(1, &["power-cut", "q"]),
        "q: its power cannot be cut: create plain or its COW device with power_cut=yes"
    );
}

/// Writes at random offsets until the connection ends. Returns how many requests were completed.
fn write_until_cut(mut client: Raw, mut seed: u64) -> u64 {
    for answered in 0.. {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let len = [4096, 8192, 65536][(seed >> 60) as usize % 3];
        let offset = (seed >> 20) % (SIZE / 4096) * 4096;
        let data = vec![(seed >> 40) as u8 | 1; len.min(SIZE - offset) as usize];
        let flags = if (seed >> 50).is_multiple_of(7) { FUA } else { 0 };
        if client.try_write(flags, offset, &data).is_err() {
            return answered;
        }
        if (seed >> 55).is_multiple_of(31) && client.try_flush().is_err() {
            return answered;
        }
    }
    0
}

/// Cuts the power of the stack of `s` while clients write to the devices `writers`. Returns the
/// reply of `power-cut`.
fn cut_under_load(serve: &Serve, writers: &[&str], seed: u64) -> Value {
    let mut cut = Value::Null;
    thread::scope(|scope| {
        let at_work: Vec<_> = (writers.iter().zip(1..))
            .map(|(name, n)| (Raw::connect(serve, name), n))
            .map(|(client, n)| scope.spawn(move || write_until_cut(client, seed * 10 + n)))
            .collect();
        thread::sleep(Duration::from_millis(20 + seed * 7 % 40));
        cut = serve.json(&["power-cut", "s", "--seed", &seed.to_string()]);
        let answered: u64 = at_work.into_iter().map(|writer| writer.join().unwrap()).sum();
        assert!(answered > 0, "nobody had written");
    });
    cut
}

#[test]
fn snapshot_keeps_its_content_over_power_cuts() {
    let serve = Serve::start(&[DRIVES[0], "c=ram,disksize=32M,power_cut=yes,publish=no"]);
    let mut lost = 0;
    for seed in 0..effort(2, 6) {
        // Most of this content is still unflushed in the cache of the drive when the snapshot is
        // taken.
        let before = noise(seed, SIZE);
        fill(&serve, "o", &before);
        serve.text(&["snapshot", "o", "s", "cow=c", "chunk_size=4K", "readonly=yes"]);
        publish(&serve, "s");
        // No client flushed the content before this power cut.
        serve.text(&["power-cut", "s", "--seed", "1"]);
        assert!(content(&serve, "s") == before, "seed {seed}: at once");
        for round in [0, 1] {
            let cut = cut_under_load(&serve, &["o", "o", "o"], seed * 2 + round);
            assert_eq!(cut["seed"], json!(seed * 2 + round));
            assert_eq!((&cut["drives"][0]["name"], &cut["drives"][1]["name"]), (&json!("o"), &json!("c")));
            lost += cut["drives"][0]["lost_blocks"].as_u64().unwrap();
            assert_eq!(cut["snapshots"][0].get("lost"), None, "{cut}");
            assert_ne!(cut["snapshots"][0]["status"], "Invalid", "{cut}");
            assert!(content(&serve, "s") == before, "seed {seed}, round {round}");
        }
        // The snapshot also keeps its content while the origin is overwritten after the power cuts.
        fill(&serve, "o", &noise(seed + 100, SIZE));
        assert!(content(&serve, "s") == before && content(&serve, "o") == noise(seed + 100, SIZE));
        serve.text(&["remove", "s", "--force"]);
        serve.text(&["reset", "c"]);
    }
    assert!(lost > 0, "no unflushed write was lost");
}

#[test]
fn power_cut_keeps_flushed_writes_to_a_snapshot() {
    let serve = Serve::start(&DRIVES);
    for seed in 0..effort(3, 8) {
        let before = content(&serve, "o");
        let held = content(&serve, "s");
        // In one half of the range the snapshot has writes of its own, flushed and unflushed. The
        // other half must still show the earlier content of the origin.
        let mut client = Raw::connect(&serve, "s");
        let (flushed, later) = (vec![2 + seed as u8; 65536], vec![100 + seed as u8; 65536]);
        assert_eq!((client.write(0, 0, &flushed), client.flush(), client.write(0, 65536, &later)), (0, 0, 0));
        cut_under_load(&serve, &["o", "o"], seed);
        let after = content(&serve, "s");
        assert!(after[..65536] == flushed, "seed {seed}: what was flushed is lost");
        assert!(after[131_072..] == held[131_072..], "seed {seed}: the rest is another one");
        let pages = after[65536..131_072].chunks(512).zip(held[65536..131_072].chunks(512));
        let expected = |page: &[u8], old: &[u8]| page == old || page == &later[..512];
        assert!(pages.into_iter().all(|(page, old)| expected(page, old)), "seed {seed}");
        drop(before);
    }
}

#[test]
fn merge_continues_after_a_power_cut() {
    let dir = tempfile::tempdir().unwrap();
    let devices = [
        "o=file,path=disk,size=4M,power_cut=yes",
        "c=null,size=32M,memory_backed=1,power_cut=yes",
        "s=snapshot,origin=o,cow=c,chunk_size=4K,force=yes",
        // A second snapshot of the origin. The merge must keep its content.
        "t=snapshot,origin=o,readonly=yes",
    ];
    let serve = Serve::start_in(dir, &devices, true);
    for seed in 0..effort(2, 6) {
        let before = noise(seed, SIZE);
        if seed > 0 {
            fill(&serve, "o", &before);
            serve.text(&["snapshot", "o", "s", "cow=c", "chunk_size=4K", "force=yes"]);
            serve.text(&["snapshot", "o", "t"]);
            publish(&serve, "s");
        }
        let before = content(&serve, "o");
        fill(&serve, "o", &noise(seed + 50, SIZE));
        serve.text(&["merge", "s", "--into-origin", "--background", "--force"]);
        thread::sleep(Duration::from_millis(seed * 3));
        let cut = serve.json(&["power-cut", "s", "--seed", &seed.to_string()]);
        let names: Vec<_> =
            cut["snapshots"].as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["s", "t"], "{cut}");
        let why = "t: a transient store does not outlive the loss of power";
        assert_eq!(cut["snapshots"][1], json!({ "name": "t", "status": "Invalid", "lost": why }));
        assert!(content(&serve, "o") == before, "seed {seed}: {cut}");
        let end = Instant::now() + Duration::from_secs(60);
        while serve.json(&["stat", "s"])["merge"] == "running" {
            assert!(Instant::now() < end);
            thread::sleep(Duration::from_millis(5));
        }
        assert!(content(&serve, "o") == before, "seed {seed}");
        serve.text(&["remove", "s", "t", "--force"]);
        assert!(content(&serve, "o") == before, "seed {seed}");
        serve.text(&["reset", "c"]);
    }
}

#[test]
fn power_cut_during_a_copy_cuts_the_whole_stack() {
    let serve = Serve::start(&[DRIVES[0], "c=ram,disksize=32M,power_cut=yes,publish=no"]);
    let after = ["1write", "2writes", "3writes", "7writes", "40writes", "41writes", "300writes"];
    let on_cow = after.iter().chain(&["1flush", "2flushes", "5flushes"]).map(|after| ("c", *after));
    let on_origin = ["1write", "5writes", "60writes"].map(|after| ("o", after));
    for ((drive, after), seed) in on_cow.chain(on_origin).zip(0..) {
        let before = noise(seed, SIZE);
        fill(&serve, "o", &before);
        serve.text(&["snapshot", "o", "s", "cow=c", "chunk_size=4K", "readonly=yes"]);
        publish(&serve, "s");
        let clients = [(); 3].map(|()| Raw::connect(&serve, "o"));
        let output = serve.text(&["power-cut", drive, "--after", after, "--seed", &seed.to_string()]);
        assert!(output.starts_with(&format!("{drive}: the power goes off after ")), "{output}");
        thread::scope(|scope| {
            for (client, n) in clients.into_iter().zip(0..) {
                scope.spawn(move || write_until_cut(client, seed * 10 + n));
            }
        });
        // Connections end before the power cut of both drives is complete, so the test waits for
        // the counters.
        let end = Instant::now() + Duration::from_secs(60);
        while ["o", "c"].iter().any(|name| stat(&serve, name, "power", "cuts") <= seed) {
            assert!(Instant::now() < end, "{drive} after {after}: the power is still on");
            thread::sleep(Duration::from_millis(5));
        }
        for name in ["o", "c"] {
            let power = &serve.json(&["stat", name])["power"];
            assert_eq!(
                (&power["cuts"], &power["last_seed"]),
                (&json!(seed + 1), &json!(seed)),
                "{name}: {power}"
            );
        }
        assert!(content(&serve, "s") == before, "{drive} after {after}");
        assert_ne!(serve.json(&["get", "s"])["status"], "Invalid");
        fill(&serve, "o", &noise(seed + 100, SIZE));
        assert!(content(&serve, "s") == before, "{drive} after {after}");
        serve.text(&["remove", "s", "--force"]);
        serve.text(&["reset", "c"]);
    }
}
